"""Predictions as files: GeoJSON, COCO, ImageJ regions, masks and overlays, each written atomically; thumbnails."""

import colorsys
import errno
import io
import json
import os
import shutil
import tempfile
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import cv2
import numpy as np
from numpy.typing import NDArray

from brim.engine.storage import Place, is_url, place_of
from brim.errors import ConfigError, StorageError
from brim.segmentation.config import FORMATS
from brim.segmentation.images.reading import read_image, read_labels
from brim.segmentation.objects import (
    CocoFile,
    ImageObjects,
    Measurements,
    Polygon,
    Prediction,
    annotation_lines,
    csv_text,
    fill,
    geojson,
    geojson_of,
    roi_zip,
    to_measurements,
)
from brim.segmentation.objects.label_files import label_tiff, zarr_files

_ENDINGS = {
    "geojson": ".geojson",
    "roi": ".zip",
    "imagej": ".zip",
    "mask": ".png",
    "overlay": "_overlay.png",
    "labels": "_labels.tif",
    "csv": ".csv",
    "ome-zarr": ".ome.zarr",
}
_ZARR_LAST = ".zgroup"  # the file that completes a group
_COCO = "annotations.json"
_FILL = 0.3  # share of the object's colour in an overlay
_OUTLINE = (255, 196, 0)  # of a thumbnail: red, green, blue
_PREDICTED = (0, 220, 255)
_SHIFT = 4  # bits after the point of OpenCV's drawing coordinates


