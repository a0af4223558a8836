"""Now, jobs, the form of every kind, one job and tuning, in a browser."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_service import JOBS, Serve
from visits import Visit

import brim
from waiting import PATIENCE_S

pytestmark = pytest.mark.long

ID = re.compile(r"/jobs/[0-9a-f]{32}$")
TITLES = {
    "rf.generate": "Generate radio samples",
    "rf.train": "Train a locator",
    "rf.evaluate": "Evaluate a locator",
    "segment.tune": "Tune batch sizes",
    "segment.predict": "Segment images",
    "segment.train": "Train segmentation",
    "sequence.train": "Train on sequences",
    "sequence.evaluate": "Evaluate on sequences",
}
FILLED: dict[str, dict[str, str]] = {  # by label; what is not here stays as the form begins
    "rf.generate": {"Number of samples": "8", "All settings/Duration, s": "0.2"},
    "rf.train": {"Epochs": "1", "Batch size": "4"},
    "rf.evaluate": {},
    "segment.tune": {"Model": "=unet_tiny", "Size": "64", "Seconds": "2"},
    "segment.train": {"Model": "=unet_tiny", "Size": "32", "Epochs": "1", "Batch size": "4"},
    "segment.predict": {"Threshold": "0.4", "All settings/Batch size": "2", "All settings/Tile": "64"},
    "sequence.train": {
        "Mode": "=supervised",
        "Epochs": "1",
        "Batch size": "4",
        "All settings/Model · channels": "8",
        "All settings/Model · hidden": "8",
        "All settings/Model · embedding": "8",
    },
    "sequence.evaluate": {},
}
NEEDS = {
    "rf.train": "rf.generate",
    "rf.evaluate": "rf.train",
    "segment.predict": "segment.train",
    "sequence.evaluate": "sequence.train",
}


# Nothing there yet


def test_the_address_with_the_token_logs_in_and_without_it_nothing_is_shown(browser, service):
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{service.port}/")
    refused = page.content()
    page.goto(f"http://127.0.0.1:{service.port}/?token={service.token}")
    page.wait_for_selector("h1")

    assert "token" in refused
    assert "Jobs" not in refused
    assert "token=" not in page.url
    assert service.token not in page.content()
    context.close()


@pytest.mark.parametrize(
    ("path", "words", "next_step"),
    [
        ("/", "Nothing has run yet", "/jobs/new?kind=rf.generate"),
        ("/jobs", "No jobs yet", "/jobs/new"),
        ("/tuning", "Nothing is tuned yet", "/jobs/new?kind=segment.tune"),
    ],
)
def test_an_empty_page_says_what_to_do_next(empty_visit, path, words, next_step):
    page = empty_visit.open(path)

    page.get_by_text(words).wait_for()
    empty_visit.shot(f"empty_{path.strip('/') or 'now'}")
    page.locator(f'.brim-empty a[href="{next_step}"]').click()
    page.get_by_role("heading", name="New job").wait_for()


# Every kind by its form


@pytest.fixture(scope="module")
def finished(service, images, sequences) -> Callable[[Visit, str], dict[str, Any]]:
    """A job of a kind, made by its form and finished; each is made once."""
    made: dict[str, dict[str, Any]] = {}

    def make(visit: Visit, kind: str) -> dict[str, Any]:
        if kind in NEEDS:
            make(visit, NEEDS[kind])
        if kind == "rf.evaluate" and kind not in made:  # the form chooses it, as the run was not trained on it
            other = {"num_samples": 8, "seed": 1, "duration_s": 0.2}
            body = {"kind": "rf.generate", "name": "held out", "config": other}
            service.wait(service.submit(body)["id"], "completed")
        if kind not in made:
            made[kind] = _by_form(visit, service, kind)
        return made[kind]

    return make


def _by_form(visit: Visit, service: Serve, kind: str) -> dict[str, Any]:
    page = visit.open("/jobs/new")
    page.get_by_role("link", name=TITLES[kind]).click()
    page.wait_for_url(f"**/jobs/new?kind={kind}")
    page.wait_for_function("window.did_handshake")
    for label, value in FILLED[kind].items():
        _fill(page, label, value)
    page.get_by_label("Name", exact=True).fill(f"a {kind}")
    page.get_by_text("of disk.").wait_for()
    if kind in ("rf.generate", "segment.train"):
        visit.shot(f"form_{kind}")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(ID)
    page.locator(".brim-status-completed, .brim-status-failed").wait_for()
    job = service.job(page.url.rpartition("/")[2])
    assert job["status"] == "completed", job["error"]
    return job


def _fill(page: Any, label: str, value: str) -> None:
    fold, _, label = label.rpartition("/")
    field = page.get_by_label(label, exact=True)
    if fold and not field.is_visible():
        page.get_by_text(fold).click()
    if value.startswith("="):
        field.click()
        page.get_by_role("option", name=value[1:], exact=True).click()
    else:
        field.fill(value)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.smoke if kind == "rf.generate" else ()) for kind in TITLES]
)
def test_a_job_is_made_by_its_form_and_watched_to_its_end(visit, finished, kind):
    job = finished(visit, kind)

    assert (job["kind"], job["name"]) == (kind, f"a {kind}")
    page = visit.open(f"/jobs/{job['id']}")
    page.get_by_role("heading", name="Result").wait_for()
    page.get_by_text('the job "').first.wait_for()  # its log
    made = {"rf.generate": "The dataset it made", "rf.train": "The run it made"}.get(kind)
    if made:
        page.get_by_role("link", name=made).wait_for()
    if kind == "segment.predict":
        with page.expect_download() as begun:
            page.get_by_role("link", name=re.compile(r"\.geojson")).first.click()
        assert begun.value.failure() is None
        page.get_by_label("Predicted outlines").wait_for()
        page.get_by_role("button", name="Image 0").click()  # large, with what was predicted
        page.get_by_text(re.compile(r"64 × 64 pixels, \d+ object")).wait_for()
        visit.shot("image_large")
        page.get_by_role("button", name="Close").click()
    if kind in ("rf.evaluate", "segment.predict"):
        visit.shot(f"job_{kind}")


# Forms


def test_the_api_says_at_its_field_what_is_wrong_and_nothing_can_be_submitted_until_it_is_right(visit):
    page = visit.open("/jobs/new?kind=rf.generate")
    submit = page.get_by_role("button", name="Submit")
    page.get_by_text("of disk.").wait_for()

    page.get_by_label("Number of samples", exact=True).fill("many")
    at_field = page.locator(".q-field", has=page.get_by_label("Number of samples", exact=True))
    at_field.get_by_text('config.num_samples="many" must be a whole number.').wait_for()
    page.get_by_label("Seed", exact=True).fill("1.5")
    page.get_by_text("config.seed=1.5 must be a whole number.").wait_for()
    assert at_field.get_by_text('config.num_samples="many"').is_visible(), "all wrong fields at once"
    page.get_by_label("Seed", exact=True).fill("1")
    assert submit.is_disabled()
    visit.shot("form_refused")

    page.get_by_label("Number of samples", exact=True).fill("16")
    page.get_by_text("of disk.").wait_for()
    assert at_field.locator(".q-field--error").count() == 0
    assert submit.is_enabled()


def test_receivers_come_from_a_file_and_from_clicks_on_the_map(visit):
    page = visit.open("/jobs/new?kind=rf.generate")
    page.get_by_text("Receivers", exact=True).click()
    stations = page.get_by_label("Stations", exact=True)
    file = {"name": "s.csv", "mimeType": "text/csv", "buffer": b"name,lat,lon,alt\nA,45,7,100\nB,45.2,8,90\n"}
    page.get_by_label("Receivers, CSV").set_input_files(file)
    page.wait_for_function("field => field.value.includes('45.2')", arg=stations.element_handle())

    where = page.get_by_role("region", name="Map of the receivers")
    where.get_by_text("B", exact=True).wait_for()
    where.click(position={"x": 200, "y": 120})
    page.wait_for_function("field => field.value.includes('R1')", arg=stations.element_handle())
    page.get_by_text("of disk.").wait_for()  # the API takes them
    visit.shot("form_receivers")

    page.get_by_role("button", name="As built in").click()
    page.wait_for_function("field => field.value === ''", arg=stations.element_handle())


def test_a_preset_fills_its_fields_and_the_defaults_empty_them(visit):
    page = visit.open("/jobs/new?kind=rf.generate")
    power, gdop = (page.get_by_label(name, exact=True) for name in ("TX power, dBm", "Max GDOP"))

    page.get_by_role("button", name="production").click()
    _has_value(page, power, "50")
    _has_value(page, gdop, "100")
    page.get_by_role("button", name="quality").click()
    _has_value(page, power, "40")
    _has_value(page, gdop, "20")
    page.get_by_role("button", name="defaults").click()
    _has_value(page, gdop, "")


def _has_value(page: Any, field: Any, value: str) -> None:
    element = field.element_handle()
    page.wait_for_function("([element, value]) => element.value === value", arg=[element, value])


def test_a_form_is_copied_as_curl_and_as_a_command_that_work_and_hold_no_token(visit, service, tmp_path):
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visit.open("/jobs/new?kind=segment.tune")
    assert page.get_by_alt_text("Its mask: cells that touch are one").evaluate("image => image.naturalWidth") == 208
    page.get_by_label("Name", exact=True).fill("it's copied")
    page.get_by_label("Seconds", exact=True).fill("90")
    page.get_by_text("of disk.").wait_for()
    for name in ("Copy as curl", "Copy as command"):
        page.get_by_role("button", name=name).click()
        page.get_by_text("Copied.").first.wait_for()
        page.wait_for_timeout(300)
        command = page.evaluate("navigator.clipboard.readText()")
        done = _run(command, tmp_path)

        assert service.token not in command
        assert done.returncode == 0, done.stderr
        (job,) = service.get(f"{JOBS}?name=copied")["jobs"]
        service.act(job["id"], "cancel")
        service.wait(job["id"], "cancelled")
        assert (job["name"], job["config"]["seconds"]) == ("it's copied", 90.0)
        assert service.ask("DELETE", f"{JOBS}/{job['id']}")[0] == 204


def _run(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """In a shell, with the brim that is tested."""
    here = {**os.environ, "PYTHONPATH": str(Path(brim.__file__).parents[1])}
    command = re.sub(r"^brim ", f"{sys.executable} -m brim ", command)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=here, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_a_new_job_begins_like_an_earlier_one(visit, finished):
    job = finished(visit, "rf.generate")
    page = visit.open(f"/jobs/{job['id']}")

    page.get_by_role("link", name="New job like this").click()
    page.wait_for_url(re.compile("like="))

    _has_value(page, page.get_by_label("Name", exact=True), "a rf.generate")
    _has_value(page, page.get_by_label("Number of samples", exact=True), "8")
    _has_value(page, page.get_by_label("Duration, s", exact=True), "0.2")
    _has_value(page, page.get_by_label("Frequency, MHz", exact=True), "")


# One job


@pytest.mark.smoke
def test_a_job_is_paused_resumed_cancelled_and_deleted(visit, service):
    job = service.generate(100_000, "long")
    page = visit.open(f"/jobs/{job['id']}")
    page.locator(".brim-status-running").wait_for()
    service.wait_progress(job["id"], 8)
    page.get_by_text(re.compile(r" of 100\s000 ")).wait_for()
    visit.shot("job_running")

    page.get_by_role("button", name="Pause").click()
    page.locator(".brim-status-paused").wait_for()
    page.get_by_role("button", name="Resume").click()
    page.locator(".brim-status-running").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.locator(".brim-status-cancelled").wait_for()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Keep it").click()
    page.locator(".q-dialog").wait_for(state="detached")
    page.get_by_role("button", name="Delete").click()
    page.locator(".q-dialog").get_by_role("button", name="Delete").click()
    page.wait_for_url("**/jobs")

    assert service.ask("GET", f"{JOBS}/{job['id']}")[0] == 404


def test_what_runs_is_shown_now_with_its_device(visit, service):
    job = service.generate(1500, "seen now")
    try:
        service.wait_progress(job["id"], 8)
        page = visit.open("/")
        page.get_by_role("link", name="seen now").first.wait_for()
        page.get_by_text(re.compile(r" of 1\s500 .* left")).wait_for()
        page.locator(".brim-chart svg path").first.wait_for(state="attached")
        page.wait_for_timeout(3000)  # points are pushed meanwhile
        visit.shot("now")
    finally:
        service.ask("POST", f"{JOBS}/{job['id']}/cancel")
        service.wait(job["id"])


# Lists


def test_jobs_are_filtered_and_a_row_is_a_link(visit, finished):
    job = finished(visit, "rf.generate")
    finished(visit, "segment.tune")
    page = visit.open("/jobs")
    page.get_by_role("link", name="a rf.generate").wait_for()
    visit.shot("jobs")

    page.get_by_label("Name", exact=True).fill("RF.GENERATE")
    page.get_by_role("link", name="a segment.tune").wait_for(state="detached")
    page.get_by_label("Status", exact=True).click()
    page.get_by_role("option", name="completed").click()
    page.wait_for_url("**/jobs?status=completed&name=RF.GENERATE")
    link = page.get_by_role("link", name="a rf.generate")
    link.focus()
    page.keyboard.press("Enter")

    page.wait_for_url(f"**/jobs/{job['id']}")


# Tuning


def test_tuning_shows_what_was_measured_and_tunes_again(visit, finished, service):
    finished(visit, "segment.tune")
    page = visit.open("/tuning")

    page.get_by_role("heading", name=re.compile("^unet_tiny on ")).wait_for()
    assert page.locator(".brim-chart svg").count() == 3
    assert page.get_by_role("cell", name=re.compile("chosen")).count() == 1
    visit.shot("tuning")
    page.get_by_role("button", name="Tune again").click()
    page.get_by_role("link", name="Watch it tune").click()
    page.wait_for_url(ID)
    job = service.job(page.url.rpartition("/")[2])
    service.act(job["id"], "cancel")

    assert job["kind"] == "segment.tune"
    (device,) = service.get("/api/batch-sizes")["devices"].values()
    size = device["batch_configurations"]["unet_tiny"]["image_size"]
    assert (job["config"]["models"], job["config"]["size"]) == (["unet_tiny"], size)


# Kills


@pytest.mark.parametrize("victim", [pytest.param("dashboard", marks=pytest.mark.smoke), "api"])
def test_a_page_goes_on_after_a_kill(visit, service, victim):
    page = visit.open("/jobs")
    before = service.children()[victim]

    service.kill_child(victim)

    page.wait_for_function("!window.socket?.connected")
    page.wait_for_function("window.socket?.connected && window.did_handshake")
    page.get_by_role("link", name="Tuning").click()
    page.get_by_role("heading", name="Tuning").wait_for()
    assert service.children()[victim] != before
    visit.faults.clear()  # of the moment in which nobody answered
