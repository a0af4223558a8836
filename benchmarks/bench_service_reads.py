"""By how much does reading the API slow a running job?

    python benchmarks/bench_service_reads.py [--pairs 10] [--seconds 12] [--markdown FILE]

One job generates on one core throughout; API, supervisor and reader have another. Windows with 20 reads a second (the
list of jobs and the job itself in turn) alternate with windows without; each pair's rates are compared, from the
progress that the job itself noted. The bar is 2 %.
"""

import argparse
import json
import sqlite3
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from page import facts_of, installed, machine, markdown, number, table, tell
from service_client import JOBS, Service, pin, serving

READS_PER_S = 20
BAR = 0.02
ABOUT = "One job on one core; API, supervisor and reader on another. Windows with and without reads alternate."
SETTLE_S = 1.0  # at the start of a window, not counted


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    results = {
        "machine": machine(torch.device("cpu"), options.commit),
        "command": f"python benchmarks/bench_service_reads.py --pairs {options.pairs} --seconds {options.seconds:g}",
        **measure(options.pairs, options.seconds),
    }
    text = table(
        f"{options.pairs} pairs of windows of {options.seconds:g} s, {READS_PER_S} reads a second",
        ["", "value"],
        [
            ["samples/s without reads, median", number(results["rate_alone"])],
            ["samples/s with reads, median", number(results["rate_read"])],
            ["slowdown, median of the pairs", f"{results['slowdown']:+.2%}"],
            ["its quartiles", " … ".join(f"{value:+.2%}" for value in results["quartiles"])],
            ["processor time a sample, slowdown", f"{results['cpu_slowdown']:+.2%}"],
            ["reads answered", str(results["reads"])],
            ["read, p95", f"{results['read_p95_ms']:.1f} ms"],
            ["bar", f"{BAR:.0%}"],
        ],
    )
    print(text)
    print(json.dumps(results))
    if options.markdown is not None:
        facts = facts_of(results, {"dbos": installed("dbos"), "fastapi": installed("fastapi")})
        options.markdown.write_text(markdown(__doc__ or "", ABOUT, facts, text, json.dumps(results)))


def measure(pairs: int, seconds: float) -> dict[str, Any]:
    """Rates in alternating windows."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "data", OMP_NUM_THREADS="1") as service:
        job = service.generate(10_000_000)
        while service.ask("GET", f"{JOBS}/{job}")["progress"]["current"] < 50:
            time.sleep(0.2)
        children = service.children()
        pin(children["w0"], {0})
        for pid in (children["api"], service.process.pid):
            pin(pid, {1})
        reader = Reader(service, job)
        windows: list[tuple[bool, float, float, float]] = []  # read?, begin, end, processor seconds of the worker
        for pair in range(pairs):
            tell(f"pair {pair + 1} of {pairs}")
            for reads in (False, True) if pair % 2 else (True, False):
                windows.append((reads, *window(reader if reads else None, children["w0"], seconds)))
        service.ask("POST", f"{JOBS}/{job}/cancel")
        progress = noted(Path(folder) / "data" / "catalogue.sqlite", job)
    return summary(windows, progress, reader)


class Reader:
    """Reads the API at a steady rate while told to."""

    def __init__(self, service: Service, job: str) -> None:
        """Take what to read."""
        self.service, self.paths = service, [JOBS, f"{JOBS}/{job}"]
        self.seconds: list[float] = []

    def run(self, end_s: float) -> None:
        """Read until then."""
        count, begin_s = 0, time.monotonic()
        while (now_s := time.monotonic()) < end_s:
            self.service.ask("GET", self.paths[count % 2])
            self.seconds.append(time.monotonic() - now_s)
            count += 1
            time.sleep(max(0.0, begin_s + count / READS_PER_S - time.monotonic()))


def window(reader: Reader | None, worker: int, seconds: float) -> tuple[float, float, float]:
    """Let so many seconds pass; wall-clock begin and end of what counts, and the worker's processor seconds in it."""
    thread = threading.Thread(target=reader.run, args=[time.monotonic() + seconds]) if reader else None
    if thread is not None:
        thread.start()
    time.sleep(SETTLE_S)
    begin_s, before_s = time.time(), processor_s(worker)
    time.sleep(seconds - SETTLE_S)
    end_s, after_s = time.time(), processor_s(worker)
    if thread is not None:
        thread.join()
    return begin_s, end_s, after_s - before_s


def processor_s(pid: int) -> float:
    """Seconds of processor time a process has used, in user code and for it in the kernel."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def noted(file: Path, job: str) -> list[tuple[float, int]]:
    """When the job had come how far, from its own events."""
    with sqlite3.connect(file) as catalogue:
        rows = catalogue.execute(
            "SELECT at, data FROM events WHERE job_id = ? AND kind = 'progress' ORDER BY seq", [job]
        ).fetchall()
    catalogue.close()
    return [(at, json.loads(data)["current"]) for at, data in rows]


def summary(
    windows: list[tuple[bool, float, float, float]], progress: list[tuple[float, int]], reader: Reader
) -> dict[str, Any]:
    """Rates of the windows, compared pair by pair."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    costs: dict[bool, list[float]] = {True: [], False: []}
    for reads, begin_s, end_s, cpu_s in windows:
        inside = [point for point in progress if begin_s <= point[0] <= end_s]
        (first_s, first), (last_s, last) = inside[0], inside[-1]
        rate = (last - first) / (last_s - first_s)
        rates[reads].append(rate)
        costs[reads].append(cpu_s / ((end_s - begin_s) * rate))
    slower = [1 - read / alone for read, alone in zip(rates[True], rates[False], strict=True)]
    dearer = [read / alone - 1 for read, alone in zip(costs[True], costs[False], strict=True)]
    quartiles = statistics.quantiles(slower, n=4) if len(slower) > 1 else slower * 3
    return {
        "rate_alone": statistics.median(rates[False]),
        "rate_read": statistics.median(rates[True]),
        "slowdown": statistics.median(slower),
        "quartiles": [quartiles[0], quartiles[2]],
        "cpu_slowdown": statistics.median(dearer),
        "reads": len(reader.seconds),
        "read_p95_ms": 1000 * sorted(reader.seconds)[int(0.95 * len(reader.seconds))],
        "bar": BAR,
    }


if __name__ == "__main__":
    main()
