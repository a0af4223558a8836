"""Bulk prediction in three steps that may run in different processes, on different machines.

    tasks → read (CPU) → pixels → score (device) → rings → write (CPU) → outcomes

What travels between them is a parcel: the images of a few batches, so that a step takes long enough to be worth
sending and short enough to be done again. A step never fails for one image, it says so in the image's sheet. Nothing
here knows who runs the steps.

A record names a finished image and the hash of its bytes. It is written after the image's result, so it never promises
what is not there, and it holds for one recipe only: other weights or another threshold make all results anew. Records
come in small files, one for each parcel of images, and are gathered into one by the next run.
"""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from brim.engine.device import guard
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.storage import Place
from brim.errors import ConfigError, ImageError, OutOfMemory
from brim.segmentation.config import FilesConfig, PredictConfig
from brim.segmentation.images import ImageFile, ImageInput, image_bytes
from brim.segmentation.images.reading import read_image
from brim.segmentation.images.writing import encoded
from brim.segmentation.networks import InferenceNetwork, create_model, load_weights
from brim.segmentation.objects import Prediction, Rings, annotation_lines, to_polygons
from brim.segmentation.prediction.loader import ModelLoader
from brim.segmentation.prediction.scoring import TracedImage
from brim.segmentation.prediction.stream import CEILING_S, Lock, PredictRun
from brim.segmentation.tuning import FILE_NAME

PARCEL_IMAGES = 32  # at least, rounded up to whole batches: 80 ms of an H200, a second of a core that decodes
PARCEL_BYTES = 2**27  # of pixels in a parcel; one image may always travel
FETCHES = 4  # images asked for at once while one is decoded: stores answer late rather than slowly


FOLDER = ".brim"
_RECORDS = f"{FOLDER}/records"
_READERS = 16  # files asked for at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    name: str  # path or URL
    sha256: str  # of its bytes
    polygons: int
    height: int  # pixels
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What makes results of images, whoever makes them; the weights travel apart."""

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
    name: str  # as the user gave it
    image: ImageFile
    file: str  # of its result, below the output
    done: Record | None = None  # of a run before this one; it holds if the image's bytes are still the same


@dataclass(slots=True, kw_only=True)
class BulkImage:
    """One image on its way."""

    index: int
    name: str
    file: str
    sha256: str = ""  # of its bytes
    height: int = 0  # pixels
    width: int = 0
    kept: bool = False  # the result is there already
    polygons: int = 0
    error: str | None = None
    pixels: np.ndarray | None = None  # (H, W, 3) uint8, until they are scored, or drawn on
    rings: bytes | None = None  # of outlines.Rings
    mask: bytes | None = None  # of (H, W) bool, eight pixels a byte
    result: bytes | None = None  # of the file, for a reader who writes it

    def record(self) -> Record:
        """What is kept of it beside its result."""
        return Record(
            name=self.name, sha256=self.sha256, polygons=self.polygons, height=self.height, width=self.width
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class BulkParcel:
    """Images that travel together, and what it took so far."""

    sheets: list[BulkImage]
    busy_s: dict[str, float] = field(default_factory=dict)  # by step
    pixels: int = 0  # that went through the network
    batch_size: int = 0  # at the end
    scorer: str = ""  # who
    ceiling: float | None = None  # pixels/s of the forward alone, of that scorer


# The run's own


def split_tasks(tasks: Sequence[BulkTask], batch_size: int, num_workers: int) -> list[list[BulkTask]]:
    """Tasks in their order, in parcels of whole batches: those of one process, where all images are of one shape."""
    share = math.ceil(len(tasks) / (4 * num_workers))  # so that every worker has some
    size = batch_size * math.ceil(min(PARCEL_IMAGES, share) / batch_size)
    return [list(tasks[start : start + size]) for start in range(0, len(tasks), size)]


def pack_weights(model: str, weights: Path | str) -> bytes:
    """Weights of a FILE or a RUN as safetensors, once they are known to fit the model."""
    module = create_model(model)
    load_weights(module, weights)
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in module.state_dict().items()})


# Records of finished images


class Records:
    """The records of one recipe in a place; pickled, others add to them."""

    def __init__(self, place: Place, recipe: str, run: int = 0) -> None:
        """Store; recipe stands for all that results depend on besides the images, run counts those before."""
        self._place, self._recipe, self._run = place, recipe, run

    def open(self) -> dict[str, Record]:
        """What runs before this one finished, by name; this run counts from here on.

        Records of another recipe are removed: this run writes over their results.
        """
        names = self._place.names(_RECORDS)
        own = [name for name in names if name.startswith(f"{self._recipe}-")]
        for name in set(names).difference(own):
            self._place.remove(f"{_RECORDS}/{name}")
        with ThreadPoolExecutor(_READERS) as pool:
            read = list(pool.map(self._read, own))
        found = _latest(zip(map(_run_of, own), read, strict=True))
        self._run = max(map(_run_of, own), default=-1) + 1
        if len(own) > 1:
            self.add(found.values())
            self._run += 1
            for name in own:
                self._place.remove(f"{_RECORDS}/{name}")
        return found

    def add(self, records: Iterable[Record]) -> None:
        """Record finished images; the same ones again change nothing."""
        data = b"".join(json.dumps(asdict(record)).encode() + b"\n" for record in records)
        if data:
            digest = hashlib.sha256(data).hexdigest()[:16]
            self._place.put_bytes(data, f"{_RECORDS}/{self._recipe}-{self._run:06d}-{digest}.jsonl")

    def _read(self, name: str) -> list[Record]:
        try:
            lines = self._place.read_bytes(f"{_RECORDS}/{name}").splitlines()
            return [Record(**json.loads(line)) for line in lines]
        except (FileNotFoundError, ValueError, TypeError):  # gone, or not ours: its images are made again
            return []


def recipe_name(facts: dict[str, Any]) -> str:
    """A short name of all that results depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _run_of(name: str) -> int:
    number = name.split("-")[1] if name.count("-") == 2 else ""
    return int(number) if number.isdigit() else 0


