"""Jobs and their events. Every method is one transaction.

A status changes only by an UPDATE that names the statuses it may come from and whose row count is checked: if the API
and a worker want different things at once, one wins and the other learns of it. A job's output (its dataset or run)
changes in the same transaction as the job.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Final

import sqlalchemy as sa

from brim.errors import ConfigError, Conflict, NotFound, TooMany
from brim.jobs.status import FINISHED, RESUMABLE, UNFINISHED, JobProgress, JobStatus, Spec, Wanted, clean
from brim.jobs.store.engine import RowPage, RowTable, fetch, insert_for, reading, row_of, writing
from brim.jobs.store.links import begin_output, check_inputs, check_unread, end_output, note_uses
from brim.jobs.store.tables import (
    EventKind,
    EventRow,
    JobRow,
    Makes,
    Output,
    events,
    is_id,
    is_lost,
    jobs,
    new_id,
    uses,
)

STOPPING: Final = "stopping"
KEEP: Final = 2000  # newest events kept of each job; those of its status are never dropped
_PRUNE_EVERY: Final = 100
_MAX_SEQ: Final = 2**31 - 1


class JobTable(RowTable[JobRow]):
    table, row = jobs, JobRow

    def submit(
        self,
        spec: Spec,
        *,
        key_hash: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        makes: Makes = "result",
        reads: str | None = None,
        reads_run: str | None = None,
        limit: int | None = None,
        submitted_by: str | None = None,
    ) -> tuple[JobRow, bool]:
        """Note a job with the dataset or run it will make; a key seen before gives its job, and False.

        Of the inputs, `dataset_ids` and `run_id` are checked (datasets must be of kind `reads`, the run made by a job
        of kind `reads_run`) and cannot be deleted while the job may run. More than `limit` unfinished jobs are TooMany.
        """
        inputs = dict(inputs or {})
        with writing(self._engine) as connection:
            if key_hash is not None and (known := _by_key(connection, key_hash)):
                return known, False
            check_inputs(connection, inputs, reads, reads_run)
            if limit is not None and _count_unfinished(connection) >= limit:
                raise TooMany(f"{limit} jobs are waiting or running, which is the limit; try again when some are done")
            made = _insert(connection, spec, key_hash, inputs, makes, submitted_by)
            if made is None:  # another client's transaction with the same key came first
                known = _by_key(connection, key_hash or "")
                assert known is not None
                return known, False
            note_uses(connection, made.id, inputs)
            begin_output(connection, made)
            _tell_status(connection, made)
            return made, True

    def check(self, inputs: Mapping[str, Any], reads: str | None, reads_run: str | None) -> None:
        """Check inputs as `submit` does, without storing anything."""
        with reading(self._engine) as connection:
            check_inputs(connection, inputs, reads, reads_run)

    def of_key(self, key_hash: str) -> JobRow | None:
        """The job that was submitted with this idempotency key, or None."""
        return self._one(jobs.c.key_hash == key_hash)

    def page(
        self,
        *,
        status: str | None = None,
        kind: str | None = None,
        name: str | None = None,
        page: int = 1,
        per_page: int = 50,
    ) -> RowPage[JobRow]:
        """One page of jobs, newest first, by their shown status; name matches a part of theirs, ignoring case."""
        where = [_is_shown(clean(status))] if status is not None else []
        where += [jobs.c.kind == clean(kind)] if kind is not None else []
        where += [jobs.c.name.icontains(clean(name), autoescape=True)] if name is not None else []
        return self._page(where, page, per_page)

    def unfinished(self) -> list[JobRow]:
        return self._all(jobs.c.status.in_(UNFINISHED))

    def of_worker(self, worker: str) -> list[JobRow]:
        """Jobs that this worker runs, or ran when it died."""
        return self._all(jobs.c.worker == worker)

    def newest_on_run(self, run_id: str, kind: str) -> JobRow | None:
        """The last completed job of that kind that read a run, or None."""
        if not is_id(run_id):
            return None
        query = sa.select(jobs).join(uses, uses.c.job_id == jobs.c.id)
        query = query.where(uses.c.run_id == run_id, jobs.c.kind == kind, jobs.c.status == "completed")
        query = query.order_by(jobs.c.finished_at.desc(), jobs.c.number.desc()).limit(1)
        with reading(self._engine) as connection:
            return fetch(connection, JobRow, query)

    def results_on_runs(self, run_ids: Collection[str], kind: str) -> dict[str, dict[str, Any]]:
        """By run, the result of the last completed job of that kind that read it."""
        query = sa.select(uses.c.run_id, jobs.c.result).join(uses, uses.c.job_id == jobs.c.id)
        query = query.where(uses.c.run_id.in_(list(run_ids)), jobs.c.kind == kind, jobs.c.status == "completed")
        with reading(self._engine) as connection:
            rows = connection.execute(query.order_by(jobs.c.finished_at, jobs.c.number))
            return {str(row[0]): row[1] or {} for row in rows}

    def count_unfinished(self) -> int:
        with reading(self._engine) as connection:
            return _count_unfinished(connection)

    def counts(self) -> dict[str, int]:
        """Number of jobs by shown status, without empty ones."""
        shown = sa.case((is_lost(), "queued"), else_=jobs.c.status)
        with reading(self._engine) as connection:
            rows = connection.execute(sa.select(shown, sa.func.count()).group_by(sa.text("1")))
            return {str(row[0]): int(row[1]) for row in rows}

    def move(
        self, id: str, to: JobStatus, *, of: Collection[str], output: Output | None = None, **changes: Any
    ) -> bool:
        """Give a job another status, and other columns, if it has one of `of`; whether it had.

        A job whose end or pause was asked for neither starts nor completes any more. `output` is what the job has
        made: completed makes it ready, all else partial, and nothing made is no longer listed. Going on after an
        end or a pause is a Conflict where what the job reads is gone, or another job reads what it would go on with.
        """
        with writing(self._engine) as connection:
            job = _move(connection, id, to, of, output, changes)
            if job is not None and to in ("pending", "queued") and not RESUMABLE.isdisjoint(of):
                _check_again(connection, job)
            return job is not None

    def want(self, id: str, wanted: Wanted) -> bool:
        """Store what the user wants of a job, if its status allows it; cancel takes precedence over pause."""
        now = time.time()
        stops = wanted != "run"
        where = [jobs.c.id == id, jobs.c.status.in_(UNFINISHED if stops else RESUMABLE)]
        if wanted == "pause":
            where.append(jobs.c.wanted != "cancel")
        values: dict[str, Any] = {"wanted": wanted, "updated_at": now, "stopping_at": None}
        if stops:
            values["stopping_at"] = sa.func.coalesce(jobs.c.stopping_at, now)
            values["message"] = sa.case((jobs.c.status == "running", STOPPING), else_=jobs.c.message)
        with writing(self._engine) as connection:
            job = fetch(connection, JobRow, sa.update(jobs).where(*where).values(values).returning(jobs))
            if job is not None:
                _tell_status(connection, job)
            return job is not None

    def settle(self, id: str, output: Output | None = None) -> JobStatus | None:
        """Mark a job that was asked to stop as paused or cancelled; its new status, or None if it was not."""
        with writing(self._engine) as connection:
            job = fetch(connection, JobRow, sa.select(jobs).where(jobs.c.id == id).with_for_update())
            if job is None or job.wanted == "run" or job.status not in UNFINISHED:
                return None
            to: JobStatus = "paused" if job.wanted == "pause" else "cancelled"
            _move(connection, id, to, UNFINISHED, output, {})
            return to

    def tell(self, id: str, progress: JobProgress) -> None:
        """Store the progress of a running job; progress resets its count of worker deaths."""
        values = {
            "current": progress.current,
            "total": progress.total,
            "rate": progress.rate,
            "eta_s": progress.eta_s,
            "message": sa.case((jobs.c.wanted == "run", clean(progress.message)), else_=STOPPING),
            "deaths": sa.case((jobs.c.deaths_at < progress.current, 0), else_=jobs.c.deaths),
            "updated_at": time.time(),
        }
        with writing(self._engine) as connection:
            update = sa.update(jobs).where(jobs.c.id == id, jobs.c.status == "running").values(values)
            job = fetch(connection, JobRow, update.returning(jobs))
            if job is not None:
                _add_event(connection, id, "progress", job.progress.as_dict())

    def died(self, id: str) -> int:
        """Count a death of the job's worker; how many in a row without progress."""
        got_on = jobs.c.current > jobs.c.deaths_at
        values = {"deaths": sa.case((got_on, 1), else_=jobs.c.deaths + 1), "deaths_at": jobs.c.current}
        with writing(self._engine) as connection:
            query = sa.update(jobs).where(jobs.c.id == id, jobs.c.status == "running").values(values)
            return connection.execute(query.returning(jobs.c.deaths)).scalar_one_or_none() or 0

    def remove(self, id: str) -> bool:
        """Remove a finished job and its events; its output stays."""
        with writing(self._engine) as connection:
            gone = sa.delete(jobs).where(jobs.c.id == id, jobs.c.status.not_in(UNFINISHED))
            return connection.execute(gone).rowcount == 1


