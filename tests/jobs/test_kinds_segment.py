"""segment.tune, segment.predict and segment.train as jobs."""

import json
import shutil

import pytest
import torch
from kind_inputs import Watched
from safetensors.torch import load_file

from brim.errors import BrimError
from brim.jobs.kinds import KINDS, Inputs
from brim.jobs.kinds.segment import _together, files_in
from brim.segmentation.tuning import BatchSizeEntry, BatchSizes, device_key, save_entry

torch.set_num_threads(1)

RECIPE = {"model": "unet_tiny", "size": 32, "epochs": 4, "batch_size": 4, "learning_rate": 0.01}
QUICK = {"models": ["unet_tiny"], "size": 32, "seconds": 0.3}


@pytest.fixture(scope="module")
def trained(cells, tmp_path_factory):
    """A run that an undisturbed job trained."""
    job = Watched("segment.train", tmp_path_factory.mktemp("runs") / "run", RECIPE, datasets=[cells])
    job.result = job.run()
    job.path = job._task.out
    return job


@pytest.fixture
def tuned(tmp_path):
    """Batch sizes beside which results are written: nothing is tuned on first use."""
    entry = BatchSizeEntry(
        optimal_batch_size=3, max_safe_batch_size=4, expected_throughput=10.0, p50_latency_ms=1.0, p95_latency_ms=2.0,
        memory_limit_mb=100.0, image_size=1024, precision="fp32", layout="contiguous", compiled=False,
    )  # fmt: skip
    save_entry(tmp_path / "batch_sizes.json", device_key(torch.device("cpu")), {}, "unet_tiny", entry, [])
    return tmp_path


# segment.train


def test_training_says_which_run_it_made_and_every_step(trained):
    assert (trained.result["run_id"], trained.result["epochs"]) == ("run", 4)
    assert {"dice", "iou", "images_per_s", "ceiling_share"} <= trained.result.keys()
    assert trained.currents == sorted(trained.currents)
    assert set(trained.currents) == set(range(45))


def test_what_a_run_takes_on_disk_is_its_checkpoints_its_crops_and_its_logs(trained):
    weights = load_file(trained.path / "weights.safetensors")
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    crops = 12 * 4 * 32 * 32 * 4  # of images of 64 x 64: four of each, with four bytes a pixel
    actual = sum(file.stat().st_size for file in trained.path.rglob("*") if file.is_file())

    estimate = KINDS["segment.train"].estimate_bytes(trained.spec, trained.inputs)

    assert estimate == (3 * 3 + 1) * num_bytes + crops + 16 * 2**20  # three checkpoints with two moments, and the end
    assert actual < estimate


def test_images_without_their_masks_are_refused_before_a_job_is_queued(trained, cells, tmp_path):
    with pytest.raises(BrimError, match="has no masks") as caught:
        KINDS["segment.train"].check(trained.spec, Inputs(datasets=(cells / "images",)))
    assert caught.value.field == "config.dataset_ids[0]"

    shutil.copytree(cells, tmp_path / "cells")
    (tmp_path / "cells/masks/03.png").unlink()
    with pytest.raises(BrimError, match=r"images/03\.png has no mask") as caught:
        KINDS["segment.train"].check(trained.spec, Inputs(datasets=(tmp_path / "cells",)))
    assert str(tmp_path) not in str(caught.value)


# segment.tune


def test_models_are_tuned_once_into_the_services_own_file(tmp_path):
    job = Watched("segment.tune", tmp_path / "job", QUICK)

    result = job.run()

    entry = BatchSizes.read(tmp_path / "batch_sizes.json").entry(device_key(torch.device("cpu")), "unet_tiny")
    assert result["models"]["unet_tiny"]["optimal_batch_size"] == entry.optimal_batch_size
    assert result["files"] == ["unet_tiny.json"]
    assert json.loads((tmp_path / "job/unet_tiny.json").read_text())["trials"]
    assert job.currents[-1] == job.told[-1].total == 1

    again = Watched("segment.tune", tmp_path / "job", QUICK)
    assert again.run() == result
    assert not any("batch" in progress.message for progress in again.told)


