"""Predictions out: GeoJSON, COCO, ImageJ regions, masks and overlays, each file whole or not there at all."""

import colorsys
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

import cv2
import numpy as np

from brim.errors import ConfigError, StorageError
from brim.segmentation.coco import CocoFile
from brim.segmentation.geojson import geojson
from brim.segmentation.imagej import roi_zip
from brim.segmentation.polygons import Polygon, fill
from brim.segmentation.prediction import Prediction

Format = Literal["geojson", "coco", "roi", "mask", "overlay"]
FORMATS: tuple[str, ...] = get_args(Format)

_ENDINGS = {"geojson": ".geojson", "roi": ".zip", "mask": ".png", "overlay": "_overlay.png"}
_COCO = "annotations.json"
_FILL = 0.3  # share of the object's colour in an overlay
_SHIFT = 4  # bits after the point of OpenCV's drawing coordinates


class Writer:
    """Writes predictions below a directory, from any thread.

    `names` are the images of the run, as predictions name them. A file is called after its image, in the folder its
    image has below the folder common to all; images that differ only by their suffix keep it. The files of a failed
    image are left out. Entering checks that the directory can be written; leaving, also by an exception, writes what
    spans all images.
    """

    def __init__(self, out: Path | str, format: str, names: Sequence[Path | str]) -> None:
        if format not in FORMATS:
            raise ConfigError(f"format={format} is unknown; choose one of {', '.join(FORMATS)}")
        self._out, self._format, self._names = Path(out), format, [str(name) for name in names]
        self._relative = _relative(self._names)
        self._stems = output_stems(self._names)
        self._numbers = {name: number for number, name in reversed(list(enumerate(self._names, 1)))}
        self._coco: CocoFile | None = None

    def path(self, name: Path | str) -> Path:
        """The file that an image's prediction goes to."""
        if str(name) not in self._stems:
            raise ConfigError(f"{name} is not among the {len(self._names)} images this writer was opened for")
        if self._format == "coco":
            return self._out / _COCO
        stem = self._stems[str(name)]
        return self._out / stem.parent / (stem.name + _ENDINGS[self._format])

    def write(self, prediction: Prediction, image: np.ndarray | None = None) -> Path | None:
        """Write one image's file and say where it is; None for a failed image. Overlays need the image, RGB uint8."""
        target = self.path(prediction.name)
        if prediction.error is not None:
            return None
        if self._format == "coco":
            assert self._coco is not None, "a writer is a context manager"
            try:
                self._coco.add(self._numbers[prediction.name], self._relative[prediction.name].as_posix(), prediction)
            except OSError as error:
                raise _refused(target, error) from error
            return target
        _write(target, [encoded(prediction, self._format, image)])
        return target

    def polygons_in(self, name: Path | str) -> int | None:
        """Polygons in the file of an image, as written before; None where its format does not tell."""
        if self._format != "geojson":
            return None
        return self.path(name).read_bytes().count(b'"type":"Feature"')

    def __enter__(self) -> Self:
        inputs = {Path(name).resolve() for name in self._names}
        for name in self._names:
            if self.path(name).resolve() in inputs:
                raise ConfigError(f"{self.path(name)} would replace an input image; write to another directory")
        probe = self._out / _part()
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"brim")
            probe.unlink()
            if self._format == "coco":
                self._coco = CocoFile(self._out)
        except OSError as error:
            raise _refused(self._out, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._coco is None:
            return
        try:
            _write(self._out / _COCO, self._coco.chunks())
        except StorageError:
            if error is None:  # the failure under way says more
                raise
        finally:
            self._coco.close()
            self._coco = None


def output_stems(names: Sequence[Path | str]) -> dict[str, Path]:
    """Where each image's file goes, below the output directory and without its ending; no two images share one."""
    full = _relative(names)
    stems = {name: path.with_name(path.stem) for name, path in full.items()}
    distinct = {_fold(path): name for name, path in full.items()}.values()
    while True:  # again for "x.png.tif": its stem is the name that "x.png" was given beside "x.tif"
        times = Counter(_fold(stems[name]) for name in distinct)
        longer = {name: full[name] if times[_fold(stem)] > 1 else stem for name, stem in stems.items()}
        if longer == stems:
            return stems
        stems = longer


def _relative(names: Sequence[Path | str]) -> dict[str, Path]:
    """Each image's path below the folder common to all. Links are not followed: a name is what the user sees."""
    places = {str(name): Path(os.path.abspath(name)) for name in names}  # noqa: PTH100  resolve() follows links
    root = os.path.commonpath([path.parent for path in places.values()]) if places else ""
    return {name: path.relative_to(root) for name, path in places.items()}


# One image's file


def encoded(prediction: Prediction, format: str, image: np.ndarray | None = None) -> bytes:
    """The file of one image in any of the formats; overlays need the image, (H, W, 3) RGB uint8."""
    if format == "geojson":
        return geojson(prediction.polygons)
    if format == "coco":
        return coco(prediction)
    if format == "roi":
        return roi_zip(prediction.polygons)
    if format == "mask":
        return _png(mask(prediction))
    if format != "overlay":
        raise ConfigError(f"format={format} is unknown; choose one of {', '.join(FORMATS)}")
    if image is None:
        raise ConfigError(f"{prediction.name}: an overlay is drawn on its image; pass it to write()")
    return _png(overlay(image, prediction.polygons)[..., ::-1])


def coco(prediction: Prediction) -> bytes:
    """One image as a COCO file of its own."""
    with closing(CocoFile()) as file:
        file.add(1, Path(prediction.name).name, prediction)
        return b"".join(file.chunks())


def mask(prediction: Prediction) -> np.ndarray:
    """(H, W) uint8, 255 inside: the prediction's own mask, or its polygons filled."""
    if prediction.mask is not None:
        return np.asarray(prediction.mask)
    return np.where(fill(prediction.polygons, prediction.height, prediction.width), np.uint8(255), np.uint8(0))


def overlay(image: np.ndarray, polygons: Sequence[Polygon]) -> np.ndarray:
    """The image (H, W, 3) uint8 RGB with every polygon tinted, and outlined bright on dark: one shows on any ground."""
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
    """Strong colours, neighbours in number far apart: hues a golden section of the circle from one to the next."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.75, 1)
    return round(red * 255), round(green * 255), round(blue * 255)


def _png(array: np.ndarray) -> bytes:
    return bytes(cv2.imencode(".png", np.ascontiguousarray(array))[1])


# Files


def _write(target: Path, chunks: Iterable[bytes]) -> None:
    """Write a file under another name, then rename: whoever looks sees all of it or nothing."""
    part = target.parent / _part()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.writelines(chunks)
        part.replace(target)
    except OSError as error:
        raise _refused(target, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _part() -> str:
    return f".{uuid.uuid4().hex}.part"


def _refused(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be written: {error.strerror or error}; free space or choose another directory")


def _fold(path: Path) -> str:
    return str(path).casefold()  # on some file systems a.png and A.tif would meet
