"""Predictions of a run as one COCO file, gathered on disk as they come and put in order at the end."""

import io
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from brim.segmentation.objects.polygons import Polygon, fill
from brim.segmentation.objects.prediction import Prediction

CATEGORY = {"id": 1, "name": "object"}


class CocoFile:
    """Images and annotations of a run; add from any thread, in any order. Without a directory all is in memory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._spool: IO[bytes] = io.BytesIO()
        if directory is not None:
            self._spool = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  lives until close
        self._images: dict[int, tuple[str, int, int]] = {}  # number: its entry, and where its annotations lie
        self._lock = threading.Lock()

    def add(self, number: int, file_name: str, prediction: Prediction) -> None:
        """Take an image and its annotations; number is its id, and its place in the file."""
        self.add_lines(number, file_name, (prediction.height, prediction.width), annotation_lines(prediction))

    def add_lines(self, number: int, file_name: str, size: tuple[int, int], lines: bytes) -> None:
        """The same of what annotation_lines made, perhaps elsewhere and long ago; size is (H, W)."""
        image = {"id": number, "file_name": file_name, "height": size[0], "width": size[1]}
        with self._lock:
            start = self._spool.seek(0, 2)
            self._spool.write(lines)
            self._images[number] = (_dumps(image).decode(), start, len(lines))

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, piece by piece: images by number, annotations numbered from 1."""
        order = [(image, *self._images[image]) for image in sorted(self._images)]
        images = ",\n".join(entry for _, entry, _, _ in order).encode()
        yield b'{"info":{"description":"brim"},"categories":[' + _dumps(CATEGORY) + b'],\n"images":[' + images
        yield b'],\n"annotations":['
        number = 0
        for image, _, start, length in order:
            self._spool.seek(start)
            for line in self._spool.read(length).splitlines():
                number += 1
                yield (b",\n" if number > 1 else b"\n") + f'{{"id":{number},"image_id":{image},'.encode() + line[1:]
        yield b"]}\n"

    def close(self) -> None:
        """Forget what was gathered."""
        with suppress(OSError):  # what did not fit on the disk is not needed any more
            self._spool.close()


def annotation_lines(prediction: Prediction) -> bytes:
    """An image's annotations, one JSON object a line, without what depends on the others of the file: their ids."""
    return b"".join(_dumps(_annotation(polygon, prediction)) + b"\n" for polygon in prediction.polygons)


def _annotation(polygon: Polygon, prediction: Prediction) -> dict[str, Any]:
    left, top = polygon.points.min(0).tolist()
    right, bottom = polygon.points.max(0).tolist()
    # COCO's polygons have no holes: several rings are several parts.
    outline: Any = [polygon.points.ravel().tolist()]
    return {
        "category_id": CATEGORY["id"],
        "segmentation": _run_lengths(polygon, prediction.height, prediction.width) if polygon.holes else outline,
        "bbox": [left, top, right - left, bottom - top],
        "area": polygon.area,
        "iscrowd": 0,
        "score": round(polygon.confidence, 6),
    }


def _run_lengths(polygon: Polygon, height: int, width: int) -> dict[str, Any]:
    """COCO's uncompressed run lengths: outside, inside, outside… down the columns, from the left."""
    start, end = polygon.points.min(0), polygon.points.max(0)
    corner = Polygon(polygon.points - start, tuple(hole - start for hole in polygon.holes), 0, 0)
    columns = fill([corner], int(end[1] - start[1]), int(end[0] - start[0])).T
    change = np.diff(np.pad(columns.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    column, row = np.nonzero(change)  # by turns where a run of the column starts and where it ends
    bounds = (column + start[0]) * height + row + start[1]
    merged = np.flatnonzero(bounds[1:-1:2] == bounds[2::2]) * 2 + 1  # a run that goes on in the next column
    bounds = np.delete(bounds, np.concatenate([merged, merged + 1]))
    return {"size": [height, width], "counts": np.diff(bounds, prepend=0, append=height * width).tolist()}


def _dumps(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
