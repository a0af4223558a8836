"""Processes that parse files of strangers: what the kernel takes away from them, and how much they may use."""

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from brim.errors import BrimError
from brim.jobs import sandbox
from brim.jobs.decoding import ConfinedReader
from brim.jobs.measuring import measure_confined
from brim.segmentation.config import ImagePlanes
from waiting import until

MIB = 2**20
HAS_LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1  # its version
# Linux's tables of system calls: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h
DENIED = {
    "x86_64": {
        "socket": 41, "connect": 42, "bind": 49, "execve": 59, "kill": 62, "ptrace": 101, "tkill": 200, "tgkill": 234,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "process_vm_readv": 310, "process_vm_writev": 311,
        "execveat": 322, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438,
    },
    "aarch64": {
        "socket": 198, "connect": 203, "bind": 200, "execve": 221, "kill": 129, "ptrace": 117, "tkill": 130,
        "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "process_vm_readv": 270,
        "process_vm_writev": 271, "execveat": 281, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438,
    },
}.get(platform.machine(), {})  # fmt: skip
needs_seccomp = pytest.mark.skipif(
    not DENIED or "Seccomp:" not in Path("/proc/self/status").read_text(), reason="no seccomp on this machine"
)


def apart(act: Callable[[], object]) -> object:
    """What something says in a fork of its own, which it may confine."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def error_of(call: Callable[[], object]) -> int:
    """The number of the system's error; 0 for none."""
    try:
        call()
    except OSError as failure:
        return failure.errno or -1
    return 0


def error_of_syscall(number: int) -> int:
    """Of a call without sensible arguments: not permitted, or wrong in some way."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(number, -1, 0, 0, 0, 0, 0) < 0 else 0


@needs_seccomp
def test_a_confined_process_can_neither_connect_nor_start_programs_nor_touch_others():
    def act():
        assert "no network" in sandbox.confine()
        return {name: error_of_syscall(number) for name, number in DENIED.items()}

    assert apart(act) == dict.fromkeys(DENIED, errno.EPERM)


@pytest.mark.skipif(not HAS_LANDLOCK, reason="this kernel has no Landlock")
@pytest.mark.parametrize("may_write", [False, True])
def test_a_confined_process_reads_files_and_writes_none_unless_it_may(tmp_path, may_write):
    (tmp_path / "there").write_text("read me")

    def act():
        sandbox.confine(may_write=may_write)
        made = [lambda: (tmp_path / "new").touch(), (tmp_path / "folder").mkdir, (tmp_path / "there").unlink]
        return [(tmp_path / "there").read_text(), [error_of(call) for call in made]]

    text, errors = apart(act)

    assert text == "read me"
    assert errors == [0 if may_write else errno.EACCES] * 3
    assert (tmp_path / "there").exists() != may_write


@needs_seccomp
def test_a_process_without_the_internet_keeps_local_sockets_and_programs(tmp_path):
    import socket

    def act():
        assert sandbox.no_internet()
        families = [socket.AF_INET, socket.AF_INET6, socket.AF_UNIX]
        errors = [error_of(lambda family=family: socket.socket(family).close()) for family in families]
        return [errors, error_of_syscall(425), os.system("true"), error_of((tmp_path / "new").touch)]

    assert apart(act) == [[errno.EPERM, errno.EPERM, 0], errno.EPERM, 0, 0]


def test_limits_are_of_what_comes_on_top_and_never_above_the_systems():
    def act():
        limits = lambda what: resource.getrlimit(what)[0]  # noqa: E731
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        sandbox.limit(64 * MIB, 100.0)
        sandbox.confine()
        found = [limits(resource.RLIMIT_AS) - mapped, limits(resource.RLIMIT_CPU) - used_s]
        found.append(error_of(lambda: mmap.mmap(-1, 128 * MIB)))  # not of the heap, which may have room
        hard = resource.getrlimit(resource.RLIMIT_CPU)[0]
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        sandbox.limit(64 * MIB, 1000.0)
        return [*found, limits(resource.RLIMIT_CPU) == hard, limits(resource.RLIMIT_CORE)]

    memory, cpu_s, *others = apart(act)

    assert memory == pytest.approx(64 * MIB, abs=4 * MIB)
    assert cpu_s == pytest.approx(100.5, abs=1)
    assert others == [errno.ENOMEM, True, 0]


# Who is confined


def status_of(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


def limits_of(pid: int) -> tuple[int, int]:
    """Seconds of the processor and bytes of memory that a process may use."""
    rows = {line[:25].strip(): line[25:].split()[0] for line in Path(f"/proc/{pid}/limits").read_text().splitlines()}
    return int(rows["Max cpu time"]), int(rows["Max address space"])


def waiting(module: str) -> set[int]:
    """Processes of a module that wait for the other end of a FIFO."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            waits = any(place.read_text() == "wait_for_partner" for place in folder.glob("task/*/wchan"))
            if waits and module in (folder / "cmdline").read_text():
                found.add(int(folder.name))
    return found


@needs_seccomp
@pytest.mark.parametrize(("module", "cpu_s", "num_bytes"), [("decoding", 10, 512 * MIB), ("measuring", 86400, 2**33)])
def test_files_of_strangers_are_opened_behind_the_walls(tmp_path, module, cpu_s, num_bytes):
    """The file is a FIFO: whoever opens it waits, and is looked at meanwhile."""
    fifo = tmp_path / "a.wav"
    os.mkfifo(fifo)
    images, before = ConfinedReader(), waiting(f"brim.jobs.{module}")

    def read():
        with suppress(BrimError):
            if module == "decoding":
                images.load(fifo, 100, "a", ImagePlanes())
            else:
                measure_confined(tmp_path, {}, None, lambda done, total: None)

    thread = threading.Thread(target=read)
    thread.start()
    (pid,) = until(lambda: waiting(f"brim.jobs.{module}") - before)
    status, (allowed_s, allowed_bytes) = status_of(pid), limits_of(pid)
    while thread.is_alive():  # however often it is opened
        with suppress(OSError):
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        thread.join(0.05)
    images.close()

    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    assert cpu_s <= allowed_s <= cpu_s + 60  # on top of what it used before
    assert num_bytes < allowed_bytes < num_bytes + 2**33  # on top of what its libraries map
