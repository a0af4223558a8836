"""Datasets to look at and to take away: figures for charts and maps, one sample with its spectra, all as a zip."""

from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from brim.errors import Conflict, NotFound
from brim.jobs.store import DatasetRow
from brim.service.api import shapes_views
from brim.service.api.context import Context, Here
from brim.service.api.data.export import Download, file_name
from brim.service.api.data.reading import readable
from brim.service.api.openapi import Id, refusals
from brim.service.api.shapes import finite

router = APIRouter(prefix="/api/datasets", tags=["datasets"])

Row = Annotated[int, Path(ge=0, le=2**53, description="From 0, in the order of the dataset.")]


@router.get(
    "/{id}/statistics",
    response_model=shapes_views.Statistics,
    responses=refusals(404, 409, 429, 503),
    summary="Figures of a dataset",
)
async def dataset_statistics(id: Id, here: Here) -> Any:
    """Counts and histograms, and where transmitters are; of a dataset that is being written what is there so far."""
    row, place = await run_in_threadpool(_find, here, id)
    return await here.views.statistics.of(row, place)


@router.get(
    "/{id}/samples/{index}",
    response_model=shapes_views.Sample,
    responses=refusals(404, 409, 422, 429, 503),
    summary="One sample of a radio dataset",
)
async def show_sample(id: Id, index: Row, here: Here) -> shapes_views.Sample:
    """Where transmitter and receivers are, and the spectrum each receiver recorded."""
    row, place = await run_in_threadpool(_find, here, id)
    if row.kind != "rf":
        raise Conflict(f'the dataset "{row.name}" is of kind {row.kind}; only those of kind rf have samples to show')
    return await here.views.slow.run(_sample, here, row, place, index)


@router.get(
    "/{id}/export",
    status_code=200,
    response_class=StreamingResponse,  # not Download: FastAPI would say that refusals are zips too
    responses={200: {"content": {"application/zip": {}}}, **refusals(404, 409, 422, 429, 503, 507)},
    summary="Take a dataset away",
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
    if row.state == "writing":
        raise Conflict(f'the dataset "{row.name}" is still being written; wait for its job')
    if chosen != "files" and row.kind != "rf":
        raise Conflict(f'the dataset "{row.name}" is of kind {row.kind}, which has format=files only')
    exports, settings = here.views.exports, here.settings
    try:
        if chosen == "files":
            parcel = await exports.own_files(row, place, here.redact.values)
        else:
            parcel = await exports.converted(
                row, place, chosen, data=settings.data, min_free_bytes=settings.min_free_bytes, request=request
            )
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    return Download(parcel, file_name(row, chosen))


def _find(here: Context, id: str) -> tuple[DatasetRow, FilePath]:
    row = here.dataset(id)
    return row, here.settings.data / row.path


def _sample(here: Context, row: DatasetRow, place: FilePath, index: int) -> shapes_views.Sample:
    from brim.rf.datasets.inspect import open_dataset
    from brim.rf.datasets.sample import sample

    with readable(row, place):
        data = open_dataset(place)
        if index >= len(data):
            there = f"it has {len(data)}, from 0 to {len(data) - 1}" if len(data) else "it has none yet"
            raise NotFound(f'the dataset "{row.name}" has no sample {index}: {there}')
        found = finite(sample(data, index))
    note = found["note"] and here.redact(found["note"])
    return shapes_views.Sample(**{**found, "note": note})
