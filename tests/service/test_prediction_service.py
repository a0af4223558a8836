"""`brim serve` with its prediction process and several API processes: who runs, with what share, and who dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from brim.cli.serve import default_api_processes
from waiting import PATIENCE_S, until

TOKEN = "a-token-of-a-test"


def children(process: "subprocess.Popen[str]", module: str) -> list[int]:
    """Numbers of those that run a module."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def share_of(pid: int) -> bytes:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(one for one in variables if one.startswith(b"BRIM_MEMORY_SHARE=")).partition(b"=")[2]


def test_api_processes_share_a_port_and_their_counters_and_one_may_die(tmp_path):
    options = ("--data", str(tmp_path / "data"), "--port", "0", "--api-processes", "2", "--predict-memory", "30%")
    env = {**os.environ, "BRIM_TOKEN": TOKEN, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "BRIM_TEST_EXEC": "1"}
    env["BRIM_PREPARED"] = "0"  # of a fork, /proc shows the environment of another process
    command = [sys.executable, "-m", "brim", "serve", *options]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    base = process.stdout.readline().strip()
    headers = {"Authorization": f"Bearer {TOKEN}", "Connection": "close"}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=PATIENCE_S) as client:
            until(lambda: client.get("/health").status_code == 200)
            apis = children(process, "brim.service.api.main")
            predictors = children(process, "brim.service.prediction.process.main")
            (worker,) = children(process, "brim.jobs.worker.main")
            asked = [client.get("/api/models").status_code for _ in range(20)]
            os.kill(apis[0], signal.SIGKILL)
            asked += [client.get("/api/models").status_code for _ in range(20)]

            assert len(apis) == 2
            assert [share_of(pid) for pid in (worker, *predictors)] == [b"0.7", b"0.3"]
            assert asked == [200] * 40
            until(lambda: len(children(process, "brim.service.api.main")) == 2)
            line = 'brim_http_requests_total{method="GET",route="/api/models",status="200"} 40.0'
            assert line in client.get("/metrics").text.splitlines()
            assert children(process, "brim.service.prediction.process.main") == predictors
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        process.stdout.close()


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (4, 1), (5, 1), (8, 3), (16, 6), (64, 6)])
def test_large_machines_have_several_api_processes(monkeypatch, cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))

    assert default_api_processes() == expected
