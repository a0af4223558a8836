"""Predictions without a predictor and reading without a reader: real models and files, in threads of the test.

A request waits for those before it; what could not be answered by its deadline is refused, as the real ones do.
"""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch

from brim.engine.batching.servable import Answer, Payload, Servable
from brim.errors import Overloaded
from brim.rf.location.serving import LocateServable
from brim.segmentation.prediction import SegmentServable
from brim.sequences.evaluation.serving import ClassifyServable
from brim.service.prediction.channel import Body, PredictionAnswer, view_of
from brim.service.prediction.client import Predictions
from brim.service.reader.client import Reader
from brim.service.reader.functions import FUNCTIONS

CPU = torch.device("cpu")


class ThreadReader(Reader):
    """Reads in a thread of the test's own process, so that tests can change what it reads with."""

    def __init__(self) -> None:
        super().__init__(Path("none"))

    async def _run(self, function: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        sent = json.loads(json.dumps(arguments))
        value = await asyncio.to_thread(lambda: FUNCTIONS[function](**sent))
        return json.loads(json.dumps(value))


class InProcess(Predictions):
    """Runs one request after another."""

    def __init__(self) -> None:
        super().__init__([Path("none")])
        self.wait_s = 0.0  # what the estimate says, of models that have none of their own
        self.waits_s: dict[str, float] = {}
        self.num_in_time = math.inf  # requests that can still be answered by their deadlines
        self.deadlines_s: list[float] = []
        self.is_open = True  # until then a request whose turn came waits
        self.registered: list[dict[str, Any]] = []
        self.started: list[str] = []  # names of files whose turn came
        self.cancelled = 0
        self.failure: Exception | None = None
        self._loaded: dict[str, tuple[str, Servable]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._turn = asyncio.Lock()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.shutdown()

    @property
    def is_on(self) -> bool:
        return True

    @property
    def is_up(self) -> bool:
        return True

    def estimate(self, model: str, within_s: float) -> float:
        return self.waits_s.get(model, self.wait_s)

    def register(self, models: Any) -> None:
        self.registered = [dict(model) for model in models]

    async def request(
        self,
        model: Mapping[str, Any],
        payload: Body,
        *,
        deadline_s: float,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        alone: bool = False,
    ) -> PredictionAnswer:
        asked_s = time.monotonic()
        self.deadlines_s.append(deadline_s)
        if self.failure is not None:
            raise self.failure
        try:
            async with self._turn:
                self.num_in_time -= 1
                if self.num_in_time < 0 or time.monotonic() > deadline_s:
                    raise Overloaded("it could not be answered in time; try again later", retry_after_s=2.5)
                self.started.append(name)
                while not self.is_open:
                    await asyncio.sleep(0.01)
                began_s = time.monotonic()
                loop = asyncio.get_running_loop()
                data = view_of(payload)
                work = Payload(bytes(data), name, dict(options or {}))
                answer = await loop.run_in_executor(self._pool, self._answer, dict(model), work)
                seconds = {"wait": began_s - asked_s, "forward": time.monotonic() - began_s}
                return PredictionAnswer(answer.body, answer.media_type, {**answer.facts, "seconds": seconds})
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def models(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "state": "warm", "error": None, "memory_bytes": 1000, "batch_size": 4,
             "max_batch_size": 8, "device": "cpu"}
            for name in self._loaded
        ]  # fmt: skip

    async def snapshot(self) -> list[dict[str, Any]]:
        return []

    def _answer(self, model: dict[str, Any], payload: Payload) -> Answer:
        servable = self._servable(model)
        servable.inspect(payload)
        item = servable.decode(payload)
        return servable.finish(item, _collected(servable.collect(servable.forward(item.parts))))

    def _servable(self, model: dict[str, Any]) -> Servable:
        version, servable = self._loaded.get(model["name"], ("", None))
        if version != model["version"] or servable is None:
            servable = _load(model)
            self._loaded[model["name"]] = model["version"], servable
        return servable


def _load(model: dict[str, Any]) -> Servable:
    if model["kind"] == "segment":
        return SegmentServable(model["network"], model["path"], CPU, may_tune=False, tile=256)
    return (LocateServable if model["kind"] == "locate" else ClassifyServable)(model["path"], CPU)


def _collected(outputs: list[Any]) -> list[Any]:
    for one in outputs:
        if isinstance(one, Exception):
            raise one
    return outputs
