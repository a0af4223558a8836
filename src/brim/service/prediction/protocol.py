"""Messages between the API and a prediction process: length-prefixed JSON, followed by a body if there is one.

A connection begins with a hello from each side that carries the descriptor of its shared memory. Times are those of
`time.monotonic`, which all processes of a machine share.

API → predictor
    hello                                  with the arena that holds the payloads of requests
    request   id, ticket, model, name, options, at: [offset, length], deadline_s, alone
    cancel    id                           nobody waits for it any more
    taken     at                           the answer there has been read
    register  models                       all that may be requested: load and warm them up
    models | snapshot   id                 for GET /api/models and for metrics

predictor → API
    hello     pid                          with its `StatusPage` and the arena that holds long answers
    answer    id, media_type, facts        the body follows, or lies at: [offset, length]
    failed    id, error                    an error of brim.errors as JSON
    gone      id                           cancelled
    report    id, value                    to models and snapshot

Every request ends with exactly one of answer, failed and gone; its payload stays in the arena until then.
"""

import json
import math
import os
import socket
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from brim import errors
from brim.service.prediction.arena import Shared

INLINE_BYTES: Final = 64 * 1024  # answers shorter than this follow their message
MAX_MESSAGE_BYTES: Final = 4 * 1024**2
MAX_BODY_BYTES: Final = 1024**3
MAX_HELLO_BYTES: Final = 4096
_HEAD: Final = struct.Struct("<II")

Message = dict[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode


def frame(message: Message, body: bytes = b"") -> bytes:
    """A message as bytes."""
    text = _encode(message).encode()
    return b"".join((_HEAD.pack(len(text), len(body)), text, body))


class Frames:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """The messages that are complete now, each with its body."""
        self._buffer += data
        at, have = 0, len(self._buffer)
        while have - at >= _HEAD.size:
            text_bytes, body_bytes = _HEAD.unpack_from(self._buffer, at)
            if text_bytes > MAX_MESSAGE_BYTES or body_bytes > MAX_BODY_BYTES:
                raise errors.BrimError(
                    f"a message of {text_bytes} + {body_bytes} bytes: not the protocol of a predictor"
                )
            middle = at + _HEAD.size + text_bytes
            if have < middle + body_bytes:
                break
            message = json.loads(bytes(self._buffer[at + _HEAD.size : middle]))
            yield message, bytes(self._buffer[middle : middle + body_bytes])
            at = middle + body_bytes
        del self._buffer[:at]


def send_hello(connection: socket.socket, shared: Shared) -> None:
    """Hand over our shared memory; nothing else is sent before both sides have done so."""
    socket.send_fds(connection, [frame({"type": "hello", "pid": os.getpid()})], [shared.descriptor])


def receive_hello(connection: socket.socket) -> Shared:
    """The other side's shared memory."""
    data, descriptors, _, _ = socket.recv_fds(connection, MAX_HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    messages: list[Any] = list(Frames().feed(data))
    if len(messages) != 1 or messages[0][0].get("type") != "hello" or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise errors.Unavailable("the other end of the socket is neither a predictor nor an API")
    return Shared(descriptors[0])


# Requests run in the order of their deadlines, so an estimate holds for requests with at most this much time.
LIMITS_S: Final = (0.2, 2.0, math.inf)


class StatusPage:
    """The head of a predictor's shared memory: state that is read without a message.

    estimates   seconds until a request that arrives now would be answered, per warm model, for each of LIMITS_S
    marks       a byte for each ticket: which requests are being worked on, read after the predictor has died
    """

    BYTES: Final = 64 * 1024
    TICKETS: Final = 16 * 1024
    _TEXT_AT: Final = 16
    _TEXT_BYTES: Final = BYTES - TICKETS - _TEXT_AT

    def __init__(self, shared: Shared) -> None:
        self._map = shared.map
        self._marks = shared.view(self.BYTES - self.TICKETS, self.TICKETS)
        self.number = 0  # of the estimates last written or read
        self._known: dict[str, list[float]] = {}

    def publish(self, estimates: dict[str, list[float]]) -> None:
        """Write the estimates; the number changes each time and is odd while they are being written."""
        text = _encode({name: [round(value, 5) for value in seconds] for name, seconds in estimates.items()}).encode()
        if len(text) > self._TEXT_BYTES:
            text = b"{}"  # hundreds of models: then there are no estimates
        self.number += 1
        struct.pack_into("<Q", self._map, 0, self.number)
        struct.pack_into("<Q", self._map, 8, len(text))
        self._map[self._TEXT_AT : self._TEXT_AT + len(text)] = text
        self.number += 1
        struct.pack_into("<Q", self._map, 0, self.number)

    def estimate(self, model: str, within_s: float) -> float | None:
        """Seconds for a request with so much time; None if the model is not warm."""
        known = self.estimates().get(model)
        return None if known is None else known[bisect_left(LIMITS_S, min(within_s, LIMITS_S[-1]))]

    def estimates(self) -> dict[str, list[float]]:
        """The estimates last written; the ones before while they are being changed."""
        number, length = struct.unpack_from("<QQ", self._map, 0)
        if number != self.number and number % 2 == 0 and length <= self._TEXT_BYTES:
            text = self._map[self._TEXT_AT : self._TEXT_AT + length]
            if struct.unpack_from("<Q", self._map, 0)[0] == number:
                with suppress(ValueError):  # writes seen in another order, as some processors allow
                    self._known, self.number = json.loads(text), number
        return self._known

    def mark(self, ticket: int, stage: int) -> None:
        """Mark a request as being worked on in a stage; 0: not any more."""
        self._marks[ticket] = stage

    def marked(self, ticket: int) -> int:
        return self._marks[ticket]

    def close(self) -> None:
        self._marks.release()


class PredictionAnswer(NamedTuple):
    """The answer to one request."""

    body: bytes
    media_type: str
    facts: Mapping[str, Any]  # "seconds" by stage, and what the workload adds, such as polygons


def failure(id: int, error: BaseException) -> Message:
    """The message for a request that failed; details of an unexpected error are for the log alone."""
    values = error.as_dict() if isinstance(error, errors.BrimError) else None
    return {"type": "failed", "id": id, "error": values, "retry_after_s": getattr(error, "retry_after_s", None)}


def error_of(message: Message) -> Exception:
    """The error that a failed request is answered with."""
    values = message["error"]
    if values is None:
        return RuntimeError("the model failed; the service's log says more")
    if message["retry_after_s"] is not None:
        return errors.Overloaded(values["message"], message["retry_after_s"])
    return errors.from_dict(values)
