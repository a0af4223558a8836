"""Before anything imports torch: waiting threads soon sleep, as on the command line, and Ctrl-C is delivered.

`make test` leaves out what is marked `long`, unless it is marked `smoke` too, and what needs a GPU; `make test-all`
runs everything. No test is tried twice. With `-n`, a file's tests stay in one process, as they share what is expensive
to make.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

import forks

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["XDG_CACHE_HOME"] = CACHE = tempfile.mkdtemp(prefix="brim-tests-cache-")  # the user's own stays untouched
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Folders whose tests run whole services, clusters or browsers, many processes each: one file after another.
QUEUES = ("browser", "cluster", "faults")
SPLIT = ("test_docs.py", "test_cuda.py", "test_fused.py", "test_kernels_compile.py")  # their tests share nothing

_left_out: Counter[str] = Counter()  # tests that were deselected, by what runs them


def pytest_configure(config: pytest.Config) -> None:
    """With -n, the processes that run the tests are forked too, each with a server of its own: torch is loaded once."""
    if getattr(config.option, "numprocesses", None):  # a second thread would only compete: up to 2.6 times the CPU time
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    forks.install()


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        for marker, command in (("gpu", "make gpu"), ("long", "make test-all")):
            _left_out[command] += item.get_closest_marker(marker) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With -n, the processes that run the tests know what was left out; all of them the same."""
    _left_out.update({} if _left_out else node.workeroutput.get("left_out", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What did not run, and why."""
    skipped = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if skipped or +_left_out:
        terminalreporter.section("not run")
    for reason, count in skipped.most_common():
        terminalreporter.line(f"{count:6} skipped: {reason}")
    for command, count in (+_left_out).most_common():
        terminalreporter.line(f"{count:6} left to {command}")


@pytest.fixture(autouse=True, scope="module")
def own_cache() -> Iterator[None]:
    """A file's tests find nothing in the cache that another file's left there, and little garbage to look through."""
    gc.collect()  # brim collects at each out-of-memory and trial: what was imported or made before is excluded from it
    gc.freeze()
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
        queue = file.parent.name
        return nodeid if file.name in SPLIT else queue if queue in QUEUES else str(file)
