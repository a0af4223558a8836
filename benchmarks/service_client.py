"""A `brim serve` of a benchmark's own, and requests to it: no measuring here."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOBS = "/api/training/jobs"
QUICK = {"duration_s": 0.2, "samples_per_shard": 64}


@dataclass(frozen=True)
class Service:
    """A running service."""

    process: "subprocess.Popen[str]"
    data: Path
    port: int
    token: str

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What it answers; anything but success ends the benchmark."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise SystemExit(f"{method} {path}: {answer.status} {text.decode()}")
        return json.loads(text)

    def metrics(self, prefix: str) -> dict[str, float]:
        """What it counts, by name and labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {self.token}"})
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        pairs = (line.rpartition(" ") for line in lines if line.startswith(prefix))
        return {name: float(value) for name, _, value in pairs}

    def status(self, path: str) -> int:
        """How it answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            return connection.getresponse().status
        finally:
            connection.close()

    def generate(self, samples: int) -> str:
        """Submit a generation job; its id."""
        made = self.ask("POST", JOBS, {"dataset_name": "bench", "num_samples": samples, "config": QUICK})
        return str(made["id"])

    def children(self) -> dict[str, int]:
        """Process numbers: api, predict, w0 …"""
        found = {}
        words_of = {pid: _words(pid) for pid in _children(self.process.pid)}
        for pid, words in words_of.items():
            if "brim.service.api.main" in words:
                found["api"] = pid
            elif "brim.service.prediction.process.main" in words:
                found["predict"] = pid
            elif "brim.service.reader.main" in words:
                found["reader"] = pid
            elif "brim.service.run.prepared" in words:
                found["prepared"] = pid
            elif "brim.jobs.worker.main" in words:
                found[words[words.index("brim.jobs.worker.main") + 1]] = pid
        return found


@contextmanager
def serving(
    data: Path,
    database: str | None = None,
    *,
    workers: int = 1,
    dashboard: bool = False,
    arguments: Sequence[str] = (),
    **env: str,
) -> Iterator[Service]:
    """Start a service on a free port; ended with its children at the end."""
    command = [sys.executable, "-m", "brim", "serve", "--port", "0", "--data", str(data), "--workers", str(workers)]
    command += [*([] if dashboard else ["--no-dashboard"]), *(["--database", database] if database else []), *arguments]
    changed = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "BRIM_LOG_LEVEL": "WARNING", **env}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=changed) as process:
        try:
            assert process.stdout is not None
            address, _, token = process.stdout.readline().strip().partition("/?token=")
            service = Service(process, data, int(address.rpartition(":")[2]), token)
            while service.status("/ready") != http.client.OK:
                time.sleep(0.2)
            yield service
        finally:
            process.kill()


def pin(pid: int, cores: set[int]) -> None:
    """Keep all threads of a process, and those they start, on these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []
