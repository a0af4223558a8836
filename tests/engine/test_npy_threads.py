"""Headers of .npy files are read by many threads at once."""

import gc
import io
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from brim.engine.rows import read_npy_header
from brim.engine.rows.npy import load_npy


class Cyclic:
    """Collected by the garbage collector alone, which then runs Python code and lets another thread on."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(300))


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can, also in the middle of ast's work."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    yield
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def deep(depth: int, data: bytes) -> tuple[int, ...]:
    """The shape, read at another depth of calls: ast counts it across threads."""
    if depth:
        return deep(depth - 1, data)
    Cyclic()
    opened = io.BytesIO(data)
    return read_npy_header(opened, np.lib.format.read_magic(opened))[0]


def test_headers_are_parsed_in_many_threads(hasty_threads):
    opened = io.BytesIO()
    np.save(opened, np.zeros((3, 5), np.float32))

    with ThreadPoolExecutor(8) as pool:
        shapes = list(pool.map(lambda number: deep(number % 9, opened.getvalue()), range(4_000)))

    assert set(shapes) == {(3, 5)}


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_is_what_was_saved(tmp_path, order):
    saved = np.arange(24.0).reshape(2, 3, 4)
    np.save(tmp_path / "x.npy", np.asarray(saved, order=order))

    assert np.array_equal(load_npy(tmp_path / "x.npy"), saved)


def test_a_truncated_array_and_one_of_objects_are_no_arrays(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(100))
    os.truncate(tmp_path / "x.npy", 400)
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)

    for name, message in (("x", "truncated: 34 of 100"), ("objects", "never loaded")):
        with pytest.raises(ValueError, match=message):
            load_npy(tmp_path / f"{name}.npy")
