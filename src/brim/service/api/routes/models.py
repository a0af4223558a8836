"""The models that requests may name; administrators change them with `brim models`."""

from typing import Any, Final

from fastapi import APIRouter

from brim.service.api import shapes
from brim.service.api.context import Here
from brim.service.api.errors import redacted
from brim.service.api.openapi import refusals

router = APIRouter(prefix="/api/models", tags=["predictions"])

_ORDER: Final = ("failed", "cold", "loading", "warm")  # of several predictors, the one that is furthest speaks


@router.get("", response_model=shapes.Models, responses=refusals(503), summary="The models that requests may name")
async def list_models(here: Here) -> shapes.Models:
    """By name, with what is loaded and how large; a model is loaded when it is first asked for, or before."""
    told: dict[str, dict[str, Any]] = {}
    for row in await here.predictions.models():
        known = told.get(row["name"])
        if known is None or _ORDER.index(row["state"]) > _ORDER.index(known["state"]):
            told[row["name"]] = row
    rows = await here.known.all()
    return shapes.Models(
        models=[shapes.model(row, told.get(row.name, {}), lambda text: redacted(text, here.redact)) for row in rows]
    )