class Writer:
    """Writes predictions below a directory, or below a URL in an object store, from any thread.

    `names` are the images of the run, as predictions name them. A file is named after its image, with the same folders
    below the folder common to all; images that differ only in their suffix keep it. A failed image has no file.
    Entering checks that the directory can be written; leaving, also by an exception, writes the file of all images.
    """

    def __init__(self, out: Path | str, format: str, names: Sequence[Path | str], classes: Sequence[str] = ()) -> None:
        """classes are those that the model distinguishes."""
        if format not in FORMATS:
            raise ConfigError(f"format={format} is unknown; choose one of {', '.join(FORMATS)}")
        self._place, self._format, self._names = place_of(out), format, [str(name) for name in names]
        self._out = self._place.path  # None: in a store
        self._relative = _relative(self._names)
        self._stems = output_stems(self._names)
        self._numbers = {name: number for number, name in reversed(list(enumerate(self._names, 1)))}
        self._coco: CocoFile | None = None
        self._classes = classes

    def file(self, name: Path | str) -> str:
        """The file of an image's prediction, relative to the output."""
        if str(name) not in self._stems:
            raise ConfigError(f"{name} is not among the {len(self._names)} images this writer was opened for")
        return _COCO if self._format == "coco" else self._stems[str(name)].as_posix() + _ENDINGS[self._format]

    def path(self, name: Path | str) -> Path | str:
        """The path or URL of an image's prediction."""
        return self._place.at(self.file(name)) if self._out is None else self._out / self.file(name)

    def has(self, name: Path | str) -> bool:
        """Whether an earlier run wrote the file; it is empty if power failed before its bytes were on the disk."""
        if self._out is None:
            return self.file(name) + f"/{_ZARR_LAST}" * (self._format == "ome-zarr") in self._stored
        path = self._out / self.file(name)
        path = path / _ZARR_LAST if self._format == "ome-zarr" else path
        return path.is_file() and path.stat().st_size > 0

    def write(self, prediction: Prediction, image: np.ndarray | None = None) -> Path | str | None:
        """Write one image's file; returns its path, None for a failed image. Overlays need the image, RGB uint8."""
        target = self.path(prediction.name)
        if prediction.error is not None:
            return None
        if self._format == "coco":
            size = (prediction.height, prediction.width)
            self.put_lines(prediction.name, size, annotation_lines(prediction))
            return target
        self.put(prediction.name, encoded(prediction, self._format, image))
        return target

    def write_objects(self, frame_name: str, size: tuple[int, int], objects: ImageObjects) -> bool:
        """Write an image's file without making its polygons; False: this format needs them. size is (H, W)."""
        if self._format == "geojson":
            self.put(frame_name, geojson_of(objects.rings, objects.measurements))
        elif self._format == "csv" and objects.measurements is not None:
            self.put(frame_name, csv_text(objects.measurements))
        else:
            return False
        return True

    def put(self, name: Path | str, data: bytes) -> None:
        """Write an encoded file of an image; not for coco, whose one file spans all images."""
        if self._out is None:
            put_encoded(self._place, data, self.file(name), self._format)
        elif self._format == "ome-zarr":
            _write_folder(self._out / self.file(name), unpacked(data))
        else:
            _write(self._out / self.file(name), [data])

    def put_lines(self, name: Path | str, size: tuple[int, int], lines: bytes) -> None:
        """Add an image's annotation_lines; size is (H, W)."""
        assert self._coco is not None, "a coco writer is a context manager"
        try:
            self._coco.add_lines(self._numbers[str(name)], self._relative[str(name)].as_posix(), size, lines)
        except OSError as error:
            raise _not_written(self.path(name), error) from error

    def polygons_in(self, name: Path | str) -> int | None:
        """Number of polygons in the existing file of an image; None unless the format is geojson."""
        if self._format != "geojson":
            return None
        return self._place.read_bytes(self.file(name)).count(b'"type":"Feature"')

    def __enter__(self) -> Self:
        inputs = {name if is_url(name) else str(Path(name).resolve()) for name in self._names}
        for name in self._names:
            target = self.path(name)
            if (str(target.resolve()) if isinstance(target, Path) else target) in inputs:
                raise ConfigError(f"{target} would replace an input image; write to another directory")
        if self._out is None:
            probe_name = _part()
            self._place.put_bytes(b"brim", probe_name)
            self._place.remove(probe_name)
        spool = self._out or Path(tempfile.gettempdir())
        try:
            if self._out is not None:
                self._out.mkdir(parents=True, exist_ok=True)
                probe = self._out / _part()
                probe.write_bytes(b"brim")
                probe.unlink()
            if self._format == "coco":
                self._coco = CocoFile(spool, self._classes)
        except OSError as error:
            raise _not_written(spool, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._coco is None:
            return
        try:
            self._write_coco(self._coco)
        except StorageError:
            if error is None:  # else the first failure is raised
                raise
        finally:
            self._coco.close()
            self._coco = None

    def _write_coco(self, coco: CocoFile) -> None:
        if self._out is not None:
            _write(self._out / _COCO, coco.chunks())
            return
        try:
            with tempfile.NamedTemporaryFile() as file:
                file.writelines(coco.chunks())
                file.flush()
                self._place.put_file(Path(file.name), _COCO)
        except OSError as error:
            raise _not_written(tempfile.gettempdir(), error) from error

    @cached_property
    def _stored(self) -> frozenset[str]:
        """Names in the store: one listing instead of a request for each file."""
        return frozenset(self._place.walk())


def output_stems(names: Sequence[Path | str]) -> dict[str, Path]:
    """The path of each image's file relative to the output, without its suffix; no two images share one."""
    full = _relative(names)
    stems = {name: path.with_name(path.stem) for name, path in full.items()}
    distinct = {_fold(path): name for name, path in full.items()}.values()
    while True:  # repeated for "x.png.tif", whose stem is the name that "x.png" got beside "x.tif"
        times = Counter(_fold(stems[name]) for name in distinct)
        longer = {name: full[name] if times[_fold(stem)] > 1 else stem for name, stem in stems.items()}
        if longer == stems:
            return stems
        stems = longer


def _relative(names: Sequence[Path | str]) -> dict[str, Path]:
    """Each image's path below the folder common to all; links are not followed."""
    places = {str(name): _absolute(str(name)) for name in names}
    root = os.path.commonpath([path.parent for path in places.values()]) if places else ""
    return {name: path.relative_to(root) for name, path in places.items()}


def _absolute(name: str) -> Path:
    if is_url(name):
        scheme, _, rest = name.partition("://")
        return Path("/", scheme, rest)
    return Path(os.path.abspath(name))  # noqa: PTH100  resolve() follows links


# One image's file


def encoded(prediction: Prediction, format: str, image: np.ndarray | None = None) -> bytes:
    """The file of one image in any format; overlays need the image, (H, W, 3) RGB uint8."""
    if format == "geojson":
        return geojson(prediction.polygons, prediction.measurements)
    if format == "labels":
        return label_tiff(labels_of(prediction), prediction.pixel_um)
    if format == "csv":
        return csv_text(prediction.measurements or _measured(prediction, image))
    if format == "ome-zarr":
        return _zipped(zarr_files(labels_of(prediction), prediction.pixel_um))
    if format == "coco":
        measured = prediction.measurements
        with closing(CocoFile(classes=() if measured is None else measured.told_apart)) as file:
            file.add(1, Path(prediction.name).name, prediction)
            return b"".join(file.chunks())
    if format in ("roi", "imagej"):
        return roi_zip(prediction.polygons)
    if format == "mask":
        mask = prediction.mask
        if mask is None:
            mask = fill(prediction.polygons, prediction.height, prediction.width) * np.uint8(255)
        return _png(mask)
    if format != "overlay":
        raise ConfigError(f"format={format} is unknown; choose one of {', '.join(FORMATS)}")
    if image is None:
        raise ConfigError(f"{prediction.name}: an overlay is drawn on its image; pass it to write()")
    return _png(overlay(image, prediction.polygons)[..., ::-1])


def labels_of(prediction: Prediction) -> np.ndarray:
    """(H, W): the number of each pixel's polygon, from 1 in their order."""
    if prediction.labels is not None:
        return prediction.labels
    labels = np.zeros((prediction.height, prediction.width), np.uint32)
    for number, polygon in enumerate(prediction.polygons, 1):
        _fill_in(labels, polygon, number)
    return labels


def _fill_in(labels: NDArray[Any], polygon: Polygon, number: int) -> None:
    """Give the pixels of a polygon that number."""
    start, end = polygon.points.min(0), polygon.points.max(0)
    part = Polygon(polygon.points - start, tuple(hole - start for hole in polygon.holes), 0, 0)
    inside = fill([part], int(end[1] - start[1]), int(end[0] - start[0]))
    box = labels[start[1] : end[1], start[0] : end[0]]
    box[inside[: box.shape[0], : box.shape[1]]] = number


def _measured(prediction: Prediction, image: np.ndarray | None) -> Measurements:
    """Measurements of polygons made from a mask; intensities if the image, RGB uint8, is there."""
    import torch

    from brim.segmentation.objects.measuring import SIZES, find_objects

    pixels = None if image is None else torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    labels = torch.from_numpy(labels_of(prediction).astype(np.int32))[None]
    table = find_objects(labels, None, pixels).table.numpy()
    table[:, SIZES.index("confidence")] = [polygon.confidence for polygon in prediction.polygons]
    return to_measurements(table, prediction.pixel_um)


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files of an encoded folder."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zipped(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # without a date: the same labels are the same bytes
    return stream.getvalue()


def overlay(image: np.ndarray, polygons: Sequence[Polygon]) -> np.ndarray:
    """The image (H, W, 3) uint8 RGB with every polygon tinted, and outlined in bright on dark, visible on any image."""
    rings = [[_drawable(ring) for ring in (polygon.points, *polygon.holes)] for polygon in polygons]
    tinted = np.ascontiguousarray(image).copy()
    for number, outlines in enumerate(rings):
        cv2.fillPoly(tinted, outlines, _colour(number), cv2.LINE_8, _SHIFT)
    drawn = cv2.addWeighted(image, 1 - _FILL, tinted, _FILL, 0)
    width = max(1, round(max(image.shape[:2]) / 1000))
    for outlines in rings:
        cv2.polylines(drawn, outlines, True, (0, 0, 0), width + 2, cv2.LINE_AA, _SHIFT)
    for number, outlines in enumerate(rings):
        cv2.polylines(drawn, outlines, True, _colour(number), width, cv2.LINE_AA, _SHIFT)
    return np.asarray(drawn)


def _drawable(ring: np.ndarray) -> np.ndarray:
    """Pixel corners in OpenCV's fixed-point coordinates, where 0 is the centre of the first pixel."""
    return ((ring << _SHIFT) - (1 << _SHIFT - 1)).astype(np.int32)


def _colour(number: int) -> tuple[int, int, int]:
    """Saturated colours, consecutive ones far apart: hues in steps of the golden ratio."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.75, 1)
    return round(red * 255), round(green * 255), round(blue * 255)


def _png(array: np.ndarray) -> bytes:
    return bytes(cv2.imencode(".png", np.ascontiguousarray(array))[1])


def _write(target: Path, chunks: Iterable[bytes]) -> None:
    """Write a file under another name, then rename it."""
    part = target.parent / _part()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.writelines(chunks)
        part.replace(target)
    except OSError as error:
        raise _not_written(target, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _write_folder(target: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder under another name, then rename it."""
    new, old = target.parent / _part(), target.parent / _part()
    try:
        for name, data in files.items():
            _write(new / name, [data])
        if target.exists():
            target.rename(old)
        new.rename(target)
    except OSError as error:
        raise _not_written(target, error) from error
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def put_encoded(place: Place, data: bytes, file: str, format: str) -> None:
    """Write an encoded file to a place; those of a folder in their order, of which the last completes it."""
    for name, content in unpacked(data).items() if format == "ome-zarr" else [("", data)]:
        place.put_bytes(content, f"{file}/{name}" if name else file)


def _part() -> str:
    return f".{uuid.uuid4().hex}.part"


def _not_written(path: Path | str, error: OSError) -> StorageError:
    remedy = "free space or choose another directory"
    if error.errno == errno.ENAMETOOLONG:
        remedy = "give the image a shorter name"
    return StorageError(f"{path}: cannot be written: {error.strerror or error}; {remedy}")


def _fold(path: Path) -> str:
    return str(path).casefold()  # on some file systems a.png and A.png are one file


class Thumbnail(NamedTuple):
    """A picture, and what it is of."""

    png: bytes
    width: int  # of the image itself
    height: int
    areas: NDArray[np.int64] | None  # of the objects in its mask, or of those predicted; None: it has neither


def outlined(
    image: Path, mask: Path | None, side: int, *, outlines: bool = True, predicted: Path | None = None
) -> Thumbnail:
    """An image of at most that side in pixels, with the outlines of the objects in its mask, and of those predicted.

    predicted  GeoJSON, a mask or a label image
    """
    pixels = read_image(image)
    height, width = pixels.shape[:2]
    scale = min(1.0, side / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = np.array(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA) if scale < 1 else pixels)
    areas = None
    for file, colour in ((mask if outlines or predicted is None else None, _OUTLINE), (predicted, _PREDICTED)):
        if file is None:
            continue
        labels, areas = _drawn(file, width, height) if file.suffix == ".geojson" else _labelled(file)
        if outlines or file is predicted:
            labels = np.array(cv2.resize(labels.astype(np.float64), size, interpolation=cv2.INTER_NEAREST))
            edge = np.zeros(labels.shape, bool)
            edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
            edge[1:] |= labels[1:] != labels[:-1]
            small[edge] = colour
    return Thumbnail(cv2.imencode(".png", small[..., ::-1])[1].tobytes(), width, height, areas)


def _labelled(file: Path) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """A mask or label image as labels, and the pixels of each object."""
    labels = read_labels(file)
    numbers, counts = np.unique(labels, return_counts=True)
    return labels, counts[numbers > 0]


def _drawn(file: Path, width: int, height: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The polygons of a GeoJSON file of ours as labels, and the pixels of each."""
    features = json.loads(file.read_bytes())["features"]
    labels = np.zeros((height, width), np.int32)
    for number, feature in enumerate(features, 1):
        for polygon in _polygons(feature["geometry"]):
            _fill_in(labels, polygon, number)
    return labels, np.array([feature["properties"]["measurements"]["area_px"] for feature in features], np.int64)


def _polygons(geometry: Mapping[str, Any]) -> list[Polygon]:
    parts = geometry["coordinates"] if geometry["type"] == "MultiPolygon" else [geometry["coordinates"]]
    rings = [[np.array(ring[:-1], np.int32) for ring in part] for part in parts]
    return [Polygon(outline, tuple(holes), 0, 0) for outline, *holes in rings]