def _latest(found: Iterable[tuple[int, list[Record]]]) -> dict[str, Record]:
    """The last record of each image; one that two runs at once made differently is none."""
    latest: dict[str, tuple[int, Record | None]] = {}
    for run, record in _flat(found):
        known = latest.get(record.name)
        if known is None or known[0] < run:
            latest[record.name] = (run, record)
        elif known[0] == run and known[1] != record:
            latest[record.name] = (run, None)
    return {name: record for name, (_, record) in latest.items() if record is not None}


def _flat(found: Iterable[tuple[int, list[Record]]]) -> Iterator[tuple[int, Record]]:
    for run, records in found:
        for record in records:
            yield run, record


# The steps


def read_parcels(tasks: Sequence[BulkTask]) -> Iterator[BulkParcel]:
    """Images' pixels, several files being fetched at once; those whose result is there are only looked at."""
    sheets: list[BulkImage] = []
    size_bytes, began_s = 0, time.perf_counter()
    fetch = Stage(name="fetch", work=_fetched, workers=FETCHES, depth=FETCHES)
    with Pipeline(tasks, [fetch], depth=FETCHES) as fetched:
        for task, data in fetched:
            sheet = _decoded(task, data)
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


def _decoded(task: BulkTask, data: bytes | ImageError) -> BulkImage:
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
            sheet.pixels = read_image(data, name=sheet.name)
        sheet.height, sheet.width = sheet.pixels.shape[:2]
    except (ImageError, OutOfMemory) as failure:
        sheet.error = str(failure)
    return sheet