class EventTable:
    """What happened to each job, numbered without gaps, so that a watcher can continue where it left off.

    The number comes from the job's own row, updated in the same transaction: writers of one job wait for each other,
    and a higher number never becomes visible before a lower one. An identity column would not guarantee that.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def after(self, job_id: str, seq: int, limit: int = 500) -> list[EventRow]:
        """The job's events after the one numbered seq, oldest first."""
        if not is_id(job_id):
            return []
        query = sa.select(events).where(events.c.job_id == job_id, events.c.seq > max(-1, min(seq, _MAX_SEQ)))
        with reading(self._engine) as connection:
            rows = connection.execute(query.order_by(events.c.seq).limit(limit))
            return [row_of(EventRow, row) for row in rows]

    def heads(self, ids: Collection[str]) -> dict[str, int]:
        """The newest event number of each job that exists."""
        query = sa.select(jobs.c.id, jobs.c.event_seq).where(jobs.c.id.in_([id for id in ids if is_id(id)]))
        with reading(self._engine) as connection:
            return {row.id: row.event_seq for row in connection.execute(query)}


# Within a transaction


def _add_event(connection: sa.Connection, job_id: str, kind: EventKind, data: Mapping[str, Any]) -> None:
    """Append to a job's events; now and then, forget old ones."""
    number = sa.update(jobs).where(jobs.c.id == job_id).values(event_seq=jobs.c.event_seq + 1)
    seq = connection.execute(number.returning(jobs.c.event_seq)).scalar_one()
    connection.execute(sa.insert(events).values(job_id=job_id, seq=seq, kind=kind, data=data, at=time.time()))
    if seq % _PRUNE_EVERY == 0:
        old = (events.c.job_id == job_id, events.c.seq <= seq - KEEP, events.c.kind != "status")
        connection.execute(sa.delete(events).where(*old))


