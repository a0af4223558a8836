"""What the API and a prediction process say to each other: length-prefixed JSON, each with bytes behind it if need be.

A connection begins with a hello of each side that carries the descriptor of its shared memory. Times are those of
`time.monotonic`, which all processes of a machine share.

API → predictor
    hello                                  with the arena that holds what requests bring
    request   id, ticket, model, name, options, at: [offset, length], deadline_s, alone
    cancel    id                           nobody waits for it any more
    taken     at                           the answer there has been read
    register  models                       all that may be asked for: load and warm them
    models | snapshot   id                 for GET /api/models and for metrics

predictor → API
    hello     pid                          with its `Page` and the arena that holds long answers
    answer    id, media_type, facts        the body follows, or lies at: [offset, length]
    refused   id, detail, retry_after_s    it could not have been answered in time
    failed    id, error, detail, field     error is a name of brim.errors
    gone      id                           cancelled
    told      id, value                    to models and snapshot

Every request has exactly one of answer, refused, failed and gone as its end, and the bytes it brought stay where they
are until then.
"""

import json
import math
import os
import socket
import struct
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from brim import errors
from brim.service.prediction.process.arena import Shared

INLINE_BYTES: Final = 64 * 1024  # answers shorter than this follow their message
MAX_MESSAGE_BYTES: Final = 4 * 1024**2
MAX_BODY_BYTES: Final = 1024**3
MAX_HELLO_BYTES: Final = 4096
_HEAD: Final = struct.Struct("<II")

Message = dict[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode


def frame(message: Message, body: bytes = b"") -> bytes:
    """A message as it is sent."""
    text = _encode(message).encode()
    return b"".join((_HEAD.pack(len(text), len(body)), text, body))


class Frames:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """The messages that are whole now, each with its bytes."""
        self._buffer += data
        at, have = 0, len(self._buffer)
        while have - at >= _HEAD.size:
            text_bytes, body_bytes = _HEAD.unpack_from(self._buffer, at)
            if text_bytes > MAX_MESSAGE_BYTES or body_bytes > MAX_BODY_BYTES:
                raise errors.BrimError(
                    f"a message of {text_bytes} + {body_bytes} bytes: the other side speaks otherwise"
                )
            middle = at + _HEAD.size + text_bytes
            if have < middle + body_bytes:
                break
            message = json.loads(bytes(self._buffer[at + _HEAD.size : middle]))
            yield message, bytes(self._buffer[middle : middle + body_bytes])
            at = middle + body_bytes
        del self._buffer[:at]


def send_hello(made: socket.socket, shared: Shared) -> None:
    """Hand over our memory; all that is said before both sides have done so."""
    socket.send_fds(made, [frame({"type": "hello", "pid": os.getpid()})], [shared.descriptor])


def receive_hello(made: socket.socket) -> Shared:
    """The other side's memory; it says nothing else before it has heard from us."""
    data, descriptors, _, _ = socket.recv_fds(made, MAX_HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    said: list[Any] = list(Frames().feed(data))
    if len(said) != 1 or said[0][0].get("type") != "hello" or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise errors.Unavailable("the other end of the socket does not speak as a predictor or an API does")
    return Shared(descriptors[0])


# A request waits for those that are due before it, whoever came first; so an estimate is for so much time, or less.
LIMITS_S: Final = (0.2, 2.0, math.inf)


class Page:
    """The head of a predictor's shared memory: what it would rather not send a message for.

    estimates   seconds until a request that arrives now would be answered, by model that is warm, for each of LIMITS_S
    marks       a byte for each ticket: what is being worked on, which is read when the predictor has died
    """

    BYTES: Final = 64 * 1024
    TICKETS: Final = 16 * 1024
    _TEXT_AT: Final = 16
    _TEXT_BYTES: Final = BYTES - TICKETS - _TEXT_AT

    def __init__(self, shared: Shared) -> None:
        """Take the memory it heads."""
        self._map = shared.map
        self._marks = shared.view(self.BYTES - self.TICKETS, self.TICKETS)
        self.number = 0  # of what was last said or read
        self._known: dict[str, list[float]] = {}

    def publish(self, estimates: dict[str, list[float]]) -> None:
        """Say what a request would take now; odd while it is being written, and another number each time."""
        text = _encode({name: [round(value, 5) for value in seconds] for name, seconds in estimates.items()}).encode()
        if len(text) > self._TEXT_BYTES:
            text = b"{}"  # hundreds of models: then each request is asked for
        self.number += 1
        struct.pack_into("<Q", self._map, 0, self.number)
        struct.pack_into("<Q", self._map, 8, len(text))
        self._map[self._TEXT_AT : self._TEXT_AT + len(text)] = text
        self.number += 1
        struct.pack_into("<Q", self._map, 0, self.number)

    def estimate(self, model: str, within_s: float) -> float | None:
        """Seconds for a request with so much time; None where nothing is known of the model."""
        known = self.estimates().get(model)
        return None if known is None else known[bisect_left(LIMITS_S, min(within_s, LIMITS_S[-1]))]

    def estimates(self) -> dict[str, list[float]]:
        """What was last said; read anew only when it has changed, and as before while it changes."""
        number, length = struct.unpack_from("<QQ", self._map, 0)
        if number != self.number and number % 2 == 0 and length <= self._TEXT_BYTES:
            text = self._map[self._TEXT_AT : self._TEXT_AT + length]
            if struct.unpack_from("<Q", self._map, 0)[0] == number:
                with suppress(ValueError):  # not seen in the order it was written, as some processors allow
                    self._known, self.number = json.loads(text), number
        return self._known

    def mark(self, ticket: int, stage: int) -> None:
        """Note that a request is being worked on; 0: it is not."""
        self._marks[ticket] = stage

    def marked(self, ticket: int) -> int:
        """What was noted."""
        return self._marks[ticket]

    def close(self) -> None:
        """Let the memory go."""
        self._marks.release()


def failure(id: int, error: BaseException) -> Message:
    """How a request's error is told; the detail of one that nobody foresaw is for the log alone."""
    if isinstance(error, errors.Overloaded):
        return {"type": "refused", "id": id, "detail": str(error), "retry_after_s": error.retry_after_s}
    known = isinstance(error, errors.BrimError) and getattr(errors, type(error).__name__, None) is type(error)
    name, detail = (
        (type(error).__name__, str(error)) if known else ("", "the model failed; the service's log says more")
    )
    return {"type": "failed", "id": id, "error": name, "detail": detail, "field": getattr(error, "field", None)}


def error_of(message: Message) -> Exception:
    """The error that was told."""
    if message["type"] == "refused":
        return errors.Overloaded(message["detail"], message["retry_after_s"])
    kind = getattr(errors, message["error"], None)
    return RuntimeError(message["detail"]) if kind is None else kind(message["detail"], field=message["field"])
