"""Predictions over HTTP: real models behind the routes, what clients may send wrong, and what they do wrong."""

import http.client
import io
import json
import socket
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import InProcess
from live_api import TOKEN, Answer, Api, make
from PIL import Image

from brim.cli import main
from brim.errors import CheckpointError, OutOfMemory, Unavailable
from brim.segmentation import create_model
from brim.segmentation.networks import save_weights
from brim.service.prediction import request as predicting
from waiting import PATIENCE_S, until

BOUNDARY = "a-boundary"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
Part = tuple[str, str | None, bytes]  # field, file name, content


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    torch.manual_seed(0)
    save_weights(create_model("unet_tiny"), file, {})
    return file


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Api]:
    """One for all tests that leave nothing behind."""
    with serving(tmp_path_factory.mktemp("shared") / "data", weights) as api:
        yield api


class serving:
    """An API with one segmentation model."""

    def __init__(self, data: Path, weights: Path, **changes: Any) -> None:
        self.predictions = InProcess()
        self.api = make(data, self.predictions, **changes)
        self.api.predictions = self.predictions  # type: ignore[attr-defined]
        self.api.catalogue.models.put(name="cells", kind="segment", network="unet_tiny", path=str(weights))

    def __enter__(self) -> Api:
        return self.api.__enter__()

    def __exit__(self, *_: object) -> None:
        self.api.__exit__()
        self.api.queue.close()
        self.api.catalogue.close()


@pytest.fixture
def api_with(tmp_path: Path, weights: Path) -> Any:
    return lambda **changes: serving(tmp_path / "data", weights, **changes)


