"""What is wanted against what runs: the table of states, and the mending itself on real databases."""

import time

import pytest
from desk import Asked

from brim.errors import Unavailable
from brim.jobs.durable import DbosState, Queue, migrate
from brim.jobs.status import JobProgress
from brim.jobs.store import JobRow
from brim.jobs.worker import reconcile
from brim.jobs.worker.reconcile import decide, is_leftover

NOW = 1_000_000.0


def job(status, wanted, *, quiet_s=0.0, stopping_s=None) -> JobRow:
    return JobRow(
        number=1, id="a" * 32, kind="toy.count", name="n", status=status, wanted=wanted, config={}, inputs={},
        makes="dataset", output_id="b" * 32, result=None, error=None, key_hash=None, worker="w0", attempts=1, deaths=0,
        deaths_at=-1, current=0, total=0, rate=0.0, eta_s=None, message="", event_seq=0, created_at=0.0, queued_at=0.0,
        stopping_at=None if stopping_s is None else NOW - stopping_s, started_at=0.0, finished_at=None,
        updated_at=NOW - quiet_s,
    )  # fmt: skip


def state(status):
    return None if status is None else DbosState(status, "w0")


@pytest.mark.parametrize(
    ("status", "wanted", "known", "quiet_s", "action"),
    [
        # all is well
        ("pending", "run", None, 1, None),  # an API that is only slow
        ("pending", "run", "PENDING", 1, None),
        ("queued", "run", "ENQUEUED", 1e6, None),
        ("queued", "run", "PENDING", 1e6, None),  # a worker is about to say that it runs
        ("running", "run", "PENDING", 1e6, None),  # silence is the supervisor's to judge
        ("running", "run", "ENQUEUED", 1, None),  # its worker is being restarted
        ("running", "run", "SUCCESS", 1e6, None),
        ("queued", "run", "CANCELLED", 1, None),  # a resume under way
        # an API died half way
        ("pending", "run", None, 3, "submit"),
        ("pending", "run", "ENQUEUED", 0, "show queued"),
        ("queued", "run", None, 3, "submit"),
        ("queued", "run", "CANCELLED", 3, "resume"),
        ("queued", "run", "ERROR", 3, "resume"),
        ("queued", "cancel", "ENQUEUED", 0, "cancel"),
        ("running", "cancel", "PENDING", 0, "cancel"),
        ("running", "pause", "ENQUEUED", 0, "cancel"),
        # a worker died half way
        ("running", "run", None, 11, "submit"),
        ("running", "run", "ENQUEUED", 11, "show queued"),
        ("running", "run", "CANCELLED", 1, None),
        ("running", "run", "CANCELLED", 11, "give up"),
        ("running", "run", "ERROR", 11, "give up"),
        # nobody holds it
        ("pending", "cancel", None, 0, "settle"),
        ("queued", "cancel", "CANCELLED", 0, "settle"),
        ("queued", "pause", "CANCELLED", 0, "settle"),
    ],
)
def test_the_table_of_states(status, wanted, known, quiet_s, action):
    assert decide(job(status, wanted, quiet_s=quiet_s, stopping_s=0.0), state(known), NOW) == action


@pytest.mark.parametrize(("stopping_s", "action"), [(1, None), (4.9, None), (5.1, "kill"), (1e6, "kill")])
def test_a_job_that_does_not_stop_has_its_worker_killed(stopping_s, action):
    assert decide(job("running", "cancel", stopping_s=stopping_s), state("CANCELLED"), NOW) == action


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, True),  # deleted
        (job("cancelled", "cancel"), True),
        (job("paused", "pause"), True),
        (job("cancelled", "run"), False),  # about to be resumed
        (job("failed", "run", quiet_s=1), False),  # its worker is about to say so
        (job("failed", "run", quiet_s=11), True),
        (job("completed", "run", quiet_s=1e6), False),
        (job("completed", "cancel", quiet_s=1e6), False),
        (job("queued", "run"), False),
    ],
)
def test_what_the_queue_should_no_longer_hold(found, expected):
    assert is_leftover(found, NOW) == expected


# On real databases


@pytest.fixture
def queue(database_url, tmp_path):
    url = f"sqlite:///{tmp_path}/jobs.sqlite" if database_url.startswith("sqlite") else database_url
    migrate(url)
    opened = Queue(url)
    yield opened
    opened.close()


@pytest.fixture
def submit(catalogue):
    def make() -> JobRow:
        made, _ = catalogue.jobs.submit(Asked("toy.count", "n", {}), makes="dataset")
        return made

    return make


def later(seconds=60.0) -> float:
    return time.time() + seconds


