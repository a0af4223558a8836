import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entries import HERE, entry_of, sizes_file
from PIL import Image
from torch import Tensor, nn

from brim.errors import ConfigError, ImageError
from brim.segmentation.config import REGISTERED, PredictConfig, TuneConfig
from brim.segmentation.networks import save_weights
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.prediction import ModelLoader
from brim.segmentation.tuning import BatchSizes, Tuned
from brim.segmentation.tuning import tuner as module

pytestmark = pytest.mark.usefixtures("threads_are_joined")


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))) * 8


@pytest.fixture(autouse=True)
def _registered(monkeypatch, tmp_path):
    monkeypatch.setitem(REGISTERED, "tiny", Tiny)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where batch_sizes.json is by default


@pytest.fixture
def weights(tmp_path) -> Path:
    save_weights(Tiny(), tmp_path / "tiny.safetensors", {"model": "tiny"})
    return tmp_path / "tiny.safetensors"


@pytest.fixture
def tunings(monkeypatch):
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


def test_bad_images_fail_in_a_batch_in_their_place_and_alone_with_an_error(weights, tunings):
    loader = ModelLoader({"tiny": weights}, device="cpu")
    found = loader.predict_batch([SOME[0], b"no image", SOME[1]], "tiny")
    assert [prediction.error is None for prediction in found] == [True, False, True]
    with pytest.raises(ImageError):
        loader.predict(b"no image", "tiny")


def test_nothing_is_tuned_when_no_image_can_be_read(weights, tunings):
    found = ModelLoader({"tiny": weights}, device="cpu").predict_batch([b"", "missing.png"], "tiny")
    assert all(prediction.error for prediction in found)
    assert tunings == []


# What cannot work


def test_predicting_without_weights_says_how_to_give_them(tunings):
    loader = ModelLoader(device="cpu")
    for call in (lambda: loader.predict(SOME[0], "tiny"), lambda: loader.predict_batch(SOME, "tiny")):
        with pytest.raises(ConfigError, match=r"no weights.*give weights"):
            call()
    assert tunings == []


@pytest.mark.parametrize("single", ["a.png", b"bytes", Path("a.png"), np.zeros((8, 8, 3), np.uint8)])
def test_a_single_image_is_no_batch(single, weights):
    with pytest.raises(ConfigError, match="list"):
        ModelLoader({"tiny": weights}, device="cpu").predict_batch(single, "tiny")


# Batch sizes


def test_the_first_use_tunes_says_so_and_saves(weights, tunings, caplog):
    loader = ModelLoader({"tiny": weights}, device="cpu")
    loader.predict_batch(SOME, "tiny", strict=True)
    assert tunings == []
    loader.predict_batch(SOME, "tiny")
    loader.predict_batch(SOME, "tiny")
    assert tunings == [160]  # the largest side at hand, 133, as it is padded
    assert [text for text in messages(caplog) if "no batch size of tiny" in text] == messages(caplog)[:1]
    assert BatchSizes.read("cache/brim/batch_sizes.json").entry(HERE, "tiny") == entry_of(image_size=160)
    ModelLoader({"tiny": weights}, device="cpu").predict_batch(SOME, "tiny")
    assert tunings == [160]


def test_a_file_in_the_current_directory_is_read_and_updated_in_place(weights, tunings):
    sizes_file("batch_sizes.json", "tiny", image_size=64)
    ModelLoader({"tiny": weights}, device="cpu").predict_batch(images((64, 100)), "tiny")
    assert tunings == [128]
    assert BatchSizes.read("batch_sizes.json").entry(HERE, "tiny") == entry_of(image_size=128)
    assert not Path("cache").exists()


def test_an_entry_for_smaller_images_is_not_enough(weights, tunings):
    sizes_file("batch_sizes.json", "tiny", image_size=64)
    loader = ModelLoader({"tiny": weights}, device="cpu")
    loader.predict_batch(images((64, 64), (33, 50)), "tiny")
    assert tunings == []
    loader.predict_batch(images((64, 100)), "tiny")
    assert tunings == [128]
    loader.predict_batch(images((3000, 40)), "tiny", batch_size=1)  # nothing to choose
    sizes_file("batch_sizes.json", "tiny", image_size=64)  # by another process
    loader.predict_batch(images((64, 100)), "tiny")
    assert tunings == [128]


@pytest.mark.parametrize(("tuned_for", "batches"), [(64, [1, 1, 1, 1]), (96, [3, 1])])
def test_windows_are_the_loaders_and_share_a_batch_only_if_one_is_known_for_them(
    weights, tunings, monkeypatch, tuned_for, batches
):
    seen, forward = [], Tiny.forward
    monkeypatch.setattr(Tiny, "forward", lambda self, x: seen.append(tuple(x.shape)) or forward(self, x))
    sizes_file("batch_sizes.json", "tiny", image_size=tuned_for)
    loader = ModelLoader({"tiny": weights}, device="cpu", tile=96)
    loader.load("tiny")
    seen.clear()

    loader.predict(images((96, 300))[0], "tiny")

    assert seen == [(size, 3, 96, 96) for size in batches]
    seen.clear()
    list(loader.stream(images((96, 300)), "tiny", PredictConfig(batch_size=1)))
    assert seen[:4] == [(1, 3, 96, 96)] * 4


