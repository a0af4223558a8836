"""Read by every Python process of a service under test, before anything else: what a test does to it from within.

BRIM_TEST_NOTES=FILE    each attempt at a job notes its begin and end, and whether another was still at it
BRIM_TEST_CLOCK=FILE    the wall clock is off by the number of seconds in the file, whenever that changes
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path


def patch_attempt(module):
    """Note attempts."""
    work = module.Attempt._work

    def noted(self):
        _note("begin", self.job.id)
        try:
            return work(self)
        finally:
            _note("end", self.job.id)

    module.Attempt._work = noted


def _note(what, job):
    file = Path(os.environ["BRIM_TEST_NOTES"])
    others = [n["pid"] for n in _open_attempts(file, job) if n["pid"] != os.getpid() and _is_same(n)]
    line = {"what": what, "job": job, "pid": os.getpid(), "began": _began(os.getpid()), "others": others}
    with file.open("a") as notes:
        notes.write(json.dumps(line) + "\n")


def _open_attempts(file, job):
    """Attempts at a job that began and have not ended, as far as is written."""
    open_ = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        note = json.loads(line)
        if note["job"] == job:
            open_[note["pid"], note["began"]] = note if note["what"] == "begin" else None
    return [note for note in open_.values() if note is not None]


def _is_same(note):
    return _began(note["pid"]) == note["began"]


def _began(pid):
    """When a process began, in ticks since boot; None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def shift_clock(file):
    """Have time.time and time.time_ns be off by what is in the file."""
    real, real_ns = time.time, time.time_ns

    def off_s():
        try:
            return float(file.read_text())
        except (OSError, ValueError):
            return 0.0

    time.time = lambda: real() + off_s()
    time.time_ns = lambda: real_ns() + int(off_s() * 1e9)


class Finder:
    """Patches the module of attempts as it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "brim.jobs.worker.run":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch_attempt(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("BRIM_TEST_NOTES"):
    sys.meta_path.insert(0, Finder())
if os.environ.get("BRIM_TEST_CLOCK"):
    shift_clock(Path(os.environ["BRIM_TEST_CLOCK"]))
