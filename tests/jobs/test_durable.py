"""The queue from outside: idempotent, in words, and never two at once."""

import pytest
import sqlalchemy as sa

from brim.errors import Conflict, Unavailable
from brim.jobs.durable import DbosState, Queue, migrate

JOB, OTHER = "a" * 32, "b" * 32


def status(queue, job_id=JOB):
    return queue.states([job_id])[job_id].status


@pytest.fixture
def record(queue):
    """Writes into the queue what a worker would of a job it has."""
    url = queue._url.replace("postgresql:", "postgresql+psycopg:")
    table = sa.table("workflow_status", schema=None if url.startswith("sqlite") else "dbos")
    engine = sa.create_engine(url)

    def write(job_id=JOB, **values):
        for name in ("workflow_uuid", *values):
            if name not in table.c:
                table.append_column(sa.column(name))
        queue.submit(job_id)
        with engine.begin() as connection:
            connection.execute(sa.update(table).where(table.c.workflow_uuid == job_id).values(values))

    yield write
    engine.dispose()


def test_a_job_is_queued_once_however_often_it_is_submitted(queue):
    for job_id in (JOB, JOB, OTHER):
        queue.submit(job_id)

    assert queue.active() == {JOB: DbosState("ENQUEUED", None), OTHER: DbosState("ENQUEUED", None)}
    assert queue.states([]) == queue.states(["c" * 32]) == {}
    assert queue.is_cancelled("c" * 32)  # it was forgotten
    assert not queue.is_cancelled(JOB)


def test_cancel_takes_it_from_the_queue_and_resume_puts_it_back(queue):
    queue.submit(JOB)
    queue.submit(OTHER)

    for failed in (False, True):
        queue.cancel(JOB)
        assert (status(queue), queue.is_cancelled(JOB), list(queue.active())) == ("CANCELLED", True, [OTHER])
        queue.resume(JOB, failed=failed)
        queue.resume(JOB, failed=failed)
        assert status(queue) == "ENQUEUED"


def test_what_was_never_queued_or_is_forgotten_can_be_cancelled_forgotten_and_resumed(queue):
    queue.cancel(JOB)
    queue.forget(JOB)
    assert queue.states([JOB]) == {}

    queue.resume(JOB, failed=True)
    assert status(queue) == "ENQUEUED"


def test_a_job_that_a_worker_has_cannot_be_resumed_and_is_an_orphan_of_that_worker_alone(queue, record):
    queue.submit(OTHER)  # waits: nobody's
    record(status="PENDING", executor_id="w1")

    assert queue.active()[JOB] == DbosState("PENDING", "w1")
    with pytest.raises(Conflict, match="still being stopped"):
        queue.resume(JOB, failed=False)
    assert queue.orphans({"w0", "w1"}) == []
    assert queue.orphans({"w0"}) == [JOB]

    queue.adopt(JOB)
    assert status(queue) == "ENQUEUED"


@pytest.mark.parametrize("ended", ["ERROR", "SUCCESS"])
def test_a_job_that_ended_begins_anew_when_it_is_resumed(queue, record, ended):
    record(status=ended, executor_id="w1")

    queue.resume(JOB, failed=ended == "ERROR")

    assert status(queue) == "ENQUEUED"


def test_completed_jobs_are_known_by_when_they_ended(queue, record):
    record(JOB, status="SUCCESS", completed_at=1_000_000)  # milliseconds
    record(OTHER, status="ERROR", completed_at=1_000_000)

    assert queue.succeeded_before(999.0) == []
    assert queue.succeeded_before(1001.0) == [JOB]
    queue.forget(JOB)
    assert queue.states([JOB, OTHER]).keys() == {OTHER}


def test_migrating_again_changes_nothing(queue):
    queue.submit(JOB)

    migrate(queue._url)

    assert status(queue) == "ENQUEUED"


def test_a_server_that_is_away_is_unavailable_at_once_and_back_when_it_is(postgres):
    url = postgres.fresh()
    migrate(url)
    queue = Queue(url)
    queue.submit(JOB)

    postgres.stop()
    try:
        with pytest.raises(Unavailable, match="does not answer"):
            queue.check()
        assert not queue.is_cancelled(JOB)  # who runs it goes on
    finally:
        postgres.start()

    assert status(queue) == "ENQUEUED"
    queue.close()