def test_a_large_image_and_a_stream_need_no_more_than_the_tile(weights, tunings):
    ModelLoader({"tiny": weights}, device="cpu", tile=100).predict_batch(images((40, 300)), "tiny")
    ModelLoader({"tiny": weights}, device="cpu", batch_sizes=None, resize=48).predict_batch(SOME, "tiny")
    stream = ModelLoader({"tiny": weights}, device="cpu", tile=256).predict_stream(iter(SOME), "tiny")
    assert len(list(stream)) == len(SOME)
    assert tunings == [96, 48, 256]


def test_the_side_at_hand_is_read_from_headers(weights, tunings, tmp_path):
    Image.fromarray(SOME[3]).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    for item in (tmp_path / "a.png", str(tmp_path / "a.png"), content, Image.fromarray(SOME[3])):
        ModelLoader({"tiny": weights}, device="cpu", batch_sizes=None).predict_batch([item, b"no"], "tiny")
    assert tunings == [160] * 4


def test_entries_of_other_devices_are_named_and_not_used(weights, tunings, caplog):
    sizes_file("batch_sizes.json", "tiny", "NVIDIA A5000 24 GiB", max_safe_batch_size=64)
    loader = ModelLoader({"tiny": weights}, device="cpu")
    assert batch_sizes_of(loader, SOME) == 3
    assert len(tunings) == 1
    assert "NVIDIA A5000 24 GiB" in messages(caplog)[0]


def test_a_file_that_cannot_be_written_is_a_warning(weights, tunings, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    loader = ModelLoader({"tiny": weights}, device="cpu", batch_sizes=tmp_path / "new/batch_sizes.json")
    unwritable = ModelLoader({"tiny": weights}, device="cpu", batch_sizes="/proc/nothing/batch_sizes.json")
    for each in (loader, unwritable):
        assert len(each.predict_batch(SOME, "tiny")) == len(SOME)
        each.predict_batch(SOME, "tiny")
    assert any("not saved" in text for text in messages(caplog))
    assert len(tunings) == 2  # what was tuned is kept in memory


def test_the_optimum_is_used_and_a_custom_size_within_the_limit(weights, tunings):
    sizes_file("batch_sizes.json", "tiny")
    loader = ModelLoader({"tiny": weights}, device="cpu")
    assert batch_sizes_of(loader, SOME) == 3
    assert batch_sizes_of(loader, SOME, batch_size=4) == 4
    assert (loader.get_optimal_batch_size("tiny"), loader.get_max_safe_batch_size("tiny")) == (3, 5)
    assert tunings == []


def test_a_size_above_the_limit_is_capped_with_one_warning(weights, tunings):
    sizes_file("batch_sizes.json", "tiny")
    loader = ModelLoader({"tiny": weights}, device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert batch_sizes_of(loader, [SOME[0]] * 30, batch_size=64) == 5
    (warning,) = caught
    assert "batch_size=64 is above 5" in str(warning.message)
    assert warning.category is UserWarning
    assert warning.filename == __file__


def test_precision_is_that_of_the_entry_unless_asked_for(weights, tunings):
    sizes_file("batch_sizes.json", "tiny", precision="bf16", layout="channels_last")
    assert ModelLoader({"tiny": weights}, device="cpu").load("tiny").setting == ComputeConfig(
        precision="bf16", layout="channels_last"
    )
    asked = ModelLoader({"tiny": weights}, device="cpu", precision="fp32")
    asked.predict_batch(SOME, "tiny")
    assert asked.load("tiny").setting == ComputeConfig()
    assert tunings == [160]  # sizes found in bf16 do not hold in fp32


def test_a_precision_asked_for_is_not_saved_for_everybody(weights, tunings):
    ModelLoader({"tiny": weights}, device="cpu", precision="bf16").predict_batch(SOME, "tiny")
    assert tunings == [160]
    assert not Path("cache").exists()


# Parts


def test_preprocessing_pads_to_one_shape(tmp_path):
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


def test_postprocessing_takes_masks_and_probabilities():
    loader, mask = ModelLoader(device="cpu"), np.zeros((2, 16, 16), np.uint8)
    mask[0, 2:9, 3:10] = 1
    mask[0, 5, 5] = 0
    for given in (mask, mask * 255, mask.astype(bool), mask.astype(float), torch.from_numpy(mask)[:, None].bfloat16()):
        (ring,), none = loader.postprocess_mask_batch(given)
        assert (ring.area, len(ring.holes), none) == (48, 1, [])
    assert loader.postprocess_mask_batch(mask, detect_holes=False)[0][0].area == 49
    assert loader.postprocess_mask_batch(np.full((1, 4, 4), 0.4), threshold=0.3)[0][0].confidence == pytest.approx(0.4)


@pytest.mark.parametrize("masks", [np.full((1, 4, 4), 3.0), np.full((1, 4, 4), np.nan), np.zeros((4, 4)), np.zeros(3)])
def test_logits_and_odd_shapes_are_refused(masks):
    with pytest.raises(ConfigError, match="expected"):
        ModelLoader(device="cpu").postprocess_mask_batch(masks)
