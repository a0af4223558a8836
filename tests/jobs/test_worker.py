"""Real worker processes, killed and told to stop, with a kind that counts."""

import json
import random
import signal
import time
from functools import partial

import pytest
from desk import Desk

from brim.jobs.worker.joblog import log_file, read_log
from brim.jobs.worker.live import read_live
from brim.jobs.worker.process import urls
from brim.service.settings import Settings
from waiting import PATIENCE_S


def opened(desk: Desk, job_id: str) -> list[int]:
    """Where each attempt began."""
    return [int(line.split()[1]) for line in desk.marks(job_id) if line.startswith("open")]


def test_a_job_runs_to_its_end_and_is_listed(make_desk, database):
    desk = make_desk(database)
    job_id = desk.submit(items=60)

    job = desk.until(job_id, "completed")

    assert job.result["counted"] == 60
    assert (job.current, job.total, job.attempts, job.worker) == (60, 60, 1, None)
    made = desk.catalogue.datasets.get(job.output_id)
    assert (made.state, made.items) == ("ready", 60)
    assert desk.wait(lambda: desk.queue.states([job_id])[job_id].status == "SUCCESS", job_id)
    assert desk.catalogue.devices.all()[0].info["device"] == "cpu"


def test_kills_lose_nothing_and_repeat_nothing(make_desk, database):
    desk = make_desk(database)
    job_id = desk.submit(items=150, hold_at=120)

    for attempt, current in enumerate((20, 60), 1):
        desk.past(job_id, current)
        desk.wait(lambda attempt=attempt: len(opened(desk, job_id)) == attempt, job_id)
        desk.kill()
    desk.let_go(job_id)
    job = desk.until(job_id, "completed")

    assert job.attempts == 3
    assert desk.items(job_id) == 150
    begins = opened(desk, job_id)
    assert begins == sorted(begins)
    assert len(begins) == 3
    assert begins[1] >= 20


def test_a_stop_ends_the_work_where_it_is_and_resume_goes_on(make_desk, database):
    desk = make_desk(database)
    job_id = desk.submit(items=60, hold_at=30)
    desk.past(job_id, 30)

    for wanted, status in (("pause", "paused"), ("cancel", "cancelled")):
        desk.stop(job_id, wanted)
        stopped = desk.until(job_id, status)
        kept = desk.catalogue.datasets.get(stopped.output_id)
        assert (kept.state, kept.items) == ("partial", 30)
        assert (stopped.finished_at is None) == (wanted == "pause")
        if wanted == "cancel":
            desk.let_go(job_id)
        desk.resume(job_id)
        if wanted == "pause":
            desk.wait(lambda: len(opened(desk, job_id)) == 2, job_id)

    assert desk.until(job_id, "completed").result["counted"] == 60
    assert opened(desk, job_id) == [0, 30, 30]


def test_a_failure_is_told_without_paths_and_resume_begins_anew(make_desk, database):
    desk = make_desk(database)
    job_id = desk.submit(items=30, fail_at=10)

    job = desk.until(job_id, "failed")

    assert job.error == 'the dataset "night run" manifest.json: item 10 cannot be made; read (path)'
    assert desk.catalogue.datasets.get(job.output_id).items == 10
    lines, _ = read_log(log_file(desk.data, job_id))
    assert any(line["level"] == "error" and "item 10 cannot be made" in line["text"] for line in lines)
    assert str(desk.data) not in json.dumps(lines)
    assert desk.wait(lambda: desk.queue.states([job_id])[job_id].status == "ERROR", job_id)
    (desk.data / job.out / "mended").touch()
    desk.resume(job_id)
    mended = desk.until(job_id, "completed")
    assert (mended.result["counted"], mended.error, mended.attempts) == (30, None, 2)


def test_an_unforeseen_failure_says_so_and_leaves_its_traceback_in_the_log(make_desk):
    desk = make_desk()
    job_id = desk.submit(items=30, break_at=3)

    job = desk.until(job_id, "failed")

    assert job.error == 'unexpected ZeroDivisionError: within the dataset "night run"; the job\'s log has more'
    text = "\n".join(line["text"] for line in read_log(log_file(desk.data, job_id))[0])
    assert "Traceback" in text
    assert "/" not in text.partition("Traceback")[2].replace("job's", "").replace("(path)", "")
    assert desk.wait(lambda: desk.queue.states([job_id])[job_id].status == "ERROR", job_id)
    other = desk.submit(items=5)
    assert desk.until(other, "completed").attempts == 1
    pids = {desk.marks(each)[0].split()[2] for each in (job_id, other)}
    assert len(pids) == 2  # who knows what the failure left behind: the next job gets a new process


def test_a_job_that_kills_its_workers_is_given_up(make_desk):
    desk = make_desk()
    job_id = desk.submit(items=30, die_at=4)
    desk.until(job_id, "running")
    for _ in range(8):  # so that two more suffice: a start takes seconds
        desk.catalogue.jobs.died(job_id)

    job = desk.until(job_id, "failed")

    assert job.error == "its worker died 10 times in a row without getting further; last: signal 6"
    assert desk.catalogue.datasets.get(job.output_id).items == 4


def test_sigterm_stops_at_the_next_item_and_the_next_worker_goes_on(make_desk):
    desk = make_desk()
    job_id = desk.submit(items=60, hold_at=30)
    desk.past(job_id, 30)

    desk.workers["w0"].terminate()

    assert desk.workers["w0"].wait(PATIENCE_S) == 0
    assert desk.marks(job_id)[-1].startswith("stop 30 ")
    assert desk.job(job_id).status == "running"
    assert desk.queue.states([job_id])[job_id].status == "PENDING"
    desk.let_go(job_id)
    assert desk.until(job_id, "completed").attempts == 2
    assert opened(desk, job_id) == [0, 30]


