"""Real worker processes, killed and told to stop, with a kind that counts."""

import json
import random
import signal
import time
from functools import partial

import pytest
from desk import Asked, Desk

from brim.jobs.registry.outputs import output_of
from brim.jobs.worker.joblog import log_file, read_log
from brim.jobs.worker.process import urls
from brim.service.settings import Settings
from waiting import PATIENCE_S, until


@pytest.fixture
def database(database_url):
    return None if database_url.startswith("sqlite") else database_url


@pytest.fixture
def make_desk(tmp_path):
    made = []

    def make(database=None, **options) -> Desk:
        made.append(Desk(tmp_path / "data", database, **options))
        made[-1].start()
        return made[-1]

    yield make
    for desk in made:
        desk.close()


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


def test_four_kills_lose_nothing_and_repeat_nothing(make_desk, database):
    desk = make_desk(database)
    job_id = desk.submit(items=300, hold_at=250)

    for attempt, current in enumerate((20, 60, 120, 200), 1):
        desk.past(job_id, current)
        desk.wait(lambda attempt=attempt: len(opened(desk, job_id)) == attempt, job_id)
        desk.kill()
    desk.let_go(job_id)
    job = desk.until(job_id, "completed")

    assert job.attempts == 5
    assert desk.items(job_id) == 300
    begins = opened(desk, job_id)
    assert begins == sorted(begins)
    assert len(begins) == 5
    assert begins[1] >= 20


def opened(desk, job_id) -> list[int]:
    """Where each attempt began."""
    return [int(line.split()[1]) for line in desk.marks(job_id) if line.startswith("open")]


@pytest.mark.parametrize("wanted", ["cancel", "pause"])
def test_a_stop_ends_the_work_where_it_is_and_resume_goes_on(make_desk, database, wanted):
    desk = make_desk(database)
    job_id = desk.submit(items=60, hold_at=30)
    desk.past(job_id, 30)

    desk.stop(job_id, wanted)
    stopped = desk.until(job_id, {"cancel": "cancelled", "pause": "paused"}[wanted])

    kept = desk.catalogue.datasets.get(stopped.output_id)
    assert (kept.state, kept.items) == ("partial", 30)
    assert (stopped.finished_at is None) == (wanted == "pause")
    desk.let_go(job_id)
    desk.resume(job_id)
    assert desk.until(job_id, "completed").result["counted"] == 60
    assert opened(desk, job_id) == [0, 30]


@pytest.mark.long
def test_a_kind_that_ignores_stop_is_killed_and_the_job_is_cancelled(make_desk):
    desk = make_desk()
    job_id = desk.submit(items=100_000, deaf=True)
    desk.past(job_id, 5)
    first = desk.workers["w0"]

    desk.stop(job_id)
    job = desk.until(job_id, "cancelled")

    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    assert desk.catalogue.datasets.get(job.output_id).state == "partial"
    other = desk.submit(items=5)  # the next worker takes the next job
    assert desk.until(other, "completed").attempts == 1


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


@pytest.mark.long
def test_a_log_that_cannot_be_opened_fails_its_job_alone_and_resume_goes_on(make_desk):
    desk = make_desk()
    job, _ = desk.catalogue.jobs.submit(Asked("toy.count", "night run", {"items": 5}), makes="dataset")
    log_file(desk.data, job.id).mkdir(parents=True)
    desk.queue.submit(job.id)
    desk.catalogue.jobs.move(job.id, "queued", of=["pending"])
    other = desk.submit(items=5)

    failed = desk.until(job.id, "failed")

    assert failed.error.startswith("the job's log cannot be opened: Is a directory")
    assert str(desk.data) not in failed.error
    assert desk.until(other, "completed").attempts == 1
    log_file(desk.data, job.id).rmdir()
    desk.resume(job.id)
    assert desk.until(job.id, "completed").result["counted"] == 5


@pytest.mark.long
def test_a_flipped_bit_in_the_manifest_of_a_paused_job_harms_that_job_alone(make_desk):
    desk = make_desk()
    job_id = desk.submit(items=300, hold_at=20)
    desk.past(job_id, 20)
    desk.stop(job_id, "pause")
    paused = desk.until(job_id, "paused")
    listed = desk.catalogue.datasets.get(paused.output_id)
    manifest = desk.data / paused.out / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"items"', '"ytems"'))

    assert desk.catalogue.jobs.move(job_id, "cancelled", of=["paused"], output=output_of(desk.data, paused))
    assert desk.catalogue.datasets.get(paused.output_id) == listed
    desk.resume(job_id)
    other = desk.submit(items=5)

    assert desk.until(job_id, "failed").error.startswith("unexpected KeyError")
    assert desk.until(other, "completed").attempts == 1


