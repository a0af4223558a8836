"""Events of a job: numbered without gaps whoever writes, replayed from any number, old ones forgotten."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from brim.jobs.status import JobProgress
from brim.jobs.store import jobs as module

ASKED = SimpleNamespace(kind="rf.evaluate", name="e", config={})


@pytest.fixture
def job(catalogue):
    made, _ = catalogue.jobs.submit(ASKED)
    assert catalogue.jobs.move(made.id, "running", of={"pending"}, worker="w0")
    return made


def test_several_writers_leave_no_gap(catalogue, job):
    def write(writer):
        for step in range(15):
            if writer % 2:
                catalogue.jobs.tell(job.id, JobProgress(current=step))
            else:
                assert catalogue.jobs.want(job.id, "pause")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))

    found = catalogue.events.after(job.id, 0)
    assert [event.seq for event in found] == list(range(1, 2 + 4 * 15 + 1))
    assert catalogue.events.heads([job.id, "0" * 32]) == {job.id: found[-1].seq}


def test_a_watcher_never_misses_an_event_while_others_write(catalogue, job):
    """A number becomes visible only after all lower ones."""
    seen = []
    with ThreadPoolExecutor(3) as pool:
        writers = [
            pool.submit(lambda: [catalogue.jobs.tell(job.id, JobProgress(current=n)) for n in range(20)])
            for _ in range(3)
        ]
        while not (all(writer.done() for writer in writers) and len(seen) == catalogue.events.heads([job.id])[job.id]):
            seen += [event.seq for event in catalogue.events.after(job.id, seen[-1] if seen else 0, limit=7)]

    assert seen == list(range(1, 63))


def test_events_replay_from_any_number(catalogue, job):
    for step in range(5):
        catalogue.jobs.tell(job.id, JobProgress(current=step))

    assert [event.data["current"] for event in catalogue.events.after(job.id, 4, limit=2)] == [2, 3]
    assert [event.seq for event in catalogue.events.after(job.id, -(10**30), limit=2)] == [1, 2]
    assert catalogue.events.after(job.id, 10**30) == []


def test_the_story_of_a_job_is_told_by_its_status_events(catalogue, job):
    catalogue.jobs.want(job.id, "cancel")
    catalogue.jobs.settle(job.id)

    story = [(event.data["status"], event.data["wanted"]) for event in catalogue.events.after(job.id, 0)]
    assert story == [("pending", "run"), ("running", "run"), ("running", "cancel"), ("cancelled", "cancel")]


def test_old_progress_is_forgotten_and_old_statuses_are_not(catalogue, job, monkeypatch):
    monkeypatch.setattr(module, "KEEP", 30)

    for step in range(198):
        catalogue.jobs.tell(job.id, JobProgress(current=step))

    found = catalogue.events.after(job.id, 0)
    assert [event.seq for event in found] == [1, 2, *range(171, 201)]  # pruned when number 200 was added
