"""The contract of a pool, the same for processes of this machine and for Ray."""

import os

import pytest
import toy_work
from toy_work import ToyWork

import waiting
from brim.cluster.processes import ProcessPool
from brim.errors import ClusterError, ConfigError
from brim.rf.generation.pool import TaskDone, TaskFailed, WorkerLost, WorkerReady


@pytest.fixture(scope="module", params=["processes", pytest.param("ray", marks=pytest.mark.long)])
def make_pool(request):
    """Makes pools of two workers, not started."""
    if request.param == "processes":
        yield lambda: ProcessPool(["cpu", "cpu"])
        return
    pytest.importorskip("ray")
    request.getfixturevalue("ray_cluster").add()
    from ray import cloudpickle

    from brim.cluster.ray_connect import connect
    from brim.cluster.ray_pool import RayPool

    cloudpickle.register_pickle_by_value(toy_work)  # nodes have brim, not its tests
    with connect("auto") as cluster:
        yield lambda: RayPool(cluster)


def until(pool, kind, num=1):
    """What happens until there are so many events of a kind; all of it."""
    seen = []

    def are_there():
        seen.extend(pool.wait(0.2))
        return sum(isinstance(event, kind) for event in seen) >= num

    waiting.until(are_there, say=lambda: f"no {kind.__name__} among {seen}")
    return seen


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.smoke
def test_workers_say_what_they_are_and_end_what_they_are_given_side_by_side(make_pool, tmp_path):
    pool = make_pool()
    assert pool.start(ToyWork()) == 2
    assert pool.expects() == 2
    ready = until(pool, WorkerReady, 2)
    assert {event.worker for event in ready} == {0, 1}
    assert len({event.name for event in ready}) == 2
    assert {event.facts.kind for event in ready} == {"cpu 1"}
    assert pool.expects() == 0

    os.mkfifo(fifo := tmp_path / "fifo")
    ends = {0: os.O_RDONLY, 1: os.O_WRONLY}
    tickets = {pool.submit(worker, ("meet", (str(fifo), end))): worker for worker, end in ends.items()}
    done = until(pool, TaskDone, 2)  # neither ends before the other has begun
    assert {event.ticket: event.worker for event in done} == tickets
    assert len({event.value for event in done}) == 2  # processes

    wrong, bug = pool.submit(0, ("wrong", "x=3")), pool.submit(1, ("bug", "y"))
    failed = {event.ticket: event.error for event in until(pool, TaskFailed, 2)}
    assert type(failed[wrong]) is ConfigError
    assert "x=3 is wrong" in str(failed[wrong])
    assert type(failed[bug]) is ClusterError
    assert "KeyError" in str(failed[bug])
    pool.submit(0, ("pid",))
    assert until(pool, TaskDone)[0].worker == 0  # it goes on
    pool.close()


def test_a_worker_that_dies_is_told_once_and_replaced_and_closing_ends_all(make_pool):
    pool = make_pool()
    pool.start(ToyWork())
    until(pool, WorkerReady, 2)
    pool.submit(0, ("sleep", 600))
    pool.submit(0, ("die",))

    events = until(pool, WorkerLost)
    events += until(pool, WorkerReady)

    assert [(event.worker, event.was_ready) for event in events if isinstance(event, WorkerLost)] == [(0, True)]
    assert "died" in str(events[0].error)
    assert [event.worker for event in events if isinstance(event, WorkerReady)] == [2]
    pool.submit(0, ("pid",))  # nobody is there any more
    tickets = {pool.submit(1, ("pid",)), pool.submit(2, ("pid",))}
    done = until(pool, TaskDone, 2)
    assert {event.ticket for event in done} == tickets
    assert pool.wait(0.3) == []

    pool.submit(1, ("sleep", 600))
    pool.close()

    waiting.until(lambda: not any(is_there(event.value) for event in done))
    pool.close()  # twice is once


def test_work_that_cannot_be_opened_is_told_with_its_reason(make_pool):
    pool = make_pool()
    pool.start(ToyWork(refuse="no such thing"))

    lost = until(pool, WorkerLost, 2)

    assert all(type(event.error) is ConfigError and not event.was_ready for event in lost)
    assert "no such thing" in str(lost[0].error)
    assert pool.expects() == 0
    pool.close()
