"""Where the time of a whole command goes, and when the share of the ceiling is known."""

import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from fake_time import FakeTime

from brim.engine.meter.ceiling import BUDGET, CeilingProbe, of_several
from brim.engine.meter.spent import DEVICE, IMPORT, WORK, Account, accounting, current_account, of_this_process, within


def test_every_second_belongs_to_the_innermost_cause() -> None:
    clock = FakeTime()
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


def test_the_start_is_imports_and_devices_and_no_more_than_was_work_is_moved() -> None:
    clock = FakeTime()
    account = Account(IMPORT, clock=clock, age_s=2.0)
    account.begin()
    for cause, seconds in ((DEVICE, 3), ("writing", 1), (WORK, 5)):
        with account.within(cause):
            clock.now_s += seconds
    account.move(7.0, "ceiling")
    spent = account.spent()
    assert (spent.wall_s, spent.startup_s, spent.work_s) == (11, 5, 0)
    assert spent.overhead == {"ceiling": 5, DEVICE: 3, IMPORT: 2, "writing": 1}


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


def test_a_process_counts_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the import of brim: the system started it 100 000 ticks after its own start, and it is 3.5 s older."""
    clock, start_s = FakeTime(), 100_000 / os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"17 (a (b) c) S {' '.join(['9'] * 18)} 100000 9 9\n")
    clock.clock_gettime = lambda kind: {time.CLOCK_BOOTTIME: start_s + 3.5}[kind]
    clock.CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
    monkeypatch.setattr("brim.engine.meter.spent._STAT", tmp_path / "stat")
    monkeypatch.setattr("brim.engine.meter.spent.time", clock)
    monkeypatch.setattr("brim.engine.meter.spent.Account", partial(Account, clock=clock))
    spent = of_this_process().spent()
    assert (spent.wall_s, spent.startup_s, spent.overhead) == (3.5, 3.5, {IMPORT: 3.5})


# The ceiling


def test_the_ceiling_is_measured_within_its_budget() -> None:
    probe, run_s = CeilingProbe(), 0.0
    while run_s < 10:
        run_s += 0.01
        if probe.due(run_s, 0.02):
            probe.add(100.0, 0.02, run_s)
    assert len(probe.rates) >= 5
    assert probe.cost_s <= BUDGET * run_s


def test_the_share_of_several_workers_is_that_of_their_sum():
    assert [of_several(rate, 100.0).share for rate in (50.0, 102.0, 104.0, 0.0)] == [0.5, 1.0, None, None]
    assert of_several(50.0, None).share is None


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
