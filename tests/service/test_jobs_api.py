"""Jobs over HTTP: submitted once, listed, stopped, resumed, deleted; the queue and the catalogue agree."""

import io
import threading
import zipfile
from typing import Any

from live_api import GENERATION, JOBS

from brim.errors import Unavailable
from brim.jobs.kinds import KINDS
from brim.jobs.store import Output

KEYS = {
    *("id", "kind", "name", "status", "progress", "config", "result", "error"),
    *("created_at", "started_at", "finished_at", "attempts"),
}


def test_the_first_body_as_it_stands_makes_a_generation_job(api):
    answer = api.post(JOBS, GENERATION)

    job = answer.json
    assert answer.status == 202
    assert job.keys() == KEYS
    assert (job["kind"], job["name"], job["status"]) == ("rf.generate", "gpu_batch_test", "queued")
    assert job["config"]["num_samples"] == 10000
    assert job["config"]["max_gdop"] == 100.0
    assert job["progress"].keys() == {"current", "total", "percent", "rate", "eta_s", "message"}
    assert job["created_at"].endswith("Z")
    assert (job["started_at"], job["finished_at"], job["result"], job["error"], job["attempts"]) == (*[None] * 4, 0)
    assert answer.headers["location"] == f"{JOBS}/{job['id']}"
    assert api.queue.states([job["id"]])[job["id"]].status == "ENQUEUED"
    assert api.get(answer.headers["location"]).json == job


