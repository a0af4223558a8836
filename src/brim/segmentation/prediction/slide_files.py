"""Large TIFF files, whole slides among them, through a network and into files, in bounded memory."""

import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import cv2
import numpy as np

from brim.errors import ImageError, StorageError
from brim.segmentation.config import FilesConfig, ImagePlanes, PredictConfig
from brim.segmentation.images import MAX_PIXELS, header_size
from brim.segmentation.images.contrast import contrast_of
from brim.segmentation.images.files import is_read_by_part
from brim.segmentation.images.reading import (
    ValueRange,
    is_confined,
    open_by_part,
    scaled,
    to_rgb,
    usual_values,
    value_range,
)
from brim.segmentation.images.stacks import ImageWindow, Stack, StoredChannels, choose, compose, load
from brim.segmentation.images.tiff import tifffile
from brim.segmentation.objects import (
    ChannelMeans,
    ImageObjects,
    Measurements,
    Prediction,
    Rings,
    csv_text,
    geojson_of,
    to_measurements,
    value_sums,
)
from brim.segmentation.objects.measuring import SIZES
from brim.segmentation.objects.polygons import doubled_areas
from brim.segmentation.prediction.loader import ModelLoader
from brim.segmentation.prediction.patches import ImageFrame
from brim.segmentation.prediction.slides import CORE, Segment, SlideLabels, TileLabels, TileObjects, predict_slide

SLIDE_PIXELS = 2**26  # images with more are predicted by tile
SLIDE_FORMATS = ("geojson", "labels", "csv")
_SAMPLES = 16  # across and down, of places that are looked at before the first tile
_SAMPLE_SIDE = 256  # pixels
_SIZED_SIDE, _SIZED = 1024, 6  # side and number of places in which the size of objects is estimated
_LABEL_TILE = 512  # pixels, side of a tile of a label image
_HEAD, _TAIL = b'{"type":"FeatureCollection","features":[', b"]}"


