"""What strangers can do without a token: open connections and send bytes. Neither keeps others from being answered."""

import asyncio
import gc
import http.client
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from weakref import WeakSet

import pytest
from live_api import Api, running

from brim.service.api.connections import MAX_FILES, Connection, raise_file_limit

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API with little patience."""
    with running(tmp_path_factory.mktemp("connections") / "data", head_s=0.5, max_waiting=8) as api:
        yield api


def connect(api: Api, sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", api.port), timeout=60)
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


def trickle(connection: socket.socket, data: bytes, seconds: float) -> float:
    """Send it again and again; how long the other end bore it."""
    begun_s = time.monotonic()
    while (passed_s := time.monotonic() - begun_s) < seconds:
        try:
            connection.sendall(data)
        except OSError:
            break
        time.sleep(0.05)
    return passed_s


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_a_head_must_arrive_in_time_however_slowly_it_comes(strict):
    with connect(strict, b"GET /health HTTP/1.1\r\n") as slow:
        assert trickle(slow, b"x", 30) < 30


def test_the_head_of_a_second_request_must_arrive_in_time_too(strict):
    with connect(strict, HEALTH + b"\r\n") as slow:
        slow.sendall(b"GET /health")
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


def test_a_connection_is_used_for_many_requests(shared):
    kept = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=60)
    for _ in range(20):
        kept.request("GET", "/health")
        assert kept.getresponse().read() == b'{"status":"ok"}'
        kept.auto_open = 0
    kept.close()


@pytest.mark.alone
@pytest.mark.parametrize("path", [b"/api/training/jobs", b"/health"])
def test_a_strangers_body_of_one_byte_chunks_is_dropped_unparsed(shared, path):
    with ExitStack() as stack:
        for _ in range(4):
            sender = stack.enter_context(connect(shared, CHUNKED % path + b"1\r\nx\r\n" * 20_000))
            sender.setblocking(False)
        begun_s = time.monotonic()
        assert shared.get("/health", token=None, timeout_s=30).status == 200
        waited_s = time.monotonic() - begun_s

    assert waited_s < 1.0, f"{waited_s:.1f} s"


def test_the_answer_is_read_after_a_body_that_nobody_wanted(shared):
    with connect(shared, CHUNKED % b"/api/training/jobs") as sender:
        for _ in range(50):
            sender.sendall(b"4000\r\n" + bytes(0x4000) + b"\r\n")
        assert read_all(sender).startswith(b"HTTP/1.1 401")


def test_a_body_without_end_is_not_read_for_ever(shared):
    with connect(shared, CHUNKED % b"/api/training/jobs") as sender:
        assert trickle(sender, b"1\r\nx\r\n", 30) < 30


def test_chunks_of_those_who_may_send_them_are_read_in_turns(shared):
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"kind":"none"}' + b" " * 3000) + b"0\r\n\r\n"
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n\r\n")
    with connect(shared, head % (b"/api/training/jobs", shared.settings.token.encode()) + body) as sender:
        assert sender.recv(4096).startswith(b"HTTP/1.1 422")


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


@pytest.mark.parametrize("is_known", [False, True])
def test_a_stranger_who_does_not_read_the_answers_is_sent_away(strict, made, is_known):
    token = b"Authorization: Bearer %s\r\n" % strict.settings.token.encode()
    request = b"GET /api/devices HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % token if is_known else HEALTH + b"\r\n"
    with connect(strict, b"") as lazy:
        lazy.settimeout(0.3)
        with suppress(TimeoutError, ConnectionResetError, BrokenPipeError):  # until both ends are full
            while True:
                lazy.sendall(request * 100)
        assert wait_until(lambda: not made, 1.5 if is_known else 15) != is_known  # a head may take half a second


@pytest.mark.parametrize(
    "sent",
    [
        HEALTH + b"\r\n",
        HEALTH,
        b"\0\r\n\r\n",
        CHUNKED % b"/api/training/jobs" + b"1\r\nx\r\n",
        HEALTH + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    ],
    ids=["request", "half a head", "no request", "body", "upgrade"],
)
def test_nothing_of_a_closed_connection_waits_for_the_garbage_collector(strict, made, sent):
    with connect(strict, sent) as one:
        one.shutdown(socket.SHUT_WR)
        read_all(one)

    assert wait_until(lambda: not made, 60)


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while not (so := is_so()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return so
