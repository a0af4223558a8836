"""What several files of segmentation tests need."""

import threading
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads_are_joined() -> Iterator[None]:
    """No thread is left of what a test ran."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def short_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("stream", "bulk"):
        monkeypatch.setattr(f"brim.segmentation.prediction.{module}.CEILING_S", 0.02)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums over more threads differ in their last bits, and small batches take longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