def test_a_full_disk_fails_the_job_in_words_and_it_goes_on_with_more_room(make_desk, tmp_path):
    free = tmp_path / "free"
    free.write_text("100000")
    desk = make_desk(BRIM_FREE_BYTES_FILE=str(free))
    large = desk.until(desk.submit(items=5, bytes=10**9), "failed")
    job_id = desk.submit(items=60, hold_at=20)
    desk.past(job_id, 20)

    free.write_text("10")
    job = desk.until(job_id, "failed")

    assert large.error.startswith("the job needs about 953.7 MiB of disk")
    assert desk.catalogue.datasets.get(large.output_id) is None
    assert job.error.startswith("the disk is nearly full: 10 bytes are free")
    assert desk.items(job_id) == 20
    free.write_text("100000")
    desk.let_go(job_id)
    desk.resume(job_id)
    assert desk.until(job_id, "completed").result["counted"] == 60


def test_where_the_time_goes_is_said_until_the_job_ends_and_who_is_cancelled_while_waiting_never_starts(make_desk):
    desk = make_desk()
    first = desk.submit(items=4000, hold_at=3999, every_s=0.01)
    second = desk.submit(items=10)
    word = desk.wait(lambda: (word := read_live(desk.data, "w0")) and word.stalls and word, first)
    later = desk.wait(lambda: (new := read_live(desk.data, "w0")) and new.at > word.at and new, first)

    desk.stop(second)
    assert desk.until(second, "cancelled").attempts == 0
    desk.stop(first)
    assert desk.until(first, "cancelled").attempts == 1

    assert word.job_id == later.job_id == first
    assert word.stalls == {"data": pytest.approx(0.25, abs=0.01)}
    assert word.ceiling_share == pytest.approx(0.75, abs=0.01)
    assert desk.wait(lambda: read_live(desk.data, "w0") is None, first)


def test_two_workers_take_a_job_each_in_turn_and_none_runs_twice(make_desk, database):
    desk = make_desk(database)
    desk.start("w1")
    ids = [desk.submit(items=20, hold_at=10) for _ in range(4)]
    desk.wait(lambda: [desk.job(job_id).current for job_id in ids].count(10) == 2, ids[0])  # beside each other
    assert [desk.job(job_id).attempts for job_id in ids] == [1, 1, 0, 0]  # first come, first served

    for job_id in ids:
        desk.let_go(job_id)
    jobs = [desk.until(job_id, "completed") for job_id in ids]

    assert [job.attempts for job in jobs] == [1] * 4
    assert all(len(desk.marks(job_id)) == 2 for job_id in ids)
    assert len({desk.marks(job_id)[0].split()[2] for job_id in ids}) == 2


@pytest.mark.long
def test_kills_stops_and_resumes_at_random_leave_both_databases_of_one_mind(make_desk, database):
    desk, rng = make_desk(database), random.Random(11)
    desk.start("w1")
    ids = [desk.submit(items=250) for _ in range(3)]

    for _ in range(50):
        desk.oversee()
        act, job_id = rng.choice(["kill", "cancel", "pause", "resume", "resume", "resume"]), rng.choice(ids)
        if act == "kill" and rng.random() < 0.4:
            desk.workers[rng.choice(["w0", "w1"])].send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        elif act in ("cancel", "pause") and desk.catalogue.jobs.want(job_id, act):
            desk.queue.cancel(job_id)
        elif act == "resume" and desk.job(job_id).status in ("cancelled", "paused", "failed"):
            desk.resume(job_id)
        time.sleep(rng.uniform(0, 0.4))
    for job_id in ids:
        settled = desk.wait(partial(settled_job, desk, job_id), job_id)
        if settled.status in ("cancelled", "paused"):
            desk.resume(job_id)
    jobs = [desk.until(job_id, "completed", "failed") for job_id in ids]

    assert [(job.status, job.error) for job in jobs] == [("completed", None)] * 3
    for job in jobs:
        words = [line.split()[0] for line in desk.marks(job.id)]
        assert "overlap" not in words
        assert desk.items(job.id) == 250
        assert job.attempts >= words.count("open")  # one may be killed before it begins to count
    assert desk.wait(lambda: not desk.queue.active(), ids[0])
    assert {state.status for state in desk.queue.states(ids).values()} == {"SUCCESS"}


def settled_job(desk, job_id):
    job = desk.job(job_id)
    return None if job.status in ("pending", "queued", "running") and job.wanted != "run" else job


def test_databases_are_files_in_the_data_directory_unless_a_url_says_otherwise(tmp_path):
    own = f"sqlite:///{tmp_path}/jobs.sqlite", f"sqlite:///{tmp_path}/catalogue.sqlite"
    assert urls(tmp_path, None) == own
    assert urls(tmp_path, "sqlite:////elsewhere/q.sqlite") == ("sqlite:////elsewhere/q.sqlite", own[1])
    assert urls(tmp_path, "postgresql://u@h/n") == ("postgresql://u@h/n", "postgresql://u@h/n")
    settings = Settings(data=tmp_path, database="postgresql://u@h/n")
    assert (settings.jobs_url, settings.catalogue_url) == urls(tmp_path, settings.database)
