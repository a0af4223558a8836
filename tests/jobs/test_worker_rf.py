"""Generation and training by real workers that are killed: the same bytes and the same loss as undisturbed."""

import hashlib
from pathlib import Path

import pytest
from desk import Desk

from brim.engine.storage.dataset import Dataset
from brim.jobs.kinds import KINDS, read_body

GENERATION = {
    "dataset_name": "night run",
    "num_samples": 96,
    "dataset_type": "feature_based",
    "config": {"seed": 3, "samples_per_shard": 16, "batch_size": 4},
}
TRAINING = {"epochs": 120, "batch_size": 16, "checkpoint_every_s": 1.0}
KILLS = 3


@pytest.fixture
def desk(tmp_path, database_url):
    made = Desk(tmp_path / "data", None if database_url.startswith("sqlite") else database_url, toy=False)
    made.start()
    yield made
    made.close()


def submit(desk: Desk, body: dict) -> str:
    spec = read_body(body)
    kind = KINDS[spec.kind]
    inputs = {"dataset_ids": list(spec.dataset_ids), "run_id": spec.run_id}
    return desk.submit(spec.kind, kind.makes, inputs, spec.name, **spec.config)


def disturbed(desk: Desk, body: dict, steps: int):
    """The job, whose worker was killed each time it had come a share further."""
    job_id = submit(desk, body)
    for kill in range(KILLS):
        desk.past(job_id, 1 + kill * steps // (KILLS + 1))
        desk.kill()
    return desk.until(job_id, "completed", "failed")


def sums(folder: Path, pattern: str) -> dict[str, str]:
    files = sorted(folder.glob(pattern))
    assert files
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.long
def test_a_generation_and_a_training_survive_kills(desk):
    whole = desk.until(submit(desk, GENERATION), "completed", "failed")
    assert whole.error is None
    again = disturbed(desk, GENERATION, 96)

    assert (again.status, again.error) == ("completed", None)
    assert again.attempts == KILLS + 1
    assert sums(desk.data / again.out, "shards/*") == sums(desk.data / whole.out, "shards/*")
    made = desk.catalogue.datasets.get(again.result["dataset_id"])
    assert (made.state, made.items) == ("ready", 96)

    training = {"job_name": "locator", "config": {"dataset_ids": [whole.result["dataset_id"]], **TRAINING}}
    trained = desk.until(submit(desk, training), "completed", "failed")
    assert trained.error is None
    retrained = disturbed(desk, training, trained.total)

    assert (retrained.status, retrained.error) == ("completed", None)
    assert retrained.attempts == KILLS + 1
    assert retrained.result["best_val_loss"] == trained.result["best_val_loss"]
    weights = "train/*/model.safetensors"
    assert sums(desk.data / retrained.out, weights) == sums(desk.data / trained.out, weights)
    assert desk.catalogue.runs.get(retrained.result["run_id"]).state == "ready"
    for job in (whole, again, trained, retrained):
        assert str(desk.data) not in str(job.result)


def test_a_cancelled_generation_stops_by_itself_and_is_a_valid_dataset(tmp_path):
    desk = Desk(tmp_path / "data", toy=False, clock=lambda: 0.0)
    desk.start()
    try:
        job_id = submit(desk, {**GENERATION, "num_samples": 100_000})
        desk.past(job_id, 20)

        desk.stop(job_id)
        job = desk.until(job_id, "cancelled")

        assert desk.workers["w0"].poll() is None
        kept = desk.catalogue.datasets.get(job.output_id)
        assert kept.state == "partial"
        found = Dataset(desk.data / job.out)
        assert len(found) == kept.items >= 20
        found.verify()
    finally:
        desk.close()
