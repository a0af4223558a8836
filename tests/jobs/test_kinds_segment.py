"""segment.tune, segment.predict and segment.train as jobs."""

import json
import shutil

import cv2
import numpy as np
import pytest
import torch
from kind_inputs import Watched, digests

from brim.errors import BrimError
from brim.jobs.kinds import KINDS, Inputs
from brim.jobs.kinds.segment import files_in
from brim.segmentation.config import SegmentTrainConfig
from brim.segmentation.scenes import make_cells
from brim.segmentation.training import train
from brim.segmentation.tuning import BatchSizeEntry, BatchSizes, device_key, save_entry

torch.set_num_threads(1)

RECIPE = {"model": "unet_tiny", "size": 32, "epochs": 4, "batch_size": 4, "learning_rate": 0.01}
BEST = "train/best/*.safetensors"
QUICK = {"models": ["unet_tiny"], "size": 32, "seconds": 0.3}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Images and masks."""
    path = tmp_path_factory.mktemp("datasets") / "cells"
    for index in range(12):
        image, mask = make_cells(3, index, 64, 64)
        for folder, pixels in (("images", image[..., ::-1]), ("masks", mask.astype(np.uint8) * 255)):
            (path / folder).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path / folder / f"{index:02d}.png"), pixels)
    return path


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run that an undisturbed job trained."""
    job = Watched("segment.train", tmp_path_factory.mktemp("runs") / "run", RECIPE, datasets=[dataset])
    job.result = job.run()
    job.path = job._task.out
    return job


@pytest.fixture
def tuned(trained, tmp_path):
    """Batch sizes beside which results are written: nothing is tuned on first use."""
    entry = BatchSizeEntry(
        optimal_batch_size=3, max_safe_batch_size=4, expected_throughput=10.0, p50_latency_ms=1.0, p95_latency_ms=2.0,
        memory_limit_mb=100.0, image_size=1024, precision="fp32", layout="contiguous", compiled=False,
    )  # fmt: skip
    save_entry(tmp_path / "batch_sizes.json", device_key(torch.device("cpu")), {}, "unet_tiny", entry, [])
    return tmp_path


# segment.train


def test_training_says_which_run_it_made(trained):
    assert trained.result.keys() == {
        "run_id", "epochs", "dice", "iou", "images_per_s", "ceiling_share", "peak_bytes", "ceiling_spread",
        "wall_s", "startup_s", "work_s", "overhead",
    }  # fmt: skip
    assert trained.result["run_id"] == "run"
    assert trained.result["epochs"] == 4
    assert trained.currents == sorted(trained.currents)
    assert set(trained.currents) == set(range(45))  # of every step


def test_a_trained_network_is_the_command_lines(trained, dataset, tmp_path):
    train(dataset / "images", dataset / "masks", SegmentTrainConfig(**RECIPE), tmp_path / "run", device="cpu")

    assert digests(tmp_path / "run", BEST) == digests(trained.path, BEST)


def test_a_stopped_training_goes_on_to_the_same_bits(trained, dataset, tmp_path):
    first = Watched(
        "segment.train", tmp_path / "run", RECIPE, datasets=[dataset], stop_when=lambda where: where.current >= 9
    )

    assert first.run() is None
    assert first.steps_after_stop == 0
    assert first.currents[-1] < first.told[-1].total

    result = Watched("segment.train", tmp_path / "run", RECIPE, datasets=[dataset]).run()
    assert (result["dice"], result["iou"]) == (trained.result["dice"], trained.result["iou"])
    assert digests(tmp_path / "run", BEST) == digests(trained.path, BEST)


def test_what_a_run_takes_on_disk_is_estimated_from_above(trained):
    actual = sum(file.stat().st_size for file in trained.path.rglob("*") if file.is_file())

    assert actual < KINDS["segment.train"].estimate_bytes(trained.spec, trained.inputs)


def test_training_begins_from_a_run(trained, dataset, tmp_path):
    job = Watched("segment.train", tmp_path / "run", RECIPE | {"epochs": 1}, datasets=[dataset], run=trained.path)

    KINDS["segment.train"].check(job.spec, job.inputs)
    assert job.run()["dice"] > 0


def test_images_without_masks_are_refused_before_a_job_is_queued(trained, dataset):
    with pytest.raises(BrimError, match="has no masks") as caught:
        KINDS["segment.train"].check(trained.spec, Inputs(datasets=(dataset / "images",)))
    assert caught.value.field == "config.dataset_ids[0]"


def test_an_image_without_its_mask_is_refused_before_a_job_is_queued(trained, dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "cells")
    (tmp_path / "cells/masks/03.png").unlink()

    with pytest.raises(BrimError, match=r"images/03\.png has no mask") as caught:
        KINDS["segment.train"].check(trained.spec, Inputs(datasets=(tmp_path / "cells",)))
    assert str(tmp_path) not in str(caught.value)


# segment.tune


def test_models_are_tuned_into_the_services_own_file(tmp_path):
    job = Watched("segment.tune", tmp_path / "job", QUICK)

    result = job.run()

    entry = BatchSizes.read(tmp_path / "batch_sizes.json").entry(device_key(torch.device("cpu")), "unet_tiny")
    assert result["models"]["unet_tiny"]["optimal_batch_size"] == entry.optimal_batch_size
    assert result["files"] == ["unet_tiny.json"]
    assert json.loads((tmp_path / "job/unet_tiny.json").read_text())["trials"]
    assert job.currents[-1] == job.told[-1].total == 1


