"""Positions: of observations by a model, and of recordings that are uploaded.

Observations are JSON and go to a prediction process. Recordings are a multipart form: they are stored as they arrive,
bounded in size and number, measured and located in a process of the reader, and deleted.
"""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from brim.config import Doc, Length, Range, Unit, check, plain, read, schema, settings
from brim.errors import BrimError, ConfigError, Conflict, DatasetError, StorageError
from brim.jobs.store import new_id
from brim.rf.measurement.config import MeasureConfig
from brim.service.api.body import Upload, boundary_of, unless_gone
from brim.service.api.context import Context, Here
from brim.service.api.errors import phrase
from brim.service.api.openapi import problems
from brim.service.api.routes.predict import COLLECTION, prediction_answers, request_body
from brim.service.prediction.request import File, PredictForm, PredictionRequest, form_value

router = APIRouter(prefix="/api", tags=["predictions"])

MAX_RECORDINGS: Final = 64  # files of a request; a SigMF recording has two
LOCATE_S: Final = 110.0  # less than what the reader's limit of CPU time ends
_JSON: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateForm(PredictForm):
    observations: Annotated[
        tuple[dict[str, Any], ...],
        Length(1),
        Doc('As "brim rf locate" reads them; docs/locating.md describes them.'),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingsForm(MeasureConfig):
    """How recordings are measured, and what is known of the transmitter."""

    power_dbm: Annotated[
        float | Literal["unknown"], Range(-50, 120), Unit("dBm"), Doc("Power of the transmitter, if it is known.")
    ] = "unknown"
    format: Annotated[Literal["geojson", "html"], Doc("GeoJSON, or a page with the map and the correlations.")] = (
        "geojson"
    )

    def __post_init__(self) -> None:
        check(self)


def _bodies() -> dict[str, Any]:
    """Both request bodies in the document."""
    body = request_body(LocateForm, "application/json")
    form = schema(RecordingsForm)
    file = {"type": "string", "format": "binary"}
    files = {"type": "array", "minItems": 2, "items": file, "description": "recordings: SigMF, KiwiSDR WAV, …"}
    table = {**file, "description": "CSV of stations: name,lat,lon,alt"}
    form |= {"properties": {"files": files, "stations": table, **form["properties"]}, "required": ["files"]}
    body["requestBody"]["content"]["multipart/form-data"] = {"schema": form}
    return body


@router.post(
    "/locate",
    response_class=Response,
    responses={
        **prediction_answers(**{"application/geo+json": COLLECTION, "text/html": {"type": "string"}}),
        **problems(507),
    },
    openapi_extra=_bodies(),
    summary="Observations or recordings to positions",
)
async def locate(request: Request, here: Here) -> Response:
    """Where transmitters are, as GeoJSON points and regions.

    Observations, as JSON, are answered by a model; recordings, as a form, by the solver.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _recordings(request, here)
    async with PredictionRequest(request, here, "locate") as call:
        form = await call.read_json(LocateForm)
        data = _JSON({"observations": form.observations}).encode()
        return call.respond(await call.predict(File("", data)))


async def _recordings(request: Request, here: Context) -> Response:
    folder = here.settings.data / "uploads" / new_id()
    fields = settings(RecordingsForm)
    try:
        upload = Upload(
            folder, boundary_of(request.headers["content-type"]), max_files=MAX_RECORDINGS,
            min_free_bytes=here.settings.min_free_bytes, files=("files",), table="stations", texts=tuple(fields),
        )  # fmt: skip
        with upload:
            async for chunk in request.stream():
                await run_in_threadpool(upload.feed, chunk)
        upload.finish()
        values = {name: form_value(fields[name], text) for name, text in upload.texts.items()}
        form = read(RecordingsForm, values, "")
        if not upload.num_files["files"]:
            raise ConfigError("files is missing; send the recordings of at least two stations", field="files")
        async with unless_gone(request):
            body = await _located(here, folder, upload, form)
    except Conflict as error:  # a file's name that comes twice
        raise ConfigError(error.message, field=error.field, hint=error.hint) from error
    finally:
        await asyncio.shield(run_in_threadpool(shutil.rmtree, folder, True))
    kind = "text/html" if form.format == "html" else "application/geo+json"
    return Response(body, media_type=kind, headers={"Brim-Model": "solver"})


async def _located(here: Context, folder: Path, upload: Upload, form: RecordingsForm) -> str:
    """What the reader says; its errors name the files as the client does."""
    known = plain(form)
    power, shape = known.pop("power_dbm"), known.pop("format")
    try:
        answer: str = await here.reader.call(
            "locate_recordings", timeout_s=LOCATE_S, folder=str(folder / "files"),
            stations=None if upload.labels is None else str(upload.labels),
            power_dbm=None if power == "unknown" else power, format=shape, config=known,
        )  # fmt: skip
    except (ConfigError, DatasetError, StorageError) as error:
        raise _without_folder(error, folder) from error
    return answer


def _without_folder(error: BrimError, folder: Path) -> ConfigError:
    text = phrase(error)
    for path in (f"{folder / 'files'}/", f"{folder}/", str(folder)):
        text = text.replace(path, "")
    return ConfigError(text, field=error.field, code="invalid")
