"""Datasets: list, show, preview, delete, upload, statistics, single samples, and export as a zip."""

import asyncio
import base64
import json
import re
import shutil
from collections import OrderedDict, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as PathParameter
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from brim.config import PRINTABLE
from brim.errors import ConfigError, Conflict, DatasetError, ImageError, NotFound, StorageError
from brim.jobs.kinds import MAX_TEXT
from brim.jobs.registry import datasets as registry
from brim.jobs.store import DatasetRow, new_id
from brim.jobs.worker import disk
from brim.jobs.worker.redact import Redactor
from brim.service.api import figures, shapes
from brim.service.api.body import FILES, UPLOAD_HINT, Upload, boundary_of, unless_gone
from brim.service.api.context import Context, Here
from brim.service.api.errors import phrase
from brim.service.api.export import Download, ZipEntry, file_name
from brim.service.api.openapi import Id, PageNumber, problems
from brim.service.reader.client import LONG_S, Reader

router = APIRouter(prefix="/api/datasets", tags=["datasets"])

MAX_KEPT: Final = 32  # datasets whose statistics and lists of images are cached; a large one takes about 1 MB
MANIFEST: Final = "manifest.json"

_FILE: dict[str, Any] = {"type": "string", "format": "binary"}
_FILES: dict[str, Any] = {"type": "array", "items": _FILE}
_FORM: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "kind"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_TEXT, "pattern": PRINTABLE},
        "kind": {"type": "string", "enum": ["images", "sequences", "recordings"]},
        "images": {**_FILES, "description": "kind images: at least one"},
        "masks": {**_FILES, "description": "kind images: none, or one for every image, of the same name"},
        "sequences": {
            **_FILES,
            "description": "kind sequences: at least one; .npy, .npz, .csv, .parquet, .ts, .arff, .tsv or audio",
        },
        "recordings": {**_FILES, "description": "kind recordings: at least one, and stations.csv where they need it"},
        "labels": {**_FILE, "description": "kind sequences: none, or CSV of the file's name and its class"},
    },
}


@router.get("", responses=problems(422, 503), summary="List datasets, newest first")
def list_datasets(
    here: Here,
    kind: Annotated[Literal["", "rf", "images", "sequences", "recordings"], Query()] = "",
    page: PageNumber = 1,
) -> shapes.DatasetPageOut:
    """50 a page; an empty kind means any."""
    rows = here.catalogue.datasets.page(kind=kind or None, page=page or 1)
    datasets = [shapes.dataset(row, here.redact) for row in rows.rows]
    return shapes.DatasetPageOut(datasets=datasets, page=rows.page, pages=rows.pages, total=rows.total)


