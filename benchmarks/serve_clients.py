"""Clients that arrive by themselves, however slow the answers: open-loop Poisson arrivals over HTTP on loopback.

Each process of clients is told over its standard input, a line of JSON for each run, and answers with a line. It needs
the standard library only, so that it starts in a moment and takes little from what is measured: a request's bytes are
made once, connections are kept, and of an answer only the status and the length are read.
"""

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
REFUSED = (408, 429, 503, 504)  # how servers say that they cannot, or could not in time
LEAD_S = 0.3  # between the order and the first arrival: every process is ready by then
IDLE_S = 4.0  # a kept connection that was idle for longer is not used again: its server may be closing it


@dataclass(frozen=True)
class Target:
    """A server, and the requests that are sent to it in turn."""

    port: int
    requests: Sequence[bytes]  # whole ones: head and body


def request_bytes(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A POST as it goes over the wire."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def form_bytes(path: str, field: str, file: bytes, fields: dict[str, str], headers: dict[str, str]) -> bytes:
    """A POST of one file and some fields as multipart/form-data."""
    edge = "brim-benchmark-7f3a"
    parts = [
        f'--{edge}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = f'--{edge}\r\nContent-Disposition: form-data; name="{field}"; filename="image"\r\n'
    parts += [f"{head}Content-Type: application/octet-stream\r\n\r\n".encode(), file, f"\r\n--{edge}--\r\n".encode()]
    return request_bytes(path, b"".join(parts), {**headers, "Content-Type": f"multipart/form-data; boundary={edge}"})


# The side of the benchmark


class Clients:
    """Processes of clients, ended with the block that made them."""

    def __init__(self, processes: Sequence["subprocess.Popen[str]"], folder: Path) -> None:
        self._processes, self._folder = processes, folder

    def run(self, target: Target, rate: float, seconds: float, limit_s: float, seed: int) -> Json:
        """Send `rate` requests a second for so long; what became of them."""
        for number, request in enumerate(target.requests):
            (self._folder / f"{number}.request").write_bytes(request)
        order = {
            "port": target.port,
            "folder": str(self._folder),
            "requests": len(target.requests),
            "rate": rate / len(self._processes),
            "seconds": seconds,
            "grace_s": max(1.0, 3 * limit_s),
            "begin_s": time.monotonic() + LEAD_S,
        }
        answers = self._ask([order | {"seed": seed * 1000 + k} for k in range(len(self._processes))])
        return summary(answers, seconds, limit_s)

    def _ask(self, orders: Sequence[Json]) -> list[Json]:
        for process, order in zip(self._processes, orders, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self._processes if process.stdout is not None]


@contextmanager
def clients(num: int, folder: Path) -> Iterator[Clients]:
    """So many processes of clients, which inherit the cores of the caller."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(num)
        ]
        try:
            yield Clients(processes, folder)
        finally:
            for process in processes:
                process.kill()


def summary(answers: Sequence[Json], seconds: float, limit_s: float) -> Json:
    """What became of the requests of a run: seconds count from when a request was meant to be sent."""
    sent = [request for answer in answers for request in answer["requests"]]
    good = sorted(after_s for _, after_s, status in sent if status == 200)
    refused = sorted(after_s for _, after_s, status in sent if status in REFUSED)
    lags = sorted(lag_s for lag_s, _, _ in sent)
    others: dict[str, int] = {}
    for _, _, status in sent:
        if status != 200 and status not in REFUSED:
            others[str(status)] = others.get(str(status), 0) + 1
    return {
        "offered_per_s": len(sent) / seconds,
        "sent": len(sent),
        "goodput_per_s": sum(after_s <= limit_s for after_s in good) / seconds,
        "answered": len(good),
        "late": sum(after_s > limit_s for after_s in good),
        "late_by_a_tenth": sum(after_s > 1.1 * limit_s for after_s in good),
        "refused": len(refused),
        "errors": others,  # by status; 0 is no answer by the end
        "p50_ms": quantile_ms(good, 0.5),
        "p99_ms": quantile_ms(good, 0.99),
        "refused_p99_ms": quantile_ms(refused, 0.99),
        "lag_p99_ms": quantile_ms(lags, 0.99),
        "client_cpu": max(answer["cpu_s"] / answer["elapsed_s"] for answer in answers),
    }


def quantile_ms(ordered_s: Sequence[float], share: float) -> float | None:
    """Of sorted seconds, in milliseconds."""
    return 1000 * ordered_s[min(len(ordered_s) - 1, int(share * len(ordered_s)))] if ordered_s else None


def one_by_one(target: Target, count: int, timeout_s: float = 60.0) -> list[tuple[float, int, bytes]]:
    """Requests one after the other on one connection: seconds, status and body of each."""

    async def ask() -> list[tuple[float, int, bytes]]:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(keep=True), "127.0.0.1", target.port)
        found = []
        for number in range(count):
            began_s = time.monotonic()
            status = await asyncio.wait_for(connection.send(target.requests[number % len(target.requests)]), timeout_s)
            found.append((time.monotonic() - began_s, status, bytes(connection.body)))
        connection.close()
        return found

    return asyncio.run(ask())


# The side of the clients


class Connection(asyncio.Protocol):
    """One kept connection: a request, its answer, the next."""

    def __init__(self, keep: bool = False) -> None:
        self.body = bytearray()  # of the last answer, where they are kept
        self.used_s = time.monotonic()
        self.is_open = False
        self._keep = keep
        self._head = bytearray()
        self._status = 0
        self._missing: int | None = 0  # bytes of the body; None when it comes in chunks
        self._answer: asyncio.Future[int] | None = None

    def send(self, request: bytes) -> "asyncio.Future[int]":
        """Send; the status once the whole answer is here, 0 when the connection ends before."""
        self._answer = asyncio.get_running_loop().create_future()
        self._head.clear()
        self.body.clear()
        self._status = 0
        if not self.is_open:
            self._answer.set_result(0)
            return self._answer
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        """Leave without a word."""
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed: whoever waits hears of it."""
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(0)

    def data_received(self, data: bytes) -> None:
        """Read as much of an answer as there is."""
        if not self._status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = bytes(self._head[:end]).lower(), bytes(self._head[end + 4 :])
            self._status, self._missing = int(head[9:12]), _length(head)
        if self._keep:
            self.body += data  # of those in chunks, their lengths as well
        if self._is_last(data) and self._answer is not None and not self._answer.done():
            self.used_s = time.monotonic()
            self._answer.set_result(self._status)

    def _is_last(self, data: bytes) -> bool:
        if self._missing is None:
            self._head = (self._head + data)[-5:]
            return self._head == b"0\r\n\r\n"
        self._missing -= len(data)
        return self._missing <= 0


def _length(head: bytes) -> int | None:
    """Bytes of the body; None when it comes in chunks."""
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return None


class Arrivals:
    """One run of one process."""

    def __init__(self, order: Json) -> None:
        folder = Path(order["folder"])
        self._bodies = [(folder / f"{number}.request").read_bytes() for number in range(order["requests"])]
        self._order = order
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._found: list[tuple[float, float, int]] = []  # lag, seconds since it was meant to be sent, status

    async def run(self) -> list[tuple[float, float, int]]:
        """Send each at its time, wait a while for the last answers, and leave."""
        pick = random.Random(self._order["seed"])
        next_s = end_s = self._order["begin_s"]
        end_s += self._order["seconds"]
        tasks = set()
        while (next_s := next_s + pick.expovariate(self._order["rate"])) < end_s:
            await asyncio.sleep(next_s - time.monotonic())
            tasks.add(asyncio.create_task(self._one(next_s, pick.choice(self._bodies))))
        if tasks:
            await asyncio.wait(tasks, timeout=end_s + self._order["grace_s"] - time.monotonic())
        for connection in list(self._open):
            connection.close()  # those that wait hear of it
        await asyncio.gather(*tasks)
        return self._found

    async def _one(self, meant_s: float, request: bytes) -> None:
        status, sent_s = 0, time.monotonic()
        with suppress(OSError):
            connection = await self._connection()
            sent_s = time.monotonic()
            status = await connection.send(request)
            self._idle.append(connection)
        self._found.append((sent_s - meant_s, time.monotonic() - meant_s, status))

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()  # the last used one: the others may rest
            if connection.is_open and time.monotonic() - connection.used_s < IDLE_S:
                return connection
            connection.close()
            self._open.discard(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._order["port"])
        self._open.add(connection)
        return connection


def _serve_orders(read: Callable[[], str]) -> None:
    while line := read():
        order = json.loads(line)
        began, began_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        found = asyncio.run(Arrivals(order).run())
        ended, elapsed_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began_s
        cpu_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        print(json.dumps({"requests": found, "cpu_s": cpu_s, "elapsed_s": elapsed_s, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    _serve_orders(sys.stdin.readline)
