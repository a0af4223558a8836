"""Running jobs say where their time goes: the library's own clocks, by way of the worker, until the job ends."""

import pytest
import torch
from desk import Desk
from kind_inputs import Watched

from brim.jobs.worker.live import read_live

torch.set_num_threads(1)

SMALL = {"num_samples": 40, "duration_s": 0.2, "samples_per_shard": 16, "seed": 5, "batch_size": 4}
RECIPE = {"epochs": 60, "batch_size": 8}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    job = Watched("rf.generate", tmp_path_factory.mktemp("datasets") / "made", SMALL)
    job.result = job.run()
    return job


def flows(job):
    return [progress.flow for progress in job.told if progress.flow is not None]


def test_a_generation_says_what_its_compute_stage_waits_for(dataset):
    said = flows(dataset)

    assert said
    assert {frozenset(flow.waiting) for flow in said} == {frozenset({"preparing", "writing"})}
    assert [flow.seconds for flow in said] == sorted(flow.seconds for flow in said)
    compute, seconds = dataset.result["stages"]["compute"], dataset.result["seconds"]
    assert 0 < said[-1].seconds <= seconds
    assert said[-1].waiting["preparing"] <= compute["wait_input_s"]
    assert sum(said[-1].waiting.values()) <= said[-1].seconds


def test_a_training_says_what_its_steps_wait_for(dataset, tmp_path):
    job = Watched("rf.train", tmp_path / "run", RECIPE, datasets=[dataset._task.out])
    result = job.run()
    said = flows(job)

    assert said
    assert said[-1].waiting.keys() == {"data", "copy", "logging", "checkpoint"}
    assert {cause: result["waiting"][cause] for cause in said[-1].waiting} == pytest.approx(said[-1].waiting)
    assert 0 < sum(said[-1].waiting.values()) < said[-1].seconds
    assert all(progress.flow is None for progress in job.told if progress.message.startswith("solving"))


def test_a_worker_says_so_again_and_again_until_the_job_ends(tmp_path):
    desk = Desk(tmp_path / "data")
    try:
        desk.start()
        job_id = desk.submit(items=4000, hold_at=3999, every_s=0.01)

        def known():
            return (word := read_live(desk.data, "w0")) and word.stalls and word

        word = desk.wait(known, job_id)
        later = desk.wait(lambda: (new := read_live(desk.data, "w0")) and new.at > word.at and new, job_id)
        desk.stop(job_id)
        desk.until(job_id, "cancelled")

        assert word.job_id == later.job_id == job_id
        assert word.stalls == {"data": pytest.approx(0.25, abs=0.01)}
        assert word.ceiling_share == pytest.approx(0.75, abs=0.01)
        assert desk.wait(lambda: read_live(desk.data, "w0") is None, job_id)
    finally:
        desk.close()
