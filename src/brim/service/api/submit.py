"""From a request to a job in the queue: read, checked against what is there and what fits, noted, queued.

The catalogue first, then the queue: whoever is killed in between leaves a pending job that reconciling queues.
"""

import hashlib
import os
import signal
from typing import TYPE_CHECKING, Any

from brim.errors import CheckpointError, Conflict, DatasetError, ImageError, NotFound, Unavailable
from brim.jobs.store import JobRow
from brim.jobs.worker import disk
from brim.jobs.worker.process import cores
from brim.service.api.context import Context

if TYPE_CHECKING:
    from brim.jobs.kinds import Inputs, Spec


def submit(here: Context, body: Any, key: str | None) -> tuple[JobRow, bool]:
    """The job of a body, and whether it is new; a key seen before gives its job, also where there is no room now."""
    from brim.jobs.kinds import KINDS, read_body

    spec = read_body(body)
    kind = KINDS[spec.kind]
    key_hash = None if key is None else hashlib.sha256(key.encode()).hexdigest()
    if key_hash is not None and (known := here.catalogue.jobs.of_key(key_hash)):
        return known, False
    check(here, spec)
    row, is_new = here.catalogue.jobs.submit(
        spec,
        key_hash=key_hash,
        inputs=_named(spec),
        makes=kind.makes,
        reads=kind.reads,
        reads_run=kind.reads_run,
        limit=here.settings.max_unfinished,
    )
    return (enqueue(here, row), True) if is_new else (row, False)


def validate(here: Context, body: Any) -> "tuple[Spec, int]":
    """What a body asks for and the bytes it would take on disk; what submitting it would refuse is refused."""
    from brim.jobs.kinds import read_body

    spec = read_body(body)
    return spec, check(here, spec)


def enqueue(here: Context, row: JobRow) -> JobRow:
    """Queue a pending job and say so; while the queue is away it stays pending, and is queued later."""
    _fail_at("submit.enqueue")
    try:
        here.queue.submit(row.id)
        here.catalogue.jobs.move(row.id, "queued", of=["pending"])
        return here.job(row.id)
    except (NotFound, Unavailable):
        return row


def check(here: Context, spec: "Spec") -> int:
    """The bytes a job will take on disk; one that could not run is refused.

    By a device that is not there, inputs that cannot be used, values that do not fit them, or a full disk.
    """
    from brim.jobs.kinds import KINDS

    kind = KINDS[spec.kind]
    accelerator = spec.config.get("accelerator", "auto")
    if accelerator in ("gpu", "cuda") and not _has_gpu(here):
        raise Conflict(
            f'config.accelerator="{accelerator}": no worker has a GPU; use "auto"', field="config.accelerator"
        )
    _check_place(here, spec)
    here.catalogue.jobs.check(_named(spec), kind.reads, kind.reads_run)
    inputs = _inputs(here, spec)
    try:
        kind.check(spec, inputs)
        need = kind.estimate_bytes(spec, inputs)
    except (DatasetError, ImageError) as failure:  # its files are gone, or changed since it was listed
        raise Conflict(f"config.dataset_ids: {failure}", field="config.dataset_ids") from failure
    except CheckpointError as failure:
        raise Conflict(f"config.run_id: {failure}", field="config.run_id") from failure
    free = disk.free_bytes(here.settings.data)
    if need + here.settings.min_free_bytes > free:
        raise Conflict(
            f"the job needs about {disk.words(need)} of disk and {disk.words(here.settings.min_free_bytes)} must stay "
            f"free, but only {disk.words(free)} are free; free some space or ask for less"
        )
    return need


def _named(spec: "Spec") -> dict[str, Any]:
    """What a job reads, as the catalogue takes it."""
    return {"dataset_ids": list(spec.dataset_ids), "run_id": spec.run_id}


def _inputs(here: Context, spec: "Spec") -> "Inputs":
    """Where a job's inputs lie."""
    from brim.jobs.kinds import Inputs

    data = here.settings.data
    datasets = tuple(data / here.dataset(id).path for id in spec.dataset_ids)
    return Inputs(datasets=datasets, run=None if spec.run_id is None else data / here.run(spec.run_id).path)


def _has_gpu(here: Context) -> bool:
    rows = here.catalogue.devices.all()
    return not rows or any("cuda" in str(row.info.get("device", row.info.get("type", ""))) for row in rows)


def _check_place(here: Context, spec: "Spec") -> None:
    """Refuse more devices than this machine has, and a cluster where the service has none."""
    config, gpus = spec.config, here.settings.gpus
    if config.get("cluster") and here.settings.cluster is None:
        raise Conflict(
            "config.cluster=true: this service has no cluster; leave it out, or have the service started with "
            '"brim serve --cluster ADDRESS"',
            field="config.cluster",
        )
    wanted = config.get("devices", 1)
    on_cpu = not gpus or config.get("accelerator") == "cpu"
    have = cores() if on_cpu else len(gpus)
    if isinstance(wanted, int) and wanted > have:
        what = f"{have} {'core' if on_cpu else 'GPU'}{'s' * (have > 1)}"
        raise Conflict(
            f'config.devices={wanted} is more than the {what} of this machine; give at most {have}, or "all"',
            field="config.devices",
        )


def _fail_at(place: str) -> None:
    """End the process here if a test asks for it: what a crash leaves at this place must be mended."""
    if os.environ.get("BRIM_FAIL_AT") == place:
        os.kill(os.getpid(), signal.SIGKILL)