def png(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def bomb(side: int = 60_000) -> bytes:
    """A small file that unpacks to a huge image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    packed = zlib.compress(b"\0" * 1_000_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def form(parts: Sequence[Part]) -> bytes:
    body = b""
    for field, name, content in parts:
        file = "" if name is None else f'; filename="{name}"'
        body += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"{file}\r\n\r\n'.encode()
        body += content + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def segment(api: Api, *parts: Part, path: str = "/api/segment", **headers: str) -> Answer:
    sent = {**FORM, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return api.post(path, form(parts), headers=sent)


FILE: Part = ("file", "a.png", png())
SOME: Part = ("threshold", None, b"0.4")  # at which an untrained network finds something


# Answers


def test_an_image_becomes_polygons(shared):
    answer = segment(shared, FILE, ("model", None, b"cells"), SOME)

    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/geo+json"
    assert answer.json["type"] == "FeatureCollection"
    assert answer.headers["brim-model"] == "cells"
    assert int(answer.headers["brim-polygons"]) == len(answer.json["features"]) > 0
    assert answer.json["features"][0]["properties"]["measurements"].keys() == {"area_px", "confidence"}
    assert "forward;dur=" in answer.headers["server-timing"]


def test_fields_may_come_in_any_order_and_the_only_model_need_not_be_named(shared):
    fields: list[Part] = [("threshold", None, b"0.4"), ("detect_holes", None, b"false"), ("strict", None, b"true")]

    first = segment(shared, FILE, *fields)
    second = segment(shared, *fields[::-1], FILE)

    assert first.status == second.status == 200
    assert first.body == second.body
    assert segment(shared, FILE).body != first.body


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("geojson", "application/geo+json"),
        ("coco", "application/json"),
        ("roi", "application/zip"),
        ("mask", "image/png"),
        ("overlay", "image/png"),
    ],
)
def test_every_format_is_what_it_says(shared, name, kind):
    answer = segment(shared, FILE, ("format", None, name.encode()), SOME)

    assert int(answer.headers["brim-polygons"]) > 0
    assert (answer.status, answer.headers["content-type"]) == (200, kind)
    if kind == "image/png":
        assert Image.open(io.BytesIO(answer.body)).size == (40, 30)
    elif name == "roi":
        assert len(zipfile.ZipFile(io.BytesIO(answer.body)).namelist()) == int(answer.headers["brim-polygons"])
    else:
        assert answer.json


def test_many_images_fail_or_succeed_each_alone(shared):
    parts: list[Part] = [
        ("files", "good.png", png(seed=1)),
        ("files", "text.png", b"this is no image"),
        ("files", "cut.png", png(seed=2)[:-200]),
        ("files", "bomb.png", bomb()),
        ("file", "also good.png", png(50, 20, seed=3)),
    ]

    answer = segment(shared, *parts, SOME, path="/api/batch-segment")

    found = answer.json
    assert answer.status == 200
    assert (found["model"], found["format"], found["ok"], found["failed"]) == ("cells", "geojson", 2, 3)
    assert [row["file"] for row in found["results"]] == [name for _, name, _ in parts]
    assert [row.get("code") for row in found["results"]] == [None, 415, 422, 413, None]
    assert found["results"][0]["result"] == segment(shared, ("file", "good.png", png(seed=1)), SOME).json
    assert found["results"][0]["result"]["features"]
    assert all(row["detail"] and "result" not in row for row in found["results"][1:4])


def test_a_batch_may_be_coco_but_no_archive(shared):
    assert segment(shared, FILE, ("format", None, b"coco"), path="/api/batch-segment").json["results"][0]["result"]
    assert segment(shared, FILE, ("format", None, b"roi"), path="/api/batch-segment").status == 422


# Refusals


@pytest.mark.parametrize(
    ("parts", "status", "field", "words"),
    [
        ([FILE, ("model", None, b"other")], 404, "model", '"GET /api/models" lists'),
        ([FILE, ("model", None, b"a/b")], 422, "model", "letters, digits"),
        ([FILE, ("threshold", None, b"1")], 422, "threshold", "above 0 and below 1"),
        ([FILE, ("threshold", None, b"nan")], 422, "threshold", "must be a number"),
        ([FILE, ("threshold", None, b"half")], 422, "threshold", "must be a number"),
        ([FILE, ("detect_holes", None, b"maybe")], 422, "detect_holes", "true or false"),
        ([FILE, ("format", None, b"shapefile")], 422, "format", "one of geojson, coco, roi, mask, overlay"),
        ([FILE, ("deadline_ms", None, b"0")], 422, "deadline_ms", "600000"),
        ([FILE, ("deadline_ms", None, b"1.5")], 422, "deadline_ms", "whole number"),
        ([FILE, ("colour", None, b"red")], 422, "colour", "known: file, model, deadline_ms, threshold"),
        ([FILE, FILE], 422, "file", "given twice"),
        ([FILE, ("model", None, b"cells"), ("model", None, b"cells")], 422, "model", "given twice"),
        ([("model", None, b"cells")], 422, "file", "file is missing"),
        ([("file", None, b"null")], 422, "file", "send a file, with a filename"),
        ([FILE, ("model", None, b"x" * 2000)], 422, "model", "larger than 1000 bytes"),
        ([("file", "a.png", b"")], 415, None, ""),
        ([("file", "a.png", b"GIF but not really")], 415, None, "a.png"),
        ([("file", "a.png", png()[:100])], 422, None, "a.png"),
        ([("file", "a.png", bomb())], 413, None, "60000 x 60000 pixels"),
        ([("file", "../../etc/passwd", b"x")], 415, None, ""),
    ],
)
def test_what_cannot_be_answered_is_said_in_a_sentence(shared, parts, status, field, words):
    answer = segment(shared, *parts)

    assert (answer.status, answer.json["field"]) == (status, field), answer.body
    assert words in answer.json["detail"]
    assert segment(shared, FILE).status == 200


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{}", {"Content-Type": "application/json"}, 415),
        (b"{}", {"Content-Type": "multipart/form-data"}, 400),
        (b"nonsense", FORM, 400),
        (form([FILE])[:-10], FORM, 400),
        (form([FILE]), {**FORM, "Brim-Deadline-Ms": "soon"}, 422),
        (form([FILE]), {**FORM, "Brim-Deadline-Ms": "-1"}, 422),
    ],
)
def test_a_body_or_header_that_cannot_be_read_is_said(shared, body, headers, status):
    assert shared.post("/api/segment", body, headers=headers).status == status


def test_a_file_above_the_limit_is_refused_by_what_it_says_or_brings(api_with):
    with api_with(max_predict_bytes=100_000) as api:
        large: Part = ("file", "a.png", bytes(100_001))
        assert segment(api, large).status == 413
        assert segment(api, large, path="/api/batch-segment").status == 413
        assert segment(api, ("file", "a.png", bytes(400_000))).status == 413
        assert segment(api, FILE).status == 200


def test_a_chunked_body_is_limited_too(api_with):
    with api_with(max_predict_bytes=100_000) as api:
        connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=PATIENCE_S)
        headers = {**FORM, "Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", "/api/segment", iter([form([("file", "a", bytes(50_000))])] * 9), headers)
        assert connection.getresponse().status in (400, 413, 422)
        connection.close()


def test_more_files_than_a_batch_may_bring_are_refused(api_with):
    with api_with(max_predict_files=3) as api:
        answer = segment(api, *[FILE] * 4, path="/api/batch-segment")
        assert (answer.status, "more than 3 files" in answer.json["detail"]) == (413, True)
        assert segment(api, *[FILE] * 3, path="/api/batch-segment").json["ok"] == 3


def test_a_service_that_does_not_predict_says_so(tmp_path):
    api = make(tmp_path / "data", predict_memory=0.0)
    with api:
        answer = segment(api, FILE)
        assert (answer.status, "makes no predictions" in answer.json["detail"]) == (503, True)
        assert api.get("/api/models").json == {"models": []}
    api.queue.close()
    api.catalogue.close()


def test_no_predictor_is_503(tmp_path, weights):
    api = make(tmp_path / "data")
    api.catalogue.models.put(name="cells", kind="segment", network="unet_tiny", path=str(weights))
    with api:
        soon, later = segment(api, FILE, Brim_Deadline_Ms="500"), segment(api, FILE, Brim_Deadline_Ms="3100")
        assert (soon.status, later.status) == (503, 503)
        assert soon.json["detail"].startswith("an answer would take about 3000 ms")
        assert "being restarted" in later.json["detail"]
        assert int(soon.headers["retry-after"]) >= 1
        assert api.get("/api/models").json["models"][0]["state"] == "cold"
    api.queue.close()
    api.catalogue.close()


# Bodies


def begin(api: Api, declared: int, sent: int) -> socket.socket:
    """A request for a prediction of whose body only the first bytes are sent."""
    sock = socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE_S)
    head = f"POST /api/segment HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: {FORM['Content-Type']}\r\nContent-Length: {declared}\r\n\r\n"
    sock.sendall(head.encode() + form([("file", "a.png", bytes(sent))])[:sent])
    return sock


def num_shared() -> int:
    """Files of shared memory that this process, and so the API, has open."""
    num = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread closed it meanwhile
            num += "memfd:brim" in str(file.readlink())
    return num


def test_aborted_bodies_are_freed_at_once(api_with):
    with api_with() as api:
        segment(api, FILE)
        admission = api.api.state.context.admission
        before = num_shared()
        for _ in range(3):
            socks = [begin(api, 50_000_000, 10_000_000) for _ in range(5)]
            until(lambda: admission.held_bytes > 40_000_000)
            for sock in socks:
                sock.close()
            until(lambda: admission.held_bytes == 0)
            until(lambda: num_shared() == before)
        assert admission.num_requests == 0
        assert segment(api, FILE).status == 200


def test_refused_bodies_are_freed_at_once(api_with):
    with api_with() as api:
        admission, before = api.api.state.context.admission, num_shared()
        for _ in range(10):
            assert segment(api, ("file", "a.png", bytes(1_000_000)), ("colour", None, b"red")).status == 422
        assert (admission.held_bytes, num_shared()) == (0, before)


def test_the_bytes_of_all_requests_together_are_limited(api_with):
    with api_with(max_held_bytes=500_000) as api:
        segment(api, FILE)
        first = begin(api, 450_000, 400_000)
        until(lambda: api.api.state.context.admission.held_bytes > 350_000)
        answer = segment(api, ("file", "a.png", bytes(300_000)))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        first.close()
        until(lambda: api.api.state.context.admission.held_bytes == 0)
        assert segment(api, FILE).status == 200


def test_a_deadline_is_no_longer_than_the_administrator_allows(api_with):
    with api_with(max_predict_deadline_ms=60_000) as api:
        segment(api, FILE, Brim_Deadline_Ms="600000")
        segment(api, FILE, ("deadline_ms", None, b"600000"))
        answered_s = time.monotonic()

    assert len(api.predictions.deadlines_s) == 2
    assert max(api.predictions.deadlines_s) <= answered_s + 60


# Load


def test_what_is_hopeless_is_refused_before_its_body_is_read(api_with):
    with api_with() as api:
        api.predictions.wait_s = 12.3
        taken = api.predictions.started
        answer = segment(api, ("file", "a.png", bytes(1_000_000)), Brim_Deadline_Ms="2000")

        assert answer.status == 503
        assert answer.headers["retry-after"] == "11"
        assert taken == []
        assert segment(api, FILE, Brim_Deadline_Ms="600000").status == 200


def test_a_refusal_before_the_body_reaches_a_client_that_waits_for_our_word(api_with):
    with api_with() as api:
        segment(api, FILE)
        api.predictions.wait_s = 99.0
        with socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE_S) as sock:
            head = f"POST /api/segment HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
            head += f"Content-Type: {FORM['Content-Type']}\r\nContent-Length: 50000000\r\nExpect: 100-continue\r\n\r\n"
            sock.sendall(head.encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 503")


def test_what_the_predictor_refuses_is_503_with_its_word_on_when(api_with):
    with api_with() as api:
        api.predictions.num_in_time = 0
        answer = segment(api, FILE)
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")

        answer = segment(api, FILE, FILE, path="/api/batch-segment")
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")


def test_a_batch_that_is_cut_short_has_what_was_in_time(api_with):
    with api_with() as api:
        api.predictions.num_in_time = 2
        answer = segment(api, FILE, FILE, FILE, FILE, path="/api/batch-segment")
        assert (answer.status, answer.json["ok"]) == (200, 2)
        assert {row["code"] for row in answer.json["results"] if row["status"] == "error"} == {503}


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (CheckpointError("/secret/weights.safetensors is damaged"), 503),
        (OutOfMemory("a batch of 1 did not fit"), 503),
        (Unavailable("the models are being started; try again soon"), 503),
    ],
)
def test_what_is_wrong_with_a_model_is_not_the_client_s_fault(api_with, failure, status):
    with api_with() as api:
        api.predictions.failure = failure
        answer = segment(api, FILE)
        assert answer.status == status
        assert "/secret" not in answer.json["detail"]
        assert answer.headers["retry-after"]


def test_what_nobody_foresaw_in_one_file_of_many_fails_that_alone(api_with, monkeypatch):
    with api_with() as api:
        ask = api.predictions.request

        async def request(model: Any, payload: Any, **options: Any) -> Any:
            if options["name"] == "cursed.png":
                raise RuntimeError("division by /secret")
            return await ask(model, payload, **options)

        monkeypatch.setattr(api.predictions, "request", request)
        answer = segment(api, FILE, ("file", "cursed.png", png()), FILE, path="/api/batch-segment")

        assert [row.get("code") for row in answer.json["results"]] == [None, 500, None]
        assert "/secret" not in answer.body.decode()


def test_more_at_once_than_may_be_is_429(api_with):
    with api_with(max_predicting=2) as api:
        api.predictions.is_open = False
        with_answers: list[int] = []
        threads = [threading.Thread(target=lambda: with_answers.append(segment(api, FILE).status)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: api.api.state.context.admission.num_requests == 2)
        refused = segment(api, FILE)
        api.predictions.is_open = True
        for thread in threads:
            thread.join()

        assert (refused.status, "at once" in refused.json["detail"]) == (429, True)
        assert refused.headers["retry-after"]
        assert with_answers == [200, 200]
        assert segment(api, FILE).status == 200
        assert (api.api.state.context.admission.num_requests, api.api.state.context.admission.held_bytes) == (0, 0)


def test_a_client_that_goes_is_cancelled_and_the_others_are_answered(api_with):
    with api_with() as api:
        api.predictions.is_open = False
        gone = send(api, form([("file", "gone.png", png())]))
        found: list[int] = []
        staying = threading.Thread(target=lambda: found.append(segment(api, FILE).status))
        until(lambda: api.predictions.started == ["gone.png"])
        staying.start()
        until(lambda: api.api.state.context.admission.num_requests == 2)
        gone.close()
        until(lambda: api.predictions.cancelled == 1)
        api.predictions.is_open = True
        staying.join()

        assert found == [200]
        assert api.api.state.context.admission.num_requests == 0
        text = api.get("/metrics").body.decode()
        assert 'brim_predict_rejected_total{reason="client_gone"} 1.0' in text


def send(api: Api, body: bytes, upto: int | None = None) -> socket.socket:
    """A request, or the beginning of one."""
    sock = socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE_S)
    head = f"POST /api/segment HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: {FORM['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body[:upto])
    return sock


def test_a_slow_client_is_given_up_and_holds_up_nobody(api_with, monkeypatch):
    monkeypatch.setattr(predicting, "SILENCE_S", 1.2)
    with api_with() as api:
        slow = send(api, form([FILE]), 100)
        assert segment(api, FILE).status == 200
        said = slow.makefile("rb").read()
        slow.close()

        assert said.startswith(b"HTTP/1.1 408")
        assert b'"detail"' in said
        assert b"connection: close" in said.lower()


def test_a_body_that_drips_is_given_up_at_its_deadline(api_with, monkeypatch):
    monkeypatch.setattr(predicting, "SLOW_S", PATIENCE_S)
    body = form([FILE])
    drops = iter(body[10:])
    with api_with(predict_deadline_ms=1000) as api, send(api, body, 10) as slow:
        slow.settimeout(0.1)

        def answer() -> bytes:
            slow.sendall(bytes([next(drops)]))
            with suppress(TimeoutError):
                return slow.recv(4000)
            return b""

        assert until(answer).startswith(b"HTTP/1.1 503")


def test_a_silent_client_is_at_fault_itself_also_where_its_deadline_passes(api_with, monkeypatch):
    monkeypatch.setattr(predicting, "SLOW_S", 0.1)
    with api_with(predict_deadline_ms=1500) as api:
        slow = send(api, form([FILE]), 10)
        said = slow.makefile("rb").read()
        slow.close()

        assert said.startswith(b"HTTP/1.1 408")


def test_hundreds_of_connections_at_once_are_all_answered(api_with):
    with api_with(predict_deadline_ms=120_000) as api:
        body = form([("file", "a.png", png(16, 16))])
        socks = [send(api, body, -5) for _ in range(300)]
        assert segment(api, FILE).status == 200
        for sock in socks:
            sock.sendall(body[-5:])
        statuses = [sock.recv(12) for sock in socks]
        for sock in socks:
            sock.close()

        assert statuses == [b"HTTP/1.1 200"] * 300
        assert api.api.state.context.admission.held_bytes == 0


# Models


def test_models_are_listed_with_what_is_loaded_of_them(shared, weights):
    segment(shared, FILE)
    (row,) = shared.get("/api/models").json["models"]

    assert row.pop("added_at").endswith("Z")
    assert row == {
        "name": "cells", "kind": "segment", "network": "unet_tiny", "state": "warm", "error": None,
        "memory_bytes": 1000, "batch_size": 4, "max_batch_size": 8, "device": "cpu", "run_id": None, "run_name": None,
    }  # fmt: skip


def test_the_model_that_comes_with_brim_is_there_until_another_is_registered(tmp_path, weights):
    api = make(tmp_path / "data")
    with api:
        (row,) = api.get("/api/models").json["models"]
        unanswered = segment(api, FILE, Brim_Deadline_Ms="300")  # there is no predictor, but a model
        api.catalogue.models.put(name="cells", kind="segment", network="unet_tiny", path=str(weights))
        until(lambda: [one["name"] for one in api.get("/api/models").json["models"]] == ["cells"])
        named = segment(api, FILE, ("model", None, b"default"), Brim_Deadline_Ms="300")
    api.queue.close()
    api.catalogue.close()

    assert (row["name"], row["kind"], row["network"], row["state"]) == ("default", "segment", "cells", "cold")
    assert (unanswered.status, named.status) == (503, 503)


def test_what_the_command_line_changes_is_seen_by_a_running_service(api_with, weights):
    with api_with() as api:
        data = str(api.settings.data)
        before = segment(api, FILE).body
        torch.manual_seed(7)
        other = api.settings.data.parent / "other.safetensors"
        save_weights(create_model("unet_tiny"), other, {})
        argv = ["--network", "unet_tiny", "--data", data, "--json"]

        assert main(["models", "add", "more", str(other), *argv]) == 0
        assert segment(api, FILE, ("model", None, b"more")).status == 200  # at once: it was asked for by name
        answer = until(lambda: (answer := segment(api, FILE)).status != 200 and answer)
        assert (answer.status, answer.json["field"]) == (422, "model")
        assert "cells, more" in answer.json["detail"]

        assert main(["models", "remove", "more", "--data", data, "--json"]) == 0
        assert main(["models", "add", "cells", str(other), *argv]) == 0
        until(lambda: [model["path"] for model in api.predictions.registered] == [str(other)])
        assert segment(api, FILE, ("model", None, b"more")).status == 404
        assert segment(api, FILE).body != before


def test_predictions_go_on_while_the_database_is_away(api_with, monkeypatch):
    with api_with() as api:
        assert segment(api, FILE).status == 200

        asked: list[None] = []

        def away() -> Any:
            asked.append(None)
            raise Unavailable("the catalogue's database does not answer; try again soon")

        monkeypatch.setattr(api.catalogue.models, "all", away)
        until(lambda: len(asked) >= 2)
        assert segment(api, FILE).status == 200
        assert segment(api, FILE, ("model", None, b"new")).status == 404


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


def npy(*shape: int) -> bytes:
    out = io.BytesIO()
    np.save(out, np.ones(shape, np.float32))
    return out.getvalue()


def test_observations_become_positions_and_sequences_classes(api_with, trained):
    with api_with() as api:
        locator, classifier = trained
        row = api.catalogue.runs.add(name="steps", kind="sequence.train", path=str(classifier), config={}, summary={})
        tried = segment(
            api, ("file", "s.npy", npy(9, 4)), ("model", None, row.id.encode()), path="/api/classify"
        )  # before any model of the kind is registered
        assert (tried.status, tried.json.get("model")) == (200, row.id), tried.body
        api.catalogue.models.put(name="where", kind="locate", network="locator", path=str(locator))
        api.catalogue.models.put(name="steps", kind="classify", network="cnn_lstm", path=str(classifier))

        found = api.post("/api/locate", {"observations": [{"id": "x", "stations": STATIONS}] * 2})
        assert found.status == 200, found.body
        assert found.headers["content-type"] == "application/geo+json"
        assert found.headers["brim-model"] == "where"
        kinds = [feature["geometry"]["type"] for feature in found.json["features"]]
        assert (kinds.count("Point"), kinds.count("Polygon")) == (2, 6)

        found = segment(api, ("file", "s.npy", npy(9, 4)), path="/api/classify")
        assert found.status == 200, found.body
        assert list(found.json) == ["model", "class", "confidence", "probabilities"]
        assert (found.json["model"], found.json["class"] in ("one", "two")) == ("steps", True)
        assert sum(found.json["probabilities"].values()) == pytest.approx(1, abs=1e-4)

        for content, status in ((b"not npy", 415), (npy(9, 5), 422), (npy(9, 4)[:-3], 422), (b"", 415)):
            assert segment(api, ("file", "s.npy", content), path="/api/classify").status == status
        assert segment(api, FILE, ("model", None, b"where")).status == 422

        for body, status, field in (
            ({"observations": []}, 422, "observations"),
            ({"observations": [{"stations": []}]}, 422, None),
            ({"observations": [{"stations": STATIONS[:1]}]}, 422, None),
            ({"observations": [{"stations": STATIONS}], "model": "steps"}, 422, "model"),
            ({"observations": [{"stations": STATIONS}], "model": "no"}, 404, "model"),
            ({"observations": [{"stations": STATIONS}], "model": 3}, 422, "model"),
            ({"observations": [{"stations": STATIONS}], "deadline_ms": True}, 422, "deadline_ms"),
            ({"observations": [{"stations": STATIONS}], "more": 1}, 422, "more"),
            ([], 422, "observations"),
        ):
            found = api.post("/api/locate", body)
            assert (found.status, found.json["field"]) == (status, field), found.body
        assert api.post("/api/locate", b"{", headers={"Content-Type": "application/json"}).status == 400
        assert api.post("/api/locate", b"{}", headers={"Content-Type": "text/plain"}).status == 415


@pytest.mark.parametrize("path", ["/api/segment", "/api/batch-segment"])
def test_what_comes_too_late_for_any_model_is_refused_before_the_framework(api_with, path):
    with api_with() as api:
        api.predictions.wait_s = 100.0
        early = segment(api, FILE, path=path, Brim_Deadline_Ms="50")
        by_route = segment(api, FILE)
        text = api.get("/metrics").body.decode()

    assert (early.status, early.json["field"]) == (503, None)
    assert early.json["detail"].startswith("an answer would take about 100000 ms")
    assert early.headers["retry-after"] == "100"
    assert by_route.status == 503
    assert by_route.headers.keys() == early.headers.keys()
    assert f'path="{path}"' in text or path in text
    assert 'brim_predict_rejected_total{reason="overloaded"} 2.0' in text


@pytest.mark.parametrize("value", ["0", "-1", "x", "9" * 12, "1.5", ""])
def test_a_wrong_deadline_is_named_however_long_the_queue_is(api_with, value):
    with api_with() as api:
        api.predictions.wait_s = 100.0
        assert segment(api, FILE, Brim_Deadline_Ms=value).status == 422


# Metrics


def test_predictions_are_counted(api_with):
    with api_with() as api:
        segment(api, FILE)
        segment(api, FILE, ("model", None, b"unknown"))
        segment(api, ("file", "a", b"x"))
        api.predictions.wait_s = 100.0
        segment(api, FILE)
        text = api.get("/metrics").body.decode()

    for line in (
        'brim_predict_requests_total{model="cells",status="200"} 1.0',
        'brim_predict_requests_total{model="",status="404"} 1.0',
        'brim_predict_requests_total{model="cells",status="415"} 1.0',
        'brim_predict_rejected_total{reason="unknown_model"} 1.0',
        'brim_predict_rejected_total{reason="type"} 1.0',
        'brim_predict_rejected_total{reason="overloaded"} 1.0',
        'brim_predict_seconds_count{stage="forward"} 1.0',
        'brim_predict_seconds_count{stage="total"} 1.0',
        "brim_predict_queue_depth 3.0",
        "brim_predict_device_busy_share 0.25",
        'brim_predict_batch_size_bucket{le="1.0"} 5.0',
        'brim_predict_batch_size_bucket{le="4.0"} 7.0',
        'brim_predict_batch_size_bucket{le="+Inf"} 8.0',
        "brim_predict_batch_size_sum 313.0",
    ):
        assert line in text.splitlines(), line


def test_a_run_is_tried_by_its_id_and_becomes_a_model_by_one_request(api_with, capsys):
    with api_with() as api:
        runs = {}
        for seed, state in ((7, "ready"), (8, "training")):
            path = api.settings.data / "runs" / state
            path.mkdir(parents=True)
            torch.manual_seed(seed)
            save_weights(create_model("unet_tiny"), path / "weights.safetensors", {"model": "unet_tiny"})
            config = {"model": "unet_tiny"}
            row = api.catalogue.runs.add(
                name=state, kind="segment.train", path=f"runs/{state}", config=config, summary={}
            )
            runs[state] = row.id
        with api.catalogue._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE runs SET state = 'training' WHERE name = 'training'")

        tried = segment(api, FILE, SOME, ("model", None, runs["ready"].encode()))
        added = api.post("/api/models", {"name": "mine", "run_id": runs["ready"][:8]})
        named = segment(api, FILE, SOME, ("model", None, b"mine"))
        other = segment(api, FILE, SOME, ("model", None, b"cells"))
        sequence = ("file", "s.npy", npy(9, 4))
        unnamed = segment(api, sequence, path="/api/classify")
        row = api.catalogue.runs.add(name="steps", kind="sequence.train", path="runs/steps", config={}, summary={})
        by_run = segment(api, sequence, ("model", None, row.id.encode()), path="/api/classify")
        again = api.post("/api/models", {"name": "mine", "run_id": runs["ready"]})
        wrong = {
            "training": api.post("/api/models", {"name": "x", "run_id": runs["training"]}),
            "unknown": api.post("/api/models", {"name": "x", "run_id": "0" * 32}),
            "name": api.post("/api/models", {"name": "no spaces", "run_id": runs["ready"]}),
            "missing": api.post("/api/models", {"name": "x"}),
        }
        argv = ["models", "add", "typed", runs["ready"][:6], "--data", str(api.settings.data), "--json"]
        code = main(argv)
        listed = {one["name"]: one for one in api.get("/api/models").json["models"]}

    assert (tried.status, tried.headers["brim-model"]) == (200, runs["ready"])
    assert added.status == 201, added.body
    assert (added.json["network"], added.json["run_name"], added.json["replaced"]) == ("unet_tiny", "ready", False)
    assert named.body == tried.body != other.body
    assert again.json["replaced"]
    assert unnamed.status == 404
    assert "name a finished run by its id" in unnamed.json["detail"]
    assert (by_run.status, row.id in by_run.json["detail"]) == (503, True)  # found; here it has no files
    statuses = {name: (answer.status, answer.json["field"]) for name, answer in wrong.items()}
    assert statuses == {
        "training": (409, None), "unknown": (404, None), "name": (422, "name"), "missing": (422, "run_id"),
    }  # fmt: skip
    assert code == 0
    assert json.loads(capsys.readouterr().out)["about"]["run_id"] == runs["ready"]
    assert listed["mine"]["run_id"] == runs["ready"]
