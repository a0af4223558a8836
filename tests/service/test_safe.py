"""What leaves the service and what it logs: no query, no id, no path, no traceback; and its own process."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from live_api import JOBS, TOKEN, Api, make

from waiting import PATIENCE_S, until


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


def test_batch_sizes_are_shown_as_tuning_wrote_them(api):
    assert api.get("/api/batch-sizes").json == {"devices": {}}

    api.settings.batch_sizes.write_text(
        json.dumps({"format_version": 1, "devices": {"cpu": {"device_info": {"x": 1}}}})
    )
    assert api.get("/api/batch-sizes").json["devices"]["cpu"]["device_info"] == {"x": 1}

    for broken in ("{", "[]", "null", '{"devices": 1}'):
        api.settings.batch_sizes.write_text(broken)
        assert api.get("/api/batch-sizes").status == 503


def test_devices_are_those_the_workers_reported(api):
    api.catalogue.devices.put("w0", {"device": "cuda:0", "name": "a GPU"})

    (device,) = api.get("/api/devices").json["devices"]

    assert (device["worker"], device["device"], device["name"]) == ("w0", "cuda:0", "a GPU")


def test_ready_says_what_is_missing(api):
    no_worker = api.get("/ready")
    assert (no_worker.status, no_worker.json["workers"], no_worker.json["database"]) == (503, 0, True)

    api.catalogue.devices.put("w0", {"device": "cpu"})
    answer = until(lambda: (answer := api.get("/ready")).status == 200 and answer)
    assert answer.json["status"] == "ready"


def test_ready_looks_at_the_disk(api, monkeypatch, tmp_path):
    (tmp_path / "free").write_text("5")
    monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(tmp_path / "free"))

    answer = api.get("/ready")

    assert (answer.status, answer.json["disk"], answer.json["free_bytes"]) == (503, False, 5)


def test_metrics_count_jobs_and_requests(api):
    api.submit()
    text = api.get("/metrics").body.decode()

    assert 'brim_jobs{status="queued"} 1.0' in text
    assert 'brim_jobs{status="failed"} 0.0' in text
    assert 'brim_http_requests_total{method="POST",route="/api/training/jobs",status="202"} 1.0' in text
    assert "brim_database_up 1.0" in text


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
        os.close(lifeline) if lifeline_is_open(lifeline) else None


def lifeline_is_open(end: int) -> bool:
    try:
        os.fstat(end)
    except OSError:
        return False
    return True


def health(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_process_answers_soon_and_ends_when_told(tmp_path):
    with process(tmp_path / "data") as (started, port, _):
        assert health(port) == 200, "the socket is there before the process: a client waits"
        assert TOKEN not in Path(f"/proc/{started.pid}/cmdline").read_text()
        assert TOKEN not in Path(f"/proc/{started.pid}/environ").read_text()
        started.send_signal(signal.SIGTERM)
        assert started.wait(PATIENCE_S) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_the_process_is_light(tmp_path):
    with process(tmp_path / "data") as (started, port, _):
        assert health(port) == 200
        maps, status = (Path(f"/proc/{started.pid}/{name}").read_text() for name in ("maps", "status"))
        resident_mb = int(status.partition("VmRSS:")[2].split()[0]) / 1024

        assert not [name for name in ("torch", "cv2", "numpy", "PIL") if f"/{name}/" in maps]
        assert resident_mb <= 130


def test_the_process_ends_with_its_supervisor(tmp_path):
    with process(tmp_path / "data") as (started, port, lifeline):
        assert health(port) == 200
        os.close(lifeline)
        assert started.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("module", ["brim.service.settings", "brim.service.token"])
def test_what_the_supervisor_and_the_command_line_import_is_light(module):
    code = f"import sys, {module}; print(*{{'torch', 'fastapi', 'sqlalchemy', 'dbos', 'uvicorn'}} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
