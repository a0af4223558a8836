"""Simulated nodes of a Ray cluster, and waiting for what others do."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S

# Ray's client connection may take as long as a busy machine needs; what a killed client leaves is ended soon.
PATIENT = {
    "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": f"{PATIENCE_S:.0f}",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": f"{PATIENCE_S:.0f}",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": f"{PATIENCE_S:.0f}",
    "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "1",
}


class Nodes:
    """A cluster whose nodes come and go."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.client_port = int(probe.getsockname()[1])
        command = [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), str(self.client_port)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **PATIENT, **(env or {})},
        )
        self.address = str(self._hear())

    def add(self, **options: Any) -> int:
        """Another node; returns its number."""
        return int(self._ask("add", options))

    def kill(self, node: int) -> None:
        """As if its power failed."""
        self._ask("kill", node)

    def leave(self, node: int) -> None:
        """Take a node out, so that the others know at once."""
        self._ask("leave", node)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, what: str, value: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps([what, value]), file=self._process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue  # something of Ray's
        raise RuntimeError("the cluster's process ended")
