"""Folders to files, and what ModelLoader promises, with a network that was trained."""

import json
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brim.errors import ConfigError, StorageError
from brim.segmentation.config import REGISTERED, FilesConfig, SegmentTrainConfig
from brim.segmentation.networks import save_weights
from brim.segmentation.prediction import FilesReport, ModelLoader, PredictProgress, predict_files
from brim.segmentation.scenes import make_cells
from brim.segmentation.training import train
from brim.segmentation.tuning import BatchSizeEntry, BatchSizes, device_key, save_entry

CPU = torch.device("cpu")
CONFIG = FilesConfig(model="unet_tiny", batch_size=1)
torch.set_num_threads(1)  # small batches: a second thread only competes


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


@pytest.fixture(autouse=True)
def _threads_are_joined() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(autouse=True)
def _short_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.segmentation.prediction.stream.CEILING_S", 0.02)


@pytest.fixture
def images(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.parent / "images", tmp_path / "images"))


@pytest.fixture
def loader(run: Path, tmp_path: Path) -> ModelLoader:
    return ModelLoader({"unet_tiny": run}, device="cpu", batch_sizes=sizes_file(tmp_path / "batch_sizes.json"))


def sizes_file(path: Path, **changes: Any) -> Path:
    """A file with an entry of this device."""
    values: dict[str, Any] = {
        "optimal_batch_size": 3, "max_safe_batch_size": 4, "expected_throughput": 10.0, "p50_latency_ms": 1.0,
        "p95_latency_ms": 2.0, "memory_limit_mb": 100.0, "image_size": 1024, "precision": "fp32",
        "layout": "contiguous", "compiled": False,
    }  # fmt: skip
    save_entry(path, device_key(CPU), {}, "unet_tiny", BatchSizeEntry(**(values | changes)), [])
    return path


def names_of(out: Path) -> list[str]:
    return sorted(file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file())


# Files


def test_every_image_is_written_and_counted(loader, images, tmp_path):
    found = predict_files([images], loader, tmp_path / "out", CONFIG)

    assert (found.written, found.failures, found.stopped) == (10, {}, False)
    assert found.as_dict()["images"] == 10
    assert names_of(tmp_path / "out") == [f"{index}.geojson" for index in range(10)]


@pytest.mark.parametrize(("few", "tuned_for"), [(64, []), (1, [64])])
def test_a_few_files_are_not_worth_tuning_for(run, images, tmp_path, monkeypatch, few, tuned_for):
    monkeypatch.setattr("brim.segmentation.prediction.files.FEW_IMAGES", few)
    loader, asked = ModelLoader({"unet_tiny": run}, device="cpu", batch_sizes=None, tune_seconds=0.05), []
    find = loader._sizes.find_or_tune
    monkeypatch.setattr(
        loader._sizes, "find_or_tune", lambda name, side, make: asked.append(side) or find(name, side, make)
    )

    report = predict_files([images], loader, tmp_path / "out", FilesConfig())

    assert (asked, report.report.images) == (tuned_for, 10)


def test_the_same_directory_twice_gives_the_same_bytes(loader, images, tmp_path):
    def content() -> list[bytes]:
        predict_files([images], loader, tmp_path / "out", CONFIG)
        return [(tmp_path / "out" / name).read_bytes() for name in names_of(tmp_path / "out")]

    assert content() == content()


def test_a_broken_image_among_good_ones_is_the_only_failure(loader, images, tmp_path):
    (images / "5.png").write_bytes((images / "5.png").read_bytes()[:200])

    found = predict_files([images], loader, tmp_path / "out", CONFIG)

    assert list(found.failures) == [str(images / "5.png")]
    assert "truncated" in found.failures[str(images / "5.png")]
    assert (found.written, found.as_dict()["failed"]) == (9, 1)


def test_an_image_that_goes_before_its_overlay_is_drawn_fails_alone(loader, images, tmp_path, monkeypatch):
    def write(self: Any, prediction: Any, image: Any = None) -> None:
        (images / "9.png").unlink(missing_ok=True)  # it has been decoded long ago

    monkeypatch.setattr("brim.segmentation.images.writing.Writer.write", write)
    config = FilesConfig(model="unet_tiny", batch_size=1, format="overlay")
    predictions = list(loader.predict_stream(sorted(images.iterdir()), "unet_tiny", 1))
    monkeypatch.setattr(loader, "predict_stream", lambda *_, on_report, **__: _reported(predictions, on_report))

    found = predict_files([images], loader, tmp_path / "out", config)

    assert list(found.failures) == [str(images / "9.png")]
    assert (found.written, found.as_dict()["failed"]) == (9, 1)


