"""Datasets, runs and the page that segments, in a browser; data is made by jobs and by `brim models add`."""

import json
import re
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from fault_service import QUICK, Serve
from visits import Visit, cell_files

from brim.cli import main
from brim.diagnosis.answer import Diagnosis
from brim.rf.physics.geometry import geodesic_m
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry

sys.path.insert(0, str(Path(__file__).parents[1] / "rf"))
from made_recordings import STATIONS, Scene, write_kiwi, write_sites

from waiting import until

pytestmark = pytest.mark.long

SAMPLES = 24
SMALL_NET = {"channels": 8, "hidden": 8, "embedding": 8}


# Nothing there yet


def test_a_saved_answer_of_brim_why_is_shown_and_another_file_is_refused(empty_visit, tmp_path):
    answer = Diagnosis(samples_per_s=218.0, ceiling_samples_per_s=780.0, ceiling_share=0.28, limit="data", step_s=0.1)
    answer.waiting = {"data": 0.07, "compute": 0.03}
    (tmp_path / "why.json").write_text(json.dumps(answer.as_dict()))
    (tmp_path / "other.json").write_text("[1]")
    page = empty_visit.open("/why")

    page.locator("input[type=file]").set_input_files(tmp_path / "why.json")
    page.frame_locator("iframe").get_by_text("you get 28%").first.wait_for()
    empty_visit.shot("why")

    page.locator("input[type=file]").set_input_files(tmp_path / "other.json")
    page.get_by_role("alert").filter(has_text="no answer of brim why").wait_for()


# Datasets


@pytest.fixture(scope="module")
def made(service, upload, sequences) -> Callable[[str], str]:
    """Id of what a job of a kind made, of its run for evaluations; each job is done once."""
    done: dict[str, str] = {}

    def make(kind: str) -> str:
        if kind not in done:
            done[kind] = _JOBS[kind](service, make, upload, sequences)
        return done[kind]

    return make


def _do(service: Serve, kind: str, **config: Any) -> dict[str, Any]:
    job = service.submit({"kind": kind, "name": f"made by {kind}", "config": config})
    done = service.wait(job["id"], "completed")["result"]
    assert isinstance(done, dict)
    return done


def _generate(service: Serve, make: Any, upload: Any, sequences: str) -> str:
    return str(_do(service, "rf.generate", num_samples=SAMPLES, **QUICK)["dataset_id"])


def _train_locator(service: Serve, make: Any, upload: Any, sequences: str) -> str:
    return str(_do(service, "rf.train", dataset_ids=[make("rf.generate")], epochs=3, batch_size=4)["run_id"])


def _evaluate_locator(service: Serve, make: Any, upload: Any, sequences: str) -> str:
    inputs = {"dataset_ids": [make("rf.generate")], "run_id": make("rf.train")}
    _do(service, "rf.evaluate", **inputs, allow_training_data=True)
    return str(make("rf.train"))


def _train_cells(service: Serve, make: Any, upload: Any, sequences: str) -> str:
    cells = upload("cells to learn", "images", cell_files(10, 64))
    recipe = {"model": "unet_tiny", "size": 64, "epochs": 14, "batch_size": 2, "learning_rate": 0.003}
    return str(_do(service, "segment.train", dataset_ids=[cells], **recipe)["run_id"])


def _train_steps(service: Serve, make: Any, upload: Any, sequences: str) -> str:
    recipe = {"mode": "supervised", "epochs": 2, "batch_size": 4, "model": SMALL_NET}
    return str(_do(service, "sequence.train", dataset_ids=[sequences], **recipe)["run_id"])


def _evaluate_steps(service: Serve, make: Any, upload: Any, sequences: str) -> str:
    _do(service, "sequence.evaluate", dataset_ids=[sequences], run_id=make("sequence.train"))
    return str(make("sequence.train"))


_JOBS = {
    "rf.generate": _generate,
    "rf.train": _train_locator,
    "rf.evaluate": _evaluate_locator,
    "segment.train": _train_cells,
    "sequence.train": _train_steps,
    "sequence.evaluate": _evaluate_steps,
}


