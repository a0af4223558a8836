"""Bulk prediction in three steps that may run in different processes, on different machines.

    tasks → read (CPU) → pixels → score (device) → rings → write (CPU) → outcomes

A parcel travels between the steps: the images of a few batches, so that a step takes long enough to be worth sending
and short enough to be repeated. An image that fails does not fail the step; its sheet has the error.

A record names a finished image and the hash of its bytes. It is written after the image's result and holds for one
recipe: other weights or another threshold make all results anew. Records come in small files, one per parcel, and are
merged into one by the next run.
"""

import hashlib
import json
import math
import re
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from brim.config import part
from brim.engine.device import guard
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.storage import Place
from brim.errors import ConfigError, ImageError, OutOfMemory
from brim.segmentation.config import FilesConfig, ImagePlanes, PredictConfig
from brim.segmentation.images import ImageFile, image_bytes
from brim.segmentation.images.reading import read_image
from brim.segmentation.images.writing import encoded, put_encoded
from brim.segmentation.networks import load_model, read_metadata, task_of
from brim.segmentation.objects import ImageObjects, Measurements, Prediction, Rings, annotation_lines, to_polygons
from brim.segmentation.prediction.loader import ModelLoader
from brim.segmentation.prediction.patches import ImageFrame
from brim.segmentation.prediction.stream import CEILING_S, PredictRun
from brim.segmentation.tuning import FILE_NAME

PARCEL_IMAGES = 32  # at least, rounded up to whole batches: 80 ms on an H200, a second of decoding on one core
PARCEL_BYTES = 2**27  # of pixels in a parcel of more than one image
FETCHES = 4  # images fetched at once while one is decoded: stores have a high latency
FOLDER = ".brim"
_KNOWN = ("contrast", "scale", "classes")  # of weights, besides the task
_RECORDS = f"{FOLDER}/records"
_READERS = 16  # files of records fetched at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    name: str  # path or URL
    sha256: str  # of its bytes
    polygons: int
    height: int  # pixels
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that results depend on except images and weights."""

    files: FilesConfig
    device: str = "auto"

    @property
    def model(self) -> str:
        if self.files.model is None:
            raise ConfigError("is missing", field="model", code="missing", hint="name the network of the weights")
        return self.files.model

    @property
    def needs_tuning(self) -> bool:
        """Whether the batch size depends on the device."""
        return not self.files.strict and self.files.batch_size != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkTask:
    index: int  # in the run
    name: str  # as the user wrote it
    image: ImageFile
    file: str  # of its result, below the output
    done: Record | None = None  # of an earlier run; valid if the image's bytes have the same hash


@dataclass(slots=True, kw_only=True)
class BulkImage:
    """One image on its way through the steps."""

    index: int
    name: str
    file: str
    sha256: str = ""  # of its bytes
    height: int = 0  # pixels
    width: int = 0
    kept: bool = False  # the result exists already
    polygons: int = 0
    error: str | None = None
    pixels: np.ndarray | None = None  # (H, W, 3) uint8, until they are scored, or drawn on
    rings: bytes | None = None  # Rings.to_bytes
    mask: bytes | None = None  # (H, W) bool, eight pixels a byte
    labels: bytes | None = None  # (H, W) uint32, deflated, if the format needs them
    measurements: bytes | None = None  # Measurements.to_bytes, of instances
    result: bytes | None = None  # content of the file; empty once it is written

    def record(self) -> Record:
        return Record(name=self.name, sha256=self.sha256, polygons=self.polygons, height=self.height, width=self.width)


@dataclass(slots=True, kw_only=True)
class BulkParcel:
    """Images that travel together, and the work done on them so far."""

    sheets: list[BulkImage]
    busy_s: dict[str, float] = field(default_factory=dict)  # by step
    pixels: int = 0  # that went through the network
    batch_size: int = 0  # at the end
    scorer: str = ""  # name
    ceiling: float | None = None  # pixels/s of the forward alone, of that scorer


def split_tasks(tasks: Sequence[BulkTask], batch_size: int, num_workers: int) -> list[list[BulkTask]]:
    """Tasks in their order, split into whole batches; for images of one shape, the batches of a single process."""
    share = math.ceil(len(tasks) / (4 * num_workers))  # so that every worker gets some
    size = batch_size * math.ceil(min(PARCEL_IMAGES, share) / batch_size)
    return [list(tasks[start : start + size]) for start in range(0, len(tasks), size)]


def pack_weights(model: str, weights: Path | str) -> bytes:
    """Weights of a FILE or a RUN as safetensors; raises if they are not of this model."""
    tensors = {name: tensor.contiguous() for name, tensor in load_model(model, weights).state_dict().items()}
    known = {name: text for name, text in read_metadata(weights).items() if name in _KNOWN}
    return safetensors.torch.save(tensors, known | {"task": task_of(weights)})


# Records of finished images


class Records:
    """The records of one recipe in a place; workers add to a pickled copy."""

    def __init__(self, place: Place, recipe: str, run: int = 0) -> None:
        """recipe is a recipe_name, run the number of earlier runs."""
        self._place, self._recipe, self._run = place, recipe, run

    def open(self) -> dict[str, Record]:
        """Records of earlier runs by image name; begins a new run.

        Records of other recipes are removed, since this run replaces their results.
        """
        names = self._place.names(_RECORDS)
        own = [name for name in names if name.startswith(f"{self._recipe}-")]
        for name in set(names).difference(own):
            self._place.remove(f"{_RECORDS}/{name}")
        with ThreadPoolExecutor(_READERS) as pool:
            contents = list(pool.map(self._read, own))
        runs = [int(name.split("-")[1]) if re.fullmatch(r"\w+-\d+-\w+\.jsonl", name) else 0 for name in own]
        latest: dict[str, tuple[int, Record | None]] = {}
        for run, records in zip(runs, contents, strict=True):
            for record in records:
                known, other = latest.get(record.name, (-1, None))
                if run > known:
                    latest[record.name] = (run, record)
                elif run == known and other != record:  # two runs at once saw different bytes: neither counts
                    latest[record.name] = (run, None)
        kept = {name: record for name, (_, record) in latest.items() if record is not None}
        self._run = max(runs, default=-1) + 1
        if len(own) > 1:
            self.add(kept.values())
            self._run += 1
            for name in own:
                self._place.remove(f"{_RECORDS}/{name}")
        return kept

    def add(self, records: Iterable[Record]) -> None:
        """Record finished images; repeating a call changes nothing."""
        data = b"".join(json.dumps(asdict(record)).encode() + b"\n" for record in records)
        if data:
            digest = hashlib.sha256(data).hexdigest()[:16]
            self._place.put_bytes(data, f"{_RECORDS}/{self._recipe}-{self._run:06d}-{digest}.jsonl")

    def _read(self, name: str) -> list[Record]:
        try:
            lines = self._place.read_bytes(f"{_RECORDS}/{name}").splitlines()
            return [Record(**json.loads(line)) for line in lines]
        except (FileNotFoundError, ValueError, TypeError):  # removed or damaged: its images are predicted again
            return []


def recipe_name(facts: dict[str, Any]) -> str:
    """A hash of all that results depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


