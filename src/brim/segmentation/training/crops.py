"""Images and masks of two folders, paired and cut into crops of one size, as a dataset the engine can hold.

Axes: S pixels of a side. Crops are windows at the images' own scale that cover each image; an image smaller than a
crop is extended by reflection. A row of the dataset:

    image       (3, S, S)  uint8
    mask        (1, S, S)  uint8  bit 0: foreground; bit 1: counted in scores, once per pixel of the image
    label       (1, S, S)  int16  objects numbered from 1 in each crop, 0 background; only where objects are learned
    source      ()         int64  number of the image, in the order of the pairs
    foreground  ()         int64  pixels
    objects     ()         int64  with label
    kind        (1, S, S)  uint8  class of each pixel's object, from 1, 0 where it is not known; only with classes

Augmentation runs on the device. Every crop of a batch draws its own numbers, all crops go through the same kernels, and
the host never reads a value from the device, so that a step can be captured. Mirror, quarter turn, scale, rotation and
shift are one sampling of the crop, the same for image and mask; a mirror or quarter turn alone keeps pixels exact.
"""

import csv
import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from brim.engine.device import worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.storage import Dataset, ShardWriter
from brim.engine.training import TrainProgress, drawn
from brim.errors import BrimError, DatasetError, ImageError, StorageError
from brim.segmentation.config import CropAugmentation, ImagePlanes
from brim.segmentation.images import find_images
from brim.segmentation.images.contrast import stretch
from brim.segmentation.images.reading import read_image, read_labels

log = logging.getLogger("brim")

FOREGROUND, COUNTED = 1, 2  # bits of a mask
KIND = "segment-crops"
_SHARD_BYTES = 64 * 2**20  # held in memory while it fills
_MOST_CLASSES = 100
_MOST_OBJECTS = 2**15 - 1  # of a crop: labels are int16
_READERS = 8  # threads at most: each holds an image, which may be large

OnProgress = Callable[[TrainProgress], None]


@dataclass(frozen=True, slots=True)
class ImagePair:
    name: str  # of the image, below its folder
    image: Path
    mask: Path
    part: tuple[float, float] = (0.0, 1.0)  # of the longer side, as shares of it
    kinds: Mapping[int, int] = field(default_factory=dict, hash=False)  # number of an object → its class, from 1

    def identity(self) -> list[int]:
        """Sizes in bytes and modification times in ns of both files."""
        try:
            stats = self.image.stat(), self.mask.stat()
        except OSError as failure:
            raise StorageError(f"{failure.filename} cannot be read: {failure.strerror or failure}") from failure
        return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]


def pair_files(images: Path | str, masks: Path | str) -> list[ImagePair]:
    """Images and masks of two folders by file stem, sorted by it; every file must have exactly one partner."""
    folder, mask_folder = Path(images), Path(masks)
    image_files, mask_files = _by_stem(folder, "image"), _by_stem(mask_folder, "mask")
    for stem in sorted(image_files.keys() ^ mask_files.keys()):
        if stem in image_files:
            raise DatasetError(f"{image_files[stem]} has no mask; put {stem}.png into {mask_folder}, or move the image")
        raise DatasetError(f"{mask_files[stem]} has no image; put {stem}.png into {folder}, or move the mask")
    lossy = [file for file in mask_files.values() if file.suffix.lower() in (".jpg", ".jpeg")]
    if lossy:
        log.warning("%s is a JPEG: its compression makes background that is not 0; masks should be PNG", lossy[0])
    return [
        ImagePair(file.relative_to(folder).as_posix(), file, mask_files[stem])
        for stem, file in sorted(image_files.items())
    ]


def _by_stem(folder: Path, kind: str) -> dict[str, Path]:
    if not folder.is_dir():
        raise DatasetError(f"{folder} is not a directory; give a folder of {kind}s")
    files: dict[str, Path] = {}
    for file in find_images([folder]):
        other = files.setdefault(file.stem, file)
        if other != file:
            raise DatasetError(f"{other} and {file} are both named {file.stem}; each {kind} needs a stem of its own")
    if not files:
        raise DatasetError(f"{folder} holds no {kind}s; give a folder of PNG, TIFF or JPEG files")
    return files


def halves(pair: ImagePair, share: float) -> list[ImagePair]:
    """One image as two: the last `share` of its longer side apart from the rest."""
    parts = (0.0, 1 - share), (1 - share, 1.0)
    return [replace(pair, name=f"{pair.name}#{number}", part=part) for number, part in enumerate(parts)]


