"""The queue from outside: idempotent, in words, and never two at once."""

import pytest

from brim.errors import Conflict, Unavailable
from brim.jobs.durable import DbosState, Queue, migrate

JOB, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def queue(database_url):
    migrate(database_url)
    opened = Queue(database_url)
    yield opened
    opened.close()


def status(queue, job_id=JOB):
    return queue.states([job_id])[job_id].status


def test_a_job_is_queued_once_however_often_it_is_submitted(queue):
    queue.submit(JOB)
    queue.submit(JOB)
    queue.submit(OTHER)

    assert queue.active() == {JOB: DbosState("ENQUEUED", None), OTHER: DbosState("ENQUEUED", None)}


def test_nothing_is_known_of_a_job_never_queued(queue):
    assert queue.states([JOB]) == {}
    assert queue.states([]) == {}


def test_cancel_takes_it_from_the_queue_and_resume_puts_it_back(queue):
    queue.submit(JOB)

    queue.cancel(JOB)
    assert status(queue) == "CANCELLED"
    queue.resume(JOB, failed=False)
    queue.resume(JOB, failed=False)

    assert status(queue) == "ENQUEUED"


def test_a_cancelled_job_can_be_begun_anew(queue):
    queue.submit(JOB)
    queue.cancel(JOB)

    queue.resume(JOB, failed=True)

    assert status(queue) == "ENQUEUED"


def test_cancel_and_forget_of_an_unknown_job_are_nothing(queue):
    queue.cancel(JOB)
    queue.forget(JOB)

    assert queue.states([JOB]) == {}


def test_resume_of_a_forgotten_job_queues_it(queue):
    queue.resume(JOB, failed=True)

    assert status(queue) == "ENQUEUED"


def test_a_job_that_runs_cannot_be_resumed(queue, monkeypatch):
    queue.submit(JOB)
    monkeypatch.setattr(queue, "states", lambda ids: {JOB: DbosState("PENDING", "w0")})

    with pytest.raises(Conflict, match="still being stopped"):
        queue.resume(JOB, failed=False)


def test_nobody_is_orphaned_by_waiting(queue):
    queue.submit(JOB)

    assert queue.orphans({"w0"}) == []


def test_migrating_again_changes_nothing(queue, database_url):
    queue.submit(JOB)

    migrate(database_url)

    assert status(queue) == "ENQUEUED"


def test_a_database_without_tables_is_unavailable(tmp_path):
    queue = Queue(f"sqlite:///{tmp_path}/empty.sqlite")

    with pytest.raises(Unavailable):
        queue.submit(JOB)
    queue.close()


def test_a_server_that_is_away_is_unavailable_at_once_and_back_when_it_is(postgres):
    url = postgres.fresh()
    migrate(url)
    queue = Queue(url)
    queue.submit(JOB)

    postgres.stop()
    try:
        with pytest.raises(Unavailable, match="does not answer"):
            queue.check()
    finally:
        postgres.start()

    assert status(queue) == "ENQUEUED"
    queue.close()