def test_the_same_key_gives_the_same_job(api):
    first, again = (api.post(JOBS, GENERATION, headers={"Idempotency-Key": "once"}) for _ in range(2))

    assert first.json["id"] == again.json["id"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert api.get(JOBS).json["total"] == 1


def test_jobs_are_listed_by_page_status_and_kind(api):
    ids = [api.submit({**GENERATION, "num_samples": n + 1})["id"] for n in range(3)]
    api.post(f"{JOBS}/{ids[0]}/cancel")

    assert [job["id"] for job in api.get(JOBS).json["jobs"]] == ids[::-1]
    assert [job["id"] for job in api.get(f"{JOBS}?status=cancelled").json["jobs"]] == [ids[0]]
    assert api.get(f"{JOBS}?status=&kind=&page=").json["total"] == 3
    assert api.get(f"{JOBS}?kind=rf.train").json == {"jobs": [], "page": 1, "pages": 1, "total": 0}
    assert api.get(f"{JOBS}?page=7").json["jobs"] == []


def test_a_queued_job_is_cancelled_at_once_and_lists_no_dataset(api):
    job = api.submit()
    assert api.get("/api/datasets").json["total"] == 1

    answer = api.post(f"{JOBS}/{job['id']}/cancel")

    assert (answer.status, answer.json["status"]) == (202, "cancelled")
    assert answer.json["finished_at"] is not None
    assert api.queue.states([job["id"]])[job["id"]].status == "CANCELLED"
    assert api.get("/api/datasets").json["total"] == 0
    assert api.post(f"{JOBS}/{job['id']}/cancel").json["status"] == "cancelled", "asking twice is no error"
    assert api.post(f"{JOBS}/{job['id']}/pause").status == 409


def test_a_running_job_is_stopping_until_its_worker_has_let_it_go(api):
    job = api.submit()
    api.start(job["id"])

    stopping = api.post(f"{JOBS}/{job['id']}/cancel").json
    assert (stopping["status"], stopping["progress"]["message"]) == ("running", "stopping")

    threading.Timer(0.7, lambda: api.catalogue.jobs.settle(job["id"], Output(items=0))).start()
    resumed = api.post(f"{JOBS}/{job['id']}/resume")
    assert (resumed.status, resumed.json["status"]) == (202, "queued")


def test_a_job_that_does_not_stop_cannot_be_resumed(api, monkeypatch):
    monkeypatch.setattr("brim.service.api.routes.jobs.SETTLE_S", 0.3)
    job = api.submit()
    api.start(job["id"])
    api.post(f"{JOBS}/{job['id']}/pause")

    answer = api.post(f"{JOBS}/{job['id']}/resume")

    assert answer.status == 409
    assert "still stopping" in answer.json["detail"]


def test_a_deleted_job_is_gone_and_its_dataset_stays(api):
    job = api.submit()
    api.start(job["id"])
    assert api.delete(f"{JOBS}/{job['id']}").status == 409
    api.finish(job["id"], items=5)
    assert api.post(f"{JOBS}/{job['id']}/resume").status == 409
    log = api.settings.data / "jobs" / job["id"] / "log.jsonl"
    log.parent.mkdir()
    log.write_text("")
    result = api.settings.data / "results" / job["id"] / "x.json"
    result.parent.mkdir(parents=True)
    result.write_text("{}")

    assert api.delete(f"{JOBS}/{job['id']}").status == 204
    assert api.get(f"{JOBS}/{job['id']}").status == 404
    assert api.delete(f"{JOBS}/{job['id']}").status == 404
    assert api.queue.states([job["id"]]) == {}
    assert not log.parent.exists()
    assert not result.parent.exists()
    assert api.get("/api/datasets").json["total"] == 1


def test_no_more_jobs_than_the_limit_are_queued_by_submitting_or_resuming_and_checking_needs_no_room(api_with):
    with api_with(max_unfinished=2) as api:
        paused = api.submit(Idempotency_Key="first")
        assert api.post(f"{JOBS}/{paused['id']}/cancel").status == 202
        waiting = [api.submit(), api.submit()]
        submitted, resumed = api.post(JOBS, GENERATION), api.post(f"{JOBS}/{paused['id']}/resume")

        assert (submitted.status, resumed.status) == (429, 429)
        assert [answer.headers["retry-after"] for answer in (submitted, resumed)] == ["10", "10"]
        assert api.post(f"{JOBS}/validate", GENERATION).status == 200
        assert api.submit(Idempotency_Key="first")["id"] == paused["id"], "a key seen before is no new job"
        api.post(f"{JOBS}/{waiting[0]['id']}/cancel")
        assert api.post(f"{JOBS}/{paused['id']}/resume").json["status"] == "queued"


def test_a_queue_that_is_away_leaves_the_job_pending(api, monkeypatch):
    def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the queue's database does not answer for now; try again in a moment")

    monkeypatch.setattr(api.queue, "submit", away)
    job = api.submit()

    assert job["status"] == "pending"


def test_logs_are_read_on_from_where_the_last_answer_ended(api):
    from brim.jobs.worker.joblog import log_file, logging_to

    job = api.submit()
    assert api.get(f"{JOBS}/{job['id']}/logs").json == {"lines": [], "next": 0}
    with logging_to(log_file(api.settings.data, job["id"])) as log:
        log.warning("wrote %s", api.settings.data / "datasets" / "x")
        log.warning("second")

    first = api.get(f"{JOBS}/{job['id']}/logs?limit=1").json
    second = api.get(f"{JOBS}/{job['id']}/logs?after={first['next']}").json

    assert [line["level"] for line in first["lines"]] == ["warning"]
    assert first["lines"][0]["text"].startswith("wrote the data directory")
    assert [line["text"] for line in second["lines"]] == ["second"]


def test_a_jobs_files_are_fetched_by_the_names_it_lists(api):
    job = api.submit()
    api.start(job["id"])
    folder, secret = api.settings.data / "results" / job["id"], api.settings.data / "secret"
    (folder / "masks").mkdir(parents=True)
    (folder / "masks" / "a b.png").write_bytes(b"picture")
    (folder / ".new").write_bytes(b"being written")
    secret.write_text("no")
    (folder / "link.txt").symlink_to(secret)
    (folder / "linked").symlink_to(api.settings.data)

    assert api.get(f"{JOBS}/{job['id']}/files").json == {"files": [{"name": "masks/a b.png", "bytes": 7}]}
    fetched = api.get(f"{JOBS}/{job['id']}/files/masks/a%20b.png")
    assert (fetched.body, fetched.headers["content-disposition"]) == (b"picture", "attachment")
    for name in ("..%2F..%2Fsecret", "../../secret", ".new", "link.txt", "linked/secret", "%2Fetc%2Fpasswd", "", "%00"):
        assert api.get(f"{JOBS}/{job['id']}/files/{name}").status == 404, name
    zipped = zipfile.ZipFile(io.BytesIO(api.get(f"{JOBS}/{job['id']}/export").body))
    assert zipped.namelist() == ["masks/a b.png"]
    assert api.get(f"{JOBS}/{api.submit()['id']}/export").status == 409, "no files"


def test_the_time_of_a_job_is_told_by_the_median_of_the_last_of_its_kind_by_items_and_epochs(api):
    def complete(id: str, seconds: float, status: str = "completed") -> None:
        times = f"status = '{status}', started_at = 1000, finished_at = {1000 + seconds}"
        with api.catalogue._engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE jobs SET {times} WHERE id = '{id}'")

    def estimate(kind: str, **config: Any) -> float | None:
        answer = api.post(f"{JOBS}/validate", {"kind": kind, "name": "n", "config": config})
        return answer.json["estimated_seconds"]

    assert estimate("rf.generate", num_samples=1000) is None
    for samples, seconds in ((100, 900.0), (100, 1.0), (200, 4.0), (100, 3.0), (100, 90.0), (100, 4.0)):
        complete(api.submit({**GENERATION, "num_samples": samples})["id"], seconds)
    complete(api.submit()["id"], 1e6, "failed")
    assert estimate("rf.generate", num_samples=1000) == 30.0  # of 1, 2, 3, 90 and 4 s for 100 samples

    training = {"dataset_ids": [api.write_dataset("made")], "val_share": 0.5}
    complete(api.submit({"job_name": "t", "config": {**training, "epochs": 10}})["id"], 8.0)
    assert estimate("rf.train", **training, epochs=50) == 40.0


# Checked without being submitted


def test_what_could_run_is_answered_in_full_and_nothing_is_stored(api):
    answer = api.post(f"{JOBS}/validate", GENERATION)

    assert answer.status == 200
    assert answer.json.keys() == {"kind", "name", "config", "estimated_bytes", "estimated_seconds"}
    assert (answer.json["kind"], answer.json["name"]) == ("rf.generate", "gpu_batch_test")
    assert api.get(JOBS).json["total"] == 0
    assert api.get("/api/datasets").json["total"] == 0
    assert answer.json["config"] == api.submit()["config"], "it is what submitting makes of it"
    fewer = api.post(f"{JOBS}/validate", {**GENERATION, "num_samples": 1000}).json["estimated_bytes"]
    assert 1000 * 100 < 9 * fewer < answer.json["estimated_bytes"] < 11 * fewer, "more samples take more disk"


def test_every_kind_is_listed_with_what_it_reads_and_makes(shared):
    kinds = {kind["kind"]: kind for kind in shared.get("/api/training/kinds").json["kinds"]}

    assert kinds.keys() == KINDS.keys()
    assert {name: (kind["makes"], kind["reads"], kind["reads_run"]) for name, kind in kinds.items()} == {
        "rf.generate": ("dataset", None, None),
        "rf.train": ("run", "rf", None),
        "rf.evaluate": ("result", "rf", "rf.train"),
        "rf.measure": ("result", "recordings", None),
        "segment.tune": ("result", None, "segment.train"),
        "segment.predict": ("result", "images", "segment.train"),
        "segment.train": ("run", "images", "segment.train"),
        "sequence.train": ("run", "sequences", None),
        "sequence.evaluate": ("result", "sequences", "sequence.train"),
    }
