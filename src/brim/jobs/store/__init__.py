"""The catalogue: what people see of jobs, datasets, runs and models. The only home of the database toolkit."""

from brim.jobs.store.catalogue import Catalogue
from brim.jobs.store.migrate import upgrade
from brim.jobs.store.rows import (
    DatasetRow,
    DeviceRow,
    EventRow,
    JobRow,
    ModelRow,
    Output,
    Page,
    RunRow,
    is_id,
    new_id,
)

__all__ = [
    "Catalogue",
    "DatasetRow",
    "DeviceRow",
    "EventRow",
    "JobRow",
    "ModelRow",
    "Output",
    "Page",
    "RunRow",
    "is_id",
    "new_id",
    "upgrade",
]
