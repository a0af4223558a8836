"""Measurements of an image's objects, and their text in CSV and GeoJSON. Needs only NumPy.

Axes: N objects, K columns.

The text of all numbers is written together, digit by digit: formatting them one at a time takes longer than finding the
objects, and a run writes hundreds of thousands of them a second under the interpreter lock.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CLASS = "cell"  # of objects whose model knows one kind
_DECIMALS = {"area_px": 0, "confidence": 4, "eccentricity": 4, "area_um2": 4, "perimeter_um": 4}  # others: 2
_MOST_DIGITS = 15  # of a number before the point; float64 is exact up to there


class Measurements(NamedTuple):
    """A row for each object, in the order of their numbers, from 1."""

    names: tuple[str, ...]  # of the columns, with units
    values: NDArray[np.float64]  # (N, K)
    kind: NDArray[np.int64]  # (N,) index of the class
    classes: tuple[str, ...] = (CLASS,)

    def column(self, name: str) -> NDArray[np.float64]:
        return np.asarray(self.values[:, self.names.index(name)])

    @property
    def told_apart(self) -> tuple[str, ...]:
        """The classes; none if the model knows one kind without a name."""
        return () if self.classes == (CLASS,) else self.classes

    def to_bytes(self) -> bytes:
        """For another process of this machine."""
        head = json.dumps([len(self.values), self.names, self.classes]).encode()
        return len(head).to_bytes(8, "little") + head + self.values.tobytes() + self.kind.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Measurements":
        start = 8 + int.from_bytes(data[:8], "little")
        num, names, classes = json.loads(data[8:start])
        values = np.frombuffer(data, np.float64, num * len(names), start).reshape(num, len(names))
        kind = np.frombuffer(data, np.int64, num, start + values.nbytes)
        return cls(tuple(names), values, kind, tuple(classes))


class ChannelMeans(NamedTuple):
    """Mean values of objects in the channels of their file."""

    names: tuple[str, ...]  # of the channels; "": without a name
    values: NDArray[np.float64]  # (N, C)
    shown: tuple[int, ...] = ()  # the channels of whose mean the network saw; empty: a colour image


def value_sums(labels: NDArray[Any], values: NDArray[Any], num: int) -> NDArray[np.float64]:
    """(num, C): sums of values (H, W, C) over the objects 1 to num of labels (H, W)."""
    inside = np.flatnonzero(labels)
    own = labels.ravel()[inside].astype(np.int64)
    sums = [np.bincount(own, values[..., c].ravel()[inside], num + 1)[1:] for c in range(values.shape[2])]
    return np.stack(sums, 1)


def to_measurements(
    table: NDArray[np.float64], pixel_um: float | None = None, means: ChannelMeans | None = None
) -> Measurements:
    """Of a table (N, 6 + C) of find_objects; pixel_um is the side of a pixel, if it is known.

    means are those of the file's own channels, if they differ from those of the table.
    """
    area, x, y, perimeter, eccentricity, confidence = table[:, :6].T
    columns = {"area_px": area, "confidence": confidence, "perimeter_px": perimeter, "eccentricity": eccentricity}
    columns |= {"x_px": x, "y_px": y}
    if pixel_um is not None:
        columns |= {"area_um2": area * pixel_um**2, "perimeter_um": perimeter * pixel_um}
    columns |= _means(table[:, 6:]) if means is None else _named_means(means)
    values = np.stack(list(columns.values()), 1) if len(table) else np.zeros((0, len(columns)))
    return Measurements(tuple(columns), values, np.zeros(len(table), np.int64))


def _means(channels: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    if channels.shape[1] == 3 and (channels == channels[:, :1]).all():
        channels = channels[:, :1]  # a grey image
    names = ("red", "green", "blue") if channels.shape[1] == 3 else range(channels.shape[1])
    prefix = "mean_intensity" if channels.shape[1] == 1 else ""
    return {prefix or f"mean_{name}": mean for name, mean in zip(names, channels.T, strict=True)}


def _named_means(means: ChannelMeans) -> dict[str, NDArray[np.float64]]:
    """The mean of what the network saw, and if there are several channels, that of each."""
    columns = {"mean_intensity": means.values[:, list(means.shown)].mean(1)} if means.shown else {}
    for number, own in enumerate(means.values.T if len(means.names) > 1 else ()):
        # names come from files: commas and quotes would break a table
        plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in means.names[number][:40])
        name = f"mean_{plain or number}"
        columns[f"{name}_{number}" if name in columns else name] = own
    return columns


def csv_text(measurements: Measurements, first_number: int = 1) -> bytes:
    """A table with a header; the first column is the object's number, the second its class."""
    columns = numbers_text(measurements)
    # names come from users: one with a comma is quoted
    texts = [
        name if name.replace(" ", "").isalnum() else '"' + name.replace('"', '""') + '"'
        for name in measurements.classes
    ]
    named = [texts[kind] for kind in measurements.kind.tolist()]
    rows = [
        b"%d,%b,%b\n" % (number, name.encode(), b",".join(row))
        for number, (name, row) in enumerate(zip(named, columns, strict=True), first_number)
    ]
    return b"id,class," + ",".join(measurements.names).encode() + b"\n" + b"".join(rows)


def numbers_text(measurements: Measurements) -> list[list[bytes]]:
    """The numbers of each row as text."""
    joined = _joined(measurements, [b","] * len(measurements.names))
    return [row[:-1].split(b",") for row in joined]


def json_texts(measurements: Measurements) -> list[bytes]:
    """Each row as `"name":number,…`, the content of a JSON object."""
    before = [json.dumps(name).encode() + b":" for name in measurements.names]
    joined = _joined(measurements, [b","] * len(before), before)
    return [row[:-1] for row in joined]


def _joined(measurements: Measurements, after: Sequence[bytes], before: Sequence[bytes] | None = None) -> list[bytes]:
    """Each row's numbers, each between its texts."""
    values = measurements.values
    if not len(values):
        return []
    parts: list[NDArray[np.uint8]] = []
    for column, name in enumerate(measurements.names):
        if before is not None:
            parts.append(_repeated(before[column], len(values)))
        parts.append(_digits(values[:, column], _decimals(name, values[:, column])))
        parts.append(_repeated(after[column], len(values)))
    parts.append(_repeated(b"\n", len(values)))
    return np.concatenate(parts, 1).tobytes().translate(None, b"\0").split(b"\n")[:-1]


def _decimals(name: str, values: NDArray[np.float64]) -> int:
    if name.startswith("mean_") and values.max() <= 1:
        return 6  # of an image of floats
    return _DECIMALS.get(name, 2)


def _repeated(text: bytes, num: int) -> NDArray[np.uint8]:
    return np.broadcast_to(np.frombuffer(text, np.uint8), (num, len(text)))


def _digits(values: NDArray[np.float64], decimals: int) -> NDArray[np.uint8]:
    """Numbers that are not negative as text, padded with zero bytes on the left."""
    safe = np.where(np.isfinite(values), np.minimum(values, 10.0**_MOST_DIGITS), 0)
    whole = np.rint(safe * 10**decimals).astype(np.int64)
    width = max(decimals + 1, len(str(int(whole.max(initial=0)))))
    powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    digits = (whole[:, None] // powers % 10 + ord("0")).astype(np.uint8)
    leading = (whole[:, None] < powers) & (powers >= 10 ** (decimals + 1))
    digits[leading] = 0
    if not decimals:
        return np.asarray(digits)
    point = np.full((len(values), 1), ord("."), np.uint8)
    return np.concatenate([digits[:, :-decimals], point, digits[:, -decimals:]], 1)
