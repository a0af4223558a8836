"""The durable queue: which worker runs which job. The only module that knows DBOS.

One workflow, `job`, whose argument is the job's id; its steps are short and their records small (JSON, no pickle).
A killed worker continues its jobs when it starts again under the same name; finished steps are not run again.

Properties of DBOS 3.3, each found by a small experiment:
- `resume` and `rewind` without a queue name go to an internal queue that has no limit; `resume` of a failed job
  silently does nothing; `resume` of a running job makes it run twice at once.
- A cancel during a step raises a BaseException at the end of the step.
- Jobs submitted by a client have no application version and go to the latest one ever seen: the version is a constant.
- Workers that migrate a new SQLite file at the same time fail: only the supervisor calls `migrate`.
- Never call `DBOS.destroy()` while jobs run; end the process instead, which is what a crash does, and that is safe.
"""

import logging
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

from brim.errors import Conflict, Unavailable

if TYPE_CHECKING:
    from dbos import DBOSClient

QUEUE: Final = "jobs"
APPLICATION: Final = "brim"
VERSION: Final = "1"  # never brim's own: jobs queued by an older brim must still be taken
WORKFLOW: Final = "job"
POLL_S: Final = 0.3  # between two looks of an idle worker into the queue

_log = logging.getLogger("brim.jobs")
T = TypeVar("T")


def import_library() -> None:
    """Import DBOS, which takes a second, before it is needed."""
    import dbos  # noqa: F401


def migrate(url: str) -> None:
    """Create or update the queue's tables; only the supervisor does this, before any worker or API starts."""
    from dbos import DBOS

    _silence()
    with _answering():
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
                connection.execute("PRAGMA journal_mode=WAL")  # stays with the file: readers do not wait for writers
                check_file(connection.execute)
        DBOS.migrate(system_database_url=url)


@dataclass(frozen=True, slots=True)
class DbosState:
    """The queue's state of a job."""

    status: str  # ENQUEUED, PENDING (a worker has it), SUCCESS, ERROR, CANCELLED
    executor: str | None  # the worker that had it last


def is_database_error(failure: Exception) -> bool:
    names = {base.__name__ for base in type(failure).__mro__}  # not imported: its home is the catalogue
    is_of_value = type(failure).__name__ == "StatementError"  # it never came to the database
    return isinstance(failure, sqlite3.Error | OSError) or ("SQLAlchemyError" in names and not is_of_value)


def is_damaged(text: str) -> bool:
    """Whether SQLite's message says that its file is not a database, or no longer one."""
    return "file is not a database" in text or "malformed" in text


def check_file(execute: Callable[[str], Any]) -> None:
    """Read an SQLite file whole, at a start: a damaged page is found now and not in the middle of a job."""
    (verdict,) = execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed: {verdict}")


@contextmanager
def _answering() -> Iterator[None]:
    """Database errors become Unavailable; their texts, which may name hosts and users, go to the log."""
    try:
        yield
    except Exception as failure:
        if not is_database_error(failure):
            raise
        if is_damaged(str(failure)):
            raise Unavailable(
                "the queue's database is damaged; restore jobs.sqlite from a copy, or move it away, and unfinished "
                "jobs are queued anew"
            ) from failure
        _log.warning("the queue's database: %s", failure)
        raise Unavailable("the queue's database does not answer for now; try again in a moment") from failure


