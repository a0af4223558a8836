"""Random `kill -9`s of workers and of the whole service while it generates and trains: nothing is lost or done twice.

The undisturbed results come from the library itself, called without a service. `make test` does 6 kills (BRIM_KILLS)
and, on PostgreSQL, 3: of a worker, the API and the whole service; soak.py does more of it, with more around it.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_service import QUICK, Serve, brim, shards

from waiting import until

pytestmark = pytest.mark.long

KILLS = int(os.environ.get("BRIM_KILLS", "6"))
SEED = int(os.environ.get("BRIM_KILLS_SEED", "40"))
SAMPLES = 96
TRAIN = {"epochs": 60, "batch_size": 16, "checkpoint_every_s": 0.5}

UNDISTURBED = """
import json, sys
from pathlib import Path
import torch
from brim.rf import from_mapping, generate
from brim.rf.config import LocatorTraining
from brim.rf.location import train
out, samples, config, recipe = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
generate(from_mapping(config), out / "data", samples, device="cpu")
generate(from_mapping({**config, "seed": 5}), out / "train-data", 64, device="cpu")
report = train([out / "train-data"], out / "run", LocatorTraining(**recipe), device="cpu")
print(json.dumps(report.as_dict()))
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets and a run made without a service and without a kill."""
    out = tmp_path_factory.mktemp("undisturbed")
    argv = [str(out), str(SAMPLES), json.dumps(QUICK), json.dumps({**TRAIN, "preload_to_gpu": True})]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", UNDISTURBED, *argv], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    (out / "report.json").write_text(done.stdout)
    return out


class Killer:
    """Kills workers, the API and the whole service at random moments."""

    def __init__(self, serve: Serve, rng: random.Random) -> None:
        self.serve, self.rng = serve, rng
        self.done: dict[str, int] = {}

    def strike(self, jobs: list[str]) -> None:
        """Wait for a moment, then kill."""
        self._wait(self.rng.choice(jobs))
        what = self.rng.choices(["w0", "w1", "api", "all"], [4, 4, 1, 2])[0]
        if what == "all":
            self.serve.kill()
            self.serve.start(ready=False)
        else:
            self.serve.kill_child(what)
        self.done[what] = self.done.get(what, 0) + 1
        until(lambda: self.serve.try_status("/health") == 200, self.serve.said)

    def _wait(self, job: str) -> None:
        """Every other time until the job got on, so that the kill has something to destroy; else any moment."""
        if self.rng.random() < 0.5:
            time.sleep(self.rng.uniform(0.1, 2.0))
            return
        before = self.serve.job(job)["progress"]["current"]
        self.serve.wait_progress(job, before + 1)
        time.sleep(self.rng.uniform(0, 0.3))


def add_dataset(serve: Serve, path: Path) -> str:
    argv = ["datasets", "add", "training data", path, "--kind", "rf", "--data", serve.data, "--json"]
    made = brim(*argv, *(["--database", serve.database] if serve.database else []))
    assert made.returncode == 0, made.stderr
    return str(json.loads(made.stdout)["id"])


def digests(run: Path) -> list[str]:
    names = sorted(file for file in run.rglob("model.safetensors"))
    return [f"{file.relative_to(run)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in names]


@pytest.mark.timeout(600 + 60 * KILLS)
def test_kills_lose_nothing_and_do_nothing_twice(
    make_serve: Callable[..., Serve], database: str | None, undisturbed: Path, tmp_path: Path
):
    notes = tmp_path / "notes"
    serve = make_serve(database, workers=2, BRIM_TEST_NOTES=str(notes)).start(ready=False)
    dataset = add_dataset(serve, undisturbed / "train-data")
    makers: dict[str, list[str]] = {"rf.generate": [], "rf.train": []}
    killer = Killer(serve, random.Random(SEED))

    def submit(kind: str) -> None:
        body = {"job_name": "killed", "config": {"dataset_ids": [dataset], **TRAIN}}
        job = serve.generate(SAMPLES) if kind == "rf.generate" else serve.submit(body)
        makers[kind].append(job["id"])

    for _ in range(KILLS):  # there is always one of either to be hit
        for kind, ids in makers.items():
            if not ids or serve.job(ids[-1])["status"] == "completed":
                submit(kind)
        killer.strike([ids[-1] for ids in makers.values()])
    done = {kind: [serve.wait(job, "completed") for job in ids] for kind, ids in makers.items()}

    expected = json.loads((undisturbed / "report.json").read_text())
    for job in done["rf.generate"]:
        assert shards(serve.data / "datasets" / job["result"]["dataset_id"]) == shards(undisturbed / "data")
    for job in done["rf.train"]:
        assert job["result"]["best_val_loss"] == expected["best_val_loss"]
        assert digests(serve.data / "runs" / job["result"]["run_id"]) == digests(undisturbed / "run")
    jobs = [job for found in done.values() for job in found]
    assert serve.get("/api/training/jobs")["total"] == len(jobs)
    assert sum(job["attempts"] for job in jobs) > len(jobs), f"nothing was hit by {killer.done}"
    attempts = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [note for note in attempts if note["others"]] == []
