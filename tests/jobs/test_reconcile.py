"""What is wanted against what runs: the table of states, and the mending itself on real databases."""

import time

import pytest
from desk import Asked

from brim.errors import Unavailable
from brim.jobs.durable import DbosState, Queue
from brim.jobs.status import JobProgress
from brim.jobs.store import JobRow
from brim.jobs.worker import reconcile
from brim.jobs.worker.reconcile import decide, is_leftover


def job(status, wanted) -> JobRow:
    return JobRow(
        id="a" * 32, kind="toy.count", name="n", status=status, wanted=wanted, config={}, inputs={}, makes="dataset",
        output_id="b" * 32, worker="w0", attempts=1, created_at=0.0, updated_at=0.0,
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
    assert decide(job(status, wanted), state(known), quiet_s, 0.0) == action


@pytest.mark.parametrize(("stopping_s", "action"), [(1, None), (4.9, None), (5.1, "kill"), (1e6, "kill")])
def test_a_job_that_does_not_stop_has_its_worker_killed(stopping_s, action):
    assert decide(job("running", "cancel"), state("CANCELLED"), 0.0, stopping_s) == action


@pytest.mark.parametrize(
    ("row", "quiet_s", "expected"),
    [
        (None, 0, True),  # deleted
        (job("cancelled", "cancel"), 0, True),
        (job("paused", "pause"), 0, True),
        (job("cancelled", "run"), 0, False),  # about to be resumed
        (job("failed", "run"), 1, False),  # its worker is about to say so
        (job("failed", "run"), 11, True),
        (job("completed", "run"), 1e6, False),
        (job("completed", "cancel"), 1e6, False),
        (job("queued", "run"), 0, False),
    ],
)
def test_what_the_queue_should_no_longer_hold(row, quiet_s, expected):
    assert is_leftover(row, quiet_s) == expected


# On real databases


@pytest.fixture
def submit(catalogue):
    def make() -> JobRow:
        made, _ = catalogue.jobs.submit(Asked("toy.count", "n", {}), makes="dataset")
        return made

    return make


@pytest.fixture
def look(catalogue, queue, tmp_path):
    """Look after the jobs, and again a minute later: names of workers to kill, each time."""
    times: list[float] = []
    reconciler = reconcile.Reconciler(catalogue, queue, tmp_path, clock=lambda: times[-1])

    def at(*seconds):
        names = []
        for now_s in seconds or (0.0, 60.0):
            times.append(now_s)
            names.append(reconciler.once())
        return names

    return at


def test_a_job_whose_api_was_killed_before_queueing_is_queued_once(catalogue, queue, submit, look):
    made = submit()

    look()
    look()

    assert queue.active() == {made.id: DbosState("ENQUEUED", None)}
    assert catalogue.jobs.get(made.id).status == "queued"


def test_a_cancel_that_never_reached_the_queue_does(catalogue, queue, submit, look):
    made = submit()
    queue.submit(made.id)
    catalogue.jobs.want(made.id, "cancel")

    look()
    look()

    assert queue.states([made.id])[made.id].status == "CANCELLED"
    assert catalogue.jobs.get(made.id).status == "cancelled"
    assert catalogue.datasets.page().total == 0  # nothing was made


def test_a_resume_that_never_reached_the_queue_does(catalogue, queue, submit, look):
    made = submit()
    queue.submit(made.id)
    queue.cancel(made.id)
    catalogue.jobs.move(made.id, "queued", of=["pending"])

    look()

    assert queue.states([made.id])[made.id].status == "ENQUEUED"


def test_a_deleted_job_leaves_the_queue_and_a_completed_one_is_forgotten_after_an_hour(queue, look, monkeypatch):
    queue.submit("c" * 32)
    asked, forgotten = [], []
    monkeypatch.setattr(queue, "succeeded_before", lambda at: asked.append(at) or ["d" * 32])
    monkeypatch.setattr(queue, "forget", forgotten.append)
    monkeypatch.setattr(time, "time", lambda: 10_000.0)

    look(0.0)

    assert queue.active() == {}
    assert forgotten == ["d" * 32]
    assert asked == [6400.0]


@pytest.mark.parametrize(
    ("manifest", "listed"),
    [
        ('{"items": 12, "complete": false}', ("partial", 12)),
        ('{"items": 12, "shards": [{"bxtes": 3}]}', ("partial", 0)),
    ],
    ids=["whole", "damaged"],
)
def test_at_a_start_what_was_to_stop_has_stopped(catalogue, queue, submit, tmp_path, manifest, listed):
    made = submit()
    queue.submit(made.id)
    catalogue.jobs.move(made.id, "running", of=["pending"], worker="w7")
    catalogue.jobs.want(made.id, "pause")
    (tmp_path / made.out).mkdir(parents=True)
    (tmp_path / made.out / "manifest.json").write_text(manifest)

    assert reconcile.adopt_orphans(catalogue, queue, {"w0"}, tmp_path) == 1

    assert catalogue.jobs.get(made.id).status == "paused"
    kept = catalogue.datasets.get(made.output_id)
    assert (kept.state, kept.items) == listed


@pytest.fixture
def die(catalogue, queue, submit, tmp_path):
    """Begins an attempt at a job and ends its worker, again and again."""
    made, deaths = submit(), reconcile.Reconciler(catalogue, queue, tmp_path)
    queue.submit(made.id)

    def run(times, reason, *, starts=True) -> JobRow:
        for _ in range(times):
            if starts:
                catalogue.jobs.move(made.id, "running", of=["pending", "running"], worker="w0")
            deaths.died("w0", reason)
        return catalogue.jobs.get(made.id)

    return run


def test_a_job_that_ends_ten_workers_in_a_row_fails(die, queue):
    assert die(9, "signal 11").status == "running"

    ended = die(1, "signal 9, out of memory")

    assert ended.status == "failed"
    assert ended.error == "its worker died 10 times in a row without getting further; last: signal 9, out of memory"
    assert queue.states([ended.id])[ended.id].status == "CANCELLED"


def test_a_job_that_gets_on_between_deaths_may_go_on(die, catalogue):
    for current in range(12):
        going = die(1, "signal 11")
        catalogue.jobs.tell(going.id, JobProgress(current=current + 1, total=12))

    assert going.status == "running"


def test_somebody_who_kills_workers_does_not_end_their_job_soon(die, catalogue):
    id = die(1, "signal 9").id
    for _ in range(97):
        catalogue.jobs.died(id)

    assert die(1, "signal 9").status == "running"
    assert die(1, "signal 9").status == "failed"


def test_workers_that_cannot_start_are_no_fault_of_the_job(die):
    die(1, "exit code 1")

    assert die(20, "exit code 1", starts=False).deaths == 1


def test_a_database_that_is_away_is_said_so(catalogue, tmp_path):
    broken = Queue(f"sqlite:///{tmp_path}/never_migrated.sqlite")

    with pytest.raises(Unavailable, match="the queue's database does not answer"):
        reconcile.Reconciler(catalogue, broken, tmp_path).once()
    broken.close()


def test_a_worker_is_named_for_the_supervisor_to_kill(catalogue, queue, submit, look):
    made = submit()
    queue.submit(made.id)
    catalogue.jobs.move(made.id, "running", of=["pending"], worker="w3")
    catalogue.jobs.want(made.id, "cancel")
    queue.cancel(made.id)

    assert look() == [[], ["w3"]]


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_holds_up_no_job(queue, submit, look, monkeypatch, off_s):
    made = submit()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + off_s)

    look(0.0, 1.0)
    assert queue.states([made.id]) == {}, "the API may still be about to queue it"
    look(4.0)

    assert queue.states([made.id])[made.id].status == "ENQUEUED"


def test_a_job_that_cannot_be_looked_after_keeps_nobody_from_the_others(catalogue, queue, submit, look, monkeypatch):
    bad, good = submit(), submit()
    put = queue.submit

    def refuse(job_id):
        if job_id == bad.id:
            raise KeyError("bytes")
        put(job_id)

    monkeypatch.setattr(queue, "submit", refuse)
    look()

    assert [catalogue.jobs.get(each.id).status for each in (bad, good)] == ["pending", "queued"]
