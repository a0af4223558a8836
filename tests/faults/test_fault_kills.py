"""Random `kill -9`s of workers and of the whole service while it generates and trains: nothing is lost or done twice.

The undisturbed results come from the library itself, called without a service. `make soak` does 200 kills
(BRIM_KILLS), `make test` 20.
"""

import hashlib
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_service import QUICK, Serve, brim, shards, until

KILLS = int(os.environ.get("BRIM_KILLS", "20"))
SEED = int(os.environ.get("BRIM_KILLS_SEED", "6"))
SAMPLES = 30 * KILLS
EPOCHS = 30 * KILLS
TRAIN = {"epochs": EPOCHS, "batch_size": 16, "checkpoint_every_s": 0.5}

UNDISTURBED = """
import json, sys
from pathlib import Path
import torch
from brim.rf import from_mapping, generate
from brim.rf.train import LocatorTraining, train
out, samples, config, recipe = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
generate(from_mapping(config), out / "data", samples, device="cpu")
generate(from_mapping({**config, "seed": 5}), out / "train-data", 64, device="cpu")
report = train([out / "train-data"], out / "run", LocatorTraining(**recipe), device="cpu")
print(json.dumps(report.as_dict()))
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets and a run made without a service and without a kill."""
    import subprocess
    import sys

    out = tmp_path_factory.mktemp("undisturbed")
    argv = [str(out), str(SAMPLES), json.dumps(QUICK), json.dumps({**TRAIN, "preload_to_gpu": True})]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", UNDISTURBED, *argv], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    (out / "report.json").write_text(done.stdout)
    return out


class Killer:
    """Kills something at random until it has killed so often as it should, as long as jobs run."""

    def __init__(self, serve: Serve, kills: int, rng: random.Random) -> None:
        self.serve, self.left, self.rng = serve, kills, rng
        self.done: dict[str, int] = {}

    def run(self, jobs: list[str]) -> None:
        end = time.monotonic() + 60 + 15 * self.left
        while self.left and (open_ := self._unfinished(jobs)):
            assert time.monotonic() < end, self.serve.said()
            self._wait(self.rng.choice(open_))
            self._kill(self.rng.choices(["w0", "w1", "api", "all"], [4, 4, 1, 2])[0])

    def _unfinished(self, jobs: list[str]) -> list[str]:
        return [job for job in jobs if self.serve.job(job)["status"] not in ("completed", "failed")]

    def _wait(self, job: str) -> None:
        """Mostly until a job got on, so that the kill has something to destroy; else any moment, also in a start."""
        if self.rng.random() < 0.35:
            time.sleep(self.rng.uniform(0.2, 2.5))
            return
        before = self.serve.job(job)["progress"]["current"]
        end = time.monotonic() + 40
        while time.monotonic() < end:
            now = self.serve.job(job)
            if now["progress"]["current"] > before or now["status"] in ("completed", "failed"):
                break
            time.sleep(0.1)
        time.sleep(self.rng.uniform(0, 0.4))

    def _kill(self, what: str) -> None:
        if what == "all":
            self.serve.kill()
            self.serve.start(ready=False)
        else:
            self.serve.kill_child(what)
        self.done[what] = self.done.get(what, 0) + 1
        self.left -= 1
        until(lambda: self.serve.try_status("/health") == 200, 30, self.serve.said)


def add_dataset(serve: Serve, path: Path) -> str:
    argv = ["datasets", "add", "training data", path, "--kind", "rf", "--data", serve.data, "--json"]
    made = brim(*argv, *(["--database", serve.database] if serve.database else []))
    assert made.returncode == 0, made.stderr
    return str(json.loads(made.stdout)["id"])


def digests(run: Path) -> list[str]:
    names = sorted(file for file in run.rglob("model.safetensors"))
    return [f"{file.relative_to(run)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in names]


@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * KILLS)
def test_kills_lose_nothing_and_do_nothing_twice(
    make_serve: Callable[..., Serve], database: str | None, undisturbed: Path, tmp_path: Path
):
    hooks = os.pathsep.join([str(Path(__file__).parent / "hooks"), os.environ.get("PYTHONPATH", "")])
    notes = tmp_path / "notes"
    serve = make_serve(database, workers=2, PYTHONPATH=hooks, BRIM_TEST_NOTES=str(notes)).start()
    dataset = add_dataset(serve, undisturbed / "train-data")
    made = serve.generate(SAMPLES)["id"]
    trained = serve.submit({"job_name": "killed", "config": {"dataset_ids": [dataset], **TRAIN}})["id"]
    killer = Killer(serve, KILLS, random.Random(SEED))

    killer.run([made, trained])
    generation, training = (serve.wait(job, "completed", seconds=240) for job in (made, trained))

    assert killer.left == 0, f"the jobs were done after {killer.done}"
    assert shards(serve.data / "datasets" / generation["result"]["dataset_id"]) == shards(undisturbed / "data")
    expected = json.loads((undisturbed / "report.json").read_text())
    assert training["result"]["best_val_loss"] == expected["best_val_loss"]
    run = serve.data / "runs" / training["result"]["run_id"]
    assert digests(run) == digests(undisturbed / "run")
    assert generation["attempts"] + training["attempts"] > 4
    assert serve.get("/api/training/jobs")["total"] == 2
    attempts = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [note for note in attempts if note["others"]] == []
