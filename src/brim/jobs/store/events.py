"""What happened to each job, numbered without gaps, so that a watcher can go on where it left off.

The number comes from the job's own row, updated in the same transaction: writers of one job wait for each other, and
a higher number never becomes visible before a lower one. An identity column of PostgreSQL would not promise that.
"""

import time
from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa

from brim.jobs.store.engine import reading, writing
from brim.jobs.store.rows import EventKind, EventRow, is_id, row_of
from brim.jobs.store.tables import events, jobs

KEEP = 2000  # newest events of a job; those of its status stay for good
_PRUNE_EVERY = 100
_MOST = 2**31 - 1


class Events:
    """The events of all jobs."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    @staticmethod
    def add(connection: sa.Connection, job_id: str, kind: EventKind, data: Mapping[str, Any]) -> int:
        """Append to a job's events within a transaction; its number, 0 where the job is gone."""
        seq = connection.execute(
            sa.update(jobs)
            .where(jobs.c.id == job_id)
            .values(event_seq=jobs.c.event_seq + 1)
            .returning(jobs.c.event_seq)
        ).scalar_one_or_none()
        if seq is None:
            return 0
        connection.execute(sa.insert(events).values(job_id=job_id, seq=seq, kind=kind, data=data, at=time.time()))
        if seq % _PRUNE_EVERY == 0:
            _prune(connection, job_id, seq - KEEP)
        return int(seq)

    def post(self, job_id: str, kind: EventKind, data: Mapping[str, Any]) -> int:
        """Append in a transaction of its own."""
        with writing(self._engine) as connection:
            return self.add(connection, job_id, kind, data)

    def after(self, job_id: str, seq: int, limit: int = 500) -> list[EventRow]:
        """The job's events after the one numbered seq, oldest first."""
        if not is_id(job_id):
            return []
        query = (
            sa.select(events)
            .where(events.c.job_id == job_id, events.c.seq > max(-1, min(seq, _MOST)))
            .order_by(events.c.seq)
            .limit(limit)
        )
        with reading(self._engine) as connection:
            return [row_of(EventRow, row) for row in connection.execute(query)]

    def heads(self, ids: Collection[str]) -> dict[str, int]:
        """The newest number of each job; a job that is gone is missing."""
        query = sa.select(jobs.c.id, jobs.c.event_seq).where(jobs.c.id.in_([id for id in ids if is_id(id)]))
        with reading(self._engine) as connection:
            return {row.id: row.event_seq for row in connection.execute(query)}

    def prune(self, job_id: str, keep: int = KEEP) -> None:
        """Forget all but the newest `keep`, except those of the status."""
        with writing(self._engine) as connection:
            newest = connection.execute(sa.select(jobs.c.event_seq).where(jobs.c.id == job_id)).scalar_one_or_none()
            _prune(connection, job_id, (newest or 0) - keep)


def _prune(connection: sa.Connection, job_id: str, upto: int) -> None:
    old = (events.c.job_id == job_id, events.c.seq <= upto, events.c.kind != "status")
    connection.execute(sa.delete(events).where(*old))
