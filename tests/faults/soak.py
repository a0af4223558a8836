"""Kills a service for hours while it works, and counts what was lost; `make soak` runs it.

    python tests/faults/soak.py --kills 1000 --minutes 240 --database both --out soak

Each kind of job runs once undisturbed: what it writes, every later job of its kind must write, byte for byte. Then jobs
of all kinds, predictions, uploads and aborted requests go on while workers, the API, the predictor and the whole
service are killed at random; in between the disk is full for some seconds, and the clock jumps. At the end every job
must have completed. The counts are printed as a table and written to OUT/soak.json and OUT/soak.txt.
"""

import argparse
import hashlib
import http.client
import json
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import cv2
import numpy as np

from brim.segmentation.scenes import make_cells

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from fault_service import ENDED, JOBS, QUICK, Serve, brim, children_of, command_of
from postgres import Postgres

from waiting import until

SAMPLES = 64
TRAIN = {"epochs": 40, "batch_size": 16, "checkpoint_every_s": 0.5}
TARGETS = {"w0": 4, "w1": 4, "api": 2, "predict": 1, "dashboard": 1, "all": 2}  # what is killed, how often
PLENTY, FULL = str(10**12), "1000"  # bytes free on the disk
EDGE = "edge-of-the-form"
PATIENCE_S = 300.0
NONE = ("jobs lost", "jobs done twice", "differing results", "wrong predictions")  # of these there may be
FOLDERS = {"rf.generate": "datasets", "rf.train": "runs", "segment.predict": "results"}

