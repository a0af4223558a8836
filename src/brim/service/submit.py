"""From a request to a job in the queue: read, checked against what is there and what fits, noted, queued.

The catalogue first, then the queue: whoever is killed in between leaves a pending job that reconciling queues.
"""

import hashlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import CheckpointError, Conflict, DatasetError, FieldConflict, ImageError, NotFound, Unavailable
from brim.jobs import disk
from brim.jobs.catalogue.rows import JobRow
from brim.service.context import Context

if TYPE_CHECKING:
    from brim.jobs.kinds import Inputs, Kind
    from brim.jobs.specs import Spec


def submit(here: Context, body: Any, key: str | None) -> tuple[JobRow, bool]:
    """The job of a body, and whether it is new; a key seen before gives its job, also where there is no room now."""
    from brim.jobs.kinds import KINDS
    from brim.jobs.specs import read_body

    spec = read_body(body)
    kind = KINDS[spec.kind]
    key_hash = None if key is None else hashlib.sha256(key.encode()).hexdigest()
    if key_hash is not None and (known := here.catalogue.jobs.of_key(key_hash)):
        return known, False
    _check(here, spec, kind)
    row, is_new = here.catalogue.jobs.submit(
        spec,
        key_hash=key_hash,
        inputs={"dataset_ids": list(spec.dataset_ids), "run_id": spec.run_id},
        makes=kind.makes,
        reads=kind.reads,
        reads_run=kind.reads_run,
        limit=here.settings.max_unfinished,
    )
    return (enqueue(here, row), True) if is_new else (row, False)


def enqueue(here: Context, row: JobRow) -> JobRow:
    """Queue a pending job and say so; while the queue is away it stays pending, and is queued later."""
    _fail_at("submit.enqueue")
    try:
        here.queue.submit(row.id)
        here.catalogue.jobs.move(row.id, "queued", of=["pending"])
        return here.job(row.id)
    except (NotFound, Unavailable):
        return row


def _check(here: Context, spec: "Spec", kind: "Kind") -> None:
    """Refuse what could not run: a device that is not there, values that do not fit the inputs, a full disk."""
    inputs = _inputs(here, spec)
    accelerator = spec.config.get("accelerator", "auto")
    if accelerator in ("gpu", "cuda") and not _has_gpu(here):
        raise FieldConflict(
            "config.accelerator", f'config.accelerator="{accelerator}": no worker has a GPU; use "auto"'
        )
    if inputs is None:
        return  # unknown, still being written, empty or of another kind: the catalogue says so
    try:
        kind.check(spec, inputs)
        need = kind.estimate_bytes(spec, inputs)
    except (DatasetError, ImageError) as failure:  # its files are gone, or changed since it was listed
        raise FieldConflict("config.dataset_ids", f"config.dataset_ids: {failure}") from failure
    except CheckpointError as failure:
        raise FieldConflict("config.run_id", f"config.run_id: {failure}") from failure
    free = disk.free_bytes(here.settings.data)
    if need + here.settings.min_free_bytes > free:
        raise Conflict(
            f"the job needs about {disk.words(need)} of disk and {disk.words(here.settings.min_free_bytes)} must stay "
            f"free, but only {disk.words(free)} are free; free some space or ask for less"
        )


def _inputs(here: Context, spec: "Spec") -> "Inputs | None":
    """Where a job's inputs lie; None where one of them cannot be used."""
    from brim.jobs.kinds import KINDS, Inputs

    kind = KINDS[spec.kind]
    places: list[Path] = []
    for id in spec.dataset_ids:
        row = here.catalogue.datasets.get(id)
        if row is None or row.state in ("writing", "deleting") or row.items == 0 or row.kind != kind.reads:
            return None
        places.append(here.settings.data / row.path)
    if spec.run_id is None:
        return Inputs(datasets=tuple(places))
    run = here.catalogue.runs.get(spec.run_id)
    if run is None or run.state == "training" or run.kind != kind.reads_run:
        return None
    return Inputs(datasets=tuple(places), run=here.settings.data / run.path)


def _has_gpu(here: Context) -> bool:
    rows = here.catalogue.devices.all()
    return not rows or any("cuda" in str(row.info.get("device", row.info.get("type", ""))) for row in rows)


def _fail_at(place: str) -> None:
    """End the process here if a test asks for it: what a crash leaves at this place must be mended."""
    if os.environ.get("BRIM_FAIL_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)
