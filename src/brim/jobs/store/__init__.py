"""The catalogue: what people see of jobs, datasets, runs and models. The only home of the database toolkit."""

from brim.jobs.store.catalogue import Catalogue, ModelTable, RunTable
from brim.jobs.store.engine import RowPage, to_json, upgrade
from brim.jobs.store.jobs import EventTable
from brim.jobs.store.tables import (
    DatasetKind,
    DatasetRow,
    DatasetState,
    DeviceRow,
    EventRow,
    JobRow,
    ModelKind,
    ModelRow,
    Output,
    RunRow,
    is_id,
    new_id,
)

__all__ = [
    "Catalogue",
    "DatasetKind",
    "DatasetRow",
    "DatasetState",
    "DeviceRow",
    "EventRow",
    "EventTable",
    "JobRow",
    "ModelKind",
    "ModelRow",
    "ModelTable",
    "Output",
    "RowPage",
    "RunRow",
    "RunTable",
    "is_id",
    "new_id",
    "to_json",
    "upgrade",
]