class BulkScorer:
    """A warm network at its tuned batch; several threads may call it, their batches take turns."""

    def __init__(self, recipe: Recipe, weights: bytes, batch_sizes: str | None = None, name: str = "") -> None:
        """Load, and tune where the batch size of this device is not known.

        weights      safetensors
        batch_sizes  the content of a file of batch sizes
        name         of this scorer among others
        """
        self._recipe, self._name = recipe, name
        with tempfile.TemporaryDirectory(prefix="brim-") as folder:
            file, sizes = Path(folder, "weights.safetensors"), Path(folder, FILE_NAME)
            file.write_bytes(weights)
            if batch_sizes is not None:
                sizes.write_text(batch_sizes)
            files = recipe.files
            loader = ModelLoader(
                {recipe.model: file}, recipe.device, sizes, files.precision, files.tile, files.resize,
                overlap=files.overlap,
            )  # fmt: skip
            self._network, self._config = loader.prepare(
                iter(()), recipe.model, files.batch_size, files.threshold, files.detect_holes, files.strict
            )
            self.batch_sizes = sizes.read_text() if sizes.exists() else None
        self._lock = loader.lock
        self._ceiling: float | None = None

    @property
    def batch_size(self) -> int:
        return self._config.batch_size or 1

    def __call__(self, parcel: BulkParcel) -> BulkParcel:
        """Outlines of the images that have pixels; the pixels stay only where something is drawn on them."""
        began_s = time.perf_counter()
        sheets = [sheet for sheet in parcel.sheets if sheet.pixels is not None]
        run = _RingsRun(self._network, self._config, self._lock, sheets, with_mask=self._recipe.files.format == "mask")
        for sheet, found in zip(sheets, run.results(run.images_of(), len(sheets), None), strict=True):
            sheet.error = found.error
            sheet.rings, sheet.mask = run.found.pop(sheet.name, (None, None))
            if self._recipe.files.format != "overlay" or found.error is not None:
                sheet.pixels = None
        busy_s = time.perf_counter() - began_s
        if self._ceiling is None:
            self._ceiling = run.scorer.ceiling(CEILING_S)
        return replace(
            parcel, busy_s=parcel.busy_s | {"score": busy_s}, pixels=run.scorer.pixels, batch_size=run.scorer.size(),
            scorer=self._name, ceiling=self._ceiling,
        )  # fmt: skip


class _RingsRun(PredictRun):
    """A run whose polygons are made elsewhere: it ends with rings."""

    def __init__(
        self,
        network: InferenceNetwork,
        config: PredictConfig,
        lock: Lock,
        sheets: Sequence[BulkImage],
        *,
        with_mask: bool,
    ) -> None:
        super().__init__(network, config, lock)
        self._sheets, self._with_mask = sheets, with_mask
        self.found: dict[str, tuple[bytes, bytes | None]] = {}  # rings and mask by the image's name

    def images_of(self) -> list[ImageInput]:
        return [sheet.pixels for sheet in self._sheets if sheet.pixels is not None]

    def name(self, index: int, image: ImageInput) -> str:
        return self._sheets[index].name

    def finish(self, traced: list[TracedImage]) -> list[tuple[int, Prediction]]:
        return [(each.frame.index, self._outlined(each)) for each in traced]

    def _outlined(self, traced: TracedImage) -> Prediction:
        frame = traced.frame
        try:
            rings = self.rings(traced).to_bytes()
            mask = np.packbits(self._mask(traced) != 0).tobytes() if self._with_mask else None
        except (ImageError, OutOfMemory) as failure:
            return Prediction(frame.name, frame.height, frame.width, error=str(failure))
        self.found[frame.name] = (rings, mask)
        return Prediction(frame.name, frame.height, frame.width)


def write_parcel(
    parcel: BulkParcel, format: str, place: Place | None = None, records: Records | None = None
) -> BulkParcel:
    """Files of images whose outlines were found: put in a place and recorded there, or left in the sheets."""
    began_s = time.perf_counter()
    for sheet in parcel.sheets:
        if sheet.rings is None:
            continue
        try:
            with guard():
                sheet.result = _result(sheet, sheet.rings, format)
        except (ImageError, OutOfMemory) as failure:
            sheet.error = str(failure)
        sheet.pixels = sheet.rings = sheet.mask = None
        if place is not None and sheet.result is not None:
            place.put_bytes(sheet.result, sheet.file)
            sheet.result = b""
    if records is not None:
        records.add([sheet.record() for sheet in parcel.sheets if sheet.result is not None])
    return replace(parcel, busy_s=parcel.busy_s | {"write": time.perf_counter() - began_s})


def _result(sheet: BulkImage, rings: bytes, format: str) -> bytes:
    polygons = tuple(to_polygons(Rings.from_bytes(rings)))
    sheet.polygons = len(polygons)
    mask: Any = None
    if sheet.mask is not None:
        bits = np.unpackbits(np.frombuffer(sheet.mask, np.uint8), count=sheet.height * sheet.width)
        mask = bits.reshape(sheet.height, sheet.width) * np.uint8(255)
    prediction = Prediction(sheet.name, sheet.height, sheet.width, polygons, mask)
    return annotation_lines(prediction) if format == "coco" else encoded(prediction, format, sheet.pixels)
