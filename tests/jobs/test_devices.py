"""Jobs on several devices: processes of their own that train as one, what they made, and how they end."""

import fcntl
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kind_inputs import Watched, digests

from brim.errors import ConfigError, DatasetError, RankLost
from brim.jobs.kinds import Inputs, Spec, Stopped, Task, read_body
from brim.jobs.status import JobProgress
from brim.jobs.worker import member, run
from brim.jobs.worker.process import FileLock, cores
from waiting import PATIENCE_S, until

torch.set_num_threads(1)

SAMPLES = {"num_samples": 40, "duration_s": 0.2, "samples_per_shard": 16, "seed": 5, "batch_size": 4}
TRAINING = {"kind": "rf.train", "name": "t", "config": {"dataset_ids": ["a"], "devices": 2}}

needs_two_cores = pytest.mark.skipif(cores() < 2, reason="a job may ask for as many devices as there are cores")


def task_of(out: Path, body: dict, **options) -> Task:
    """An attempt that says nothing and is not to stop."""
    values = {"device": "cpu", "tell": lambda progress: None, "stop": lambda: False, **options}
    return Task(spec=read_body(body), inputs=Inputs(), out=out, batch_sizes=out.parent / "sizes.json", **values)


# Processes of a job


@needs_two_cores
def test_a_process_that_always_dies_fails_the_job_with_words(tmp_path, monkeypatch):
    start, deaths = member._start, []

    def start_and_kill(*args):
        deaths.append(start(*args))
        deaths[-1].process.kill()
        return deaths[-1]

    monkeypatch.setattr(member, "_start", start_and_kill)
    with pytest.raises(RankLost, match=r"died 4 times without getting further, .*by SIGKILL .*resume the job"):
        member.run(task_of(tmp_path / "run", TRAINING))
    assert len(deaths) == 2 * (member.RESTARTS + 1)


def ended(outcome=None, code=0):
    return member._Member(1, SimpleNamespace(returncode=code), None, outcome or {})


@pytest.mark.parametrize(
    ("members", "failure", "words"),
    [
        ([ended({"error": DatasetError("is damaged").as_dict()}, 1), ended(code=-9)], DatasetError, "is damaged"),
        ([ended({"error": {"message": "KeyError: 'x'"}}, 1)], RuntimeError, "KeyError: 'x'"),
        ([ended({"result": {}}), ended(code=-9)], member._Died, r"SIGKILL \(process 1\)"),
        ([ended({"error": RankLost("of others").as_dict()}, 1), ended(code=3)], member._Died, "exit code 3"),
        ([ended({"error": RankLost("of others").as_dict()}, 1)], member._Died, "of others"),
        ([ended({"stopped": True})], Stopped, "^$"),
        ([ended()], member._Died, "exit code 0"),
    ],
)
def test_why_there_is_no_result_is_an_error_before_a_death_and_a_death_before_what_others_made_of_it(
    members, failure, words
):
    with pytest.raises(failure, match=words):
        member._outcome(members)


def test_the_result_is_that_of_the_first_process():
    assert member._outcome([ended({"result": {"n": 1}}), ended({"result": {"n": 2}})]) == {"n": 1}


NOTHING = SimpleNamespace(kill=lambda: None, wait=lambda: None, close=lambda: None)


@pytest.fixture
def started(monkeypatch):
    """Environments of the processes that are started, which do nothing; the job's result is empty."""
    environments = []

    def start(task, number, environment):
        environments.append(environment)
        return SimpleNamespace(process=NOTHING, connection=NOTHING)

    monkeypatch.setattr(member, "_start", start)
    monkeypatch.setattr(member, "_listen", lambda *_: None)
    monkeypatch.setattr(member, "_outcome", lambda members: {})
    return environments


@pytest.fixture
def dying(started, monkeypatch, tmp_path):
    """Runs members that come as far as it says, and die there; then one that completes."""

    def work(*currents: int):
        places = iter(currents)
        task = task_of(tmp_path / "out", {"kind": "segment.tune", "name": "t"})

        def outcome(members):
            if (current := next(places, None)) is None:
                return {"done": True}
            task.report(JobProgress(current=current, total=100))
            raise member._Died("SIGKILL")

        monkeypatch.setattr(member, "_outcome", outcome)
        return member._run_members(task, [{}])

    return work


def test_deaths_with_progress_in_between_do_not_end_a_job(dying):
    assert dying(10, 20, 20, 20, 30, 40, 40, 50, 60) == {"done": True}


def test_deaths_without_progress_end_a_job_wherever_they_begin(dying):
    with pytest.raises(RankLost, match="died 4 times without getting further"):
        dying(10, 20, 30, 30, 25, 30)


def test_each_rank_knows_its_place_and_has_its_share_of_the_cores(started, monkeypatch, tmp_path):
    monkeypatch.setattr(member, "cores", lambda: 7)
    monkeypatch.setattr("brim.jobs.kinds.task.cores", lambda: 7)
    body = {**TRAINING, "config": {**TRAINING["config"], "devices": 3}}

    member.run(task_of(tmp_path / "out", body))

    meeting = {(one.pop("MASTER_ADDR"), one.pop("MASTER_PORT")) for one in started}
    assert [host for host, _ in meeting] == ["127.0.0.1"]  # one place for all
    everywhere = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    assert started == [{**everywhere, "RANK": rank, "LOCAL_RANK": rank} for rank in "012"]