def test_a_job_that_kills_its_workers_is_given_up(make_desk):
    desk = make_desk()
    job_id = desk.submit(items=30, die_at=4)
    desk.until(job_id, "running")
    for _ in range(7):  # so that three more suffice: a start takes seconds
        desk.catalogue.jobs.died(job_id)

    job = desk.until(job_id, "failed")

    assert job.error == "its worker died 10 times in a row without getting further; last: signal 6"
    assert desk.catalogue.datasets.get(job.output_id).items == 4


def test_sigterm_stops_at_the_next_item_and_the_next_worker_goes_on(make_desk, database):
    desk = make_desk(database)
    job_id = desk.submit(items=60, hold_at=30)
    desk.past(job_id, 30)

    desk.workers["w0"].terminate()

    assert desk.workers["w0"].wait(PATIENCE_S) == 0
    assert desk.marks(job_id)[-1].startswith("stop 30 ")
    assert desk.job(job_id).status == "running"
    assert desk.queue.states([job_id])[job_id].status == "PENDING"
    desk.let_go(job_id)
    job = desk.until(job_id, "completed")
    assert "open 30 " in "\n".join(desk.marks(job_id))
    assert job.attempts == 2


def test_a_full_disk_fails_the_job_in_words_and_it_goes_on_with_more_room(make_desk, tmp_path):
    free = tmp_path / "free"
    free.write_text("100000")
    desk = make_desk(BRIM_FREE_BYTES_FILE=str(free))
    job_id = desk.submit(items=60, hold_at=20)
    desk.past(job_id, 20)

    free.write_text("10")
    job = desk.until(job_id, "failed")

    assert job.error.startswith("the disk is nearly full: 10 bytes are free")
    assert desk.items(job_id) == 20
    free.write_text("100000")
    desk.let_go(job_id)
    desk.resume(job_id)
    assert desk.until(job_id, "completed").result["counted"] == 60


def test_a_job_that_does_not_fit_on_the_disk_does_not_start(make_desk, tmp_path):
    free = tmp_path / "free"
    free.write_text("100000")
    desk = make_desk(BRIM_FREE_BYTES_FILE=str(free))

    job = desk.until(desk.submit(items=5, bytes=10**9), "failed")

    assert job.error.startswith("the job needs about 953.7 MiB of disk")
    assert desk.catalogue.datasets.get(job.output_id) is None


def test_a_job_cancelled_while_it_waits_never_starts(make_desk):
    desk = make_desk()
    first = desk.submit(items=10, hold_at=5)
    second = desk.submit(items=10)
    desk.past(first, 5)

    desk.stop(second)

    assert desk.until(second, "cancelled").attempts == 0
    desk.let_go(first)
    assert desk.until(first, "completed").attempts == 1


@pytest.mark.long
def test_two_workers_take_a_job_each_and_none_runs_twice(make_desk, database):
    desk = make_desk(database)
    desk.start("w1")
    ids = [desk.submit(items=20, hold_at=10) for _ in range(4)]
    desk.wait(lambda: [desk.job(job_id).current for job_id in ids].count(10) == 2, ids[0])  # beside each other

    for job_id in ids:
        desk.let_go(job_id)
    jobs = [desk.until(job_id, "completed") for job_id in ids]

    assert [job.attempts for job in jobs] == [1] * 4
    assert all(len(desk.marks(job_id)) == 2 for job_id in ids)
    assert len({desk.marks(job_id)[0].split()[2] for job_id in ids}) == 2


@pytest.mark.long
def test_a_job_does_not_wait_for_a_database_that_is_away(make_desk, postgres):
    desk = make_desk(postgres.fresh())
    job_id = desk.submit(items=300, hold_at=20)
    desk.past(job_id, 20)
    (manifest,) = desk.data.glob("datasets/*/manifest.json")

    postgres.stop()
    try:
        (manifest.parent / "go").touch()
        until(lambda: json.loads(manifest.read_text())["complete"])
    finally:
        postgres.start()
    job = desk.until(job_id, "completed")

    assert job.attempts == 1
    assert [line.split()[0] for line in desk.marks(job_id)] == ["open", "end"]


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
