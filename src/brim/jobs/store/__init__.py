"""The catalogue: what people see of jobs, datasets, runs and models. The only home of the database toolkit."""

from brim.jobs.store.catalogue import Catalogue, ModelTable
from brim.jobs.store.engine import to_json, upgrade
from brim.jobs.store.jobs import EventTable
from brim.jobs.store.rows import (
    DatasetKind,
    DatasetRow,
    DatasetState,
    DeviceRow,
    EventRow,
    JobRow,
    ModelKind,
    ModelRow,
    Output,
    RowPage,
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
    "is_id",
    "new_id",
    "to_json",
    "upgrade",
]
