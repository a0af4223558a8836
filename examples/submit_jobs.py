"""Submit jobs to a service using only the standard library: generate a dataset, train on it, evaluate the run.

python examples/submit_jobs.py [DIR]     starts its own `brim serve` on DIR for half a minute, then stops it
BRIM_URL=http://host:8000 BRIM_TOKEN=… python examples/submit_jobs.py     uses a running service
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
SETTINGS = {"duration_s": 0.2, "tx_power_dbm": 37.0}  # short records keep the example fast


@dataclass(frozen=True)
class Service:
    """A service and its token."""

    url: str
    token: str

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request and return the JSON response; errors end the program with their message."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{method} {path}: {json.load(error)['detail']}") from error

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Submit a job, wait for it and return its result; jobs survive killed workers, so nothing needs a retry."""
        job = self.ask("POST", JOBS, request)
        while job["status"] not in ("completed", "failed", "cancelled", "paused"):
            time.sleep(0.5)
            job = self.ask("GET", f"{JOBS}/{job['id']}")
        if job["status"] != "completed":
            raise SystemExit(f"{job['name']}: {job['status']}, {job['error']}")
        print(f"{job['kind']} completed in attempt {job['attempts']}: {job['name']}")
        result: dict[str, Any] = job["result"]
        return result


def main(data: str) -> None:
    """Generate two datasets, train on one and evaluate on the other."""
    with running(data) as service:
        generation = {"num_samples": 40, "config": SETTINGS}
        train_id = service.run({"dataset_name": "to train on", **generation})["dataset_id"]
        other = {**SETTINGS, "seed": 1}
        test_id = service.run({"dataset_name": "held out", "num_samples": 20, "config": other})["dataset_id"]

        training = {"dataset_ids": [train_id], "epochs": 3, "batch_size": 16}
        run_id = service.run({"job_name": "locator", "config": training})["run_id"]

        evaluation = {"run_id": run_id, "dataset_ids": [test_id]}
        scores = service.run({"kind": "rf.evaluate", "name": "evaluation", "config": evaluation})["metrics"]
        print(f"median error {scores['median_error_m']:.0f} m, {scores['crlb_ratio']:.2f} times the bound")


@contextmanager
def running(data: str) -> Iterator[Service]:
    """The service at BRIM_URL, or a new one that stops at the end of the block."""
    if url := os.environ.get("BRIM_URL"):
        yield Service(url.rstrip("/"), os.environ["BRIM_TOKEN"])
        return
    command = [sys.executable, "-m", "brim", "serve", "--data", data, "--port", "0", "--predict-memory", "0"]
    quiet = {**os.environ, "BRIM_LOG_LEVEL": "WARNING"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().strip())  # it prints one line: the address with the token
            yield Service(f"http://{address.netloc}", parse_qs(address.query)["token"][0])
        finally:
            process.send_signal(
                signal.SIGINT
            )  # running jobs would stop at their next batch and continue at the next start


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "service-example")
