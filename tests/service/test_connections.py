"""What strangers can do without a token: open connections and send bytes. Neither keeps others from being answered."""

import asyncio
import gc
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakSet

import h11
import pytest
from live_api import Api, running

from brim.service.api.connections import MAX_EVENTS, MAX_FILES, Connection, raise_file_limit
from waiting import PATIENCE_S, until

HEAD_S = 600.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API that lets few wait, and for as long as its clock says."""
    with running(tmp_path_factory.mktemp("connections") / "data", head_s=HEAD_S, max_waiting=8) as api:
        api._server.config.timeout_keep_alive = 100 * HEAD_S
        yield api


def pass_time(api: Api, seconds: float) -> None:
    """The clock of the API's event loop goes ahead, and what is due happens."""
    loop = api._server.servers[0].get_loop()
    ahead_s = loop.time() - time.monotonic() + seconds
    loop.time = lambda: time.monotonic() + ahead_s
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)


def connect(api: Api, sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE_S)
    made.sendall(sent)
    return made


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def is_refused(connection: socket.socket, data: bytes) -> bool:
    try:
        connection.sendall(data)
    except OSError:
        return True
    return False


def has_received(made: WeakSet[Connection], num_bytes: int) -> bool:
    """Whether the only connection has so many bytes of a head."""
    return [len(one.conn.trailing_data[0]) for one in made] == [num_bytes]


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeakSet[Connection]]:
    """The connections that somebody still refers to, without help from the garbage collector."""
    connections: WeakSet[Connection] = WeakSet()
    connect = Connection.connection_made

    def connected(self: Connection, transport: asyncio.Transport) -> None:
        connections.add(self)
        connect(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connected)
    gc.disable()
    yield connections
    gc.enable()


def test_a_head_must_arrive_in_time_however_slowly_it_comes(strict, made):
    with connect(strict, b"GET /health HTTP/1.1") as slow:
        for num in (1, 2):
            slow.sendall(b"x")
            until(lambda num=num: has_received(made, 20 + num))
            pass_time(strict, 0.6 * HEAD_S)
        assert read_all(slow) == b""


def test_the_head_of_a_second_request_must_arrive_in_time_too(strict, made):
    with connect(strict, HEALTH + b"\r\n") as slow:
        slow.sendall(b"GET /health")
        until(lambda: has_received(made, 11))
        until(lambda: pass_time(strict, 1.1 * HEAD_S) or not made)
        assert read_all(slow).startswith(b"HTTP/1.1 200")  # and then the end


def test_half_sent_heads_leave_room_for_others(strict):
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(strict, HEALTH)) for _ in range(40)]
        assert strict.get("/health", token=None).status == 200

        assert sum(map(is_open, slow)) <= 8
        assert is_open(slow[-1]), "the oldest goes first"


def test_as_many_files_may_be_open_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (MAX_FILES if hard < 0 else min(MAX_FILES, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("path", [b"/api/training/jobs", b"/health"])
def test_a_strangers_body_of_one_byte_chunks_is_dropped_unparsed(shared, path, monkeypatch):
    turns: list[int] = []  # of the event loop, with the events parsed in each
    parse, handle = h11.Connection.next_event, Connection.handle_events

    def next_event(self: h11.Connection) -> Any:
        turns[-1] += 1
        return parse(self)

    monkeypatch.setattr(h11.Connection, "next_event", next_event)
    monkeypatch.setattr(Connection, "handle_events", lambda self: turns.append(0) or handle(self))
    with connect(shared, CHUNKED % path + b"1\r\nx\r\n" * 200_000) as sender:
        assert read_all(sender).startswith((b"HTTP/1.1 401", b"HTTP/1.1 405"))

    assert max(turns) <= MAX_EVENTS
    assert sum(turns) < 20_000


def test_a_body_without_end_is_not_read_for_ever(strict):
    with connect(strict, CHUNKED % b"/api/training/jobs") as sender:
        assert read_all(sender).startswith(b"HTTP/1.1 401")
        until(lambda: is_refused(sender, b"1\r\nx\r\n") or pass_time(strict, 0.6 * HEAD_S))


@contextmanager
def lazy(api: Api, made: WeakSet[Connection]) -> Iterator[socket.socket]:
    """A connection on which few bytes are on their way."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", api.port))
        connection.setblocking(False)
        (its,) = until(lambda: [one._raw.get_extra_info("socket") for one in made])
        its.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield connection


def test_a_stranger_who_does_not_read_the_answers_is_sent_away(strict, made):
    request, sent = HEALTH + b"\r\n", 0
    with lazy(strict, made) as connection:

        def is_full() -> bool:
            nonlocal sent
            with suppress(BlockingIOError):
                sent += connection.send((request * 10_000)[sent % len(request) :])
            return any(one.flow.write_paused for one in made)

        until(is_full)
        until(lambda: pass_time(strict, 0.1 * HEAD_S) or not made)


def test_one_with_a_token_may_read_a_long_answer_slowly(strict, made):
    token = b"Authorization: Bearer %s\r\n" % strict.settings.token.encode()
    with lazy(strict, made) as connection:
        connection.send(b"GET /docs/assets/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % token)
        until(lambda: any(one.flow.write_paused for one in made))
        pass_time(strict, 1.1 * HEAD_S)
        assert [one._raw.is_closing() for one in made] == [False]
