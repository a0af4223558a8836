"""Folders to files, and what ModelLoader promises, with a network that was trained."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from entries import HERE, sizes_file

from brim.errors import ConfigError, StorageError
from brim.segmentation.config import FilesConfig, SegmentTrainConfig
from brim.segmentation.prediction import ModelLoader, PredictProgress, predict_files
from brim.segmentation.scenes import make_cells
from brim.segmentation.training import train
from brim.segmentation.tuning import BatchSizes

CONFIG = FilesConfig(model="unet_tiny", batch_size=1)
pytestmark = pytest.mark.usefixtures("threads_are_joined", "short_ceiling", "one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained unet_tiny; images and masks lie beside it."""
    path = tmp_path_factory.mktemp("trained")
    for folder in ("images", "masks"):
        (path / folder).mkdir()
    for index in range(10):
        image, mask = make_cells(3, index, 64, 64)
        cv2.imwrite(str(path / f"images/{index}.png"), image[..., ::-1])
        cv2.imwrite(str(path / f"masks/{index}.png"), mask.astype(np.uint8) * 255)
    config = SegmentTrainConfig(model="unet_tiny", size=32, epochs=6, batch_size=4, learning_rate=0.003)
    train(path / "images", path / "masks", config, path / "run", device="cpu")
    return path / "run"


@pytest.fixture
def images(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.parent / "images", tmp_path / "images"))


@pytest.fixture
def loader(run: Path, tmp_path: Path) -> ModelLoader:
    return ModelLoader({"unet_tiny": run}, device="cpu", batch_sizes=sizes_file(tmp_path / "batch_sizes.json"))


def names_of(out: Path) -> list[str]:
    return sorted(file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file())


# Files


@pytest.mark.parametrize(("few", "tuned_for"), [(10, []), (9, [64])])
def test_a_few_files_are_not_worth_tuning_for(run, images, tmp_path, monkeypatch, few, tuned_for):
    monkeypatch.setattr("brim.segmentation.prediction.files.FEW_IMAGES", few)
    loader, asked = ModelLoader({"unet_tiny": run}, device="cpu", batch_sizes=None, tune_seconds=0.05), []
    find = loader._sizes.find_or_tune
    monkeypatch.setattr(
        loader._sizes, "find_or_tune", lambda name, side, make: asked.append(side) or find(name, side, make)
    )

    report = predict_files([images], loader, tmp_path / "out", FilesConfig())

    assert (asked, report.report.images) == (tuned_for, 10)


def test_a_broken_image_among_good_ones_is_the_only_failure(loader, images, tmp_path):
    (images / "5.png").write_bytes((images / "5.png").read_bytes()[:200])

    found = predict_files([images], loader, tmp_path / "out", CONFIG)

    assert list(found.failures) == [str(images / "5.png")]
    assert "truncated" in found.failures[str(images / "5.png")]
    assert (found.written, found.as_dict()["failed"]) == (9, 1)


def test_results_below_the_images_are_not_taken_for_images(loader, images, tmp_path):
    config = FilesConfig(model="unet_tiny", batch_size=1, format="mask")
    for _ in range(2):
        assert predict_files([images], loader, images / "out/masks", config).written == 10
    assert predict_files([images / "out"], loader, images / "out", CONFIG).written == 10  # asked for
    assert predict_files([images / "out/masks/1.png"], loader, images / "out", CONFIG).written == 1


def test_no_images_and_a_file_in_the_place_of_the_directory_are_named(loader, images, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain").write_text("")

    with pytest.raises(ConfigError, match="empty: no images found"):
        predict_files([tmp_path / "empty"], loader, tmp_path / "out", CONFIG)
    with pytest.raises(StorageError, match="plain"):
        predict_files([images], loader, tmp_path / "plain", CONFIG)


# Stopped


def test_stopping_keeps_what_is_written_and_ends_in_the_middle(loader, images, tmp_path):
    out = tmp_path / "out"

    found = predict_files([images], loader, out, CONFIG, stop=lambda: len(list(out.glob("*.geojson"))) >= 3)

    assert (found.stopped, found.report) == (True, None)
    assert found.written == len(names_of(out))
    assert 3 <= found.written < 10
    assert all(json.loads((out / name).read_text())["features"] is not None for name in names_of(out))


def test_resume_predicts_only_what_has_no_file(loader, images, tmp_path):
    whole = predict_files([images], loader, tmp_path / "whole", CONFIG)
    predict_files([images], loader, tmp_path / "out", CONFIG)
    kept = (tmp_path / "out/0.geojson").stat().st_mtime_ns
    for name in ("3.geojson", "7.geojson"):
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out/8.geojson").write_bytes(b"")  # what the loss of power leaves
    told: list[PredictProgress] = []

    found = predict_files([images], loader, tmp_path / "out", CONFIG, resume=True, progress=told.append)

    assert (found.written, found.kept, found.stopped) == (3, 7, False)
    assert found.as_dict().items() >= {"images": 10, "polygons": whole.as_dict()["polygons"]}.items()
    assert (told[0].total, told[-1].done) == (10, 10)
    assert min(where.done for where in told) >= 7
    assert (tmp_path / "out/0.geojson").stat().st_mtime_ns == kept
    for name in names_of(tmp_path / "whole"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(("form", "kept"), [("mask", 10), ("coco", 0)])
def test_the_one_file_of_all_images_is_made_anew_and_what_files_do_not_tell_is_not_guessed(
    loader, images, tmp_path, form, kept
):
    config = FilesConfig(model="unet_tiny", batch_size=1, format=form)
    whole = predict_files([images], loader, tmp_path / "out", config)

    found = predict_files([images], loader, tmp_path / "out", config, resume=True)

    assert (found.written, found.kept) == (10 - kept, kept)
    assert found.as_dict()["polygons"] == (None if kept else whole.as_dict()["polygons"])
    if form == "coco":
        assert len(json.loads((tmp_path / "out/annotations.json").read_text())["images"]) == 10


def test_an_image_too_large_to_read_does_not_decide_what_is_tuned_for(run, tmp_path):
    bomb = tmp_path / "bomb.png"
    content = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    bomb.write_bytes(content[:16] + (60_000).to_bytes(4) * 2 + content[24:])
    loader = ModelLoader(
        {"unet_tiny": run}, device="cpu", batch_sizes=sizes_file(tmp_path / "sizes.json", image_size=64)
    )

    found = loader.predict_batch([bomb, make_cells(8, 0, 64, 64)[0]], "unet_tiny")

    assert [prediction.error is None for prediction in found] == [False, True]
    assert BatchSizes.read(tmp_path / "sizes.json").entry(HERE, "unet_tiny").image_size == 64
