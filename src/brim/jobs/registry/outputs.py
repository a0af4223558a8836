"""What a job has made so far, read from its directory without the library that made it.

Asked when a job ends, stops or is given up, by workers and by the supervisor; the latter has no torch.
"""

import json
from pathlib import Path
from typing import Any

from brim.jobs.store import JobRow, Output
from brim.jobs.worker.disk import used_bytes

LAST = ("last", ".last.old")  # a checkpoint, and where it is between the two renames that replace it


def made(data: Path, job: JobRow) -> Output:
    """Items and bytes of a job's dataset, or steps of its run; items=0 where nothing is there."""
    out = data / job.out
    if job.makes == "dataset":
        manifest = _read(out / "manifest.json")
        shards = manifest.get("shards") or []
        num_bytes = sum(int(shard["bytes"]) for shard in shards)
        about = {"config": manifest.get("config"), "shards": len(shards)}  # as of datasets that people bring
        return Output(items=int(manifest.get("items", 0)), bytes=num_bytes, about=about)
    return made_run(out) if job.makes == "run" else Output(items=0)


def made_run(out: Path) -> Output:
    """Steps and bytes of the run in a directory; items=0 where nothing is there."""
    states = [state for file in _checkpoints(out) if (state := _read(file))]
    if not states:
        return Output(items=0)
    return Output(items=max(1, int(states[-1].get("step", 0))), bytes=used_bytes(out), about=_summary(states[-1]))


def _summary(state: dict[str, Any]) -> dict[str, Any]:
    best = state.get("best") or {}
    found = {"phase": state.get("phase"), "epoch": state.get("epoch"), "step": state.get("step")}
    return {**found, "best_val_loss": best.get("val_loss")}


def _checkpoints(out: Path) -> list[Path]:
    """State files of the last checkpoints of all phases, in the order in which they were written."""
    files = [file for name in LAST for file in out.glob(f"*/{name}/state.json")]
    return sorted(files, key=_written_at)


def _written_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # replaced meanwhile
        return 0.0


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; none where the file is not there or not whole."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
