import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

import brim
from brim.errors import CheckpointError, DatasetError, ImageError
from brim.segmentation.config import SegmentTrainConfig
from brim.segmentation.networks import InferenceNetwork, create_model, load_weights, read_metadata, register_model
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.prediction import ModelLoader
from brim.segmentation.scenes import make_cells, write_cells
from brim.segmentation.training import pair_files, split, train, windows
from brim.segmentation.training.crops import COUNTED, FOREGROUND, Cutting, cut
from brim.segmentation.training.objective import PixelCounts, item_losses, settle_norms


class Pooled(nn.Module):
    """A few filters, and a norm over one value per crop and channel."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.far = nn.BatchNorm2d(6)
        self.last = nn.Conv2d(6, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = self.near(x)
        return self.last(near + self.far(near.mean((2, 3), keepdim=True)))


register_model("test_pooled", Pooled, replace=True)
QUICK = SegmentTrainConfig(model="test_pooled", size=32, epochs=3, batch_size=4, learning_rate=0.01, val_fraction=0.3)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    write_cells(folder / "images", folder / "masks", 6, seed=1, height=64, width=72)
    return folder


@pytest.fixture
def cells(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "cells"))


def run(cells: Path, out: Path, config: SegmentTrainConfig = QUICK, **options):
    return train(cells / "images", cells / "masks", config, out, device="cpu", **options)


def weights(out: Path) -> dict[str, torch.Tensor]:
    module = create_model("test_pooled")
    load_weights(module, out)
    return module.state_dict()


# What it is for


def test_a_network_trained_for_three_epochs_segments_images_it_never_saw(tmp_path):
    write_cells(tmp_path / "images", tmp_path / "masks", 16, seed=1, height=128, width=128)
    config = SegmentTrainConfig(model="unet_tiny", task="mask", size=64, epochs=3, batch_size=2, learning_rate=0.004)

    report = train(tmp_path / "images", tmp_path / "masks", config, tmp_path / "run", device="cpu")

    assert report.iou > 0.8
    module = create_model("unet_tiny")
    load_weights(module, tmp_path / "run")
    network = InferenceNetwork(module, torch.device("cpu"), ComputeConfig())
    held = [make_cells(99, index, 192, 256) for index in range(6)]
    predicted = torch.cat([network(torch.from_numpy(image).permute(2, 0, 1)[None]) > 0 for image, _ in held])
    scores = PixelCounts(len(held), predicted.device)
    scores.add(predicted, torch.from_numpy(np.stack([mask for _, mask in held]))[:, None], torch.arange(len(held)))
    assert scores.result()["iou"] >= 0.8
    assert scores.result()["iou_per_image"] >= 0.8


def test_a_run_leaves_weights_a_configuration_and_a_report(cells, tmp_path):
    report = run(cells, tmp_path / "run")

    about = json.loads((tmp_path / "run/config.json").read_text())
    assert list(report.to_json()) == [
        "run", "weights", "epochs", "dice", "iou", "images_per_s", "ceiling_share", "peak_bytes", "ceiling_spread",
        "wall_s", "startup_s", "work_s", "overhead",
    ]  # fmt: skip
    assert json.loads(json.dumps(report.to_json()))["weights"] == str(tmp_path / "run/weights.safetensors")
    assert (report.epochs, report.stopped) == (3, False)
    assert 0 <= report.iou <= report.dice <= 1
    metadata = read_metadata(tmp_path / "run")
    assert json.loads(metadata.pop("network"))["factory"] == "Pooled"  # where the network is found again
    assert metadata == {"model": "test_pooled", "task": "mask", "size": "32", "format_version": "1"}
    assert (about["training"]["size"], about["split"]) == (32, {"train": 4, "validation": 2})
    assert str(tmp_path) not in (tmp_path / "run/config.json").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run/train/metrics.jsonl").read_text().splitlines()]
    scored = [line for line in lines if "val_loss" in line]
    best = min(scored, key=lambda line: line["val_loss"])
    assert len(scored) == 3
    assert (best["dice"], best["iou"]) == pytest.approx((report.dice, report.iou))


class Everything(nn.Module):
    """Finds foreground everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Conv2d(3, 1, 1)
        nn.init.zeros_(self.only.weight)
        nn.init.constant_(self.only.bias, 5.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


def test_the_scores_of_a_run_count_every_pixel_held_out_once(cells, tmp_path):
    """Crops of 32 overlap in images of 64 × 72, and the training images are not counted."""
    register_model("test_everything", Everything, replace=True)
    config = replace(QUICK, model="test_everything", epochs=1, learning_rate=1e-9)

    report = run(cells, tmp_path / "run", config)

    masks = [cv2.imread(str(file), cv2.IMREAD_UNCHANGED) > 0 for file in sorted((cells / "masks").iterdir())]
    held = np.stack([masks[number] for number in split(6, config)[1].tolist()])
    assert report.iou == pytest.approx(held.mean())
    assert report.dice == pytest.approx(2 * held.sum() / (held.size + held.sum()))
    p, losses = 1 / (1 + math.exp(-5)), []
    for mask in held:
        for window in windows(64, 72, 32):
            inside = mask[window.top : window.top + 32, window.left : window.left + 32].sum()
            entropy = -(inside * math.log(p) + (1024 - inside) * math.log(1 - p)) / 1024
            losses.append(entropy + 1 - (2 * p * inside + 1) / (1024 * p + inside + 1))
    line = json.loads((tmp_path / "run/train/metrics.jsonl").read_text().splitlines()[-1])
    assert line["val_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_the_weights_of_a_run_are_the_best_not_the_last(cells, tmp_path):
    """The masks held out are the inverse of what is trained on: every epoch makes it worse there."""
    files = sorted((cells / "masks").iterdir())
    for number in split(6, QUICK)[1].tolist():
        labels = cv2.imread(str(files[number]), cv2.IMREAD_UNCHANGED)
        cv2.imwrite(str(files[number]), (labels == 0).astype(np.uint8))

    report = run(cells, tmp_path / "run", replace(QUICK, epochs=4))

    lines = [json.loads(line) for line in (tmp_path / "run/train/metrics.jsonl").read_text().splitlines()]
    scored = [line for line in lines if "val_loss" in line]
    best = min(scored, key=lambda line: line["val_loss"])
    assert best["val_loss"] < scored[-1]["val_loss"]
    assert report.iou == pytest.approx(best["iou"])
    assert report.iou != pytest.approx(scored[-1]["iou"], abs=1e-4)


def test_crops_are_augmented_only_if_that_is_asked_for(cells, tmp_path):
    for augment in (True, False):
        run(cells, tmp_path / str(augment), replace(QUICK, epochs=1, augment=augment))

    one, other = weights(tmp_path / "True"), weights(tmp_path / "False")
    assert not all(torch.equal(value, other[name]) for name, value in one.items())


# Resume and repeat


def test_a_run_is_loaded_by_its_directory_alone(cells, tmp_path, monkeypatch):
    monkeypatch.setitem(ModelLoader.__init__.__kwdefaults__, "tune_seconds", 0.05)
    run(cells, tmp_path / "run")
    loaded = brim.load_run(tmp_path / "run", device="cpu")
    images = sorted((cells / "images").iterdir())

    assert loaded.config["model"] == "test_pooled"
    assert loaded.metrics["best_val_loss"] <= loaded.history[-1]["val_loss"]
    assert "segment-train" in repr(loaded)
    one, same = loaded.predict(images[0]), loaded.predict(images)[0]
    assert len(one.polygons) == len(same.polygons)
    assert [polygon.area for polygon in one.polygons] == [polygon.area for polygon in same.polygons]


def test_crops_are_made_once_and_cut_short_go_on(cells, tmp_path, monkeypatch):
    monkeypatch.setattr("brim.segmentation.training.crops._SHARD_BYTES", 4 * 32 * 32 * 4)  # four crops each
    seen = []
    asked = iter(range(100))
    run(cells, tmp_path / "cut", progress=seen.append, stop=lambda: next(asked) >= 3)
    run(cells, tmp_path / "cut", progress=seen.append)
    run(cells, tmp_path / "straight")

    prepared = [told.step for told in seen if told.phase == "prepare"]
    assert prepared == [1, 2, 3, 3, 4, 5, 6]  # the third ended within a shard
    shards = [sorted((tmp_path / name / "crops/shards").iterdir()) for name in ("cut", "straight")]
    assert len(shards[0]) == 9  # 6 images of 2 × 3 crops
    assert [one.read_bytes() for one in shards[0]] == [one.read_bytes() for one in shards[1]]


def test_a_run_goes_on_as_what_it_was_and_not_as_another(cells, tmp_path):
    once = replace(QUICK, epochs=1)
    run(cells, tmp_path / "run", once)

    with pytest.raises(CheckpointError, match="not empty; add resume"):
        run(cells, tmp_path / "run", once, resume=False)
    for change in ({"learning_rate": 0.5}, {"augment": False}):
        with pytest.raises(CheckpointError, match=next(iter(change))):
            run(cells, tmp_path / "run", replace(once, **change))
    assert run(cells, tmp_path / "run").epochs == 3
    os.utime(cells / "masks/cell_00002.png", (1, 1))
    with pytest.raises(DatasetError, match=r"cell_00002.png or its mask changed"):
        run(cells, tmp_path / "run")


# Fine-tuning


def test_training_goes_on_from_the_weights_of_a_run(cells, tmp_path):
    run(cells, tmp_path / "first")
    config = replace(QUICK, epochs=1, learning_rate=1e-9)

    run(cells, tmp_path / "second", config, weights=tmp_path / "first")

    for name, value in weights(tmp_path / "first").items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(weights(tmp_path / "second")[name], value, atol=1e-6, rtol=0)
    with pytest.raises(CheckpointError, match="weights_sha256"):
        run(cells, tmp_path / "second", config)


# Pairs


def test_label_images_pair_by_stem_in_any_folder(cells, tmp_path):
    (cells / "images/deep").mkdir()
    (cells / "images/cell_00003.png").rename(cells / "images/deep/cell_00003.png")
    labels = cv2.imread(str(cells / "masks/cell_00000.png"), cv2.IMREAD_UNCHANGED)
    (cells / "masks/cell_00000.png").unlink()
    cv2.imwrite(str(cells / "masks/cell_00000.tif"), (labels * 300).astype(np.uint16))

    pairs = pair_files(cells / "images", cells / "masks")

    assert [(pair.name, pair.mask.name) for pair in pairs[:4:3]] == [
        ("cell_00000.png", "cell_00000.tif"),
        ("deep/cell_00003.png", "cell_00003.png"),
    ]
    assert run(cells, tmp_path / "run", replace(QUICK, epochs=1)).epochs == 1


def test_an_image_without_a_mask_and_a_mask_without_an_image_are_named(cells, tmp_path):
    (cells / "masks/cell_00002.png").unlink()
    with pytest.raises(DatasetError, match=r"images/cell_00002.png has no mask"):
        run(cells, tmp_path / "run")

    (cells / "images/cell_00002.png").unlink()
    (cells / "images/cell_00001.png").unlink()
    with pytest.raises(DatasetError, match=r"masks/cell_00001.png has no image"):
        run(cells, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_files_of_one_stem_are_named(cells, tmp_path):
    (cells / "images/again").mkdir()
    shutil.copy(cells / "images/cell_00001.png", cells / "images/again")

    with pytest.raises(DatasetError, match=r"again/cell_00001.png.*both named cell_00001"):
        run(cells, tmp_path / "run")


def test_sizes_that_differ_are_named(cells, tmp_path):
    cv2.imwrite(str(cells / "masks/cell_00003.png"), np.ones((64, 64), np.uint8))

    with pytest.raises(ImageError, match=r"cell_00003.png is 72×64.*cell_00003.png is 64×64"):
        run(cells, tmp_path / "run")


def test_masks_without_foreground_are_refused(cells, tmp_path):
    for file in (cells / "masks").iterdir():
        cv2.imwrite(str(file), np.zeros((64, 72), np.uint8))

    with pytest.raises(DatasetError, match="no mask has foreground"):
        run(cells, tmp_path / "run")


# Crops


@pytest.mark.parametrize("size", [(32, 32), (40, 32), (31, 70), (100, 65), (1, 5)])
def test_crops_show_every_pixel_and_count_it_once(size):
    height, width = size
    rng = np.random.default_rng(0)
    image, mask = rng.integers(0, 256, (height, width, 3), np.uint8), rng.random(size) < 0.3
    counted, true = np.zeros(size, int), np.zeros(size, int)

    crops = list(cut(image, mask.astype(np.int32), Cutting(32)))

    for window, crop in zip(windows(height, width, 32), crops, strict=True):
        rows, columns = slice(window.top, window.top + 32), slice(window.left, window.left + 32)
        shown = image[rows, columns]
        assert np.array_equal(crop["image"][:, : shown.shape[0], : shown.shape[1]].permute(1, 2, 0).numpy(), shown)
        bits = crop["mask"][0, : shown.shape[0], : shown.shape[1]].numpy()
        counted[rows, columns] += bits & COUNTED != 0
        true[rows, columns] += bits == COUNTED | FOREGROUND
    assert (counted == 1).all()
    assert np.array_equal(true, mask)
    assert sum(int((crop["mask"] & COUNTED != 0).sum()) for crop in crops) == mask.size  # none in the padding


def test_the_split_depends_on_the_seed_and_loses_nobody():
    rows, held = split(50, QUICK)

    assert len(held) == 15
    assert torch.equal(torch.cat([rows, held]).sort().values, torch.arange(50))
    assert torch.equal(split(50, QUICK)[1], held)
    assert not torch.equal(split(50, replace(QUICK, seed=1))[1], held)
    assert len(split(3, replace(QUICK, val_fraction=0.01))[1]) == 1
    assert len(split(2, replace(QUICK, val_fraction=0.99))[0]) == 1


# Steps


def test_norms_with_one_value_use_their_running_statistics():
    norm = nn.BatchNorm2d(4)
    settle_norms(norm)
    norm.running_mean.fill_(2.0)

    alone = norm(torch.full((1, 4, 1, 1), 3.0))
    before = norm.running_mean.clone()
    norm(torch.rand(2, 4, 1, 1))

    kept = nn.BatchNorm2d(4)
    settle_norms(kept, always=True)
    values = torch.rand(2, 4, 3, 3)
    torch.testing.assert_close(kept(values), values, atol=1e-4, rtol=0)  # mean 0 and variance 1, as at first
    torch.testing.assert_close(alone, torch.ones(1, 4, 1, 1), atol=1e-4, rtol=0)
    assert norm.training
    assert torch.equal(before, torch.full((4,), 2.0))
    assert not torch.equal(norm.running_mean, before)


def test_the_loss_is_that_of_its_formula_and_defined_for_empty_crops():
    logits = torch.tensor([[2.0, -1.0, 0.5, -3.0]]).reshape(1, 1, 2, 2)
    true = torch.tensor([[True, False, False, False]]).reshape(1, 1, 2, 2)
    p, t = logits.sigmoid().flatten(), true.float().flatten()
    entropy = -(t * p.log() + (1 - t) * (1 - p).log()).mean()

    found = item_losses(logits, true)

    assert found.item() == pytest.approx((entropy + 1 - (2 * p[0] + 1) / (p.sum() + 2)).item(), rel=1e-5)
    assert item_losses(torch.full((1, 1, 4, 4), -30.0), torch.zeros(1, 1, 4, 4, dtype=torch.bool)).item() < 1e-6


# Configuration