def test_a_radio_dataset_is_shown_on_a_map_by_histograms_and_by_the_spectra_of_a_sample(visit, made):
    page = visit.open(f"/datasets/{made('rf.generate')}")
    page.locator(".brim-station", has_text="Torino").wait_for()
    page.locator(".brim-degrees", has_text="45° N").wait_for()
    for title in ("Acceptance by gate", "Signal-to-noise ratio", "Dilution of precision", "Bound of the error"):
        page.get_by_role("heading", name=title).wait_for()
    page.get_by_label("Spectra of sample 0 by receiver").locator("svg path").first.wait_for(state="attached")
    visit.shot("dataset_rf")

    page.get_by_label("Sample", exact=True).first.fill("7")
    page.get_by_label("Spectra of sample 7 by receiver").wait_for()
    heard = (
        page.get_by_role("table", name="Receivers of the sample").locator("tbody tr").filter(has_not_text="not heard")
    )
    drawn = page.evaluate(
        """() => {
          const [view] = [...document.querySelectorAll(".brim-map")].map((one) => getElement(one.id.slice(1)));
          const layers = Object.values(view.map._layers);
          return [layers.filter(({ options }) => options.isLand).length, view.heard.getLayers().length];
        }"""
    )
    assert drawn == [1, 2 * heard.count()]  # a ring and a line for each


@pytest.mark.smoke
def test_images_and_sequences_are_shown_by_sizes_lengths_and_classes(visit, images, sequences):
    page = visit.open(f"/datasets/{images}")
    page.get_by_role("heading", name="Sizes in pixels").wait_for()
    page.get_by_role("cell", name="00.png").wait_for()
    drawn = "() => [...document.querySelectorAll('.brim-thumb img')].filter((one) => one.naturalWidth).length"
    page.wait_for_function(f"({drawn})() === 6")
    visit.shot("dataset_images")
    page.get_by_role("button", name="Image 2").click()
    page.get_by_role("dialog", name="Image").get_by_text("64 × 64 pixels").wait_for()
    page.get_by_role("button", name="Close").click()

    visit.open(f"/datasets/{sequences}")
    page.get_by_role("heading", name="Lengths").wait_for()
    page.get_by_label("Sequences by class").get_by_text("rise").wait_for()
    visit.shot("dataset_sequences")


@pytest.mark.smoke
def test_images_are_uploaded_and_deleted_again_and_wrong_ones_are_refused_in_words(visit, service, tmp_path):
    right, wrong = tmp_path / "one.png", tmp_path / "two.png"
    right.write_bytes(_cell_png())
    wrong.write_text("no image at all")
    page = visit.open("/datasets")
    page.get_by_role("button", name="Upload files").click()
    dialog = page.locator(".q-dialog")
    dialog.get_by_label("Name", exact=True).fill("uploaded by hand")
    dialog.get_by_label("Images", exact=True).set_input_files(wrong)
    dialog.get_by_role("button", name="Upload").click()
    dialog.get_by_role("alert").get_by_text("two.png").wait_for()
    _forgive(visit, 409)

    dialog.get_by_label("Images", exact=True).set_input_files(right)
    dialog.get_by_role("button", name="Upload").click()
    page.get_by_role("heading", name="uploaded by hand").wait_for()
    id = page.url.rpartition("/")[2]
    assert service.get(f"/api/datasets/{id}")["items"] == 1
    page.wait_for_function(
        "document.querySelector('.brim-thumb img')?.naturalWidth"
    )  # or it is asked for while deleted

    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete it").click()
    page.wait_for_url("**/datasets")
    assert service.ask("GET", f"/api/datasets/{id}")[0] == 404


# Runs


def test_runs_are_compared_by_curves_and_by_the_settings_that_differ(visit, made):
    made("segment.train")
    made("rf.train")
    page = visit.open("/runs")
    for name in ("made by segment.train", "made by rf.train"):
        page.get_by_role("row", name=re.compile(name)).get_by_role("checkbox").click()
    page.get_by_role("button", name="Compare 2").click()
    page.wait_for_url("**/runs/compare?ids=*")
    page.get_by_label("Held-out loss of the runs").locator("svg path").first.wait_for(state="attached")
    page.get_by_role("table", name="Settings that differ").get_by_text("Batch size").wait_for()
    page.get_by_role("table", name="Settings that differ").get_by_text("cells to learn").wait_for()  # no id
    visit.shot("compare")

    visit.open("/no/such/page").get_by_role("link", name="Go to the first page").wait_for()
    _forgive(visit, 404)


def test_a_segmentation_run_shows_losses_dice_and_throughput(visit, made):
    page = visit.open(f"/runs/{made('segment.train')}")

    page.get_by_label("Loss over steps").locator("svg path").first.wait_for(state="attached")
    page.get_by_label("Held-out Dice and IoU").locator("svg path").first.wait_for(state="attached")
    page.get_by_label("Throughput against the ceiling").locator("svg path").first.wait_for(state="attached")
    page.get_by_role("heading", name="Learning rate").wait_for()
    page.get_by_role("switch", name="Logarithmic").click()
    page.get_by_text("Settings as JSON").click()
    page.get_by_label("Config", exact=True).get_by_text('"unet_tiny"').wait_for()
    visit.shot("run_segment")


