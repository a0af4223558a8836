"""Waiting for what another thread or process does: patient, as a test machine may be busy with other things."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 180.0

SHARED = 4  # times as long a promised time may take where tests run beside each other

_Value = TypeVar("_Value")


def promised(seconds: float) -> float:
    """Seconds that the documentation promises; longer where `pytest -n` has other tests on the same cores."""
    return seconds * SHARED if "PYTEST_XDIST_WORKER" in os.environ else seconds


def until(condition: Callable[[], _Value], seconds: float = PATIENCE_S, say: Callable[[], str] = lambda: "") -> _Value:
    """The first true value of the condition; a number of seconds is a promise that a test checks."""
    end_s = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end_s, f"did not happen within {seconds} s; {say()}"
        time.sleep(0.02)
    return value
