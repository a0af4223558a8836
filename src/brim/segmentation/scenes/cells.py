"""Generated images of cells with their masks, for tests, examples and benchmarks.

Axes: H rows, W columns. Cells are stained and textured, vary in size and may touch but not overlap; illumination is
uneven, the camera blurs and adds noise, and there is debris. An image depends only on (seed, index) and its size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from brim.errors import ConfigError, StorageError

ColourImage = NDArray[np.uint8]
LabelImage = NDArray[np.int32]
FloatImage = NDArray[np.float32]

MIN_SIDE = 32  # pixels; hardly a cell fits into less
_RADII = (5.0, 17.0)  # pixels, of the mean cell of an image
_ANGLES = np.linspace(0, 2 * np.pi, 40, endpoint=False, dtype=np.float32)
# Probability, and limits of the area of proposed cells: a tenth of the images is nearly empty, a third is crowded.
_COVERED = ((0.1, 0.0, 0.02), (0.57, 0.08, 0.35), (0.33, 0.5, 1.2))


def make_cells(seed: int, index: int, height: int, width: int) -> tuple[ColourImage, NDArray[np.bool_]]:
    """Image number `index` of a seed, and its mask.

    image  (H, W, 3)  uint8
    mask   (H, W)     bool   True inside a cell
    """
    image, labels = make_labels(seed, index, height, width)
    return image, labels > 0


def make_labels(seed: int, index: int, height: int, width: int) -> tuple[ColourImage, LabelImage]:
    """The same image, with the labels (H, W) int32 of its cells; 0 is background."""
    for name, value, least in (("height", height, MIN_SIDE), ("width", width, MIN_SIDE), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")
    rng = np.random.default_rng((seed, index))
    labels = np.zeros((height, width), np.int32)
    stain = np.zeros((height, width), np.float32)
    _add_cells(rng, labels, stain)
    stain *= 1 + 0.35 * _smooth(rng, height, width, 6) + 0.2 * _smooth(rng, height, width, 2)  # texture
    _add_debris(rng, stain, labels)
    return _photograph(rng, stain), labels


def write_cells(images: Path | str, masks: Path | str, count: int, seed: int, height: int, width: int) -> None:
    """Write images and label masks as PNG files cell_00000.png, cell_00001.png, …"""
    if count < 1:
        raise ConfigError(f"count={count} must be at least 1")
    folders = Path(images), Path(masks)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise StorageError(f"{folder}: cannot write, {failure.strerror or failure}; choose another") from failure
    for index in range(count):
        image, labels = make_labels(seed, index, height, width)
        contents: list[NDArray[Any]] = [image[:, :, ::-1], labels.astype(np.uint16)]
        for folder, content in zip(folders, contents, strict=True):
            file = folder / f"cell_{index:05d}.png"
            if not cv2.imwrite(str(file), content):
                raise StorageError(f"{file}: cannot write; free some space or change the permissions")


@dataclass(frozen=True, slots=True)
class _Cell:
    outline: NDArray[np.int32]  # (N, 1, 2) x, y within the box
    left: int  # of the box
    top: int
    width: int
    height: int


def _add_cells(rng: np.random.Generator, labels: LabelImage, stain: FloatImage) -> None:
    """Draw numbered cells where they fit."""
    _, low, high = _COVERED[rng.choice(len(_COVERED), p=[share for share, _, _ in _COVERED])]
    radius = rng.uniform(*_RADII)
    tries = int(np.ceil(rng.uniform(low, high) * labels.size / (np.pi * radius**2)))
    number = 0
    for cell in _propose(rng, labels.shape, radius, tries):
        box = np.s_[cell.top : cell.top + cell.height, cell.left : cell.left + cell.width]
        shape = np.zeros((cell.height, cell.width), np.uint8)
        cv2.fillPoly(shape, [cell.outline], 1)
        if (labels[box] > 0)[shape > 0].any():
            continue
        number += 1
        inside = shape > 0
        labels[box][inside] = number
        stain[box][inside] = _interior(rng, shape)[inside]


def _propose(rng: np.random.Generator, shape: tuple[int, ...], radius: float, tries: int) -> Iterator[_Cell]:
    """Irregular ellipses at random places, cut off at the border."""
    height, width = shape
    for _ in range(tries):
        size = radius * rng.uniform(0.6, 1.5)
        centre = rng.uniform(0, (width, height))
        stretch, turn = rng.uniform(1, 1.6), rng.uniform(0, np.pi)
        waves = 1 + sum(rng.normal(0, 0.22 / k) * np.cos(k * _ANGLES + rng.uniform(0, 6.3)) for k in (2, 3, 4, 5))
        x, y = np.cos(_ANGLES) * stretch**0.5, np.sin(_ANGLES) / stretch**0.5
        x, y = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
        points = np.stack([x, y], 1) * (size * np.maximum(waves, 0.3))[:, None] + centre
        points = np.rint(points).clip(0, (width - 1, height - 1)).astype(np.int32)
        left, top = points.min(0)
        right, bottom = points.max(0) + 1
        outline = (points - (left, top)).astype(np.int32)[:, None]
        yield _Cell(outline, int(left), int(top), int(right - left), int(bottom - top))


def _interior(rng: np.random.Generator, shape: ColourImage) -> FloatImage:
    """Stain inside a cell: a rim, a body, a nucleus."""
    depth = cv2.distanceTransform(cv2.copyMakeBorder(shape, 1, 1, 1, 1, cv2.BORDER_CONSTANT), cv2.DIST_L2, 3)
    depth = depth[1:-1, 1:-1]
    body, rim, nucleus = rng.uniform(0.3, 0.55), rng.uniform(0.1, 0.3), rng.uniform(0.15, 0.4)
    edge = 0.55 * float(depth.max())
    stain = body + rim * np.exp(-depth / 1.5) + nucleus / (1 + np.exp(edge - depth))
    return np.asarray(stain, np.float32)


def _add_debris(rng: np.random.Generator, stain: FloatImage, labels: LabelImage) -> None:
    """Dust, fibres and faint bubbles outside the cells; not in the mask."""
    height, width = stain.shape
    dirt = np.zeros_like(stain)
    for _ in range(rng.poisson(6 * stain.size / 256**2)):
        x, y = (int(value) for value in rng.uniform(0, (width, height)))
        kind, strength = rng.integers(3), float(rng.uniform(0.3, 0.9))
        if kind == 0:
            cv2.circle(dirt, (x, y), int(rng.integers(1, 3)), strength, -1)
        elif kind == 1:
            steps = np.add(rng.normal(0, 7, (12, 2)).cumsum(0), (x, y))
            cv2.polylines(dirt, [np.rint(steps).astype(np.int32)], False, 0.6 * strength, 1)
        else:
            cv2.circle(dirt, (x, y), int(rng.integers(6, 16)), -0.15 * strength, 2)
    stain += np.where(labels > 0, 0, dirt)


def _photograph(rng: np.random.Generator, stain: FloatImage) -> ColourImage:
    """The camera's image of the stain: absorption, uneven illumination, blur, noise."""
    height, width = stain.shape
    blurred = cv2.GaussianBlur(stain, (0, 0), float(rng.uniform(0.5, 1.1)))
    colour = np.array([0.75, 1.15, 0.5], np.float32) * rng.uniform(0.8, 1.2, 3).astype(np.float32)
    lamp = 1 + 0.12 * _smooth(rng, height, width, max(height, width) // 2)
    down, across = rng.uniform(-0.12, 0.12, 2)
    lamp = lamp + (
        np.linspace(-down, down, height, dtype=np.float32)[:, None]
        + np.linspace(-across, across, width, dtype=np.float32)[None]
    )
    white = rng.uniform(195, 235) * rng.uniform(0.96, 1.04, 3).astype(np.float32)
    light = white * lamp[:, :, None] * np.exp(-blurred[:, :, None] * colour)
    light += rng.standard_normal(light.shape, np.float32) * rng.uniform(2, 7)
    return np.asarray(np.rint(light).clip(0, 255), np.uint8)


def _smooth(rng: np.random.Generator, height: int, width: int, grain: int) -> FloatImage:
    """Random field of about -1 to 1 that varies over `grain` pixels."""
    coarse = rng.uniform(-1, 1, (height // max(1, grain) + 2, width // max(1, grain) + 2)).astype(np.float32)
    return np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), np.float32)