class Queue:
    """The client half of the queue, for API, supervisor and command line. Fails fast when the database is away."""

    def __init__(self, url: str) -> None:
        """Connects when it is first used; the tables must exist, see `migrate`."""
        self._url = url

    @cached_property
    def _client(self) -> "DBOSClient":
        from dbos import DBOSClient, DBOSPortableJSONSerializer  # a third of a second: an API answers before

        _silence()
        return DBOSClient(
            system_database_url=self._url,
            serializer=DBOSPortableJSONSerializer(),
            application_name=APPLICATION,
            retry_connection_errors=False,
            lazy=True,
        )

    @_answering()
    def submit(self, job_id: str) -> None:
        """Queue a job; submitting it twice changes nothing."""
        self._client.enqueue({"workflow_name": WORKFLOW, "queue_name": QUEUE, "workflow_id": job_id}, job_id)

    @_answering()
    def cancel(self, job_id: str) -> None:
        """Remove a job from the queue, or have its worker stop it at the next poll; a finished job is not changed."""
        self._client.cancel_workflow(job_id)

    def resume(self, job_id: str, *, failed: bool) -> None:
        """Queue a job again that was cancelled or has failed; its worker must have let it go before.

        A failed one starts with a new history: its last record is the failure.
        """
        state = self.states([job_id]).get(job_id)
        if state is None:
            self.submit(job_id)
        elif state.status == "ENQUEUED":
            return  # by a resume before this one
        elif state.status in ("PENDING", "DELAYED"):
            raise Conflict(f"job {job_id} is still being stopped; try again in a few seconds")
        else:
            anew = failed or state.status != "CANCELLED"
            with _answering():
                (self._client.rewind_workflow if anew else self._client.resume_workflow)(job_id, queue_name=QUEUE)

    @_answering()
    def forget(self, job_id: str) -> None:
        """Drop a finished job's records, if there are any."""
        self._client.delete_workflow(job_id)

    def states(self, ids: Collection[str]) -> dict[str, DbosState]:
        """States of these jobs, without those that were never queued."""
        return self._list(workflow_ids=list(ids)) if ids else {}

    def active(self) -> dict[str, DbosState]:
        return self._list(status=["ENQUEUED", "PENDING"])

    def succeeded_before(self, at: float) -> list[str]:
        """Up to a hundred jobs that completed before a time, in seconds since 1970."""
        when = datetime.fromtimestamp(max(0.0, at), UTC).isoformat()
        return list(self._list(status="SUCCESS", completed_before=when, limit=100))

    def is_cancelled(self, job_id: str) -> bool:
        """Whether the job was cancelled; False while the database is away."""
        try:
            state = self.states([job_id]).get(job_id)
        except Unavailable as failure:
            _log.warning("cannot see whether job %s is cancelled: %s", job_id, failure)
            return False
        return state is None or state.status == "CANCELLED"

    def orphans(self, live: Collection[str]) -> list[str]:
        """Jobs held by workers other than the live ones."""
        held = self._list(status="PENDING", queue_name=QUEUE)
        return [job_id for job_id, state in held.items() if state.executor not in live]

    @_answering()
    def adopt(self, job_id: str) -> None:
        """Requeue a job whose worker is gone for good; a job that still ran would run twice."""
        self._client.resume_workflow(job_id, queue_name=QUEUE)

    def check(self) -> None:
        """Raise Unavailable when the database does not answer."""
        self._list(status="PENDING", limit=1)

    def close(self) -> None:
        if "_client" in vars(self):
            self._client.destroy()

    @_answering()
    def _list(self, **filters: Any) -> dict[str, DbosState]:
        rows = self._client.list_workflows(load_input=False, load_output=False, **filters)
        return {row.workflow_id: DbosState(row.status, row.executor_id) for row in rows}


def take_jobs(url: str, executor_id: str, job: Callable[[str], dict[str, Any]]) -> None:
    """Start taking jobs, one at a time, in a thread of the queue; first those this worker was running when it died.

    `job(job_id)` is left by a BaseException when the job was cancelled or another worker has it.
    """
    from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer

    @DBOS.workflow(name=WORKFLOW, max_recovery_attempts=None)
    def workflow(job_id: str) -> dict[str, Any]:
        return job(job_id)

    config = DBOSConfig(
        name=APPLICATION,
        system_database_url=url,
        executor_id=executor_id,
        application_version=VERSION,
        serializer=DBOSPortableJSONSerializer(),
        log_level="CRITICAL",
        run_migrations=False,
    )
    DBOS(config=config)
    DBOS.listen_queues([QUEUE])
    with _answering():
        DBOS.launch()
        DBOS.register_queue(QUEUE, worker_concurrency=1, polling_interval_sec=POLL_S, on_conflict="always_update")


def run_step(name: str, step: Callable[[], T]) -> T:
    """Run a step of a job once, or return its recorded result after a crash."""
    from dbos import DBOS

    return DBOS.run_step({"name": name}, step)


def _silence() -> None:
    """DBOS logs each migration, an advertisement of its console, and a traceback for every cancelled job."""
    logging.getLogger("dbos").setLevel(logging.CRITICAL)
