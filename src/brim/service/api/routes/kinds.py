"""What a job can be: every kind with its fields, for forms and for people who write bodies by hand."""

from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from brim.service.api import shapes_live

if TYPE_CHECKING:
    from brim.jobs.kinds import Kind

router = APIRouter(prefix="/api/training/kinds", tags=["jobs"])


@router.get("", response_model=shapes_live.Kinds, summary="List what a job can be")
def list_kinds() -> shapes_live.Kinds:
    """Each kind with the JSON schema of its config: types, ranges, defaults, and what each field means."""
    return _kinds()


@cache
def _kinds() -> shapes_live.Kinds:
    """Made once: it takes torch and some tenths of a second."""
    from brim.jobs.kinds import KINDS

    return shapes_live.Kinds(kinds=[_shape(kind) for kind in KINDS.values()])


def _shape(kind: "Kind") -> shapes_live.KindShape:
    from brim.jobs.kinds import config_schema

    presets: dict[str, dict[str, Any]] = {name: dict(values) for name, values in kind.presets.items()}
    return shapes_live.KindShape(
        kind=kind.name,
        title=kind.title,
        description=kind.description,
        makes=kind.makes,
        reads=kind.reads,
        reads_run=kind.reads_run,
        schema=config_schema(kind.name),
        presets=presets,
    )