_Result = TypeVar("_Result")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="of all databases together")
    parser.add_argument("--minutes", type=float, default=240, help="longest, of all databases together")
    parser.add_argument("--database", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    options = parser.parse_args()
    names = ("sqlite", "postgres") if options.database == "both" else (options.database,)
    reports = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="brim-soak-") as folder, _database(name) as url:
            soak = Soak(Path(folder), url, random.Random(options.seed))
            reports[name] = soak.run(options.kills // len(names), 60 * options.minutes / len(names))
    options.out.mkdir(parents=True, exist_ok=True)
    text = table(reports)
    (options.out / "soak.json").write_text(json.dumps(reports, indent=1) + "\n")
    (options.out / "soak.txt").write_text(text)
    print(text)  # noqa: T201
    return int(any(report[name] for report in reports.values() for name in NONE))


@contextmanager
def _database(name: str) -> Iterator[str | None]:
    if name == "sqlite":
        yield None
        return
    with Postgres() as server:
        yield server.fresh()


class Soak:
    """One service under attack."""

    def __init__(self, folder: Path, database: str | None, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.notes, self.free, self.clock = folder / "notes", folder / "free", folder / "clock"
        self.free.write_text(PLENTY)
        self.clock.write_text("0")
        files = {"NOTES": self.notes, "CLOCK": self.clock}
        env = {f"BRIM_TEST_{name}": str(file) for name, file in files.items()}
        self.serve = Serve(
            folder / "data", database=database, workers=2, dashboard=True, BRIM_FREE_BYTES_FILE=str(self.free), **env
        )
        self.jobs: dict[str, list[str]] = {kind: [] for kind in FOLDERS}
        self.reference: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()

    def run(self, kills: int, seconds: float) -> dict[str, Any]:
        try:
            self.serve.start(ready=False)
            until(lambda: self.serve.try_status("/ready") == 200, self.serve.said)
            self.prepare()
            began_s = time.monotonic()
            with Watch(self.serve) as watch, Visitors(self) as visitors:
                while sum(self.killed.values()) < kills and time.monotonic() - began_s < seconds:
                    self.refill()
                    self.strike()
                lost = [job for ids in self.jobs.values() for job in ids if not self.completes(job)]
            return self.report(lost, time.monotonic() - began_s) | {
                "predictions": dict(visitors.predicted),
                "uploads": dict(visitors.uploaded),
                "wrong predictions": visitors.wrong,
                "processes": watch.summary(),
            }
        finally:
            self.serve.close()

    # Jobs

    def prepare(self) -> None:
        """Data to work on, a model, and one undisturbed job of each kind."""
        serve = self.serve
        cells = {"images": {}, "masks": {}}
        for number in range(12):
            image, mask = make_cells(5, number, 64, 64)
            cells["images"][f"{number:02}.png"] = png(image[..., ::-1])
            cells["masks"][f"{number:02}.png"] = png(mask.astype(np.uint8) * 255)
        self.cells = cells["images"]
        status, dataset = post_form(serve, "/api/datasets", {"name": "cells", "kind": "images"}, cells)
        assert status == 201, dataset
        body = {"dataset_ids": [dataset["id"]], "model": "unet_tiny", "epochs": 1, "size": 64}
        job = self.submit({"kind": "segment.train", "name": "cells", "config": body})
        trained = serve.wait(job, "completed")
        run = trained["result"]["run_id"]
        added = brim(
            "models", "add", "cells", serve.data / "runs" / run, "--network", "unet_tiny", "--data", serve.data,
            *(["--database", serve.database] if serve.database else []),
        )  # fmt: skip
        assert added.returncode == 0, added.stderr
        radio = serve.wait(serve.generate(32, seed=5)["id"], "completed")["result"]["dataset_id"]
        self.bodies = {
            "rf.generate": {"dataset_name": "soak", "num_samples": SAMPLES, "config": QUICK},
            "rf.train": {"job_name": "soak", "config": {"dataset_ids": [radio], **TRAIN}},
            "segment.predict": {
                "kind": "segment.predict", "name": "soak",
                "config": {"dataset_ids": [dataset["id"]], "run_id": run, "strict": True},
            },
        }  # fmt: skip
        self.others = serve.get(JOBS)["total"]
        for kind in FOLDERS:
            self.jobs[kind].append(self.submit(self.bodies[kind]))
            serve.wait(self.jobs[kind][0], "completed")
            self.reference[kind] = self.digest(kind, self.jobs[kind][0])
        self.expected = {
            name: until_answered(partial(predicted_outlines, serve, data)) for name, data in self.cells.items()
        }

    def submit(self, body: dict[str, Any]) -> str:
        """Until it is accepted, under one key: however often it is sent, it is one job."""
        key = uuid.uuid4().hex
        return str(until_answered(lambda: self.serve.submit(body, key))["id"])

    def refill(self) -> None:
        """One job of each kind to be hit, and those that a full disk failed go on."""
        for kind, ids in self.jobs.items():
            job = self.job(ids[-1])
            if job["status"] == "failed":
                self.resume(ids[-1])
            elif job["status"] == "completed":
                ids.append(self.submit(self.bodies[kind]))

    def job(self, id: str) -> dict[str, Any]:
        return until_answered(lambda: self.serve.job(id))

    def resume(self, id: str) -> None:
        self.counts["jobs resumed"] += 1
        until_answered(lambda: self.serve.act(id, "resume"))

    def completes(self, id: str) -> bool:
        end_s = time.monotonic() + PATIENCE_S
        while (status := self.job(id)["status"]) != "completed" and time.monotonic() < end_s:
            if status == "failed" and self.counts["disk full"]:
                self.resume(id)
            elif status in ENDED:
                return False
            time.sleep(0.5)
        return status == "completed"

    def digest(self, kind: str, id: str) -> str:
        """Of all that a job wrote and that must not depend on when."""
        result = self.job(id)["result"]
        folder = self.serve.data / FOLDERS[kind] / (result.get("dataset_id") or result.get("run_id") or id)
        pattern = {"rf.generate": "shards/*.safetensors", "rf.train": "**/model.safetensors"}.get(kind, "**/*.geojson")
        files = sorted(folder.glob(pattern))
        assert files, f"{kind} wrote nothing below {folder}"
        return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()

    # Faults

    def strike(self) -> None:
        """At any moment, or every other time once a job got on, so that there is something to destroy."""
        if self.rng.random() < 0.5:
            time.sleep(self.rng.uniform(0.1, 2.0))
        else:
            self.wait_progress(self.rng.choice(list(self.jobs.values()))[-1])
        chance = self.rng.random()
        if chance < 0.06:
            self.counts["disk full"] += 1
            self.free.write_text(FULL)
            time.sleep(self.rng.uniform(1, 4))
            self.free.write_text(PLENTY)
        elif chance < 0.12:
            self.counts["clock steps"] += 1
            self.clock.write_text(str(self.rng.choice((-7200, -3600, -60, 0, 60, 3600))))
        else:
            target = self.rng.choices(list(TARGETS), list(TARGETS.values()))[0]
            if target == "all":
                self.serve.kill()
                self.serve.start(ready=False)
            else:
                self.serve.kill_child(target)
            self.killed[target] += 1
        until(lambda: self.serve.try_status("/health") == 200, self.serve.said)

    def wait_progress(self, id: str) -> None:
        before, end_s = self.job(id), time.monotonic() + 40
        while time.monotonic() < end_s:
            now = self.job(id)
            if now["progress"]["current"] > before["progress"]["current"] or now["status"] in ENDED:
                break
            time.sleep(0.2)

    def report(self, lost: list[str], seconds: float) -> dict[str, Any]:
        listed = self.serve.get(JOBS)["total"] - self.others
        submitted = sum(map(len, self.jobs.values()))
        together = sum(bool(json.loads(line)["others"]) for line in self.notes.read_text().splitlines())
        done = [(kind, id) for kind, ids in self.jobs.items() for id in ids if id not in lost]
        return {
            "minutes": round(seconds / 60, 1),
            "kills": dict(self.killed),
            "disk full": self.counts["disk full"],
            "clock steps": self.counts["clock steps"],
            "jobs": {kind: len(ids) for kind, ids in self.jobs.items()},
            "attempts": sum(self.job(id)["attempts"] for _, id in done),
            "jobs resumed": self.counts["jobs resumed"],
            "jobs lost": len(lost) + max(0, submitted - listed),
            "jobs done twice": max(0, listed - submitted) + together,
            "differing results": sum(self.digest(kind, id) != self.reference[kind] for kind, id in done),
        }


class Background(threading.Thread):
    """Runs until the block ends."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ending = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.join(120)


class Visitors(Background):
    """Predicts and uploads, and aborts every third request; what is refused while a process is away is no error."""

    def __init__(self, soak: Soak) -> None:
        super().__init__()
        self.soak = soak
        self.predicted: Counter[str] = Counter()
        self.uploaded: Counter[str] = Counter()
        self.wrong = 0

    def run(self) -> None:
        names = list(self.soak.cells)
        for number in range(10**9):
            if self.ending.wait(0.2):
                return
            name = names[number % len(names)]
            for counter, visit in ((self.predicted, self.predict), (self.uploaded, self.upload)):
                try:
                    counter[visit(name, abort=number % 3 == 2)] += 1
                except (OSError, http.client.HTTPException):
                    counter["no answer"] += 1

    def predict(self, name: str, abort: bool) -> str:
        status, answer = predict(self.soak.serve, self.soak.cells[name], abort=abort)
        if status == 200 and outlines(answer) != self.soak.expected[name]:
            self.wrong += 1
        return "aborted" if abort else str(status)

    def upload(self, name: str, abort: bool) -> str:
        serve, files = self.soak.serve, {"images": {name: self.soak.cells[name] * (400 if abort else 1)}}
        status, dataset = post_form(serve, "/api/datasets", {"name": "upload", "kind": "images"}, files, abort=abort)
        if status == 201:
            serve.ask("DELETE", f"/api/datasets/{dataset['id']}")
        return "aborted" if abort else str(status)


class Watch(Background):
    """Memory and open files of every process of a service, once a second."""

    def __init__(self, serve: Serve) -> None:
        super().__init__()
        self.serve = serve
        self.samples: dict[tuple[str, int], list[tuple[float, float, int]]] = {}  # seconds, MiB, files

    def run(self) -> None:
        while not self.ending.wait(1.0):
            process = self.serve.process
            if process is not None:
                self.look_at_tree(process.pid)

    def look_at_tree(self, pid: int) -> None:
        self.look(pid)
        for child in children_of(pid):
            self.look_at_tree(child)

    def look(self, pid: int) -> None:
        words = command_of(pid)
        module = words[words.index("-m") + 1] if "-m" in words else "other"
        name = {"brim": "supervisor"}.get(module, module.removeprefix("brim.").removesuffix(".main"))
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            mib = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except (OSError, StopIteration):
            return
        self.samples.setdefault((name, pid), []).append((time.monotonic(), mib, files))

    def summary(self) -> dict[str, dict[str, float]]:
        """By name, of the process that lived longest: seconds, largest MiB, slope of its second half, open files."""
        longest: dict[str, list[tuple[float, float, int]]] = {}
        for (name, _), samples in self.samples.items():
            if len(samples) > len(longest.get(name, ())):
                longest[name] = samples
        most = Counter(name for name, _ in self.samples)
        out = {}
        for name, samples in sorted(longest.items()):
            at_s, mib, files = np.array(samples).T
            late = len(samples) // 2  # before, it starts and loads what it needs
            slope = float(np.polyfit(at_s[late:] - at_s[late], mib[late:], 1)[0] * 60) if late > 10 else 0.0
            out[name] = {
                "processes": most[name],
                "seconds": round(float(at_s[-1] - at_s[0])),
                "MiB": round(float(mib.max())),
                "MiB per minute": round(slope, 2),
                "files at first": int(files[0]),
                "files at most": int(files.max()),
            }
        return out


# Requests


def until_answered(ask: Callable[[], _Result]) -> _Result:
    """Again while a process is away."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except (OSError, http.client.HTTPException, AssertionError):
            if time.monotonic() > end_s:
                raise
            time.sleep(0.3)


def png(pixels: "np.ndarray[Any, Any]") -> bytes:
    return bytes(cv2.imencode(".png", pixels)[1])


def post_form(
    serve: Serve, path: str, texts: dict[str, str], files: dict[str, dict[str, bytes]], *, abort: bool = False
) -> tuple[int, Any]:
    """A form with files; aborted, half of it is sent and the connection cut: status 0."""
    parts = [f'name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in texts.items()]
    for field, named in files.items():
        for name, data in named.items():
            parts.append(f'name="{field}"; filename="{name}"\r\n\r\n'.encode() + data + b"\r\n")
    head = f"--{EDGE}\r\nContent-Disposition: form-data; ".encode()
    body = b"".join(head + part for part in parts) + f"--{EDGE}--\r\n".encode()
    connection = http.client.HTTPConnection("127.0.0.1", serve.port, timeout=60)
    try:
        connection.putrequest("POST", path)
        for name, value in {
            "Authorization": f"Bearer {serve.token}",
            "Content-Type": f"multipart/form-data; boundary={EDGE}",
            "Content-Length": str(len(body)),
        }.items():
            connection.putheader(name, value)
        connection.endheaders(body[: len(body) // 2] if abort else body)
        if abort:
            return 0, None
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def predict(serve: Serve, image: bytes, *, abort: bool = False) -> tuple[int, Any]:
    return post_form(serve, "/api/segment", {}, {"file": {"a.png": image}}, abort=abort)


def predicted_outlines(serve: Serve, image: bytes) -> list[Any]:
    status, answer = predict(serve, image)
    assert status == 200, answer
    return outlines(answer)


def outlines(answer: Any) -> list[Any]:
    return [feature["geometry"] for feature in answer["features"]]


# The table


def table(reports: dict[str, dict[str, Any]]) -> str:
    """All counts of all databases, and the longest-lived process of each name."""
    lines = []
    for database, report in reports.items():
        lines.append(database)
        lines += [f"  {name:36}{_words(value)}" for name, value in report.items() if name != "processes"]
        lines += [f"  {name:36}{_words(facts)}" for name, facts in report["processes"].items()]
    return "\n".join(lines) + "\n"


def _words(value: Any) -> str:
    return ", ".join(f"{key} {number}" for key, number in value.items()) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    sys.exit(main())
