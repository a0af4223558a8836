"""Jobs over HTTP: submitted once, listed, stopped, resumed, deleted; the queue and the catalogue agree."""

import io
import threading
import zipfile
from typing import Any

from live_api import GENERATION, JOBS

from brim.errors import Unavailable
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
    first = api.post(JOBS, GENERATION, headers={"Idempotency-Key": "once"})
    again = api.post(JOBS, GENERATION, headers={"Idempotency-Key": "once"})
    other = api.post(JOBS, {**GENERATION, "num_samples": 7}, headers={"Idempotency-Key": "once"})

    assert first.status == again.status == other.status == 202
    assert first.json["id"] == again.json["id"] == other.json["id"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert api.get(JOBS).json["total"] == 1
    assert api.post(JOBS, GENERATION, headers={"Idempotency-Key": "twice"}).json["id"] != first.json["id"]


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


def test_a_paused_job_resumes_and_can_be_cancelled_while_paused(api):
    job = api.submit()
    assert api.post(f"{JOBS}/{job['id']}/pause").json["status"] == "paused"
    assert api.get(f"{JOBS}/{job['id']}").json["finished_at"] is None

    resumed = api.post(f"{JOBS}/{job['id']}/resume")
    assert (resumed.status, resumed.json["status"]) == (202, "queued")
    assert api.queue.states([job["id"]])[job["id"]].status == "ENQUEUED"

    api.post(f"{JOBS}/{job['id']}/pause")
    assert api.post(f"{JOBS}/{job['id']}/cancel").json["status"] == "cancelled"


def test_a_running_job_is_stopping_until_its_worker_has_let_it_go(api):
    job = api.submit()
    api.start(job["id"])

    stopping = api.post(f"{JOBS}/{job['id']}/cancel").json
    assert (stopping["status"], stopping["progress"]["message"]) == ("running", "stopping")

    threading.Timer(0.7, lambda: api.catalogue.jobs.settle(job["id"], Output(items=0))).start()
    resumed = api.post(f"{JOBS}/{job['id']}/resume")
    assert (resumed.status, resumed.json["status"]) == (202, "queued")


def test_a_running_job_of_which_no_worker_tells_waits_for_one(api, monkeypatch):
    job = api.submit()
    api.start(job["id"])
    assert api.get(f"{JOBS}/{job['id']}").json["status"] == "running"

    monkeypatch.setattr("brim.jobs.store.tables.SILENT_S", -1.0)  # as after a while, while the disk is full
    assert api.get(f"{JOBS}/{job['id']}").json["status"] == "queued"

    listed = {status: api.get(f"{JOBS}?status={status}").json["total"] for status in ("queued", "running")}
    assert listed == {"queued": 1, "running": 0}
    lines = api.get("/metrics").body.decode().splitlines()
    assert {'brim_jobs{status="queued"} 1.0', 'brim_jobs{status="running"} 0.0'} <= set(lines)


def test_a_job_that_does_not_stop_cannot_be_resumed(api, monkeypatch):
    monkeypatch.setattr("brim.service.api.routes.jobs.SETTLE_S", 0.3)
    job = api.submit()
    api.start(job["id"])
    api.post(f"{JOBS}/{job['id']}/pause")

    answer = api.post(f"{JOBS}/{job['id']}/resume")

    assert answer.status == 409
    assert "still stopping" in answer.json["detail"]


def test_what_a_finished_job_does_not_allow(api):
    job = api.submit()
    assert api.post(f"{JOBS}/{job['id']}/resume").status == 409, "it is queued"
    assert api.delete(f"{JOBS}/{job['id']}").status == 409
    api.start(job["id"])
    assert api.delete(f"{JOBS}/{job['id']}").status == 409
    api.finish(job["id"], items=5)

    for verb in ("cancel", "pause", "resume"):
        assert api.post(f"{JOBS}/{job['id']}/{verb}").status == 409, verb
    assert api.get(f"{JOBS}/{job['id']}").json["status"] == "completed"


def test_a_deleted_job_is_gone_and_its_dataset_stays(api):
    job = api.submit()
    api.start(job["id"])
    api.finish(job["id"], items=5)
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


def test_a_failed_job_says_why_without_saying_where(api):
    job = api.submit()
    api.start(job["id"])
    text = f"shard {api.settings.data}/datasets/x/shards/000001.safetensors: no space left; see /etc/hosts"
    api.catalogue.jobs.move(job["id"], "failed", of=["running"], error=text, output=Output(items=0))

    shown = api.get(f"{JOBS}/{job['id']}").json

    assert shown["status"] == "failed"
    assert "no space left" in shown["error"]
    assert "/" not in shown["error"].replace("datasets/x/shards/000001.safetensors", "")
    assert api.post(f"{JOBS}/{job['id']}/resume").json["status"] == "queued"


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


def test_a_catalogue_that_is_away_is_said_so(api, monkeypatch):
    def away(*_: Any, **__: Any) -> None:
        raise Unavailable("the catalogue's database does not answer; try again soon")

    for name in ("get", "page", "submit", "counts"):
        monkeypatch.setattr(api.catalogue.jobs, name, away)
    monkeypatch.setattr(api.catalogue, "ping", away)

    for answer in (api.get(JOBS), api.get(f"{JOBS}/{'0' * 32}"), api.post(JOBS, GENERATION)):
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0
    ready = api.get("/ready")
    assert (ready.status, ready.json["database"]) == (503, False)
    assert api.get("/health").status == 200
    assert b"brim_database_up 0.0" in api.get("/metrics").body


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