def with_classes(pairs: list[ImagePair], table: Path | str) -> tuple[list[ImagePair], tuple[str, ...]]:
    """The pairs with the classes of their objects, and the names of all classes, sorted.

    The table is a CSV file with the columns image, label and class; without image, which is a file name or its stem,
    it is that of the only image. Objects that it does not name are of no known class.
    """
    path = Path(table)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise DatasetError(f"{path} cannot be read: {reason}; give a CSV file of image,label,class") from failure
    stems = {Path(pair.name).stem: pair for pair in pairs}
    alone = Path(pairs[0].name).stem if len(pairs) == 1 else ""
    if not lines or not {"label", "class"} <= lines[0].keys() or not (alone or "image" in lines[0]):
        needed = "label,class" if alone else "image,label,class"
        raise DatasetError(f"{path}: its first line must name the columns {needed}, and others follow")
    classes = tuple(sorted({(line["class"] or "").strip() for line in lines} - {""}))
    if not 1 <= len(classes) <= _MOST_CLASSES:
        raise DatasetError(f"{path} names {len(classes)} classes; expected 1 to {_MOST_CLASSES}")
    kinds: dict[str, dict[int, int]] = {stem: {} for stem in stems}
    for number, line in enumerate(lines, 2):
        image, label, name = ((line.get(column) or "").strip() for column in ("image", "label", "class"))
        stem = image if image in stems else Path(image).stem if image else alone
        if stem not in stems:
            raise DatasetError(f"{path}, line {number}: there is no image {image or 'named'}; give one of the images")
        if not label.isdecimal() or int(label) < 1:
            raise DatasetError(f'{path}, line {number}: label "{label}"; expected the number of an object, from 1')
        if name:
            kinds[stem][int(label)] = classes.index(name) + 1
    return [replace(pair, kinds=kinds[stem]) for stem, pair in stems.items()], classes


def object_areas(pair: ImagePair) -> NDArray[np.int64]:
    """Pixels of each object of a label image."""
    _, areas = np.unique(read_labels(pair.mask), return_counts=True)
    return np.asarray(areas[1:])


@dataclass(frozen=True, slots=True)
class Cutting:
    """How images become crops."""

    size: int  # pixels of a side
    instances: bool = False  # with the objects of label images
    stretched: bool = False  # each image's contrast is stretched
    scale: float = 1.0  # of the images before they are cut
    planes: ImagePlanes = field(default_factory=ImagePlanes)  # of the images that are read
    classes: tuple[str, ...] = ()  # of objects

    @property
    def row_bytes(self) -> int:
        return ((6 if self.instances else 4) + bool(self.classes)) * self.size**2

    def header(self) -> dict[str, Any]:
        """For the manifest: what differs from plain crops of masks, which older versions wrote."""
        header: dict[str, Any] = {"size": self.size}
        header |= {"instances": True} if self.instances else {}
        header |= {"stretched": True} if self.stretched else {}
        header |= {"scale": self.scale} if self.scale != 1 else {}
        planes = {name: value for name, value in asdict(self.planes).items() if value is not None}
        header |= {"planes": json.loads(json.dumps(planes))} if planes else {}
        return header | ({"classes": list(self.classes)} if self.classes else {})


# Windows


class CropWindow(NamedTuple):
    """A crop of an image, and which of its pixels no earlier crop contains."""

    top: int
    left: int
    new_rows: slice  # within the crop
    new_columns: slice


