"""One request for a prediction, from its first byte to its answer.

    async with PredictionRequest(request, here, "segment") as call:
        form = await call.read_form(fields)          # admitted, then read in time
        answer = await call.predict(form.files[0])   # by the model that the form names
        return call.respond(answer)

The body is read before anything is sent to a predictor: a slow client holds a few bytes here and no place in a queue.
Leaving the block counts the request in the metrics, whatever happened.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, Self

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from brim.errors import (
    BrimError,
    CheckpointError,
    DeadlinePassed,
    DeviceError,
    NotFound,
    OutOfMemory,
    Overloaded,
    StorageError,
    TooMany,
    Unavailable,
)
from brim.jobs.store import ModelKind, ModelRow
from brim.service.api.body import BodyTooLarge, check_type, drain, parse
from brim.service.api.errors import status_of
from brim.service.api.multipart import boundary_of
from brim.service.prediction.client import OFF
from brim.service.prediction.form import File, Form, FormFields, read_deadline_ms
from brim.service.prediction.known_models import as_message
from brim.service.prediction.protocol import PredictionAnswer

if TYPE_CHECKING:
    from brim.service.api.context import Context

DEADLINE: Final = "Brim-Deadline-Ms"
STAGES: Final = ("wait", "decode", "forward", "finish")
SILENCE_S: Final = 30.0  # a client that sends nothing for so long is given up
SLOW_S: Final = 1.0  # if the client was silent for so long at its deadline, the client is at fault
HELD_BYTES: Final = 1024**3  # of all bodies that are being read
_REASONS: Final = {404: "unknown_model", 408: "slow_client", 413: "too_large", 415: "type", 429: "too_many"}


class TooSlow(HTTPException):
    """A body that does not arrive; becomes 408."""

    def __init__(self, detail: str) -> None:
        super().__init__(408, detail, {"Connection": "close"})


class Admission:
    """How many prediction requests and body bytes one API process has in progress, and what answering costs it."""

    # Predictors keep back the 75th percentile of what comes after a forward. With that of the API on top it would be
    # the 83rd of both, and one request in five was rejected that would have been in time.
    _WINDOW, _QUANTILE, _MOST = 32, 0.6, 0.25

    def __init__(self, max_requests: int, max_bytes: int = HELD_BYTES) -> None:
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
        """Count bytes of a body that is being read."""
        self.held_bytes += num_bytes
        if self.held_bytes > self._max_bytes:
            raise TooMany(f"{self._max_bytes} bytes of requests are being read, the most at once; try again soon")

    def note_overhead(self, seconds: float) -> None:
        """What an answer took besides the predictor's part: both ways, and its text."""
        self._overheads_s.append(max(0.0, seconds))
        self._typical_s = sorted(self._overheads_s)[int(self._QUANTILE * len(self._overheads_s))]

    def predictor_deadline_s(self, deadline_s: float, now_s: float) -> float:
        """The deadline for a predictor, so that the answer is sent by the request's own."""
        return deadline_s - min(self._typical_s, self._MOST * max(0.0, deadline_s - now_s))


