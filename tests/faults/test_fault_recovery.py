"""A job with a long history behind it recovers: ten hours of an earlier brim's slices, and many shards."""

import json
import sqlite3

import pytest
from fault_service import Serve

pytestmark = pytest.mark.long

SLICES = 200


def test_a_job_of_ten_hours_goes_on_where_it_was(make_serve):
    serve: Serve = make_serve().start()
    job = serve.generate(100_000, samples_per_shard=1)["id"]
    serve.wait_progress(job, 60)
    serve.kill()
    lengthen(serve, job)

    serve.start(ready=False)
    before = serve.job(job)["progress"]["current"]
    after = serve.wait_progress(job, before + 1)

    assert after["status"] == "running"
    assert after["attempts"] == 2
    assert before >= 60


def lengthen(serve: Serve, job: str) -> None:
    """Give the job the records that an earlier brim wrote in ten hours: a step for each slice of its time."""
    record = json.dumps({"ended": False, "result": None, "error": None, "failure": None, "seconds": 100.0})
    row = {"workflow_uuid": job, "function_name": "slice", "output": record, "serialization": "portable_json"}
    row |= {"started_at_epoch_ms": 0, "completed_at_epoch_ms": 0, "application_name": "brim", "retention_timestamp": 0}
    with sqlite3.connect(serve.data / "jobs.sqlite") as database:
        for number in range(1, SLICES):
            values = {**row, "function_id": number}
            names, marks = ", ".join(values), ", ".join("?" * len(values))
            database.execute(f"INSERT INTO operation_outputs ({names}) VALUES ({marks})", list(values.values()))
    database.close()