def test_a_run_that_trains_is_shown_as_it_goes(visit, service, sequences):
    recipe = {"mode": "supervised", "epochs": 5000, "batch_size": 4, "model": SMALL_NET}
    config = {"dataset_ids": [sequences], **recipe}
    job = service.submit({"kind": "sequence.train", "name": "trains for long", "config": config})
    try:
        service.wait_progress(job["id"], 1)
        page = visit.open("/runs")
        page.get_by_role("link", name="trains for long").first.click()
        page.get_by_label("Loss over steps").wait_for()
        points = "() => getElement(document.querySelector('[aria-label=\"Loss over steps\"]').id.slice(1))"
        points += "?.chart?.getOption().series.at(-1)?.data.length ?? 0"
        page.wait_for_function(f"() => ({points})() > 0")
        before = page.evaluate(points)
        page.wait_for_function(f"before => ({points})() > before", arg=before)
        visit.shot("run_training")
    finally:
        service.act(job["id"], "cancel")
        service.wait(job["id"], "cancelled")
    page.get_by_text("partial", exact=True).wait_for()


def test_a_locator_shows_where_it_is_wrong_once_it_is_evaluated(visit, made):
    run = made("rf.train")
    page = visit.open(f"/runs/{run}")
    page.get_by_role("link", name="Evaluate it on a dataset").wait_for()
    page.get_by_role("button", name="Evaluate").click()
    page.wait_for_url(f"**/jobs/new?kind=rf.evaluate&run_id={run}")

    made("rf.evaluate")
    visit.open(f"/runs/{run}")
    page.get_by_label("Map of errors with their ellipses").wait_for()
    page.get_by_label("Error against bound, both logarithmic").locator("svg path").first.wait_for(state="attached")
    page.get_by_role("row", name=re.compile("^this run")).wait_for()
    drawn = page.wait_for_function(
        """() => {
          const view = [...document.querySelectorAll(".brim-map")].map((one) => getElement(one.id.slice(1)))[0];
          if (!view?.map || !view.errors?.length) return null;
          const found = [];
          const isEllipse = ({ getLatLngs, options }) => getLatLngs && options.fill && !options.isLand;
          view.map.eachLayer((layer) => found.push(isEllipse(layer) ? 1 : 0));
          return [view.errors.length, found.reduce((one, other) => one + other, 0)];
        }"""
    ).json_value()
    assert drawn == [SAMPLES, SAMPLES]
    visit.shot("run_locator")


# Segment


@pytest.fixture(scope="module")
def model(service, made) -> str:
    """Name of a warm model that finds cells; its batch size is given, so that none is searched."""
    run = service.data / "runs" / made("segment.train")
    cpu = torch.device("cpu")
    entry = BatchSizeEntry(
        optimal_batch_size=1, max_safe_batch_size=4, expected_throughput=50.0, p50_latency_ms=20.0,
        p95_latency_ms=40.0, memory_limit_mb=1000.0, image_size=1024, precision="fp32", layout="contiguous",
        compiled=False,
    )  # fmt: skip
    file = service.data / "batch_sizes.json"
    save_entry(file, device_key(cpu), device_info(cpu), "unet_tiny", entry, [])
    assert main(["models", "add", "finder", str(run), "--data", str(service.data)]) == 0

    def is_warm() -> bool:
        return any(one["state"] == "warm" for one in service.get("/api/models")["models"])

    until(is_warm, service.said)
    return "finder"


def test_an_image_that_is_dropped_is_answered_by_polygons_that_can_be_read_and_taken_along(visit, model, tmp_path):
    page = _drop(visit, "cell.png", _cell_png())
    page.locator(".brim-stage path").first.wait_for()
    found = page.locator(".brim-stage path").count()
    page.locator(".brim-stage path").first.focus()
    tip = page.get_by_role("tooltip").inner_text()
    visit.shot("segment")
    files = {}
    for name in ("Download GeoJSON", "ImageJ ROI", "COCO"):
        with page.expect_download() as begun:
            page.get_by_role("button", name=name).click()
        files[begun.value.suggested_filename] = Path(begun.value.path()).read_bytes()

    assert re.fullmatch(r"Polygon 1: [\d,]+ pixels, confidence [\d.]+ %", tip)
    features = json.loads(files["cell.geojson"])["features"]
    assert len(features) == found == page.get_by_role("table", name="Polygons").locator("tbody tr").count()
    first = "L".join(f"{x} {y}" for x, y in features[0]["geometry"]["coordinates"][0])
    assert page.locator(".brim-stage path").first.get_attribute("d").startswith(f"M{first}Z")
    assert len(json.loads(files["cell_coco.json"])["annotations"]) == found
    assert len(zipfile.ZipFile(BytesIO(files["cell_rois.zip"])).namelist()) >= found