class PredictionRequest:
    """A request on its way; see the module."""

    def __init__(self, request: Request, here: "Context", kind: ModelKind) -> None:
        self._request, self._here, self._kind = request, here, kind
        self._began_s = self._sent_s = time.monotonic()
        self._deadline_s = math.inf
        self._model: ModelRow | None = None
        self._is_admitted = self._is_read = self._is_gone = False
        self._watching: asyncio.Task[None] | None = None

    @property
    def model_name(self) -> str:
        return "" if self._model is None else self._model.name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, failure: BaseException | None, __: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._is_admitted:
            self._here.admission.leave()
        if isinstance(failure, BrimError | HTTPException) and not self._is_read:
            await self._drain()
        task = asyncio.current_task()
        if isinstance(failure, asyncio.CancelledError) and self._is_gone and task is not None and not task.uncancel():
            self._count(ClientDisconnect())
            raise ClientDisconnect from None
        self._count(failure)

    # Reading

    async def read_form(self, fields: FormFields) -> Form:
        """The form in the body; its model is known afterwards."""
        await self._admit()
        form = Form(boundary_of(self._request.headers.get("content-type", "")), fields)
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                form.feed(piece)
        form.finish()
        await self._begin(form.values.get("deadline_ms"), form.values.get("model", ""))
        return form

    async def read_json(self, fields: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """The JSON object in the body, checked by `fields`; its model is known afterwards."""
        await self._admit()
        check_type(self._request)
        async with aclosing(self._pieces()) as pieces:
            body = b"".join([piece async for piece in pieces])
        values = fields(parse(body))
        await self._begin(values.get("deadline_ms"), values["model"])
        return values

    async def _admit(self) -> None:
        """Reject a request before its body is read if no model of the kind could answer in time."""
        here = self._here
        here.admission.enter()
        self._is_admitted = True
        header = self._request.headers.get(DEADLINE)
        self._limit(here.settings.predict_deadline_ms if header is None else read_deadline_ms(DEADLINE, header))
        if not here.predictions.is_on:
            raise Unavailable(OFF)
        within_s = self._deadline_s - self._began_s
        names = await here.models.of_kind(self._kind)
        wait_s = min(here.predictions.estimate(name, within_s) for name in names)
        late_s = wait_s - within_s
        if late_s > 0:
            text = f"an answer would take about {1e3 * wait_s:.0f} ms, longer than the request allows; try again later"
            raise Overloaded(text, late_s)

    def _limit(self, deadline_ms: int | None) -> None:
        """Allow no more time than that, counted from the first byte."""
        if deadline_ms is not None:
            self._deadline_s = min(self._deadline_s, self._began_s + deadline_ms / 1e3)

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives, until its end."""
        admission, held = self._here.admission, 0
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
                held += len(piece)
                admission.hold(len(piece))
                yield piece
        except TimeoutError:
            self._is_read = True  # the rest is not worth waiting for
            raise _late(now_s() - heard_s) from None
        except (BodyTooLarge, ClientDisconnect):
            self._is_read = True
            raise
        finally:
            admission.held_bytes -= held

    async def _drain(self) -> None:
        """Read the rest of a rejected body, so that the client gets to read the answer."""
        with suppress(BodyTooLarge):
            await drain(self._request.scope, self._request.receive)

    async def _begin(self, deadline_ms: int | None, model: str) -> None:
        """The body is complete: find the model, and cancel everything should the client disconnect."""
        self._limit(deadline_ms)
        self._model = await self._here.models.find(model, self._kind)
        task = asyncio.current_task()
        assert task is not None
        self._watching = asyncio.create_task(self._watch(task))

    async def _watch(self, task: "asyncio.Task[Any]") -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        task.cancel()

    # Predicting

    async def predict(self, file: File, *, strict: bool = False, **options: Any) -> PredictionAnswer:
        """The model's answer for one file, whose bytes are released once they are sent."""
        assert self._model is not None
        row, self._sent_s = self._model, time.monotonic()
        deadline_s = self._here.admission.predictor_deadline_s(self._deadline_s, self._sent_s)
        try:
            answer = await self._here.predictions.request(
                as_message(row), file.take(), deadline_s=deadline_s, name=file.name, options=options, alone=strict
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
        metrics.predicted(self.model_name, _status(failure))
        metrics.rejected(reason_of(failure))


def _late(silent_s: float) -> Exception:
    """The error for a body that is not complete in time: the client's fault, or too little time."""
    if silent_s >= SLOW_S:
        return TooSlow(f"nothing arrived of the body for {silent_s:.0f} s; send it at once")
    return DeadlinePassed("the body was not complete by the request's deadline; allow more time with Brim-Deadline-Ms")


def _stages(answer: PredictionAnswer) -> dict[str, float]:
    seconds = answer.facts.get("seconds", {})
    return {stage: seconds[stage] for stage in STAGES if stage in seconds}


def _status(failure: BaseException) -> str:
    if isinstance(failure, ClientDisconnect | asyncio.CancelledError):
        return "gone"
    return str(status_of(failure) if isinstance(failure, BrimError) else getattr(failure, "status_code", 500))


def reason_of(failure: BaseException) -> str:
    """Why a request got no prediction, as a label of the metrics."""
    if isinstance(failure, ClientDisconnect | asyncio.CancelledError):
        return "client_gone"
    if isinstance(failure, Overloaded):
        return "overloaded"
    if isinstance(failure, DeadlinePassed):
        return "deadline"
    if isinstance(failure, Unavailable):
        return "unavailable"
    if isinstance(failure, NotFound):
        return "unknown_model"
    if not isinstance(failure, BrimError | HTTPException):
        return "error"
    return _REASONS.get(int(_status(failure)), "invalid")
