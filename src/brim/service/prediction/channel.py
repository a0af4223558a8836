"""Messages between the API and a predictor: one packet each, with its body in the packet or in shared memory.

A packet is a JSON object, a line end and a short body. A long body is a `SharedBytes`: memory without a name, whose
descriptor goes with the packet; the kernel frees it with the last process that has it, however that ends. Times are
those of `time.monotonic`, which all processes of a machine share.

predictor → API
    hello                                first, with the memory of its `StatusPage`
    answer    id, media_type, facts      the body is the answer
    failed    id, error                  an error of brim.errors as JSON
    report    id                         the body is the JSON that models and snapshot ask for

API → predictor
    request   id, ticket, model, name, options, deadline_s, alone; the body is the file
    cancel    id                         nobody waits for it any more
    register                             the body lists all models that may be requested: load and warm them up
    models | snapshot   id               for GET /api/models and for metrics
"""

import errno
import fcntl
import json
import math
import mmap
import os
import socket
import struct
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from brim import errors

INLINE_BYTES: Final = 32 * 1024  # longer bodies go through shared memory
PACKET_BYTES: Final = 120 * 1024
_FULL: Final = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
_SEALABLE: Final = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_FIXED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Message = dict[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode


class SharedBytes:
    """Bytes that another process can map: written once, then read-only and of fixed size."""

    def __init__(self, descriptor: int | None = None) -> None:
        """New ones to be written, or those behind a descriptor, which is owned from now on."""
        self.descriptor = -1
        self._view: memoryview | None = None
        try:
            self.descriptor = os.memfd_create("brim", _SEALABLE) if descriptor is None else descriptor
        except OSError as error:
            raise errors.Overloaded("too many requests are in progress; try again soon", 1.0) from error
        self.num_bytes = os.fstat(self.descriptor).st_size

    @classmethod
    def of(cls, data: bytes | memoryview) -> "SharedBytes":
        shared = cls()
        shared.append(data)
        return shared.seal()

    @classmethod
    def empty(cls, num_bytes: int) -> "SharedBytes":
        """Zeros, to be written through a map by whoever has it."""
        shared = cls()
        os.ftruncate(shared.descriptor, num_bytes)
        shared.num_bytes = num_bytes
        fcntl.fcntl(shared.descriptor, fcntl.F_ADD_SEALS, _FIXED)
        return shared

    def append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]
        self.num_bytes += len(data)

    def seal(self) -> "SharedBytes":
        """Nobody can change it any more, or cut it off while another process reads."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _FIXED | fcntl.F_SEAL_WRITE)
        return self

    @property
    def view(self) -> memoryview:
        """The bytes, which stay as long as somebody has them, also when this is closed."""
        if self._view is None:
            if not fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("memory that its sender can cut off")  # which would kill whoever reads it
            mapped = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) if self.num_bytes else b""
            self._view = memoryview(mapped)
        return self._view

    @property
    def is_closed(self) -> bool:
        return self.descriptor < 0

    def close(self) -> None:
        self._view = None
        if not self.is_closed:
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close


Body = bytes | SharedBytes


class Channel:
    """One end of a connection. Sends from any thread and never waits: what the socket does not take is kept."""

    def __init__(self, connection: socket.socket, is_full: Callable[[], None]) -> None:
        """is_full is called when `flush` shall be called once the socket can be written to."""
        connection.setblocking(False)
        self.connection, self._is_full = connection, is_full
        self._lock = threading.Lock()
        self._unsent: deque[tuple[bytes, SharedBytes | None]] = deque()
        self._is_closed = False

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message, body: Body = b"") -> None:
        """Send a message; it is lost if the other end is gone."""
        if isinstance(body, bytes) and len(body) > INLINE_BYTES:
            body = SharedBytes.of(body)
        text = _encode(message).encode() + b"\n"
        packet = (text, body) if isinstance(body, SharedBytes) else (text + body, None)
        with self._lock:
            if not self._is_closed:
                self._unsent.append(packet)
                if len(self._unsent) == 1:
                    self._flush()

    def flush(self) -> None:
        """Send what the socket did not take before."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            packet, shared = self._unsent[0]
            try:
                if shared is None:
                    self.connection.send(packet)
                elif not shared.is_closed:  # otherwise nobody waits for it any more
                    socket.send_fds(self.connection, [packet], [shared.descriptor])
            except OSError as error:
                if error.errno in _FULL:
                    return self._is_full()
                return self._unsent.clear()  # the other end is gone, which the reading side notices
            self._unsent.popleft()
        return None

    def receive(self) -> tuple[Message, bytes | SharedBytes] | None:
        """The next message and its body; None if none has arrived, EOFError if the other end is gone."""
        try:
            packet, descriptors, flags, _ = socket.recv_fds(self.connection, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError:
            raise EOFError from None
        shared = SharedBytes(descriptors[0]) if descriptors else None
        if not packet:
            raise EOFError
        text, _, body = packet.partition(b"\n")
        message = json.loads(text)
        if flags & socket.MSG_CTRUNC:
            message["is_cut"] = True  # no file descriptor was left for its body
        return message, body if shared is None else shared

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._unsent.clear()
            self.connection.close()


def view_of(body: Body) -> memoryview:
    return body.view if isinstance(body, SharedBytes) else memoryview(body)


# Requests run in the order of their deadlines, so an estimate holds for requests with at most this much time.
LIMITS_S: Final = (0.2, 2.0, math.inf)


class StatusPage:
    """Memory that a predictor writes and the API reads without a message, also after the predictor has died.

    estimates   seconds until a request that arrives now would be answered, per warm model, for each of LIMITS_S
    marks       a byte for each ticket: whether the request is being worked on
    """

    BYTES: Final = 64 * 1024
    TICKETS: Final = 16 * 1024
    _TEXT_AT: Final = 16
    _TEXT_BYTES: Final = BYTES - TICKETS - _TEXT_AT

    def __init__(self, memory: memoryview | mmap.mmap | None = None) -> None:
        """The page in this memory, or a new one to write."""
        self.shared: SharedBytes | None = None
        if memory is None:
            self.shared = SharedBytes.empty(self.BYTES)
            memory = mmap.mmap(self.shared.descriptor, self.BYTES)
        self._memory = memory
        self.number = 0  # of the estimates last written or read
        self._known: dict[str, list[float]] = {}

    def publish(self, estimates: dict[str, list[float]]) -> None:
        """Write the estimates; the number changes each time and is odd while they are being written."""
        text = _encode({name: [round(value, 5) for value in seconds] for name, seconds in estimates.items()}).encode()
        if len(text) > self._TEXT_BYTES:
            text = b"{}"  # hundreds of models: then there are no estimates
        self.number += 1
        struct.pack_into("<QQ", self._memory, 0, self.number, len(text))
        self._memory[self._TEXT_AT : self._TEXT_AT + len(text)] = text
        self.number += 1
        struct.pack_into("<Q", self._memory, 0, self.number)

    def estimate(self, model: str, within_s: float) -> float | None:
        """Seconds for a request with so much time; None if the model is not warm."""
        known = self.estimates().get(model)
        return None if known is None else known[bisect_left(LIMITS_S, min(within_s, LIMITS_S[-1]))]

    def estimates(self) -> dict[str, list[float]]:
        """The estimates last written; the ones before while they are being changed."""
        number, length = struct.unpack_from("<QQ", self._memory, 0)
        if number != self.number and number % 2 == 0 and length <= self._TEXT_BYTES:
            text = bytes(self._memory[self._TEXT_AT : self._TEXT_AT + length])
            if struct.unpack_from("<Q", self._memory, 0)[0] == number:
                with suppress(ValueError):  # writes seen in another order, as some processors allow
                    self._known, self.number = json.loads(text), number
        return self._known

    def mark(self, ticket: int, is_worked_on: bool) -> None:
        self._memory[self.BYTES - 1 - ticket] = is_worked_on

    def is_marked(self, ticket: int) -> bool:
        return bool(self._memory[self.BYTES - 1 - ticket])


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
