"""Jobs run without a service: a task with hooks that remember, and a stop that comes when a test says so."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from brim.engine.training import trainer
from brim.jobs.kinds import Inputs, Stopped, Task, read_body
from brim.jobs.status import JobProgress
from brim.jobs.worker import member


class Watched:
    """One attempt at a job on the CPU; `stop_when` sees every word of it, of a training in this process each step."""

    def __init__(
        self,
        kind: str,
        out: Path,
        config: dict,
        *,
        datasets: Sequence[Path] = (),
        run: Path | None = None,
        stop_when: Callable[[JobProgress], bool] | None = None,
        cluster: str | None = None,
    ) -> None:
        ids = {"dataset_ids": [path.name for path in datasets]} if datasets else {}
        ids |= {"run_id": run.name} if run is not None else {}
        self.spec = read_body({"kind": kind, "name": "a test", "config": ids | config})
        self.inputs = Inputs(datasets=tuple(datasets), run=run)
        self.told: list[JobProgress] = []
        self.stopped_at: JobProgress | None = None
        self._stop_when = stop_when
        self._task = Task(
            spec=self.spec, inputs=self.inputs, out=out, device="cpu", batch_sizes=out.parent / "batch_sizes.json",
            tell=self._tell, stop=lambda: self.stopped_at is not None, cluster=cluster,
        )  # fmt: skip

    def _tell(self, progress: JobProgress) -> None:
        self.told.append(progress)
        if self._stop_when is not None and self.stopped_at is None and self._stop_when(progress):
            self.stopped_at = progress

    def run(self) -> dict | None:
        """The result; None when it was stopped."""
        try:
            with patch.object(trainer, "PROGRESS_S", 0.0):
                result = member.run(self._task)
        except Stopped:
            return None
        json.dumps(result, allow_nan=False)  # as a database keeps it
        assert str(self._task.out.parent) not in json.dumps(result), "a path of this machine in a result"
        return result

    @property
    def steps_after_stop(self) -> int:
        """How far it went after it was asked to stop."""
        assert self.stopped_at is not None
        return self.told[-1].current - self.stopped_at.current

    @property
    def currents(self) -> list[int]:
        """How far it was, word by word."""
        return [progress.current for progress in self.told]


def digests(folder: Path, pattern: str) -> dict[str, str]:
    """Checksums of files, by their place below a folder."""
    files = sorted(folder.glob(pattern))
    assert files, f"{folder} has nothing like {pattern}"
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
