"""How long do submit, list, show and cancel take while ten clients submit a hundred jobs?

    python benchmarks/bench_service_load.py [--url postgresql://user@host/database] [--markdown FILE]

SQLite in a temporary directory, or the PostgreSQL named (an empty database). Ten clients submit ten jobs each, as fast
as they are answered, while one worker generates; one more client lists, shows and cancels meanwhile.
"""

import argparse
import json
import queue
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from page import facts_of, installed, machine, markdown, table
from service_client import JOBS, Service, serving

CLIENTS, EACH = 10, 10
BAR_MS = 200.0
ABOUT = "A real service on loopback, one worker that runs a job meanwhile; seconds of whole requests."


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default=None)
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "data", options.url) as service:
        times = measure(service)
    kind = "PostgreSQL" if options.url else "SQLite"
    results: dict[str, Any] = {"machine": machine(torch.device("cpu"), options.commit), "database": kind}
    results["command"] = "python benchmarks/bench_service_load.py" + (" --url postgresql://…" if options.url else "")
    results |= {
        name: {f"p{share}_ms": quantile(seconds, share) for share in (50, 95)} for name, seconds in times.items()
    }
    rows = [
        [
            name,
            str(len(seconds)),
            f"{quantile(seconds, 50):.0f}",
            f"{quantile(seconds, 95):.0f}",
            f"{quantile(seconds, 100):.0f}",
        ]
        for name, seconds in times.items()
    ]
    title = f"{kind}: {CLIENTS} clients submit {EACH} jobs each; bar for list and cancel: p95 {BAR_MS:.0f} ms"
    text = table(title, ["request", "number", "p50 ms", "p95 ms", "longest ms"], rows)
    print(text)
    print(json.dumps(results))
    if options.markdown is not None:
        facts = facts_of(results, {"dbos": installed("dbos"), "fastapi": installed("fastapi")})
        options.markdown.write_text(markdown(__doc__ or "", ABOUT, facts, text, json.dumps(results)))


def measure(service: Service) -> dict[str, list[float]]:
    """Seconds of every request, by what it was."""
    service.generate(10_000_000)
    times: dict[str, list[float]] = {name: [] for name in ("submit", "list", "show", "cancel")}
    made: queue.SimpleQueue[str] = queue.SimpleQueue()

    def submit() -> None:
        for _ in range(EACH):
            made.put(timed(times["submit"], service.generate, 10_000_000))

    def look() -> None:
        for _ in range(CLIENTS * EACH):
            job = made.get(timeout=60)
            timed(times["list"], service.ask, "GET", JOBS)
            timed(times["show"], service.ask, "GET", f"{JOBS}/{job}")
            timed(times["cancel"], service.ask, "POST", f"{JOBS}/{job}/cancel")

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        for done in [pool.submit(look), *(pool.submit(submit) for _ in range(CLIENTS))]:
            done.result()
    return times


def timed(into: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    """The call's result; its seconds are noted."""
    began_s = time.monotonic()
    result = call(*arguments)
    into.append(time.monotonic() - began_s)
    return result


def quantile(seconds: list[float], percent: int) -> float:
    """In milliseconds."""
    return 1000 * sorted(seconds)[min(len(seconds) - 1, percent * len(seconds) // 100)]


if __name__ == "__main__":
    main()
