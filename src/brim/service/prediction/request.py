"""One request for a prediction, from its first byte to its answer.

    async with PredictionRequest(request, here, "segment") as call:
        (file,), form = await call.read_form(SegmentForm)   # admitted, then read in time
        answer = await call.predict(file)                   # by the model that the form names
        return call.respond(answer)

The body is read before anything is sent to a predictor: a slow client holds a few bytes here and no place in a queue.
Files are written to shared memory as they arrive, in which they also go to a predictor. Leaving the block frees them
and counts the request in the metrics, whatever happened.
"""

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self, TypeVar

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from brim.config import Doc, Range, Setting, Unit, check, read, settings
from brim.errors import (
    BrimError,
    CheckpointError,
    ConfigError,
    DeadlinePassed,
    DeviceError,
    NotFound,
    OutOfMemory,
    Overloaded,
    StorageError,
    TooLarge,
    TooMany,
    Unavailable,
    printable,
)
from brim.jobs.store import ModelKind, ModelRow
from brim.service.api.body import (
    BodyTooLarge,
    Multipart,
    boundary_of,
    check_type,
    parse,
    text_of,
    unless_gone,
)
from brim.service.api.errors import phrase, retry_after, send_problem, status_of
from brim.service.prediction.channel import Body, PredictionAnswer, SharedBytes
from brim.service.prediction.client import OFF, as_message

if TYPE_CHECKING:
    from brim.service.api.context import Context

DEADLINE: Final = "Brim-Deadline-Ms"
_DEADLINE_HEADER: Final = DEADLINE.lower().encode()
MAX_DEADLINE_MS: Final = 600_000
MODEL_PATTERN: Final = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?$"
MAX_NAME: Final = 200  # characters of a file's name
MAX_TEXT: Final = 1000  # bytes of a field
STAGES: Final = ("wait", "decode", "forward", "finish")
SILENCE_S: Final = 30.0  # a client that sends nothing for so long is given up
SLOW_S: Final = 1.0  # if the client was silent for so long at its deadline, the client is at fault
FULL_RETRY_S: Final = 1.0
_GONE: Final = (ClientDisconnect, asyncio.CancelledError)
_FAMILIES: Final[tuple[tuple[Any, str], ...]] = (
    (_GONE, "client_gone"), (Overloaded, "overloaded"), (DeadlinePassed, "deadline"), (Unavailable, "unavailable"),
    (NotFound, "unknown_model"),
)  # fmt: skip
_REASONS: Final = {
    404: "unknown_model", 408: "slow_client", 413: "too_large", 415: "type", 429: "too_many", 500: "error",
}  # fmt: skip
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WORDS: Final = {"true": True, "false": False}  # in any case: Python writes True


@dataclass(frozen=True, kw_only=True)  # no slots: a base beside RequestConfig
class PredictForm:
    """What every prediction request may say."""

    model: Annotated[
        str,
        Doc("Model as GET /api/models lists it, or a finished run's id; may be left out if there is only one."),
    ] = ""
    deadline_ms: Annotated[
        int,
        Range(1, MAX_DEADLINE_MS),
        Unit("ms"),
        Doc(
            "Time from the request's first byte; also the header Brim-Deadline-Ms, by which a request that cannot be "
            "answered in time is rejected before its body is read."
        ),
    ] = MAX_DEADLINE_MS  # or less by the header, or as the service is set

    def __post_init__(self) -> None:
        check(self)
        if not re.fullmatch(MODEL_PATTERN, self.model):
            text = 'model must be 1 to 100 letters, digits, . _ or -; "GET /api/models" lists them'
            raise ConfigError(text, field="model", code="unknown_choice")


_Form = TypeVar("_Form", bound=PredictForm)


class File(NamedTuple):
    """One file of a form."""

    name: str
    data: Body