def _by_key(connection: sa.Connection, key_hash: str) -> JobRow | None:
    return fetch(connection, JobRow, sa.select(jobs).where(jobs.c.key_hash == key_hash))


def _count_unfinished(connection: sa.Connection) -> int:
    return connection.execute(
        sa.select(sa.func.count()).select_from(jobs).where(jobs.c.status.in_(UNFINISHED))
    ).scalar_one()


def _insert(
    connection: sa.Connection,
    spec: Spec,
    key_hash: str | None,
    inputs: Mapping[str, Any],
    makes: Makes,
    submitted_by: str | None,
) -> JobRow | None:
    """The new job; None if its key is taken."""
    id, now = new_id(), time.time()
    job = JobRow(
        id=id,
        kind=spec.kind,
        name=clean(spec.name),
        config=dict(spec.config),
        inputs=dict(inputs),
        makes=makes,
        output_id=id if makes == "result" else new_id(),
        key_hash=key_hash,
        submitted_by=submitted_by,
        created_at=now,
        updated_at=now,
    )
    values = {name: value for name, value in asdict(job).items() if name != "number"}
    insert = insert_for(connection)(jobs).values(values).on_conflict_do_nothing(index_elements=["key_hash"])
    return fetch(connection, JobRow, insert.returning(jobs))


def _move(
    connection: sa.Connection,
    id: str,
    to: JobStatus,
    of: Collection[str],
    output: Output | None,
    changes: Mapping[str, Any],
) -> JobRow | None:
    where = [jobs.c.id == id, jobs.c.status.in_(of)]
    if to in ("running", "completed"):
        where.append(jobs.c.wanted == "run")
    stored = {name: clean(value) if isinstance(value, str) else value for name, value in changes.items()}
    values = {**_along(to), **stored, "status": to, "updated_at": time.time()}
    job = fetch(connection, JobRow, sa.update(jobs).where(*where).values(values).returning(jobs))
    if job is None:
        return None
    if to in UNFINISHED:
        begin_output(connection, job)
    elif output is not None:
        end_output(connection, job, output, complete=to == "completed")
    _tell_status(connection, job)
    return job


def _check_again(connection: sa.Connection, job: JobRow) -> None:
    """What was checked at submission may have changed while the job did not run."""
    try:
        check_inputs(connection, job.inputs, None, None)
    except (ConfigError, Conflict, NotFound) as failure:
        raise Conflict(f"the job cannot go on: {failure}") from failure
    if job.makes == "dataset":
        check_unread(connection, job.output_id)


def _along(to: JobStatus) -> dict[str, Any]:
    now = time.time()
    if to == "running":
        return {"started_at": sa.func.coalesce(jobs.c.started_at, now), "attempts": jobs.c.attempts + 1}
    idle: dict[str, Any] = {"worker": None, "stopping_at": None, "message": ""}
    if to in UNFINISHED:
        queued = {"queued_at": now} if to == "queued" else {}
        return {**idle, **queued, "finished_at": None, "error": None, "failure": None}
    if to in FINISHED:
        idle["finished_at"] = sa.case((jobs.c.started_at > now, jobs.c.started_at), else_=now)  # a clock was put back
    return {**idle, "eta_s": None, "rate": 0.0}


def _is_shown(status: str) -> sa.ColumnElement[bool]:
    is_stored = jobs.c.status == status
    if status == "running":
        return is_stored & ~is_lost()
    return is_stored | is_lost() if status == "queued" else is_stored


def _tell_status(connection: sa.Connection, job: JobRow) -> None:
    data = {"status": job.status, "wanted": job.wanted, "attempts": job.attempts, "error": job.error}
    _add_event(connection, job.id, "status", data)
