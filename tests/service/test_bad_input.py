"""Whatever is sent: 4xx, one sentence and the field's name, never 500; and checking refuses what submitting does."""

import json
from typing import Any

import pytest
from live_api import GENERATION, JOBS, Api

from brim.jobs.status import MAX_NESTING
from brim.jobs.worker.process import cores
from brim.service.api.body import BodyLimit, parse

NOTHING = "0" * 32
TRAIN = {"dataset_ids": [NOTHING], "epochs": 5, "batch_size": 256}
VALIDATE = f"{JOBS}/validate"
JSON = {"Content-Type": "application/json"}


def generation(**config: Any) -> dict[str, Any]:
    return {**GENERATION, "config": {**GENERATION["config"], **config}}


def training(**config: Any) -> dict[str, Any]:
    return {"job_name": "t", "config": {**TRAIN, **config}}


def explicit(kind: Any, name: Any = "n", **config: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "config": config}


BODIES: list[tuple[Any, int, str]] = [
    ({}, 422, "kind"),
    ([], 422, ""),
    ({**GENERATION, "extra": 1}, 422, "extra"),
    ({**GENERATION, "dataset_name": "a\0b"}, 422, "dataset_name"),
    (generation(frequency_mhzz=145), 422, "config.frequency_mhzz"),
    (training(dataset_ids=[NOTHING, NOTHING]), 422, "config.dataset_ids[1]"),
    (training(), 404, "config.dataset_ids[0]"),
    (training(dataset_ids=["../../etc/passwd"]), 404, "config.dataset_ids[0]"),
    (training(tier="ram", preload_to_gpu=True), 409, "config.preload_to_gpu"),
    (explicit("rf.nothing"), 422, "kind"),
    (explicit("rf.generate", num_samples=5, out="/tmp/x"), 422, "config.out"),
    (explicit("rf.evaluate", dataset_ids=[NOTHING], run_id=NOTHING), 404, "config.dataset_ids[0]"),
    (explicit("segment.train", dataset_ids=[NOTHING], model="/srv/net.py:make"), 422, "config.model"),
    (explicit("segment.tune", models=["net.pt2"]), 422, "config.models[0]"),
    (explicit("segment.predict", dataset_ids=[NOTHING], run_id=NOTHING, model="a.py:b"), 422, "config.model"),
    (explicit("sequence.train", dataset_ids=[NOTHING], network="net.py:make"), 422, "config.network"),
    (generation(cluster="ray://10.0.0.1:10001"), 422, "config.cluster"),
    (generation(cluster=True), 409, "config.cluster"),
    (generation(devices=cores() + 1), 409, "config.devices"),
]


@pytest.mark.parametrize(("body", "status", "field"), BODIES, ids=lambda value: json.dumps(value)[:60])
def test_a_body_that_cannot_be_is_refused_by_the_fields_name(shared, body, status, field):
    sent = json.dumps(body).encode()
    checked, submitted = (shared.post(path, sent, headers=JSON) for path in (VALIDATE, JOBS))

    assert (submitted.status, submitted.json["field"] or "") == (status, field), submitted.json
    assert len(submitted.json["detail"]) < 1000
    assert (checked.status, checked.json) == (status, submitted.json)


def refused_where_they_are(api: Api) -> dict[str, dict[str, Any]]:
    """Bodies that are refused for what is in the catalogue, by a word of the reason."""
    good, other = api.write_dataset("good"), api.write_dataset("other", waveform="am")
    images = api.add_dataset(name="pictures", kind="images", path="datasets/pictures").id
    writing = api.catalogue.jobs.get(api.submit()["id"]).output_id
    return {
        "kind images": training(dataset_ids=[images]),
        "still being written": training(dataset_ids=[writing]),
        "waveform": training(dataset_ids=[good, other]),
        "no worker has a GPU": generation(accelerator="gpu"),
    }


def test_inputs_and_devices_that_do_not_fit_are_refused_in_words_and_nothing_is_stored(api):
    bodies = refused_where_they_are(api)
    api.catalogue.devices.put("w0", {"device": "cpu"})
    total = api.get(JOBS).json["total"]
    for words, body in bodies.items():
        checked, submitted = api.post(VALIDATE, body), api.post(JOBS, body)

        assert submitted.status == 409, (words, submitted.json)
        assert words in submitted.json["detail"]
        assert submitted.json["field"].startswith("config.")
        assert checked.json == submitted.json, words
    assert api.get(JOBS).json["total"] == total
    writing = next(row["id"] for row in api.get("/api/datasets").json["datasets"] if row["state"] == "writing")
    assert api.delete(f"/api/datasets/{writing}").status == 409
    assert api.get(f"/api/datasets/{writing}/preview").status == 409


def test_all_wrong_fields_are_answered_at_once(shared):
    config = {"num_samples": 5, "seed": "x", "frequency_mzh": 145, "tx_power_dbm": 900}
    answer = shared.post(JOBS, {"kind": "rf.generate", "name": "x", "config": config})

    assert answer.status == 422
    named = [one["field"] for one in answer.json["errors"]]
    assert named == ["config.frequency_mzh", "config.seed", "config.tx_power_dbm"]
    assert answer.json["detail"] == answer.json["errors"][0]["detail"]


