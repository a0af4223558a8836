"""Before anything imports torch: waiting threads soon sleep, as on the command line, and Ctrl-C is delivered.

No test may fail and pass. The few that depend on what else the machine is doing are named in RETRIED, each with its
reason. Slow tests start first, so that workers finish at about the same time.
"""

import gc
import os
import signal
import tempfile

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(
    prefix="brim-tests-cache-"
)  # nothing of the user's own is read or written
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# file::test → why a second try is allowed; at most ten
RETRIED = {
    "test_fault_load.py::test_a_hundred_jobs_by_ten_clients_and_quick_lists_and_cancels_meanwhile": "p95 of answers",
    "test_jobs_pages.py::test_a_thousand_jobs_are_paged_through_and_stay_fluid": "frames drawn a second",
    "test_data_pages.py::test_a_dataset_of_a_hundred_thousand_samples_stays_fluid": "frames drawn a second",
    "test_trainer.py::test_a_slow_copy_is_named": "share of a step that waits, of milliseconds",
    "test_prediction_deaths.py::test_two_predictors_share_what_arrives_at_once": "which of two processes is idle first",
    "test_devices.py::test_a_cluster_that_nobody_answers_at_fails_the_job_at_once": "seconds until a failure",
    "test_devices.py::test_ranks_stop_when_asked_and_go_on_from_there": "seconds until three processes have stopped",
    "test_worker_rf.py::test_a_cancelled_generation_is_a_valid_dataset_within_five_seconds": "seconds until a stop",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("BRIM_SOAK"):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="make soak"))
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        if name in RETRIED:
            item.add_marker(pytest.mark.flaky(reruns=1))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    # Stable: a file stays together. Browser tests run last: they keep an event loop in the tests' thread.
    items.sort(key=lambda item: (item.path.parent.name == "browser", item.path not in slow))


def pytest_collection_finish() -> None:
    """Exclude what is imported by now from garbage collection, torch above all: brim collects at each out-of-memory."""
    gc.collect()
    gc.freeze()
