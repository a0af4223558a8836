"""Whatever is sent: 4xx with one sentence and the field's name, never 500."""

import http.client
import json
from typing import Any

import pytest
from live_api import GENERATION, JOBS, TOKEN, TRAINING

from waiting import PATIENCE_S

TRAIN = {**TRAINING["config"], "dataset_ids": ["0" * 32]}


def generation(**config: Any) -> dict[str, Any]:
    return {**GENERATION, "config": {**GENERATION["config"], **config}}


def training(**config: Any) -> dict[str, Any]:
    return {"job_name": "t", "config": {**TRAIN, **config}}


def explicit(kind: Any, name: Any = "n", **config: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "config": config}


BODIES: list[tuple[Any, int, str]] = [
    ({}, 422, "kind"),
    ([], 422, ""),
    (None, 422, ""),
    ("text", 422, ""),
    (1, 422, ""),
    ({"nonsense": 1}, 422, "nonsense"),
    ({**GENERATION, "extra": 1}, 422, "extra"),
    ({**GENERATION, "num_samples": 0}, 422, "num_samples"),
    ({**GENERATION, "num_samples": -1}, 422, "num_samples"),
    ({**GENERATION, "num_samples": 1.5}, 422, "num_samples"),
    ({**GENERATION, "num_samples": "10"}, 422, "num_samples"),
    ({**GENERATION, "num_samples": True}, 422, "num_samples"),
    ({**GENERATION, "num_samples": None}, 422, "num_samples"),
    ({**GENERATION, "num_samples": 10**30}, 422, "num_samples"),
    ({**GENERATION, "dataset_name": ""}, 422, "dataset_name"),
    ({**GENERATION, "dataset_name": "  "}, 422, "dataset_name"),
    ({**GENERATION, "dataset_name": "a\0b"}, 422, "dataset_name"),
    ({**GENERATION, "dataset_name": "x" * 201}, 422, "dataset_name"),
    ({**GENERATION, "dataset_name": 5}, 422, "dataset_name"),
    ({**GENERATION, "dataset_type": "no_such"}, 422, "dataset_type"),
    ({**GENERATION, "config": []}, 422, "config"),
    ({"num_samples": 5}, 422, "dataset_name"),
    (generation(frequency_mhzz=145), 422, "config.frequency_mhzz"),
    (generation(frequency_mhz=-1), 422, "config.frequency_mhz"),
    (generation(frequency_mhz="145"), 422, "config.frequency_mhz"),
    (generation(frequency_mhz=[]), 422, "config.frequency_mhz"),
    (generation(max_gdop=0), 422, "config.max_gdop"),
    (training(epochs=0), 422, "config.epochs"),
    (training(epoch=5), 422, "config.epoch"),
    (training(batch_size="256"), 422, "config.batch_size"),
    (training(batch_size=0), 422, "config.batch_size"),
    (training(learning_rate=0), 422, "config.learning_rate"),
    (training(accelerator="tpu"), 422, "config.accelerator"),
    (training(dataset_ids=[]), 422, "config.dataset_ids"),
    (training(dataset_ids="x"), 422, "config.dataset_ids"),
    (training(dataset_ids=[1]), 422, "config.dataset_ids[0]"),
    (training(dataset_ids=["0" * 32, "0" * 32]), 422, "config.dataset_ids[1]"),
    (training(), 404, "config.dataset_ids[0]"),
    (training(dataset_ids=["../../etc/passwd"]), 404, "config.dataset_ids[0]"),
    (TRAINING, 404, "config.dataset_ids[0]"),
    (training(tier="ram", preload_to_gpu=True), 409, "config.preload_to_gpu"),
    (generation(min_receivers=8), 409, "config.min_receivers"),
    (generation(min_receivers=2), 422, "config.min_receivers"),
    (generation(stations=[{"name": "A", "lat": 91.0, "lon": 0.0, "alt": 0.0}]), 422, "config.stations[0].lat"),
    ({**GENERATION, "config": {"dataset_type": "iq_raw"}}, 409, "dataset_type"),
    ({"job_name": "t"}, 422, "config"),
    (explicit("rf.nothing"), 422, "kind"),
    (explicit(None), 422, "kind"),
    (explicit({}), 422, "kind"),
    (explicit("rf.generate", num_samples=5, out="/tmp/x"), 422, "config.out"),
    (explicit("rf.generate", name=7, num_samples=5), 422, "name"),
    (explicit("rf.evaluate", dataset_ids=["0" * 32], run_id="0" * 32), 404, "config.dataset_ids[0]"),
    (explicit("segment.predict", dataset_ids=["0" * 32], run_id="0" * 32, model="no_such"), 422, "config.model"),
    (explicit("segment.tune", models=["no_such"]), 422, "config.models[0]"),
    (explicit("sequence.train"), 422, "config.dataset_ids"),
]


