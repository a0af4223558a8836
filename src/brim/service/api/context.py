"""What every route works with: settings, catalogue, queue, event streams, predictions, the reader."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request

from brim.errors import NotFound
from brim.jobs.store import Catalogue, DatasetRow, JobRow, RunRow
from brim.jobs.worker.redact import Redactor
from brim.service.api.dashboard_proxy import DashboardProxy
from brim.service.api.devices import DeviceHistory
from brim.service.api.events import Hub
from brim.service.api.export import Exports
from brim.service.api.metrics import ServiceMetrics
from brim.service.prediction.client import Predictions
from brim.service.prediction.known_models import KnownModels
from brim.service.reader.client import Reader
from brim.service.settings import Settings

if TYPE_CHECKING:
    from brim.service.api.routes.datasets import CachedStatistics
    from brim.service.prediction.request import Admission

_T = TypeVar("_T")


class JobQueue(Protocol):
    """The client half of `brim.jobs.durable.Queue`: all that requests do with it."""

    def submit(self, job_id: str) -> None:
        """Queue a job; a second time changes nothing."""

    def cancel(self, job_id: str) -> None:
        """Take a job from the queue, or have its worker stop it."""

    def resume(self, job_id: str, *, failed: bool) -> None:
        """Queue a job again that was stopped or has failed."""

    def forget(self, job_id: str) -> None:
        """Drop a finished job's records."""

    def check(self) -> None:
        """Raise Unavailable if the database does not answer."""


@dataclass(frozen=True, slots=True)
class Context:
    """One running API."""

    settings: Settings
    catalogue: Catalogue
    queue: JobQueue
    redact: Redactor
    hub: Hub
    metrics: ServiceMetrics
    reader: Reader
    statistics: "CachedStatistics"
    predictions: Predictions
    models: KnownModels
    admission: "Admission"
    history: DeviceHistory
    dashboard: DashboardProxy | None = None
    exports: Exports = field(default_factory=Exports)

    def job(self, id: str) -> JobRow:
        return _existing(self.catalogue.jobs.get(id), "job", "/api/training/jobs")

    def dataset(self, id: str) -> DatasetRow:
        """A dataset by its id, unless it is being deleted."""
        row = self.catalogue.datasets.get(id)
        return _existing(None if row is not None and row.state == "deleting" else row, "dataset", "/api/datasets")

    def run(self, id: str) -> RunRow:
        return _existing(self.catalogue.runs.get(id), "run", "/api/runs")


def _existing(row: _T | None, thing: str, address: str) -> _T:
    if row is None:
        raise NotFound(f'no {thing} has this id; "GET {address}" lists them')
    return row


async def context_of(request: Request) -> Context:  # async: a plain function would be run in a thread
    context: Any = request.app.state.context
    assert isinstance(context, Context)
    return context


Here = Annotated[Context, Depends(context_of)]
