"""First runs of a model: which sizes are left, how long they take, what they hold."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_time import FakeTime

from brim.engine.batching.warm_up import ladder, warm_up
from brim.errors import OutOfMemory

CPU = torch.device("cpu")


clock = FakeTime()


@pytest.fixture(autouse=True, scope="module")
def _batches_take_the_time_that_they_say() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[warm_up.__module__], "time", clock)
        yield


class Toy:
    """A model whose batches take a time of their own, and do not fit from a size on."""

    def __init__(self, *, top: int = 16, tuned: bool = True, fits: int = 1 << 20, batch_bytes: int = 0) -> None:
        self.sizes, self.tuned, self._fits, self._batch_bytes = ladder(top), tuned, fits, batch_bytes
        self.weight_bytes, self.expected_s = 1000, {}
        self.ran: list[int] = []
        self.seconds = lambda size: 0.001 * size

    def example(self, num: int) -> list[int]:
        return list(range(num))

    def forward(self, parts: list[int]) -> list[int]:
        self.ran.append(len(parts))
        clock.sleep(self.seconds(len(parts)))
        if self._batch_bytes:
            bytearray(b"x") * (self._batch_bytes * len(parts))
        return parts

    def collect(self, running: list[int]) -> list[Any]:
        if len(running) > self._fits:
            return [OutOfMemory("no room")] * len(running)
        return running


def test_a_ladder_goes_up_in_halves_and_thirds():
    assert ladder(16) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert ladder(7) == (1, 2, 3, 4, 6, 7)
    assert ladder(1) == ladder(0) == (1,)


def test_the_climb_ends_where_batches_are_no_faster():
    toy = Toy(top=64, tuned=False)
    toy.seconds = lambda size: 0.02 if size <= 4 else 0.0065 * size  # up to 4 the device is not full

    warmed = warm_up(toy, CPU, threading.RLock())

    assert warmed.sizes == tuple(toy.sizes) == (1, 2, 3, 4)
    assert max(toy.ran) == 8


def test_sizes_beyond_the_budget_are_left_out():
    toy = Toy(batch_bytes=64 << 20)  # beside which what other threads take and give back is little

    warmed = warm_up(toy, CPU, threading.RLock(), limit_bytes=400 << 20)

    assert 1 <= warmed.sizes[-1] <= 6
    assert warmed.memory_bytes <= 400 << 20


def test_the_weights_count_against_the_budget():
    toy = Toy()
    toy.weight_bytes = 300 << 20

    with pytest.raises(OutOfMemory, match="with its weights, and 200 MiB may be used"):
        warm_up(toy, CPU, threading.RLock(), limit_bytes=200 << 20)


def test_one_item_that_does_not_fit_is_an_error():
    with pytest.raises(OutOfMemory, match="no room"):
        warm_up(Toy(fits=0), CPU, threading.RLock())


def test_others_may_use_the_device_between_two_batches():
    held: list[int] = []

    class Lock:
        def __enter__(self) -> None:
            held.append(0)

        def __exit__(self, *_: object) -> None:
            held[-1] = len(toy.ran)

    toy = Toy(top=4)

    warm_up(toy, CPU, Lock())

    assert held == list(range(1, len(toy.ran) + 1))
