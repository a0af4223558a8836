"""Synthetic sequences whose class can be learned, for tests, demonstrations and benchmarks.

A class has a few slow oscillations and a mixing matrix from them to the features; a sequence starts them at random
phases, stretches them a little, and adds noise. Sequence i depends on (seed, i) alone.
"""

# Axes: T frames, D features, H oscillations

from pathlib import Path
from typing import Any

import numpy as np

from brim.errors import ConfigError, DatasetError

_OSCILLATIONS = 4
_SPREAD = 0.5  # standard deviation of the logarithm of the length
_NOISE = 0.5  # standard deviation, beside features of about 1

_Array = np.ndarray[Any, np.dtype[np.float32]]


def make_sequences(
    folder: Path | str,
    count: int = 100,
    dim: int = 16,
    classes: int = 4,
    seed: int = 0,
    mean_length: float = 50.0,
    *,
    max_length: int | None = None,
) -> Path:
    """Write count sequences as folder/class_k/NNNNNN.npy, (T, D) float32, classes in turn.

    Lengths are log-normal around mean_length frames, at least 2 and at most max_length, by default four times the mean.
    """
    for name, value in (("count", count), ("dim", dim), ("classes", classes), ("mean_length", mean_length)):
        if value < 1:
            raise ConfigError("must be at least 1", field=name, value=value, code="out_of_range")
    path = Path(folder)
    if path.exists() and any(path.iterdir()):
        raise DatasetError(f"{path} is not empty; choose another folder", code="occupied")
    width = len(str(classes - 1))
    longest = max_length or max(2, int(4 * mean_length))
    for index in range(count):
        label = index % classes
        folder_of_class = path / f"class_{label:0{width}d}"
        folder_of_class.mkdir(parents=True, exist_ok=True)
        np.save(folder_of_class / f"{index:06d}.npy", make_sequence(index, label, dim, seed, mean_length, longest))
    return path


def make_sequence(index: int, label: int, dim: int, seed: int, mean_length: float, max_length: int) -> _Array:
    """(T, D) float32, one sequence of a class."""
    of_class = np.random.default_rng((seed, 0, label))
    rate = of_class.uniform(0.02, 0.12, _OSCILLATIONS)  # cycles per frame: slow, so that neighbours are alike
    mixture = of_class.standard_normal((_OSCILLATIONS, dim)) / np.sqrt(_OSCILLATIONS / 2)
    own = np.random.default_rng((seed, 1, index))
    length = int(np.clip(own.lognormal(np.log(mean_length) - _SPREAD**2 / 2, _SPREAD), 2, max_length))
    phase, stretch = own.uniform(0, 1, _OSCILLATIONS), own.uniform(0.9, 1.1)
    waves = np.sin(2 * np.pi * (np.arange(length)[:, None] * rate * stretch + phase))  # (T, H)
    noise = _NOISE * own.standard_normal((length, dim), dtype=np.float32)
    sequence: _Array = (waves @ mixture).astype(np.float32) + noise
    return sequence
