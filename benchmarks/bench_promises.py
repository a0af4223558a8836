"""Are the times kept that brim promises: of starting, answering, stopping and coming back?

    python benchmarks/bench_promises.py                    all, in some minutes; nothing else should run meanwhile
    python benchmarks/bench_promises.py --rows "stop"      rows whose names begin so

Commands run in new processes. All else is asked of a real service on loopback, with one worker and a SQLite file; pages
are opened in Chromium, if it is installed. Each row is measured three times, and the longest is compared with the bar.
"""

import argparse
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from brim.jobs.kinds import Spec
from brim.jobs.store import Catalogue
from brim.rf import from_mapping, generate
from brim.segmentation.scenes import make_cells
from brim.sequences.corpus.synthetic import make_sequences
from page import facts_of, installed, machine, markdown, table, tell
from service_client import JOBS, QUICK, Service, serving

TIMES = 3
CHROMIUM = shutil.which("chromium")
PAGES = ("/", "/runs", "/datasets")
NUM = 1000
ENDLESS = 100_000
ABOUT = "Seconds from asking to what the user waits for. Polling the service adds up to 0.02 s."
# kind of job: the dataset it reads, and settings with which it would go on for hours
STOPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "rf.generate": ("", {"num_samples": ENDLESS, **QUICK}),
    "rf.train": ("rf", {"epochs": ENDLESS, "batch_size": 8}),
    "segment.tune": ("", {"models": ["unet_tiny"], "size": 64, "seconds": 60.0}),
    "segment.train": ("images", {"model": "unet_tiny", "size": 32, "epochs": ENDLESS, "batch_size": 4}),
    "sequence.train": ("sequences", {"encoder_epochs": ENDLESS, "batch_size": 8}),
}


@dataclass(frozen=True)
class Promise:
    """Something that takes at most so long; `measure` gives the seconds of one time."""

    name: str
    bar_s: float
    measure: Callable[[], float]


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="", help="only rows whose names begin so")
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    command = "python benchmarks/bench_promises.py" + (f' --rows "{options.rows}"' if options.rows else "")
    results: dict[str, Any] = {"machine": machine(torch.device("cpu"), options.commit), "command": command}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        chosen = [one for one in promises(Bench(Path(folder), stack)) if one.name.startswith(options.rows)]
        results["promises"] = [measured(promise) for promise in chosen]
    rows = [
        [row["name"], f"{row['bar_s']:g}", f"{min(row['seconds']):.2f}", f"{max(row['seconds']):.2f}", row["verdict"]]
        for row in results["promises"]
    ]
    text = table(f"Seconds, shortest and longest of {TIMES}", ["promise", "bar", "from", "to", ""], rows)
    print(text)
    print(json.dumps(results))
    if options.markdown is not None:
        facts = facts_of(results, {name: installed(name) for name in ("dbos", "fastapi")})
        options.markdown.write_text(markdown(__doc__ or "", ABOUT, facts, text, json.dumps(results)))


def promises(bench: "Bench") -> list[Promise]:
    """All rows; the service starts with the first that asks it something."""
    return [
        Promise("import brim", 0.3, partial(run_s, "-c", "import brim")),
        Promise("first output: brim --help", 0.5, partial(run_s, "-m", "brim", "--help")),
        Promise("first output: a wrong option", 0.5, partial(run_s, "-m", "brim", "rf", "generate", "--no")),
        Promise(f"list {NUM} runs", 1.0, bench.list_runs),
        Promise("going down ends event streams", 2.5, bench.end_streams),
        *(Promise(f"first paint of {path}", 0.5, partial(bench.paint, path)) for path in PAGES if CHROMIUM),
        *([Promise(f"page of {NUM} jobs", 5.0, bench.open_jobs)] if CHROMIUM else []),
        *(Promise(f"stop {kind}", 5.0, partial(bench.stop, kind)) for kind in STOPPED),
        Promise("a killed worker goes on", 2.0, bench.kill_worker),
        Promise("SIGTERM ends the service", 10.0, bench.terminate),
    ]


def measured(promise: Promise) -> dict[str, Any]:
    """A row of the results."""
    tell(promise.name)
    seconds = [promise.measure() for _ in range(TIMES)]
    verdict = "kept" if max(seconds) <= promise.bar_s else "missed"
    return {"name": promise.name, "bar_s": promise.bar_s, "seconds": seconds, "verdict": verdict}


def run_s(*words: str) -> float:
    """How long a Python process takes, less what an empty one takes."""

    def seconds(*argv: str) -> float:
        began_s = time.perf_counter()
        subprocess.run([sys.executable, *argv], capture_output=True, check=False)
        return time.perf_counter() - began_s

    return seconds(*words) - min(seconds("-c", "pass") for _ in range(TIMES))


