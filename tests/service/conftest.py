"""Services for the tests: an API on a socket, the same with a model that segments, and toy predictors to be killed.

Each is there for one test that changes it, and for all tests of a module that only ask it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import InProcess
from live_api import Api, running
from predicting import Predicting

from brim.service.run import process


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """A running API on an empty data directory."""
    with running(tmp_path / "data") as made:
        yield made


@pytest.fixture
def api_with(tmp_path: Path) -> Any:
    """The same with other settings: `with api_with(max_unfinished=2) as api`."""
    return lambda **changes: running(tmp_path / "data", **changes)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One for tests that leave nothing behind that others would mind."""
    with running(tmp_path_factory.mktemp("shared") / "data") as made:
        yield made


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an untrained network, which finds something in every image at a threshold of 0.4."""
    from brim.segmentation import create_model
    from brim.segmentation.networks import save_weights

    file = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    torch.manual_seed(0)
    save_weights(create_model("unet_tiny"), file, {})
    return file


@pytest.fixture
def segmenting_with(tmp_path: Path, weights: Path) -> Any:
    """An API with other settings and one model, called cells: `with segmenting_with(max_predicting=2) as api`."""

    def make(**changes: Any) -> Any:
        return running(tmp_path / "data", cells=weights, predictions=InProcess(), **changes)

    return make


@pytest.fixture(scope="module")
def segmenting(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Api]:
    """One with a model for tests that leave nothing behind."""
    with running(tmp_path_factory.mktemp("segmenting") / "data", cells=weights, predictions=InProcess()) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Predicting]]:
    """Toy predictors for tests that kill them: they come back at once."""
    monkeypatch.setattr(process, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(process, "SHORT_LIFE_S", 0.05)
    made: list[Predicting] = []

    def make(**changes: Any) -> Predicting:
        made.append(Predicting(tmp_path / "data", **changes))
        return made[-1].__enter__()

    yield make
    for one in made:
        one.end()
