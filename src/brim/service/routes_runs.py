"""Training runs: what was trained, with what, and how its loss went."""

import json
from collections import deque
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from brim.service import shapes
from brim.service.context import Here
from brim.service.openapi import Id, PageNumber, refusals

router = APIRouter(prefix="/api/runs", tags=["runs"])

METRICS = "metrics.jsonl"
NUM_LINES = 200
_TAIL_BYTES = 1024**2  # of a file that may have grown for days


@router.get("", response_model=shapes.RunPage, responses=refusals(422, 503), summary="List runs, newest first")
def list_runs(here: Here, page: PageNumber = 1) -> shapes.RunPage:
    """50 a page."""
    found = here.catalogue.runs.page(page=page or 1)
    runs = [shapes.run(row, here.redact) for row in found.rows]
    return shapes.RunPage(runs=runs, page=found.page, pages=found.pages, total=found.total)


@router.get("/{id}", response_model=shapes.RunDetail, responses=refusals(404, 503), summary="Show a run")
def show_run(id: Id, here: Here) -> shapes.RunDetail:
    """One run with the last 200 lines of its metrics; those of a run in several phases say which."""
    row = here.run(id)
    metrics = shapes.redacted(read_metrics(here.settings.data / row.path), here.redact)
    return shapes.RunDetail(**shapes.run(row, here.redact).model_dump(), metrics=metrics)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The last lines of a run's metrics, phase by phase in the order they were written; none while there are none."""
    files = [run / METRICS] if (run / METRICS).is_file() else sorted(run.glob(f"*/{METRICS}"), key=_written)
    lines: deque[dict[str, Any]] = deque(maxlen=NUM_LINES)
    for file in files:
        phase = {} if file.parent == run else {"phase": file.parent.name}
        lines.extend({**phase, **line} for line in _last_lines(file))
    return list(lines)


def _written(file: Path) -> float:
    return file.stat().st_mtime


def _last_lines(file: Path) -> list[dict[str, Any]]:
    try:
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, 2) - _TAIL_BYTES)
            opened.seek(start)
            tail = opened.read().splitlines()[1 if start else 0 :]  # the first may be cut
    except OSError:
        return []
    found = []
    for line in tail[-NUM_LINES:]:
        try:
            value = json.loads(line)
        except ValueError:
            continue  # being written
        if isinstance(value, dict):
            found.append(value)
    return found
