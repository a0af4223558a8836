"""Jobs on several devices: processes of their own that train as one, what they made, and how they end."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from desk import Desk
from kind_inputs import Watched, digests

from brim.errors import CheckpointError, ClusterError, ConfigError, RankLost
from brim.jobs.kinds import KINDS, Inputs, Spec, Stopped, Task, read_body
from brim.jobs.status import JobProgress
from brim.jobs.worker import member, run
from brim.jobs.worker.process import FileLock, cores
from waiting import PATIENCE_S, until

torch.set_num_threads(1)

SAMPLES = {"num_samples": 40, "duration_s": 0.2, "samples_per_shard": 16, "seed": 5, "batch_size": 4}
RECIPE = {"epochs": 20, "batch_size": 8, "learning_rate": 0.003, "checkpoint_every_s": 0.5}
ROUNDED = (
    5e-4  # of a loss of about 14, after 60 steps: Adam amplifies the rounding of gradients summed in another order
)

LONG = {**RECIPE, "epochs": 2000}  # of which tests see the beginning: it does not end before they act
SOME = 110  # steps of it: two losses are logged by then

needs_two_cores = pytest.mark.skipif(cores() < 2, reason="a job may ask for as many devices as there are cores")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("datasets") / "made"
    assert Watched("rf.generate", path, SAMPLES).run() is not None
    return path


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory) -> Path:
    """A run that one process trained."""
    path = tmp_path_factory.mktemp("runs") / "alone"
    assert Watched("rf.train", path, RECIPE, datasets=[dataset]).run() is not None
    return path


@pytest.fixture(scope="module")
def course(dataset, tmp_path_factory) -> dict[int, float]:
    """Losses of the first steps of the long training, by one process."""
    path = tmp_path_factory.mktemp("runs") / "long"
    job = Watched("rf.train", path, LONG, datasets=[dataset], stop_when=lambda where: where.current >= SOME)
    assert job.run() is None
    return losses_by_step(path)


def losses_by_step(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def check_course(run: Path, course: dict[int, float]) -> None:
    """The losses of a run are those of one process."""
    found = losses_by_step(run)
    assert course.keys() == {50, 100}
    assert {step: found[step] for step in course} == pytest.approx(course, abs=ROUNDED)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def training(dataset: Path, out: Path, **more) -> Watched:
    recipe = {**RECIPE, "devices": 2, **more.pop("recipe", {})}
    return Watched("rf.train", out, recipe, datasets=[dataset], **more)


def members_of(pid: int) -> list[int]:
    """Processes of a job that a process leads."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            is_member = b"brim.jobs.worker.member" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if is_member and int(words[1]) == pid and words[0] != "Z":
            found.append(int(folder.name))
    return sorted(found)


# Training


@pytest.mark.long
@needs_two_cores
def test_two_ranks_train_what_one_process_trains(dataset, alone, tmp_path):
    job = training(dataset, tmp_path / "run")
    result = job.run()

    assert result is not None
    assert result["run_id"] == "run"
    assert losses(tmp_path / "run")[:10] == pytest.approx(losses(alone)[:10], abs=5e-5)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), abs=ROUNDED)
    assert job.currents == sorted(job.currents)
    assert members_of(os.getpid()) == []


@pytest.mark.long
@needs_two_cores
def test_ranks_that_are_killed_start_again_from_their_checkpoint(dataset, course, tmp_path):
    killed: list[int] = []

    def kill_then_stop(where) -> bool:
        if not killed and where.current >= 20:
            killed.extend(members_of(os.getpid()))
            os.kill(killed[-1], signal.SIGKILL)
        is_again = any("starting again" in progress.message for progress in job.told)
        return is_again and where.message.startswith("epoch") and where.current >= SOME

    job = training(dataset, tmp_path / "run", recipe=LONG, stop_when=kill_then_stop)

    assert job.run() is None
    assert len(killed) == 2
    check_course(tmp_path / "run", course)


@pytest.mark.long
@needs_two_cores
def test_ranks_stop_when_asked_and_go_on_from_there(dataset, course, tmp_path):
    first = training(dataset, tmp_path / "run", recipe=LONG, stop_when=lambda where: where.current >= 20)

    assert first.run() is None
    assert members_of(os.getpid()) == []
    again = training(dataset, tmp_path / "run", recipe=LONG, stop_when=lambda where: where.current >= SOME)
    assert again.run() is None
    assert min(current for current in again.currents if current) >= 20
    check_course(tmp_path / "run", course)


