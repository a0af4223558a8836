"""What a job has written so far, and the files beside its result; read without the workload that wrote them.

Used when a job ends, stops or is given up, by workers and by the supervisor, which has no torch.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from brim.errors import StorageError
from brim.jobs.store import JobRow, Output, to_json
from brim.jobs.worker.disk import used_bytes

ERRORS: Final = "errors.json"  # of rf.evaluate: estimated and true positions
EMBEDDING: Final = "embedding.json"  # of sequence.evaluate: sequences as points in the plane
LAST: Final = ("last", ".last.old")  # a checkpoint, and where it is between the two renames that replace it

_log = logging.getLogger("brim.jobs")


def output_of(data: Path, job: JobRow) -> Output:
    """Items and bytes of a job's dataset, or steps of its run; items=0 if nothing was written.

    Whatever its files hold, this never fails: people must be able to stop a job, and other jobs to go on.
    """
    if job.makes == "result":
        return Output(items=0)
    try:
        return _dataset_output(data / job.out) if job.makes == "dataset" else run_output(data / job.out)
    except Exception as failure:
        _log.warning("what job %s has written cannot be read: %s: %s", job.id, type(failure).__name__, failure)
        return Output(items=None)


def _dataset_output(out: Path) -> Output:
    try:
        manifest = json.loads((out / "manifest.json").read_bytes())
    except FileNotFoundError:
        return Output(items=0)
    shards = manifest.get("shards") or []
    num_bytes = sum(_count(shard["bytes"]) for shard in shards)
    about = {"config": manifest.get("config"), "shards": len(shards)}  # as of datasets that people bring
    return Output(items=_count(manifest["items"]), bytes=num_bytes, about=about)


def run_output(out: Path) -> Output:
    """Steps and bytes of the run in a directory; items=0 if there is none."""
    files = [file for name in LAST for file in out.glob(f"*/{name}/state.json")]  # the last checkpoints of all phases
    states = [state for file in sorted(files, key=_written_at) if (state := read_json(file))]
    if not states:
        return Output(items=0)
    state = states[-1]
    about = {name: state.get(name) for name in ("phase", "epoch", "step")}
    about["best_val_loss"] = (state.get("best") or {}).get("val_loss")
    return Output(items=max(1, _count(state.get("step", 0))), bytes=used_bytes(out), about=about)


def _count(value: Any) -> int:
    """A count that databases can hold."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:60]} is no count")
    return value


def _written_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # replaced meanwhile
        return 0.0


# JSON files


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all, creating its folder."""
    unfinished = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(to_json(value) + "\n", encoding="utf-8")
        unfinished.replace(file)
    except OSError as failure:
        raise StorageError(f"{file.name}: cannot write, {failure.strerror or failure}; free some space") from failure


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where the file is missing or damaged."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
