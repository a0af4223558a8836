"""Jobs of a service from Python, with the standard library alone: generate a dataset, train on it, evaluate the run.

python examples/submit_jobs.py [DIR]     starts a `brim serve` of its own on DIR for half a minute, and stops it
BRIM_URL=http://host:8000 BRIM_TOKEN=… python examples/submit_jobs.py     takes one that runs
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

JOBS = "/api/training/jobs"
SETTINGS = {"duration_s": 0.2, "tx_power_dbm": 37.0}  # short records: this is to be quick


@dataclass(frozen=True)
class Service:
    """One service and the token that opens it."""

    url: str
    token: str

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """What the service answers; its refusals are sentences."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            raise SystemExit(f"{method} {path}: {json.load(refusal)['detail']}") from refusal

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Submit a job, wait for it, and give its result; killed workers go on, so there is nothing to retry."""
        submitted = self.ask("POST", JOBS, job)
        while True:
            found = self.ask("GET", f"{JOBS}/{submitted['id']}")
            if found["status"] in ("completed", "failed", "cancelled", "paused"):
                break
            time.sleep(0.5)
        if found["status"] != "completed":
            raise SystemExit(f"{found['name']}: {found['status']}, {found['error']}")
        print(f"{found['kind']} completed in attempt {found['attempts']}: {found['name']}")
        result: dict[str, Any] = found["result"]
        return result


def main(data: str) -> None:
    """Three jobs, each on what the one before made."""
    with running(data) as service:
        generation = {"num_samples": 40, "config": SETTINGS}
        train_id = service.run({"dataset_name": "to train on", **generation})["dataset_id"]
        other = {**SETTINGS, "seed": 1}
        test_id = service.run({"dataset_name": "held out", "num_samples": 20, "config": other})["dataset_id"]

        training = {"dataset_ids": [train_id], "epochs": 3, "batch_size": 16}
        run_id = service.run({"job_name": "locator", "config": training})["run_id"]

        asked = {"run_id": run_id, "dataset_ids": [test_id]}
        scores = service.run({"kind": "rf.evaluate", "name": "how good it is", "config": asked})["metrics"]
        print(f"median error {scores['median_error_m']:.0f} m, {scores['crlb_ratio']:.2f} times the bound")


@contextmanager
def running(data: str) -> Iterator[Service]:
    """The service that BRIM_URL names, or one of our own that ends with the block."""
    if url := os.environ.get("BRIM_URL"):
        yield Service(url.rstrip("/"), os.environ["BRIM_TOKEN"])
        return
    command = [sys.executable, "-m", "brim", "serve", "--data", data, "--port", "0", "--predict-memory", "0"]
    quiet = {**os.environ, "BRIM_LOG_LEVEL": "WARNING"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().strip())  # the one line it prints: the address, and the token
            yield Service(f"http://{address.netloc}", parse_qs(address.query)["token"][0])
        finally:
            process.send_signal(signal.SIGINT)  # jobs that run would stop at their next batch, and go on next time


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "service-example")