class FormReader(Multipart):
    """Writes the files of a body to shared memory and reads its fields, piece by piece, in any order."""

    def __init__(
        self, boundary: bytes, fields: Mapping[str, Setting], files: tuple[str, ...], max_files: int, max_bytes: int
    ) -> None:
        super().__init__(boundary)
        self.files: list[File] = []
        self.values: dict[str, Any] = {}
        self._fields, self._file_fields, self._max_files, self._max_bytes = fields, files, max_files, max_bytes
        self._field, self._text = "", bytearray()
        self._file: SharedBytes | None = None

    def finish(self) -> None:
        super().finish()
        if not self.files:
            name = self._file_fields[0]
            raise ConfigError(f"{name} is missing; send one as multipart/form-data", field=name)

    def open(self, field: str, name: str | None) -> None:
        self._field, self._text = field, bytearray()
        if field in self._file_fields:
            if name is None:
                raise ConfigError(f"{field} is a text; send a file, with a filename", field=field)
            if len(self.files) >= self._max_files == 1:
                raise ConfigError(f'{field} is given twice; send many to "POST /api/batch-segment"', field=field)
            if len(self.files) >= self._max_files:
                raise TooLarge(f"{field}: more than {self._max_files} files at once; send them in several requests")
            self._file = SharedBytes()
            self.files.append(File(printable(name, MAX_NAME) or "the file", self._file))
        elif field in self.values:
            raise ConfigError(f"{field} is given twice; give it once", field=field)
        elif field not in self._fields:
            known, shown = ", ".join((*self._file_fields, *self._fields)), printable(field, 60)
            raise ConfigError(f"{shown} is unknown; known: {known}", field=shown)

    def write(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            if self._file.num_bytes + end - start > self._max_bytes:
                text = f"{self._field} is larger than {self._max_bytes} bytes, the most that is accepted"
                raise TooLarge(f"{text}; send a smaller one")
            self._file.append(memoryview(data)[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > MAX_TEXT:
            text = f"{self._field} is larger than {MAX_TEXT} bytes, the most that is accepted"
            raise ConfigError(text, field=self._field)

    def end(self) -> None:
        if self._file is not None:
            self._file.seal()
            self._file = None
        else:
            self.values[self._field] = form_value(self._fields[self._field], text_of(self._text))


def form_value(setting: Setting, text: str) -> Any:
    """A field's text as JSON would have it; what fits no type of the setting stays text, which is then rejected."""
    if setting.types == (bool,):
        return _WORDS.get(text.lower(), text)
    if (int in setting.types or float in setting.types) and len(text) < 32 and _NUMBER.fullmatch(text):
        return int(text) if text.isdigit() else float(text)
    return text


class TooSlow(HTTPException):
    """A body that does not arrive; becomes 408."""

    def __init__(self, detail: str) -> None:
        super().__init__(408, detail, {"Connection": "close"})


class Admission:
    """How many prediction requests and body bytes one API process has in progress, and what answering costs it."""

    # Predictors keep back the 75th percentile of what comes after a forward. With that of the API on top it would be
    # the 83rd of both, and one request in five was rejected that would have been in time.
    _WINDOW, _QUANTILE, _MOST = 32, 0.6, 0.25

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self.num_requests = 0
        self.held_bytes = 0
        self._overheads_s: deque[float] = deque(maxlen=self._WINDOW)
        self._typical_s = 0.0

    def enter(self) -> None:
        if self.num_requests >= self._max_requests:
            raise TooMany(f"{self.num_requests} prediction requests are in progress, the most at once; try again")
        self.num_requests += 1

    def leave(self) -> None:
        self.num_requests -= 1

    def hold(self, num_bytes: int) -> None:
        """Count bytes of a body until its request has ended."""
        self.held_bytes += num_bytes
        if self.held_bytes > self._max_bytes:
            text = f"the requests in progress have {self._max_bytes} bytes, the most at once; try again soon"
            raise Overloaded(text, FULL_RETRY_S)

    def note_overhead(self, seconds: float) -> None:
        """What an answer took besides the predictor's part: both ways, and its text."""
        self._overheads_s.append(max(0.0, seconds))
        self._typical_s = sorted(self._overheads_s)[int(self._QUANTILE * len(self._overheads_s))]

    def predictor_deadline_s(self, deadline_s: float, now_s: float) -> float:
        """The deadline for a predictor, so that the answer is sent by the request's own."""
        return deadline_s - min(self._typical_s, self._MOST * max(0.0, deadline_s - now_s))


class EarlyRefusal:
    """Rejects predictions that no model could make in time before the framework sees them.

    Under three times the load two of three requests are such; what their routes would cost is what others wait for.
    """

    def __init__(self, app: ASGIApp, here: "Context", kinds: Mapping[str, ModelKind], routes: Sequence[Any]) -> None:
        """kinds are those of the models that answer at a path."""
        self._app, self._here = app, here
        self._routes = {route.path: (route, kinds[route.path]) for route in routes if route.path in kinds}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        late = None if served is None else await self._late(scope, served[1])
        if served is None or late is None:
            return await self._app(scope, receive, send)
        scope["route"] = served[0]
        self._here.metrics.predicted("", "503")
        self._here.metrics.rejected(reason_of(late))
        headers = [(name.lower().encode(), value.encode()) for name, value in retry_after(late).items()]
        return await send_problem(send, 503, phrase(late), headers)

    async def _late(self, scope: Scope, kind: ModelKind) -> Overloaded | None:
        given = next((value for name, value in scope["headers"] if name == _DEADLINE_HEADER), b"")
        if not given.isdigit() or not 1 <= int(given[:10]) <= MAX_DEADLINE_MS or not self._here.predictions.is_on:
            return None  # the route says what is wrong
        try:
            most = self._here.settings.max_predict_deadline_ms
            return await _too_late(self._here, kind, min(int(given), most) / 1e3)
        except BrimError:
            return None


async def _too_late(here: "Context", kind: ModelKind, within_s: float) -> Overloaded | None:
    """The error if no model of the kind would answer within this time."""
    try:
        names = await here.models.of_kind(kind)
    except NotFound:
        return None  # the form may name a run
    wait_s = min(here.predictions.estimate(name, within_s) for name in names)
    if wait_s <= within_s:
        return None
    text = f"an answer would take about {1e3 * wait_s:.0f} ms, longer than the request allows; try again later"
    return Overloaded(text, wait_s - within_s)


class PredictionRequest:
    """A request on its way; see the module."""

    def __init__(self, request: Request, here: "Context", kind: ModelKind) -> None:
        self._request, self._here, self._kind = request, here, kind
        self._began_s = self._sent_s = time.monotonic()
        self._deadline_s = math.inf
        self._model: ModelRow | None = None
        self._files: list[File] = []
        self._held_bytes = 0
        self._is_admitted = self._is_read = False
        self._watching = AsyncExitStack()

    @property
    def model_name(self) -> str:
        return "" if self._model is None else self._model.name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, failure: BaseException | None, trace: Any) -> None:
        for file in self._files:
            if isinstance(file.data, SharedBytes):
                file.data.close()
        self._here.admission.held_bytes -= self._held_bytes
        if self._is_admitted:
            self._here.admission.leave()
        try:
            await self._watching.__aexit__(kind, failure, trace)
        except ClientDisconnect as gone:
            failure = gone
            raise
        finally:
            self._count(failure)

    # Reading

    async def read_form(
        self, kind: type[_Form], *, files: tuple[str, ...] = ("file",), max_files: int = 1, **fixed: Any
    ) -> tuple[list[File], _Form]:
        """Files and fields of the multipart body; clients cannot set the fields that are fixed."""
        await self._admit()
        fields = {name: setting for name, setting in settings(kind).items() if name not in fixed}
        boundary = boundary_of(self._request.headers.get("content-type", ""))
        reader = FormReader(boundary, fields, files, max_files, self._here.settings.max_predict_bytes)
        self._files = reader.files
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                reader.feed(piece)
        reader.finish()
        form = read(kind, {**reader.values, **fixed}, "")
        await self._begin(form)
        return reader.files, form

    async def read_json(self, kind: type[_Form]) -> _Form:
        await self._admit()
        check_type(self._request)
        body = parse(await self._small_body())
        if not isinstance(body, dict):
            field = next(name for name, setting in settings(kind).items() if setting.required)
            raise ConfigError(f"the body must be a JSON object with {field}", field=field)
        form = read(kind, body, "")
        await self._begin(form)
        return form

    async def _small_body(self) -> bytes:
        """The body, of at most the bytes of JSON: the address may take more of another type."""
        limit, body = self._here.settings.max_body_bytes, bytearray()
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > limit:
                    raise BodyTooLarge(limit)
        return bytes(body)

    async def _admit(self) -> None:
        """Reject a request before its body is read if no model of the kind could answer in time."""
        here = self._here
        here.admission.enter()
        self._is_admitted = True
        header = self._request.headers.get(DEADLINE)
        deadline_ms = here.settings.predict_deadline_ms
        if header is not None:
            deadline_ms = int(header) if header.isascii() and header.isdigit() and len(header) <= 9 else 0
            if not 1 <= deadline_ms <= MAX_DEADLINE_MS:
                text = f"{DEADLINE}={printable(header, 60)} must be a whole number from 1 to {MAX_DEADLINE_MS}"
                raise ConfigError(text, field=DEADLINE)
        deadline_ms = min(deadline_ms, here.settings.max_predict_deadline_ms)
        self._deadline_s = self._began_s + deadline_ms / 1e3
        if not here.predictions.is_on:
            raise Unavailable(OFF)
        if (late := await _too_late(here, self._kind, deadline_ms / 1e3)) is not None:
            raise late

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives, until its end."""
        now_s = asyncio.get_running_loop().time
        heard_s = now_s()
        try:
            while not self._is_read:
                async with asyncio.timeout_at(heard_s + min(SILENCE_S, self._deadline_s - time.monotonic())):
                    message = await self._request.receive()
                heard_s = now_s()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                piece: bytes = message.get("body", b"")
                self._is_read = not message.get("more_body", False)
                self._held_bytes += len(piece)
                self._here.admission.hold(len(piece))
                yield piece
        except TimeoutError:
            raise _late(now_s() - heard_s) from None

    async def _begin(self, form: PredictForm) -> None:
        """The body is complete: find the model, and cancel everything should the client disconnect."""
        self._deadline_s = min(self._deadline_s, self._began_s + form.deadline_ms / 1e3)
        self._model = await self._here.models.find(form.model, self._kind)
        await self._watching.enter_async_context(unless_gone(self._request))

    # Predicting

    async def predict(self, file: File, *, strict: bool = False, **options: Any) -> PredictionAnswer:
        assert self._model is not None
        row, self._sent_s = self._model, time.monotonic()
        deadline_s = self._here.admission.predictor_deadline_s(self._deadline_s, self._sent_s)
        try:
            answer = await self._here.predictions.request(
                as_message(row), file.data, deadline_s=deadline_s, name=file.name, options=options, alone=strict
            )
        except (CheckpointError, StorageError, DeviceError) as error:  # not the file: the model itself
            raise Unavailable(f'the model "{row.name}" cannot be used: {error}') from error
        except OutOfMemory as error:
            raise Unavailable(f'the model "{row.name}" had not enough memory for it; try again soon') from error
        self._here.metrics.stages(_stages(answer))
        return answer

    def respond(self, answer: PredictionAnswer, **headers: str) -> Response:
        now_s = time.monotonic()
        if "total" in (seconds := answer.facts.get("seconds", {})):
            self._here.admission.note_overhead(now_s - self._sent_s - seconds["total"])
        stages = {**_stages(answer), "total": now_s - self._began_s}
        timing = ", ".join(f"{stage};dur={1e3 * seconds:.2f}" for stage, seconds in stages.items())
        headers = {"Brim-Model": self.model_name, **headers, "Server-Timing": timing}
        return Response(answer.body, media_type=answer.media_type, headers=headers)

    def _count(self, failure: BaseException | None) -> None:
        metrics = self._here.metrics
        if failure is None:
            metrics.stages({"total": time.monotonic() - self._began_s})
            metrics.predicted(self.model_name, "200")
            return
        metrics.predicted(self.model_name, "gone" if isinstance(failure, _GONE) else str(_status(failure)))
        metrics.rejected(reason_of(failure))


def _late(silent_s: float) -> Exception:
    """The error for a body that is not complete in time: the client's fault, or too little time."""
    if silent_s >= SLOW_S:
        return TooSlow(f"nothing arrived of the body for {silent_s:.0f} s; send it at once")
    return DeadlinePassed("the body was not complete by the request's deadline; allow more time with Brim-Deadline-Ms")


def _stages(answer: PredictionAnswer) -> dict[str, float]:
    seconds = answer.facts.get("seconds", {})
    return {stage: seconds[stage] for stage in STAGES if stage in seconds}


def _status(failure: BaseException) -> int:
    return status_of(failure) if isinstance(failure, BrimError) else getattr(failure, "status_code", 500)


def reason_of(failure: BaseException) -> str:
    """Why a request got no prediction, as a label of the metrics."""
    by_status = _REASONS.get(_status(failure), "invalid")
    return next((reason for kinds, reason in _FAMILIES if isinstance(failure, kinds)), by_status)