def windows(height: int, width: int, size: int) -> list[CropWindow]:
    """The fewest crops that cover an image, evenly placed."""

    def spans(length: int) -> list[tuple[int, slice]]:
        count = -(-length // size)
        starts = [round(step * max(0, length - size) / max(1, count - 1)) for step in range(count)]
        ends = [0, *(start + size for start in starts)]
        return [
            (start, slice(end - start, min(size, length - start))) for start, end in zip(starts, ends, strict=False)
        ]

    rows, columns = spans(height), spans(width)
    return [CropWindow(top, left, down, across) for top, down in rows for left, across in columns]


def cut(
    image: NDArray[np.uint8], labels: NDArray[np.int32], cutting: Cutting, kinds: NDArray[np.uint8] | None = None
) -> Iterator[dict[str, Tensor]]:
    """The crops of an image as rows, without `source`; kinds (H, W) are the classes of objects."""
    size, (height, width) = cutting.size, labels.shape
    below, beside = max(0, size - height), max(0, size - width)
    if below or beside:
        image = np.asarray(cv2.copyMakeBorder(image, 0, below, 0, beside, cv2.BORDER_REFLECT_101), np.uint8)
        labels = np.asarray(cv2.copyMakeBorder(labels, 0, below, 0, beside, cv2.BORDER_REFLECT_101), np.int32)
        if kinds is not None:
            kinds = np.asarray(cv2.copyMakeBorder(kinds, 0, below, 0, beside, cv2.BORDER_REFLECT_101), np.uint8)
        labels = _separate(labels) if cutting.instances else labels
    for window in windows(height, width, size):
        box = np.s_[window.top : window.top + size, window.left : window.left + size]
        bits = (labels[box] != 0).astype(np.uint8) * FOREGROUND
        foreground = int(bits.sum())
        bits[window.new_rows, window.new_columns] |= COUNTED
        row = {
            "image": torch.from_numpy(np.ascontiguousarray(image[box].transpose(2, 0, 1))),
            "mask": torch.from_numpy(bits)[None],
            "foreground": torch.tensor(foreground),
        }
        if cutting.instances:
            values, numbers = np.unique(labels[box], return_inverse=True)
            first = int(values[0] != 0)  # a crop without background
            if len(values) > _MOST_OBJECTS:
                text = f"an image has {len(values)} objects in one crop; at most {_MOST_OBJECTS} are told apart"
                raise ImageError(text, field="size", hint="lower {size}")
            row["label"] = torch.from_numpy((numbers.reshape(size, size) + first).astype(np.int16))[None]
            row["objects"] = torch.tensor(len(values) - 1 + first)
        if kinds is not None:
            row["kind"] = torch.from_numpy(np.ascontiguousarray(kinds[box]))[None]
        yield row


def _separate(labels: NDArray[np.int32]) -> NDArray[np.int32]:
    """Give the parts of an object that are not connected labels of their own: its reflections are other objects."""
    separate, last = np.zeros_like(labels), 0
    for label in np.unique(labels[labels > 0]):
        count, parts = cv2.connectedComponents((labels == label).astype(np.uint8))
        separate = np.where(parts > 0, parts + last, separate)
        last += count - 1
    return separate.astype(np.int32)


def read_pair(
    pair: ImagePair, cutting: Cutting
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.uint8] | None]:
    """Image, labels and, with classes, those of each pixel, at the scale of the cutting; sizes must agree."""
    image = read_image(pair.image, planes=cutting.planes)
    labels = read_labels(pair.mask, as_objects=cutting.instances)
    if image.shape[:2] != labels.shape:
        sizes = [f"{shape[1]}×{shape[0]}" for shape in (image.shape, labels.shape)]
        raise ImageError(f"{pair.image} is {sizes[0]} and its mask {pair.mask} is {sizes[1]} pixels; sizes must agree")
    if cutting.stretched:
        image = stretch(image)
    axis = int(labels.shape[1] > labels.shape[0])
    first, last = (round(share * labels.shape[axis]) for share in pair.part)
    image, labels = (np.take(array, range(first, last), axis) for array in (image, labels))
    if cutting.scale != 1:
        sides = tuple(max(1, round(cutting.scale * side)) for side in labels.shape[::-1])
        image = cv2.resize(image, sides, interpolation=cv2.INTER_AREA if cutting.scale < 1 else cv2.INTER_LINEAR)
        labels = cv2.resize(labels.astype(np.float64), sides, interpolation=cv2.INTER_NEAREST_EXACT).astype(np.int32)
    kinds = None
    if cutting.classes:
        numbers, place = np.unique(labels, return_inverse=True)
        kinds = np.array([pair.kinds.get(number, 0) for number in numbers.tolist()], np.uint8)[place]
        kinds = kinds.reshape(labels.shape)
    return np.asarray(image, np.uint8), np.asarray(labels, np.int32), kinds


# The dataset