@router.post(
    "",
    status_code=201,
    responses={
        **problems(400, 413, 415, 422, 503, 507),
        409: {"model": shapes.Problem, "description": "The files are not what kind says, or do not belong together."},
    },
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
    summary="Upload a dataset",
)
async def upload_dataset(request: Request, response: Response, here: Here) -> shapes.DatasetOut:
    """Images with or without masks, sequences with or without labels, matched by their names; or recordings."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    id, settings = new_id(), here.settings
    folder = settings.data / "uploads" / id
    stream = request.stream()
    try:
        length = request.headers.get("content-length", "")
        num_bytes = int(length) if length.isdigit() else 0
        await run_in_threadpool(
            disk.check_room, settings.data, num_bytes, settings.min_free_bytes, "upload", UPLOAD_HINT
        )
        upload = Upload(folder, boundary, max_files=settings.max_upload_files, min_free_bytes=settings.min_free_bytes)
        with upload:
            async for chunk in stream:
                await run_in_threadpool(upload.feed, chunk)
        upload.finish()
        name, kind = _check_parts(upload)
        contents = await _store(here, id, kind, folder, upload)
        row = await run_in_threadpool(_add, here, id, name, kind, contents)
    finally:
        await run_in_threadpool(shutil.rmtree, folder, True)
    response.headers["Location"] = f"{router.prefix}/{row.id}"
    return shapes.dataset(row, here.redact)


@router.get("/{id}", responses=problems(404, 503), summary="Show a dataset")
def show_dataset(id: Id, here: Here) -> shapes.DatasetOut:
    return shapes.dataset(here.dataset(id), here.redact)


@router.delete("/{id}", status_code=204, responses=problems(404, 409, 503, 507), summary="Delete a dataset")
def delete_dataset(id: Id, here: Here) -> None:
    """Delete a dataset that nothing uses; files that were added by reference stay where they are."""
    registry.remove(here.catalogue, here.settings.data, here.dataset(id).id)


@router.get("/{id}/preview", responses=problems(404, 409, 422, 429, 503), summary="The first items of a dataset")
async def preview_dataset(id: Id, here: Here, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> shapes.PreviewOut:
    """Radio samples, images by name and size, or sequences by length and label."""
    row, place = await run_in_threadpool(_find, here, id)
    _check_written(row)
    items = await _read(here.reader, "preview", row, place, kind=row.kind, limit=limit)
    return shapes.PreviewOut(kind=row.kind, items=items)


@router.get(
    "/{id}/statistics",
    response_model=figures.StatisticsOut,
    responses=problems(404, 409, 429, 503),
    summary="Statistics of a dataset",
)
async def dataset_statistics(id: Id, here: Here) -> Any:
    """Counts, histograms and positions of transmitters; of a dataset that is being written, what exists so far."""
    row, place = await run_in_threadpool(_find, here, id)
    return await here.statistics.read(row, place)


@router.get(
    "/{id}/samples/{index}",
    responses=problems(404, 409, 422, 429, 503),
    summary="One sample of a radio dataset",
)
async def show_sample(
    id: Id,
    index: Annotated[int, PathParameter(ge=0, le=2**53, description="From 0, in the order of the dataset.")],
    here: Here,
) -> figures.SampleOut:
    """Positions of transmitter and receivers, and the spectrum each receiver recorded."""
    row, place = await run_in_threadpool(_find, here, id)
    if row.kind != "rf":
        raise Conflict(f'the dataset "{row.name}" is of kind {row.kind}; only those of kind rf have samples to show')
    sample = shapes.finite(await _read(here.reader, "sample", row, place, index=index))
    return figures.SampleOut(**{**sample, "note": sample["note"] and here.redact(sample["note"])})


@router.get(
    "/{id}/images/{index}",
    response_class=Response,
    responses={200: {"content": {"image/png": {}}}, **problems(404, 409, 422, 429, 503)},
    summary="One image of a dataset, small, with the outlines of its mask",
)
async def show_image(
    id: Id,
    index: Annotated[int, PathParameter(ge=0, le=2**53, description="From 0, in the order of the dataset.")],
    here: Here,
    side: Annotated[int, Query(ge=16, le=4096, description="The most pixels of a side.")] = 160,
    outlines: Annotated[bool, Query(description="Whether the objects of its mask are outlined.")] = True,
    job_id: Annotated[
        str, Query(max_length=MAX_TEXT, description="A job of segment.predict, whose objects are outlined too.")
    ] = "",
) -> Response:
    """A PNG; the headers Brim-Image, Brim-Size, Brim-Objects and Brim-Sizes tell its name, its own size, the number of
    its objects and the histogram of their pixels: those predicted if a job is given, otherwise those of its mask."""
    row, place = await run_in_threadpool(_find, here, id)
    if row.kind != "images":
        raise Conflict(f'the dataset "{row.name}" is of kind {row.kind}; only those of kind images have images to show')
    results = await run_in_threadpool(_results, here, row, job_id) if job_id else None
    images = await here.images.read(row, place)
    if index >= len(images):
        raise NotFound(f"there is no image {index}: there are {len(images)}, numbered from 0")
    image, mask = images[index]
    tile = await _read(
        here.reader, "image_tile", row, place, image=image, mask=mask, side=side, outlines=outlines, results=results
    )
    about = {"Brim-Image": quote(tile["name"]), "Brim-Size": f"{tile['width']}x{tile['height']}"}
    if tile["objects"] is not None:
        about["Brim-Objects"] = str(tile["objects"])
    if tile["sizes"] is not None:
        about["Brim-Sizes"] = json.dumps(tile["sizes"], separators=(",", ":"))
    return Response(base64.b64decode(tile["png"]), media_type="image/png", headers=about)


@router.get(
    "/{id}/export",
    status_code=200,
    response_class=StreamingResponse,  # not Download: FastAPI would document problems as zips too
    responses={200: {"content": {"application/zip": {}}}, **problems(404, 409, 422, 429, 503, 507)},
    summary="Export a dataset",
)
async def export_dataset(
    id: Id,
    request: Request,
    here: Here,
    format: Annotated[
        Literal["", "files", "parquet", "hdf5", "sigmf"],
        Query(description="Of radio samples, by default parquet; files are the dataset's own, of any kind."),
    ] = "",
) -> Response:
    """One zip: images, sequences and shards as they are, or radio samples in another format."""
    row, place = await run_in_threadpool(_find, here, id)
    chosen = format or ("parquet" if row.kind == "rf" else "files")
    _check_written(row)
    if chosen != "files" and row.kind != "rf":
        raise Conflict(f'the dataset "{row.name}" is of kind {row.kind}, which has format=files only')
    folder = here.exports.open(here.settings.data)
    try:
        async with unless_gone(request):
            if chosen == "files":
                entries = await _own_files(here, row, place)
            else:
                entries = await _converted(here, row, place, chosen, folder)
    except BaseException:
        await here.exports.close(folder)
        raise
    return Download(here.exports, folder, entries, file_name(row, chosen))


# Reading


class CachedStatistics:
    """Statistics of the datasets that were read last, until their files change."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: OrderedDict[str, tuple[list[int], Any]] = OrderedDict()  # id → stamp and figures, last used last
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def read(self, row: DatasetRow, place: Path) -> Any:
        """Of one dataset as its files are now; requests at the same time share one reading."""
        task = self._running.get(row.id)
        if task is None:
            task = self._running[row.id] = asyncio.create_task(self._read(row, place))
            task.add_done_callback(lambda _: self._running.pop(row.id, None))
        return await asyncio.shield(task)

    async def _read(self, row: DatasetRow, place: Path) -> Any:
        stamp, known = self._kept.get(row.id, (None, None))
        answer = await _read(self._reader, "statistics", row, place, kind=row.kind, stamp=stamp)
        current = known if answer["figures"] is None else shapes.finite(answer["figures"])
        self._kept[row.id] = answer["stamp"], current
        self._kept.move_to_end(row.id)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return current


