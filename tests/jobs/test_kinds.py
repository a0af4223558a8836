"""What all kinds share: the registry, words that come every second, patience, messages that speak of jobs."""

import fcntl
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kind_inputs import Watched

from brim.config import settings
from brim.engine.training import TrainProgress
from brim.errors import ConfigError, Conflict, DatasetError
from brim.jobs.kinds import KINDS, Inputs, Spec, Stopped, Task
from brim.jobs.kinds import task as tasks
from brim.jobs.kinds.task import checking, counted, in_training, job_phrase, reporting
from brim.jobs.status import Flow, JobProgress
from brim.jobs.worker import member
from waiting import until


class Said(list):
    """A task's words, and the task that says them."""

    def __init__(self, tmp_path, kind="test", **config):
        super().__init__()
        self.stop = False
        self.task = Task(
            spec=Spec(kind, "test", config), inputs=Inputs(), out=tmp_path / "out", device="cuda",
            batch_sizes=tmp_path / "sizes.json", tell=self.append, stop=lambda: self.stop,
        )  # fmt: skip


@pytest.fixture
def said(tmp_path):
    return Said(tmp_path)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_kind_names_what_it_reads_in_its_config(kind):
    assert ("dataset_ids" in settings(kind.config)) == (kind.reads is not None)
    assert ("run_id" in settings(kind.config)) == (kind.reads_run is not None)
    assert kind.reads_run is None or KINDS[kind.reads_run].makes == "run"


@pytest.mark.parametrize(
    ("accelerator", "device"), [("auto", "cuda"), ("cpu", "cpu"), ("gpu", "cuda"), ("cuda", "cuda")]
)
def test_an_accelerator_is_a_device(tmp_path, accelerator, device):
    assert Said(tmp_path, accelerator=accelerator).task.torch_device == device


# Words


@pytest.fixture
def clock(monkeypatch):
    """What a task takes for the time."""
    fake = SimpleNamespace(now_s=100.0, monotonic=lambda: fake.now_s, sleep=time.sleep)
    monkeypatch.setattr(tasks, "time", fake)
    return fake


@pytest.mark.parametrize("name", KINDS)
def test_a_silent_library_is_spoken_for_every_second(tmp_path, monkeypatch, clock, name):
    said = Said(tmp_path, name)

    def run(task):
        task.report(JobProgress(current=3, total=9, message="thinking"))
        for spoken in (2, 3, 4):
            clock.now_s += 1.0
            until(lambda spoken=spoken: len(said) > spoken)
        return {}

    monkeypatch.setitem(KINDS, name, replace(KINDS[name], run=run))
    member.run(said.task)

    assert {(word.current, word.total) for word in said[1:]} == {(3, 9)}
    assert [word.message for word in said] == ["starting", "thinking", *(f"thinking, for {s} s" for s in (1, 2, 3))]


def test_who_is_silent_for_too_long_is_not_spoken_for(said, clock):
    def run(task):
        clock.now_s += tasks.SILENCE_S - 1
        until(lambda: len(said) > 1)
        clock.now_s += 1
        time.sleep(tasks.QUIET_S)  # the thread that would speak looks at the clock meanwhile
        return {}

    reporting(said.task, run)

    assert [word.message for word in said] == ["starting", "starting, for 59 s"]


def test_a_wish_to_stop_leaves_a_library_that_cannot_be_asked(said):
    def run(task):
        said.stop = True
        try:
            task.report_or_stop(JobProgress(message="on"))
        except Exception:  # as libraries do
            return {"wrong": True}

    with pytest.raises(Stopped):
        reporting(said.task, run)


# Results and errors


def test_a_result_is_what_json_can_hold(said, tmp_path):
    result = reporting(said.task, lambda task: {"a": float("nan"), "b": (1, {"c": float("inf")}), 5: tmp_path})

    assert result == {"a": None, "b": [1, {"c": None}], "5": tmp_path.name}


def test_the_next_step_is_a_jobs():
    failure = DatasetError("is occupied", hint="continue with {resume}, choose another {out}, or run {rf train}")

    text, data = job_phrase(failure)

    assert text.endswith("continue with a resume of the job, choose another job, or run a job of kind rf.train")
    assert data["code"] == failure.code


def test_settings_are_those_of_the_config():
    failure = ConfigError("is too large", field="size", value=9, hint="lower {size} or {memory}")

    assert job_phrase(failure, {"size": 9})[0] == "config.size=9 is too large; lower config.size or memory"


def test_an_input_is_rejected_without_its_path(tmp_path):
    with pytest.raises(Conflict) as caught, checking("config.dataset_ids[0]", tmp_path):
        raise DatasetError(f"{tmp_path} has no manifest.json beside {tmp_path}/shards/a")

    assert str(caught.value) == "config.dataset_ids[0] cannot be used: it has no manifest.json beside shards/a"
    assert caught.value.field == "config.dataset_ids[0]"


def test_a_setting_that_does_not_fit_the_input_is_the_field(tmp_path):
    with pytest.raises(Conflict) as caught, checking("config.dataset_ids[0]", tmp_path, {"val_share": 0.1}):
        raise ConfigError("leaves nothing to train on", field="val_share", value=0.1)

    assert caught.value.field == "config.val_share"


# Progress of the workloads


def test_what_is_counted_says_how_long_the_rest_takes():
    assert counted(30, 100, "making", 7.0).eta_s == 10.0
    assert counted(30, 100, "making").eta_s is None
    assert (counted(30, 100, "making", 7.0).percent, counted(0, 0, "making").percent) == (30.0, None)


def test_training_tells_its_epoch_from_one_on_and_nothing_that_is_not_finite():
    def told(**changes):
        usual = {"phase": "train", "epoch": 1, "epochs": 4, "step": 12, "steps": 40, "loss": 0.25, "eta_s": 7.0}
        return in_training(TrainProgress(**{**usual, "samples_per_s": 80.0, **changes}), "solving")

    assert told() == JobProgress(current=12, total=40, rate=80.0, eta_s=7.0, message="epoch 2/4, loss 0.25")
    assert told(epoch=4, loss=None, eta_s=float("inf")).message == "epoch 4/4"
    assert told(eta_s=float("inf")).eta_s is None
    assert told(phase="prepare", step=3, steps=8) == JobProgress(message="solving 3 of 8")
    assert told(seconds=3.0, waiting={"data": 1.0}).flow == Flow(seconds=3.0, waiting={"data": 1.0})


# The process before


@pytest.fixture
def locked(tmp_path):
    """A directory that another process still writes."""
    (tmp_path / "made").mkdir()
    handle = os.open(tmp_path / "made", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield handle
    os.close(handle)


def test_the_process_before_is_waited_for(locked, tmp_path):
    def release(progress) -> bool:
        if "waiting for the previous process" in progress.message:
            fcntl.flock(locked, fcntl.LOCK_UN)
        return False

    config = {"num_samples": 2, "duration_s": 0.2, "batch_size": 2}
    job = Watched("rf.generate", tmp_path / "made", config, stop_when=release)

    assert job.run()["accepted"] == 2


def test_who_waits_can_be_stopped_and_patience_ends(locked, tmp_path, monkeypatch):
    config = {"num_samples": 2, "duration_s": 0.2}
    asked = Watched("rf.generate", tmp_path / "made", config, stop_when=lambda where: "waiting" in where.message)
    assert asked.run() is None

    monkeypatch.setattr(tasks, "PATIENCE_S", 0.1)
    with pytest.raises(DatasetError) as caught:
        Watched("rf.generate", tmp_path / "made", config).run()
    assert caught.value.code == "in_use"
