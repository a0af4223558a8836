"""Waiting for what another thread or process does; tests look at a clock here alone, and only to give up."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 180.0  # a test machine may be busy with other things

_Value = TypeVar("_Value")


def until(condition: Callable[[], _Value], say: Callable[[], str] = lambda: "") -> _Value:
    """The first true value of the condition."""
    end_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end_s, f"did not happen within {PATIENCE_S:.0f} s; {say()}"
        time.sleep(0.02)
    return value
