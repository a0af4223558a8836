"""Unix sockets for this user alone, in folders of any length."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """A short name for a socket in any folder: the kernel takes no more than 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Listen at a path; a file that another process left is replaced."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, kind)
    before = os.umask(0o177)
    try:
        with short_name(path) as name:
            listening.bind(name)
    finally:
        os.umask(before)
    listening.listen(64)
    return listening
