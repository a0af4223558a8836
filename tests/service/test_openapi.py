"""The OpenAPI document says what is there, and schemathesis finds nothing that contradicts it."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from live_api import TOKEN

from waiting import until


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "depth",
    [
        pytest.param(["--max-examples", "6", "--phases", "examples,fuzzing,stateful"], id="few"),
        # with the 9 000 cases of boundary values, most of them of the settings of jobs
        pytest.param(["--max-examples", "100"], id="all", marks=pytest.mark.long),
    ],
)
def test_schemathesis_finds_nothing(shared, tmp_path: Path, depth):
    shared.catalogue.devices.put("w0", {"device": "cpu"})
    document = shared.get("/openapi.json").json  # made once; that imports torch, which schemathesis would not wait for
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    num, predicting = len(operations), sum("predictions" in operation["tags"] for operation in operations)
    # all checks as they come, without the event stream, which never ends, and predictions, which nothing answers here
    command = [
        *(sys.executable, "-m", "schemathesis.cli"),
        *("run", f"http://127.0.0.1:{shared.port}/openapi.json", "-H", f"Authorization: Bearer {TOKEN}"),
        *("--exclude-path-regex", "/events$", "--exclude-tag", "predictions", "--no-color", "--seed", "7"),
        *depth,
    ]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3500)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{num - 1 - predicting} selected / {num} total" in done.stdout


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


def test_the_two_bodies_are_of_a_documented_form(shared):
    import jsonschema_rs
    from live_api import GENERATION, TRAINING

    schema = shared.get("/openapi.json").json["paths"]["/api/training/jobs"]["post"]["requestBody"]["content"]
    validator = jsonschema_rs.validator_for(schema["application/json"]["schema"])

    for body in (GENERATION, TRAINING, {"kind": "segment.tune", "name": "t", "config": {}}):
        validator.validate(body)
    assert not validator.is_valid({**GENERATION, "extra": 1})
    assert not validator.is_valid({})


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_documentation_needs_no_network(shared):
    page = shared.get("/docs")
    links = _Links()
    links.feed(page.body.decode())

    assert page.status == 200
    assert len(links.found) >= 4
    assert "://" not in page.body.decode()
    for link in links.found:
        assert link.startswith("/docs/")
        assert shared.get(link).status == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "validatorUrl: null" in shared.get("/docs/start.js").body.decode()


def test_the_first_page_leads_on(shared):
    page = shared.get("/")
    links = _Links()
    links.feed(page.body.decode())

    for link in links.found:
        assert shared.get(link).status in (200, 503)


def test_the_document_is_made_once(shared):
    assert json.dumps(shared.get("/openapi.json").json) == json.dumps(shared.get("/openapi.json").json)