# The steps


def read_parcels(tasks: Sequence[BulkTask], planes: ImagePlanes | None = None) -> Iterator[BulkParcel]:
    """Images with their pixels, several files being fetched at once; finished images are not decoded."""
    sheets: list[BulkImage] = []
    size_bytes, began_s = 0, time.perf_counter()
    fetch = Stage(name="fetch", work=_fetched, workers=FETCHES, depth=FETCHES)
    with Pipeline(tasks, [fetch], depth=FETCHES) as fetched:
        for task, data in fetched:
            sheet = _decoded(task, data, planes or ImagePlanes())
            num_bytes = 0 if sheet.pixels is None else sheet.pixels.nbytes
            if sheets and size_bytes + num_bytes > PARCEL_BYTES:
                yield BulkParcel(sheets=sheets, busy_s={"read": time.perf_counter() - began_s})
                sheets, size_bytes, began_s = [], 0, time.perf_counter()
            sheets.append(sheet)
            size_bytes += num_bytes
    yield BulkParcel(sheets=sheets, busy_s={"read": time.perf_counter() - began_s})


def _fetched(task: BulkTask) -> tuple[BulkTask, bytes | ImageError]:
    try:
        return task, image_bytes(task.image, name=task.name)
    except ImageError as failure:
        return task, failure


def _decoded(task: BulkTask, data: bytes | ImageError, planes: ImagePlanes) -> BulkImage:
    sheet = BulkImage(index=task.index, name=task.name, file=task.file)
    try:
        if isinstance(data, ImageError):
            raise data
        sheet.sha256 = hashlib.sha256(data).hexdigest()
        if task.done is not None and task.done.sha256 == sheet.sha256:
            sheet.kept, sheet.polygons = True, task.done.polygons
            sheet.height, sheet.width = task.done.height, task.done.width
            return sheet
        with guard():
            sheet.pixels = read_image(data, name=sheet.name, planes=planes)
        sheet.height, sheet.width = sheet.pixels.shape[:2]
    except (ImageError, OutOfMemory) as failure:
        sheet.error = str(failure)
    return sheet


