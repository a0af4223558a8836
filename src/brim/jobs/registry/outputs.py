"""What a job has written so far, and the files beside its result; read without the workload that wrote them.

Used when a job ends, stops or is given up, by workers and by the supervisor, which has no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from brim.errors import StorageError
from brim.jobs.store import JobRow, Output, to_json
from brim.jobs.worker.disk import used_bytes

ERRORS: Final = "errors.json"  # of rf.evaluate: estimated and true positions
EMBEDDING: Final = "embedding.json"  # of sequence.evaluate: sequences as points in the plane
LAST: Final = ("last", ".last.old")  # a checkpoint, and where it is between the two renames that replace it


def output_of(data: Path, job: JobRow) -> Output:
    """Items and bytes of a job's dataset, or steps of its run; items=0 if nothing was written."""
    out = data / job.out
    if job.makes == "dataset":
        manifest = read_json(out / "manifest.json") or {}
        shards = manifest.get("shards") or []
        num_bytes = sum(int(shard["bytes"]) for shard in shards)
        about = {"config": manifest.get("config"), "shards": len(shards)}  # as of datasets that people bring
        return Output(items=int(manifest.get("items", 0)), bytes=num_bytes, about=about)
    return run_output(out) if job.makes == "run" else Output(items=0)


def run_output(out: Path) -> Output:
    """Steps and bytes of the run in a directory; items=0 if there is none."""
    states = [state for file in _checkpoints(out) if (state := read_json(file))]
    if not states:
        return Output(items=0)
    return Output(items=max(1, int(states[-1].get("step", 0))), bytes=used_bytes(out), about=_summary(states[-1]))


def _summary(state: dict[str, Any]) -> dict[str, Any]:
    best = state.get("best") or {}
    place = {"phase": state.get("phase"), "epoch": state.get("epoch"), "step": state.get("step")}
    return {**place, "best_val_loss": best.get("val_loss")}


def _checkpoints(out: Path) -> list[Path]:
    """State files of the last checkpoints of all phases, in the order in which they were written."""
    files = [file for name in LAST for file in out.glob(f"*/{name}/state.json")]
    return sorted(files, key=_written_at)


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
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
