"""Jobs run without a service: a task with hooks that remember, and a stop that comes when a test says so."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from brim.jobs.kinds import Inputs, Stopped, Task, read_body
from brim.jobs.status import JobProgress
from brim.jobs.worker import member

SECOND = 1.5  # that a job may be silent for


class Watched:
    """One attempt at a job on the CPU; `stop_when` sees every word of it."""

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
        self.told: list[tuple[float, JobProgress]] = []
        self.computed_s: list[float] = []  # by the process until each word
        self.stopped_s: float | None = None
        self._stop_when = stop_when
        self._task = Task(
            spec=self.spec, inputs=self.inputs, out=out, device="cpu", batch_sizes=out.parent / "batch_sizes.json",
            tell=self._tell, stop=lambda: self.stopped_s is not None, cluster=cluster,
        )  # fmt: skip

    def _tell(self, progress: JobProgress) -> None:
        self.computed_s.append(time.process_time())
        self.told.append((time.monotonic(), progress))
        if self._stop_when is not None and self.stopped_s is None and self._stop_when(progress):
            self.stopped_s = time.monotonic()

    def run(self) -> dict | None:
        """The result; None when it was stopped."""
        self.told.append((time.monotonic(), JobProgress()))
        self.computed_s.append(time.process_time())
        try:
            result = member.run(self._task)
        except Stopped:
            return None
        finally:
            self.told.append((time.monotonic(), self.told[-1][1]))
            self.computed_s.append(time.process_time())
        json.dumps(result, allow_nan=False)  # as a database keeps it
        assert str(self._task.out.parent) not in json.dumps(result), "a path of this machine in a result"
        return result

    @property
    def longest_silence_s(self) -> float:
        """Between two words, by the clock or by what the process computed, whichever is less."""
        times = [when for when, _ in self.told]
        gaps = [[b - a for a, b in pairwise(series)] for series in (times, self.computed_s)]
        return max(map(min, *gaps))

    @property
    def seconds_to_stop(self) -> float:
        """From the wish to the end."""
        assert self.stopped_s is not None
        return self.told[-1][0] - self.stopped_s

    @property
    def currents(self) -> list[int]:
        """How far it was, word by word."""
        return [progress.current for _, progress in self.told[1:-1]]


def digests(folder: Path, pattern: str) -> dict[str, str]:
    """Checksums of files, by their place below a folder."""
    files = sorted(folder.glob(pattern))
    assert files, f"{folder} has nothing like {pattern}"
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
