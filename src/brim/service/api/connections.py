"""Connections of the API's server, bounded before any route or token is looked at.

Without the token one can only open connections and send bytes. Therefore a request's head must arrive in time and its
answer be read in time, an address has a limited number of connections without a request (the oldest is closed for a
new one), and one connection is parsed for a limited time per turn of the event loop. The rest of a rejected body is
dropped unparsed: it is still read for a while, since a client that is sending would otherwise see a reset instead of
the answer.
"""

import asyncio
import resource
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_FILES = 65_536  # open at once, if the system allows it
MAX_HEAD_BYTES = 64 * 1024
MAX_EVENTS = 32  # of one connection per turn of the event loop; a body of one-byte chunks is an event per byte
LINGER_BYTES = 64 * 1024**2  # of a rejected body that are read and dropped
LINGER_PAUSE_S = 0.01  # between two reads of it


def raise_file_limit() -> None:
    """Allow this process as many open files as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


class Waiting:
    """Connections without a request, oldest first; beyond a limit the oldest is closed."""

    def __init__(self, *, head_s: float, max_waiting: int) -> None:
        """An address may have `max_waiting` of them, but no more than half of the files that may be open."""
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.head_s = head_s
        self._max_of_address, self._max_of_all = min(max_waiting, max_files // 2), max_files * 3 // 4
        self._addresses: dict[Connection, str] = {}
        self._counts: Counter[str] = Counter()

    def add(self, connection: "Connection") -> None:
        address = connection.client[0] if connection.client else ""
        self._addresses[connection] = address
        self._counts[address] += 1
        if self._counts[address] > self._max_of_address:
            next(one for one, other in self._addresses.items() if other == address).abort()
        elif len(self._addresses) > self._max_of_all:
            next(iter(self._addresses)).abort()

    def remove(self, connection: "Connection") -> None:
        address = self._addresses.pop(connection)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


class Connection(H11Protocol):
    """uvicorn's HTTP connection with these limits."""

    def __init__(self, *args: Any, waiting: Waiting, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: _Parser = _Parser(h11.SERVER, MAX_HEAD_BYTES)
        self._waiting = waiting
        self._timer: asyncio.TimerHandle | None = None  # runs while the connection waits
        self._linger_bytes: int | None = None  # left to be dropped, after the answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        self._transport = _Transport(transport, self)
        super().connection_made(self._transport)  # type: ignore[arg-type]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self._transport.forget()
        self.cycle = None  # type: ignore[assignment]  # it refers to us, and holds the request

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._is_known:
            self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        if self._linger_bytes is None:
            super().data_received(data)
            return
        self._linger_bytes -= len(data)
        if self._linger_bytes < 0:
            self.abort()
        else:
            self._raw.pause_reading()
            self.loop.call_later(LINGER_PAUSE_S, self._raw.resume_reading)

    def handle_events(self) -> None:
        self.conn.events_left = MAX_EVENTS
        super().handle_events()
        if self.conn.events_left == 0:  # there may be more: after the other connections
            self._transport.hold()
            self.loop.call_soon(self._continue)
        if self.conn.their_state is h11.IDLE or (self.flow.write_paused and not self._is_known):
            self._wait()
        else:
            self._stop_waiting()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_waiting()
        self.transport = self._raw
        super().handle_websocket_upgrade(event)
        self._transport.forget()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.linger()

    def linger(self) -> None:
        """The answer is complete and the request is not: send an end, and drop what comes until the idle timeout."""
        if self._linger_bytes is None and not self._raw.is_closing():
            self._linger_bytes = LINGER_BYTES
            self.conn = self.cycle.conn = _Parser(h11.SERVER)  # without what was received
            self._raw.write_eof()
            self._transport.release()
            self._wait()

    def abort(self) -> None:
        self._stop_waiting()
        self._raw.abort()

    @property
    def _is_known(self) -> bool:
        """Whether the last request carried a token: see `service/api/auth.py`."""
        return self.scope is not None and "actor" in self.scope

    def _continue(self) -> None:
        if self._linger_bytes is None and not self._raw.is_closing():
            self._transport.release()
            self.handle_events()

    def _wait(self) -> None:
        if self._timer is None and not self._raw.is_closing():
            self._timer = self.loop.call_later(self._waiting.head_s, self.abort)
            self._waiting.add(self)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._waiting.remove(self)


class _Parser(h11.Connection):
    """Gives so many events, then asks for more data."""

    events_left = 0

    def next_event(self) -> Any:
        if self.events_left == 0:
            return h11.NEED_DATA
        self.events_left -= 1
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            raise error.with_traceback(None)  # noqa: B904  # a frame in it refers to it, and to all that was received


class _Transport:
    """A connection's transport that is closed after the client has read the answer, and can be held."""

    def __init__(self, raw: asyncio.Transport, connection: Connection) -> None:
        self._raw = raw
        self._connection: Connection | None = (
            connection  # until it is lost: a cycle would keep the memory of its request
        )
        self._is_held, self._is_paused = False, False
        self.write = raw.write  # often called

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def forget(self) -> None:
        self._connection = None

    def close(self) -> None:
        connection = self._connection
        if connection and connection.conn.their_state is h11.SEND_BODY and not self._raw.is_closing():
            connection.linger()
        else:
            self._raw.close()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_held:
            self._raw.resume_reading()

    def hold(self) -> None:
        self._is_held = True
        self._raw.pause_reading()

    def release(self) -> None:
        self._is_held = False
        if not self._is_paused:
            self._raw.resume_reading()
