"""The catalogue: what people see of jobs, datasets, runs and models. The only home of the database toolkit."""

from brim.jobs.catalogue.catalogue import Catalogue
from brim.jobs.catalogue.migrate import upgrade
from brim.jobs.catalogue.rows import (
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
