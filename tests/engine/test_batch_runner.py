"""The batch runner: threads around the policy, with a device that sleeps and with a real small network."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager

import pytest

from brim.engine.batching.policy import BatcherConfig
from brim.engine.batching.runner import BatchRunner
from brim.engine.batching.servable import Answer, DecodedRequest, Payload, RequestShape, Servable
from brim.engine.batching.work import Reply
from brim.errors import BrimError, DeadlinePassed, ImageError, OutOfMemory, Overloaded, TooLarge


class Sleeper:
    """A model whose device sleeps; payloads are words like b"3 bad": parts, then what goes wrong."""

    def __init__(self, seconds: float = 0.005, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        self.seconds, self.sizes = seconds, sizes
        self.batches: list[list[str]] = []
        self.closed = False

    def inspect(self, payload: Payload) -> RequestShape:
        words = bytes(payload.data).decode().split()
        if "refused" in words:
            raise ImageError("refused at the door")
        return RequestShape(payload.options.get("key", "one"), int(words[0]))

    def decode(self, payload: Payload) -> DecodedRequest:
        words = bytes(payload.data).decode().split()
        if "undecodable" in words:
            raise ImageError("cannot be decoded")
        parts = [f"{payload.name}/{number} {' '.join(words[1:])}" for number in range(int(words[0]))]
        return DecodedRequest(payload.options.get("key", "one"), parts, payload.name)

    def forward(self, parts: list[str]) -> list[str]:
        self.batches.append(list(parts))
        if any("poison" in part for part in parts):
            raise RuntimeError("illegal instruction")
        if sum("large" in part for part in parts) > 1:
            raise OutOfMemory("two large ones do not fit")
        return parts

    def collect(self, running: list[str]) -> list[object]:
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


def send(runner: BatchRunner, name: str, what: str = "1", within_s: float = 10.0, **options: object) -> Reply:
    alone = bool(options.pop("alone", False))
    return runner.submit("model", Payload(what.encode(), name, options), time.monotonic() + within_s, alone=alone)


def test_an_answer_is_that_of_its_request_and_tells_its_times():
    with serving() as (runner, _):
        answer = send(runner, "a").result(5)

    assert answer.body == b"A/0"
    assert answer.facts["name"] == "a"
    assert set(answer.facts["seconds"]) == {"wait", "decode", "forward", "finish", "total"}


def test_requests_that_arrive_while_the_device_is_busy_share_a_batch():
    with serving(Sleeper(0.05)) as (runner, model):
        replies = [send(runner, str(number)) for number in range(9)]
        bodies = [reply.result(5).body for reply in replies]

    assert bodies == [f"{number}/0".encode() for number in range(9)]
    assert max(map(len, model.batches)) >= 4
    assert all(len(batch) in model.sizes for batch in model.batches)


def test_an_oversize_request_is_split_and_rejoined_in_order():
    with serving(Sleeper(0.002)) as (runner, model):
        body = send(runner, "big", "21").result(5).body

    assert body.split() == [f"BIG/{number}".encode() for number in range(21)]
    assert all(len(batch) in model.sizes for batch in model.batches)


def test_requests_of_other_keys_and_those_alone_share_no_batch():
    with serving(Sleeper(0.01)) as (runner, model):
        replies = [send(runner, f"{key}-{number}", key=key) for number in range(6) for key in ("x", "y")]
        replies += [send(runner, f"alone-{number}", alone=True) for number in range(3)]
        wait(replies, 60)

    for batch in model.batches:
        assert len({part.split("-")[0] for part in batch}) == 1
        assert len(batch) == 1 or not batch[0].startswith("alone")


@pytest.mark.parametrize("fault", ["poison", "late-poison", "bad", "unfinishable", "undecodable"])
def test_only_the_culprit_gets_the_error(fault):
    with serving(Sleeper(0.01)) as (runner, _):
        replies = [send(runner, str(number), f"1 {fault}" if number == 5 else "1") for number in range(16)]
        results = [reply.exception(5) or reply.result() for reply in replies]

    assert isinstance(results[5], Exception)
    assert [r.body for n, r in enumerate(results) if n != 5] == [f"{n}/0".encode() for n in range(16) if n != 5]


def test_out_of_memory_halves_the_batch_until_it_fits():
    with serving(Sleeper(0.01)) as (runner, _):
        replies = [send(runner, str(number), "1 large") for number in range(8)]

        assert [reply.result(5).body for reply in replies] == [f"{number}/0".encode() for number in range(8)]


def test_what_is_refused_at_the_door_or_by_find_is_raised_by_submit():
    def find(name: str) -> Servable:
        if name == "broken":
            raise BrimError("weights do not load")
        return Sleeper()

    with BatchRunner(find) as runner:
        with pytest.raises(ImageError, match="door"):
            send(runner, "a", "1 refused")
        with pytest.raises(BrimError, match="weights"):
            runner.submit("broken", Payload(b"1"), time.monotonic() + 1)
        assert send(runner, "b").result(5).body == b"B/0"


def test_a_cancelled_request_never_runs():
    with serving(Sleeper(0.05, (1,))) as (runner, model):
        first = send(runner, "first")
        second, third = send(runner, "second"), send(runner, "third")
        runner.cancel(second)
        assert first.result(5).body
        assert third.result(5).body

    with pytest.raises(CancelledError):
        second.result()
    assert not any("second" in part for batch in model.batches for part in batch)
    assert runner.snapshot()["cancelled"] == 1


def test_a_request_that_cannot_be_in_time_is_refused_with_a_time_to_come_again():
    with serving(Sleeper(0.8, (1,))) as (runner, _):
        for _ in range(3):
            send(runner, "learn").result(5)
        replies = [send(runner, str(number), within_s=2.0) for number in range(2)]
        with pytest.raises(Overloaded) as refused:
            send(runner, "hasty", within_s=2.0)
        time.sleep(refused.value.retry_after_s + 0.02)
        hasty = send(runner, "hasty", within_s=2.0)

        assert hasty.result(5).body == b"HASTY/0"
        assert all(reply.result(5) for reply in replies)
    assert runner.snapshot()["rejected"] == {"overloaded": 1}


def test_a_deadline_that_passes_while_the_device_hangs_is_told():
    with serving(Sleeper(0.3, (1,))) as (runner, _):
        hanging = [send(runner, "a"), send(runner, "b")]
        time.sleep(0.05)
        late = send(runner, "late", within_s=0.05)

        assert isinstance(late.exception(2), DeadlinePassed)
        assert all(reply.result(5) for reply in hanging)


def test_an_answer_that_comes_too_late_to_be_of_use_is_not_given():
    class Slow(Sleeper):
        def finish(self, item: DecodedRequest, outputs: list[str]) -> Answer:
            time.sleep(0.2)
            return super().finish(item, outputs)

    with serving(Slow()) as (runner, _):
        late, fine = send(runner, "late", within_s=0.1), send(runner, "fine")

        assert isinstance(late.exception(5), DeadlinePassed)
        assert fine.result(5).body == b"FINE/0"
        assert runner.snapshot()["rejected"] == {"deadline": 1}


def test_drain_answers_what_was_accepted_and_refuses_what_comes():
    with serving(Sleeper(0.02)) as (runner, _):
        replies = [send(runner, str(number)) for number in range(20)]
        assert runner.drain(5)

        assert all(reply.done() and reply.result() for reply in replies)
        with pytest.raises(Overloaded, match="ending"):
            send(runner, "new")


def test_close_resolves_what_is_left_and_ends_the_threads():
    before = set(threading.enumerate())
    runner = BatchRunner(lambda name: Sleeper(0.1, (1,)))
    replies = [send(runner, str(number)) for number in range(10)]
    runner.close()

    assert all(reply.done() for reply in replies)
    assert sum(isinstance(reply.exception(), Overloaded) for reply in replies) >= 7
    assert set(threading.enumerate()) <= before


def test_after_a_reload_old_and_new_share_no_batch_and_the_old_one_is_let_go():
    old, new = Sleeper(0.03), Sleeper(0.03)
    models = [old]
    with BatchRunner(lambda name: models[-1]) as runner:
        replies = [send(runner, f"old{number}") for number in range(5)]
        models[:] = [new]
        replies += [send(runner, f"new{number}") for number in range(5)]
        assert all(reply.result(5) for reply in replies)
        gone = weakref.ref(old)
        assert not any("new" in part for batch in old.batches for part in batch)
        assert sum(map(len, new.batches)) == 5
        del old, replies
        time.sleep(0.05)
        gc.collect()

        assert gone() is None


def test_on_start_names_the_requests_of_a_batch_before_it_runs():
    started: list[list[int]] = []
    with serving(Sleeper(0.01), on_start=started.append) as (runner, _):
        replies = [send(runner, str(number)) for number in range(6)]
        assert all(reply.result(5) for reply in replies)

    assert sorted(request for batch in started for request in batch) == [reply.request for reply in replies]


def test_metrics_count_what_happened():
    with serving(Sleeper(0.01)) as (runner, _):
        replies = [send(runner, str(number), "1 bad" if number == 3 else "1") for number in range(10)]
        wait(replies, 60)
        assert runner.drain(5)
        told = runner.snapshot()

    assert told["answered"] == 9
    assert told["failed"] == 1
    assert sum(int(size) * count for size, count in told["batch_sizes"].items()) == 10
    assert sum(told["seconds"]["total"]["counts"]) == 9
    assert 0 < told["busy_s"] <= told["up_s"]
    assert told["depth"] == told["running"] == told["requests"] == 0


@pytest.mark.alone
def test_how_long_a_forward_runs_can_be_watched():
    with serving(Sleeper(0.15)) as (runner, _):
        reply = send(runner, "a")
        time.sleep(0.08)
        running_s, _ = runner.running_s()
        assert reply.result(5)

        assert 0.04 < running_s < 0.15
        assert runner.running_s() == (0.0, 0.0)


def test_a_key_not_seen_before_is_guessed_from_one_that_was():
    class Scaled(Sleeper):
        def inspect(self, payload: Payload) -> RequestShape:
            return RequestShape(payload.options["key"], 1, cost=float(payload.options["key"]))

    with serving(Scaled(0.02), config=BatcherConfig(probe_s=None)) as (runner, _):
        for _ in range(5):
            send(runner, "a", key=1).result(5)
        with pytest.raises(Overloaded, match="shorter"):
            send(runner, "ten times as large", key=10, within_s=0.1)


@pytest.mark.alone
def test_a_request_that_would_block_the_device_for_a_minute_delays_nobody():
    class Scaled(Sleeper):
        def inspect(self, payload: Payload) -> RequestShape:
            cost = payload.options["key"]
            return RequestShape(cost, 1, cost=float(cost), expected_s={1: 0.005 * cost})

    with serving(Scaled(0.005)) as (runner, _):
        for number in range(20):
            with pytest.raises(Overloaded, match="shorter"):
                send(runner, "twenty seconds of work", key=4_000, within_s=1.5)
            with pytest.raises(TooLarge):
                send(runner, "a minute of work", key=12_000, within_s=100)
            began_s = time.monotonic()
            assert send(runner, str(number), key=1).result(5)
            assert time.monotonic() - began_s < 1


def test_a_failure_of_the_runner_itself_reaches_those_who_wait(monkeypatch):
    with serving(Sleeper(0.05)) as (runner, _):
        monkeypatch.setattr(runner._policy, "next", lambda now_s: 1 / 0)
        reply = send(runner, "a")

        assert "ZeroDivisionError" in str(reply.exception(5))
        assert runner.running_s()[0] == float("inf")


class Chaos(Sleeper):
    """Every callback fails now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__(0.001)
        self.chance = random.Random(seed)

    def maybe(self, where: str) -> None:
        if self.chance.random() < 0.05:
            raise self.chance.choice([RuntimeError(where), OutOfMemory(where), KeyboardInterrupt(where)])

    def decode(self, payload: Payload) -> DecodedRequest:
        self.maybe("decode")
        return super().decode(payload)

    def forward(self, parts: list[str]) -> list[str]:
        self.maybe("forward")
        return super().forward(parts)

    def collect(self, running: list[str]) -> list[object]:
        self.maybe("collect")
        outputs = super().collect(running)
        return outputs[:-1] if self.chance.random() < 0.02 else outputs

    def finish(self, item: DecodedRequest, outputs: list[str]) -> Answer:
        self.maybe("finish")
        return super().finish(item, outputs)


