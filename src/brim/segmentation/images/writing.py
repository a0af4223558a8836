"""Predictions out: GeoJSON, COCO, ImageJ regions, masks and overlays, each file whole or not there at all."""

import colorsys
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import cv2
import numpy as np

from brim.engine.storage import is_url, place_of
from brim.errors import ConfigError, StorageError
from brim.segmentation.config import FORMATS
from brim.segmentation.objects import CocoFile, Polygon, Prediction, annotation_lines, fill, geojson, roi_zip

_ENDINGS = {"geojson": ".geojson", "roi": ".zip", "mask": ".png", "overlay": "_overlay.png"}
_COCO = "annotations.json"
_FILL = 0.3  # share of the object's colour in an overlay
_SHIFT = 4  # bits after the point of OpenCV's drawing coordinates


class Writer:
    """Writes predictions below a directory, or below a URL in an object store, from any thread.

    `names` are the images of the run, as predictions name them. A file is called after its image, in the folder its
    image has below the folder common to all; images that differ only by their suffix keep it. The files of a failed
    image are left out. Entering checks that the directory can be written; leaving, also by an exception, writes what
    spans all images.
    """

    def __init__(self, out: Path | str, format: str, names: Sequence[Path | str]) -> None:
        if format not in FORMATS:
            raise ConfigError(f"format={format} is unknown; choose one of {', '.join(FORMATS)}")
        self._place, self._format, self._names = place_of(out), format, [str(name) for name in names]
        self._out = self._place.path  # None: in a store
        self._relative = _relative(self._names)
        self._stems = output_stems(self._names)
        self._numbers = {name: number for number, name in reversed(list(enumerate(self._names, 1)))}
        self._coco: CocoFile | None = None

    def file(self, name: Path | str) -> str:
        """The file that an image's prediction goes to, below the output."""
        if str(name) not in self._stems:
            raise ConfigError(f"{name} is not among the {len(self._names)} images this writer was opened for")
        return _COCO if self._format == "coco" else self._stems[str(name)].as_posix() + _ENDINGS[self._format]

    def path(self, name: Path | str) -> Path | str:
        """The same with the output before it: a path, or a URL."""
        return self._at(self.file(name))

    def has(self, name: Path | str) -> bool:
        """Whether a run before this one left the file whole: one that lost its bytes with the power is empty."""
        if self._out is None:
            return self.file(name) in self._there
        path = self._out / self.file(name)
        return path.is_file() and path.stat().st_size > 0

    def write(self, prediction: Prediction, image: np.ndarray | None = None) -> Path | str | None:
        """Write one image's file and say where it is; None for a failed image. Overlays need the image, RGB uint8."""
        target = self.path(prediction.name)
        if prediction.error is not None:
            return None
        if self._format == "coco":
            size = (prediction.height, prediction.width)
            self.put_lines(prediction.name, size, annotation_lines(prediction))
            return target
        self.put(prediction.name, encoded(prediction, self._format, image))
        return target

    def put(self, name: Path | str, data: bytes) -> None:
        """Write an image's file that was encoded elsewhere; not for coco, whose one file spans all images."""
        if self._out is None:
            self._place.put_bytes(data, self.file(name))
        else:
            _write(self._out / self.file(name), [data])

    def put_lines(self, name: Path | str, size: tuple[int, int], lines: bytes) -> None:
        """Take an image's annotations that coco.annotation_lines made elsewhere; size is (H, W)."""
        assert self._coco is not None, "a coco writer is a context manager"
        try:
            self._coco.add_lines(self._numbers[str(name)], self._relative[str(name)].as_posix(), size, lines)
        except OSError as error:
            raise _refused(self.path(name), error) from error

    def polygons_in(self, name: Path | str) -> int | None:
        """Polygons in the file of an image, as written before; None where its format does not tell."""
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
            probe = _part()
            self._place.put_bytes(b"brim", probe)
            self._place.remove(probe)
        else:
            self._check_directory(self._out)
        if self._format == "coco":
            self._coco = self._new_coco()
        return self

    def _check_directory(self, out: Path) -> None:
        probe = out / _part()
        try:
            out.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"brim")
            probe.unlink()
        except OSError as error:
            raise _refused(out, error) from error

    def _new_coco(self) -> CocoFile:
        where = self._out if self._out is not None else Path(tempfile.gettempdir())
        try:
            return CocoFile(where)
        except OSError as error:
            raise _refused(where, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._coco is None:
            return
        try:
            self._write_coco(self._coco)
        except StorageError:
            if error is None:  # the failure under way says more
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
            raise _refused(tempfile.gettempdir(), error) from error

    def _at(self, file: str) -> Path | str:
        return self._place.at(file) if self._out is None else self._out / file

    @cached_property
    def _there(self) -> frozenset[str]:
        """Names in the store, as they were when first asked: one listing instead of a request for each."""
        return frozenset(self._place.walk())


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


def _refused(path: Path | str, error: OSError) -> StorageError:
    return StorageError(f"{path}: cannot be written: {error.strerror or error}; free space or choose another directory")


def _fold(path: Path) -> str:
    return str(path).casefold()  # on some file systems a.png and A.tif would meet
