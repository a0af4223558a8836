"""Datasets: list, show, preview, delete, and bring your own images or sequences."""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from brim.config import PRINTABLE
from brim.errors import BrimError, ConfigError, Conflict, DatasetError, ImageError
from brim.jobs.kinds import MAX_TEXT
from brim.jobs.registry import datasets as sources
from brim.jobs.store import DatasetRow, new_id
from brim.service.api import shapes
from brim.service.api.context import Context, Here
from brim.service.api.data.multipart import boundary_of
from brim.service.api.data.preview import preview
from brim.service.api.data.reading import readable
from brim.service.api.data.upload import FILES, Upload, check_room
from brim.service.api.openapi import Id, PageNumber, refusals

router = APIRouter(prefix="/api/datasets", tags=["datasets"])

_DRAIN_BYTES = 64 * 1024**2  # of a refused body that is read to its end, so that the client gets to read the answer
_UPLOAD = re.compile(r"[0-9a-f]{32}")

_FILE: dict[str, Any] = {"type": "string", "format": "binary"}
_FILES: dict[str, Any] = {"type": "array", "items": _FILE}
_FORM: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "kind"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_TEXT, "pattern": PRINTABLE},
        "kind": {"type": "string", "enum": ["images", "sequences"]},
        "images": {**_FILES, "description": "kind images: at least one"},
        "masks": {**_FILES, "description": "kind images: none, or one for every image, of the same name"},
        "sequences": {**_FILES, "description": "kind sequences: at least one, .npy"},
        "labels": {**_FILE, "description": "kind sequences: none, or CSV of the file's name and its class"},
    },
}


@router.get("", response_model=shapes.DatasetPage, responses=refusals(422, 503), summary="List datasets, newest first")
def list_datasets(
    here: Here,
    kind: Annotated[Literal["", "rf", "images", "sequences"], Query()] = "",
    page: PageNumber = 1,
) -> shapes.DatasetPage:
    """50 a page; an empty kind means any."""
    found = here.catalogue.datasets.page(kind=kind or None, page=page or 1)
    rows = [shapes.dataset(row, here.redact) for row in found.rows]
    return shapes.DatasetPage(datasets=rows, page=found.page, pages=found.pages, total=found.total)


