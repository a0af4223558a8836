import json
import logging
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from brim.engine.device.memory import inject_oom
from brim.errors import CheckpointError, ConfigError, ImageError
from brim.segmentation.config import REGISTERED, TuneConfig
from brim.segmentation.networks import save_weights
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.prediction import ModelLoader
from brim.segmentation.tuning import BatchSizeEntry, BatchSizes, Tuned, device_key, save_entry
from brim.segmentation.tuning import tuner as module
from waiting import PATIENCE_S

CPU = torch.device("cpu")
HERE = device_key(CPU)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))) * 8


class Other(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Conv2d(1, 1, 1)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(REGISTERED, "tiny", Tiny)
    monkeypatch.setitem(REGISTERED, "other", Other)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where batch_sizes.json is by default


@pytest.fixture(autouse=True)
def _threads_are_joined() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_weights(Tiny(), tmp_path / "tiny.safetensors", {"model": "tiny"})
    return tmp_path / "tiny.safetensors"


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sides that were tuned for; tuning takes no time."""
    sides: list[int] = []

    def tune(
        name: str, network: nn.Module, device: torch.device, config: TuneConfig, *, setting: ComputeConfig
    ) -> Tuned:
        sides.append(config.size)
        entry = entry_of(image_size=config.size, precision=setting.precision)
        return Tuned(entry=entry, trials=[], messages=[], setting=setting, compile_s=0.0, seconds=0.0)

    monkeypatch.setattr(module, "tune_model", tune)
    return sides


def entry_of(**changes: Any) -> BatchSizeEntry:
    entry = BatchSizeEntry(
        optimal_batch_size=3,
        max_safe_batch_size=5,
        expected_throughput=10.0,
        p50_latency_ms=1.0,
        p95_latency_ms=2.0,
        memory_limit_mb=100.0,
        image_size=1024,
        precision="fp32",
        layout="contiguous",
        compiled=False,
    )
    return replace(entry, **changes)


def save(entry: BatchSizeEntry, key: str = HERE, name: str = "tiny", path: str = "batch_sizes.json") -> None:
    save_entry(path, key, {}, name, entry, [])


def images(*sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]


SOME = images((32, 32), (64, 40), (20, 20), (75, 133), (64, 40))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def batch_sizes_of(loader: ModelLoader, items: Any, **options: Any) -> int:
    sizes: list[int] = []
    list(loader.predict_stream(items, "tiny", on_report=lambda report: sizes.append(report.batch_size), **options))
    return sizes[0]


# Predicting


def test_a_batch_equals_its_images_one_by_one(weights: Path, tunings: list[int]) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    for prediction, image in zip(loader.predict_batch(SOME, "tiny"), SOME, strict=True):
        alone = loader.predict(image, "tiny")
        assert prediction.mask is not None
        assert alone.mask is not None
        assert (prediction.mask != alone.mask).mean() < 1e-3  # a pixel at the threshold may turn with its last bit
        assert prediction.confidence == pytest.approx(alone.confidence, abs=1e-4)


def test_strict_equals_single_images_to_the_bit_and_needs_no_tuning(weights: Path, tunings: list[int]) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    found = loader.predict_batch(SOME, "tiny", strict=True)
    for prediction, image in zip(found, SOME, strict=True):
        alone = loader.predict(image, "tiny", strict=True)
        assert np.array_equal(prediction.mask, alone.mask)
        assert [p.confidence for p in prediction.polygons] == [p.confidence for p in alone.polygons]
    assert tunings == []


def test_bad_images_fail_in_a_batch_in_their_place_and_alone_with_an_error(weights: Path, tunings: list[int]) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    found = loader.predict_batch([SOME[0], b"no image", SOME[1]], "tiny")
    assert [prediction.error is None for prediction in found] == [True, False, True]
    with pytest.raises(ImageError):
        loader.predict(b"no image", "tiny")


def test_nothing_is_tuned_when_no_image_can_be_read(weights: Path, tunings: list[int]) -> None:
    found = ModelLoader({"tiny": weights}, device="cpu").predict_batch([b"", "missing.png"], "tiny")
    assert all(prediction.error for prediction in found)
    assert tunings == []


def test_an_empty_list_gives_an_empty_list_without_weights_or_tuning(tunings: list[int]) -> None:
    assert ModelLoader(device="cpu").predict_batch([], "tiny") == []
    assert tunings == []
    with pytest.raises(ConfigError, match="tiny"):
        ModelLoader(device="cpu").predict_batch([], "unknown")


def test_a_batch_that_does_not_fit_is_halved(weights: Path, tunings: list[int]) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    with inject_oom(above=1):
        assert [p.error for p in loader.predict_batch([SOME[1]] * 7, "tiny", batch_size=4)] == [None] * 7


def test_a_run_of_a_training_is_taken_as_weights(tmp_path: Path, tunings: list[int]) -> None:
    (tmp_path / "run").mkdir()
    save_weights(Tiny(), tmp_path / "run/weights.safetensors", {})
    loader = ModelLoader({"tiny": tmp_path / "run"}, device="cpu")
    assert loader.models == ("tiny",)
    assert loader.predict(SOME[1], "tiny").error is None


def test_several_threads_may_predict_at_once(weights: Path, tunings: list[int]) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    expected = [p.mask for p in loader.predict_batch(SOME, "tiny", strict=True)]
    results: list[list[Any]] = []

    def work() -> None:
        results.append([p.mask for p in loader.predict_batch(SOME, "tiny", strict=True)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(a, b) for masks in results for a, b in zip(masks, expected, strict=True))


# What cannot work


def test_predicting_without_weights_says_how_to_give_them(tunings: list[int]) -> None:
    loader = ModelLoader(device="cpu")
    for call in (lambda: loader.predict(SOME[0], "tiny"), lambda: loader.predict_batch(SOME, "tiny")):
        with pytest.raises(ConfigError, match=r"no weights.*give weights"):
            call()
    assert tunings == []


def test_unknown_models_are_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown.*hrnet"):
        ModelLoader({"unknown": "x"}, device="cpu")
    loader = ModelLoader(device="cpu")
    for call in (
        lambda: loader.predict(SOME[0], "unknown"),
        lambda: loader.get_optimal_batch_size("unknown"),
        lambda: loader.get_max_safe_batch_size("unknown"),
        lambda: loader.load("unknown"),
    ):
        with pytest.raises(ConfigError, match="hrnet"):
            call()


def test_weights_of_another_network_are_refused(weights: Path, tunings: list[int]) -> None:
    with pytest.raises(CheckpointError, match=r"more\.weight"):
        ModelLoader({"other": weights}, device="cpu").predict(SOME[0], "other")


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, "4"])
def test_a_batch_size_that_is_no_count_is_refused(batch_size: Any, weights: Path, tunings: list[int]) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    for items in (SOME, []):
        with pytest.raises(ConfigError, match="batch_size"):
            loader.predict_batch(items, "tiny", batch_size=batch_size)


@pytest.mark.parametrize("threshold", [0, 1, -0.1, float("nan"), "x"])
def test_a_threshold_outside_0_and_1_is_refused(threshold: Any, weights: Path, tunings: list[int]) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    for call in (
        lambda: loader.predict(SOME[0], "tiny", threshold=threshold),
        lambda: loader.predict_batch([], "tiny", threshold=threshold),
        lambda: loader.postprocess_mask_batch(np.zeros((1, 4, 4)), threshold=threshold),
    ):
        with pytest.raises(ConfigError, match="threshold"):
            call()


@pytest.mark.parametrize("single", ["a.png", b"bytes", Path("a.png"), np.zeros((8, 8, 3), np.uint8)])
def test_a_single_image_is_no_batch(single: Any, weights: Path) -> None:
    with pytest.raises(ConfigError, match="list"):
        ModelLoader({"tiny": weights}, device="cpu").predict_batch(single, "tiny")


@pytest.mark.parametrize("options", [{"precision": "int8"}, {"tile": 8}, {"resize": 8}, {"device": "tpu"}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ModelLoader(**{"device": "cpu", **options})


# Batch sizes


def test_the_first_use_tunes_says_so_and_saves(
    weights: Path, tunings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    loader.predict_batch(SOME, "tiny")
    loader.predict_batch(SOME, "tiny")
    assert tunings == [160]  # the largest side at hand, 133, as it is padded
    assert [text for text in messages(caplog) if "no batch size of tiny" in text] == messages(caplog)[:1]
    assert BatchSizes.read("cache/brim/batch_sizes.json").entry(HERE, "tiny") == entry_of(image_size=160)
    ModelLoader({"tiny": weights}, device="cpu").predict_batch(SOME, "tiny")
    assert tunings == [160]


def test_tuning_on_first_use_for_real(weights: Path) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu", tune_seconds=0.5)
    assert len(loader.predict_batch(SOME, "tiny")) == len(SOME)
    assert BatchSizes.read("cache/brim/batch_sizes.json").models(HERE) == ("tiny",)
    assert not Path("batch_sizes.json").exists()


def test_a_file_in_the_current_directory_is_read_and_updated_in_place(weights: Path, tunings: list[int]) -> None:
    save(entry_of(image_size=64))
    ModelLoader({"tiny": weights}, device="cpu").predict_batch(images((64, 100)), "tiny")
    assert tunings == [128]
    assert BatchSizes.read("batch_sizes.json").entry(HERE, "tiny") == entry_of(image_size=128)
    assert not Path("cache").exists()


def test_an_entry_for_smaller_images_is_not_enough(weights: Path, tunings: list[int]) -> None:
    save(entry_of(image_size=64))
    loader = ModelLoader({"tiny": weights}, device="cpu")
    loader.predict_batch(images((64, 64), (33, 50)), "tiny")
    assert tunings == []
    loader.predict_batch(images((64, 100)), "tiny")
    assert tunings == [128]
    loader.predict_batch(images((3000, 40)), "tiny", batch_size=1)  # nothing to choose
    assert tunings == [128]


def test_a_large_image_needs_no_more_than_the_tile(weights: Path, tunings: list[int]) -> None:
    ModelLoader({"tiny": weights}, device="cpu", tile=100).predict_batch(images((40, 300)), "tiny")
    ModelLoader({"tiny": weights}, device="cpu", batch_sizes=None, resize=48).predict_batch(SOME, "tiny")
    assert tunings == [96, 48]


def test_a_stream_is_tuned_for_the_tile(weights: Path, tunings: list[int]) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu", tile=256)
    assert len(list(loader.predict_stream(iter(SOME), "tiny"))) == len(SOME)
    assert tunings == [256]


def test_the_side_at_hand_is_read_from_headers(weights: Path, tunings: list[int], tmp_path: Path) -> None:
    Image.fromarray(SOME[3]).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    for item in (tmp_path / "a.png", str(tmp_path / "a.png"), content, Image.fromarray(SOME[3])):
        ModelLoader({"tiny": weights}, device="cpu", batch_sizes=None).predict_batch([item, b"no"], "tiny")
    assert tunings == [160] * 4


def test_entries_of_other_devices_are_named_and_not_used(
    weights: Path, tunings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    save(entry_of(optimal_batch_size=64, max_safe_batch_size=64), key="NVIDIA A5000 24 GiB")
    loader = ModelLoader({"tiny": weights}, device="cpu")
    assert batch_sizes_of(loader, SOME) == 3
    assert len(tunings) == 1
    assert "NVIDIA A5000 24 GiB" in messages(caplog)[0]


def test_a_malformed_file_is_an_error(weights: Path, tunings: list[int]) -> None:
    Path("batch_sizes.json").write_text("{")
    with pytest.raises(ConfigError, match=r"batch_sizes\.json"):
        ModelLoader({"tiny": weights}, device="cpu").predict_batch(SOME, "tiny")


def test_a_file_that_cannot_be_written_is_a_warning(
    weights: Path, tunings: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    loader = ModelLoader({"tiny": weights}, device="cpu", batch_sizes=tmp_path / "new/batch_sizes.json")
    unwritable = ModelLoader({"tiny": weights}, device="cpu", batch_sizes="/proc/nothing/batch_sizes.json")
    for each in (loader, unwritable):
        assert len(each.predict_batch(SOME, "tiny")) == len(SOME)
        each.predict_batch(SOME, "tiny")
    assert any("not saved" in text for text in messages(caplog))
    assert len(tunings) == 2  # what was tuned is kept in memory


def test_the_optimum_is_used_and_a_custom_size_within_the_limit(weights: Path, tunings: list[int]) -> None:
    save(entry_of())
    loader = ModelLoader({"tiny": weights}, device="cpu")
    assert batch_sizes_of(loader, SOME) == 3
    assert batch_sizes_of(loader, SOME, batch_size=4) == 4
    assert (loader.get_optimal_batch_size("tiny"), loader.get_max_safe_batch_size("tiny")) == (3, 5)
    assert tunings == []


def test_a_size_above_the_limit_is_capped_with_one_warning(weights: Path, tunings: list[int]) -> None:
    save(entry_of())
    loader = ModelLoader({"tiny": weights}, device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert batch_sizes_of(loader, [SOME[0]] * 30, batch_size=64) == 5
    (warning,) = caught
    assert "batch_size=64 is above 5" in str(warning.message)
    assert warning.category is UserWarning
    assert warning.filename == __file__


def test_batch_sizes_are_tuned_without_weights(tunings: list[int]) -> None:
    loader = ModelLoader(device="cpu")
    assert (loader.get_optimal_batch_size("tiny"), loader.get_max_safe_batch_size("tiny")) == (3, 5)
    assert tunings == [1024]


def test_precision_is_that_of_the_entry_unless_asked_for(weights: Path, tunings: list[int]) -> None:
    save(entry_of(precision="bf16", layout="channels_last"))
    assert ModelLoader({"tiny": weights}, device="cpu").load("tiny").setting == ComputeConfig(
        precision="bf16", layout="channels_last"
    )
    asked = ModelLoader({"tiny": weights}, device="cpu", precision="fp32")
    asked.predict_batch(SOME, "tiny")
    assert asked.load("tiny").setting == ComputeConfig()
    assert tunings == [160]  # sizes found in bf16 do not hold in fp32


def test_a_precision_asked_for_is_not_saved_for_everybody(weights: Path, tunings: list[int]) -> None:
    ModelLoader({"tiny": weights}, device="cpu", precision="bf16").predict_batch(SOME, "tiny")
    assert tunings == [160]
    assert not Path("cache").exists()


def test_the_lock_is_free_after_a_failure(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Tuned:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "tune_model", broken)
    loader = ModelLoader({"tiny": weights}, device="cpu")
    with pytest.raises(ZeroDivisionError):
        loader.predict_batch(SOME, "tiny")
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(loader.predict(SOME[0], "tiny")), daemon=True)
    other.start()
    other.join(PATIENCE_S)
    assert found


# Parts


def test_preprocessing_pads_to_one_shape(tmp_path: Path) -> None:
    batch = ModelLoader(device="cpu").preprocess_image_batch(images((40, 100), (20, 20)))
    assert batch.shape == (2, 3, 64, 128)
    assert batch.dtype == torch.uint8
    (first, _) = images((40, 100), (20, 20))
    assert np.array_equal(batch[0, :, :40, :100].permute(1, 2, 0).numpy(), first)
    assert np.array_equal(batch[0, :, 40].numpy(), batch[0, :, 38].numpy())
    assert ModelLoader(device="cpu", resize=48).preprocess_image_batch(SOME).shape == (5, 3, 48, 48)
    assert len(ModelLoader(device="cpu").preprocess_image_batch([])) == 0
    with pytest.raises(ImageError):
        ModelLoader(device="cpu").preprocess_image_batch([b"no"])


def test_parts_give_what_predict_gives(weights: Path) -> None:
    loader = ModelLoader({"tiny": weights}, device="cpu")
    logits = loader.load("tiny")(loader.preprocess_image_batch(images((64, 96))))
    (polygons,) = loader.postprocess_mask_batch(torch.sigmoid(logits))
    expected = loader.predict(images((64, 96))[0], "tiny").polygons
    assert [polygon.area for polygon in polygons] == [polygon.area for polygon in expected]
    assert [p.confidence for p in polygons] == pytest.approx([p.confidence for p in expected])


def test_postprocessing_takes_masks_and_probabilities() -> None:
    loader, mask = ModelLoader(device="cpu"), np.zeros((2, 16, 16), np.uint8)
    mask[0, 2:9, 3:10] = 1
    mask[0, 5, 5] = 0
    for given in (mask, mask * 255, mask.astype(bool), mask.astype(float), torch.from_numpy(mask)[:, None].bfloat16()):
        (ring,), none = loader.postprocess_mask_batch(given)
        assert (ring.area, len(ring.holes), none) == (48, 1, [])
    assert loader.postprocess_mask_batch(mask, detect_holes=False)[0][0].area == 49
    assert loader.postprocess_mask_batch(np.full((1, 4, 4), 0.4), threshold=0.3)[0][0].confidence == pytest.approx(0.4)


@pytest.mark.parametrize("masks", [np.full((1, 4, 4), 3.0), np.full((1, 4, 4), np.nan), np.zeros((4, 4)), np.zeros(3)])
def test_logits_and_odd_shapes_are_refused(masks: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="expected"):
        ModelLoader(device="cpu").postprocess_mask_batch(masks)


def test_a_report_is_json(weights: Path, tunings: list[int]) -> None:
    reports: list[Any] = []
    loader = ModelLoader({"tiny": weights}, device="cpu")
    list(loader.predict_stream(SOME, "tiny", on_report=reports.append))
    assert json.loads(json.dumps(reports[0].as_dict()))["images"] == len(SOME)
