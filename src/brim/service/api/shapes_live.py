"""Answers that pages are made of: what jobs can be, whether one could run, and what devices and runs are doing."""

from typing import Literal

from pydantic import Field

from brim.service.api.shapes import Json, Shape


class Validated(Shape):
    """A job that could be submitted as it is."""

    kind: str
    name: str
    config: Json = Field(description="with every default filled in")
    estimated_bytes: int = Field(description="on disk when it is done; from above")


class KindShape(Shape):
    """What a job of one kind reads, makes and can be told."""

    kind: str
    title: str
    description: str
    makes: Literal["dataset", "run", "result"]
    reads: Literal["rf", "images", "sequences"] | None = Field(description="kind of the datasets it reads")
    reads_run: str | None = Field(description="kind of the job that made the run it reads")
    schema_: Json = Field(alias="schema", description="JSON schema of its config, complete in itself")
    presets: dict[str, Json] = Field(description="by name, values of fields to begin with")


class Kinds(Shape):
    """All that a job can be."""

    kinds: list[KindShape]


class MetricLines(Shape):
    """Lines of a run's metrics, and the number of the next one."""

    lines: list[Json] = Field(description="each with its step and epoch; those of a run in several phases say which")
    next: int = Field(description="give it as `after` to read on")


class DeviceSample(Shape):
    """One second of a device; null where it cannot be read."""

    at: float = Field(description="seconds since 1970")
    busy_share: float | None = Field(description="of the GPU, or of all cores of the machine")
    memory_bytes: int | None = Field(description="in use, by whatever")
    power_w: float | None
    ceiling_share: float | None = Field(
        description="of the job that runs there: share of its last ten seconds of computing in which it waited for "
        "nothing, by its own clocks; null where none runs or says so. What a run reached is in its result."
    )


class DeviceStory(Shape):
    """What a worker's device did lately."""

    worker: str
    name: str
    kind: Literal["gpu", "cpu"]
    memory_total_bytes: int | None
    job_id: str | None = Field(description="of the job that runs there")
    samples: list[DeviceSample] = Field(description="oldest first")
    stalls: dict[str, float] = Field(description="share of the job's last ten seconds of computing waited, by cause")


class History(Shape):
    """The last seconds of every worker's device."""

    interval_s: float
    devices: list[DeviceStory]