def test_ranks_on_gpus_see_those_of_the_job_and_a_leader_is_alone(started, tmp_path):
    gpus = {"device": "cuda", "gpus": ("2", "5")}
    member.run(task_of(tmp_path / "out", TRAINING, **gpus))
    body = {"kind": "rf.generate", "name": "g", "config": {"num_samples": 4, "devices": 2}}
    member.run(task_of(tmp_path / "out", body, **gpus))

    *ranks, leader = started
    assert [one["RANK"] for one in ranks] == ["0", "1"]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in started} == {"2,5"}
    assert "OMP_NUM_THREADS" not in ranks[0]
    assert leader.keys() == {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}


def test_a_process_stops_when_asked_and_ends_when_its_worker_is_gone(tmp_path):
    out = tmp_path / "made"
    out.mkdir()
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # so that neither gets far
    task = task_of(out, {"kind": "rf.generate", "name": "g", "config": {"num_samples": 4}})
    asked, left = (member._start(task, number, {}) for number in (0, 1))
    assert left.connection.recv()["progress"].message == "starting"
    left.connection.close()
    until(lambda: "waiting" in asked.connection.recv().get("progress", JobProgress()).message)

    asked.connection.send("stop")
    until(lambda: asked.connection.recv() == {"stopped": True})

    assert [one.process.wait(PATIENCE_S) for one in (asked, left)] == [0, 1]
    asked.connection.close()
    os.close(held)


def test_devices_are_counted_where_the_job_computes(tmp_path):
    def num_devices(devices, device="cuda", gpus=("0", "1", "2"), **config):
        task = task_of(tmp_path / "out", {"kind": "segment.tune", "name": "t"}, device=device, gpus=gpus)
        task.spec = Spec("rf.train", "t", {"devices": devices, **config})
        return task.num_devices

    assert [num_devices("all"), num_devices(2), num_devices("all", gpus=())] == [3, 2, 1]
    assert [num_devices("all", accelerator="cpu"), num_devices("all", "cpu")] == [1, 1]
    for gpus, words in ((("0", "1", "2"), "the 3 GPUs of this machine; submit"), ((), "the 1 GPU of")):
        with pytest.raises(ConfigError, match=f"devices=4 is more than {words}"):
            num_devices(4, gpus=gpus)


# GPUs that workers share


def test_a_job_has_its_workers_gpu_then_free_ones_in_their_order():
    gpus = ("0", "1", "2", "3")

    assert run.choose(gpus, "2", 1, lambda name: True) == ("2",)
    assert run.choose(gpus, "2", 2, lambda name: name != "0") == ("1", "2")
    assert run.choose(gpus, "2", 3, lambda name: name == "3") == ("0", "2", "3")
    assert run.choose(gpus, "2", "all", lambda name: False) == gpus
    assert run.choose(gpus, "2", 9, lambda name: True) == gpus


def test_jobs_that_want_the_same_gpus_take_turns(tmp_path):
    gpus, running, most, told = ("0", "1", "2"), set[str](), [], list[str]()

    def job(own: str, wanted: int) -> None:
        for _ in range(5):
            with run.leased(tmp_path, gpus, own, wanted, told.append, lambda: False) as names:
                assert own in names
                assert not running & set(names)
                running.update(names)
                time.sleep(0.01)
                running.difference_update(names)
        most.append(own)

    threads = [threading.Thread(target=job, args=args) for args in (("0", 3), ("1", 2), ("2", 1), ("0", 1))]
    with run.leased(tmp_path, gpus, "0", 3, told.append, lambda: False):
        for thread in threads:
            thread.start()
        until(lambda: len(set(told)) == 2)  # of GPU 0 and of GPU 2
    for thread in threads:
        thread.join(PATIENCE_S)

    assert sorted(most) == ["0", "0", "1", "2"]
    assert set(told) <= {f"waiting for GPU {name}, which another job has" for name in gpus}


def test_a_job_that_waits_for_a_gpu_can_be_stopped(tmp_path):
    with run.leased(tmp_path, ("0", "1"), "0", 1, print, lambda: False):
        with pytest.raises(Stopped), run.leased(tmp_path, ("0", "1"), "1", 2, lambda text: None, lambda: True):
            pass
        assert run._is_free(tmp_path, "1")
    lock = FileLock(run._lock_file(tmp_path, "0"))
    assert lock.take()
    lock.release()


# Generation and prediction


@needs_two_cores
def test_two_devices_generate_the_bytes_of_one(tmp_path):
    assert Watched("rf.generate", tmp_path / "one", SAMPLES).run() is not None

    job = Watched("rf.generate", tmp_path / "made", {**SAMPLES, "devices": 2})
    result = job.run()

    assert result is not None
    assert (result["accepted"], result["workers"], result["dataset_id"]) == (40, 2, "made")
    assert digests(tmp_path / "made", "shards/*") == digests(tmp_path / "one", "shards/*")
    assert job.currents == sorted(job.currents)


def test_a_job_of_a_cluster_that_the_service_no_longer_has_says_so(tmp_path):
    job = Watched("rf.generate", tmp_path / "made", {**SAMPLES, "cluster": True})

    with pytest.raises(ConfigError, match="no longer has a cluster"):
        job.run()
