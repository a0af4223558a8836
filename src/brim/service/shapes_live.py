"""Answers that pages are made of: what jobs can be, whether one could run, and what devices and runs are doing."""

from typing import Literal

from pydantic import Field

from brim.service.shapes import Json, Shape


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
