"""What all kinds share: the registry, words that come every second, patience, messages that speak of jobs."""

import fcntl
import os
import threading
import time

import pytest
from kind_inputs import Watched

from brim.errors import BrimError, CheckpointError, ConfigError, DatasetError, StorageError
from brim.jobs.kinds import task as tasks
from brim.jobs.kinds.registry import KINDS, Inputs, Stopped, Task
from brim.jobs.kinds.specs import Spec
from brim.jobs.kinds.status import Progress
from brim.jobs.kinds.task import attempt, device_of, in_words, refused

ALL = {
    "rf.generate", "rf.train", "rf.evaluate", "segment.tune", "segment.predict", "segment.train", "sequence.train",
    "sequence.evaluate",
}  # fmt: skip


class Said(list):
    """A task's words, and the task that says them."""

    def __init__(self, tmp_path, **config):
        super().__init__()
        self.stop = False
        self.task = Task(
            spec=Spec("test", "test", config), inputs=Inputs(), out=tmp_path / "out", device="cuda",
            batch_sizes=tmp_path / "sizes.json", tell=self.append, stop=lambda: self.stop,
        )  # fmt: skip


@pytest.fixture
def said(tmp_path):
    return Said(tmp_path)


def test_all_kinds_are_there():
    assert KINDS.keys() == ALL
    assert {kind.name for kind in KINDS.values() if kind.makes == "run"} == {
        "rf.train", "segment.train", "sequence.train",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_kind_names_what_it_reads_in_its_config(kind):
    assert ("dataset_ids" in kind.model.model_fields) == (kind.reads is not None)
    assert ("run_id" in kind.model.model_fields) == (kind.reads_run is not None)
    assert kind.reads_run is None or KINDS[kind.reads_run].makes == "run"
    assert kind.model is kind.model


@pytest.mark.parametrize(
    ("accelerator", "device"), [("auto", "cuda"), ("cpu", "cpu"), ("gpu", "cuda"), ("cuda", "cuda")]
)
def test_an_accelerator_is_a_device(tmp_path, accelerator, device):
    assert device_of(Said(tmp_path, accelerator=accelerator).task) == device


# Words


def test_a_silent_library_is_spoken_for(said):
    @attempt
    def run(task, voice):
        voice(Progress(current=3, total=9, message="thinking"))
        time.sleep(1.5)
        return {}

    run(said.task)

    assert len(said) >= 4
    assert {(word.current, word.total) for word in said[1:]} == {(3, 9)}
    assert said[-1].message == "thinking, for 1 s"


def test_who_is_silent_for_too_long_is_not_spoken_for(said, monkeypatch):
    monkeypatch.setattr(tasks, "SILENCE_S", 0.6)

    @attempt
    def run(task, voice):
        time.sleep(1.8)
        return {}

    run(said.task)

    assert 2 <= len(said) <= 3


def test_no_thread_stays(said):
    before = threading.active_count()
    attempt(lambda task, voice: {})(said.task)

    with pytest.raises(StorageError):
        attempt(lambda task, voice: (_ for _ in ()).throw(StorageError("full")))(said.task)
    assert threading.active_count() == before


def test_a_wish_to_stop_leaves_a_library_that_cannot_be_asked(said):
    @attempt
    def run(task, voice):
        said.stop = True
        try:
            voice.or_stop(Progress(message="on"))
        except Exception:  # as libraries do
            return {"wrong": True}

    with pytest.raises(Stopped):
        run(said.task)


# Results and errors


def test_a_result_is_what_json_can_hold(said, tmp_path):
    result = attempt(lambda task, voice: {"a": float("nan"), "b": (1, {"c": float("inf")}), 5: tmp_path})(said.task)

    assert result == {"a": None, "b": [1, {"c": None}], "5": tmp_path.name}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("d is not empty; add --resume to continue it or choose another --out", "resume its job, or submit another"),
        ("d: cannot write, No space left; make room or choose another --out", "free some space, then resume the job"),
        ("seed was 1 and is 2 now; resume with the same, or choose another --out", "or submit another job"),
        ("use a smaller --size or free memory", "use a smaller size or free memory"),
        ('d is not a run made by "brim rf train"', "d is not a run made by a job of kind rf.train"),
        ('it is not done; go on with "brim sequence train --resume"', "go on with a job of kind sequence.train"),
    ],
)
def test_the_next_step_is_a_jobs(before, after):
    text = in_words(before)

    assert after in text
    assert "--" not in text


def test_an_input_is_refused_without_its_path(tmp_path):
    failure = refused("config.dataset_ids[0]", tmp_path, DatasetError(f"{tmp_path} has no manifest.json"))

    assert str(failure) == "config.dataset_ids[0] cannot be used: it has no manifest.json"


def test_an_error_keeps_its_family(said):
    def run(task, voice):
        raise CheckpointError("choose another --out")

    with pytest.raises(CheckpointError, match="submit another job"):
        attempt(run)(said.task)


def test_a_field_keeps_its_name(said):
    def run(task, voice):
        raise ConfigError("no", field="config.model")

    with pytest.raises(BrimError) as caught:
        attempt(run)(said.task)
    assert caught.value.field == "config.model"


# Whoever wrote before


@pytest.fixture
def locked(tmp_path):
    """A directory that another process still writes."""
    (tmp_path / "made").mkdir()
    handle = os.open(tmp_path / "made", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield handle
    os.close(handle)


def test_the_process_before_is_waited_for(locked, tmp_path):
    job = Watched("rf.generate", tmp_path / "made", {"num_samples": 2, "duration_s": 0.2, "batch_size": 2})
    threading.Timer(1.5, fcntl.flock, (locked, fcntl.LOCK_UN)).start()

    assert job.run()["accepted"] == 2
    assert any("waiting for the process before" in progress.message for _, progress in job.told)


def test_who_waits_can_be_stopped(locked, tmp_path):
    job = Watched(
        "rf.generate", tmp_path / "made", {"num_samples": 2, "duration_s": 0.2},
        stop_when=lambda where: "waiting" in where.message,
    )  # fmt: skip

    assert job.run() is None


def test_patience_ends(locked, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "PATIENCE_S", 0.1)
    job = Watched("rf.generate", tmp_path / "made", {"num_samples": 2, "duration_s": 0.2})

    with pytest.raises(DatasetError, match="being written by another process"):
        job.run()
