"""The batch policy on a virtual clock: what it promises it keeps, nobody starves, batches are what they may be."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.engine.batching.policy import BatcherConfig, BatchPolicy, RequestPart, StartBatch, Wait
from brim.engine.batching.service_times import PoolTimes, ServiceTimes
from brim.errors import ConfigError, Overloaded, TooLarge

SECONDS = {1: 0.005, 2: 0.008, 4: 0.012, 8: 0.020}  # a device on which batching pays


@dataclass(slots=True)
class Ask:
    """A request of a test."""

    at_s: float
    limit_s: float
    key: str = "a"
    parts: int = 1
    alone: bool = False
    before_s: float = 0.0
    after_s: float = 0.0
    leaves_s: float | None = None  # cancelled so long after it came


@dataclass(slots=True)
class Told:
    """What came of it."""

    ask: Ask
    request: int | None = None  # None: refused
    retry_after_s: float = 0.0
    ended_s: float | None = None  # its last part left the device, and what comes after is done
    expired: bool = False
    left: bool = False
    ran: list[int] = field(default_factory=list)

    @property
    def late_s(self) -> float:
        assert self.ended_s is not None
        return self.ended_s - self.ask.at_s - self.ask.limit_s


NO_TRIES = BatcherConfig(probe_s=None)  # a try is a promise that may be broken


class Paper:
    """Runs requests through a policy: decoding takes what was said, the device what its table says (× noise)."""

    def __init__(
        self,
        asks: list[Ask],
        *,
        seconds: dict[int, float] | None = None,
        noise: Callable[[], float] = lambda: 1.0,
        config: BatcherConfig | None = None,
    ) -> None:
        self.seconds, self.noise = seconds or SECONDS, noise
        self.policy = BatchPolicy(lambda key: sorted(self.seconds), config or NO_TRIES)
        for key, (size, took_s) in itertools.product({ask.key for ask in asks}, self.seconds.items()):
            self.policy.expect(key, size, took_s)
        self.told: list[Told] = [Told(ask) for ask in asks]
        self.by_request: dict[int, Told] = {}
        self.batches: list[tuple[float, float, list[RequestPart]]] = []  # start, end on the device
        self.idle_waits: list[tuple[float, float]] = []
        self.free_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.now_s = 0.0
        for told in self.told:
            self.at(told.ask.at_s, lambda told=told: self.arrive(told))
        while self.events:
            self.now_s, _, action = heapq.heappop(self.events)
            action()
            self.pump()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.count), action))

    def arrive(self, told: Told) -> None:
        ask = told.ask
        try:
            told.request = self.policy.admit(
                ask.key,
                ask.parts,
                self.now_s + ask.limit_s,
                self.now_s,
                before_s=ask.before_s,
                after_s=ask.after_s,
                alone=ask.alone,
            )
        except Overloaded as refused:
            told.retry_after_s = refused.retry_after_s
            return
        self.by_request[told.request] = told
        self.at(self.now_s + ask.before_s, lambda: self.policy.ready(told.request, self.now_s))
        if ask.leaves_s is not None:
            self.at(self.now_s + ask.leaves_s, lambda: self.leave(told))

    def leave(self, told: Told) -> None:
        if told.ended_s is None and not told.expired:
            told.left = True
            self.policy.leave(told.request)

    def pump(self) -> None:
        for request in self.policy.expire(self.now_s):
            assert not self.by_request[request].expired
            self.by_request[request].expired = True
        while isinstance(said := self.policy.next(self.now_s), StartBatch):
            self.start(said.batch)
        if said.until_s is not None:
            assert said.until_s > self.now_s
            self.at(said.until_s, lambda: None)

    def start(self, batch: list[RequestPart]) -> None:
        self.policy.started(batch, self.now_s)
        begin_s = max(self.now_s, self.free_s)
        self.free_s = begin_s + self.seconds[len(batch)] * self.noise()
        self.batches.append((begin_s, self.free_s, batch))
        for part in batch:
            told = self.by_request[part.request]
            assert not told.left, "a part of a cancelled request ran"
            assert not told.expired, "a part of an expired request ran"
            told.ran.append(part.number)
        self.at(self.free_s, lambda: self.finish(batch))

    def finish(self, batch: list[RequestPart]) -> None:
        self.policy.finished(batch, self.now_s)
        for part in batch:
            told = self.by_request[part.request]
            if len(told.ran) == told.ask.parts:
                told.ended_s = self.now_s + told.ask.after_s


def asks(most: int = 60, *, leaving: bool = False, alone: bool = True) -> st.SearchStrategy[list[Ask]]:
    one = st.builds(
        Ask,
        at_s=st.floats(0, 0.3),
        limit_s=st.sampled_from([0.01, 0.03, 0.06, 0.2, 2.0]),
        key=st.sampled_from("aab"),
        parts=st.sampled_from([1, 1, 1, 1, 3, 20]),
        alone=st.booleans() if alone else st.just(False),
        before_s=st.sampled_from([0.0, 0.0, 0.004, 0.01]),
        after_s=st.sampled_from([0.0, 0.003]),
        leaves_s=st.one_of(st.none(), st.floats(0, 0.1)) if leaving else st.none(),
    )
    return st.lists(one, min_size=1, max_size=most)


# Properties


@settings(max_examples=150, deadline=None)
@given(asks())
def test_with_exact_times_nothing_admitted_is_late(asked):
    ran = Paper(asked)

    for told in ran.told:
        if told.request is not None:
            assert not told.expired
            assert told.late_s <= 1e-9


@settings(max_examples=100, deadline=None)
@given(asks(), st.randoms(use_true_random=False))
def test_with_noisy_times_nothing_admitted_is_later_than_a_tenth_of_its_limit(asked, chance):
    ran = Paper(asked, noise=lambda: chance.uniform(0.9, 1.1))

    for told in ran.told:
        if told.request is not None and not told.expired:
            assert told.late_s <= 0.1 * told.ask.limit_s


@settings(max_examples=100, deadline=None)
@given(asks(leaving=True), st.randoms(use_true_random=False))
def test_nobody_starves_and_every_part_runs_once_in_a_batch_of_its_key(asked, chance):
    ran = Paper(asked, noise=lambda: chance.uniform(0.5, 2.0))

    for told in ran.told:
        if told.request is not None:
            assert told.left or told.expired or sorted(told.ran) == list(range(told.ask.parts))
            assert len(set(told.ran)) == len(told.ran)
    assert ran.policy.depth == 0
    assert ran.policy.running == 0
    assert not ran.policy._requests
    assert not ran.policy._queue.lanes
    for _, _, batch in ran.batches:
        assert len({part.key for part in batch}) == 1
        assert len(batch) in SECONDS
        assert len(batch) == 1 or not any(part.alone for part in batch)


@settings(max_examples=100, deadline=None)
@given(asks(alone=False))
def test_the_device_never_idles_while_something_is_decoded_but_for_the_queue_delay(asked):
    delay_s = 0.005
    for ask in asked:
        ask.limit_s = 2.0  # no deadline presses: nothing is held back for one that is due earlier
    ran = Paper(asked, config=replace(NO_TRIES, max_queue_delay_ms=delay_s * 1e3))
    decoded = sorted(
        (told.ask.at_s + told.ask.before_s, min(start for start, _, batch in ran.batches if _holds(batch, told)))
        for told in ran.told
        if told.request is not None
    )
    gaps = [(end, start) for (_, end, _), (start, _, _) in itertools.pairwise(ran.batches) if start > end + 1e-9]
    for gap_start, gap_end in gaps:
        waited = [max(ready_s, gap_start) for ready_s, start_s in decoded if start_s >= gap_end - 1e-9]
        assert gap_end - min(waited) <= delay_s + 1e-6


def _holds(batch: list[RequestPart], told: Told) -> bool:
    return any(part.request == told.request for part in batch)


@settings(max_examples=100, deadline=None)
@given(asks(alone=False), st.sampled_from([0.03, 0.06, 0.2]))
def test_retry_after_leads_an_identical_request_in_if_nothing_else_came(asked, limit_s):
    at_s = max(ask.at_s for ask in asked)
    for _ in range(3):  # a batch that starts meanwhile may ask for another round
        told = Paper([*asked, Ask(at_s, limit_s)]).told[-1]
        if told.request is not None:
            return
        assert 0 < told.retry_after_s < 5
        at_s += told.retry_after_s + 1e-6
    raise AssertionError(f"still refused {at_s} s later")


# Cases


def test_what_arrives_while_the_device_is_busy_forms_the_next_batch():
    ran = Paper([Ask(0.0, 1.0, parts=8), *(Ask(0.001 * n, 1.0) for n in range(1, 9))])

    assert [len(batch) for _, _, batch in ran.batches] == [8, 8]


def test_the_earliest_deadline_goes_first():
    ran = Paper([Ask(0.0, 1.0), Ask(0.001, 0.9, key="b"), Ask(0.002, 0.1, key="c"), Ask(0.003, 0.5, key="d")])

    assert [batch[0].key for _, _, batch in ran.batches] == ["a", "c", "d", "b"]


def test_a_small_batch_runs_where_a_larger_one_would_be_late():
    ran = Paper([Ask(0.0, 0.011), *(Ask(0.0, 0.1) for _ in range(7))], config=replace(NO_TRIES, margin=0.0))

    assert len(ran.batches[0][2]) <= 2
    assert all(told.late_s <= 0 for told in ran.told)


def test_a_request_that_would_make_another_late_is_refused():
    """An answer takes 50 ms: with one due at 60 ms before it, the one due at 90 ms would end at 100."""
    policy = BatchPolicy(lambda key: (1,), NO_TRIES)
    policy.expect("a", 1, 0.05)
    policy.admit("a", 1, 0.09, 0.0)

    with pytest.raises(Overloaded):
        policy.admit("a", 1, 0.06, 0.0)
    policy.admit("a", 1, 0.11, 0.0)


def test_a_deadline_shorter_than_an_answer_takes_is_refused_and_says_so():
    policy = BatchPolicy(lambda key: (1, 2), NO_TRIES)
    policy.expect("a", 1, 0.05)

    with pytest.raises(Overloaded, match="shorter than the"):
        policy.admit("a", 1, 0.04, 0.0)


def test_a_promise_leaves_a_margin():
    policy = BatchPolicy(lambda key: (1,), replace(NO_TRIES, margin=0.05))
    policy.expect("a", 1, 0.1)

    with pytest.raises(Overloaded):
        policy.admit("a", 1, 0.104, 0.0)
    policy.admit("a", 1, 0.106, 0.0)


def test_no_more_wait_than_may():
    policy = BatchPolicy(lambda key: (1, 2), BatcherConfig(max_waiting=10))
    policy.admit("a", 8, 1e9, 0.0)

    with pytest.raises(Overloaded, match="at most 10"):
        policy.admit("a", 3, 1e9, 0.0)
    assert policy.depth == 8


def test_what_can_no_longer_be_answered_is_given_up():
    policy = BatchPolicy(lambda key: (1,), NO_TRIES)
    policy.expect("a", 1, 0.05)
    late, fine = policy.admit("a", 1, 0.2, 0.0), policy.admit("a", 1, 9.0, 0.0)
    policy.ready(late, 0.0)

    assert policy.expire(0.1) == []
    assert policy.expire(0.19) == [late]
    policy.leave(fine)
    assert policy.next(0.2) == Wait(None)


def test_times_are_learned_and_slower_ones_shut_the_door():
    policy = BatchPolicy(lambda key: (1,), NO_TRIES)
    policy.expect("a", 1, 0.01)
    for n in range(40):
        policy.ready(policy.admit("a", 1, n + 0.9, float(n)), float(n))
        told = policy.next(float(n))
        assert isinstance(told, StartBatch)
        policy.started(told.batch, float(n))
        policy.finished(told.batch, n + 0.5)

    with pytest.raises(Overloaded):
        policy.admit("a", 1, 100.4, 100.0)


def test_the_header_may_be_wrong_of_key_and_parts():
    policy = BatchPolicy(lambda key: (1, 2, 4))
    request = policy.admit("a", 1, 10.0, 0.0)
    policy.ready(request, 0.0, key="b", parts=3)
    told = policy.next(0.0)

    assert isinstance(told, StartBatch)
    assert {part.key for part in told.batch} == {"b"}
    assert policy.depth == 3


def test_the_next_batch_is_queued_shortly_before_the_running_one_should_end():
    policy = BatchPolicy(lambda key: (1,), BatcherConfig(lead_ms=2.0))
    policy.expect("a", 1, 0.010)
    for _ in range(3):
        policy.ready(policy.admit("a", 1, 10.0, 0.0), 0.0)
    first = policy.next(0.0)
    assert isinstance(first, StartBatch)
    policy.started(first.batch, 0.0)

    assert policy.next(0.001) == Wait(pytest.approx(0.008))
    second = policy.next(0.008)
    assert isinstance(second, StartBatch)
    policy.started(second.batch, 0.008)
    assert policy.next(0.0085) == Wait(None)


@pytest.mark.parametrize("sizes", [(), (2, 4), (1, 4, 2), (1, 1)])
def test_batch_sizes_that_cannot_work_are_refused(sizes):
    policy = BatchPolicy(lambda key: sizes)

    with pytest.raises(ConfigError, match="ascend from 1"):
        policy.admit("a", 1, 1.0, 0.0)
    assert policy.depth == 0


def test_an_idle_device_tries_what_its_guess_would_refuse_and_learns():
    policy = BatchPolicy(lambda key: (1,))
    policy.expect("key", 1, 0.9)

    assert policy.wait_s("key", 10.0) == 0.0
    tried = policy.admit("key", 1, 10.1, 10.0)
    with pytest.raises(Overloaded):
        policy.admit("key", 1, 10.1, 10.0)  # one at a time
    policy.ready(tried, 10.0)
    start = policy.next(10.0)
    assert isinstance(start, StartBatch)
    assert not policy.expire(10.0)
    policy.started(start.batch, 10.0)
    policy.finished(start.batch, 10.02)
    with pytest.raises(Overloaded, match="shorter"):  # the guess still counts beside the first measurements
        policy.admit("key", 1, 10.6, 10.5)

    for second in (12, 14, 16):
        tried = policy.admit("key", 1, second + 0.1, second)
        policy.ready(tried, second)
        start = policy.next(second)
        assert isinstance(start, StartBatch)
        policy.started(start.batch, second)
        policy.finished(start.batch, second + 0.02)
    policy.admit("key", 1, 16.6, 16.5)


def test_a_part_that_would_take_too_long_is_refused_even_with_all_the_time_in_the_world():
    policy = BatchPolicy(lambda key: (1,), BatcherConfig(max_part_s=10.0))
    policy.expect("long", 1, 11.0)
    policy.expect("fine", 1, 9.0)

    with pytest.raises(TooLarge, match=r"11\.0 s, at most 10 s") as refused:
        policy.admit("long", 1, 1000.0, 0.0)
    assert refused.value.code == "too_long"
    policy.admit("fine", 1, 1000.0, 0.0)


def test_what_is_due_later_does_not_count_for_the_urgent():
    policy = BatchPolicy(lambda key: (1,), NO_TRIES)
    policy.expect("a", 1, 0.05)
    for _ in range(100):
        policy.admit("a", 1, 60.0, 0.0)

    assert policy.wait_s("a", 0.0) == pytest.approx(101 * 0.05)
    assert policy.wait_s("a", 0.0, within_s=0.2) == pytest.approx(0.05)
    policy.admit("a", 1, 0.2, 0.0)


# Step times


def test_a_step_time_is_read_off_its_neighbours():
    times = ServiceTimes(lambda key: (1, 2, 3, 4, 6, 8, 16))
    for size, seconds in ((2, 0.010), (6, 0.030), (8, 0.036)):
        times.expect("a", size, seconds)
    expected = {1: 0.010, 2: 0.010, 3: 0.015, 4: 0.020, 6: 0.030, 8: 0.036, 16: 0.036 + 8 * 0.003}

    assert times.table("a").seconds == pytest.approx(expected)


def test_a_size_takes_the_upper_quartile_of_its_last_32_batches():
    times = ServiceTimes(lambda key: (1,))
    for seconds in [9.0] * 10 + [0.01 * n for n in range(1, 33)]:
        times.note("a", 1, seconds)

    assert times.table("a").seconds[1] == pytest.approx(0.25)  # of 0.01 … 0.32, the 25th


def test_a_size_is_used_only_if_it_is_faster_per_part():
    times = ServiceTimes(lambda key: (1, 2, 4, 8))
    for size, seconds in ((1, 0.010), (2, 0.0196), (4, 0.020), (8, 0.050)):
        times.expect("a", size, seconds)
    table = times.table("a")

    assert table.useful == (1, 4)  # two are 2 % faster, eight slower
    assert [table.size_for(parts) for parts in (1, 3, 4, 5, 99)] == [1, 1, 4, 4, 4]
    assert table.work_s(6) == pytest.approx(0.020 + 2 * 0.010)


def test_a_task_waits_behind_those_inside_the_pool():
    pool = PoolTimes(workers=2)
    for seconds in (0.1, 0.3, 0.2):
        pool.enter()
        pool.leave("key", seconds, "group")

    assert (pool.expected_s("key"), pool.expected_s("other", "group"), pool.expected_s("other")) == (0.2, 0.2, 0.0)
    for _ in range(5):
        pool.enter()
    assert pool.expected_s("key") == pytest.approx(0.2 * (1 + 4 / 2))
