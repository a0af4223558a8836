"""A worker that knows one more kind, toy.count: counts items into a manifest, and misbehaves as its config says.

It has no device and does without torch, whose import would be most of its life: tests start it again and again.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from brim.errors import ConfigError
from brim.jobs.kinds import KINDS, JobConfig, Kind, Stopped, Task
from brim.jobs.status import Flow, JobProgress
from brim.jobs.worker.main import main as worker


def run(task: Task) -> dict[str, object]:
    config, out = task.spec.config, task.out
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mark(out, "overlap", 0)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return count(task, config, out)
    finally:
        os.close(lock)


def count(task: Task, config: dict[str, Any], out: Path) -> dict[str, object]:
    manifest = out / "manifest.json"
    done = json.loads(manifest.read_text())["items"] if manifest.exists() else 0
    mark(out, "open", done)
    while done < config["items"]:
        if task.stop():
            mark(out, "stop", done)
            raise Stopped
        if done == config.get("fail_at") and not (out / "mended").exists():
            raise ConfigError(f"{manifest}: item {done} cannot be made; read {Path.home()}/notes.txt")
        if done == config.get("hold_at") and not (out / "go").exists():
            time.sleep(0.02)
            continue
        if done == config.get("break_at"):
            raise ZeroDivisionError(f"within {out}")
        if done == config.get("die_at"):
            os.abort()
        time.sleep(config.get("every_s", 0.02))
        done += 1
        new = manifest.with_suffix(".new")
        new.write_text(json.dumps({"items": done, "complete": done == config["items"]}))
        new.replace(manifest)
        flow = Flow(seconds=done / 10, waiting={"data": done / 40})  # a quarter of the time
        task.report(JobProgress(current=done, total=config["items"], message="counting", flow=flow))
    mark(out, "end", done)
    return {"counted": done, "dataset_id": out.name, "where": str(out)}


def mark(out: Path, what: str, done: int) -> None:
    with (out / "marks").open("a") as file:
        file.write(f"{what} {done} {os.getpid()}\n")


TOY = Kind(
    name="toy.count",
    title="Count",
    description="Count items.",
    makes="dataset",
    reads=None,
    config=JobConfig,
    run=run,
    estimate_bytes=lambda spec, inputs: spec.config.get("bytes", 0),
)


def do_without_torch() -> None:
    """Put what a worker asks of its device in the place of the room that brings torch."""
    device = ModuleType("brim.engine.device")
    vars(device).update(
        resolve_device=lambda name: SimpleNamespace(type="cpu"),
        describe=lambda device: {"device": "cpu"},
        gpu_uuid=lambda device: None,
        keep_to_share=lambda device: None,
    )
    sys.modules[device.__name__] = device


if __name__ == "__main__":
    do_without_torch()
    KINDS["toy.count"] = TOY
    sys.exit(worker(sys.argv[1:]))