@pytest.mark.parametrize(("body", "status", "field"), BODIES, ids=lambda value: json.dumps(value)[:60])
def test_a_body_that_cannot_be_is_refused_by_the_fields_name(shared, body, status, field):
    answer = shared.post(JOBS, body if body is not None else b"null", headers={"Content-Type": "application/json"})

    assert (answer.status, answer.json["field"] or "") == (status, field), answer.json
    assert len(answer.json["detail"]) < 1000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"kind": 1, "kind": 2}',
        b'{"a": "\\ud800"}',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b"[" * 100 + b"]" * 100,
        b"[" * 100_000,
        b'{"a":' * 60 + b"1" + b"}" * 60,
        b"1" * 5000,
        b'{"a": 1} trailing',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json_is_refused(shared, body):
    answer = shared.post(JOBS, body, headers={"Content-Type": "application/json"})

    assert answer.status == 400
    assert "JSON" in answer.json["detail"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
def test_a_body_of_another_type_is_refused(shared, kind):
    answer = shared.post(JOBS, json.dumps(GENERATION).encode(), headers={"Content-Type": kind})

    assert answer.status == 415


def test_json_with_a_charset_is_json(shared):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}

    assert shared.post(JOBS, json.dumps(GENERATION).encode(), headers=headers).status == 202


def test_a_body_that_is_too_large_is_refused_whether_its_length_is_said_or_not(shared):
    large = b'{"dataset_name": "' + b"x" * 2**21 + b'"}'
    assert shared.post(JOBS, large, headers={"Content-Type": "application/json"}).status == 413

    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    try:
        connection.request("POST", JOBS, iter([large[:1000], large[1000:]]), headers, encode_chunked=True)
        assert connection.getresponse().status == 413
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("status=done", "status"),
        ("kind=rf", "kind"),
        ("page=0", "page"),
        ("page=-1", "page"),
        ("page=x", "page"),
        ("page=1.5", "page"),
        ("page=99999999999999999999", "page"),
        ("status=%00", "status"),
        ("status=a%0Ab%1B[31m", "status"),
        ("kind=%ff", "kind"),
    ],
)
def test_a_query_that_cannot_be_is_refused(shared, query, field):
    answer = shared.get(f"{JOBS}?{query}")

    assert (answer.status, answer.json["field"]) == (422, field)
    assert answer.json["detail"].startswith(field)
    assert answer.json["detail"].isprintable()


@pytest.mark.parametrize(
    "id", ["x", "0" * 32, "0" * 31, "%00", "..%2f..%2fetc", "' OR 1=1 --".replace(" ", "%20"), "ü".encode().hex()]
)
def test_an_id_that_names_nothing_is_not_found(shared, id):
    for path in (f"{JOBS}/{id}", f"{JOBS}/{id}/logs", f"{JOBS}/{id}/events", f"{JOBS}/{id}/files", f"/api/runs/{id}"):
        assert shared.get(path).status == 404, path
    for verb in ("cancel", "pause", "resume"):
        assert shared.post(f"{JOBS}/{id}/{verb}").status == 404
    for path in (f"{JOBS}/{id}", f"/api/datasets/{id}"):
        assert shared.delete(path).status == 404
    assert shared.get(f"/api/datasets/{id}/preview").status == 404


def test_an_unknown_id_is_answered_with_where_to_look(shared):
    answer = shared.get("/api/datasets/x")

    assert answer.json["detail"] == 'no dataset has this id; "GET /api/datasets" lists them'
    assert '"GET /api/datasets"' in shared.post(JOBS, training()).json["detail"]


@pytest.mark.parametrize("key", ["", " ", "x" * 201, "tab\there", "ü".encode().decode("latin-1")])
def test_a_key_that_cannot_be_is_refused(shared, key):
    answer = shared.post(JOBS, GENERATION, headers={"Idempotency-Key": key})

    assert (answer.status, answer.json["field"]) == (422, "Idempotency-Key")


