"""Limits and walls for processes that parse untrusted files: memory, CPU time, no network, no writing.

Walls are the kernel's: Landlock takes away writing, seccomp new sockets, programs and other processes. Where one is
missing (an old kernel, a container that forbids it, another processor) the process works without it; `brim doctor`
names them.
"""

import ctypes
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
from typing import Final

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # the same numbers on every processor
_LANDLOCK_VERSION: Final = 1  # flag: ask for the version
# execute, write and everything that makes or removes; without read_file (bit 2) and read_dir (bit 3)
_WRITES: Final = {1: 0b1_1111_1111_0011, 2: 0b11_1111_1111_0011, 3: 0b111_1111_1111_0011}
_LOAD, _EQUAL, _AT_LEAST, _ANSWER = 0x20, 0x15, 0x35, 0x06  # instructions of a filter
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | 1  # EPERM
# audit architecture; numbers of socket, connect, bind, execve, execveat, ptrace, kill, tkill, tgkill, rt_sigqueueinfo,
# rt_tgsigqueueinfo, process_vm_readv, process_vm_writev
_SYSCALLS: Final = {
    "x86_64": (0xC000003E, (41, 42, 49, 59, 322, 101, 62, 200, 234, 129, 297, 310, 311)),
    "aarch64": (0xC00000B7, (198, 203, 200, 221, 281, 117, 129, 130, 131, 138, 240, 270, 271)),
}
_IO_URING: Final = 425  # opens sockets without those calls; numbers from 424 on are the same on every processor
_PIDFD: Final = (424, 438)  # pidfd_send_signal, pidfd_getfd


def limit(memory_bytes: int, cpu_s: float) -> None:
    """Allow so much memory and CPU time from now on; beyond, allocations fail and the process is killed."""
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123  # many times a second
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    _soft(resource.RLIMIT_AS, mapped_bytes + memory_bytes)
    _soft(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + cpu_s) + 1)


def _soft(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def confine(*, may_write: bool = False) -> list[str]:
    """Drop, irrevocably, every right that parsing a file does not need; returns those the kernel could drop."""
    if sys.platform != "linux":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    walls = []
    if not may_write and _read_only(libc):
        walls.append("read-only files")
    if _no_network(libc):
        walls.append("no network")
    return walls


def _read_only(libc: ctypes.CDLL) -> bool:
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    if version < 1:
        return False
    rights = ctypes.create_string_buffer(struct.pack("<Q", _WRITES[min(version, 3)]), 8)
    ruleset = libc.syscall(_LANDLOCK_CREATE, rights, 8, 0)
    if ruleset < 0:
        return False
    try:
        return bool(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)  # no rules: nothing may be written
    finally:
        os.close(ruleset)


def no_internet() -> bool:
    """Take away sockets other than local ones, for good; programs and writing stay. Whether the kernel could do it."""
    if platform.machine() not in _SYSCALLS:
        return False
    _, (socket_number, *_) = _SYSCALLS[platform.machine()]
    domain, families = (_LOAD, 0, 0, 16), (socket.AF_INET, socket.AF_INET6)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return _filter(
        libc,
        [
            (_EQUAL, 5, 0, _IO_URING),
            (_EQUAL, 0, 3, socket_number),
            domain,
            (_EQUAL, 2, 0, int(families[0])),
            (_EQUAL, 1, 0, int(families[1])),
        ],
    )


def _no_network(libc: ctypes.CDLL) -> bool:
    if platform.machine() not in _SYSCALLS:
        return False
    numbers = (*_SYSCALLS[platform.machine()][1], _IO_URING, *_PIDFD)
    return _filter(libc, [(_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)])


def _filter(libc: ctypes.CDLL, checks: list[tuple[int, int, int, int]]) -> bool:
    """Install a seccomp filter; checks see the number of the system call and jump past their end to deny it."""
    deny = len(checks) + 2  # instructions to the last one
    head = [(_LOAD, 0, 0, 4), (_EQUAL, 0, deny + 1, _SYSCALLS[platform.machine()][0])]
    head += [(_LOAD, 0, 0, 0), (_AT_LEAST, deny - 1, 0, 1 << 30)]
    program = [*head, *checks, (_ANSWER, 0, 0, _ALLOW), (_ANSWER, 0, 0, _DENY)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *one) for one in program))
    packed = struct.pack("@HP", len(program), ctypes.addressof(code))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(packed), 0, 0) == 0)


def available() -> list[str]:
    """What `confine` can take away on this machine, tried in another process."""
    code = "from brim.jobs.sandbox import confine; print(*confine(), sep=', ')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return [wall for wall in done.stdout.strip().split(", ") if wall]
