"""Images and masks of two folders, paired and cut into crops of one size, as a dataset the engine can hold.

Axes: S pixels of a side. Crops are windows at the images' own scale that cover each image; an image smaller than a
crop is continued by reflection. A row of the dataset:

    image       (3, S, S)  uint8
    mask        (1, S, S)  uint8  bit 0: foreground; bit 1: counted in scores, once per pixel of the image
    source      ()         int64  number of the image, in the order of the pairs
    foreground  ()         int64  pixels

Augmentation runs on the device. Every crop of a batch draws its own numbers, all crops go through the same kernels, and
nothing depends on a value on the device, so that a step can be captured. Mirror, quarter turn, scale, rotation and
shift are one sampling of the crop, the same for image and mask; a quarter turn or mirror alone gives back exact pixels.
"""

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from brim.segmentation.config import CropAugmentation
from brim.segmentation.images import find_images
from brim.segmentation.images.reading import read_image, read_mask

log = logging.getLogger("brim")

FOREGROUND, COUNTED = 1, 2  # bits of a mask
KIND = "segment-crops"
_SHARD_BYTES = 64 * 2**20  # held in memory while it fills
_READERS = 8  # threads at most: each holds an image, which may be large

OnProgress = Callable[[TrainProgress], None]


@dataclass(frozen=True, slots=True)
class ImagePair:
    name: str  # of the image, below its folder
    image: Path
    mask: Path

    def identity(self) -> list[int]:
        """What changes when one of the files does: sizes in bytes and times of change in ns."""
        try:
            stats = self.image.stat(), self.mask.stat()
        except OSError as failure:
            raise StorageError(f"{failure.filename} cannot be read: {failure.strerror or failure}") from failure
        return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]


def pair_files(images: Path | str, masks: Path | str) -> list[ImagePair]:
    """Images and masks of two folders by file stem, sorted by it; every file must have exactly one partner."""
    folder, mask_folder = Path(images), Path(masks)
    found, found_masks = _by_stem(folder, "image"), _by_stem(mask_folder, "mask")
    for stem in sorted(found.keys() ^ found_masks.keys()):
        if stem in found:
            raise DatasetError(f"{found[stem]} has no mask; put {stem}.png into {mask_folder}, or take the image out")
        raise DatasetError(f"{found_masks[stem]} has no image; put {stem}.png into {folder}, or take the mask out")
    lossy = [file for file in found_masks.values() if file.suffix.lower() in (".jpg", ".jpeg")]
    if lossy:
        log.warning("%s is a JPEG: its compression makes background that is not 0; masks should be PNG", lossy[0])
    return [
        ImagePair(found[stem].relative_to(folder).as_posix(), found[stem], found_masks[stem]) for stem in sorted(found)
    ]


def _by_stem(folder: Path, what: str) -> dict[str, Path]:
    if not folder.is_dir():
        raise DatasetError(f"{folder} is not a directory; give a folder of {what}s")
    files: dict[str, Path] = {}
    for file in find_images([folder]):
        other = files.setdefault(file.stem, file)
        if other != file:
            raise DatasetError(f"{other} and {file} are both named {file.stem}; each {what} needs a stem of its own")
    if not files:
        raise DatasetError(f"{folder} holds no {what}s; give a folder of PNG, TIFF or JPEG files")
    return files


# Windows


class CropWindow(NamedTuple):
    """A crop of an image, and which of its pixels no crop before it has shown."""

    top: int
    left: int
    new_rows: slice  # within the crop
    new_columns: slice


def windows(height: int, width: int, size: int) -> list[CropWindow]:
    """As few crops as cover an image, evenly placed."""
    rows, columns = _spans(height, size), _spans(width, size)
    return [CropWindow(top, left, down, across) for top, down in rows for left, across in columns]


