"""`brim serve` with its prediction process and several API processes: who runs, with what share, and who dies."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brim.cli.serve import default_api_processes
from waiting import PATIENCE_S, until

TOKEN = "a-token-of-a-test"


class Service:
    """One that runs."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process, self.url = process, url

    def get(self, path: str) -> tuple[int, bytes]:
        asked = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {TOKEN}"})
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read()

    def children(self, module: str) -> list[int]:
        """Numbers of those that run a module."""
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


@contextmanager
def serving(data: Path, *options: str) -> Iterator[Service]:
    command = [sys.executable, "-m", "brim", "serve", "--data", str(data), "--port", "0", *options]
    env = {**os.environ, "BRIM_TOKEN": TOKEN, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "BRIM_TEST_EXEC": "1"}
    env["BRIM_PREPARED"] = "0"  # of a fork, /proc shows the environment of another process
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        made = Service(process, process.stdout.readline().strip())
        until(lambda: made.get("/health")[0] == 200)
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        process.stdout.close()


def share_of(pid: int) -> str:
    variables = dict(item.partition(b"=")[::2] for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return variables[b"BRIM_MEMORY_SHARE"].decode()


def test_api_processes_share_a_port_and_their_counters_and_one_may_die(tmp_path):
    with serving(tmp_path / "data", "--api-processes", "2", "--predict-memory", "30%") as service:
        apis = service.children("brim.service.api.main")
        (predictor,) = service.children("brim.service.prediction.process.main")
        (worker,) = service.children("brim.jobs.worker.main")
        assert len(apis) == 2
        assert (share_of(worker), share_of(predictor)) == ("0.7", "0.3")

        asked = [service.get("/api/models")[0] for _ in range(20)]
        os.kill(apis[0], signal.SIGKILL)
        asked += [service.get("/api/models")[0] for _ in range(20)]

        assert asked == [200] * 40
        until(lambda: len(service.children("brim.service.api.main")) == 2)
        line = 'brim_http_requests_total{method="GET",route="/api/models",status="200"} '
        counted = [float(row.removeprefix(line)) for row in metrics(service) if row.startswith(line)]
        assert counted == [40.0]
        assert service.children("brim.service.prediction.process.main") == [predictor]


def metrics(service: Service) -> list[str]:
    status, text = service.get("/metrics")
    assert status == 200
    return text.decode().splitlines()


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (4, 1), (5, 1), (8, 3), (16, 6), (64, 6)])
def test_large_machines_have_several_api_processes(monkeypatch, cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))

    assert default_api_processes() == expected
