"""Batcher: any function behind batches, deadlines and typed rejections."""

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from fake_time import FakeTime
from torch import nn

import brim
from brim.errors import BrimError, Overloaded
from waiting import PATIENCE_S

PATIENT_MS = 60_000  # a busy machine rejects nothing


def gathered(batcher: brim.Batcher, items: list[Any]) -> list[Any]:
    async def run() -> list[Any]:
        return await asyncio.gather(*(batcher(item) for item in items), return_exceptions=True)

    return asyncio.run(run())


def test_items_that_arrive_together_share_batches_and_keep_their_order() -> None:
    sizes: list[int] = []

    def double(items: list[int]) -> list[int]:
        sizes.append(len(items))
        time.sleep(0.01)
        return [2 * item for item in items]

    with brim.Batcher(double, max_latency_ms=PATIENT_MS, max_batch=16) as batcher:
        assert gathered(batcher, list(range(40))) == [2 * item for item in range(40)]
    assert "40 answered" in repr(batcher)  # counted after the answer was given
    assert len(sizes) < 40
    assert max(sizes) <= 16


@pytest.mark.parametrize("form", ["module", "stacked function", "function of a list", "dict"])
def test_a_module_and_functions_of_tensors_give_rows(form: str) -> None:
    model = nn.Linear(4, 2)
    predict: Any = {
        "module": model,
        "stacked function": lambda batch: model(batch),
        "function of a list": lambda items: [model(item).detach() for item in items],
        "dict": lambda items: {"out": model(torch.stack(items))},
    }[form]
    x = torch.randn(10, 4)

    with brim.Batcher(predict, max_latency_ms=PATIENT_MS, example=x[0], max_batch=4) as batcher:
        found = gathered(batcher, list(x))

    rows = torch.stack([row["out"] if isinstance(row, dict) else row for row in found])
    torch.testing.assert_close(rows, model(x).detach())


def test_what_cannot_be_answered_in_time_is_rejected_with_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of 20 s, a limit of 60: behind two batches of two nothing more can be promised."""
    clock, gate, sizes = FakeTime(), threading.Event(), []
    monkeypatch.setattr("brim.engine.batching.batcher.time", clock)
    clock.monotonic = time.monotonic

    def slow(items: list[int]) -> list[int]:
        clock.sleep(20)
        if -1 not in items:  # all are asked before the first is answered
            sizes.append(len(items))
            assert gate.wait(PATIENCE_S)
        return items

    with brim.Batcher(slow, max_latency_ms=60_000, max_batch=2, example=-1) as batcher:
        answers, refused = [], []
        for item in range(200):
            try:
                answers.append((item, batcher.submit(item)))
            except Overloaded as failure:
                refused.append(failure)
        gate.set()
        assert all(answer.result(PATIENCE_S) == item for item, answer in answers)

    assert 2 <= len(answers) <= 5
    assert len(refused) == 200 - len(answers)
    assert all(0 < failure.retry_after_s <= 60 for failure in refused)
    assert len(sizes) <= 3


def test_the_limit_of_a_request_is_in_milliseconds() -> None:
    """An example of 20 s: an answer within 30 s can be promised, one within 10 s cannot."""
    clock = FakeTime()
    clock.monotonic = time.monotonic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brim.engine.batching.batcher.time", clock)
        predict: Any = lambda items: clock.sleep(20) or items  # noqa: E731
        with brim.Batcher(predict, max_latency_ms=30_000, max_batch=1, example=0) as batcher:
            with pytest.raises(Overloaded):
                batcher.submit(1, max_latency_ms=10_000)
            assert batcher.submit(2).result(PATIENCE_S) == 2


def test_items_of_other_shapes_share_no_batch() -> None:
    batches, gate = list[set[tuple[int, ...]]](), threading.Event()

    def sums(items: list[torch.Tensor]) -> list[float]:
        assert gate.wait(PATIENCE_S)
        batches.append({tuple(item.shape) for item in items})
        return [float(item.sum()) for item in items]

    with brim.Batcher(sums, max_latency_ms=PATIENT_MS) as batcher:
        answers = [batcher.submit(torch.ones(2 + number % 2)) for number in range(20)]
        gate.set()
        assert [answer.result(PATIENCE_S) for answer in answers] == [2.0, 3.0] * 10
    assert {len(shapes) for shapes in batches} == {1}
    assert len(batches) < 20


def test_a_future_for_code_with_threads() -> None:
    with brim.Batcher(lambda items: items, max_latency_ms=PATIENT_MS) as batcher:
        assert batcher.submit("x").result(PATIENCE_S) == "x"
    assert not [thread for thread in threading.enumerate() if thread.name == "brim-device"]
    with pytest.raises(Overloaded):
        batcher.submit("x")


def test_outputs_that_are_not_one_for_each_item_are_named() -> None:
    def constant(items: list[int]) -> int:
        return 3

    with brim.Batcher(constant, max_latency_ms=PATIENT_MS) as batcher:
        (failure,) = gathered(batcher, [1])
    assert isinstance(failure, BrimError)
    assert "constant returned an int for 1 items; return one output for each item" in str(failure)
