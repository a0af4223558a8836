"""sequence.train and sequence.evaluate as jobs."""

import shutil

import pytest
import torch
from kind_inputs import Watched

from brim.engine.training import TrainProgress
from brim.errors import BrimError
from brim.jobs.kinds import KINDS, Inputs
from brim.jobs.kinds.sequence import _PhaseProgress
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.synthetic import make_sequences
from brim.sequences.model import Classifier, Encoder

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


def test_the_time_left_is_that_of_all_phases():
    """Epochs of 2 + 3 + 2 + 3, ten steps each: a hundred steps at ten a second."""
    phases = _PhaseProgress(SequenceTraining(iterations=2, encoder_epochs=2, classifier_epochs=3))

    def told(phase, step, epochs):
        steps = 10 * epochs
        left_s = (steps - step) / 10
        progress = TrainProgress(
            phase=phase, epoch=step // 10, epochs=epochs, step=step, steps=steps, loss=None, samples_per_s=80.0,
            eta_s=left_s,
        )  # fmt: skip
        return phases.overall(progress)

    first, second, last = told("encoder-1", 5, 2), told("classifier-1", 10, 3), told("classifier-2", 30, 3)

    assert (first.current, first.total, first.eta_s) == (5, 100, pytest.approx(9.5))
    assert (second.current, second.total, second.eta_s) == (30, 100, pytest.approx(7.0))
    assert (last.current, last.total, last.message) == (100, 100, "classifier-2, epoch 3/3")
    assert told("encoder-1", 7, 2).current == 100  # nothing runs backwards


def test_what_a_run_takes_on_disk_is_the_checkpoints_of_its_phases_and_its_logs(runs):
    for job, phases in ((runs["self"], 4), (runs["supervised"], 1)):
        module = Classifier(Encoder(SequenceTraining(model=TINY).shape(8)), 1000)  # of classes, at most
        weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
        actual = sum(file.stat().st_size for file in job.path.rglob("*") if file.is_file())

        estimate = KINDS["sequence.train"].estimate_bytes(job.spec, job.inputs)

        assert estimate == (9 * phases + 1) * weights + 32 * 2**20  # three of each phase, with two moments
        assert actual < estimate


def test_a_corpus_that_cannot_be_trained_on_is_refused_before_a_job_is_queued(runs, tmp_path):
    folder = make_sequences(tmp_path / "npy", 6, dim=8, classes=1, mean_length=12)
    pack(folder / "class_0", tmp_path / "plain")

    for job in runs.values():
        KINDS["sequence.train"].check(job.spec, job.inputs)
    with pytest.raises(BrimError, match="has no labels") as caught:
        KINDS["sequence.train"].check(runs["supervised"].spec, Inputs(datasets=(tmp_path / "plain",)))
    assert caught.value.field == "config.dataset_ids[0]"
    with pytest.raises(BrimError, match="not packed"):
        KINDS["sequence.train"].check(runs["self"].spec, Inputs(datasets=(folder,)))


@pytest.mark.parametrize(("mode", "score"), [("self", "matched_accuracy"), ("supervised", "accuracy")])
def test_a_run_is_evaluated(runs, corpus, tmp_path, mode, score):
    job = Watched("sequence.evaluate", tmp_path / "job", {}, datasets=[corpus], run=runs[mode].path)

    KINDS["sequence.evaluate"].check(job.spec, job.inputs)
    result = job.run()

    assert result["metrics"][score] == runs[mode].result["scores"][score]
    assert result["metrics"]["items"] == job.currents[-1] == 12
    assert result["files"] == ["embedding.json"]
    most = KINDS["sequence.evaluate"].estimate_bytes(job.spec, job.inputs)
    assert (tmp_path / "job/embedding.json").stat().st_size < most


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