def test_tuning_stops_between_trials(tmp_path):
    job = Watched(
        "segment.tune", tmp_path / "job", QUICK | {"seconds": 30.0},
        stop_when=lambda where: where.message.startswith("unet_tiny: batch"),
    )  # fmt: skip

    assert job.run() is None
    trials = [word.message for word in job.told if word.message.startswith("unet_tiny: batch")]
    assert len({trial.partition(", for")[0] for trial in trials}) == 1
    assert files_in(tmp_path / "job") == []


def test_tuning_takes_the_weights_of_a_run(trained, tmp_path):
    config = {"model": "unet_tiny", "size": 32, "seconds": 0.2}
    job = Watched("segment.tune", tmp_path / "job", config, run=trained.path)

    KINDS["segment.tune"].check(job.spec, job.inputs)
    assert "unet_tiny" in job.run()["models"]


# segment.predict


def test_images_become_files(trained, cells, tuned):
    job = Watched("segment.predict", tuned / "job", {}, datasets=[cells], run=trained.path)

    result = job.run()

    assert result["files"] == [f"{index:02d}.geojson" for index in range(12)] == files_in(tuned / "job")
    assert (result["images"], result["failed"], result["num_files"]) == (12, 0, 12)
    assert result["polygons"] > 0
    assert set(job.currents) == set(range(13))


def test_images_of_several_datasets_are_kept_apart_and_a_bad_one_is_named_without_its_path(trained, cells, tuned):
    far = tuned / "somewhere" / "else"
    shutil.copytree(cells / "images", far)
    (far / "05.png").write_bytes(b"no image")
    job = Watched("segment.predict", tuned / "job", {}, datasets=[cells, far], run=trained.path)

    result = job.run()

    assert (result["images"], result["failed"], result["num_files"]) == (24, 1, 23)
    assert {name.partition("/")[0] for name in result["files"]} == {"cells", "else"}  # ids, in a service
    assert list(result["failures"]) == ["else/05.png"]
    assert str(tuned) not in result["failures"]["else/05.png"]
    assert job.currents == sorted(job.currents)
    assert job.currents[-1] == 24


def test_one_report_of_several_datasets_adds_up(tmp_path):
    one = {"images": 10, "failed": 1, "seconds": 2.0, "polygons": 7, "batch_size": 8, "ceiling_share": 0.5}
    other = {"images": 30, "failed": 0, "seconds": 3.0, "polygons": 5, "batch_size": 4, "ceiling_share": 0.9}

    assert _together([one]) == one
    assert _together([one, other]) == {
        "images": 40, "failed": 1, "seconds": 5.0, "polygons": 12, "images_per_s": 8.0, "batch_size": 4,
    }  # fmt: skip
    assert _together([one, {**other, "polygons": None}])["polygons"] is None


@pytest.mark.parametrize(("format", "factor"), [("overlay", 4), ("mask", 1), ("geojson", 0.25)])
def test_what_results_take_on_disk_is_guessed_from_the_size_of_the_images(trained, cells, tmp_path, format, factor):
    size = sum(file.stat().st_size for file in (cells / "images").iterdir())
    job = Watched("segment.predict", tmp_path / "job", {"format": format}, datasets=[cells], run=trained.path)

    assert KINDS["segment.predict"].estimate_bytes(job.spec, job.inputs) == int(factor * size)


def test_another_network_than_the_runs_and_a_run_without_weights_are_refused_before_a_job_is_queued(
    trained, cells, tmp_path
):
    other = Watched("segment.predict", tmp_path / "job", {"model": "hrnet"}, datasets=[cells], run=trained.path)
    (tmp_path / "run").mkdir()
    empty = Watched("segment.predict", tmp_path / "job", {}, datasets=[cells], run=tmp_path / "run")

    for job, words in ((other, 'is of "unet_tiny"'), (empty, "has no weights yet")):
        with pytest.raises(BrimError, match=words):
            KINDS["segment.predict"].check(job.spec, job.inputs)


def test_weights_of_a_run_that_was_killed_are_known_by_its_config(trained, cells, tuned):
    shutil.copytree(trained.path, tuned / "run")
    (tuned / "run/weights.safetensors").unlink()  # written at the end; the checkpoints are there
    job = Watched("segment.predict", tuned / "job", {}, datasets=[cells], run=tuned / "run")

    KINDS["segment.predict"].check(job.spec, job.inputs)
    assert job.run()["images"] == 12