def _spans(length: int, size: int) -> list[tuple[int, slice]]:
    count = -(-length // size)
    starts = [round(step * max(0, length - size) / max(1, count - 1)) for step in range(count)]
    ends = [0, *(start + size for start in starts)]
    return [(start, slice(ends[at] - start, min(size, length - start))) for at, start in enumerate(starts)]


def cut(image: NDArray[np.uint8], mask: NDArray[np.bool_], size: int) -> Iterator[dict[str, Tensor]]:
    """Rows of an image, one crop at a time, without its number."""
    height, width = mask.shape
    below, beside = max(0, size - height), max(0, size - width)
    bits = mask.astype(np.uint8)
    if below or beside:
        image, bits = (
            np.asarray(cv2.copyMakeBorder(part, 0, below, 0, beside, cv2.BORDER_REFLECT_101), np.uint8)
            for part in (image, bits)
        )
    for window in windows(height, width, size):
        box = np.s_[window.top : window.top + size, window.left : window.left + size]
        crop = bits[box].copy()
        foreground = int(crop.sum())
        crop[window.new_rows, window.new_columns] |= COUNTED
        pixels = np.ascontiguousarray(image[box].transpose(2, 0, 1))
        yield {
            "image": torch.from_numpy(pixels),
            "mask": torch.from_numpy(crop)[None],
            "foreground": torch.tensor(foreground),
        }


def read_pair(pair: ImagePair) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Pixels and truth of a pair; sizes that differ are an ImageError that names both files."""
    image, mask = read_image(pair.image), read_mask(pair.mask)
    if image.shape[:2] != mask.shape:
        sizes = [f"{shape[1]}×{shape[0]}" for shape in (image.shape, mask.shape)]
        raise ImageError(
            f"{pair.image} is {sizes[0]} and its mask {pair.mask} is {sizes[1]} pixels; both must have one size"
        )
    return image, mask


# The dataset


def pack(
    pairs: list[ImagePair],
    path: Path,
    size: int,
    *,
    progress: OnProgress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Dataset | None:
    """The crops of the pairs in `path`, made, or finished where they were begun; None when stopped.

    Crops of other files or another size are made anew.
    """
    if path.is_dir():
        change = find_change(pairs, path, size)
        if not change and (done := Dataset(path)).manifest["complete"]:
            return done
        if change:
            log.info("%s: %s; the crops are made anew", path, change)
            shutil.rmtree(path)
    shard, header = max(1, _SHARD_BYTES // (4 * size * size)), _header(pairs, size)
    with ShardWriter(path, header, items_per_shard=shard, identity=tuple(header), resume=True) as writer:
        if not _write(writer, pairs, size, progress, stop):
            return None
        writer.finish()
    return Dataset(path)


def find_change(pairs: list[ImagePair], path: Path, size: int) -> str:
    """In words, what differs from the crops in `path`; empty when nothing does."""
    try:
        found, header = Dataset(path).manifest, _header(pairs, size)
    except BrimError as failure:
        return f"the crops cannot be read ({failure})"
    if (found.get("kind"), found.get("size")) != (KIND, size):
        return f"size was {found.get('size')} and is {size} now"
    old, new = dict(found.get("inputs", {})), header["inputs"]
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            return f"{name} {'appeared' if name not in old else 'went' if name not in new else 'or its mask changed'}"
    return ""


def _header(pairs: list[ImagePair], size: int) -> dict[str, Any]:
    return {"kind": KIND, "size": size, "inputs": {pair.name: pair.identity() for pair in pairs}}


def _write(
    writer: ShardWriter, pairs: list[ImagePair], size: int, progress: OnProgress | None, stop: Callable[[], bool] | None
) -> bool:
    """Append the crops from where the writer is; False when stopped."""
    first, done = writer.totals.get("image", 0), writer.totals.get("windows", 0)
    stage = Stage(name="read", work=read_pair, workers=min(_READERS, worker_count()))
    began_s = time.perf_counter()
    with Pipeline(pairs[first:], [stage]) as read:
        for number, (image, mask) in enumerate(read, first):
            if stop is not None and stop():
                return False
            for at, row in enumerate(cut(image, mask, size)):
                if number > first or at >= done:
                    _append(writer, row, number, at)
            _tell(progress, number + 1, len(pairs), (number + 1 - first) / (time.perf_counter() - began_s))
    return True


def _append(writer: ShardWriter, row: dict[str, Tensor], number: int, at: int) -> None:
    rows = {name: value[None] for name, value in (row | {"source": torch.tensor(number)}).items()}
    writer.append(rows, {"image": torch.tensor([number]), "windows": torch.tensor([at + 1])})


def _tell(progress: OnProgress | None, done: int, total: int, rate: float) -> None:
    if progress is not None:
        progress(
            TrainProgress(
                phase="prepare", epoch=0, epochs=0, step=done, steps=total, loss=None, samples_per_s=rate,
                eta_s=(total - done) / rate,
            )
        )  # fmt: skip


def augment(images: Tensor, masks: Tensor, rng: torch.Generator, config: CropAugmentation) -> tuple[Tensor, Tensor]:
    """Changed copies of crops and their masks.

    images  (B, 3, S, S)  uint8
    masks   (B, 1, S, S)  uint8 or bool; their values are moved, never mixed
    """
    moved, moved_masks = _move(images.float(), masks, rng, config)
    lit = _light(moved / 255, rng, config)
    return (lit * 255).round_().clamp_(0, 255).to(torch.uint8), moved_masks


# Where a pixel comes from


def _move(images: Tensor, masks: Tensor, rng: torch.Generator, config: CropAugmentation) -> tuple[Tensor, Tensor]:
    grid = F.affine_grid(_transforms(len(images), images.device, rng, config), [*images.shape], align_corners=False)
    sampled = F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    found = F.grid_sample(masks.float(), grid, mode="nearest", padding_mode="reflection", align_corners=False)
    return sampled, found.to(masks.dtype)


def _transforms(count: int, device: torch.device, rng: torch.Generator, config: CropAugmentation) -> Tensor:
    """(B, 2, 3) float32: from where in the crop, in units of half a side, each place takes its pixel."""
    draws = drawn(lambda whole: torch.rand(whole, device=device, generator=rng), (8, count), axis=1)
    some = (draws[0] < config.affine).float()
    scale, angle, right, down = (some * (2 * draw - 1) for draw in draws[1:5])
    scale, angle = 1 + config.scale * scale, math.radians(config.rotation_deg) * angle
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    # Exact: cos(π / 2) is not 0 in floating point, and would blur what a quarter turn must not.
    mirror, swap, flip = ((draw < 0.5) & config.turn for draw in draws[5:8])
    along, across = 1 - 2 * mirror.float(), 1 - 2 * flip.float()
    rows = [
        torch.stack([along * torch.where(swap, sin, cos), along * torch.where(swap, cos, -sin)], 1),
        torch.stack([across * torch.where(swap, cos, sin), across * torch.where(swap, -sin, cos)], 1),
    ]
    move = 2 * config.shift * torch.stack([right, down], 1)
    return torch.cat([torch.stack(rows, 1), move[:, :, None]], 2)


# What a pixel becomes


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
