"""What every route works with: the settings, the catalogue, the queue, event streams, predictions."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request

from brim.errors import NotFound
from brim.jobs.store import Catalogue, DatasetRow, JobRow, RunRow
from brim.jobs.worker.redact import Redactor
from brim.service.api.dashboard_proxy import Front
from brim.service.api.data.device_history import DeviceHistory
from brim.service.api.data.views import Views
from brim.service.api.events import Hub
from brim.service.api.metrics import Metrics
from brim.service.api.warm import Warm
from brim.service.prediction.intake import Intake
from brim.service.prediction.known_models import KnownModels
from brim.service.prediction.process.client import Predictions
from brim.service.prediction.replies import Replies
from brim.service.settings import Settings

_T = TypeVar("_T")


class Queue(Protocol):
    """The client half of `brim.jobs.durable.Queue`: all that a request does with it."""

    def submit(self, job_id: str) -> None:
        """Queue a job; a second time changes nothing."""

    def cancel(self, job_id: str) -> None:
        """Take a job from the queue, or have its worker stop it."""

    def resume(self, job_id: str, *, failed: bool) -> None:
        """Queue a job again that was stopped or has failed."""

    def forget(self, job_id: str) -> None:
        """Drop a finished job's records."""

    def check(self) -> None:
        """Raise Unavailable when the database does not answer."""


@dataclass(frozen=True, slots=True)
class Context:
    """One running API."""

    settings: Settings
    catalogue: Catalogue
    queue: Queue
    redact: Redactor
    hub: Hub
    metrics: Metrics
    predictions: Predictions
    known: KnownModels
    intake: Intake
    history: DeviceHistory
    front: Front | None = None  # to the dashboard, where there is one
    warm: Warm = field(default_factory=Warm)
    replies: Replies = field(default_factory=Replies)
    views: Views = field(default_factory=Views)

    def job(self, id: str) -> JobRow:
        """A job by its id."""
        return _found(self.catalogue.jobs.get(id), "job", "/api/training/jobs")

    def dataset(self, id: str) -> DatasetRow:
        """A dataset by its id, as long as it is not being deleted."""
        row = self.catalogue.datasets.get(id)
        return _found(None if row is not None and row.state == "deleting" else row, "dataset", "/api/datasets")

    def run(self, id: str) -> RunRow:
        """A run by its id."""
        return _found(self.catalogue.runs.get(id), "run", "/api/runs")


def _found(row: _T | None, what: str, where: str) -> _T:
    if row is None:
        raise NotFound(f'no {what} has this id; "GET {where}" lists those there are')
    return row


async def context_of(request: Request) -> Context:  # async: a plain function would be run in a thread
    """The context of the application that a request came to."""
    found: Any = request.app.state.context
    assert isinstance(found, Context)
    return found


Here = Annotated[Context, Depends(context_of)]