def test_the_smallest_size_is_applied_at_once_without_a_request(visit, model):
    page = _drop(visit, "cell.png", _cell_png())
    page.locator(".brim-stage path").first.wait_for()
    before, asked = page.locator(".brim-stage path").count(), []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/api/segment") else None)

    slider = page.get_by_label("Smallest size").locator("[tabindex='0']")
    for _ in range(5):
        slider.press("PageUp")
    page.get_by_text("smaller ones left out").wait_for()

    styles = page.locator(".brim-stage path").evaluate_all("paths => paths.map(path => path.getAttribute('style'))")
    assert 0 < len(styles) < before
    assert page.locator(".brim-sizes").get_by_role("img").count() == 1
    assert asked == []
    assert len(set(styles)) == len(styles)  # a colour of its own for each


def test_a_picture_that_browsers_do_not_show_has_its_polygons_over_an_empty_ground(visit, phone, model, tmp_path):
    file = tmp_path / "cell.tif"
    file.write_bytes(bytes(cv2.imencode(".tif", make_cells(9, 1, 96, 120)[0])[1]))
    page = phone.open("/segment")
    page.get_by_role("heading", name="No image yet").wait_for()
    page.get_by_role("button", name="Try it on drawn cells").click()
    page.locator(".brim-stage path").nth(19).wait_for()

    page.get_by_label("Image", exact=True).set_input_files(file)

    page.get_by_text("Browsers do not show images of this type").wait_for()
    page.locator(".brim-stage path").first.wait_for()
    assert page.locator(".brim-stage svg").get_attribute("viewBox") == "0 0 120 96"
    phone.shot("segment_tiff_phone")


# Helpers


def _cell_png() -> bytes:
    return bytes(cv2.imencode(".png", make_cells(9, 1, 120, 160)[0][..., ::-1])[1])


def _drop(visit: Visit, name: str, data: bytes) -> Any:
    page = visit.open("/segment")
    page.locator(".brim-drop").wait_for()
    visit.let_go(name, data)
    return page


def _forgive(visit: Visit, status: int) -> None:
    """What was refused on purpose is no fault; browsers tell it to the console too."""
    visit.page.wait_for_timeout(200)
    visit.faults[:] = [one for one in visit.faults if str(status) not in one]


# Recordings


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> list[Path]:
    """Three receivers of one transmitter at 50° N, 9° E, with the file of their stations."""
    folder = tmp_path_factory.mktemp("recordings")
    paths = []
    for name in ("ALFA", "BRAVO", "CHARLIE"):
        scene = Scene(4.0, 2_400.0)  # the same transmission each time
        lat, lon, _ = STATIONS[name]
        distance = float(geodesic_m(*(np.array(value) for value in (lat, lon, 50.0, 9.0))))
        iq = scene.receive(12_001.1, 0.3, distance * 1.000315 / 299_792_458)
        paths.append(write_kiwi(folder / f"20260131T120000Z_77500_{name}_iq.wav", iq, 12_001.1, 0.3, stated_hz=12_000))
    return [*paths, write_sites(folder / "stations.csv")]


def test_recordings_are_located_on_their_page(visit, recordings):
    page = visit.open("/locate")
    page.locator("input[name=files]").set_input_files(recordings[:3])
    page.locator("input[name=stations]").set_input_files(recordings[3])
    page.get_by_role("button", name="Locate").click()

    page.get_by_role("status").get_by_text("Located in").wait_for()
    answer = page.frame_locator("iframe[title=Position]")
    answer.locator("svg").first.wait_for()
    for name in ("ALFA", "BRAVO", "CHARLIE"):
        answer.get_by_text(name).first.wait_for()
    visit.shot("locate")


def test_a_job_measures_recordings_that_were_uploaded(visit, service, upload, recordings):
    files = [("recordings", (path.name, path.read_bytes())) for path in recordings]
    config = {"dataset_ids": [upload("one evening", "recordings", files)]}
    job = service.submit({"kind": "rf.measure", "name": "one evening", "config": config})
    service.wait(job["id"], "completed")

    page = visit.open(f"/jobs/{job['id']}")
    page.get_by_role("heading", name="Result").wait_for()
    for name in ("observations.json", "position.geojson", "map.html"):
        page.get_by_role("link", name=re.compile(re.escape(name))).first.wait_for()