class CachedImages:
    """The images and masks of the datasets that were shown last, until a folder of theirs changes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: OrderedDict[str, Any] = OrderedDict()  # by id, last used last
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def read(self, row: DatasetRow, place: Path) -> list[tuple[str, str | None]]:
        """Each image below its folder, and the path of its mask; thumbnails asked for at once share one listing."""
        async with self._locks[row.id]:
            kept = self._kept.get(row.id)
            if kept is None or await run_in_threadpool(_has_changed, kept["folders"]):
                kept = self._kept[row.id] = await _read(self._reader, "list_images", row, place)
            self._kept.move_to_end(row.id)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            images: list[tuple[str, str | None]] = kept["images"]
            return images


def _has_changed(folders: dict[str, int]) -> bool:
    try:
        return any(Path(folder).stat().st_mtime_ns != changed_ns for folder, changed_ns in folders.items())
    except OSError:
        return True


def _results(here: Context, row: DatasetRow, job_id: str) -> str:
    """The folder in which a job has predicted the images of a dataset; of several datasets each has its own."""
    job = here.job(job_id)
    datasets = job.config.get("dataset_ids", [])
    if job.kind != "segment.predict" or row.id not in datasets:
        raise Conflict(f'the job "{job.name}" has not predicted the dataset "{row.name}"', field="job_id")
    return str(here.settings.data / "results" / job.id / (row.id if len(datasets) > 1 else ""))


def _find(here: Context, id: str) -> tuple[DatasetRow, Path]:
    row = here.dataset(id)
    return row, here.settings.data / row.path


def _check_written(row: DatasetRow) -> None:
    if row.state == "writing":
        raise Conflict(f'the dataset "{row.name}" is still being written; wait for its job')


async def _read(reader: Reader, function: str, row: DatasetRow, place: Path, *, verb: str = "read", **more: Any) -> Any:
    """Call the reader on a dataset; its errors become a Conflict that does not say where the dataset is."""
    try:
        return await reader.call(function, path=str(place), **more)
    except (ConfigError, DatasetError, ImageError, StorageError) as error:
        if isinstance(error, StorageError) and function == "export":
            raise  # of the disk it writes to
        if row.state == "writing":
            raise Conflict(
                f'the dataset "{row.name}" is still being written and has nothing to show yet; try again soon'
            ) from error
        text = Redactor({place: f'dataset "{row.name}"'})(phrase(error))
        raise Conflict(f"the dataset cannot be {verb}: {text}") from error


async def _own_files(here: Context, row: DatasetRow, place: Path) -> list[ZipEntry]:
    """The dataset's own files; the manifest loses what it says of this machine."""
    listed = await _read(here.reader, "list_files", row, place, timeout_s=LONG_S, kind=row.kind)
    entries: list[ZipEntry] = [(name, Path(path)) for name, path in listed["files"]]
    if listed["manifest"] is None:
        return entries
    text = json.dumps(here.redact.values(listed["manifest"]), indent=1, ensure_ascii=False)
    return [(MANIFEST, f"{text}\n".encode()), *entries]


