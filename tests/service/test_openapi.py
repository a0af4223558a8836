"""The OpenAPI document says what is there, and schemathesis finds nothing that contradicts it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_api import TOKEN, Api

from waiting import until

# A schema cannot say that a file is an image, or that observations have stations: those are refused though they fit it.
# 503 is the right answer to a deadline of a millisecond.
CONFIG = """
[[operations]]
include-tag = "predictions"
exclude-path-regex = "segment$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "401", "403", "404", "413", "415", "422", "5xx"]
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]

# in a form, a list of one value or of none cannot be told from that value or no field
[[operations]]
include-path-regex = "segment$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "401", "403", "404", "413", "415", "422", "5xx"]
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503"]
checks.negative_data_rejection.expected-statuses = ["200", "4xx", "5xx"]
"""


def check(api: Api, folder: Path, num: int, *options: str) -> None:
    """All checks of schemathesis on so many operations."""
    address = f"http://127.0.0.1:{api.port}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", address, "-H", f"Authorization: Bearer {TOKEN}"]
    command += ["--no-color", "--seed", "7", *options]

    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3500)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{num} selected" in done.stdout


def operations(api: Api) -> list[Any]:
    """Of the document, which is made once; that imports torch, which schemathesis would not wait for."""
    return [one for methods in api.get("/openapi.json").json["paths"].values() for one in methods.values()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "depth",
    [
        pytest.param(["--max-examples", "2", "--phases", "examples,fuzzing"], id="few"),
        # with the 9 000 cases of boundary values, most of them of the settings of jobs
        pytest.param(["--max-examples", "100"], id="all", marks=pytest.mark.long),
    ],
)
def test_schemathesis_finds_nothing(shared, tmp_path: Path, depth):
    shared.catalogue.devices.put("w0", {"device": "cpu"})
    num = sum("predictions" not in operation["tags"] for operation in operations(shared)) - 1
    # without the event stream, which never ends, and predictions, which nothing answers here
    check(shared, tmp_path, num, "--exclude-path-regex", "/events$", "--exclude-tag", "predictions", *depth)


@pytest.mark.parametrize(
    "depth",
    [
        pytest.param(["--max-examples", "4", "--phases", "examples,fuzzing"], id="few"),
        pytest.param(["--max-examples", "100"], id="all", marks=pytest.mark.long),
    ],
)
def test_schemathesis_finds_nothing_where_models_answer(segmenting, tmp_path: Path, depth):
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    num = sum("predictions" in operation["tags"] for operation in operations(segmenting))
    check(segmenting, tmp_path, num, "--include-tag", "predictions", *depth)

    text = segmenting.get("/metrics").body.decode()
    assert 'brim_predict_requests_total{model="cells",status="200"}' in text  # some were images


def test_every_route_is_documented_with_what_it_may_refuse(shared):
    document = shared.get("/openapi.json").json

    assert document["openapi"].startswith("3.1")
    operations = {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    pages = {"/", "/docs", "/docs/start.js", "/docs/assets", "/openapi.json"}
    for route in shared.api.routes:
        path = re.sub(r":path}", "}", route.path)
        for method in getattr(route, "methods", None) or ():
            if path not in pages:
                assert (method, path) in operations
    for (_, path), operation in operations.items():
        assert operation["security"] == ([] if path == "/health" else [{"token": []}, {"cookie": []}])
        assert {"403", "421"} <= operation["responses"].keys()
        assert ("401" in operation["responses"]) == (path != "/health")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_health_check_may_ask_for_the_status_alone(shared, path):
    shared.catalogue.devices.put("w0", {"device": "cpu"})
    answer = until(lambda: (answer := shared.ask("HEAD", path)).status == 200 and answer)

    assert answer.body == b""
    assert shared.get(path).headers["content-type"] == answer.headers["content-type"]
