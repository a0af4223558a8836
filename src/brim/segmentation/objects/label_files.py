"""Label images as TIFF and OME-Zarr: each pixel has the number of its object, 0 is background. Needs only NumPy.

Both are written plainly, deflated, so that any reader opens them; 16 bits up to 65 535 objects, else 32.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.errors import ImageError

MEDIA_TYPE = "image/tiff"
LABELS = "labels/cells"  # the label image in a Zarr group
_CHUNK = 1024  # pixels, side of a chunk
_STRIP_BYTES = 2**18  # before compression
_LEVEL = 1  # of deflate: labels are long runs of equal values
_SHORT, _LONG, _RATIONAL, _ASCII = 3, 4, 5, 2
_SIZES = {_SHORT: 2, _LONG: 4, _RATIONAL: 8, _ASCII: 1}


def narrow(labels: NDArray[Any]) -> NDArray[Any]:
    """Labels as uint16, as uint32 if there are too many."""
    fits = labels.dtype == np.uint16 or int(labels.max(initial=0)) < 2**16
    return labels.astype(np.uint16 if fits else np.uint32, copy=False)


def label_tiff(labels: NDArray[Any], pixel_um: float | None = None) -> bytes:
    """labels (H, W) as a TIFF of one page; pixel_um is the side of a pixel, if it is known."""
    labels = narrow(labels).astype("<u2" if narrow(labels).dtype == np.uint16 else "<u4", copy=False)
    height, width = labels.shape
    rows = max(1, _STRIP_BYTES // max(1, width * labels.itemsize))
    strips = [zlib.compress(labels[top : top + rows].tobytes(), _LEVEL) for top in range(0, height, rows)]
    sizes = [len(strip) for strip in strips]
    offsets = (8 + np.cumsum([0, *sizes[:-1]])).tolist()
    entries: list[tuple[int, int, Any]] = [
        (256, _LONG, [width]),
        (257, _LONG, [height]),
        (258, _SHORT, [8 * labels.itemsize]),
        (259, _SHORT, [8]),  # deflate
        (262, _SHORT, [1]),  # 0 is black
        (273, _LONG, offsets),
        (277, _SHORT, [1]),
        (278, _LONG, [rows]),
        (279, _LONG, sizes),
    ]
    if pixel_um is not None:
        per_cm = round(1e4 / pixel_um * 1000)
        entries += [(282, _RATIONAL, [per_cm, 1000]), (283, _RATIONAL, [per_cm, 1000]), (296, _SHORT, [3])]
    entries.append((305, _ASCII, b"brim\0"))
    return _tiff(b"".join(strips), sorted(entries))


def _tiff(pixels: bytes, entries: list[tuple[int, int, Any]]) -> bytes:
    pixels += b"\0" * (len(pixels) % 2)
    start = 8 + len(pixels)
    beyond = start + 2 + 12 * len(entries) + 4
    table, values = struct.pack("<H", len(entries)), b""
    for tag, kind, content in entries:
        data = content if kind == _ASCII else struct.pack(f"<{len(content)}{'H' if kind == _SHORT else 'I'}", *content)
        count = len(data) // _SIZES[kind]
        place = data.ljust(4, b"\0")
        if len(data) > 4:
            place = struct.pack("<I", beyond + len(values))
            values += data + b"\0" * (len(data) % 2)
        table += struct.pack("<HHI", tag, kind, count) + place
    return struct.pack("<2sHI", b"II", 42, start) + pixels + table + b"\0" * 4 + values


def zarr_files(labels: NDArray[Any], pixel_um: float | None = None) -> dict[str, bytes]:
    """labels (H, W) as an OME-Zarr group, version 0.4: names of files → contents; the last one completes it."""
    labels = narrow(labels)
    chunk = [min(_CHUNK, side) for side in labels.shape]
    array = {
        "zarr_format": 2, "shape": list(labels.shape), "chunks": chunk, "dtype": labels.dtype.newbyteorder("<").str,
        "compressor": {"id": "zlib", "level": _LEVEL}, "fill_value": 0, "order": "C", "filters": None,
        "dimension_separator": "/",
    }  # fmt: skip
    unit = {} if pixel_um is None else {"unit": "micrometer"}
    scale = [pixel_um or 1.0] * 2

    def about(path: str) -> bytes:
        level = {"path": path, "coordinateTransformations": [{"type": "scale", "scale": scale}]}
        axes = [{"name": name, "type": "space", **unit} for name in "yx"]
        multiscale = {"version": "0.4", "name": "cells", "axes": axes, "datasets": [level]}
        return _json({"multiscales": [multiscale], "image-label": {"version": "0.4"}})

    files = {
        f"{LABELS}/0/{row}/{column}": zlib.compress(_chunk(labels, chunk, row, column), _LEVEL)
        for row in range(-(-labels.shape[0] // chunk[0]))
        for column in range(-(-labels.shape[1] // chunk[1]))
    }
    group = _json({"zarr_format": 2})
    return files | {
        f"{LABELS}/0/.zarray": _json(array),
        f"{LABELS}/.zattrs": about("0"),
        f"{LABELS}/.zgroup": group,
        "labels/.zattrs": _json({"labels": ["cells"]}),
        "labels/.zgroup": group,
        ".zattrs": about(f"{LABELS}/0"),  # readers open nothing in a group that is no image
        ".zgroup": group,
    }


def read_zarr(folder: Path) -> tuple[NDArray[Any], list[float]]:
    """The labels (H, W) of a group that zarr_files wrote, and the sides of a pixel."""
    try:
        array = json.loads((folder / LABELS / "0/.zarray").read_bytes())
        about = json.loads((folder / LABELS / ".zattrs").read_bytes())["multiscales"][0]["datasets"][0]
        size, dtype = array["chunks"], np.dtype(array["dtype"])
        labels = np.zeros(array["shape"], dtype)
        for row in range(-(-labels.shape[0] // size[0])):
            for column in range(-(-labels.shape[1] // size[1])):
                data = zlib.decompress((folder / LABELS / f"0/{row}/{column}").read_bytes())
                place = labels[row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
                place[:] = np.frombuffer(data, dtype).reshape(size)[: place.shape[0], : place.shape[1]]
        return labels, [float(side) for side in about["coordinateTransformations"][0]["scale"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError, zlib.error) as failure:
        raise ImageError(f"{folder}: not a group of labels that brim wrote ({failure}); write it again") from failure


def _chunk(labels: NDArray[Any], size: list[int], row: int, column: int) -> bytes:
    part = labels[row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
    missing = [(0, full - own) for full, own in zip(size, part.shape, strict=True)]
    whole = np.pad(part, missing) if any(after for _, after in missing) else part
    return whole.astype(labels.dtype.newbyteorder("<"), copy=False).tobytes()


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()