def pack(
    pairs: list[ImagePair],
    path: Path,
    cutting: Cutting,
    *,
    progress: OnProgress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Dataset | None:
    """The crops of the pairs, written to `path` or continued there; None if stopped.

    Crops of other files or another size are replaced.
    """
    if path.is_dir():
        change = find_change(pairs, path, cutting)
        if not change and (dataset := Dataset(path)).manifest["complete"]:
            return dataset
        if change:
            log.info("%s: %s; the crops are cut again", path, change)
            shutil.rmtree(path)
    shard, header = max(1, _SHARD_BYTES // cutting.row_bytes), _header(pairs, cutting)
    stage = Stage(name="read", work=partial(read_pair, cutting=cutting), workers=min(_READERS, worker_count()))
    began_s = time.perf_counter()
    with ShardWriter(path, header, items_per_shard=shard, identity=tuple(header), resume=True) as writer:
        first, done = writer.totals.get("image", 0), writer.totals.get("windows", 0)
        with Pipeline(pairs[first:], [stage]) as read:
            for number, (image, labels, kinds) in enumerate(read, first):
                if stop is not None and stop():
                    return None
                for at, row in enumerate(cut(image, labels, cutting, kinds)):
                    if number > first or at >= done:
                        rows = {name: value[None] for name, value in (row | {"source": torch.tensor(number)}).items()}
                        writer.append(rows, {"image": torch.tensor([number]), "windows": torch.tensor([at + 1])})
                if progress is not None:
                    rate = (number + 1 - first) / (time.perf_counter() - began_s)
                    progress(_progress(number + 1, len(pairs), rate))
        writer.finish()
    return Dataset(path)


def _progress(done: int, total: int, rate: float) -> TrainProgress:
    return TrainProgress(
        phase="prepare", epoch=0, epochs=0, step=done, steps=total, loss=None, samples_per_s=rate,
        eta_s=(total - done) / rate,
    )  # fmt: skip


def find_change(pairs: list[ImagePair], path: Path, cutting: Cutting) -> str:
    """How the pairs differ from the crops in `path`; empty if they do not."""
    try:
        manifest, header = Dataset(path).manifest, _header(pairs, cutting)
    except BrimError as failure:
        return f"the crops cannot be read ({failure})"
    for name in ("kind", "size", "instances", "stretched", "scale", "planes", "classes", "kinds"):
        if manifest.get(name) != header.get(name):
            return f"{name} was {manifest.get(name)} and is {header.get(name)} now"
    old, new = dict(manifest.get("inputs", {})), header["inputs"]
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            change = "was added" if name not in old else "was removed" if name not in new else "or its mask changed"
            return f"{name} {change}"
    return ""


def _header(pairs: list[ImagePair], cutting: Cutting) -> dict[str, Any]:
    known = json.dumps([sorted(pair.kinds.items()) for pair in pairs]).encode()
    kinds = {"kinds": hashlib.sha256(known).hexdigest()} if cutting.classes else {}
    return {"kind": KIND, **cutting.header(), **kinds, "inputs": {pair.name: pair.identity() for pair in pairs}}


# Augmentation


def augment(images: Tensor, masks: Tensor, rng: torch.Generator, config: CropAugmentation) -> tuple[Tensor, Tensor]:
    """Randomly changed copies of crops and their masks.

    images  (B, 3, S, S)  uint8
    masks   (B, M, S, S)  whole numbers or bool; values are not interpolated
    """
    grid = F.affine_grid(_transforms(len(images), images.device, rng, config), [*images.shape], align_corners=False)
    moved = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    moved_masks = F.grid_sample(masks.float(), grid, mode="nearest", padding_mode="reflection", align_corners=False)
    lit = _light(moved / 255, rng, config)
    return (lit * 255).round_().clamp_(0, 255).to(torch.uint8), moved_masks.to(masks.dtype)


def _transforms(count: int, device: torch.device, rng: torch.Generator, config: CropAugmentation) -> Tensor:
    """(B, 2, 3) float32 affine maps from output to input coordinates, in units of half a side."""
    draws = drawn(lambda whole: torch.rand(whole, device=device, generator=rng), (8, count), axis=1)
    some = (draws[0] < config.affine).float()
    scale, angle, right, down = (some * (2 * draw - 1) for draw in draws[1:5])
    scale, angle = 1 + config.scale * scale, math.radians(config.rotation_deg) * angle
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    # Exact quarter turns by exchanging sin and cos: cos(π / 2) is not 0 in floating point, and would blur.
    mirror, swap, flip = ((draw < 0.5) & config.turn for draw in draws[5:8])
    along, across = 1 - 2 * mirror.float(), 1 - 2 * flip.float()
    rows = [
        torch.stack([along * torch.where(swap, sin, cos), along * torch.where(swap, cos, -sin)], 1),
        torch.stack([across * torch.where(swap, cos, sin), across * torch.where(swap, -sin, cos)], 1),
    ]
    move = 2 * config.shift * torch.stack([right, down], 1)
    return torch.cat([torch.stack(rows, 1), move[:, :, None]], 2)


def _light(images: Tensor, rng: torch.Generator, config: CropAugmentation) -> Tensor:
    """Brightness, contrast, gamma and noise; images (B, 3, S, S) float32 from 0 to 1."""
    device = images.device
    draws = drawn(lambda whole: torch.rand(whole, device=device, generator=rng), (4, len(images), 1, 1, 1), axis=1)
    brightness, contrast, gamma = (2 * draw - 1 for draw in draws[:3])
    mean = images.mean((1, 2, 3), keepdim=True)
    lit = (images - mean) * (1 + config.contrast * contrast) + mean + config.brightness * brightness
    lit = lit.clamp_(1e-6, 1) ** torch.exp(config.gamma * gamma)
    noise = drawn(lambda whole: torch.randn(whole, device=device, generator=rng), tuple(images.shape))
    return torch.addcmul(lit, noise, draws[3] * config.noise)
