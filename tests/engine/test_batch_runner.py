"""The batch runner: threads around the policy, with a device that the test holds, and with a real small network."""

import gc
import math
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager

import pytest
from fake_time import FakeTime

from brim.engine.batching.policy import BatcherConfig
from brim.engine.batching.runner import BatchRunner
from brim.engine.batching.servable import Answer, DecodedRequest, Payload, RequestShape, Servable
from brim.engine.batching.work import BatchStats, Reply
from brim.errors import BrimError, DeadlinePassed, ImageError, OutOfMemory, Overloaded
from waiting import PATIENCE_S, until


class Sleeper:
    """A model whose device sleeps; payloads are words like b"3 bad": parts, then what goes wrong."""

    def __init__(self, seconds: float = 0.005, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        self.seconds, self.sizes = seconds, sizes
        self.expected_s: dict[int, float] = {}
        self.batches: list[list[str]] = []
        self.decoded: list[str] = []
        self.gates = {"forward": threading.Event(), "collect": threading.Event()}
        for gate in self.gates.values():
            gate.set()
        self.closed = False

    @contextmanager
    def held(self, where: str = "forward") -> Iterator[None]:
        """The device hangs in the batch that runs."""
        self.gates[where].clear()
        try:
            yield
        finally:
            self.gates[where].set()

    def inspect(self, payload: Payload) -> RequestShape:
        words = bytes(payload.data).decode().split()
        if "refused" in words:
            raise ImageError("refused at the door")
        return RequestShape(payload.options.get("key", "one"), int(words[0]), expected_s=self.expected_s)

    def decode(self, payload: Payload) -> DecodedRequest:
        words = bytes(payload.data).decode().split()
        self.decoded.append(payload.name)
        if "undecodable" in words:
            raise ImageError("cannot be decoded")
        parts = [f"{payload.name}/{number} {' '.join(words[1:])}" for number in range(int(words[0]))]
        return DecodedRequest(payload.options.get("key", "one"), parts, payload.name)

    def forward(self, parts: list[str]) -> list[str]:
        self.batches.append(list(parts))
        assert self.gates["forward"].wait(PATIENCE_S)
        if any("poison" in part for part in parts):
            raise RuntimeError("illegal instruction")
        if sum("large" in part for part in parts) > 1:
            raise OutOfMemory("two large ones do not fit")
        return parts

    def collect(self, running: list[str]) -> list[object]:
        assert self.gates["collect"].wait(PATIENCE_S)
        time.sleep(self.seconds)
        if any("late-poison" in part for part in running):
            raise RuntimeError("found when the device was waited for")
        return [ValueError("bad place") if "bad" in part else part.upper() for part in running]

    def finish(self, item: DecodedRequest, outputs: list[str]) -> Answer:
        if any("UNFINISHABLE" in output for output in outputs):
            raise RuntimeError("cannot be finished")
        return Answer(" ".join(output.split()[0] for output in outputs).encode(), facts={"name": item.context})

    def close(self) -> None:
        self.closed = True


@contextmanager
def serving(model: Servable | None = None, **options: object) -> Iterator[tuple[BatchRunner, Sleeper]]:
    served = model or Sleeper()
    with BatchRunner(lambda name: served, **options) as runner:  # type: ignore[arg-type]
        yield runner, served  # type: ignore[misc]


def send(runner: BatchRunner, name: str, what: str = "1", within_s: float = PATIENCE_S, **options: object) -> Reply:
    alone = bool(options.pop("alone", False))
    return runner.submit("model", Payload(what.encode(), name, options), runner._clock() + within_s, alone=alone)


def test_an_oversize_request_is_split_and_rejoined_in_order():
    with serving(Sleeper(0.002)) as (runner, model):
        answer = send(runner, "big", "21").result(PATIENCE_S)

    assert set(answer.facts["seconds"]) == {"wait", "decode", "forward", "finish", "total"}
    assert answer.body.split() == [f"BIG/{number}".encode() for number in range(21)]
    assert all(len(batch) in model.sizes for batch in model.batches)


@pytest.mark.parametrize("fault", ["poison", "late-poison", "bad", "unfinishable", "undecodable"])
def test_only_the_culprit_gets_the_error(fault):
    with serving(Sleeper(0.01)) as (runner, _):
        replies = [send(runner, str(number), f"1 {fault}" if number == 5 else "1") for number in range(16)]
        results = [reply.exception(PATIENCE_S) or reply.result() for reply in replies]

    assert isinstance(results[5], Exception)
    assert [r.body for n, r in enumerate(results) if n != 5] == [f"{n}/0".encode() for n in range(16) if n != 5]


def test_out_of_memory_halves_the_batch_until_it_fits():
    with serving(Sleeper(0.01)) as (runner, _):
        replies = [send(runner, str(number), "1 large") for number in range(8)]

        assert [reply.result(PATIENCE_S).body for reply in replies] == [f"{number}/0".encode() for number in range(8)]


def test_what_is_refused_at_the_door_or_by_find_is_raised_by_submit():
    def find(name: str) -> Servable:
        if name == "broken":
            raise BrimError("weights do not load")
        return Sleeper()

    with BatchRunner(find) as runner:
        with pytest.raises(ImageError, match="door"):
            send(runner, "a", "1 refused")
        with pytest.raises(BrimError, match="weights"):
            runner.submit("broken", Payload(b"1"), time.monotonic() + PATIENCE_S)
        assert send(runner, "b").result(PATIENCE_S).body == b"B/0"


def test_a_cancelled_request_never_runs():
    with serving(Sleeper(sizes=(1,))) as (runner, model):
        with model.held():
            first = send(runner, "first")
            until(lambda: model.batches)
            second, third = send(runner, "second"), send(runner, "third")
            runner.cancel(second)
        assert first.result(PATIENCE_S).body
        assert third.result(PATIENCE_S).body

    with pytest.raises(CancelledError):
        second.result()
    assert not any("second" in part for batch in model.batches for part in batch)
    assert runner.snapshot()["cancelled"] == 1


def test_a_deadline_that_passes_while_the_device_hangs_is_told():
    clock = FakeTime()
    with serving(Sleeper(sizes=(1,)), clock=clock) as (runner, model):
        with model.held("collect"):
            hanging = [send(runner, "a"), send(runner, "b")]
            until(lambda: len(model.batches) == 2)
            late = send(runner, "late", within_s=0.05)
            clock.sleep(1)

            assert isinstance(late.exception(PATIENCE_S), DeadlinePassed)
        assert all(reply.result(PATIENCE_S) for reply in hanging)


def test_an_answer_that_comes_too_late_to_be_of_use_is_not_given():
    clock = FakeTime()

    class Slow(Sleeper):
        def finish(self, item: DecodedRequest, outputs: list[str]) -> Answer:
            clock.sleep(0.2)
            return super().finish(item, outputs)

    with serving(Slow(), clock=clock) as (runner, _):
        late = send(runner, "late", within_s=0.1)
        assert isinstance(late.exception(PATIENCE_S), DeadlinePassed)
        assert send(runner, "fine").result(PATIENCE_S).body == b"FINE/0"
        until(lambda: runner.snapshot()["rejected"] == {"deadline": 1})


def test_drain_answers_what_was_accepted_and_refuses_what_comes():
    with serving(Sleeper(0.02)) as (runner, _):
        replies = [send(runner, str(number)) for number in range(20)]
        assert runner.drain(PATIENCE_S)

        assert all(reply.result(PATIENCE_S) for reply in replies)
        with pytest.raises(Overloaded, match="ending"):
            send(runner, "new")


def test_close_resolves_what_is_left_and_ends_the_threads():
    before = set(threading.enumerate())
    with serving(Sleeper(sizes=(1,))) as (runner, model), model.held():
        replies = [send(runner, str(number)) for number in range(10)]
        until(lambda: model.batches)
        closing = threading.Thread(target=runner.close)
        closing.start()

        assert all(isinstance(reply.exception(PATIENCE_S), Overloaded) for reply in replies)
    until(lambda: set(threading.enumerate()) <= before)


def test_after_a_reload_old_and_new_share_no_batch_and_the_old_one_is_let_go():
    old, new = Sleeper(0.03), Sleeper(0.03)
    models = [old]
    with BatchRunner(lambda name: models[-1]) as runner:
        replies = [send(runner, f"old{number}") for number in range(5)]
        models[:] = [new]
        replies += [send(runner, f"new{number}") for number in range(5)]
        assert all(reply.result(PATIENCE_S) for reply in replies)
        gone = weakref.ref(old)
        assert not any("new" in part for batch in old.batches for part in batch)
        assert sum(map(len, new.batches)) == 5
        del old, replies
        until(lambda: gc.collect() >= 0 and gone() is None)


def test_metrics_count_what_happened():
    with serving(Sleeper(0.01)) as (runner, _):
        replies = [send(runner, str(number), "1 bad" if number == 3 else "1") for number in range(10)]
        wait(replies, PATIENCE_S)
        assert runner.drain(PATIENCE_S)
        until(lambda: (told := runner.snapshot())["answered"] + told["failed"] == 10)
        told = runner.snapshot()

    assert told["answered"] == 9
    assert told["failed"] == 1
    assert sum(int(size) * count for size, count in told["batch_sizes"].items()) == 10
    assert sum(told["seconds"]["total"]["counts"]) == 9
    assert 0 < told["busy_s"] <= told["up_s"]
    assert told["depth"] == told["running"] == told["requests"] == 0


def test_counters_have_the_bounds_of_their_seconds_and_count_busy_time_once():
    stats = BatchStats(100.0)
    for now_s, change in ((101.0, 1), (102.0, 1), (104.0, -1), (105.0, -1), (110.0, 1)):
        stats.start(4, now_s) if change > 0 else stats.end(now_s)
    for took_s in (0.001, 0.0011, 0.02, 31.0):
        stats.resolve("answered", {"total": took_s})
    told = stats.snapshot(112.0)

    assert (told["busy_s"], told["up_s"], told["batch_sizes"]) == (4.0 + 2.0, 12.0, {"4": 3})
    counts = dict(zip([*told["bounds_s"], math.inf], told["seconds"]["total"]["counts"], strict=True))
    assert {bound: num for bound, num in counts.items() if num} == {0.001: 1, 0.002: 1, 0.02: 1, math.inf: 1}
    assert told["seconds"]["total"]["sum_s"] == pytest.approx(31.0221)


def test_a_request_that_left_a_failed_batch_does_not_run_again():
    with serving(Sleeper(sizes=(1, 2))) as (runner, model):
        with model.held("collect"):
            with model.held():
                first = send(runner, "first")
                until(lambda: model.batches)
                gone, stays = send(runner, "gone", "1 poison"), send(runner, "stays", "1 poison")
                until(lambda: len(model.decoded) == 3)
            until(lambda: len(model.batches) == 2)
            runner.cancel(gone)
        assert first.result(PATIENCE_S)
        assert isinstance(stays.exception(PATIENCE_S), RuntimeError)
    names = [[part.split("/")[0] for part in batch] for batch in model.batches]
    assert names == [["first"], ["gone", "stays"], ["stays"]]


def test_the_wait_for_a_model_is_that_of_its_queue_and_of_one_more():
    clock, model = FakeTime(), Sleeper(sizes=(1,))
    model.expected_s = {1: 0.8}
    with serving(model, clock=clock) as (runner, _):
        assert runner.wait_s("model") == 0.0
        with model.held():
            replies = [send(runner, str(number)) for number in range(2)]
            until(lambda: model.batches and len(model.decoded) == 2)
            assert runner.wait_s("model") == pytest.approx(3 * 0.8)
            assert runner.wait_s("model", within_s=0.1) == pytest.approx(2 * 0.8)
            assert runner.wait_s("another") == 0.0
        assert all(reply.result(PATIENCE_S) for reply in replies)


def test_how_long_a_forward_runs_can_be_watched():
    clock = FakeTime()
    with serving(clock=clock) as (runner, model):
        model.expected_s = {1: 3.0}
        with model.held():
            reply = send(runner, "a")
            until(lambda: model.batches)
            clock.sleep(7)
            assert runner.running_s() == (7.0, 3.0)
        assert reply.result(PATIENCE_S)
        assert runner.running_s() == (0.0, 0.0)


def test_a_key_not_seen_before_is_guessed_from_one_that_was():
    class Scaled(Sleeper):
        def inspect(self, payload: Payload) -> RequestShape:
            return RequestShape(payload.options["key"], 1, cost=float(payload.options["key"]))

    with serving(Scaled(0.02), config=BatcherConfig(probe_s=None)) as (runner, _):
        for _ in range(5):
            send(runner, "a", key=1).result(PATIENCE_S)
        with pytest.raises(Overloaded, match="shorter"):
            send(runner, "ten times as large", key=10, within_s=0.1)


def test_a_failure_of_the_runner_itself_reaches_those_who_wait(monkeypatch):
    with serving(Sleeper(0.05)) as (runner, _):
        monkeypatch.setattr(runner._policy, "next", lambda now_s: 1 / 0)
        reply = send(runner, "a")

        assert "ZeroDivisionError" in str(reply.exception(PATIENCE_S))
        assert runner.running_s()[0] == float("inf")
