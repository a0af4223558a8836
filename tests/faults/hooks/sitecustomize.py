"""Read by every Python process of a service under test, before anything else: what a test does to it from within.

BRIM_TEST_NOTES=FILE    each attempt at a job notes its begin and end, and whether another was still at it
BRIM_TEST_HANG=FILE     while the file is there, the next word of a job removes it and hangs, holding Python's lock
BRIM_TEST_POISON=1      a network that sees an image with a mark in its corner does what the mark says
BRIM_TEST_TILE=PIXELS   segmentation's tile: a small one is warm in a moment
BRIM_TEST_CLOCK=FILE    the wall clock is off by the number of seconds in the file, whenever that changes
"""

import ctypes
import importlib.util
import json
import os
import signal
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


def patch_tell(module):
    """Hang when told to."""
    tell = module.Attempt.tell

    def hanging(self, progress):
        tell(self, progress)
        file = Path(os.environ.get("BRIM_TEST_HANG") or "/nonexistent")
        if file.exists():
            file.unlink()
            ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps Python's lock: no other thread runs

    module.Attempt.tell = hanging


def patch_run(module):
    patch_attempt(module)
    patch_tell(module)


# The corner pixel of an image, and what it does to the batch that it is in.
POISON = {(250, 1, 2): "raise", (250, 1, 3): "memory", (250, 1, 4): "kill", (250, 1, 5): "hang"}


def patch_network(module):
    """Fail, end or hang in the forward of a batch with a marked image; larger batches pay."""
    run = module.InferenceNetwork.__call__

    def poisoned(self, images):
        marks = {POISON.get(tuple(corner)) for corner in images[:, :, 0, 0].tolist()}
        if "raise" in marks:
            raise RuntimeError("poison in the batch")
        if "memory" in marks and len(images) > 1:  # alone it fits
            raise module.torch.OutOfMemoryError("poison in the batch")
        if "kill" in marks:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in marks:
            time.sleep(1000)
        time.sleep(0.03)  # as if every batch had a price of its own: together is cheaper, on a busy machine too
        return run(self, images)

    module.InferenceNetwork.__call__ = poisoned


def patch_tiles(module):
    """Small windows."""
    module.DEFAULT_TILE = int(os.environ.get("BRIM_TEST_TILE") or module.DEFAULT_TILE)


def _note(what, job):
    file = os.environ.get("BRIM_TEST_NOTES")
    if not file:
        return
    others = [n["pid"] for n in _open_attempts(Path(file), job) if n["pid"] != os.getpid() and _is_same(n)]
    line = {"what": what, "job": job, "pid": os.getpid(), "began": _began(os.getpid()), "others": others}
    with Path(file).open("a") as notes:
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
    """Patches modules as they are imported."""

    patches = {  # noqa: RUF012
        "brim.jobs.worker.run": patch_run,
        "brim.segmentation.networks.network": patch_network,
        "brim.segmentation.config": patch_tiles,
    }

    def find_spec(self, name, path=None, target=None):
        if name not in self.patches:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.patches[name](module)

        spec.loader.exec_module = exec_module
        return spec


if any(os.environ.get(f"BRIM_TEST_{name}") for name in ("NOTES", "HANG", "POISON", "TILE")):
    sys.meta_path.insert(0, Finder())
if os.environ.get("BRIM_TEST_CLOCK"):
    shift_clock(Path(os.environ["BRIM_TEST_CLOCK"]))