def _reported(predictions: list[Any], on_report: Any) -> Iterator[Any]:
    from brim.segmentation.prediction import PredictReport

    yield from predictions
    on_report(
        PredictReport(
            images=len(predictions), failed=0, polygons=0, seconds=1, images_per_s=1, ceiling_share=None, batch_size=1,
            stages={},
        )
    )  # fmt: skip


def test_results_below_the_images_are_not_taken_for_images(loader, images, tmp_path):
    config = FilesConfig(model="unet_tiny", batch_size=1, format="mask")
    for _ in range(2):
        assert predict_files([images], loader, images / "out/masks", config).written == 10
    assert predict_files([images / "out"], loader, images / "out", CONFIG).written == 10  # asked for
    assert predict_files([images / "out/masks/1.png"], loader, images / "out", CONFIG).written == 1


def test_an_input_is_never_replaced(loader, images):
    config = FilesConfig(model="unet_tiny", batch_size=1, format="mask")
    before = (images / "1.png").read_bytes()

    with pytest.raises(ConfigError, match="would replace an input image"):
        predict_files([images], loader, images, config)
    assert (images / "1.png").read_bytes() == before


def test_no_images_and_a_file_in_the_place_of_the_directory_are_named(loader, images, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain").write_text("")

    with pytest.raises(ConfigError, match="empty: no images found"):
        predict_files([tmp_path / "empty"], loader, tmp_path / "out", CONFIG)
    with pytest.raises(StorageError, match="plain"):
        predict_files([images], loader, tmp_path / "plain", CONFIG)


@pytest.mark.parametrize("wrong", [{"format": "svg"}, {"threshold": 2}, {"batch_size": 0}])
def test_a_value_that_cannot_work_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FilesConfig(**{"model": "unet_tiny", **wrong})


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


def test_resume_with_nothing_left_to_do_is_done(loader, images, tmp_path):
    predict_files([images], loader, tmp_path / "out", CONFIG)

    found = predict_files([images], loader, tmp_path / "out", CONFIG, resume=True)

    assert (found.written, found.kept, found.stopped) == (0, 10, False)


def test_polygons_of_files_that_do_not_tell_are_not_guessed(loader, images, tmp_path):
    config = FilesConfig(model="unet_tiny", batch_size=1, format="mask")
    predict_files([images], loader, tmp_path / "out", config)

    found = predict_files([images], loader, tmp_path / "out", config, resume=True)

    assert (found.kept, found.as_dict()["polygons"]) == (10, None)


def test_resume_makes_the_one_file_of_all_images_anew(loader, images, tmp_path):
    config = FilesConfig(model="unet_tiny", batch_size=1, format="coco")
    predict_files([images], loader, tmp_path / "out", config)

    found = predict_files([images], loader, tmp_path / "out", config, resume=True)

    assert (found.written, found.kept) == (10, 0)
    assert len(json.loads((tmp_path / "out/annotations.json").read_text())["images"]) == 10


class Slow(nn.Module):
    """Takes a tenth of a second for each batch, and counts them."""

    num_batches = 0

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        Slow.num_batches += 1
        time.sleep(0.1)
        return self.only(x)


def test_stopping_does_not_wait_for_the_end_of_a_large_image(tmp_path, monkeypatch):
    monkeypatch.setattr(Slow, "num_batches", 0)
    monkeypatch.setitem(REGISTERED, "slow", Slow)
    save_weights(Slow(), tmp_path / "slow.safetensors", {})
    cv2.imwrite(str(tmp_path / "large.png"), np.zeros((640, 640, 3), np.uint8))
    loader = ModelLoader(
        {"slow": tmp_path / "slow.safetensors"}, device="cpu", batch_sizes=None, tile=32
    )  # 529 windows

    found = predict_files(
        [tmp_path / "large.png"], loader, tmp_path / "out", FilesConfig(model="slow", batch_size=1),
        stop=lambda: Slow.num_batches > 3,
    )  # fmt: skip

    assert found == FilesReport(report=None, failures={}, written=0, stopped=True)
    assert Slow.num_batches < 529


# What ModelLoader promises of a trained network


def varied() -> list[np.ndarray]:
    sizes = [(64, 64), (40, 64), (64, 64), (33, 47), (64, 64), (20, 90), (64, 64)]
    return [make_cells(8, index, max(32, h), max(32, w))[0][:h, :w] for index, (h, w) in enumerate(sizes)]


def probabilities(network: Any, image: np.ndarray, copies: int, at: int) -> Tensor:
    """Of an image alone among others."""
    others = np.stack([make_cells(9, index, 64, 64)[0] for index in range(copies)])
    others[at] = image
    logits = network(torch.from_numpy(others).permute(0, 3, 1, 2))
    return torch.sigmoid(logits[at])


def test_a_probability_is_the_same_whatever_shares_the_batch(loader):
    network, image = loader.load("unet_tiny"), make_cells(8, 0, 64, 64)[0]
    alone = probabilities(network, image, 1, 0)

    assert alone.min() < 0.25  # trained: it tells cells from ground
    assert alone.max() > 0.75
    for copies, at in ((2, 1), (5, 0), (8, 7)):
        assert (probabilities(network, image, copies, at) - alone).abs().max() <= 1e-4


def test_a_batch_finds_what_single_images_do_in_their_order(loader):
    together = loader.predict_batch(varied(), "unet_tiny", batch_size=4)
    for image, found in zip(varied(), together, strict=True):
        alone = loader.predict(image, "unet_tiny")
        assert (found.height, found.width) == image.shape[:2]
        assert (found.mask != alone.mask).mean() < 1e-3  # a pixel at the threshold may turn with its last bit
        assert found.confidence == pytest.approx(alone.confidence, abs=1e-3)


def test_strict_gives_the_same_bits_in_any_company(loader):
    items = varied()
    forwards = loader.predict_batch(items, "unet_tiny", strict=True)
    backwards = loader.predict_batch(items[::-1], "unet_tiny", batch_size=4, strict=True)[::-1]
    for image, one, other in zip(items, forwards, backwards, strict=True):
        alone = loader.predict(image, "unet_tiny", strict=True)
        for found in (one, other):
            assert np.array_equal(found.mask, alone.mask)
            assert [p.confidence for p in found.polygons] == [p.confidence for p in alone.polygons]
            assert all(np.array_equal(a.points, b.points) for a, b in zip(found.polygons, alone.polygons, strict=True))


def test_a_size_above_the_safe_one_is_lowered_with_one_warning(run, tmp_path):
    loader = ModelLoader({"unet_tiny": run}, device="cpu", batch_sizes=sizes_file(tmp_path / "sizes.json"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = loader.predict_batch(varied() * 2, "unet_tiny", batch_size=64)
    assert ["batch_size=64 is above 4" in str(warning.message) for warning in caught] == [True]
    assert [prediction.error for prediction in found] == [None] * 14


def test_the_first_use_tunes_and_saves_and_the_second_does_not(run, tmp_path, caplog):
    sizes = tmp_path / "sizes.json"
    for _ in range(2):
        ModelLoader({"unet_tiny": run}, device="cpu", batch_sizes=sizes, tune_seconds=0.05).predict_batch(
            varied(), "unet_tiny"
        )
    assert len([record for record in caplog.records if "tuning it now" in record.getMessage()]) == 1
    entry = BatchSizes.read(sizes).entry(device_key(CPU), "unet_tiny")
    assert entry is not None
    assert entry.image_size == 96  # the longest side at hand is 90


def test_an_empty_list_gives_an_empty_list(loader):
    assert loader.predict_batch([], "unet_tiny") == []


def test_images_that_cannot_be_used_are_errors_in_their_places(loader):
    good = make_cells(8, 0, 64, 64)[0]
    nan = np.full((40, 40), np.nan, np.float32)
    items = [good, nan, good[..., :2], good, np.zeros((0, 5, 3), np.uint8), np.zeros((40, 40, 5), np.uint8), b"x", good]

    found = loader.predict_batch(items, "unet_tiny", batch_size=2)

    assert [prediction.error is None for prediction in found] == [True, False, False, True, False, False, False, True]
    for index, word in ((1, "NaN"), (2, "2 channels"), (4, "at least 1 pixel"), (5, "5 channels"), (6, "not an image")):
        assert word in found[index].error


def test_an_image_too_large_to_read_does_not_decide_what_is_tuned_for(run, tmp_path):
    bomb = tmp_path / "bomb.png"
    content = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    bomb.write_bytes(content[:16] + (60_000).to_bytes(4) * 2 + content[24:])
    loader = ModelLoader(
        {"unet_tiny": run}, device="cpu", batch_sizes=sizes_file(tmp_path / "sizes.json", image_size=64)
    )

    found = loader.predict_batch([bomb, make_cells(8, 0, 64, 64)[0]], "unet_tiny")

    assert [prediction.error is None for prediction in found] == [False, True]
    assert BatchSizes.read(tmp_path / "sizes.json").entry(device_key(CPU), "unet_tiny").image_size == 64