async def _converted(here: Context, row: DatasetRow, place: Path, format: str, folder: Path) -> list[ZipEntry]:
    """Radio samples in another format, written to the folder first."""
    files = await _read(
        here.reader, "export", row, place, verb="exported", timeout_s=LONG_S, folder=str(folder), format=format,
        min_free_bytes=here.settings.min_free_bytes,
    )  # fmt: skip
    return [(Path(file).name, Path(file)) for file in files]


# Uploading


def _check_parts(upload: Upload) -> tuple[str, str]:
    """Name and kind of the dataset, once the parts of the form fit them."""
    name, kind = upload.texts.get("name"), upload.texts.get("kind", "")
    if name is None:
        raise ConfigError("name is missing; give the dataset one", field="name")
    if len(name) > MAX_TEXT or not re.search(PRINTABLE, name):
        raise ConfigError(f"name must be 1 to {MAX_TEXT} characters that can be printed", field="name")
    if kind not in ("images", "sequences", "recordings"):
        shown = f'kind="{kind[:60]}" must be' if "kind" in upload.texts else "kind is missing; it must be"
        raise ConfigError(f"{shown} images, sequences or recordings", field="kind")
    if not upload.num_files[kind]:
        raise Conflict(f"{kind} is missing; send at least one file", field=kind)
    expected = {"images": ("images", "masks"), "sequences": ("sequences", "labels")}.get(kind, (kind,))
    present = [field for field in FILES if upload.num_files[field]] + ["labels"] * (upload.labels is not None)
    for field in present:
        if field not in expected:
            raise Conflict(f"{field} does not belong to a dataset of kind {kind}; leave it out", field=field)
    return name.strip(), kind


async def _store(here: Context, id: str, kind: str, folder: Path, upload: Upload) -> dict[str, Any]:
    """Check the files and move them to DATA/datasets/ID; what they hold."""
    data = here.settings.data
    try:
        if kind == "images":
            contents: dict[str, Any] = await here.reader.call("check_images", timeout_s=LONG_S, folder=str(folder))
            await run_in_threadpool(folder.rename, data / "datasets" / id)
            return contents
        if kind == "recordings":
            contents = asdict(await run_in_threadpool(registry.look, folder / kind, "recordings"))
            await run_in_threadpool((folder / kind).rename, data / "datasets" / id)
            return contents
        labels = None if upload.labels is None else str(upload.labels)
        return await here.reader.call(  # type: ignore[no-any-return]
            "pack_sequences", timeout_s=LONG_S, folder=str(folder / "sequences"), data=str(data), id=id, labels=labels
        )
    except (DatasetError, ImageError) as error:  # the files are not what kind says
        text = phrase(error)
        for path, shown in ((f"{folder / kind}/", ""), (f"{folder}/", ""), (str(folder), "the upload")):
            text = text.replace(path, shown)
        raise Conflict(f"{kind}: {text}", field=kind) from error
    except OSError as error:
        raise StorageError(f"the upload cannot be stored: {error.strerror}", hint="free some space") from error


def _add(here: Context, id: str, name: str, kind: Any, contents: dict[str, Any]) -> DatasetRow:
    try:
        return here.catalogue.datasets.add(name=name, kind=kind, path=f"datasets/{id}", owned=True, id=id, **contents)
    except BaseException:
        shutil.rmtree(here.settings.data / "datasets" / id, ignore_errors=True)
        raise
