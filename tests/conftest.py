"""Before anything imports torch: threads that wait soon sleep, as on the command line; Ctrl-C is heard.

Tests that read the clock or the process's memory are tried again: whoever shares the machine disturbs them.
Files with slow tests go first, so that workers end at about the same time.
"""

import gc
import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# directories of real processes under real deadlines, and modules that assert on seconds or on resident bytes
MEASURED = {"cluster", "contract", "faults", "jobs", "service", "browser"}
MEASURED_MODULES = {"test_memory", "test_pipeline", "test_trials", "test_warm_up", "test_batch_runner", "test_stalls"}
MEASURED_MODULES |= {"test_cells", "test_segment_train", "test_trainer", "test_predict_files", "test_docs", "test_cli"}
MEASURED_MODULES |= {"test_ranks", "test_storage", "test_predict_urls", "test_doctor_cluster", "test_resident"}
RERUNS = 2
LONGEST = "test_docs"  # minutes of commands, one after another: begins first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that another process's load can fail."""
    here = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(here)
        if MEASURED.intersection(place.parts) or item.path.stem in MEASURED_MODULES:
            item.add_marker(pytest.mark.flaky(reruns=RERUNS))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    # Stable: a file stays together. Those with a browser go last: it keeps an event loop in the thread of the tests.
    items.sort(key=lambda item: (item.path.parent.name == "browser", item.path.stem != LONGEST, item.path not in slow))


def pytest_collection_finish() -> None:
    """Let collections pass over what is imported by now, torch above all: brim collects at each out of memory."""
    gc.collect()
    gc.freeze()
