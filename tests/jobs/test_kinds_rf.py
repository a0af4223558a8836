"""rf.generate, rf.train and rf.evaluate as jobs: results, refusals and words of every batch."""

from dataclasses import replace

import pytest
import torch
from kind_inputs import Watched

from brim.errors import BrimError
from brim.jobs.kinds import KINDS, Inputs, read_body
from brim.rf.config import GenerateConfig
from brim.rf.generation.dataset import generate

torch.set_num_threads(1)

SMALL = {"num_samples": 40, "duration_s": 0.2, "samples_per_shard": 16, "seed": 5, "batch_size": 4}
RECIPE = {"epochs": 12, "batch_size": 8, "learning_rate": 0.003}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset that an undisturbed job made, beside what the job said."""
    job = Watched("rf.generate", tmp_path_factory.mktemp("datasets") / "made", SMALL)
    job.result = job.run()
    job.path = job._task.out
    return job


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run that an undisturbed job trained."""
    job = Watched("rf.train", tmp_path_factory.mktemp("runs") / "run", RECIPE, datasets=[dataset.path])
    job.result = job.run()
    job.path = job._task.out
    return job


def flows(job):
    return [progress.flow for progress in job.told if progress.flow is not None]


# rf.generate


def test_generation_says_what_it_made_and_where_it_is_after_every_batch(dataset):
    assert (dataset.result["dataset_id"], dataset.result["accepted"]) == ("made", 40)
    assert {"samples_per_s", "rejected", "ceiling_share"} <= dataset.result.keys()
    assert "dataset" not in dataset.result
    assert sorted(set(dataset.currents)) == list(range(0, 41, 4))
    assert dataset.currents == sorted(dataset.currents)
    assert dataset.told[-1].total == 40


def test_a_generation_says_what_its_compute_stage_waits_for(dataset):
    said = flows(dataset)

    assert {frozenset(flow.waiting) for flow in said} == {frozenset({"preparing", "writing"})}
    assert [flow.seconds for flow in said] == sorted(flow.seconds for flow in said)
    compute, seconds = dataset.result["stages"]["compute"], dataset.result["seconds"]
    assert 0 < said[-1].seconds <= seconds
    assert said[-1].waiting["preparing"] <= compute["wait_input_s"]
    assert sum(said[-1].waiting.values()) <= said[-1].seconds


def test_a_generation_that_was_finished_before_it_was_recorded_gives_the_same_result(dataset):
    again = Watched("rf.generate", dataset.path, SMALL).run()

    assert again == dataset.result


def test_the_estimate_of_a_dataset_is_close_and_from_above(dataset):
    actual = sum(file.stat().st_size for file in dataset.path.rglob("*") if file.is_file())

    estimate = KINDS["rf.generate"].estimate_bytes(dataset.spec, Inputs())

    assert actual <= estimate <= actual + 65_536


# rf.train


def test_training_says_which_run_it_made_and_what_its_steps_wait_for(trained):
    assert (trained.result["run_id"], trained.result["epochs"], trained.result["tier"]) == ("run", 12, "ram")
    assert trained.result["best_val_loss"] is not None
    assert trained.currents == sorted(trained.currents)
    assert set(trained.currents) == set(range(61))  # of every step
    solving = [progress for progress in trained.told if progress.message.startswith("solving")]
    assert solving
    assert all(progress.flow is None for progress in solving)
    assert any(progress.message.startswith("epoch 12/12, loss") for progress in trained.told)
    said = flows(trained)[-1]
    assert said.waiting.keys() == {"data", "copy", "logging", "checkpoint"}
    assert {cause: trained.result["waiting"][cause] for cause in said.waiting} == pytest.approx(said.waiting)
    assert 0 < sum(said.waiting.values()) < said.seconds


def test_what_a_run_takes_on_disk_is_estimated_from_above(trained):
    actual = sum(file.stat().st_size for file in trained.path.rglob("*") if file.is_file())

    assert actual < KINDS["rf.train"].estimate_bytes(trained.spec, trained.inputs)


def test_datasets_that_do_not_fit_together_are_refused_before_a_job_is_queued(dataset, trained, tmp_path):
    other = replace(GenerateConfig(duration_s=0.2, samples_per_shard=16, seed=6), fading="none")
    generate(other, tmp_path / "other", 3, device="cpu")
    spec = read_body({"job_name": "a", "config": {"dataset_ids": ["a", "b"]}})

    KINDS["rf.train"].check(trained.spec, trained.inputs)
    words = r"config\.dataset_ids\[1\] has fading=none, config\.dataset_ids\[0\] has"
    with pytest.raises(BrimError, match=words) as caught:
        KINDS["rf.train"].check(spec, Inputs(datasets=(dataset.path, tmp_path / "other")))
    assert caught.value.field == "config.dataset_ids[1]"


def test_too_few_samples_are_refused_before_a_job_is_queued(tmp_path):
    generate(GenerateConfig(duration_s=0.2), tmp_path / "one", 1, device="cpu")
    spec = read_body({"job_name": "a", "config": {"dataset_ids": ["a"]}})

    with pytest.raises(BrimError, match="leaves nothing to train on"):
        KINDS["rf.train"].check(spec, Inputs(datasets=(tmp_path / "one",)))


# rf.evaluate


def test_a_run_is_evaluated_also_after_a_stop(dataset, trained, tmp_path):
    inputs = {"datasets": [dataset.path], "run": trained.path}
    stopped = Watched(
        "rf.evaluate", tmp_path / "job", {}, stop_when=lambda where: where.message == "locating", **inputs
    )
    assert stopped.run() is None
    assert stopped.told[-1].message.startswith("locating")
    job = Watched("rf.evaluate", tmp_path / "job", {}, **inputs)

    KINDS["rf.evaluate"].check(job.spec, job.inputs)
    result = job.run()

    assert {"median_error_m", "crlb_ratio", "coverage", "baselines"} <= result["metrics"].keys()
    assert result["samples"] == job.currents[-1] == 40
    assert result["files"] == ["evaluation.html", "errors.json"]
    files = [tmp_path / "job" / name for name in result["files"]]
    assert sum(file.stat().st_size for file in files) < KINDS["rf.evaluate"].estimate_bytes(job.spec, job.inputs)
    assert all(str(dataset.path.parent) not in file.read_text() for file in files)


def test_a_run_without_weights_is_refused_before_a_job_is_queued(dataset, tmp_path):
    (tmp_path / "run").mkdir()
    job = Watched("rf.evaluate", tmp_path / "job", {}, datasets=[dataset.path], run=tmp_path / "run")

    with pytest.raises(BrimError, match=r"config\.run_id cannot be used: it has no run\.json") as caught:
        KINDS["rf.evaluate"].check(job.spec, job.inputs)
    assert caught.value.field == "config.run_id"
