"""Before anything imports torch: waiting threads soon sleep, as on the command line, and Ctrl-C is delivered.

No test may fail and pass. The few that depend on what else the machine is doing are named in RETRIED, each with its
reason; those that promise a time are marked `alone`, and `make test` runs them when nothing else does. With `-n`, a
file's tests stay in one process, as they share what is expensive to make; files that take longest start first, so that
processes finish at about the same time.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

import forks

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["XDG_CACHE_HOME"] = CACHE = tempfile.mkdtemp(prefix="brim-tests-cache-")  # the user's own stays untouched
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# file::test → why a second try is allowed even to one that runs alone; at most ten
RETRIED = {
    "test_fault_load.py::test_a_hundred_jobs_by_ten_clients_and_quick_lists_and_cancels_meanwhile": "p95 of answers",
    "test_prediction_deaths.py::test_two_predictors_share_what_arrives_at_once": "which of two processes is idle first",
    "test_trials.py::test_peak_memory_is_that_of_the_trial_alone": "when the allocator returns what others freed",
}


# Files that take longest, in seconds on two quiet cores, from a minute on; some mostly wait.
LONG = {
    "test_jobs_pages.py": 180, "test_cluster_predict.py": 120, "test_fault_kills.py": 90, "test_data_pages.py": 100,
    "test_worker.py": 90, "test_fault_processes.py": 90, "test_devices.py": 80, "test_many_generate.py": 80,
    "test_docs.py": 75, "test_torchrun_cli.py": 60, "test_openapi.py": 60, "test_fault_outages.py": 60,
}  # fmt: skip
# Files with whole services, clusters and browsers, many processes each: one after another, in two queues.
QUEUES = {"browser": "first", "cluster": "first", "faults": "second"}
SPLIT = ("test_docs.py", "test_cuda.py", "test_fused.py")  # their tests share nothing


def pytest_configure(config: pytest.Config) -> None:
    """With -n, the processes that run the tests are forked too, each with a server of its own: torch is loaded once."""
    if getattr(config.option, "numprocesses", None):  # a second thread would only compete: up to 2.6 times the CPU time
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    forks.install()


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


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
    items.sort(key=lambda item: (-LONG.get(item.path.name, 0), item.path not in slow))  # stable: a file stays together


def pytest_collection_finish() -> None:
    """Exclude what is imported by now from garbage collection, torch above all: brim collects at each out-of-memory."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def own_cache() -> Iterator[None]:
    """A file's tests find nothing in the cache that another file's left there."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=CACHE)  # removed at the end: a service may outlive the file
    yield
    os.environ["XDG_CACHE_HOME"] = CACHE


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return Files(config, log)


class Files(LoadScopeScheduling):
    """A file or queue goes to one process as a whole, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        return nodeid if file.name in SPLIT else QUEUES.get(file.parent.name, str(file))