@pytest.mark.parametrize("seed", range(6))
def test_every_future_resolves_exactly_once_whatever_happens(seed):
    chance = random.Random(seed)
    models = [Chaos(seed)]

    def find(name: str) -> Servable:
        if chance.random() < 0.02:
            raise BrimError("not this time")
        if chance.random() < 0.01:
            models.append(Chaos(chance.randrange(1000)))
        return models[-1]

    def on_start(requests: list[int]) -> None:
        if random.random() < 0.05:
            raise RuntimeError("nobody listens")

    times: dict[int, int] = {}
    replies: list[tuple[str, int, Reply]] = []
    runner = BatchRunner(find, decoders=2, finishers=2, on_start=on_start, config=BatcherConfig(max_waiting=64))
    for number in range(400):
        parts = chance.choice([1, 1, 1, 2, 11])
        fault = chance.choice(["", "", "", "bad", "poison", "late-poison", "large"])
        try:
            reply = send(
                runner,
                str(number),
                f"{parts} {fault}",
                chance.choice([0.01, 0.05, 10.0]),
                key=chance.choice("xy"),
                alone=chance.random() < 0.05,
            )
        except BrimError:
            continue
        reply.add_done_callback(lambda done: times.update({id(done): times.get(id(done), 0) + 1}))
        replies.append((str(number), parts, reply))
        if chance.random() < 0.1:
            runner.cancel(chance.choice(replies)[2])
        if chance.random() < 0.1:
            time.sleep(0.005)
    if chance.random() < 0.5:
        assert runner.drain(20)
    runner.close()

    assert len(replies) > 20
    for name, parts, reply in replies:
        assert reply.done()
        assert times[id(reply)] == 1
        if not reply.cancelled() and reply.exception() is None:
            assert reply.result().body.split() == [f"{name}/{part}".encode() for part in range(parts)]
    assert runner.snapshot()["depth"] == runner.snapshot()["requests"] == 0


def test_a_real_network_gives_the_answers_of_one_at_a_time():
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).eval()

    class Network(Sleeper):
        def inspect(self, payload: Payload) -> RequestShape:
            return RequestShape("row")

        def decode(self, payload: Payload) -> DecodedRequest:
            return DecodedRequest("row", [torch.frombuffer(bytearray(payload.data), dtype=torch.float32)])

        def forward(self, parts):
            with torch.inference_mode():
                return net(torch.stack(parts))

        def collect(self, running):
            return list(running)

        def finish(self, item, outputs):
            return Answer(outputs[0].numpy().tobytes())

    rows = torch.randn(40, 16, generator=torch.Generator().manual_seed(3))
    with serving(Network()) as (runner, _):
        replies = [send_bytes(runner, row.numpy().tobytes()) for row in rows]
        answers = torch.stack([torch.frombuffer(bytearray(r.result(10).body), dtype=torch.float32) for r in replies])

    with torch.inference_mode():
        torch.testing.assert_close(answers, torch.cat([net(row[None]) for row in rows]))


def send_bytes(runner: BatchRunner, data: bytes) -> Reply:
    return runner.submit("model", Payload(data), time.monotonic() + 10)
