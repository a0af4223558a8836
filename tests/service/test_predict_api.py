"""Predictions over HTTP: real models behind the routes, what clients may send wrong, and what they do wrong."""

import re
import struct
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_api import FORM, Answer, Api, Part, array, multipart, picture, running

from brim.cli import main
from brim.errors import CheckpointError, Unavailable
from brim.segmentation import create_model
from brim.segmentation.networks import save_weights
from brim.service.prediction import request as predicting
from brim.service.prediction.channel import PredictionAnswer
from waiting import PATIENCE_S, until

SEGMENT, BATCH = "/api/segment", "/api/batch-segment"
FILE: Part = ("file", "a.png", picture(40, 30))
SOME: Part = ("threshold", None, b"0.4")  # at which an untrained network finds something


def segment(api: Api, *parts: Part, path: str = SEGMENT, **headers: str) -> Answer:
    return api.send(path, *parts, **headers)


def bomb(side: int = 60_000) -> bytes:
    """A small file that unpacks to a huge image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    packed = zlib.compress(b"\0" * 1_000_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def metric_lines(api: Api) -> list[str]:
    return api.get("/metrics").body.decode().splitlines()


# Answers


def test_an_image_becomes_polygons_whatever_the_order_of_the_fields(segmenting):
    fields: list[Part] = [SOME, ("detect_holes", None, b"false"), ("strict", None, b"true"), ("model", None, b"cells")]

    first, second = segment(segmenting, FILE, *fields), segment(segmenting, *fields[::-1], FILE)

    assert (first.status, first.headers["content-type"]) == (200, "application/geo+json"), first.body
    assert first.json["type"] == "FeatureCollection"
    assert first.headers["brim-model"] == "cells"
    assert int(first.headers["brim-polygons"]) == len(first.json["features"]) > 0
    assert first.json["features"][0]["properties"]["measurements"].keys() == {"area_px", "confidence"}
    assert second.body == first.body
    assert segment(segmenting, FILE).body != first.body


def test_many_images_fail_or_succeed_each_alone_in_their_order(segmenting):
    parts: list[Part] = [
        ("files", "good.png", picture(40, 30, seed=1)),
        ("files", "text.png", b"this is no image"),
        ("files", "cut.png", picture(40, 30, seed=2)[:-200]),
        ("files", "bomb.png", bomb()),
        ("file", "also good.png", picture(50, 20, seed=3)),
    ]

    answer = segment(segmenting, *parts, SOME, path=BATCH)

    found = answer.json
    assert answer.status == 200
    assert (found["model"], found["format"], found["ok"], found["failed"]) == ("cells", "geojson", 2, 3)
    assert [row["file"] for row in found["results"]] == [name for _, name, _ in parts]
    assert [row.get("code") for row in found["results"]] == [None, 415, 422, 413, None]
    for at in (0, 4):
        assert found["results"][at]["result"] == segment(segmenting, ("file", *parts[at][1:]), SOME).json
        assert found["results"][at]["result"]["features"]
    assert all(row["detail"] and "result" not in row for row in found["results"][1:4])
    assert segment(segmenting, FILE, ("format", None, b"roi"), path=BATCH).status == 422, "no archive in JSON"


def test_what_is_strict_runs_alone_and_the_options_reach_the_model(segmenting_with, monkeypatch):
    with segmenting_with() as api:
        asked: list[tuple[str, dict[str, Any]]] = []

        async def request(model: Any, payload: Any, **options: Any) -> PredictionAnswer:
            asked.append((options["name"], options))
            seconds = {"wait": 0.5, "forward": 0.25, "total": 0.75}
            return PredictionAnswer(b"{}", "application/json", {"seconds": seconds, "polygons": 7})

        monkeypatch.setattr(api.predictions, "request", request)
        strict = segment(api, FILE, SOME, ("strict", None, b"true"), ("detect_holes", None, b"false"))
        segment(api, FILE)
        lines = metric_lines(api)

    assert [(name, options["alone"]) for name, options in asked] == [("a.png", True), ("a.png", False)]
    assert (asked[0][1]["options"]["threshold"], asked[0][1]["options"]["detect_holes"]) == (0.4, False)
    assert strict.headers["brim-polygons"] == "7"
    timing = dict(re.findall(r"(\w+);dur=([\d.]+)", strict.headers["server-timing"]))
    assert (timing["wait"], timing["forward"]) == ("500.00", "250.00"), "milliseconds"
    assert {'brim_predict_seconds_sum{stage="forward"} 0.5', 'brim_predict_seconds_sum{stage="wait"} 1.0'} <= set(lines)


# Refusals


@pytest.mark.parametrize(
    ("parts", "status", "field", "words"),
    [
        ([FILE, ("model", None, b"other")], 404, "model", '"GET /api/models" lists'),
        ([FILE, ("colour", None, b"red")], 422, "colour", "known: file, model, deadline_ms, threshold"),
        ([FILE, FILE], 422, "file", "given twice"),
        ([("model", None, b"cells")], 422, "file", "file is missing"),
        ([("file", None, b"null")], 422, "file", "send a file, with a filename"),
        ([FILE, ("model", None, b"x" * 1001)], 422, "model", "larger than 1000 bytes"),
        ([("file", "a.png", b"GIF but not really")], 415, None, "a.png"),
        ([("file", "a.png", picture()[:60])], 422, None, "a.png"),
        ([("file", "a.png", bomb())], 413, None, "60000 x 60000 pixels"),
    ],
)
def test_what_cannot_be_answered_is_said_in_a_sentence(segmenting, parts, status, field, words):
    answer = segment(segmenting, *parts)

    assert (answer.status, answer.json["field"]) == (status, field), answer.body
    assert words in answer.json["detail"]


def test_files_have_limits_each_by_itself_and_together(segmenting_with):
    with segmenting_with(max_predict_bytes=100_000, max_predict_files=3) as api:
        large: Part = ("file", "a.png", bytes(100_001))
        assert segment(api, large).status == 413
        assert segment(api, large, path=BATCH).status == 413
        assert segment(api, ("file", "a.png", FILE[2].ljust(100_000, b"\0"))).status == 200
        chunks = iter([multipart([("file", "a", bytes(50_000))])] * 9)
        assert api.post(SEGMENT, b"".join(chunks), headers=FORM).status == 413
        padded: Part = ("file", "a.png", FILE[2].ljust(90_000, b"\0"))
        assert segment(api, *[padded] * 3, path=BATCH).json["ok"] == 3
        answer = segment(api, *[FILE] * 4, path=BATCH)
        assert (answer.status, "more than 3 files" in answer.json["detail"]) == (413, True)


def test_a_service_that_does_not_predict_says_so(api_with):
    with api_with(predict_memory=0.0) as api:
        answer = segment(api, FILE)
        assert (answer.status, "makes no predictions" in answer.json["detail"]) == (503, True)
        assert api.get("/api/models").json == {"models": []}


def test_no_predictor_is_503(tmp_path, weights):
    with running(tmp_path / "data", cells=weights) as api:
        soon, later = segment(api, FILE, Brim_Deadline_Ms="500"), segment(api, FILE, Brim_Deadline_Ms="3100")
        assert (soon.status, later.status) == (503, 503)
        assert soon.json["detail"].startswith("an answer would take about 3000 ms")
        assert "being restarted" in later.json["detail"]
        assert soon.headers["retry-after"] == "3"  # 2.5 s, rounded up
        assert api.get("/api/models").json["models"][0]["state"] == "cold"


# Bodies


def num_shared() -> int:
    """Files of shared memory that this process, and so the API, has open."""
    num = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread closed it meanwhile
            num += "memfd:brim" in str(file.readlink())
    return num


def test_aborted_and_refused_bodies_are_freed_at_once(segmenting_with):
    body = multipart([("file", "a.png", bytes(50_000_000))])
    with segmenting_with() as api:
        segment(api, FILE)
        admission, before = api.context.admission, num_shared()
        socks = [api.connect("POST", SEGMENT, body, upto=10_000_000) for _ in range(5)]
        until(lambda: admission.held_bytes > 40_000_000)
        for sock in socks:
            sock.close()
        until(lambda: admission.held_bytes == 0)
        until(lambda: num_shared() == before)
        assert segment(api, ("file", "a.png", bytes(1_000_000)), ("colour", None, b"red")).status == 422
        assert (admission.held_bytes, admission.num_requests, num_shared()) == (0, 0, before)


def test_the_bytes_of_all_requests_together_are_limited(segmenting_with):
    with segmenting_with(max_held_bytes=500_000) as api:
        segment(api, FILE)
        first = api.connect("POST", SEGMENT, multipart([("file", "a", bytes(450_000))]), upto=400_000)
        until(lambda: api.context.admission.held_bytes > 350_000)
        answer = segment(api, ("file", "a.png", bytes(300_000)))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        first.close()
        until(lambda: api.context.admission.held_bytes == 0)
        assert segment(api, FILE).status == 200


@pytest.mark.parametrize(
    ("header", "field", "seconds"),
    [(None, None, 30), ("5000", None, 5), ("5000", "2000", 2), ("2000", "5000", 2), ("600000", "600000", 60)],
)
def test_a_deadline_is_the_shortest_of_header_field_and_what_the_administrator_allows(
    segmenting_with, header, field, seconds
):
    fields = [] if field is None else [("deadline_ms", None, field.encode())]
    with segmenting_with(max_predict_deadline_ms=60_000) as api:
        before_s = time.monotonic()
        answer = segment(api, FILE, *fields, **({} if header is None else {"Brim_Deadline_Ms": header}))
        after_s = time.monotonic()

    assert answer.status == 200, answer.body
    (deadline_s,) = api.predictions.deadlines_s
    assert before_s < deadline_s - seconds < after_s


# Load


@pytest.mark.parametrize("path", [SEGMENT, BATCH])
def test_what_comes_too_late_for_every_model_is_refused_before_its_body_is_read(segmenting_with, weights, path):
    with segmenting_with() as api:
        api.catalogue.models.put(name="slow", kind="segment", network="unet_tiny", path=str(weights))
        until(lambda: len(api.get("/api/models").json["models"]) == 2)
        api.predictions.waits_s = {"cells": 12.3, "slow": 99.0}
        early = segment(api, ("files", "a.png", bytes(1_000_000)), path=path, Brim_Deadline_Ms="2000")
        with api.connect("POST", path, bytes(50_000_000), upto=0, head="Brim-Deadline-Ms: 50\r\n") as waiting:
            assert waiting.recv(100).startswith(b"HTTP/1.1 503")
        assert segment(api, FILE, ("model", None, b"cells"), Brim_Deadline_Ms="20000").status == 200
        api.predictions.waits_s = {"cells": 1000.0, "slow": 1000.0}
        by_route = segment(api, FILE, path=path)
        lines = metric_lines(api)

    assert (early.status, early.json["field"], early.headers["retry-after"]) == (503, None, "11")
    assert early.json["detail"].startswith("an answer would take about 12300 ms")
    assert (by_route.status, by_route.headers["retry-after"]) == (503, "970")
    assert by_route.headers.keys() == early.headers.keys()
    assert 'brim_predict_rejected_total{reason="overloaded"} 3.0' in lines
    assert f'brim_http_requests_total{{method="POST",route="{path}",status="503"}} 3.0' in lines


@pytest.mark.parametrize("value", ["0", "x", "600001", ""])
def test_a_wrong_deadline_is_named_however_long_the_queue_is(segmenting_with, value):
    with segmenting_with() as api:
        api.predictions.wait_s = 1000.0
        answer = segment(api, FILE, Brim_Deadline_Ms=value)

    assert (answer.status, answer.json["field"]) == (422, "Brim-Deadline-Ms")


def test_what_the_predictor_refuses_is_503_and_a_batch_has_what_was_in_time(segmenting_with):
    with segmenting_with() as api:
        api.predictions.num_in_time = 2
        some = segment(api, FILE, FILE, FILE, FILE, path=BATCH)
        one, none = segment(api, FILE), segment(api, FILE, FILE, path=BATCH)

    assert [(answer.status, answer.headers["retry-after"]) for answer in (one, none)] == [(503, "3")] * 2
    assert (some.status, some.json["ok"]) == (200, 2)
    assert {row["code"] for row in some.json["results"] if row["status"] == "error"} == {503}


def test_what_is_wrong_with_a_model_is_not_the_client_s_fault(segmenting_with):
    with segmenting_with() as api:
        api.predictions.failure = CheckpointError("/secret/weights.safetensors is damaged")
        answer = segment(api, FILE)

    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert "/secret" not in answer.json["detail"]


def test_what_nobody_foresaw_in_one_file_of_many_fails_that_alone(segmenting_with, monkeypatch):
    with segmenting_with() as api:
        ask = api.predictions.request

        async def request(model: Any, payload: Any, **options: Any) -> Any:
            if options["name"] == "cursed.png":
                raise RuntimeError("division by /secret")
            return await ask(model, payload, **options)

        monkeypatch.setattr(api.predictions, "request", request)
        answer = segment(api, FILE, ("file", "cursed.png", FILE[2]), FILE, path=BATCH)

    assert [row.get("code") for row in answer.json["results"]] == [None, 500, None]
    assert "/secret" not in answer.body.decode()


def test_more_at_once_than_may_be_is_429_and_a_client_that_goes_is_cancelled(segmenting_with):
    with segmenting_with(max_predicting=2) as api:
        api.predictions.is_open = False
        gone = api.connect("POST", SEGMENT, multipart([("file", "gone.png", FILE[2])]))
        until(lambda: api.predictions.started == ["gone.png"])
        answers: list[int] = []
        staying = threading.Thread(target=lambda: answers.append(segment(api, FILE).status))
        staying.start()
        until(lambda: api.context.admission.num_requests == 2)
        refused = segment(api, FILE)
        gone.close()
        until(lambda: api.predictions.cancelled == 1)
        api.predictions.is_open = True
        staying.join()
        lines = metric_lines(api)

    assert (refused.status, refused.headers["retry-after"]) == (429, "10")
    assert "at once" in refused.json["detail"]
    assert answers == [200]
    assert (api.context.admission.num_requests, api.context.admission.held_bytes) == (0, 0)
    for reason in ("client_gone", "too_many"):
        assert f'brim_predict_rejected_total{{reason="{reason}"}} 1.0' in lines


def test_a_client_that_is_silent_is_given_up_long_before_its_deadline(segmenting_with, monkeypatch):
    monkeypatch.setattr(predicting, "SILENCE_S", 1.2)
    with segmenting_with() as api, api.connect("POST", SEGMENT, multipart([FILE]), upto=100) as slow:
        said = slow.makefile("rb").read()

    assert said.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in said.lower()


@pytest.mark.parametrize(("slow_s", "status"), [(PATIENCE_S, b"503"), (0.0, b"408")])
def test_a_body_that_is_not_there_by_its_deadline_is_the_fault_of_a_silent_client_alone(
    segmenting_with, monkeypatch, slow_s, status
):
    monkeypatch.setattr(predicting, "SLOW_S", slow_s)
    body = multipart([FILE])
    drops = iter(body[10:])
    with segmenting_with(predict_deadline_ms=500) as api, api.connect("POST", SEGMENT, body, upto=10) as slow:
        slow.settimeout(0.1)

        def answer() -> bytes:
            slow.sendall(bytes([next(drops)]))
            with suppress(TimeoutError):
                return slow.recv(4000)
            return b""

        assert until(answer).startswith(b"HTTP/1.1 " + status)


# Models


def test_models_are_listed_with_the_most_advanced_state_of_several_predictors(segmenting_with, monkeypatch):
    with segmenting_with() as api:
        segment(api, FILE)
        warm = {"memory_bytes": 1000, "batch_size": 4, "max_batch_size": 8, "device": "cpu", "error": None}

        async def models() -> list[dict[str, Any]]:
            others = [{"name": "cells", "state": state, "error": state} for state in ("loading", "cold", "failed")]
            return [others[0], {"name": "cells", "state": "warm", **warm}, *others[1:]]

        monkeypatch.setattr(api.predictions, "models", models)
        (row,) = api.get("/api/models").json["models"]

    assert row.pop("added_at").endswith("Z")
    origin = {"name": "cells", "kind": "segment", "network": "unet_tiny", "run_id": None, "run_name": None}
    assert row == {**origin, **warm, "state": "warm"}


def test_the_model_that_comes_with_brim_is_there_until_another_is_registered(api, weights):
    (row,) = api.get("/api/models").json["models"]
    unanswered = segment(api, FILE, Brim_Deadline_Ms="300")  # there is no predictor, but a model
    api.catalogue.models.put(name="cells", kind="segment", network="unet_tiny", path=str(weights))
    until(lambda: [one["name"] for one in api.get("/api/models").json["models"]] == ["cells"])
    named = segment(api, FILE, ("model", None, b"default"), Brim_Deadline_Ms="300")

    assert (row["name"], row["kind"], row["network"], row["state"]) == ("default", "segment", "cells", "cold")
    assert (unanswered.status, named.status) == (503, 503)


def test_models_that_are_added_and_removed_meanwhile_are_seen(segmenting_with, weights):
    with segmenting_with() as api:
        api.catalogue.models.put(name="more", kind="segment", network="unet_tiny", path=str(weights))
        assert segment(api, FILE, ("model", None, b"more")).status == 200  # at once: it was asked for by name
        answer = until(lambda: (answer := segment(api, FILE)).status != 200 and answer)
        assert (answer.status, answer.json["field"]) == (422, "model")
        assert "cells, more" in answer.json["detail"]
        api.catalogue.models.remove("more")
        until(lambda: segment(api, FILE, ("model", None, b"more")).status == 404)


def test_predictions_go_on_while_the_database_is_away(segmenting_with, monkeypatch):
    with segmenting_with() as api:
        assert segment(api, FILE).status == 200
        asked: list[None] = []

        def away() -> Any:
            asked.append(None)
            raise Unavailable("the catalogue's database does not answer; try again soon")

        monkeypatch.setattr(api.catalogue.models, "all", away)
        until(lambda: len(asked) >= 2)
        assert segment(api, FILE).status == 200
        assert segment(api, FILE, ("model", None, b"new")).status == 404


def test_a_run_is_tried_by_its_id_and_becomes_a_model_by_one_request(segmenting_with):
    with segmenting_with() as api:
        runs = {}
        for seed, state in ((7, "ready"), (8, "training")):
            path = api.settings.data / "runs" / state
            path.mkdir(parents=True)
            torch.manual_seed(seed)
            save_weights(create_model("unet_tiny"), path / "weights.safetensors", {"model": "unet_tiny"})
            about = {"kind": "segment.train", "config": {"model": "unet_tiny"}, "summary": {}}
            runs[state] = api.catalogue.runs.add(name=state, path=f"runs/{state}", **about).id
        with api.catalogue._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE runs SET state = 'training' WHERE name = 'training'")

        tried = segment(api, FILE, SOME, ("model", None, runs["ready"].encode()))
        added = api.post("/api/models", {"name": "mine", "run_id": runs["ready"][:8]})
        named = segment(api, FILE, SOME, ("model", None, b"mine"))
        other = segment(api, FILE, SOME, ("model", None, b"cells"))
        again = api.post("/api/models", {"name": "mine", "run_id": runs["ready"]})
        wrong = [
            api.post("/api/models", {"name": "x", "run_id": runs["training"]}),
            api.post("/api/models", {"name": "no spaces", "run_id": runs["ready"]}),
        ]
        listed = {one["name"]: one for one in api.get("/api/models").json["models"]}

    assert (tried.status, tried.headers["brim-model"]) == (200, runs["ready"])
    assert added.status == 201, added.body
    assert (added.json["network"], added.json["run_name"], added.json["replaced"]) == ("unet_tiny", "ready", False)
    assert named.body == tried.body != other.body
    assert again.json["replaced"]
    assert [(answer.status, answer.json["field"]) for answer in wrong] == [(409, None), (422, "name")]
    assert listed["mine"]["run_id"] == runs["ready"]


# The other kinds


STATIONS = [
    {"lat": 45.0 + 0.1 * n, "lon": 7.0 + 0.15 * (n % 3), "alt": 300, "rssi_dbm": -80.0 - n,
     "arrival_difference_us": 9.0 * n}
    for n in range(5)
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A locator and a classifier."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["rf", "generate", "--out", str(folder / "data"), "--samples", "12", "--json"]) == 0
    assert main(["rf", "train", str(folder / "data"), "--out", str(folder / "locator"), "--epochs", "2", "--json"]) == 0
    rng = np.random.default_rng(0)
    for label in ("one", "two"):
        (folder / "npy" / label).mkdir(parents=True)
        for number in range(8):
            np.save(folder / "npy" / label / f"{number}.npy", rng.normal(size=(6, 4)).astype(np.float32))
    assert main(["sequence", "pack", str(folder / "npy"), "--out", str(folder / "corpus"), "--json"]) == 0
    options = ["--mode", "supervised", "--classifier-epochs", "1", "--device", "cpu", "--json"]
    assert main(["sequence", "train", str(folder / "corpus"), "--out", str(folder / "run"), *options]) == 0
    return folder / "locator", folder / "run"


def test_observations_become_positions_and_sequences_classes(segmenting_with, trained):
    with segmenting_with() as api:
        locator, classifier = trained
        sequence: Part = ("file", "s.npy", array(9, 4))
        unnamed = api.send("/api/classify", sequence)
        row = api.catalogue.runs.add(name="steps", kind="sequence.train", path=str(classifier), config={}, summary={})
        tried = api.send("/api/classify", sequence, ("model", None, row.id.encode()))
        assert (unnamed.status, "name a finished run by its id" in unnamed.json["detail"]) == (404, True)
        assert (tried.status, tried.json.get("model")) == (200, row.id), tried.body
        api.catalogue.models.put(name="where", kind="locate", network="locator", path=str(locator))
        api.catalogue.models.put(name="steps", kind="classify", network="cnn_lstm", path=str(classifier))

        found = api.post("/api/locate", {"observations": [{"id": "x", "stations": STATIONS}] * 2})
        assert found.status == 200, found.body
        assert (found.headers["content-type"], found.headers["brim-model"]) == ("application/geo+json", "where")
        kinds = [feature["geometry"]["type"] for feature in found.json["features"]]
        assert (kinds.count("Point"), kinds.count("Polygon")) == (2, 6)

        found = api.send("/api/classify", sequence)
        assert found.status == 200, found.body
        assert list(found.json) == ["model", "class", "confidence", "probabilities"]
        shares = found.json["probabilities"]
        assert (found.json["model"], found.json["class"]) == ("steps", max(shares, key=shares.get))
        assert found.json["confidence"] == max(shares.values())
        assert sum(shares.values()) == pytest.approx(1, abs=1e-4)

        for content, status in ((b"not npy", 415), (array(9, 5), 422)):
            assert api.send("/api/classify", ("file", "s.npy", content)).status == status
        assert segment(api, FILE, ("model", None, b"where")).status == 422
        for body, status, field in (
            ({"observations": [{"stations": STATIONS[:1]}]}, 422, None),
            ({"observations": [{"stations": STATIONS}], "model": "steps"}, 422, "model"),
        ):
            found = api.post("/api/locate", body)
            assert (found.status, found.json["field"]) == (status, field), found.body
        assert api.post("/api/locate", b"{}", headers={"Content-Type": "text/plain"}).status == 415


# Metrics


def test_predictions_are_counted_by_model_status_and_reason(segmenting_with):
    with segmenting_with() as api:
        segment(api, FILE)
        segment(api, FILE, ("model", None, b"unknown"))
        segment(api, ("file", "a", b"x"))
        lines = metric_lines(api)

    for line in (
        'brim_predict_requests_total{model="cells",status="200"} 1.0',
        'brim_predict_requests_total{model="",status="404"} 1.0',
        'brim_predict_requests_total{model="cells",status="415"} 1.0',
        'brim_predict_rejected_total{reason="unknown_model"} 1.0',
        'brim_predict_rejected_total{reason="type"} 1.0',
    ):
        assert line in lines, line
