"""Toy predictors under a real supervisor, for tests that kill them."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

from supervised import Supervised

from brim.service.prediction.channel import PredictionAnswer
from brim.service.prediction.client import Predictions
from brim.service.run.process import Program
from brim.service.run.supervisor import Programs, programs
from brim.service.settings import Settings
from waiting import PATIENCE_S, until

TOY = Path(__file__).with_name("toy_predictor.py")
MODEL = {"name": "toy", "kind": "segment", "network": "toy", "path": "/nowhere", "version": "1"}


class Predicting(Supervised):
    """A supervisor with its predictors, at work in a thread."""

    def __init__(self, data: Path, *, real: bool = False, **changes: Any) -> None:
        self.settings = Settings(data=data, token="t", **changes)
        self.settings.make_folders()
        found = programs(self.settings, 0, gpus=[]).predictors
        children = found if real else [_toy(program) for program in found]
        super().__init__(Programs([], [], children))

    def __enter__(self) -> Self:
        super().__enter__()
        until(lambda: all(path.exists() for path in self.settings.predict_sockets))
        return self

    def pid(self, index: int = 0) -> int:
        """Of a predictor."""
        until(lambda: self.supervisor.pids()[f"predict{index}"])
        found = self.supervisor.pids()[f"predict{index}"]
        assert found is not None
        return found


def _toy(program: Program) -> Program:
    command = [sys.executable, str(TOY), *program.command[-3:]]
    env = {**program.env, "OMP_NUM_THREADS": "1"}
    return Program(name=program.name, command=command, stdin=program.stdin, env=env, hang_s=program.hang_s)


@asynccontextmanager
async def client(predicting: Predicting) -> AsyncIterator[Predictions]:
    async with Predictions(predicting.settings.predict_sockets) as made:
        yield made


async def ask(
    predictions: Predictions, data: bytes = b"x", *, within_s: float = PATIENCE_S, **options: Any
) -> PredictionAnswer:
    return await predictions.request(MODEL, data, deadline_s=time.monotonic() + within_s, options=options)


async def wait_for(condition: Any) -> None:
    """Until it holds; it may be something to await."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)


@contextmanager
def gate(path: Path) -> Iterator[dict[str, str]]:
    """Options by which a toy stays at a stage, once it is there, until the block ends."""
    try:
        yield {"do": "hold", "gate": str(path)}
    finally:
        path.touch()


def is_held(path: Path) -> bool:
    """Whether a toy has come to that gate."""
    return path.with_suffix(".begun").exists()
