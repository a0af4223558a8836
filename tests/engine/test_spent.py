"""Where the time of a whole command goes, and when the share of the ceiling is known."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from brim.engine.meter.ceiling import BUDGET, CeilingProbe
from brim.engine.meter.spent import IMPORT, WORK, Account, accounting, current_account, of_this_process, within


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_every_second_belongs_to_the_innermost_cause() -> None:
    clock = Clock()
    account = Account(IMPORT, clock=clock, age_s=3.0)
    clock.now_s += 1
    account.begin()
    clock.now_s += 0.5
    with account.within(WORK):
        clock.now_s += 10
        with account.within("checkpoint"):
            clock.now_s += 2
        clock.now_s += 1
    account.move(1.0, "ceiling")
    spent = account.spent()
    assert (spent.wall_s, spent.startup_s, spent.work_s) == (17.5, 4.0, 10.0)
    assert list(spent.overhead.items()) == [("import", 4.0), ("checkpoint", 2.0), ("ceiling", 1.0), ("other", 0.5)]
    assert spent.line() == "17.5 s in all: 10.0 s of work, 7.5 s of overhead, most of it import (4.0 s)"


def test_a_cause_ends_where_its_work_fails() -> None:
    clock = Clock()
    account = Account(clock=clock)
    with suppress(KeyError), account.within("reading"):
        clock.now_s += 1
        raise KeyError
    clock.now_s += 2
    assert account.spent().overhead == {"other": 2.0, "reading": 1.0}


def test_calls_share_the_account_of_their_thread_and_no_other() -> None:
    seen: list[object] = []
    with accounting() as outer, accounting() as inner:
        assert inner is outer
        thread = threading.Thread(target=lambda: seen.append(current_account()))
        thread.start()
        thread.join()
        with within("reading"):
            pass
    assert seen == [None]
    assert current_account() is None


def test_a_process_counts_from_its_start() -> None:
    """Not from the import of brim."""
    code = (
        "import time; time.sleep(0.4)\n"
        "from brim.engine.meter.spent import of_this_process; import json, sys\n"
        "print(json.dumps(of_this_process().spent().as_dict() | {'torch': 'torch' in sys.modules}))"
    )
    began_s = time.perf_counter()
    spent = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert 0.4 <= spent["wall_s"] <= time.perf_counter() - began_s + 0.02
    assert spent["startup_s"] == spent["wall_s"]
    assert not spent["torch"]
    assert of_this_process().spent().wall_s > 0, os.getpid()


# The ceiling


def test_the_ceiling_is_measured_within_its_budget() -> None:
    probe, run_s = CeilingProbe(), 0.0
    while run_s < 10:
        run_s += 0.01
        if probe.due(run_s, 0.02):
            probe.add(100.0, 0.02, run_s)
    assert len(probe.rates) >= 5
    assert probe.cost_s <= BUDGET * run_s


@pytest.mark.parametrize(
    ("rates", "rate", "share"),
    [
        ([], 50.0, None),
        ([100.0, 100.0], 50.0, None),  # too few
        ([100.0, 100.0, 100.0], 50.0, 0.5),
        ([100.0, 100.0, 100.0], 102.0, 1.0),  # by rounding
        ([100.0, 100.0, 100.0], 120.0, None),  # cannot be
        ([100.0, 300.0, 30.0], 90.0, None),  # a busy machine
        ([100.0, 110.0, 90.0, 105.0], 108.0, 1.0),
        ([100.0, 100.0, 100.0], 0.0, None),
    ],
)
def test_a_share_is_given_only_if_it_is_known(rates: list[float], rate: float, share: float | None) -> None:
    found = CeilingProbe(rates=rates).share(rate)
    assert found.share == (None if share is None else pytest.approx(share, abs=0.03))
    assert (found.spread is None) == (share is None)
    assert ("not measured" in found.words()) == (share is None)