def test_a_stopped_tuning_does_not_tune_again_what_is_done(tmp_path):
    job = Watched("segment.tune", tmp_path / "job", QUICK)
    job.run()
    mark = (tmp_path / "job/unet_tiny.json").stat().st_mtime_ns

    again = Watched("segment.tune", tmp_path / "job", QUICK)
    result = again.run()

    assert (tmp_path / "job/unet_tiny.json").stat().st_mtime_ns == mark
    assert result["models"]["unet_tiny"]["optimal_batch_size"] >= 1
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


def test_images_become_files(trained, dataset, tuned):
    job = Watched("segment.predict", tuned / "job", {}, datasets=[dataset], run=trained.path)

    result = job.run()

    assert result["files"] == [f"{index:02d}.geojson" for index in range(12)] == files_in(tuned / "job")
    assert (result["images"], result["failed"], result["num_files"]) == (12, 0, 12)
    assert result["polygons"] > 0
    assert set(job.currents) == set(range(13))


def test_images_of_several_datasets_are_kept_apart(trained, dataset, tuned):
    far = tuned / "somewhere" / "else"
    shutil.copytree(dataset / "images", far)
    (far / "05.png").write_bytes(b"no image")
    job = Watched("segment.predict", tuned / "job", {}, datasets=[dataset, far], run=trained.path)

    result = job.run()

    assert (result["images"], result["failed"], result["num_files"]) == (24, 1, 23)
    assert {name.partition("/")[0] for name in result["files"]} == {"cells", "else"}  # ids, in a service
    assert list(result["failures"]) == ["else/05.png"]
    assert job.currents == sorted(job.currents)
    assert job.currents[-1] == 24


def test_a_few_images_are_predicted_by_a_network_that_is_not_tuned(trained, dataset, tmp_path):
    job = Watched("segment.predict", tmp_path / "job", {}, datasets=[dataset], run=trained.path)

    assert job.run()["images"] == 12


def test_a_stopped_prediction_goes_on_with_what_is_left(trained, dataset, tuned):
    config = {"batch_size": 1, "strict": True}
    whole = Watched("segment.predict", tuned / "whole", config, datasets=[dataset], run=trained.path)
    undisturbed = whole.run()
    first = Watched(
        "segment.predict", tuned / "job", config, datasets=[dataset], run=trained.path,
        stop_when=lambda where: where.current >= 3,
    )  # fmt: skip

    assert first.run() is None
    assert first.steps_after_stop == 0
    before = digests(tuned / "job", "*.geojson")
    assert len(before) >= 3
    times = {name: (tuned / "job" / name).stat().st_mtime_ns for name in before}

    second = Watched("segment.predict", tuned / "job", config, datasets=[dataset], run=trained.path)
    result = second.run()
    for name in ("images", "polygons", "failed", "files", "num_files"):
        assert result[name] == undisturbed[name]
    assert digests(tuned / "job", "*.geojson") == digests(tuned / "whole", "*.geojson")
    assert times == {name: (tuned / "job" / name).stat().st_mtime_ns for name in before}
    assert all(current >= len(before) for current in second.currents if current)


def test_an_image_that_cannot_be_read_is_named_without_its_path(trained, dataset, tuned):
    shutil.copytree(dataset / "images", tuned / "some")
    (tuned / "some/05.png").write_bytes(b"no image")

    result = Watched("segment.predict", tuned / "job", {}, datasets=[tuned / "some"], run=trained.path).run()

    assert (result["failed"], result["num_files"]) == (1, 11)
    assert list(result["failures"]) == ["05.png"]
    assert str(tuned) not in result["failures"]["05.png"]


def test_another_network_than_the_runs_is_refused_before_a_job_is_queued(trained, dataset, tmp_path):
    job = Watched("segment.predict", tmp_path / "job", {"model": "hrnet"}, datasets=[dataset], run=trained.path)

    with pytest.raises(BrimError, match='is of "unet_tiny"'):
        KINDS["segment.predict"].check(job.spec, job.inputs)


def test_a_run_without_weights_is_refused_before_a_job_is_queued(dataset, tmp_path):
    (tmp_path / "run").mkdir()
    job = Watched("segment.predict", tmp_path / "job", {}, datasets=[dataset], run=tmp_path / "run")

    with pytest.raises(BrimError, match="has no weights yet"):
        KINDS["segment.predict"].check(job.spec, job.inputs)
    assert KINDS["segment.predict"].estimate_bytes(job.spec, job.inputs) > 0


def test_weights_of_a_run_that_was_killed_are_known_by_its_config(trained, dataset, tuned):
    shutil.copytree(trained.path, tuned / "run")
    (tuned / "run/weights.safetensors").unlink()  # written at the end; the checkpoints are there
    job = Watched("segment.predict", tuned / "job", {}, datasets=[dataset], run=tuned / "run")

    KINDS["segment.predict"].check(job.spec, job.inputs)
    assert job.run()["images"] == 12