@router.post(
    "",
    status_code=201,
    response_model=shapes.Dataset,
    responses={
        **refusals(400, 413, 415, 422, 503, 507),
        409: {"model": shapes.Problem, "description": "The files are not what kind says, or do not belong together."},
    },
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
    summary="Bring a dataset",
)
async def upload_dataset(request: Request, response: Response, here: Here) -> shapes.Dataset:
    """Images with or without masks, or .npy sequences with or without labels; files are told by their names."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    id = new_id()
    folder = here.settings.data / "uploads" / id
    stream = request.stream()
    try:
        length = request.headers.get("content-length", "")
        await run_in_threadpool(
            check_room, here.settings.data, int(length) if length.isdigit() else 0, here.settings.min_free_bytes
        )
        upload = await _receive(stream, folder, boundary, here)
        row = await run_in_threadpool(_keep, here, id, folder, upload)
    except ClientDisconnect:
        return Response(status_code=400)  # type: ignore[return-value]  # nobody reads it
    except BrimError:
        await _drain(stream)
        raise
    finally:
        await run_in_threadpool(shutil.rmtree, folder, True)
    response.headers["Location"] = f"{router.prefix}/{row.id}"
    return shapes.dataset(row, here.redact)


@router.get("/{id}", response_model=shapes.Dataset, responses=refusals(404, 503), summary="Show a dataset")
def show_dataset(id: Id, here: Here) -> shapes.Dataset:
    """One dataset."""
    return shapes.dataset(here.dataset(id), here.redact)


@router.delete("/{id}", status_code=204, responses=refusals(404, 409, 503, 507), summary="Delete a dataset")
def delete_dataset(id: Id, here: Here) -> None:
    """Delete a dataset that nothing uses; one that was brought by reference is only forgotten."""
    sources.remove(here.catalogue, here.settings.data, here.dataset(id).id)


@router.get(
    "/{id}/preview",
    response_model=shapes.Preview,
    responses=refusals(404, 409, 422, 503),
    summary="The first items of a dataset",
)
def preview_dataset(id: Id, here: Here, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> shapes.Preview:
    """Radio samples, images by name and size, or sequences by length and label."""
    row = here.dataset(id)
    if row.state == "writing":
        raise Conflict(f'the dataset "{row.name}" is still being written; wait for its job')
    place = here.settings.data / row.path
    with readable(row, place):
        items = preview(place, row.kind, limit)
    return shapes.Preview(kind=row.kind, items=items)


def discard_uploads(data: Path) -> None:
    """Remove what uploads left that an earlier process did not live to see the end of."""
    with suppress(OSError):
        for folder in (data / "uploads").iterdir():
            if _UPLOAD.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)


# Receiving


async def _receive(stream: Any, folder: Path, boundary: bytes, here: Context) -> Upload:
    """Write the body to the folder as it comes."""
    settings = here.settings
    upload = Upload(folder, boundary, max_files=settings.max_upload_files, min_free_bytes=settings.min_free_bytes)
    with upload:
        async for chunk in stream:
            await run_in_threadpool(upload.feed, chunk)
    upload.finish()
    return upload


async def _drain(stream: Any) -> None:
    seen = 0
    with suppress(Exception):  # too large, or gone: the answer goes out either way
        async for chunk in stream:
            seen += len(chunk)
            if seen > _DRAIN_BYTES:
                return


def _keep(here: Context, id: str, folder: Path, upload: Upload) -> DatasetRow:
    """Check what came and list it; nothing of a refused one stays."""
    name = _name(upload.texts.get("name"))
    kind = upload.texts.get("kind", "")
    if kind not in ("images", "sequences"):
        shown = f'kind="{kind[:60]}" must be' if "kind" in upload.texts else "kind is missing; it must be"
        raise ConfigError(f"{shown} images or sequences", field="kind")
    _check_parts(kind, upload)
    data = here.settings.data
    try:
        found = _keep_images(data, id, folder) if kind == "images" else _keep_sequences(data, id, folder, upload)
    except (DatasetError, ImageError) as failure:
        text = (
            str(failure).replace(f"{folder / kind}/", "").replace(f"{folder}/", "").replace(str(folder), "the upload")
        )
        raise Conflict(f"{kind}: {text}", field=kind) from failure  # the files are not what kind says
    try:
        return here.catalogue.datasets.add(
            name=name,
            kind=kind,  # type: ignore[arg-type]  # one of the two
            path=f"datasets/{id}",
            owned=True,
            items=found.items,
            bytes=found.bytes,
            about=found.about,
            state=found.state,
            id=id,
        )
    except BaseException:
        shutil.rmtree(data / "datasets" / id, ignore_errors=True)
        raise


def _name(text: str | None) -> str:
    if text is None:
        raise ConfigError("name is missing; give the dataset one", field="name")
    if len(text) > MAX_TEXT or not re.search(PRINTABLE, text):
        raise ConfigError(f"name must be 1 to {MAX_TEXT} characters that can be printed", field="name")
    return text.strip()


def _check_parts(kind: str, upload: Upload) -> None:
    """The files of the kind, and no others."""
    if not upload.num_files[kind]:
        raise Conflict(f"{kind} is missing; send at least one file", field=kind)
    taken = {"images": ("images", "masks"), "sequences": ("sequences",)}[kind]
    for field in FILES:
        if upload.num_files[field] and field not in taken:
            raise Conflict(f"{field} does not belong to a dataset of kind {kind}; leave it out", field=field)
    if upload.labels is not None and kind != "sequences":
        raise Conflict(f"labels do not belong to a dataset of kind {kind}; leave them out", field="labels")


def _keep_images(data: Path, id: str, folder: Path) -> sources.DatasetSummary:
    found = sources.look(folder, "images")
    folder.rename(data / "datasets" / id)
    return found


def _keep_sequences(data: Path, id: str, folder: Path, upload: Upload) -> sources.DatasetSummary:
    found = sources.pack(folder / "sequences", data, id, labels=upload.labels)
    assert found is not None  # nothing stops it
    return found
