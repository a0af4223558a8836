"""The two bodies of the contract, word for word, sent by curl to a running service."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from fault_service import JOBS, Serve

from waiting import PATIENCE_S, until

GENERATION = """{"dataset_name": "gpu_batch_test", "num_samples": 10000, "dataset_type": "feature_based", "config": \
{"frequency_mhz": 145.0, "tx_power_dbm": 30.0, "min_snr_db": 3.0, "max_gdop": 100.0}}"""
TRAINING = """{"job_name": "GPU Cache Test", "config": {"dataset_ids": ["…"], "batch_size": 256, "epochs": 1000, \
"learning_rate": 0.001, "preload_to_gpu": true, "accelerator": "auto"}}"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    made = Serve(tmp_path / "data")
    try:
        yield made.start()
    finally:
        made.close()


def curl(serve: Serve, path: str, body: str | None = None, *more: str) -> Any:
    given = [] if body is None else ["-H", "Content-Type: application/json", "-d", body]
    command = ["curl", "-sS", "--fail-with-body", "-H", f"Authorization: Bearer {serve.token}", *given, *more]
    done = subprocess.run([*command, f"http://127.0.0.1:{serve.port}{path}"], capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_both_bodies_run_as_they_stand(serve):
    generation = curl(serve, JOBS, GENERATION)
    until(lambda: curl(serve, f"{JOBS}/{generation['id']}")["progress"]["current"] >= 40)
    curl(serve, f"{JOBS}/{generation['id']}/cancel", None, "-X", "POST")
    until(lambda: curl(serve, f"{JOBS}/{generation['id']}")["status"] == "cancelled")
    (dataset,) = curl(serve, "/api/datasets")["datasets"]
    assert (dataset["name"], dataset["state"]) == ("gpu_batch_test", "partial")
    assert 40 <= dataset["items"] < 10000

    training = curl(serve, JOBS, TRAINING.replace("…", dataset["id"]))
    assert (training["name"], training["config"]["epochs"]) == ("GPU Cache Test", 1000)
    until(lambda: curl(serve, f"{JOBS}/{training['id']}")["progress"]["current"] >= 3)
    curl(serve, f"{JOBS}/{training['id']}/pause", None, "-X", "POST")
    until(lambda: curl(serve, f"{JOBS}/{training['id']}")["status"] == "paused")
    (run,) = curl(serve, "/api/runs")["runs"]
    assert (run["name"], run["state"]) == ("GPU Cache Test", "partial")
