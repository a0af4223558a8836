"""A working directory whose changes are dropped: an overlay where the kernel allows one, else a copy if it is small.

This file is also run as a script, in a process of its own that becomes the watched command:
scratch.py UPPER WORK DIRECTORY COMMAND… mounts the overlay where only that process and its children see it.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COPY_BYTES, COPY_FILES = 200 << 20, 5000  # above either, nothing is copied
_NEWNS, _NEWUSER = 0x00020000, 0x10000000  # of unshare(2)
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where a command runs, and what happens to the files it writes."""

    kind: str  # overlay, copy or none
    original: Path
    directory: Path  # to run in
    prefix: tuple[str, ...] = ()  # of the command line

    @property
    def sentence(self) -> str:
        if self.kind == "none":
            return f"files that the script writes, in {self.original} or elsewhere, are written as always"
        return (
            f"files that the script writes below {self.original} are dropped afterwards; elsewhere it writes as always"
        )


@contextmanager
def scratch(directory: Path) -> Iterator[Scratch]:
    """A fresh scratch directory; removed at the end."""
    holder = Path(tempfile.mkdtemp(prefix="brim-why-", dir=_outside(directory)))
    try:
        yield _overlay(directory, holder) or _copy(directory, holder) or Scratch("none", directory, directory)
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def _outside(directory: Path) -> Path | None:
    """A temporary folder that is not below the directory: an overlay cannot hold its own changes."""
    for name in (tempfile.gettempdir(), "/var/tmp", "/dev/shm"):
        folder = Path(name).resolve()
        if folder.is_dir() and os.access(folder, os.W_OK) and not folder.is_relative_to(directory):
            return folder
    return None


def _overlay(directory: Path, holder: Path) -> Scratch | None:
    if directory == Path("/") or holder.is_relative_to(directory) or any(c in str(directory) for c in ":,\\"):
        return None
    upper, work = holder / "upper", holder / "work"
    upper.mkdir()
    work.mkdir()
    prefix = (sys.executable, "-I", "-S", __file__, str(upper), str(work), str(directory))
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return Scratch("overlay", directory, directory, prefix) if tried.returncode == 0 else None


def _copy(directory: Path, holder: Path) -> Scratch | None:
    num_bytes = num_files = 0
    for folder, _, names in os.walk(directory):
        num_files += len(names)
        num_bytes += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)  # noqa: PTH118
        if num_bytes > COPY_BYTES or num_files > COPY_FILES or holder.is_relative_to(directory):
            return None
    copy = holder / "copy"
    try:
        shutil.copytree(directory, copy, symlinks=True)
    except (OSError, shutil.Error):
        return None
    return Scratch("copy", directory, copy)


# In the process that becomes the command


def _enter(upper: str, work: str, directory: str, command: Sequence[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if user != 0 or libc.unshare(_NEWNS) != 0:
        if libc.unshare(_NEWUSER | _NEWNS) != 0:
            sys.exit(125)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    libc.mount(b"none", b"/", None, _PRIVATE, None)
    options = f"lowerdir={directory},upperdir={upper},workdir={work},userxattr"
    if libc.mount(b"overlay", directory.encode(), b"overlay", 0, options.encode()) != 0:
        sys.exit(125)
    os.chdir("/")
    os.chdir(directory)  # into the overlay
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    _enter(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
