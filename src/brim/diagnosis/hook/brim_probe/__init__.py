"""The probe: watches a training from inside its own interpreter, and writes what it saw to a folder.

Imports the standard library, and torch once the script has imported it. What to do is in the environment:
BRIM_WHY_OUT (a folder for results) and BRIM_WHY_PLAN (JSON: seconds to watch, and a change to try).

    clock.py     seconds of a step by cause
    watching.py  torch's functions, wrapped so that they tell the clock
    feeding.py   loaders: what they cost, and the one batch that is served again to measure the ceiling
    changes.py   the remedies that are tried
    counting.py  operations, arithmetic and device time of a step
    sampling.py  where the time goes, in lines of the script; writes the results
"""

import atexit
import json
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

from . import sampling
from .clock import StepClock

PLAN = {"watch_s": 10.0, "ceiling_s": 4.0, "change": None, "value": None}


def start() -> None:
    """Wait for the script to import torch; in a process that never does, do nothing."""
    plan = {**PLAN, **json.loads(os.environ.get("BRIM_WHY_PLAN") or "{}")}
    clock = StepClock(plan)
    sys.meta_path.insert(0, _AfterTorch(clock))


def install(clock: StepClock, *, alone: bool = False) -> None:
    """Wrap torch and start to watch; alone: in this process only, and without writing results."""
    from . import changes, counting, feeding, watching

    feeding.install(clock)
    watching.install(clock)
    changes.install(clock)
    counting.install(clock)
    sampling.start(clock, write=not alone)
    if not alone:
        atexit.register(sampling.finish, clock)


class _AfterTorch:
    """Finds no module; the first time that torch is imported, its loader is followed by `install`."""

    def __init__(self, clock: StepClock) -> None:
        self.clock, self.seen = clock, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self.seen:
            return None
        self.seen = True
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            try:
                install(self.clock)
            except Exception as failure:  # a torch that cannot be watched must still train
                sampling.give_up(self.clock, repr(failure))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
