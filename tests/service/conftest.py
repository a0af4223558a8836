"""A running API: one for each test that changes it, one for each module of those that only ask."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
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
