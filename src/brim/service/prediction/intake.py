"""Taking in requests for predictions: how many at once, how long a body may take, and a refusal that can be read.

A body is collected before anything is asked of the models: a slow client holds a few bytes here, no place in a queue.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from brim.errors import BrimError, DeadlinePassed, TooMany
from brim.service.api.limits import BodyTooLarge, drain

SILENCE_S: Final = 30.0  # a client that sends nothing for so long is given up
SLOW_S: Final = 1.0  # one that was silent for so long when its deadline passed is at fault itself
HELD_BYTES: Final = 1024**3  # of bodies that are being collected, in all
_T = TypeVar("_T")


class TooSlow(HTTPException):
    """A body that does not come; becomes 408."""

    def __init__(self, detail: str) -> None:
        super().__init__(408, detail, {"Connection": "close"})


class Intake:
    """What one API process has under way of predictions."""

    def __init__(self, max_requests: int, max_bytes: int = HELD_BYTES) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self.num_requests = 0
        self.held_bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one; TooMany where there are too many."""
        if self.num_requests >= self._max_requests:
            raise TooMany(f"{self.num_requests} requests for predictions are under way, the most at once; try again")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def hold(self, num_bytes: int) -> None:
        """Count bytes of a body; TooMany where there are too many."""
        self.held_bytes += num_bytes
        if self.held_bytes > self._max_bytes:
            raise TooMany(f"{self._max_bytes} bytes of requests are being collected, the most at once; try again soon")


class Body:
    """A request's body; inside a with block, in time. What is refused before its end is drained, then answered."""

    def __init__(self, request: Request, intake: Intake) -> None:
        self.until_s = math.inf  # of time.monotonic, when it must be there
        self._request, self._intake = request, intake
        self._held = 0
        self._is_done = False  # nothing more of it is worth reading

    async def __aenter__(self) -> "Body":
        return self

    async def __aexit__(self, _: object, failure: BaseException | None, __: object) -> None:
        self._intake.held_bytes -= self._held
        if isinstance(failure, BrimError | HTTPException) and not self._is_done:
            with suppress(BodyTooLarge):
                await drain(self._request.scope, self._request.receive)

    async def read(self, feed: Callable[[bytes], None]) -> None:
        """Hand on what comes, until its end."""
        now_s = asyncio.get_running_loop().time
        heard_s = now_s()
        try:
            async with asyncio.timeout(None) as patience:
                while not self._is_done:
                    patience.reschedule(heard_s + min(SILENCE_S, self.until_s - time.monotonic()))
                    feed(await self._piece())
                    heard_s = now_s()
        except TimeoutError:
            self._is_done = True
            raise _late(now_s() - heard_s) from None
        except (BodyTooLarge, ClientDisconnect):  # of the one, enough was read
            self._is_done = True
            raise

    async def _piece(self) -> bytes:
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece: bytes = message.get("body", b"")
        self._is_done = not message.get("more_body", False)
        self._held += len(piece)
        self._intake.hold(len(piece))
        return piece


def _late(silent_s: float) -> Exception:
    """What is wrong with a body that is not there in time: its client, or the time it has."""
    if silent_s >= SLOW_S:
        return TooSlow(f"nothing came of the body for {silent_s:.0f} s; send it at once")
    return DeadlinePassed("the body was not there by the request's deadline; allow more time with Brim-Deadline-Ms")


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """What work comes to; ends it, and raises ClientDisconnect, when the client goes. The body must have been read."""
    me, gone = asyncio.current_task(), False
    assert me is not None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        me.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and not me.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()
