"""sequence.train and sequence.evaluate as jobs."""

import shutil

import pytest
import torch
from kind_inputs import Watched, digests

from brim.errors import BrimError
from brim.jobs.kinds import KINDS, Inputs
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.synthetic import make_sequences
from brim.sequences.training.run import train

torch.set_num_threads(1)

TINY = {"channels": 16, "hidden": 8, "attention": 8, "embedding": 16, "convolutions": 1}
SELF = {"iterations": 2, "encoder_epochs": 2, "classifier_epochs": 3, "batch_size": 8, "model": TINY}
SUPERVISED = SELF | {"mode": "supervised", "classifier_epochs": 20}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    pack(make_sequences(folder / "npy", 60, dim=8, classes=3, mean_length=12), folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """What undisturbed jobs made, by mode."""
    found = {}
    for mode, recipe in (("self", SELF), ("supervised", SUPERVISED)):
        job = Watched("sequence.train", tmp_path_factory.mktemp("runs") / mode, recipe, datasets=[corpus])
        job.result = job.run()
        job.path = job._task.out
        found[mode] = job
    return found


@pytest.mark.parametrize("mode", ["self", "supervised"])
def test_training_says_which_run_it_made_and_how_good_it_is(runs, mode):
    job = runs[mode]

    assert job.result["run_id"] == mode
    assert job.result["scores"]
    assert job.currents == sorted(job.currents)
    assert job.told[-1].percent == 100.0


def test_progress_is_that_of_all_phases(runs):
    words = [progress for progress in runs["self"].told if progress.total]

    assert len({progress.total for progress in words}) == 1
    for phase in ("encoder-1", "classifier-1", "encoder-2", "classifier-2"):
        assert any(progress.message.startswith(f"{phase}, epoch") for progress in words)
    half = next(progress for progress in words if progress.message.startswith("encoder-2"))
    assert 49 <= half.percent <= 60


def test_a_trained_network_is_the_command_lines(runs, corpus, tmp_path):
    train(corpus, tmp_path / "run", SequenceTraining(**SUPERVISED), device="cpu")

    assert digests(tmp_path / "run", "weights.safetensors") == digests(runs["supervised"].path, "weights.safetensors")


@pytest.mark.parametrize(("mode", "recipe"), [("self", SELF), ("supervised", SUPERVISED)])
def test_a_stopped_training_goes_on_to_the_same_bits(runs, corpus, tmp_path, mode, recipe):
    first = Watched(
        "sequence.train", tmp_path / "run", recipe, datasets=[corpus], stop_when=lambda where: where.current > 0
    )

    assert first.run() is None
    assert first.steps_after_stop == 0

    second = Watched("sequence.train", tmp_path / "run", recipe, datasets=[corpus])
    result = second.run()
    assert result["scores"] == runs[mode].result["scores"]
    assert digests(tmp_path / "run", "weights.safetensors") == digests(runs[mode].path, "weights.safetensors")
    assert second.told[-1].total == runs[mode].told[-1].total


def test_a_training_that_was_finished_before_it_was_recorded_gives_the_same_result(runs, corpus):
    again = Watched("sequence.train", runs["self"].path, SELF, datasets=[corpus]).run()

    first, times = runs["self"].result, {"wall_s", "startup_s", "work_s", "overhead"}
    assert {name: again[name] for name in again.keys() - times} == {name: first[name] for name in first.keys() - times}


def test_what_a_run_takes_on_disk_is_estimated_from_above(runs):
    for job in runs.values():
        actual = sum(file.stat().st_size for file in job.path.rglob("*") if file.is_file())
        assert actual < KINDS["sequence.train"].estimate_bytes(job.spec, job.inputs)


def test_a_corpus_without_labels_is_refused_before_a_job_is_queued(tmp_path):
    folder = make_sequences(tmp_path / "npy", 6, dim=8, classes=1, mean_length=12)
    pack(folder / "class_0", tmp_path / "plain")
    job = Watched("sequence.train", tmp_path / "run", SUPERVISED, datasets=[tmp_path / "plain"])

    with pytest.raises(BrimError) as caught:
        KINDS["sequence.train"].check(job.spec, job.inputs)
    assert caught.value.field == "config.dataset_ids[0]"
    assert "has no labels" in str(caught.value)


def test_a_folder_that_is_not_packed_is_refused_before_a_job_is_queued(tmp_path, runs):
    folder = make_sequences(tmp_path / "npy", 6, dim=8, classes=2, mean_length=12)

    with pytest.raises(BrimError, match="not packed"):
        KINDS["sequence.train"].check(runs["self"].spec, Inputs(datasets=(folder,)))


def test_a_good_corpus_is_not_refused(runs):
    for job in runs.values():
        KINDS["sequence.train"].check(job.spec, job.inputs)


@pytest.mark.parametrize(("mode", "score"), [("self", "matched_accuracy"), ("supervised", "accuracy")])
def test_a_run_is_evaluated(runs, corpus, tmp_path, mode, score):
    job = Watched("sequence.evaluate", tmp_path / "job", {}, datasets=[corpus], run=runs[mode].path)

    KINDS["sequence.evaluate"].check(job.spec, job.inputs)
    result = job.run()

    assert result["metrics"][score] == runs[mode].result["scores"][score]
    assert result["metrics"]["items"] == 12
    assert result["files"] == ["embedding.json"]
    most = KINDS["sequence.evaluate"].estimate_bytes(job.spec, job.inputs)
    assert (tmp_path / "job/embedding.json").stat().st_size < most
    assert job.currents[-1] == 12


def test_an_evaluation_stops(runs, corpus, tmp_path):
    job = Watched(
        "sequence.evaluate", tmp_path / "job", {}, datasets=[corpus], run=runs["self"].path,
        stop_when=lambda where: where.message == "evaluating",
    )  # fmt: skip

    assert job.run() is None
    assert job.told[-1].message.startswith("evaluating")


def test_a_run_that_is_not_done_is_refused_before_a_job_is_queued(runs, corpus, tmp_path):
    shutil.copytree(runs["self"].path, tmp_path / "run")
    for name in ("weights.safetensors", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    job = Watched("sequence.evaluate", tmp_path / "job", {}, datasets=[corpus], run=tmp_path / "run")

    with pytest.raises(BrimError, match="not trained to its end") as caught:
        KINDS["sequence.evaluate"].check(job.spec, job.inputs)
    assert caught.value.field == "config.run_id"


@pytest.mark.parametrize(("dim", "classes", "words"), [(5, 2, "has 5 features"), (8, 1, "has no labels")])
def test_a_corpus_that_cannot_be_scored_is_refused_before_a_job_is_queued(runs, tmp_path, dim, classes, words):
    folder = make_sequences(tmp_path / "npy", 6, dim=dim, classes=classes, mean_length=12)
    pack(folder / "class_0" if classes == 1 else folder, tmp_path / "other")
    job = Watched("sequence.evaluate", tmp_path / "job", {}, datasets=[tmp_path / "other"], run=runs["self"].path)

    with pytest.raises(BrimError, match=words) as caught:
        KINDS["sequence.evaluate"].check(job.spec, job.inputs)
    assert caught.value.field == "config.dataset_ids[0]"
