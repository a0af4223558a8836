"""`brim serve` as people run it, in a process of its own, to be killed, stopped and started again."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S, until

JOBS = "/api/training/jobs"
ENDED = ("completed", "failed", "cancelled", "paused")
HOOKS = str(Path(__file__).parent / "hooks")  # on PYTHONPATH of a service that a test changes from within
# Small and quick: short records, few to a shard.
QUICK = {"duration_s": 0.2, "samples_per_shard": 8}
SAMPLES = 120


class Serve:
    """A service on a free port over one data directory; `start` after `kill` is the next start of the same service."""

    def __init__(
        self, data: Path, *, database: str | None = None, workers: int = 1, dashboard: bool = False, **env: str
    ) -> None:
        self.data, self.database, self.workers, self.dashboard = data, database, workers, dashboard
        self.env = {
            "BRIM_LOG_LEVEL": "WARNING",
            "BRIM_MIN_FREE_BYTES": "1000000",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **env,
        }
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [HOOKS, os.environ.get("PYTHONPATH")]))
        self.port = 0  # the first start chooses one, which is kept
        self.token = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.log = data.with_name(f"{data.name}.log")

    # Processes

    def command(self) -> list[str]:
        made = [sys.executable, "-m", "brim", "serve", "--port", str(self.port), "--data", str(self.data)]
        made += ["--workers", str(self.workers), *([] if self.dashboard else ["--no-dashboard"])]
        return made + (["--database", self.database] if self.database else [])

    def start(self, *, ready: bool = True) -> "Serve":
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=log, env={**os.environ, **self.env}, process_group=0
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        assert line.startswith("http://"), f"no address, but {line!r}; {self.said()}"
        self.port = int(line.removeprefix("http://127.0.0.1:").partition("/")[0])
        self.token = line.partition("?token=")[2]
        if ready:
            until(lambda: self.try_status("/ready") == 200)
        return self

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    def children(self) -> dict[str, int]:
        """Numbers of the children by name: api, dashboard, predict, w0, w1 …"""
        assert self.process is not None
        found = {}
        for pid in children_of(self.process.pid):
            words = command_of(pid)
            if "brim.service.api.main" in words:
                found["api"] = pid
            elif "brim.service.dashboard.main" in words:
                found["dashboard"] = pid
            elif "brim.service.prediction.process.main" in words:
                found["predict"] = pid
            elif "brim.jobs.worker.main" in words:
                found[words[words.index("brim.jobs.worker.main") + 1]] = pid
        return found

    def kill(self) -> None:
        """`kill -9` of the supervisor; its children must end by themselves."""
        assert self.process is not None
        children = self.children().values()
        self.process.kill()
        self._bury()
        until(lambda: not any(is_running(pid) for pid in children))  # one may be within an fsync

    def kill_child(self, name: str) -> None:
        pid = self.children().get(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM, and its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self._bury()

    def close(self) -> None:
        if self.process is not None:
            self.kill()

    def _bury(self) -> int:
        assert self.process is not None
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    # Requests

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        sent = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        text = None if body is None else json.dumps(body)
        if text is not None:
            sent["Content-Type"] = "application/json"
        try:
            connection.request(method, path, text, sent)
            answer = connection.getresponse()
            read = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(read) if read.startswith((b"{", b"[")) else read.decode()

    def try_status(self, path: str) -> int | None:
        try:
            return self.ask("GET", path)[0]
        except (OSError, http.client.HTTPException):
            return None

    def get(self, path: str) -> Any:
        status, found = self.ask("GET", path)
        assert status == 200, found
        return found

    def submit(self, body: Mapping[str, Any], key: str | None = None) -> dict[str, Any]:
        status, job = self.ask("POST", JOBS, body, {"Idempotency-Key": key} if key else None)
        assert status == 202, job
        return dict(job)

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.get(f"{JOBS}/{job_id}"))

    def act(self, job_id: str, verb: str) -> dict[str, Any]:
        status, job = self.ask("POST", f"{JOBS}/{job_id}/{verb}")
        assert status == 202, job
        return dict(job)

    def wait(self, job_id: str, *statuses: str) -> dict[str, Any]:
        """The job once it has one of these statuses, or has ended."""
        last: dict[str, Any] = {}

        def is_there() -> bool:
            last.update(self.job(job_id))
            return last["status"] in (statuses or ENDED) or last["status"] == "failed"

        until(is_there, lambda: f"job is {last}; {self.said()}")
        assert not statuses or last["status"] in statuses, f"{last}; {self.said()}"
        return last

    def wait_progress(self, job_id: str, current: int) -> dict[str, Any]:
        """The job once it has come so far."""
        last: dict[str, Any] = {}

        def is_there() -> bool:
            last.update(self.job(job_id))
            return last["progress"]["current"] >= current or last["status"] in ENDED

        until(is_there, lambda: f"job is {last}; {self.said()}")
        return last

    def generate(self, samples: int, name: str = "made", key: str | None = None, **config: Any) -> dict[str, Any]:
        """A generation job in the words of the API's first form."""
        body = {"dataset_name": name, "num_samples": samples, "config": {**QUICK, **config}}
        return self.submit(body, key)

    def endless(self, name: str = "made") -> str:
        """A generation that does not end before a test has seen what it wants to, however slow the test is."""
        return str(self.generate(100_000, name)["id"])

    def cut(self, job_id: str, samples: int) -> dict[str, bytes]:
        """Cancel a generation once it has come so far; its shards."""
        self.wait_progress(job_id, samples)
        self.act(job_id, "cancel")
        self.wait(job_id, "cancelled")
        return shards(self.folder(job_id))

    def folder(self, job_id: str) -> Path:
        """Where a generation writes."""
        rows = self.get("/api/datasets")["datasets"]
        return self.data / "datasets" / next(row["id"] for row in rows if row["job_id"] == job_id)


def brim(*argv: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "brim", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


def shards(path: Path) -> dict[str, bytes]:
    """A dataset's shards, by name."""
    return {file.name: file.read_bytes() for file in sorted((path / "shards").iterdir()) if file.suffix != ".tmp"}


def children_of(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