class Slide:
    """The chosen planes of a TIFF or OME-Zarr, as RGB tiles of 8 bits."""

    def __init__(self, stack: Stack, planes: ImagePlanes, name: str) -> None:
        self._stack, self._choice = stack, choose(stack, planes, name)
        self.height, self.width, self.pixel_um = stack.shape.height, stack.shape.width, stack.shape.pixel_um
        self._range = ValueRange(0, 255) if stack.shape.dtype == np.uint8 else self._value_range()

    def tile(self, window: ImageWindow) -> np.ndarray:
        values = compose(self._stack, self._choice, window)
        if values.dtype == bool:
            values = values * np.uint8(255)
        return to_rgb(values if values.dtype == np.uint8 else scaled(values, self._range))

    @cached_property
    def _first_pixel(self) -> StoredChannels | None:
        return load(self._stack, self._choice, ImageWindow(0, 0, 1, 1)).measured

    def means(self, labels: np.ndarray, window: ImageWindow, table: np.ndarray, scale: int) -> ChannelMeans | None:
        """Means of the objects of labels, every scale-th pixel of the window, in the values of the file."""
        first = self._first_pixel
        if first is None:
            return None
        sums, step = np.zeros((len(table), len(first.names))), max(1, CORE // scale)
        for row in range(0, len(labels), step):
            part = labels[row : row + step]
            top = window.top + row * scale
            band = window._replace(top=top, bottom=min(top + len(part) * scale, window.bottom))
            planes = load(self._stack, self._choice, band).planes[::scale, ::scale]
            sums += value_sums(part, planes, len(table))
        return ChannelMeans(first.names, sums / np.maximum(table[:, SIZES.index("area"), None], 1), first.shown)

    def _value_range(self) -> ValueRange:
        """From the values of all pixels, read once for that."""
        low, high, dtype = math.inf, -math.inf, self._stack.shape.dtype
        dark, bright = low, high
        if dtype.kind == "b":
            return ValueRange(0, 255)
        if dtype.kind not in "iuf":
            raise ImageError(f"values of type {dtype}; expected whole numbers, floats or bool")
        for top in range(0, self.height, CORE):
            for left in range(0, self.width, CORE):
                window = ImageWindow(top, left, min(top + CORE, self.height), min(left + CORE, self.width))
                part = compose(self._stack, self._choice, window)
                low, high = min(low, float(part.min())), max(high, float(part.max()))
                darker, brighter = usual_values(part)
                dark, bright = min(dark, darker), max(bright, brighter)
                if not np.isfinite(part.sum(dtype=np.float64)):
                    raise ImageError("holds NaN or infinite values; expected finite ones")
        return value_range(dtype, low, high, dark, bright)

    def samples(self) -> list[tuple[ImageWindow, np.ndarray]]:
        """Small places all over the slide."""
        side = min(_SAMPLE_SIDE, self.height, self.width)
        rows = np.unique(np.linspace(0, self.height - side, _SAMPLES).astype(int)).tolist()
        columns = np.unique(np.linspace(0, self.width - side, _SAMPLES).astype(int)).tolist()
        windows = [ImageWindow(top, left, top + side, left + side) for top in rows for left in columns]
        return [(window, self.tile(window)) for window in windows]


def is_slide(path: Path, format: str) -> bool:
    """Whether an image is predicted by tile: a large TIFF; some formats are written from whole images if possible."""
    try:
        if is_confined() or not is_read_by_part(path):
            return False
        size = header_size(path)
    except (ImageError, OSError):
        return False  # read with the others, which says what is wrong
    return size is not None and size[0] * size[1] > (SLIDE_PIXELS if format in SLIDE_FORMATS else MAX_PIXELS)


def predict_slide_file(
    path: Path, loader: ModelLoader, target: Path | str, config: FilesConfig, progress: Callable[[float], None]
) -> int:
    """Predict one file and write its result; returns the number of objects. `progress` takes the share done."""
    if config.format not in SLIDE_FORMATS or not isinstance(target, Path):
        known = ", ".join(SLIDE_FORMATS)
        raise ImageError(f"{path}: images of so many pixels are written to a directory, as {known}")
    return write_slide(path, target, config, lambda slide: _segmenter(loader, config, slide), progress)


def write_slide(
    path: Path,
    target: Path,
    config: FilesConfig,
    segmenter: Callable[[Slide], Segment],
    progress: Callable[[float], None] = lambda share: None,
) -> int:
    """Segment one file by tile and write its result; returns the number of objects."""
    try:
        with closing(open_by_part(path)) as stack:
            slide = Slide(stack, config, str(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            with _ResultFile(target, config.format, slide, config.detect_holes) as result:
                labels = predict_slide(
                    segmenter(slide), slide, result.add if config.format != "labels" else None, target.parent,
                    progress=lambda done, total: progress(done / total),
                )  # fmt: skip
                with closing(labels):
                    result.finish(labels)
                    return labels.num_objects
    except ImageError as error:
        text = str(error)
        raise ImageError(text if str(path) in text else f"{path}: {text}") from error.__cause__
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror or error}; free space") from error


# The network


def _segmenter(loader: ModelLoader, files: FilesConfig, slide: Slide) -> Segment:
    """Tiles through the network, with the contrast and the size of objects of the whole slide."""
    model = files.model or loader.only_model
    if classes := loader.load(model).traits.classes:
        raise ImageError(f"is predicted by tile, which knows no classes ({', '.join(classes)}); give parts of it")
    config = PredictConfig(
        batch_size=files.batch_size, threshold=files.threshold, min_area=files.min_area, diameter=files.diameter,
        detect_holes=files.detect_holes, strict=files.strict,
    )  # fmt: skip
    samples = slide.samples()
    contrast = contrast_of(np.concatenate([pixels for _, pixels in samples]))

    def segment(tiles: Iterable[np.ndarray]) -> Iterator[TileLabels]:
        for prediction in loader.stream(tiles, model, config, make=_kept, contrast=contrast):
            yield _labels_of(prediction)

    if config.diameter is None and loader.load(model).traits.task == "instances":
        diameter = _diameter(segment, slide, samples)
        config = replace(config, diameter=diameter)
    return segment


def _kept(frame: ImageFrame, objects: ImageObjects) -> Prediction:
    mask = None if objects.mask is None else objects.mask.copy()
    size = (frame.height, frame.width)
    return Prediction(frame.name, *size, (), mask, None, objects.labels, objects.measurements)


def _labels_of(prediction: Prediction) -> TileLabels:
    if prediction.error is not None:
        raise ImageError(prediction.error.partition(": ")[2] or prediction.error)
    if prediction.labels is None:
        assert prediction.mask is not None
        return TileLabels(cv2.connectedComponents(prediction.mask, connectivity=4)[1])
    measurements = prediction.measurements
    return TileLabels(prediction.labels, None if measurements is None else measurements.column("confidence"))


def _diameter(segment: Segment, slide: Slide, samples: list[tuple[ImageWindow, np.ndarray]]) -> float | None:
    """The median diameter of objects at the places of most contrast; None if there are none."""
    best = sorted(samples, key=lambda sample: -float(sample[1].std()))[:_SIZED]
    windows = []
    for window, _ in best:
        top = max(0, min(window.top, slide.height - _SIZED_SIDE))
        left = max(0, min(window.left, slide.width - _SIZED_SIDE))
        bottom, right = min(top + _SIZED_SIDE, slide.height), min(left + _SIZED_SIDE, slide.width)
        windows.append(ImageWindow(top, left, bottom, right))
    tiles = segment([slide.tile(window) for window in windows])
    areas = np.concatenate([np.bincount(tile.labels.ravel())[1:] for tile in tiles])
    areas = areas[areas > 0]
    return float(np.clip(np.sqrt(4 / math.pi * np.median(areas)), 4, 10_000)) if len(areas) else None


# Files


class _ResultFile:
    """The result of one slide, written part by part under another name, then renamed."""

    def __init__(self, target: Path, format: str, slide: Slide, detect_holes: bool) -> None:
        self._target, self._format, self._slide, self._detect_holes = target, format, slide, detect_holes
        self._part = target.parent / f".{uuid.uuid4().hex}.part"
        self._file: BinaryIO | None = None
        self._num_written = 0

    def __enter__(self) -> "_ResultFile":
        if self._format != "labels":
            self._file = self._part.open("wb")
        if self._format == "geojson":
            self._put(_HEAD)
        return self

    def add(self, tile: TileObjects) -> None:
        if not len(tile.objects.table):
            return
        rings, measurements = _in_slide(tile, self._slide, self._detect_holes)
        if self._format == "geojson":
            text = geojson_of(rings, measurements, tile.first)[len(_HEAD) : -len(_TAIL)]
            self._put(b"," * (self._num_written > 0) + text)
        else:
            text = csv_text(measurements, tile.first)
            self._put(text if self._num_written == 0 else text.partition(b"\n")[2])
        self._num_written += len(tile.objects.table)

    def finish(self, labels: SlideLabels) -> None:
        if self._format == "labels":
            self._write_labels(labels)
        if self._format == "geojson":
            self._put(_TAIL)
        if self._format == "csv" and not self._num_written:
            empty = np.zeros((0, 9))
            means = self._slide.means(np.zeros((0, 0), int), ImageWindow(0, 0, 1, 1), empty, 1)
            self._put(csv_text(to_measurements(empty, self._slide.pixel_um, means)))
        if self._file is not None:
            self._file.close()
        self._part.replace(self._target)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)

    def _write_labels(self, labels: SlideLabels) -> None:
        dtype = np.dtype(np.uint16 if labels.largest < 2**16 else np.uint32)
        side, pixel_um = _LABEL_TILE, self._slide.pixel_um
        size = {} if pixel_um is None else {"resolution": (1e4 / pixel_um,) * 2, "resolutionunit": "CENTIMETER"}
        with tifffile().TiffWriter(self._part, bigtiff=True) as file:
            file.write(
                labels.tiles(side, dtype), shape=(labels.height, labels.width), dtype=dtype, tile=(side, side),
                compression="deflate", compressionargs={"level": 1}, photometric="minisblack", metadata=None,
                software="brim", maxworkers=1, **size,
            )  # fmt: skip
        with self._part.open("rb") as written:
            os.fsync(written.fileno())


def _in_slide(tile: TileObjects, slide: Slide, detect_holes: bool) -> tuple[Rings, Measurements]:
    """Outlines and measurements in the slide's pixels."""
    objects, scale = tile.objects, tile.scale
    means = slide.means(objects.labels[0].numpy(), tile.window, objects.table.numpy(), scale)
    origin = np.array([tile.window.left, tile.window.top], np.int32)
    points, first = objects.rings.points.numpy() * np.int32(scale) + origin, objects.rings.first.numpy()
    owner = objects.owner.numpy()
    table = objects.table.numpy().copy()
    table[:, SIZES.index("area")] *= scale * scale
    table[:, SIZES.index("perimeter")] *= scale
    table[:, [SIZES.index("x"), SIZES.index("y")]] = table[:, [SIZES.index("x"), SIZES.index("y")]] * scale + origin
    table[:, SIZES.index("confidence")] = tile.confidence
    area = -doubled_areas(points, first[:-1], np.diff(first)) / 2 if len(owner) else np.zeros(0)
    mass = np.zeros(len(owner))
    mass[owner == np.arange(len(owner))] = table[:, SIZES.index("confidence")] * table[:, SIZES.index("area")]
    if not detect_holes:
        owner = np.where(owner == np.arange(len(owner)), owner, -1)
    return Rings(points, first, area, mass, owner), to_measurements(table, slide.pixel_um, means)
