"""rf.generate, rf.train and rf.evaluate as jobs: words of every batch, a stop after one, the same bits after it."""

import shutil
from dataclasses import replace

import pytest
import torch
from kind_inputs import Watched, digests

from brim.engine.storage.dataset import Dataset
from brim.errors import BrimError, CheckpointError
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


# rf.generate


def test_a_generated_dataset_is_the_command_lines(dataset, tmp_path):
    config = GenerateConfig(duration_s=0.2, samples_per_shard=16, seed=5)
    generate(config, tmp_path / "data", 40, device="cpu")

    assert digests(dataset.path, "shards/*") == digests(tmp_path / "data", "shards/*")


def test_generation_says_which_dataset_it_made(dataset):
    assert dataset.result["dataset_id"] == "made"
    assert dataset.result["accepted"] == 40
    assert {"samples_per_s", "rejected", "ceiling_share"} <= dataset.result.keys()
    assert "dataset" not in dataset.result


def test_generation_tells_where_it_is_after_every_batch(dataset):
    assert sorted(set(dataset.currents)) == list(range(0, 41, 4))
    assert dataset.currents == sorted(dataset.currents)
    assert dataset.told[-1].total == 40


def test_a_stopped_generation_leaves_a_usable_dataset_and_goes_on_to_the_same_bits(dataset, tmp_path):
    first = Watched("rf.generate", tmp_path / "made", SMALL, stop_when=lambda where: where.current >= 8)

    assert first.run() is None
    assert first.steps_after_stop == 0
    there = Dataset(tmp_path / "made")
    there.verify()
    assert len(there) == 8

    result = Watched("rf.generate", tmp_path / "made", SMALL).run()
    assert result["dataset_id"] == "made"
    assert digests(tmp_path / "made", "shards/*") == digests(dataset.path, "shards/*")


def test_a_generation_that_was_finished_before_it_was_recorded_gives_the_same_result(dataset):
    again = Watched("rf.generate", dataset.path, SMALL).run()

    assert again == dataset.result


def test_the_estimate_of_a_dataset_is_close_and_from_above(dataset):
    actual = sum(file.stat().st_size for file in dataset.path.rglob("*") if file.is_file())

    estimate = KINDS["rf.generate"].estimate_bytes(dataset.spec, Inputs())

    assert actual <= estimate <= actual + 65_536


# rf.train


def test_training_says_which_run_it_made(trained):
    assert trained.result["run_id"] == "run"
    assert trained.result["epochs"] == 12
    assert trained.result["best_val_loss"] is not None
    assert trained.currents == sorted(trained.currents)
    assert set(trained.currents) == set(range(61))  # of every step
    messages = [progress.message for progress in trained.told]
    assert any(message.startswith("solving") for message in messages)
    assert any(message.startswith("epoch 12/12, loss") for message in messages)


def test_a_stopped_training_goes_on_to_the_same_bits(dataset, trained, tmp_path):
    first = Watched(
        "rf.train", tmp_path / "run", RECIPE, datasets=[dataset.path], stop_when=lambda where: where.current >= 30
    )

    assert first.run() is None
    assert (first.currents[-1], first.told[-1].total) == (30, 60)
    assert (tmp_path / "run/train/last").is_dir()

    result = Watched("rf.train", tmp_path / "run", RECIPE, datasets=[dataset.path]).run()
    assert result["best_val_loss"] == trained.result["best_val_loss"]
    for which in ("last", "best"):
        pattern = f"train/{which}/*.safetensors"
        assert digests(tmp_path / "run", pattern) == digests(trained.path, pattern)


def test_the_body_of_the_issue_trains_on_a_cpu_too(dataset, tmp_path):
    body = {"batch_size": 256, "epochs": 2, "learning_rate": 0.001, "preload_to_gpu": True, "accelerator": "auto"}

    assert Watched("rf.train", tmp_path / "run", body, datasets=[dataset.path]).run()["tier"] == "ram"


def test_what_a_run_takes_on_disk_is_estimated_from_above(trained):
    actual = sum(file.stat().st_size for file in trained.path.rglob("*") if file.is_file())

    assert actual < KINDS["rf.train"].estimate_bytes(trained.spec, trained.inputs)


def test_datasets_that_do_not_fit_together_are_refused_before_a_job_is_queued(dataset, tmp_path):
    other = replace(GenerateConfig(duration_s=0.2, samples_per_shard=16, seed=6), fading="none")
    generate(other, tmp_path / "other", 3, device="cpu")
    spec = read_body({"job_name": "a", "config": {"dataset_ids": ["a", "b"]}})

    with pytest.raises(BrimError, match="has fading=none") as caught:
        KINDS["rf.train"].check(spec, Inputs(datasets=(dataset.path, tmp_path / "other")))
    assert caught.value.field == "config.dataset_ids[1]"


def test_too_few_samples_are_refused_before_a_job_is_queued(tmp_path):
    generate(GenerateConfig(duration_s=0.2), tmp_path / "one", 1, device="cpu")
    spec = read_body({"job_name": "a", "config": {"dataset_ids": ["a"]}})

    with pytest.raises(BrimError, match="leaves nothing to train on"):
        KINDS["rf.train"].check(spec, Inputs(datasets=(tmp_path / "one",)))


def test_good_datasets_are_not_refused(dataset, trained):
    KINDS["rf.train"].check(trained.spec, trained.inputs)


def test_a_run_with_other_settings_is_not_continued(dataset, trained, tmp_path):
    shutil.copytree(trained.path, tmp_path / "run")
    changed = Watched("rf.train", tmp_path / "run", RECIPE | {"seed": 3}, datasets=[dataset.path])

    with pytest.raises(CheckpointError):
        changed.run()


# rf.evaluate


def test_a_run_is_evaluated(dataset, trained, tmp_path):
    job = Watched("rf.evaluate", tmp_path / "job", {}, datasets=[dataset.path], run=trained.path)

    KINDS["rf.evaluate"].check(job.spec, job.inputs)
    result = job.run()

    assert {"median_error_m", "crlb_ratio", "coverage", "baselines"} <= result["metrics"].keys()
    assert result["samples"] == 40
    assert result["files"] == ["evaluation.html", "errors.json"]
    files = [tmp_path / "job" / name for name in result["files"]]
    assert sum(file.stat().st_size for file in files) < KINDS["rf.evaluate"].estimate_bytes(job.spec, job.inputs)
    assert all(str(dataset.path.parent) not in file.read_text() for file in files)
    assert job.currents[-1] == 40


def test_an_evaluation_stops_and_can_be_done_again(dataset, trained, tmp_path):
    stopped = Watched(
        "rf.evaluate", tmp_path / "job", {}, datasets=[dataset.path], run=trained.path,
        stop_when=lambda where: where.message == "locating",
    )  # fmt: skip

    assert stopped.run() is None
    assert stopped.told[-1].message.startswith("locating")

    again = Watched("rf.evaluate", tmp_path / "job", {}, datasets=[dataset.path], run=trained.path).run()
    other = Watched("rf.evaluate", tmp_path / "other", {}, datasets=[dataset.path], run=trained.path).run()
    assert again["metrics"] == other["metrics"]


def test_a_run_without_weights_is_refused_before_a_job_is_queued(dataset, tmp_path):
    (tmp_path / "run").mkdir()
    job = Watched("rf.evaluate", tmp_path / "job", {}, datasets=[dataset.path], run=tmp_path / "run")

    with pytest.raises(BrimError, match=r"config\.run_id cannot be used: it has no run\.json") as caught:
        KINDS["rf.evaluate"].check(job.spec, job.inputs)
    assert caught.value.field == "config.run_id"
