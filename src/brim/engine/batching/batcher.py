"""Batches for any function: `await batcher(item)` in anyone's asynchronous code, each answer before its deadline.

    batcher = Batcher(predict, max_latency_ms=50)

    @app.post("/predict")
    async def answer(item: Item):
        return await batcher(item.values)

Requests that arrive together run as one batch. One that would miss its deadline behind those before it is rejected
at once with Overloaded, whose `retry_after_s` says when to come back.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from brim.engine.batching.policy import BatcherConfig
from brim.engine.batching.runner import BatchRunner
from brim.engine.batching.servable import Answer, DecodedRequest, Payload, RequestShape
from brim.engine.batching.warm_up import ladder
from brim.errors import BrimError, ConfigError, with_article
from brim.report.summary import Summarised

_MODEL = "predict"


class Batcher(Summarised):
    """Runs single items in batches through one function, and answers each within max_latency_ms or rejects it."""

    def __init__(
        self,
        predict: Callable[[Any], Any],
        *,
        max_latency_ms: float = 50.0,
        max_batch: int = 64,
        stack: bool | None = None,
        example: Any = None,
    ) -> None:
        """Store and check; threads start with the first request.

        predict    gets a list of items and returns one output for each: a sequence, a tensor or array with a row for
                   each, or a dict of those. A module gets its items stacked into one tensor
        max_batch  most items at once; tune_batch finds a good one
        stack      whether predict gets items stacked into one tensor; None: if it is a module, or fails on a list
        example    an item to run through predict before the first request, in all batch sizes: their times are then
                   known, and nothing is compiled while a request waits
        """
        if isinstance(predict, type) or not callable(predict):
            name = getattr(predict, "__name__", type(predict).__name__)
            raise ConfigError(f"predict is {name}, not a function", hint="give a function of a list of items")
        for name, value in (("max_latency_ms", max_latency_ms), ("max_batch", max_batch)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name}={value!r} must be a number above 0")
        if int(max_batch) != max_batch:
            raise ConfigError(f"max_batch={max_batch!r} must be a whole number, at least 1")
        self.max_latency_ms, self.max_batch = float(max_latency_ms), int(max_batch)
        self._model = _Batched(predict, stack, ladder(self.max_batch))
        self._example = example
        self._runner: BatchRunner | None = None
        self._closed = False
        self._lock = threading.Lock()

    async def __call__(self, item: Any, *, max_latency_ms: float | None = None) -> Any:
        """The output for an item; Overloaded or DeadlinePassed if it cannot come in time, else what predict raises."""
        return await asyncio.wrap_future(self.submit(item, max_latency_ms=max_latency_ms))

    def submit(self, item: Any, *, max_latency_ms: float | None = None) -> "Future[Any]":
        """The same for code with threads: a future, or Overloaded at once."""
        limit_ms = self.max_latency_ms if max_latency_ms is None else max_latency_ms
        reply = self._started().submit(_MODEL, Payload(b"", options={"item": item}), time.monotonic() + limit_ms / 1e3)
        output: Future[Any] = Future()
        output.add_done_callback(lambda done: reply.cancel() if done.cancelled() else None)
        reply.add_done_callback(lambda done: _pass_on(done, output))
        return output

    def stats(self) -> dict[str, Any]:
        """Counters so far: answered, rejected by reason, batch sizes, seconds by stage."""
        return {} if self._runner is None else self._runner.snapshot()

    def close(self) -> None:
        """End the threads; requests that wait fail with Overloaded."""
        self._closed = True
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> BatchRunner:
        if self._runner is None:
            with self._lock:
                if self._runner is None:
                    if self._closed:
                        raise ConfigError("this Batcher was closed", hint="make another one")
                    if self._example is not None:
                        self._model.warm_up(self._example)
                    config = BatcherConfig(max_queue_delay_ms=min(5.0, self.max_latency_ms / 10))
                    self._runner = BatchRunner(lambda name: self._model, config=config, decoders=1, finishers=1)
        return self._runner

    def _summary(self) -> tuple[str, Mapping[str, Any]]:
        counts = self.stats()
        facts = {"predict": self._model.name}
        if counts:
            rejected = sum(counts["rejected"].values())
            facts |= {"requests": f"{counts['answered']} answered, {counts['failed']} failed, {rejected} rejected"}
            facts |= {"batch sizes": ", ".join(f"{num} × {size}" for size, num in counts["batch_sizes"].items())}
        return f"Batcher: up to {self.max_batch} items at once, answers within {self.max_latency_ms:g} ms", facts


def _pass_on(reply: "Future[Answer]", output: "Future[Any]") -> None:
    if reply.cancelled() or output.cancelled():
        output.cancel()
    elif (failure := reply.exception()) is not None:
        output.set_exception(failure)
    else:
        output.set_result(reply.result().facts["output"])


class _Batched:
    """A function as the runner sees a model."""

    def __init__(self, predict: Callable[[Any], Any], stack: bool | None, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.name = getattr(predict, "__name__", type(predict).__name__)
        self._predict = predict
        self._stack = True if stack is None and isinstance(predict, nn.Module) else stack
        self._expected_s: dict[int, float] = {}

    def inspect(self, payload: Payload) -> RequestShape:
        item = payload.options["item"]
        # only items of equal shape can be stacked
        key: Hashable = tuple(item.shape) if isinstance(item, Tensor | np.ndarray) else type(item).__name__
        return RequestShape(key=key, expected_s=self._expected_s)

    def decode(self, payload: Payload) -> DecodedRequest:
        return DecodedRequest(self.inspect(payload).key, [payload.options["item"]])

    def forward(self, parts: list[Any]) -> Any:
        if self._stack is None:
            try:
                outputs = self._rows(self._predict(list(parts)), len(parts))
            except (TypeError, AttributeError) as failure:
                if not all(isinstance(part, Tensor | np.ndarray | int | float) for part in parts):
                    raise
                try:
                    outputs = self._rows(self._predict(_stacked(parts)), len(parts))
                except Exception:
                    raise failure from None
                self._stack = True
            else:
                self._stack = False
            return outputs
        return self._rows(self._predict(_stacked(parts) if self._stack else list(parts)), len(parts))

    def collect(self, running: Any) -> list[Any]:
        return list(running)

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        return Answer(b"", facts={"output": outputs[0]})

    def close(self) -> None:
        pass

    def warm_up(self, example: Any) -> None:
        for size in self.sizes:
            for _ in range(2):  # the first call of a size may compile or allocate
                began_s = time.perf_counter()
                self.forward([example] * size)
                self._expected_s[size] = time.perf_counter() - began_s

    def _rows(self, outputs: Any, num: int) -> Sequence[Any]:
        """One output for each item; outputs on a GPU are copied to the host here, in one copy."""
        if isinstance(outputs, Mapping):
            columns = {name: self._rows(values, num) for name, values in outputs.items()}
            return [{name: values[row] for name, values in columns.items()} for row in range(num)]
        if isinstance(outputs, Tensor):
            outputs = outputs.detach().cpu()
        try:
            given = len(outputs)
        except TypeError:
            given = -1
        if given != num:
            what = f"{with_article(outputs)}" if given < 0 else f"{given} outputs"
            raise BrimError(f"{self.name} returned {what} for {num} items", hint="return one output for each item")
        rows: Sequence[Any] = outputs
        return rows


def _stacked(parts: list[Any]) -> Tensor:
    try:
        with torch.no_grad():
            return torch.stack([torch.as_tensor(part) for part in parts])
    except (TypeError, ValueError, RuntimeError) as failure:
        raise BrimError(
            f"items of type {type(parts[0]).__name__} cannot be stacked into one tensor",
            hint="give tensors or arrays of one shape, or stack=False",
        ) from failure
