"""Jobs without a service: both databases, worker processes, and what the API and the supervisor do about them."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from brim.errors import Conflict
from brim.jobs.durable import Queue, migrate
from brim.jobs.store import Catalogue, upgrade
from brim.jobs.worker import reconcile
from brim.jobs.worker.process import urls
from waiting import until

TOY = Path(__file__).with_name("toy_worker.py")


@dataclass(frozen=True)
class Asked:
    kind: str
    name: str
    config: dict


class Desk:
    """One data directory; workers that end are started again under their name as long as somebody waits here."""

    def __init__(self, data: Path, database: str | None = None, *, toy: bool = True, **env: str) -> None:
        self.data, self.database = data, database
        for name in ("datasets", "runs", "results", "jobs", "workers"):
            (data / name).mkdir(parents=True)
        jobs_url, catalogue_url = urls(data, database)
        upgrade(catalogue_url)
        migrate(jobs_url)
        self.catalogue, self.queue = Catalogue.open(catalogue_url), Queue(jobs_url)
        self.program = [str(TOY)] if toy else ["-m", "brim.jobs.worker.main"]
        self.env = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "BRIM_MIN_FREE_BYTES": "1000", **env}
        self.workers: dict[str, subprocess.Popen] = {}
        self.reconciler = reconcile.Reconciler(self.catalogue, self.queue, data)
        self._lifeline = os.pipe()
        self._beats: dict[str, int] = {}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
        for fd in (*self._lifeline, *self._beats.values()):
            os.close(fd)
        self.queue.close()
        self.catalogue.close()

    # What the API does

    def submit(
        self,
        kind: str = "toy.count",
        makes: str = "dataset",
        inputs: dict | None = None,
        name: str = "night run",
        **config,
    ) -> str:
        job, _ = self.catalogue.jobs.submit(Asked(kind, name, config), makes=makes, inputs=inputs or {})
        self.queue.submit(job.id)
        self.catalogue.jobs.move(job.id, "queued", of=["pending"])
        return job.id

    def stop(self, job_id: str, wanted: str = "cancel") -> None:
        assert self.catalogue.jobs.want(job_id, wanted)
        self.queue.cancel(job_id)

    def resume(self, job_id: str) -> None:
        failed = self.job(job_id).status == "failed"
        assert self.catalogue.jobs.want(job_id, "run")
        assert self.catalogue.jobs.move(job_id, "pending", of=["paused", "cancelled", "failed"])
        with suppress(Conflict):  # the queue may learn of a failure after the catalogue; then reconciling resumes it
            self.queue.resume(job_id, failed=failed)
            self.catalogue.jobs.move(job_id, "queued", of=["pending"])

    def job(self, job_id: str):
        found = self.catalogue.jobs.get(job_id)
        assert found is not None
        return found

    # What the supervisor does

    def start(self, name: str = "w0") -> subprocess.Popen:
        reading, beat = os.pipe()
        command = [sys.executable, *self.program, name, str(beat), str(self._lifeline[0])]
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=(beat, self._lifeline[0]), env={**os.environ, **self.env}
        )
        os.close(beat)
        if name in self._beats:
            os.close(self._beats[name])
        self._beats[name] = reading
        worker.stdin.write(json.dumps({"data": str(self.data), "database": self.database}).encode())
        worker.stdin.close()
        self.workers[name] = worker
        return worker

    def kill(self, name: str = "w0") -> None:
        self.workers[name].kill()
        self.workers[name].wait()

    def oversee(self) -> None:
        for name, worker in list(self.workers.items()):
            if (code := worker.poll()) is not None:
                self.reconciler.died(name, f"signal {-code}")
                self.start(name)
        for name in self.reconciler.once():
            self.kill(name)

    def until(self, job_id: str, *statuses: str):
        """The job, once it has one of these statuses."""
        return self.wait(lambda: self.job(job_id).status in statuses and self.job(job_id), job_id)

    def past(self, job_id: str, current: int):
        """The job, once it has come so far."""
        return self.wait(lambda: self.job(job_id).current >= current and self.job(job_id), job_id)

    def wait(self, found, job_id: str):
        """What is found, once it is; the supervisor looks after the workers meanwhile."""
        looked_s = 0.0

        def look():
            nonlocal looked_s
            value = found()
            if not value and time.monotonic() - looked_s > 0.5:
                self.oversee()
                looked_s = time.monotonic()
            return value

        return until(look, lambda: f"{self.job(job_id)}, {self.queue.states([job_id])}")

    # What is on disk

    def items(self, job_id: str) -> int:
        return json.loads((self.data / self.job(job_id).out / "manifest.json").read_text())["items"]

    def let_go(self, job_id: str) -> None:
        """Let a job go on that holds where its config says."""
        out = self.data / self.job(job_id).out
        out.mkdir(parents=True, exist_ok=True)
        (out / "go").touch()

    def marks(self, job_id: str) -> list[str]:
        return (self.data / self.job(job_id).out / "marks").read_text().splitlines()