class Bench:
    """Data for jobs, and the service that runs them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack

    @cached_property
    def service(self) -> Service:
        """The service that most rows ask."""
        return self._stack.enter_context(serving(self.folder / "data"))

    @cached_property
    def crowded(self) -> Service:
        """A service with a dashboard, many runs and many jobs that have ended."""
        service = self._stack.enter_context(serving(self.folder / "crowded", dashboard=True))
        catalogue = Catalogue.open(f"sqlite:///{service.data / 'catalogue.sqlite'}")
        for number in range(NUM):
            name, summary = f"run {number}", {"dice": number / NUM}
            catalogue.runs.add(name=name, kind="segment.train", path=f"runs/{name}", config={}, summary=summary)
            row, _ = catalogue.jobs.submit(Spec("segment.tune", f"job {number}", {"size": 64}), makes="result")
            catalogue.jobs.move(row.id, "cancelled", of=["pending"], wanted="cancel")
        catalogue.close()
        return service

    @cached_property
    def page(self) -> Any:
        """A page of a browser that is logged in to the crowded service."""
        from playwright.sync_api import sync_playwright

        chromium = self._stack.enter_context(sync_playwright()).chromium
        browser = chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        self._stack.callback(browser.close)
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{self.crowded.port}/?token={self.crowded.token}")
        return page

    @cached_property
    def datasets(self) -> dict[str, str]:
        """Ids of a small dataset of each kind."""
        made = self.folder / "made"
        generate(from_mapping(QUICK), made / "rf", 64, device="cpu")
        for index in range(8):
            image, mask = make_cells(3, index, 64, 64)
            for name, pixels in (("images", image), ("masks", mask.astype(np.uint8) * 255)):
                (made / "images" / name).mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(made / "images" / name / f"{index}.png"), pixels)
        make_sequences(made / "sequences", 60, dim=8, classes=3, mean_length=12)
        return {kind: self._add(kind, made / kind) for kind in ("rf", "images", "sequences")}

    def list_runs(self) -> float:
        """All runs on one page, as the page that compares them asks for."""
        service = self.crowded
        return timed(lambda: service.ask("GET", f"/api/runs?per_page={NUM}&brief=true"))

    def paint(self, path: str) -> float:
        """Until the browser has painted something of a page."""
        self.page.goto(f"http://127.0.0.1:{self.crowded.port}{path}")
        self.page.wait_for_selector("h1")
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        return float(self.page.evaluate(paint)) / 1e3

    def open_jobs(self) -> float:
        """Until the first fifty jobs are on the page."""

        def show() -> None:
            self.page.goto(f"http://127.0.0.1:{self.crowded.port}/jobs")
            self.page.get_by_text("Page 1 of 20").wait_for()

        return timed(show)

    def stop(self, kind: str) -> float:
        """Cancel a job that computes."""
        reads, config = STOPPED[kind]
        if reads:
            config = {**config, "dataset_ids": [self.datasets[reads]]}
        job = self.service.ask("POST", JOBS, {"kind": kind, "name": kind, "config": config})["id"]
        self._wait(job, lambda now: now["progress"]["current"] > 0 or (kind == "segment.tune" and _is_running(now)))
        time.sleep(1.0)

        def cancel() -> None:
            self.service.ask("POST", f"{JOBS}/{job}/cancel")
            self._wait(job, lambda now: now["status"] == "cancelled")

        return timed(cancel)

    def kill_worker(self) -> float:
        """From the end of a worker in the middle of a job to the job's next attempt."""
        job = self.service.generate(ENDLESS)
        self._wait(job, lambda now: now["progress"]["current"] > 0)

        def kill() -> None:
            os.kill(self.service.children()["w0"], signal.SIGKILL)
            self._wait(job, lambda now: now["attempts"] == 2)

        seconds = timed(kill)
        self.service.ask("POST", f"{JOBS}/{job}/cancel")
        self._wait(job, lambda now: now["status"] == "cancelled")
        return seconds

    def terminate(self) -> float:
        """A service that generates."""
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "data") as service:
            job = service.generate(ENDLESS)
            self._wait(job, lambda now: now["progress"]["current"] > 0, service)
            service.process.terminate()
            return timed(service.process.wait)

    def end_streams(self) -> float:
        """A service with a client that listens to a job's events."""
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "data") as service:
            job = service.generate(ENDLESS)
            connection = http.client.HTTPConnection("127.0.0.1", service.port)
            connection.request("GET", f"{JOBS}/{job}/events", headers={"Authorization": f"Bearer {service.token}"})
            stream = connection.getresponse()
            stream.readline()
            service.process.terminate()
            return timed(stream.read)

    def _add(self, kind: str, path: Path) -> str:
        command = [sys.executable, "-m", "brim", "datasets", "add", kind, str(path), "--kind", kind, "--json"]
        done = subprocess.run([*command, "--data", str(self.service.data)], capture_output=True, check=True)
        return str(json.loads(done.stdout)["id"])

    def _wait(self, job: str, is_so: Callable[[dict[str, Any]], bool], service: Service | None = None) -> None:
        asked = service or self.service
        while not is_so(now := asked.ask("GET", f"{JOBS}/{job}")):
            if now["status"] in ("failed", "completed"):
                raise SystemExit(f"job {now['name']} is {now['status']}: {now.get('error')}")
            time.sleep(0.01)


def timed(ask: Callable[[], object]) -> float:
    """Seconds of a call."""
    began_s = time.perf_counter()
    ask()
    return time.perf_counter() - began_s


def _is_running(job: dict[str, Any]) -> bool:
    return bool(job["status"] == "running")


if __name__ == "__main__":
    main()
