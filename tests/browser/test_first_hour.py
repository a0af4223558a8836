"""The first hour of a new user: the demo, the dashboard, a network of one's own images, and what comes of it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fault_service import Serve
from visits import Visit, cell_files

import brim
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry
from brim.service.access import TokenFile
from waiting import until

pytestmark = pytest.mark.long

WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
PAGES = ("/", "/jobs", "/jobs/new", "/jobs/new?kind=segment.train", "/datasets", "/runs", "/tuning", "/segment",
         "/locate", "/why")  # fmt: skip
_NAMES = str.maketrans(" ,/?&=", "______")


@pytest.fixture(scope="module")
def demo(browser, tmp_path_factory) -> Iterator[Serve]:
    """The service over what `brim demo` has made, by the command that it prints."""
    folder = tmp_path_factory.mktemp("hour")
    command = [sys.executable, "-m", "brim", "demo", "--out", "demo", "--samples", "20", "--json"]
    here = {**os.environ, "PYTHONPATH": str(Path(brim.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    data = folder / json.loads(done.stdout)["dashboard"]["data"]
    entry = BatchSizeEntry(  # so that none is searched: that takes a minute without a GPU
        optimal_batch_size=1, max_safe_batch_size=4, expected_throughput=50.0, p50_latency_ms=20.0,
        p95_latency_ms=40.0, memory_limit_mb=1000.0, image_size=1024, precision="fp32", layout="contiguous",
        compiled=False,
    )  # fmt: skip
    cpu = torch.device("cpu")
    save_entry(data / "batch_sizes.json", device_key(cpu), device_info(cpu), "unet_tiny", entry, [])
    serve = Serve(data, dashboard=True)
    try:
        yield serve.start()
    finally:
        serve.close()


@pytest.fixture
def wide(browser, demo, screenshots) -> Iterator[Visit]:
    yield from _visit(browser, demo, screenshots, WIDE)


@pytest.fixture
def narrow(browser, demo, screenshots) -> Iterator[Visit]:
    yield from _visit(browser, demo, screenshots, PHONE)


def _visit(browser, serve, screenshots, viewport) -> Iterator[Visit]:
    context = browser.new_context(viewport=viewport)
    visit = Visit(context.new_page(), serve, screenshots)
    yield visit
    assert not visit.faults, visit.faults
    context.close()


def test_the_first_hour(wide, demo, tmp_path):
    page = wide.open("/")  # what the demo made last is shown
    page.get_by_role("link", name=re.compile("demo")).first.wait_for()
    assert page.get_by_text("Nothing has run yet").count() == 0
    wide.shot("first_now")

    files = cell_files(8, 64)  # train on one's own images
    paths = {field: _write(tmp_path / field, files, field) for field in ("images", "masks")}
    page = wide.open("/datasets")
    page.get_by_role("button", name="Upload files").click()
    dialog = page.locator(".q-dialog")
    dialog.get_by_label("Name", exact=True).fill("my cells")
    dialog.get_by_label("Images", exact=True).set_input_files(paths["images"])
    dialog.get_by_label("Masks, to train on").set_input_files(paths["masks"])
    dialog.get_by_role("button", name="Upload").click()
    page.get_by_role("heading", name="my cells").wait_for()
    dataset = page.url.rpartition("/")[2]
    wide.shot("first_dataset")
    page.get_by_role("link", name="Train segmentation on it").click()
    page.wait_for_url("**/jobs/new?kind=segment.train*")
    page.wait_for_function("window.did_handshake")
    for label, value in {"Name": "my network", "Size": "32", "Epochs": "2", "Batch size": "4"}.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Model", exact=True).click()
    page.get_by_role("option", name="unet_tiny", exact=True).click()
    page.get_by_text("of disk.").wait_for()
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("/jobs/[0-9a-f]{32}$"))
    page.locator(".brim-status-completed").wait_for()
    assert demo.job(page.url.rpartition("/")[2])["config"]["dataset_ids"] == [dataset]
    wide.shot("first_job")

    page.get_by_role("link", name="The run it made").click()  # try it on another image
    page.wait_for_url(re.compile("/runs/[0-9a-f]{32}$"))
    run = page.url.rpartition("/")[2]
    page.wait_for_function("window.did_handshake")
    wide.shot("first_run")
    page.get_by_role("link", name="Try it on an image").click()
    page.wait_for_url(f"**/segment?run={run}")
    page.wait_for_function("window.did_handshake")
    another = dict(cell_files(10, 96))  # the last of each field
    name, image = another["images"]
    wide.let_go(name, image)
    page.get_by_text(f"by {run}").wait_for()  # its network is loaded first, and the page asks again
    wide.faults[:] = [each for each in wide.faults if "503" not in each]
    wide.shot("first_try")

    page = wide.open(f"/runs/{run}")  # use it as a model
    page.get_by_role("button", name="Use this model").click()
    page.get_by_label("Name", exact=True).fill("mine")
    page.get_by_role("button", name="Use it").click()
    page.get_by_text("Model mine (unet_tiny) added.").wait_for()

    (tmp_path / name).write_bytes(image)  # predict by the README's curl
    curl = (
        f'curl -sS -H "Authorization: Bearer $(cat {demo.data}/token)" -F file=@{name} -F model=mine '
        f"http://127.0.0.1:{demo.port}/api/segment"
    )
    until(lambda: _state(demo, "mine") == "warm", demo.said)
    answer = json.loads(subprocess.run(["bash", "-c", curl], cwd=tmp_path, capture_output=True, check=True).stdout)
    assert answer["type"] == "FeatureCollection", answer


def test_no_page_has_a_serious_barrier_or_needs_to_be_moved_sideways(wide, narrow, demo):
    runs = [row["id"] for row in demo.get("/api/runs")["runs"]]
    datasets = {row["kind"]: row["id"] for row in demo.get("/api/datasets")["datasets"]}  # one of each kind
    job = demo.get("/api/training/jobs")["jobs"][0]["id"]
    places = [*PAGES, f"/jobs/{job}", *(f"/datasets/{id}" for id in datasets.values()), *(f"/runs/{id}" for id in runs)]
    places.append(f"/runs/compare?ids={','.join(runs[:2])}")
    narrow.open("/")
    narrow.dark()  # kept by the browser
    barriers, too_wide = [], []
    for visit, size in ((wide, "1400 pixels"), (narrow, "390 pixels, dark")):
        for place in places:
            page = visit.open(place)
            visit.shot(f"{size}{place}".translate(_NAMES)[:60])
            barriers += [f"{place} at {size}: {each}" for each in visit.barriers()]
            if not page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
                too_wide.append(f"{place} at {size}")

    assert not barriers, "\n".join(barriers)
    assert not too_wide


def test_a_keyboard_alone_submits_watches_and_cancels(wide, demo):
    page = wide.open("/jobs/new?kind=rf.generate")
    page.get_by_text("of disk.").wait_for()
    _tab_to(page, "Name")
    page.keyboard.press("Control+A")
    page.keyboard.type("by keyboard")
    _tab_to(page, "Number of samples")
    page.keyboard.press("Control+A")
    page.keyboard.type("100000")
    page.get_by_text("of disk.").wait_for()
    _tab_to(page, "Submit")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/jobs/[0-9a-f]{32}$"))
    page.locator(".brim-status-running").wait_for()
    page.wait_for_function("window.did_handshake")
    _tab_to(page, "Cancel")
    page.keyboard.press("Enter")
    page.locator(".brim-status-cancelled").wait_for()

    assert demo.get("/api/training/jobs?name=by+keyboard")["jobs"][0]["status"] == "cancelled"


def test_a_viewer_sees_every_page_and_is_told_what_needs_another_role(browser, demo, screenshots):
    _, token = TokenFile(demo.data).add("ann", "viewer")
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{demo.port}/?token={token}")
    page.get_by_text("ann, viewer").wait_for()
    page.goto(f"http://127.0.0.1:{demo.port}/runs")
    page.get_by_role("link", name="demo locator").wait_for()
    page.goto(f"http://127.0.0.1:{demo.port}/jobs/new?kind=rf.generate")
    page.get_by_text("needs the role operator").first.wait_for()
    assert page.get_by_role("button", name="Submit").is_disabled()
    page.screenshot(path=screenshots / "viewer.png")

    page.get_by_role("link", name="Sign out").click()
    page.get_by_role("heading", name="brim does not know this browser yet").wait_for()
    context.close()


def _state(serve: Serve, model: str) -> str:
    return {each["name"]: each["state"] for each in serve.get("/api/models")["models"]}.get(model, "")


def _tab_to(page, name: str) -> None:
    """Press the tabulator until what has the focus is called so."""
    named = """() => {
      const at = document.activeElement;
      return at.getAttribute("aria-label") || at.innerText?.trim() || "";
    }"""
    for _ in range(80):
        page.keyboard.press("Tab")
        if str(page.evaluate(named)).split("\n")[-1].casefold() == name.casefold():
            return
    pytest.fail(f"no number of tabulators leads to {name}")


def _write(folder: Path, files: list[tuple[str, tuple[str, bytes]]], field: str) -> list[Path]:
    folder.mkdir()
    for kind, (name, data) in files:
        if kind == field:
            (folder / name).write_bytes(data)
    return sorted(folder.iterdir())
