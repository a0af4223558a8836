"""How long does /health take while strangers without a token attack the API?

    python benchmarks/bench_attacks.py [--seconds 30] [--markdown FILE]

The service runs with 1024 open files (`ulimit -n 1024`), on one core; the attackers have another. For each attack,
/health is asked for every 20 ms on a connection of its own. The bar is a 99th percentile of 200 ms.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from page import facts_of, installed, machine, markdown, table, tell
from service_client import Service, pin, serving

BAR_MS = 200.0
FILES = 1024
EVERY_S = 0.02
TIMEOUT_S = 10.0
ABOUT = "The API has 1024 open files and one core; the attackers have the other core."
HEAD = b"POST /api/training/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
TARGETS = (b"http://127.0.0.1/jobs", b"*", b"/a#b", b"/" + b"a" * 9000)


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    attacks = measure(options.seconds)
    results = {
        "machine": machine(torch.device("cpu"), options.commit),
        "command": f"python benchmarks/bench_attacks.py --seconds {options.seconds:g}",
        "attacks": attacks,
        "bar_ms": BAR_MS,
    }
    rows = [
        [name, str(one["asked"]), str(one["failed"]), *(f"{one[key]:.1f}" for key in ("p50_ms", "p99_ms", "max_ms"))]
        for name, one in attacks.items()
    ]
    title = f"/health for {options.seconds:g} s each; the bar for p99 is {BAR_MS:g} ms"
    text = table(title, ["attack", "asked", "failed", "p50 ms", "p99 ms", "max ms"], rows)
    print(text)
    print(json.dumps(results))
    if options.markdown is not None:
        facts = facts_of(results, {"uvicorn": installed("uvicorn"), "h11": installed("h11")})
        options.markdown.write_text(markdown(__doc__ or "", ABOUT, facts, text, json.dumps(results)))


def measure(seconds: float) -> dict[str, dict[str, Any]]:
    """Latencies of /health by attack."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))  # the service inherits it
    found = {}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "data") as service:
        cores = sorted(os.sched_getaffinity(0))
        pin(service.children()["api"], {cores[-1]})
        for name, (attack, attackers) in ATTACKS.items():
            tell(name)
            processes = [multiprocessing.Process(target=attack, args=[service.port]) for _ in range(attackers)]
            for process in processes:
                process.start()
                os.sched_setaffinity(process.pid or 0, {cores[0]})
            time.sleep(2.0)  # until it is at its height
            found[name] = latencies(service, seconds)
            for process in processes:
                process.kill()
                process.join()
            time.sleep(2.0)
    return found


def latencies(service: Service, seconds: float) -> dict[str, Any]:
    """/health again and again."""
    taken_ms, failed, end_s = [], 0, time.monotonic() + seconds
    while (begun_s := time.monotonic()) < end_s:
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            failed += connection.getresponse().status != http.client.OK
        except OSError:
            failed += 1
        finally:
            connection.close()
        taken_ms.append(1e3 * (time.monotonic() - begun_s))
        time.sleep(max(0.0, begun_s + EVERY_S - time.monotonic()))
    ordered = sorted(taken_ms)
    return {
        "asked": len(ordered),
        "failed": failed,
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "max_ms": ordered[-1],
    }


# Attacks, each for ever in a process of its own


def rest(port: int) -> None:
    """No attack."""
    time.sleep(3600)


def half_sent_heads(port: int) -> None:
    """600 connections with half a head each; those that are closed are opened again."""
    held: list[socket.socket] = []
    while True:
        while len(held) < 600:
            with suppress(OSError):
                held.append(send(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "))
        held = [one for one in held if is_open(one)]
        time.sleep(0.1)


def one_byte_chunks(port: int) -> None:
    """A body of one-byte chunks, without an end."""
    stream(port, b"1\r\nx\r\n" * 10_000)


def large_chunks(port: int) -> None:
    """A body of large chunks, without an end."""
    stream(port, b"10000\r\n" + bytes(0x10000) + b"\r\n")


def odd_targets(port: int) -> None:
    """Requests for what is no path."""
    while True:
        for target in TARGETS:
            with suppress(OSError), send(port, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") as made:
                made.recv(65536)


def stream(port: int, data: bytes) -> None:
    while True:
        with suppress(OSError), send(port, HEAD) as made:
            while True:
                made.sendall(data)


def send(port: int, data: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    made.sendall(data)
    return made


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has not closed it; closed here otherwise."""
    try:
        if connection.recv(1, socket.MSG_DONTWAIT):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


ATTACKS: dict[str, tuple[Callable[[int], None], int]] = {
    "none": (rest, 1),
    "1 200 half-sent heads": (half_sent_heads, 2),
    "one-byte chunks, 8 senders": (one_byte_chunks, 8),
    "large chunks, 8 senders": (large_chunks, 8),
    "odd targets, 4 senders": (odd_targets, 4),
}


if __name__ == "__main__":
    main()
