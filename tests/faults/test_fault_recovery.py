"""A job with a long history behind it recovers soon: ten hours of slices, thousands of shards."""

import sqlite3
import time

import pytest
from fault_service import Serve

pytestmark = pytest.mark.slow
BAR_S = 30.0
SLICES = 200


def test_a_job_of_ten_hours_goes_on_within_half_a_minute(make_serve):
    serve: Serve = make_serve().start()
    job = serve.generate(100_000, samples_per_shard=1)["id"]
    serve.wait_progress(job, 200)
    serve.kill()
    lengthen(serve, job)

    began = time.monotonic()
    serve.start(ready=False)
    before = serve.job(job)["progress"]["current"]
    after = serve.wait_progress(job, before + 1, seconds=90)
    took_s = time.monotonic() - began

    assert after["status"] == "running"
    assert after["attempts"] == 2
    assert took_s < BAR_S


def lengthen(serve: Serve, job: str) -> None:
    """Give the job the records of as many slices as ten hours have, copied from its first."""
    with sqlite3.connect(serve.data / "jobs.sqlite") as database:
        cursor = database.execute("SELECT * FROM operation_outputs WHERE workflow_uuid = ? ORDER BY function_id", [job])
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        assert rows, "no slice was recorded yet"
        at = rows[-1]["function_id"]
        for number in range(at + 1, SLICES):
            row = {**rows[-1], "function_id": number}
            marks = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO operation_outputs VALUES ({marks})", list(row.values()))
    database.close()