def test_a_job_that_does_not_fit_on_the_disk_is_refused(api, monkeypatch, tmp_path):
    body = {**GENERATION, "num_samples": 1_000_000}
    num_bytes = api.post(VALIDATE, body).json["estimated_bytes"]
    monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(tmp_path / "free"))
    statuses = []
    for free in (num_bytes + api.settings.min_free_bytes, num_bytes + api.settings.min_free_bytes - 1):
        (tmp_path / "free").write_text(str(free))
        statuses.append([api.post(path, body).status for path in (VALIDATE, JOBS)])

    assert statuses == [[200, 202], [409, 409]]


# Devices and clusters


def test_a_machine_has_as_many_devices_as_gpus_and_only_its_service_knows_the_cluster(api_with):
    with api_with(gpus=("0", "1", "2"), cluster="ray://10.0.0.1:10001") as api:
        assert api.post(VALIDATE, generation(devices=3)).status == 200
        assert "more than the 3 GPUs of this machine" in api.post(VALIDATE, generation(devices=4)).json["detail"]
        answer = api.post(JOBS, generation(cluster=True))
        both = api.post(VALIDATE, generation(cluster=True, devices=2))

    assert (answer.status, answer.json["config"]["cluster"]) == (202, True)
    assert "10.0.0.1" not in answer.body.decode()
    assert (both.status, both.json["field"]) == (409, "config.devices")


# JSON


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"a": NaN}',
        b'{"kind": 1, "kind": 2}',
        b'{"a": "\\ud800"}',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b"[" * (MAX_NESTING + 2) + b"]" * (MAX_NESTING + 2),
        b"1" * 5000,
        b'{"a": 1} trailing',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json_is_refused(shared, body):
    for path in (JOBS, VALIDATE):
        answer = shared.post(path, body, headers=JSON)

        assert answer.status == 400
        assert "JSON" in answer.json["detail"]


def test_json_is_read_as_it_is_meant():
    assert parse(b"[" * (MAX_NESTING + 1) + b"]" * (MAX_NESTING + 1))
    values = parse(
        b'{"whole": 8.0, "part": 0.5, "large": 1e300, "long": 9223372036854775807, "text": "\\ud83c\\udf0c"}'
    )
    assert values == {"whole": 8, "part": 0.5, "large": 1e300, "long": 9223372036854775807, "text": "🌌"}
    assert [type(value) for value in values.values()] == [int, float, float, int, str]


@pytest.mark.parametrize("kind", ["text/plain", ""])
def test_a_body_of_another_type_is_refused(shared, kind):
    sent = json.dumps(GENERATION).encode()

    assert shared.post(JOBS, sent, headers={"Content-Type": kind}).status == 415
    assert shared.post(VALIDATE, sent, headers={"Content-Type": "Application/JSON; charset=utf-8"}).status == 200


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 413)])
@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_has_as_many_bytes_as_the_limit_and_no_more(size, status, has_length):
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    pieces = [b"x" * 400, b"x" * 400, b"x" * (size - 800)]
    messages = [{"type": "http.request", "body": piece, "more_body": piece is not pieces[-1]} for piece in pieces]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    headers = [(b"content-length", str(size).encode())] if has_length else []
    scope = {"type": "http", "path": "/x", "headers": headers}
    coroutine = BodyLimit(app, limit_of=lambda path: {"/x": 1000}[path])(scope, receive, send)
    with pytest.raises(StopIteration):
        coroutine.send(None)

    assert sent[0]["status"] == status


# Queries, ids and keys


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("status=a%0Ab%1B[31m", "status"),
        ("kind=%ff", "kind"),
        ("page=99999999999999999999", "page"),
    ],
)
def test_a_query_that_cannot_be_is_refused(shared, query, field):
    answer = shared.get(f"{JOBS}?{query}")

    assert (answer.status, answer.json["field"]) == (422, field)
    assert answer.json["detail"].startswith(field)
    assert answer.json["detail"].isprintable()


@pytest.mark.parametrize("id", [NOTHING, "%00", "..%2f..%2fetc", "9" * 400])
def test_an_id_that_names_nothing_is_not_found_and_it_is_said_where_to_look(shared, id):
    for path in (f"{JOBS}/{id}", f"{JOBS}/{id}/logs", f"{JOBS}/{id}/events", f"{JOBS}/{id}/files", f"/api/runs/{id}"):
        assert shared.get(path).status == 404, path
    for verb in ("cancel", "pause", "resume"):
        assert shared.post(f"{JOBS}/{id}/{verb}").status == 404
    for path in (f"{JOBS}/{id}", f"/api/datasets/{id}"):
        assert shared.delete(path).status == 404
    for view in ("preview", "statistics", "samples/0", "images/0", "export"):
        answer = shared.get(f"/api/datasets/{id}/{view}")
        assert answer.status == 404
        assert "/" in id or "%2f" in id or '"GET /api/datasets" lists them' in answer.json["detail"]
    for view in ("metrics", "errors", "embedding", "worst"):
        assert shared.get(f"/api/runs/{id}/{view}").status == 404


def test_an_event_number_that_cannot_be_is_refused(shared):
    job = shared.submit()

    for header in ("x", "-1", "1.5", "9" * 30):
        answer = shared.get(f"{JOBS}/{job['id']}/events", headers={"Last-Event-ID": header})
        assert (answer.status, answer.json["field"]) == (422, "Last-Event-ID"), header
    assert shared.get(f"{JOBS}/{job['id']}/events?after=x").status == 422


def test_a_method_that_is_not_taken_names_those_that_are(shared):
    answer = shared.ask("PUT", f"{JOBS}/{NOTHING}")

    assert (answer.status, answer.headers["allow"]) == (405, "DELETE, GET")
