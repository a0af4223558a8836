"""What every route works with: settings, catalogue, queue, event streams, predictions, the reader."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, Request

from brim.errors import NotFound
from brim.jobs.store import Catalogue, DatasetRow, JobRow, RunRow
from brim.jobs.worker.redact import Redactor
from brim.service.access import SHARED, Access, Actions, Actor
from brim.service.api.dashboard_proxy import DashboardProxy
from brim.service.api.devices import DeviceHistory
from brim.service.api.events import Hub
from brim.service.api.export import Exports
from brim.service.api.metrics import ServiceMetrics
from brim.service.prediction.client import KnownModels, Predictions
from brim.service.reader.client import Reader
from brim.service.settings import Settings

if TYPE_CHECKING:
    from brim.jobs.durable import Queue
    from brim.service.api.routes.datasets import CachedImages, CachedStatistics
    from brim.service.prediction.request import Admission

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Context:
    """One running API."""

    settings: Settings
    catalogue: Catalogue
    queue: "Queue"
    redact: Redactor
    hub: Hub
    metrics: ServiceMetrics
    reader: Reader
    statistics: "CachedStatistics"
    images: "CachedImages"
    predictions: Predictions
    models: KnownModels
    admission: "Admission"
    access: Access
    actions: Actions
    history: DeviceHistory
    dashboard: DashboardProxy | None = None
    exports: Exports = field(default_factory=Exports)

    def job(self, id: str) -> JobRow:
        return _existing(self.catalogue.jobs.find(id), "job", "/api/training/jobs")

    def dataset(self, id: str) -> DatasetRow:
        """A dataset by its id, unless it is being deleted."""
        row = self.catalogue.datasets.find(id)
        return _existing(None if row is not None and row.state == "deleting" else row, "dataset", "/api/datasets")

    def run(self, id: str) -> RunRow:
        return _existing(self.catalogue.runs.find(id), "run", "/api/runs")


def _existing(row: _T | None, thing: str, address: str) -> _T:
    if row is None:
        raise NotFound(f'no {thing} has this id; "GET {address}" lists them')
    return row


async def context_of(request: Request) -> Context:  # async: a plain function would be run in a thread
    context: Any = request.app.state.context
    assert isinstance(context, Context)
    return context


async def actor_of(request: Request) -> Actor:
    """Who asks, as the gate found."""
    actor: Any = request.scope["actor"]
    assert isinstance(actor, Actor)
    return actor


def name_of(actor: Actor) -> str | None:
    """As jobs keep it: nobody can tell who has the shared token."""
    return None if actor.name == SHARED else actor.name


By = Annotated[Actor, Depends(actor_of)]
Here = Annotated[Context, Depends(context_of)]
