"""What leaves the service and what it logs: no query, no id, no path, no traceback; and its own process."""

import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from live_api import JOBS, TOKEN, Api, make

from brim import errors
from brim.service.api.errors import retry_after, status_of
from brim.service.api.metrics import PredictorMetrics
from waiting import PATIENCE_S


def test_the_log_holds_patterns_not_ids_and_never_a_query(api, caplog):
    caplog.set_level(logging.DEBUG)
    job = api.submit()
    api.get(f"/?token={TOKEN}", token=None)
    api.get(f"{JOBS}/{job['id']}?secret=1")
    api.get("/unknown/path-of-somebody?secret=2")

    told = [
        record.getMessage() for record in caplog.records if record.name.startswith(("brim", "uvicorn", "starlette"))
    ]
    access = [text for text in told if re.match(r"(GET|POST) ", text)]
    assert any(text.startswith(f"GET {JOBS}/{{id}} 200") for text in access)
    assert any(text.startswith("GET (unknown) 404") for text in access)
    for text in told:
        assert TOKEN not in text
        assert "secret" not in text
        assert "path-of-somebody" not in text


def test_an_error_of_ours_is_logged_and_not_shown(api, monkeypatch, caplog):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError(f"broken at {api.settings.data}")

    monkeypatch.setattr(api.catalogue.jobs, "page", broken)
    monkeypatch.setattr(Api, "check", lambda *_: None)  # a 500 is what we want for once

    answer = api.get(JOBS)

    assert answer.status == 500
    assert answer.json == {"detail": "internal error; the service's log says more", "field": None}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "RuntimeError: broken at" in caplog.text
    assert api.get("/health").status == 200


def test_every_answer_has_the_headers_that_keep_a_browser_safe(api):
    for path in ("/", "/docs", "/api/devices", "/nope", "/health"):
        headers = api.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
    assert "no-store" not in api.get("/docs/assets/swagger-ui.css").headers.get("cache-control", "")


def test_batch_sizes_and_devices_are_shown_as_they_were_reported(api):
    assert api.get("/api/batch-sizes").json == {"devices": {}}
    devices = {"cpu": {"device_info": {"x": 1}}}
    api.settings.batch_sizes.write_text(json.dumps({"format_version": 1, "devices": devices}))
    api.catalogue.devices.put("w0", {"device": "cuda:0", "name": "a GPU"})

    assert api.get("/api/batch-sizes").json["devices"] == devices
    (device,) = api.get("/api/devices").json["devices"]
    assert (device["worker"], device["device"], device["name"]) == ("w0", "cuda:0", "a GPU")
    api.settings.batch_sizes.write_text("{")
    assert api.get("/api/batch-sizes").status == 503


def test_ready_and_metrics_tell_what_is_there_and_what_is_missing(api, monkeypatch, tmp_path):
    needed, free = api.settings.min_free_bytes, tmp_path / "free"
    monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(free))
    found = []
    for workers, free_bytes in ((0, needed + 1), (1, needed), (2, needed + 1)):
        free.write_text(str(free_bytes))
        for index in range(workers):
            api.catalogue.devices.put(f"w{index}", {"device": "cpu"})
        answer = api.get("/ready")
        shown = answer.json
        found.append((answer.status, shown["workers"], shown["disk"], shown["database"], shown["free_bytes"]))
    lines = api.get("/metrics").body.decode().splitlines()

    assert found == [
        (503, 0, True, True, needed + 1), (503, 1, False, True, needed), (200, 2, True, True, needed + 1)
    ]  # fmt: skip
    assert api.get("/ready").json["status"] == "ready"
    assert {"brim_workers 2.0", "brim_free_bytes 1.048577e+06", "brim_database_up 1.0"} <= set(lines)


