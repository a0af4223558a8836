"""Events of a job: numbered without gaps whoever writes, replayed from any number, old ones forgotten."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from desk import Asked

from brim.jobs.status import JobProgress
from brim.jobs.store import jobs as module

ASKED = Asked("rf.evaluate", "e", {})


@pytest.fixture
def job(catalogue):
    made, _ = catalogue.jobs.submit(ASKED)
    assert catalogue.jobs.move(made.id, "running", of={"pending"}, worker="w0")
    return made


def test_a_watcher_never_misses_an_event_while_others_write(catalogue, job):
    """A number becomes visible only after all lower ones, and none is left out."""
    seen = []
    with ThreadPoolExecutor(3) as pool:
        tell = lambda n: catalogue.jobs.tell(job.id, JobProgress(current=n))  # noqa: E731
        want = lambda _: catalogue.jobs.want(job.id, "pause")  # noqa: E731
        writers = [pool.submit(lambda do: [do(n) for n in range(20)], do) for do in (tell, want, tell)]
        while not (all(writer.done() for writer in writers) and len(seen) == catalogue.events.heads([job.id])[job.id]):
            seen += [event.seq for event in catalogue.events.after(job.id, seen[-1] if seen else 0, limit=7)]

    assert seen == list(range(1, 63))
    assert catalogue.events.heads([job.id, "0" * 32]) == {job.id: 62}


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
