"""From a request to its prediction: admitted, collected, its model found, the predictors asked, the answer counted."""

import math
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from brim.engine.batching import Answer
from brim.errors import (
    BrimError,
    CheckpointError,
    DeadlinePassed,
    DeviceError,
    NotFound,
    OutOfMemory,
    Overloaded,
    StorageError,
    Unavailable,
)
from brim.jobs.store import ModelKind, ModelRow
from brim.service.api.context import Context
from brim.service.api.errors import status_of
from brim.service.prediction.form import File, read_deadline_ms
from brim.service.prediction.intake import Body, unless_gone
from brim.service.prediction.known_models import as_asked

DEADLINE = "Brim-Deadline-Ms"
STAGES = ("wait", "decode", "forward", "finish")
_REASONS = {404: "unknown_model", 408: "slow_client", 413: "too_large", 415: "type", 429: "too_many"}


@dataclass(slots=True)
class Asked:
    """One request, as far as it has come."""

    here: Context
    request: Request
    kind: ModelKind
    began_s: float = field(default_factory=time.monotonic)
    deadline_s: float = math.inf
    model: ModelRow | None = None
    asked_s: float = 0.0

    def within(self, deadline_ms: int | None) -> None:
        """Allow no more time than that, from its first byte on."""
        if deadline_ms is not None:
            self.deadline_s = min(self.deadline_s, self.began_s + deadline_ms / 1e3)

    async def find(self, name: str) -> None:
        """The model it means."""
        self.model = await self.here.known.find(name, self.kind)

    async def ask(self, file: File, *, strict: bool = False, **options: Any) -> Answer:
        """What the model says of a file; its bytes go once they are handed on: many requests wait at a time."""
        assert self.model is not None
        row, self.asked_s = self.model, time.monotonic()
        deadline_s = self.here.replies.left_s(self.deadline_s, self.asked_s)
        try:
            answer = await self.here.predictions.request(
                as_asked(row), file.take(), deadline_s=deadline_s, name=file.name, options=options, alone=strict
            )
        except (CheckpointError, StorageError, DeviceError) as failure:  # not what was sent: the model itself
            raise Unavailable(f'the model "{row.name}" cannot be used: {failure}') from failure
        except OutOfMemory as failure:
            raise Unavailable(f'the model "{row.name}" found no memory for it; try again soon') from failure
        self.here.metrics.stages(_stages(answer))
        return answer

    def answer(self, answer: Answer, **headers: str) -> Response:
        """One answer as it goes out."""
        assert self.model is not None
        now_s = time.monotonic()
        if "total" in (seconds := answer.facts.get("seconds", {})):
            self.here.replies.note(now_s - self.asked_s - seconds["total"])
        stages = {**_stages(answer), "total": now_s - self.began_s}
        timing = ", ".join(f"{stage};dur={1e3 * seconds:.2f}" for stage, seconds in stages.items())
        said = {"Brim-Model": self.model.name, **headers, "Server-Timing": timing}
        return Response(answer.body, media_type=answer.media_type, headers=said)


def _stages(answer: Answer) -> dict[str, float]:
    seconds = answer.facts.get("seconds", {})
    return {stage: seconds[stage] for stage in STAGES if stage in seconds}


async def predict(
    request: Request,
    here: Context,
    kind: ModelKind,
    collect: Callable[[Asked, Body], Awaitable[str]],
    answer: Callable[[Asked], Awaitable[Response]],
) -> Response:
    """Answer a request, and count what came of it.

    collect  reads the body and gives the name of the model that it means
    answer   asks the model
    """
    asked = Asked(here, request, kind)
    try:
        response = await _predict(asked, collect, answer)
    except ClientDisconnect:
        _count(asked, "gone", "client_gone")
        return Response(status_code=400)  # nobody reads it
    except (BrimError, HTTPException) as failure:
        status = status_of(failure) if isinstance(failure, BrimError) else failure.status_code
        _count(asked, str(status), reason_of(failure))
        raise
    except Exception:
        _count(asked, "500", "error")
        raise
    here.metrics.stages({"total": time.monotonic() - asked.began_s})
    _count(asked, str(response.status_code))
    return response


async def _predict(
    asked: Asked, collect: Callable[[Asked, Body], Awaitable[str]], answer: Callable[[Asked], Awaitable[Response]]
) -> Response:
    here, request = asked.here, asked.request
    with ExitStack() as counted:
        async with Body(request, here.intake) as body:
            counted.enter_context(here.intake.request())
            said = request.headers.get(DEADLINE)
            asked.within(here.settings.predict_deadline_ms if said is None else read_deadline_ms(DEADLINE, said))
            await _refuse_hopeless(asked)
            body.until_s = asked.deadline_s
            name = await collect(asked, body)
        await asked.find(name)
        return await unless_gone(request, answer(asked))


async def _refuse_hopeless(asked: Asked) -> None:
    """Before the body is read: where no model of the kind could answer in time, spare everybody the bytes."""
    predictions = asked.here.predictions
    if not predictions.is_on:
        raise Unavailable("this service makes no predictions; start it with --predict-memory above 0")
    within_s = asked.deadline_s - asked.began_s
    wait_s = min(predictions.estimate(model, within_s) for model in await asked.here.known.of_kind(asked.kind))
    late_s = asked.began_s + wait_s - asked.deadline_s
    if late_s > 0:
        raise Overloaded(
            f"an answer would take about {1e3 * wait_s:.0f} ms, longer than the request allows; try again later", late_s
        )


def _count(asked: Asked, status: str, reason: str | None = None) -> None:
    asked.here.metrics.predicted("" if asked.model is None else asked.model.name, status)
    if reason is not None:
        asked.here.metrics.rejected(reason)


def reason_of(failure: Exception) -> str:
    """Why a request got no prediction, in the word that metrics have for it."""
    if isinstance(failure, Overloaded):
        return "overloaded"
    if isinstance(failure, DeadlinePassed):
        return "deadline"
    if isinstance(failure, Unavailable):
        return "unavailable"
    if isinstance(failure, NotFound):
        return "unknown_model"
    status = status_of(failure) if isinstance(failure, BrimError) else getattr(failure, "status_code", 500)
    return _REASONS.get(status, "invalid")