def test_metrics_count_jobs_streams_and_requests_in_seconds(api, monkeypatch):
    ticks = itertools.count(0, 0.25)
    monkeypatch.setattr("brim.service.api.metrics.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    id = api.submit()["id"]
    with api.connect("GET", f"{JOBS}/{id}/events") as watching:
        assert watching.recv(4096).startswith(b"HTTP/1.1 200")
        lines = api.get("/metrics").body.decode().splitlines()

    for line in (
        'brim_jobs{status="queued"} 1.0',
        'brim_jobs{status="failed"} 0.0',
        'brim_http_requests_total{method="POST",route="/api/training/jobs",status="202"} 1.0',
        'brim_http_request_seconds_sum{route="/api/training/jobs"} 0.25',
        "brim_event_streams 1.0",
        "# TYPE brim_http_requests_total counter",
        "# TYPE brim_http_request_seconds histogram",
        "# TYPE brim_jobs gauge",
    ):
        assert line in lines, line


def test_metrics_of_predictors_are_summed_and_their_share_is_that_since_the_last_scrape():
    def shown(*snapshots: dict) -> dict[str, float]:
        metrics.update(snapshots)
        return {
            one.name + one.labels.get("le", ""): one.value for family in metrics.collect() for one in family.samples
        }

    def snapshot(busy_s: float, up_s: float, depth: int = 0, **sizes: int) -> dict:
        return {
            "busy_s": busy_s,
            "up_s": up_s,
            "depth": depth,
            "batch_sizes": {name[1:]: n for name, n in sizes.items()},
        }

    metrics = PredictorMetrics()
    share, busy_s = "brim_predict_device_busy_share", "brim_predict_device_busy_seconds_total"
    first = shown(snapshot(2.0, 10.0, 3, _1=5, _4=2), snapshot(4.0, 10.0, 1, _4=1, _300=1))
    assert (first[share], first[busy_s]) == (pytest.approx((0.2 + 0.4) / 2), 6.0)
    assert (first["brim_predict_queue_depth"], first["brim_predictors"]) == (4, 2)
    sizes = {"1.0": 5, "2.0": 5, "4.0": 8, "256.0": 8, "+Inf": 9}
    assert {le: first[f"brim_predict_batch_size_bucket{le}"] for le in sizes} == sizes
    assert (first["brim_predict_batch_size_sum"], first["brim_predict_batch_size_count"]) == (5 + 4 * 3 + 300, 9)

    assert shown(snapshot(7.0, 20.0), snapshot(4.0, 20.0))[share] == pytest.approx((0.5 + 0.0) / 2)
    assert shown(snapshot(7.5, 20.5), snapshot(4.5, 20.5))[share] == pytest.approx(0.25), "too soon to tell"
    assert shown(snapshot(17.0, 30.0), snapshot(3.0, 5.0))[share] == pytest.approx((17 / 30 + 3 / 5) / 2), "restarted"


STATUSES = {  # of an answer, by the family of the error
    "NotFound": 404, "Conflict": 409, "TooLarge": 413, "UnsupportedType": 415, "TooMany": 429, "Overloaded": 503,
    "DeadlinePassed": 503, "Unavailable": 503, "StorageError": 507,
}  # fmt: skip


def test_every_family_of_errors_has_its_status_and_the_others_are_422():
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    for name, kind in kinds.items():
        if issubclass(kind, errors.BrimError):
            assert status_of(kind("words")) == STATUSES.get(name, 422), name

    assert status_of(errors.ConfigError("values that do not go together", code="conflict")) == 409


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (1.0, "1"), (1.01, "2"), (2.5, "3"), (1e6, "3600")])
def test_a_wait_is_told_in_whole_seconds_rounded_up(wait_s, header):
    assert retry_after(errors.Overloaded("later", wait_s)) == {"Retry-After": header}
    assert retry_after(errors.TooMany("later")) == {}


# The process


@contextmanager
def process(data: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """The API as the supervisor starts it: its process, its port, and the pipe that keeps it alive."""
    made = make(data)
    made.queue.close()
    made.catalogue.close()
    listening = socket.create_server(("127.0.0.1", 0))
    reading, lifeline = os.pipe()
    fds = (reading, listening.fileno())
    started = subprocess.Popen(
        [sys.executable, "-m", "brim.service.api.main", *map(str, fds)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        env={**os.environ, "BRIM_TEST_EXEC": "1"},
    )
    try:
        assert started.stdin is not None
        started.stdin.write(made.settings.to_json().encode())
        started.stdin.close()
        os.close(reading)
        yield started, listening.getsockname()[1], lifeline
    finally:
        started.kill()
        started.wait()
        assert started.stderr is not None
        started.stderr.close()
        listening.close()
        with suppress(OSError):  # a test may have closed it
            os.close(lifeline)


def health(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_process_ends_with_its_supervisor(tmp_path):
    with process(tmp_path / "data") as (started, port, lifeline):
        assert health(port) == 200
        os.close(lifeline)
        assert started.wait(PATIENCE_S) == 1


def test_the_process_is_light_answers_soon_and_ends_when_told(tmp_path):
    with process(tmp_path / "data") as (started, port, _):
        assert health(port) == 200, "the socket is there before the process: a client waits"
        proc = {
            name: Path(f"/proc/{started.pid}/{name}").read_text() for name in ("cmdline", "environ", "maps", "status")
        }
        assert TOKEN not in proc["cmdline"] + proc["environ"]
        assert not [name for name in ("torch", "cv2", "numpy", "PIL") if f"/{name}/" in proc["maps"]]
        assert int(proc["status"].partition("VmRSS:")[2].split()[0]) / 1024 <= 130, "MB"
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
