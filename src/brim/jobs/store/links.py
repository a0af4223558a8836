"""The datasets and runs that a job reads and writes.

Inputs are checked when a job is submitted and noted, so that nobody deletes them meanwhile. The output is listed from
the job's submission on and changes along with the job. Its id is chosen once, so every attempt writes to the same
place. If a job stops before it wrote anything, the output's row is removed; it returns under the same id when the job
is resumed.
"""

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from brim.errors import Conflict, NotFound
from brim.jobs.status import UNFINISHED
from brim.jobs.store.engine import fetch, insert_for
from brim.jobs.store.tables import DatasetRow, JobRow, Output, RunRow, datasets, is_id, jobs, runs, uses

_HOLDING = UNFINISHED | {"paused"}  # a paused job is meant to go on


def check_inputs(
    connection: sa.Connection, inputs: Mapping[str, Any], reads: str | None, reads_run: str | None
) -> None:
    """Refuse datasets and runs that are unknown, still being written, empty or of another kind, by the field's name.

    Their rows stay locked until the transaction ends, so that none is deleted between this and the note of its use.
    """
    for place, id in enumerate(inputs.get("dataset_ids") or ()):
        _check_dataset(connection, id, f"config.dataset_ids[{place}]", reads)
    if inputs.get("run_id") is not None:
        _check_run(connection, inputs["run_id"], reads_run)


def note_uses(connection: sa.Connection, job_id: str, inputs: Mapping[str, Any]) -> None:
    for id in dict.fromkeys(inputs.get("dataset_ids") or ()):
        connection.execute(sa.insert(uses).values(job_id=job_id, dataset_id=id))
    if inputs.get("run_id") is not None:
        connection.execute(sa.insert(uses).values(job_id=job_id, run_id=inputs["run_id"]))


def check_unread(connection: sa.Connection, dataset_id: str) -> None:
    """Raise Conflict while a job may read a dataset.

    The caller has locked the dataset's row in a statement before: so this one sees what was noted while that waited.
    """
    readers = sa.select(jobs.c.name, jobs.c.id, datasets.c.name.label("dataset"))
    readers = readers.join(uses, uses.c.job_id == jobs.c.id).join(datasets, datasets.c.id == uses.c.dataset_id)
    query = readers.where(datasets.c.id == dataset_id, jobs.c.status.in_(_HOLDING)).order_by(jobs.c.number)
    if reader := connection.execute(query).first():
        raise Conflict(
            f'the dataset "{reader.dataset}" is in use by the job "{reader.name}" ({reader.id}); '
            "wait for it, or cancel it first"
        )


def _check_dataset(connection: sa.Connection, id: str, field: str, reads: str | None) -> None:
    query = sa.select(datasets).where(datasets.c.id == id).with_for_update(read=True)
    dataset = fetch(connection, DatasetRow, query) if is_id(id) else None
    if dataset is None or dataset.state == "deleting":
        raise NotFound(f'{field} names no dataset; "GET /api/datasets" lists those there are', field=field)
    if dataset.state == "writing":
        raise Conflict(
            f'{field}: the dataset "{dataset.name}" is still being written; wait for its job, or cancel it', field=field
        )
    if reads is not None and dataset.kind != reads:
        raise Conflict(
            f'{field}: the dataset "{dataset.name}" is of kind {dataset.kind}, expected {reads}', field=field
        )
    if dataset.items == 0:
        raise Conflict(f'{field}: the dataset "{dataset.name}" is empty; choose one with items', field=field)


def _check_run(connection: sa.Connection, id: str, reads_run: str | None) -> None:
    field = "config.run_id"
    query = sa.select(runs).where(runs.c.id == id).with_for_update(read=True)
    row = fetch(connection, RunRow, query) if is_id(id) else None
    if row is None:
        raise NotFound(f'{field} names no run; "GET /api/runs" lists those there are', field=field)
    if row.state == "training":
        raise Conflict(f'{field}: the run "{row.name}" is still training; wait for its job, or cancel it', field=field)
    if reads_run is not None and row.kind != reads_run:
        raise Conflict(f'{field}: the run "{row.name}" was made by {row.kind}, expected {reads_run}', field=field)


# The output


def begin_output(connection: sa.Connection, job: JobRow) -> None:
    """List the job's output as being written."""
    if job.makes == "result":
        return
    values: dict[str, Any] = {"id": job.output_id, "name": job.name, "path": job.out}
    values |= {"job_id": job.id, "created_at": time.time()}
    if job.makes == "dataset":
        table, state = datasets, "writing"
        values |= {"kind": job.kind.partition(".")[0], "owned": True, "items": 0, "bytes": 0, "about": {}}
    else:
        table, state = runs, "training"
        values |= {"kind": job.kind, "config": job.config, "summary": {}}
    insert = insert_for(connection)(table).values(**values, state=state)
    connection.execute(insert.on_conflict_do_update(index_elements=["id"], set_={"state": state, "job_id": job.id}))


def end_output(connection: sa.Connection, job: JobRow, output: Output, *, complete: bool) -> None:
    """List the job's output as ready or partial; an empty one is removed, a damaged one stays as it was listed."""
    if job.makes == "result":
        return
    table = datasets if job.makes == "dataset" else runs
    ours = table.c.id == job.output_id
    if output.items == 0 and not complete:
        connection.execute(sa.delete(table).where(ours))
        return
    values: dict[str, Any] = {"state": "ready" if complete else "partial"}
    if output.items is None:
        pass
    elif job.makes == "dataset":
        values |= {"items": output.items, "bytes": output.bytes, "about": dict(output.about)}
    else:
        values |= {"summary": dict(output.about)}
    connection.execute(sa.update(table).where(ours).values(values))
