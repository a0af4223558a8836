"""The kinds of job: what each reads, its config, and how it runs. Importing them loads no torch and no NumPy."""

from brim.jobs.kinds.bodies import KINDS, body_schema, config_schema, read_body
from brim.jobs.kinds.kind import MAX_TEXT, JobConfig, Kind
from brim.jobs.kinds.task import Inputs, Stopped, Task, job_phrase, reporting
from brim.jobs.status import Spec

__all__ = [
    "KINDS",
    "MAX_TEXT",
    "Inputs",
    "JobConfig",
    "Kind",
    "Spec",
    "Stopped",
    "Task",
    "body_schema",
    "config_schema",
    "job_phrase",
    "read_body",
    "reporting",
]