@needs_two_cores
def test_an_error_of_ranks_is_the_jobs_error_at_once(dataset, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{")
    job = training(dataset, tmp_path / "run")

    with pytest.raises(CheckpointError):
        job.run()
    assert not any("starting again" in progress.message for progress in job.told)


@needs_two_cores
def test_a_process_that_always_dies_fails_the_job_with_words(dataset, tmp_path, monkeypatch):
    start, deaths = member._start, []

    def start_and_kill(*args):
        deaths.append(start(*args))
        deaths[-1].process.kill()
        return deaths[-1]

    monkeypatch.setattr(member, "_start", start_and_kill)
    with pytest.raises(RankLost, match=r"died 4 times without getting further, .*by SIGKILL .*resume the job"):
        training(dataset, tmp_path / "run").run()
    assert len(deaths) == 2 * (member.RESTARTS + 1)


@pytest.fixture
def dying(monkeypatch, tmp_path):
    """Runs members that come as far as it says, and die there; then one that completes."""

    def work(*currents: int):
        places = iter(currents)
        nothing = SimpleNamespace(kill=lambda: None, wait=lambda: None, close=lambda: None)

        def outcome(members):
            if (current := next(places, None)) is None:
                return {"done": True}
            task.report(JobProgress(current=current, total=100))
            raise member._Died("SIGKILL")

        monkeypatch.setattr(member, "_start", lambda *_: SimpleNamespace(process=nothing, connection=nothing))
        monkeypatch.setattr(member, "_listen", lambda *_: None)
        monkeypatch.setattr(member, "_outcome", outcome)
        task = Task(
            spec=Spec("rf.train", "t", {}), inputs=Inputs(), out=tmp_path, device="cpu", batch_sizes=tmp_path / "b",
            tell=lambda progress: None, stop=lambda: False,
        )  # fmt: skip
        return member._run_members(task, [{}])

    return work


def test_deaths_with_progress_in_between_do_not_end_a_job(dying):
    assert dying(10, 20, 20, 20, 30, 40, 40, 50, 60) == {"done": True}


def test_deaths_without_progress_end_a_job_wherever_they_begin(dying):
    with pytest.raises(RankLost, match="died 4 times without getting further"):
        dying(10, 20, 30, 30, 25, 30)


def test_more_devices_than_there_are_fail_a_job_that_comes_from_elsewhere(dataset, tmp_path):
    job = training(dataset, tmp_path / "run", recipe={"devices": 60})

    with pytest.raises(ConfigError, match=r"devices=60 is more than the \d+ cores? of this machine; submit"):
        job.run()


def test_all_of_a_cpu_is_one_device(dataset, tmp_path):
    job = training(dataset, tmp_path / "run", recipe={"devices": "all", "epochs": 1})

    assert job._task.num_devices == 1


# By a worker that is killed


@pytest.mark.long
@needs_two_cores
def test_a_training_on_two_devices_survives_its_worker(tmp_path):
    desk = Desk(tmp_path / "data", toy=False)
    desk.start()
    try:
        made = desk.until(submit(desk, {"kind": "rf.generate", "name": "d", "config": SAMPLES}), "completed", "failed")
        ids = {"dataset_ids": [made.result["dataset_id"]]}
        job_id = submit(desk, {"kind": "rf.train", "name": "t", "config": {**LONG, "devices": 2, **ids}})
        desk.past(job_id, 20)
        members = members_of(desk.workers["w0"].pid)
        desk.kill()
        assert len(members) == 2
        until(lambda: not any(map(is_alive, members)), lambda: "they do not end with their worker")

        def trains_again() -> bool:
            job = desk.job(job_id)
            return job.attempts == 2 and job.message.startswith("epoch")

        desk.wait(trains_again, job_id)
        desk.stop(job_id)
        assert desk.until(job_id, "cancelled").error is None
    finally:
        desk.close()


def submit(desk: Desk, body: dict) -> str:
    spec = read_body(body)
    inputs = {"dataset_ids": list(spec.dataset_ids), "run_id": spec.run_id}
    return desk.submit(spec.kind, KINDS[spec.kind].makes, inputs, spec.name, **spec.config)


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


# Generation


@needs_two_cores
def test_two_devices_generate_the_bytes_of_one(dataset, tmp_path):
    job = Watched("rf.generate", tmp_path / "made", {**SAMPLES, "devices": 2})
    result = job.run()

    assert result is not None
    assert (result["accepted"], result["workers"], result["dataset_id"]) == (40, 2, "made")
    assert digests(tmp_path / "made", "shards/*") == digests(dataset, "shards/*")
    assert job.currents == sorted(job.currents)


@pytest.mark.long
@needs_two_cores
def test_a_generation_on_two_devices_stops_and_goes_on_to_the_same_bytes(dataset, tmp_path):
    config, wanted = {**SAMPLES, "num_samples": 100_000, "devices": 2}, digests(dataset, "shards/00000[01].*")

    def are_made(where) -> bool:
        return where.current >= 48 and all((tmp_path / "made" / name).exists() for name in wanted)

    first = Watched("rf.generate", tmp_path / "made", config, stop_when=lambda where: where.current >= 16)
    assert first.run() is None
    again = Watched("rf.generate", tmp_path / "made", config, stop_when=are_made)
    assert again.run() is None
    assert min(current for current in again.currents if current) >= 16
    assert wanted.items() <= digests(tmp_path / "made", "shards/*").items()


def test_a_job_of_a_cluster_that_the_service_no_longer_has_says_so(tmp_path):
    job = Watched("rf.generate", tmp_path / "made", {**SAMPLES, "cluster": True})

    with pytest.raises(ConfigError, match="no longer has a cluster"):
        job.run()


# On the service's cluster


@pytest.fixture(scope="module")
def head():
    """A Ray cluster of one node that asks for a token."""
    pytest.importorskip("ray")
    from ray_head import TOKEN, ray_head

    with ray_head(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as head:
        yield {"RAY_ADDRESS": f"127.0.0.1:{head.gcs}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


@pytest.fixture
def on_cluster(head, monkeypatch):
    for name, value in head.items():
        monkeypatch.setenv(name, value)


@pytest.mark.long
@pytest.mark.usefixtures("on_cluster")
def test_a_generation_on_the_cluster_makes_the_same_bytes(dataset, tmp_path):
    job = Watched("rf.generate", tmp_path / "made", {**SAMPLES, "cluster": True}, cluster="auto")
    result = job.run()

    assert result is not None
    assert (result["accepted"], result["workers"]) == (40, 1)
    assert digests(tmp_path / "made", "shards/*") == digests(dataset, "shards/*")


@pytest.mark.long
def test_a_cluster_that_nobody_answers_at_fails_the_job_in_words(tmp_path):
    pytest.importorskip("ray")
    from ray_head import free_port

    address = f"ray://127.0.0.1:{free_port()}"
    job = Watched("rf.generate", tmp_path / "made", {**SAMPLES, "cluster": True}, cluster=address)

    with pytest.raises(ClusterError, match="nobody answers"):
        job.run()
    assert not (tmp_path / "made").exists()


# Other kinds


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Path:
    """Images and masks."""
    import cv2
    import numpy as np

    from brim.segmentation.scenes import make_cells

    path = tmp_path_factory.mktemp("datasets") / "cells"
    for index in range(8):
        image, mask = make_cells(3, index, 64, 64)
        for folder, pixels in (("images", image[..., ::-1]), ("masks", mask.astype(np.uint8) * 255)):
            (path / folder).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path / folder / f"{index:02d}.png"), pixels)
    return path


NETWORK = {"model": "unet_tiny", "size": 32, "epochs": 2, "batch_size": 4, "learning_rate": 0.01, "precision": "fp32"}


@pytest.mark.long
@needs_two_cores
@pytest.mark.usefixtures("on_cluster")
def test_a_network_trains_on_two_devices_and_predicts_on_the_cluster(cells, tmp_path):
    trained = Watched("segment.train", tmp_path / "run", {**NETWORK, "devices": 2}, datasets=[cells]).run()
    alone = Watched("segment.train", tmp_path / "alone", NETWORK, datasets=[cells]).run()
    assert trained["dice"] == pytest.approx(alone["dice"], abs=0.01)  # a pixel at the edge of a cell

    asked = {"batch_size": 1}  # nothing is tuned
    here = Watched("segment.predict", tmp_path / "here", asked, datasets=[cells], run=tmp_path / "run")
    assert here.run()["failed"] == 0
    there = Watched(
        "segment.predict", tmp_path / "there", {**asked, "cluster": True}, datasets=[cells], run=tmp_path / "run",
        cluster="auto",
    )  # fmt: skip
    result = there.run()

    assert (result["images"], result["failed"], result["num_files"]) == (8, 0, 8)
    assert digests(tmp_path / "there", "*.geojson") == digests(tmp_path / "here", "*.geojson")


@pytest.mark.long
@needs_two_cores
@pytest.mark.parametrize("mode", ["supervised", "self"])
def test_sequences_train_on_two_devices_as_on_one(tmp_path, mode):
    from brim.sequences import make_sequences
    from brim.sequences.corpus.packing import pack

    pack(make_sequences(tmp_path / "npy", 60, dim=8, classes=3, mean_length=12), tmp_path / "corpus")
    shape = {"channels": 16, "convolutions": 2, "hidden": 16, "layers": 1, "attention": 8, "embedding": 16}
    recipe = {"mode": mode, "epochs": 2, "iterations": 1, "batch_size": 16, "model": shape}
    found = [
        Watched("sequence.train", tmp_path / str(count), {**recipe, "devices": count}, datasets=[tmp_path / "corpus"])
        for count in (1, 2)
    ]
    one, two = (job.run() for job in found)

    assert one["scores"] == pytest.approx(two["scores"], abs=0.2)
    assert two["run_id"] == "2"
    assert found[1].currents == sorted(found[1].currents)