def test_a_job_whose_api_was_killed_before_queueing_is_queued_once(catalogue, queue, submit, tmp_path):
    made = submit()

    reconcile.once(catalogue, queue, later(), tmp_path)
    reconcile.once(catalogue, queue, later(), tmp_path)

    assert queue.active() == {made.id: DbosState("ENQUEUED", None)}
    assert catalogue.jobs.get(made.id).status == "queued"


def test_a_cancel_that_never_reached_the_queue_does(catalogue, queue, submit, tmp_path):
    made = submit()
    queue.submit(made.id)
    catalogue.jobs.want(made.id, "cancel")

    reconcile.once(catalogue, queue, later(), tmp_path)
    reconcile.once(catalogue, queue, later(), tmp_path)

    assert queue.states([made.id])[made.id].status == "CANCELLED"
    assert catalogue.jobs.get(made.id).status == "cancelled"
    assert catalogue.datasets.page().total == 0  # nothing was made


def test_a_resume_that_never_reached_the_queue_does(catalogue, queue, submit, tmp_path):
    made = submit()
    queue.submit(made.id)
    queue.cancel(made.id)
    catalogue.jobs.move(made.id, "queued", of=["pending"])

    reconcile.once(catalogue, queue, later(), tmp_path)

    assert queue.states([made.id])[made.id].status == "ENQUEUED"


def test_a_deleted_job_leaves_the_queue(catalogue, queue, tmp_path):
    queue.submit("c" * 32)

    reconcile.once(catalogue, queue, later(), tmp_path)

    assert queue.active() == {}


def test_at_a_start_what_was_to_stop_has_stopped(catalogue, queue, submit, tmp_path):
    made = submit()
    queue.submit(made.id)
    catalogue.jobs.move(made.id, "running", of=["pending"], worker="w7")
    catalogue.jobs.want(made.id, "pause")
    (tmp_path / made.out).mkdir(parents=True)
    (tmp_path / made.out / "manifest.json").write_text('{"items": 12, "complete": false}')

    assert reconcile.orphans(catalogue, queue, {"w0"}, tmp_path) == 1

    assert catalogue.jobs.get(made.id).status == "paused"
    kept = catalogue.datasets.get(made.output_id)
    assert (kept.state, kept.items) == ("partial", 12)


@pytest.fixture
def die(catalogue, queue, submit, tmp_path):
    """Begins an attempt at a job and ends its worker, again and again."""
    made, deaths = submit(), reconcile.Deaths(catalogue, queue, tmp_path)
    queue.submit(made.id)

    def run(times, reason, *, starts=True) -> JobRow:
        for _ in range(times):
            if starts:
                catalogue.jobs.move(made.id, "running", of=["pending", "running"], worker="w0")
            deaths.note("w0", reason)
        return catalogue.jobs.get(made.id)

    return run


def test_a_job_that_ends_ten_workers_in_a_row_fails(die, queue):
    assert die(9, "signal 11").status == "running"

    ended = die(1, "signal 9, out of memory")

    assert ended.status == "failed"
    assert ended.error == "its worker died 10 times in a row without getting further; last: signal 9, out of memory"
    assert queue.states([ended.id])[ended.id].status == "CANCELLED"


def test_a_job_that_gets_on_between_deaths_may_go_on(die, catalogue):
    for current in range(30):
        going = die(1, "signal 11")
        catalogue.jobs.tell(going.id, JobProgress(current=current + 1, total=30))

    assert going.status == "running"


def test_somebody_who_kills_workers_does_not_end_their_job_soon(die):
    assert die(99, "signal 9").status == "running"
    assert die(1, "signal 9").status == "failed"


def test_workers_that_cannot_start_are_no_fault_of_the_job(die):
    die(1, "exit code 1")

    assert die(200, "exit code 1", starts=False).deaths == 1


def test_a_database_that_is_away_is_said_so(catalogue, tmp_path):
    broken = Queue(f"sqlite:///{tmp_path}/never_migrated.sqlite")

    with pytest.raises(Unavailable, match="the queue's database does not answer"):
        reconcile.once(catalogue, broken, later(), tmp_path)
    broken.close()


def test_a_worker_is_named_for_the_supervisor_to_kill(catalogue, queue, submit, tmp_path):
    made = submit()
    queue.submit(made.id)
    catalogue.jobs.move(made.id, "running", of=["pending"], worker="w3")
    catalogue.jobs.want(made.id, "cancel")
    queue.cancel(made.id)

    assert reconcile.once(catalogue, queue, time.time(), tmp_path) == []
    assert reconcile.once(catalogue, queue, later(), tmp_path) == ["w3"]
