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

RETRIED: dict[str, str] = {}  # file::test → why a second try is allowed; at most ten


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
