"""The dataset or run that a job makes: listed from its submission on, changed along with the job.

Its id is chosen once, so every attempt writes to the same place. Where nothing was made by the time a job stops, the
row goes, and comes back under the same id when the job goes on.
"""

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from brim.jobs.store.rows import JobRow, Output
from brim.jobs.store.tables import datasets, runs


def begin(connection: sa.Connection, job: JobRow) -> None:
    """List what the job makes as being written."""
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


def leave(connection: sa.Connection, job: JobRow, output: Output, *, complete: bool) -> None:
    """List what the job has made as ready, or as partial; nothing is not listed."""
    if job.makes == "result":
        return
    table = datasets if job.makes == "dataset" else runs
    ours = table.c.id == job.output_id
    if output.items == 0 and not complete:
        connection.execute(sa.delete(table).where(ours))
        return
    values: dict[str, Any] = {"state": "ready" if complete else "partial"}
    if job.makes == "dataset":
        values |= {"items": output.items, "bytes": output.bytes, "about": dict(output.about)}
    else:
        values |= {"summary": dict(output.about)}
    connection.execute(sa.update(table).where(ours).values(values))


def insert_for(connection: sa.Connection) -> Any:
    """The INSERT that knows ON CONFLICT, which each dialect has as its own."""
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