class BulkScorer:
    """A loaded network at its tuned batch size; several threads may call it, their batches take turns."""

    def __init__(self, recipe: Recipe, weights: bytes, batch_sizes: str | None = None, name: str = "") -> None:
        """Load the network, and tune it if its batch size on this device is not known.

        weights      safetensors
        batch_sizes  the content of a file of batch sizes
        name         of this scorer among others
        """
        self._format, self._name = recipe.files.format, name
        self.planes: ImagePlanes = recipe.files  # what to read of the images
        with tempfile.TemporaryDirectory(prefix="brim-") as folder:
            file, sizes = Path(folder, "weights.safetensors"), Path(folder, FILE_NAME)
            file.write_bytes(weights)
            if batch_sizes is not None:
                sizes.write_text(batch_sizes)
            config, precision = part(PredictConfig, recipe.files), recipe.files.precision
            loader = ModelLoader(
                {recipe.model: file}, recipe.device, sizes, precision, config.tile, config.resize,
                overlap=config.overlap,
            )  # fmt: skip
            self._network, self._config = loader.prepare(iter(()), recipe.model, config)
            self.batch_sizes = sizes.read_text() if sizes.exists() else None
        self._lock = loader.lock
        self._ceiling: float | None = None

    @property
    def batch_size(self) -> int:
        return self._config.batch_size or 1

    def __call__(self, parcel: BulkParcel) -> BulkParcel:
        """Add the rings of the images that have pixels; pixels are kept only for overlays."""
        began_s = time.perf_counter()
        sheets = [sheet for sheet in parcel.sheets if sheet.pixels is not None]

        def keep(frame: ImageFrame, objects: ImageObjects) -> Prediction:
            sheet = sheets[frame.index]
            sheet.rings = objects.rings.to_bytes()
            mask = objects.labels if objects.mask is None else objects.mask
            sheet.mask = np.packbits(mask != 0).tobytes() if self._format == "mask" else None
            if objects.labels is not None and self._format in ("labels", "ome-zarr"):
                sheet.labels = zlib.compress(objects.labels.astype(np.uint32).tobytes(), 1)
            sheet.measurements = None if objects.measurements is None else objects.measurements.to_bytes()
            return Prediction(frame.name, frame.height, frame.width)

        images = [sheet.pixels for sheet in sheets if sheet.pixels is not None]
        names = [sheet.name for sheet in sheets]
        run = PredictRun(self._network, self._config, self._lock, make=keep, names=names)
        for sheet, prediction in zip(sheets, run.results(images), strict=True):
            sheet.error = prediction.error
            if self._format not in ("overlay", "csv") or sheet.error is not None:
                sheet.pixels = None
        busy_s = time.perf_counter() - began_s
        if self._ceiling is None:
            self._ceiling = run.scorer.ceiling(CEILING_S)
        return replace(
            parcel, busy_s=parcel.busy_s | {"score": busy_s}, pixels=run.scorer.pixels, batch_size=run.scorer.size(),
            scorer=self._name, ceiling=self._ceiling,
        )  # fmt: skip


def write_parcel(
    parcel: BulkParcel, format: str, place: Place | None = None, records: Records | None = None
) -> BulkParcel:
    """Encode the results: written to the place and recorded there, or left in the sheets."""
    began_s = time.perf_counter()
    for sheet in parcel.sheets:
        if sheet.rings is None:
            continue
        try:
            with guard():
                sheet.result = _encoded(sheet, sheet.rings, format)
        except (ImageError, OutOfMemory) as failure:
            sheet.error = str(failure)
        sheet.pixels = sheet.rings = sheet.mask = sheet.labels = sheet.measurements = None
        if place is not None and sheet.result is not None:
            put_encoded(place, sheet.result, sheet.file, format)
            sheet.result = b""
    if records is not None:
        records.add([sheet.record() for sheet in parcel.sheets if sheet.result is not None])
    return replace(parcel, busy_s=parcel.busy_s | {"write": time.perf_counter() - began_s})


def _encoded(sheet: BulkImage, rings: bytes, format: str) -> bytes:
    polygons = tuple(to_polygons(Rings.from_bytes(rings)))
    sheet.polygons = len(polygons)
    mask: Any = None
    if sheet.mask is not None:
        bits = np.unpackbits(np.frombuffer(sheet.mask, np.uint8), count=sheet.height * sheet.width)
        mask = bits.reshape(sheet.height, sheet.width) * np.uint8(255)
    labels = measurements = None
    if sheet.labels is not None:
        labels = np.frombuffer(zlib.decompress(sheet.labels), np.uint32).reshape(sheet.height, sheet.width)
    if sheet.measurements is not None:
        measurements = Measurements.from_bytes(sheet.measurements)
    prediction = Prediction(sheet.name, sheet.height, sheet.width, polygons, mask, None, labels, measurements)
    return annotation_lines(prediction) if format == "coco" else encoded(prediction, format, sheet.pixels)