def test_an_event_number_that_cannot_be_is_refused(shared):
    job = shared.submit()

    for header in ("x", "-1", "1.5", "9" * 30):
        answer = shared.get(f"{JOBS}/{job['id']}/events", headers={"Last-Event-ID": header})
        assert (answer.status, answer.json["field"]) == (422, "Last-Event-ID"), header
    assert shared.get(f"{JOBS}/{job['id']}/events?after=x").status == 422
    assert shared.get(f"{JOBS}/{job['id']}/logs?after=-1").status == 422
    assert shared.get(f"{JOBS}/{job['id']}/logs?limit=0").status == 422


def test_a_method_that_is_not_taken_names_those_that_are(shared):
    answer = shared.ask("PUT", f"{JOBS}/{'0' * 32}")

    assert answer.status == 405
    assert answer.headers["allow"] == "DELETE, GET"
    assert shared.ask("PATCH", JOBS).headers["allow"] == "GET, POST"


def test_an_unknown_address_says_where_to_look(shared):
    answer = shared.get("/api/nope")

    assert answer.status == 404
    assert "/docs" in answer.json["detail"]


def test_a_dataset_that_is_still_written_is_a_conflict_with_the_fields_name(api):
    api.submit()
    dataset = api.get("/api/datasets").json["datasets"][0]
    assert dataset["state"] == "writing"

    answer = api.post(JOBS, training(dataset_ids=[dataset["id"]]))

    assert (answer.status, answer.json["field"]) == (409, "config.dataset_ids[0]")
    assert "still being written" in answer.json["detail"]
    assert api.delete(f"/api/datasets/{dataset['id']}").status == 409
    assert api.get(f"/api/datasets/{dataset['id']}/preview").status == 409


def test_empty_and_foreign_datasets_are_refused(api):
    empty = api.add_dataset(items=0, path="datasets/a")
    images = api.add_dataset(kind="images", path="datasets/b")

    for dataset, word in ((empty, "empty"), (images, "kind images")):
        answer = api.post(JOBS, training(dataset_ids=[dataset.id]))
        assert (answer.status, answer.json["field"]) == (409, "config.dataset_ids[0]")
        assert word in answer.json["detail"]


@pytest.mark.parametrize("kind", ["rf.train", "segment.train", "sequence.train", "rf.evaluate", "segment.predict"])
def test_inputs_whose_files_are_gone_or_foreign_are_refused_by_the_fields_name(api, tmp_path, kind):
    from brim.jobs.kinds import KINDS, Spec
    from brim.jobs.store import Output

    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text('{"items": 3}')
    config: dict[str, Any] = {"model": "unet_tiny"} if kind == "segment.train" else {}
    if KINDS[kind].reads_run and not kind.endswith("train"):
        run, _ = api.catalogue.jobs.submit(Spec(KINDS[kind].reads_run, "r", {}), makes="run")
        api.catalogue.jobs.move(run.id, "running", of=["pending"])
        api.catalogue.jobs.move(run.id, "completed", of=["running"], output=Output(items=3))
        config["run_id"] = run.output_id
    for place in ("gone", "foreign"):
        dataset = api.add_dataset(kind=KINDS[kind].reads, path=str(tmp_path / place), owned=False)
        answer = api.post(JOBS, explicit(kind, dataset_ids=[dataset.id], **config))
        assert answer.status == 409, (place, answer.json)
        assert answer.json["field"].startswith("config.")
        assert str(tmp_path) not in answer.json["detail"]


def test_a_run_of_another_kind_is_refused(api):
    from brim.jobs.kinds import Spec
    from brim.jobs.store import Output

    run, _ = api.catalogue.jobs.submit(Spec("sequence.train", "s", {}), makes="run")
    dataset = api.add_dataset()
    body = explicit("rf.evaluate", dataset_ids=[dataset.id], run_id=run.output_id)

    training_still = api.post(JOBS, body)
    assert (training_still.status, training_still.json["field"]) == (409, "config.run_id")

    api.catalogue.jobs.move(run.id, "running", of=["pending"])
    api.catalogue.jobs.move(run.id, "completed", of=["running"], output=Output(items=3))
    answer = api.post(JOBS, body)
    assert (answer.status, answer.json["field"]) == (409, "config.run_id")


def test_a_gpu_where_there_is_none_is_refused(api):
    api.catalogue.devices.put("w0", {"device": "cpu"})

    answer = api.post(JOBS, {**generation(), "config": {"accelerator": "gpu"}})

    assert (answer.status, answer.json["field"]) == (409, "config.accelerator")
