"""A real Ray head for tests, with ports of its own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from waiting import PATIENCE_S, until

TOKEN = "c" * 40


class Head(NamedTuple):
    gcs: int
    client: int


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", **more}


@contextmanager
def ray_head(**env: str) -> Iterator[Head]:
    """A head of its own ports, ended with everything it started."""
    head = Head(free_port(), free_port())
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-", ignore_cleanup_errors=True) as folder:  # short: sockets
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(head.gcs),
            "--ray-client-server-port", str(head.client), "--include-dashboard", "false", "--num-cpus", "1",
            "--object-store-memory", "80000000", "--temp-dir", folder, "--disable-usage-stats",
        ]  # fmt: skip
        log = Path(folder, "start.log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=environment(**env),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            wait_for(head.client, process, log)
            yield head
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE_S):
            return True
        return False

    until(lambda: process.poll() is not None or answers(), say=log.read_text)
    assert process.poll() is None, f"Ray did not start: {log.read_text()[-2000:]}"
