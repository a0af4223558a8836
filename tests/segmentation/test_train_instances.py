"""Training to tell objects apart: from label images, from one image, from drawn scenes, from the weights of another."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import load_file

from brim.engine.storage import Dataset
from brim.errors import CheckpointError, ConfigError, ImageError
from brim.segmentation.config import ImagePlanes, SegmentTrainConfig
from brim.segmentation.images.contrast import stretch_batch
from brim.segmentation.images.reading import numbers_objects, read_labels
from brim.segmentation.networks import default_weights, load_model, read_metadata
from brim.segmentation.networks.packing import digest, pack
from brim.segmentation.objects.instances import STANDARD_DIAMETER, heights
from brim.segmentation.scenes import write_cells
from brim.segmentation.scenes.drawing import draw
from brim.segmentation.scenes.source import Drawing, SceneSource
from brim.segmentation.training import run, train
from brim.segmentation.training.crops import Cutting, ImagePair, cut, find_change, halves, read_pair
from brim.segmentation.training.crops import pack as pack_crops
from brim.segmentation.training.objective import instance_losses

QUICK = {"model": "unet_tiny", "size": 64, "epochs": 1, "batch_size": 4, "learning_rate": 0.003}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def few_scenes(monkeypatch):
    monkeypatch.setattr("brim.segmentation.training.evaluation.SCORED_SCENES", 8)


@pytest.fixture
def cells(tmp_path):
    write_cells(tmp_path / "images", tmp_path / "masks", 3, seed=4, height=64, width=96)
    return tmp_path


def weights_of(run):
    return load_model("unet_tiny", run).state_dict()


def test_label_images_are_learned_as_objects_and_masks_of_two_values_as_masks(cells):
    report = train(cells / "images", cells / "masks", SegmentTrainConfig(**QUICK), cells / "run", device="cpu")
    for file in (cells / "masks").iterdir():
        labels = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
        cv2.imwrite(str(file), np.where(labels > 0, 255, 0).astype(np.uint8))
    plain = train(cells / "images", cells / "masks", SegmentTrainConfig(**QUICK), cells / "plain", device="cpu")

    assert (report.task, plain.task) == ("instances", "mask")
    assert read_metadata(cells / "run")["task"] == "instances"
    assert {"ap50", "ap75", "pq", "count_error", "merges", "splits"} <= report.to_json().keys()
    assert "ap50" not in plain.to_json()
    assert json.loads((cells / "run/config.json").read_text())["training"]["task"] == "instances"
    for name, words in (
        ("run", ("PQ", "F1", "count error", "merges", "splits", "true,")),
        ("plain", ("Dice", ": IoU ")),
    ):
        page = (cells / name / "report.html").read_text()
        assert page.count("<figure") == 2  # the crops of the image held out
        assert all(word in page for word in words)


def test_one_image_is_enough_and_the_part_held_out_is_not_trained_on(tmp_path):
    write_cells(tmp_path / "images", tmp_path / "masks", 1, seed=4, height=64, width=128)
    config = SegmentTrainConfig(**QUICK)

    train(tmp_path / "images", tmp_path / "masks", config, tmp_path / "run", device="cpu")
    image = cv2.imread(str(tmp_path / "images/cell_00000.png"))
    image[:, 96:] = 0  # the last quarter of the longer side
    cv2.imwrite(str(tmp_path / "images/cell_00000.png"), image)
    train(tmp_path / "images", tmp_path / "masks", config, tmp_path / "other", device="cpu")

    one, other = weights_of(tmp_path / "run"), weights_of(tmp_path / "other")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("shape", [(40, 80), (80, 40)])
def test_a_single_image_is_divided_across_its_longer_side(tmp_path, shape):
    labels = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    for name in ("image.png", "mask.png"):
        cv2.imwrite(str(tmp_path / name), labels)
    pair = ImagePair("image.png", tmp_path / "image.png", tmp_path / "mask.png")

    first, last = (read_pair(half, Cutting(32, instances=True))[1] for half in halves(pair, 0.25))

    axis = int(shape[1] > shape[0])
    assert np.array_equal(np.concatenate([first, last], axis), labels)
    assert last.shape[axis] == 20


def test_channels_are_chosen_and_others_are_another_run(cells):
    for file in (cells / "images").iterdir():
        image = cv2.imread(str(file))[..., 0]
        planes = np.stack([np.zeros_like(image), image])
        about = {"axes": "CYX", "Channel": {"Name": ["empty", "cells"]}}
        tifffile.imwrite(file.with_suffix(".tif"), planes, metadata=about, photometric="minisblack", ome=True)
        file.unlink()
    config = SegmentTrainConfig(**QUICK, channels=("cells",))
    train(cells / "images", cells / "masks", config, cells / "run", device="cpu")

    crop = Dataset(cells / "run/crops").load(("image",))["image"][0].numpy()
    assert np.array_equal(crop[0], tifffile.imread(cells / "images/cell_00000.tif")[1, :64, :64])
    with pytest.raises(CheckpointError, match="channels was"):
        train(cells / "images", cells / "masks", replace(config, channels=("empty",)), cells / "run", device="cpu")
    with pytest.raises(ImageError, match='has no channel "Cy5"; its channels are 0 empty, 1 cells'):
        train(cells / "images", cells / "masks", replace(config, channels=("Cy5",)), cells / "other", device="cpu")


def test_crops_are_cut_again_for_other_planes_and_other_ways_of_cutting(tmp_path):
    stack = np.random.default_rng(0).integers(0, 256, (2, 3, 2, 32, 48), np.uint8)  # times, slices, channels
    tifffile.imwrite(tmp_path / "a.ome.tif", stack, metadata={"axes": "TZCYX"}, photometric="minisblack")
    cv2.imwrite(str(tmp_path / "mask.png"), np.pad(np.ones((8, 8), np.uint8), ((4, 20), (4, 36))))
    pairs = [ImagePair("a.ome.tif", tmp_path / "a.ome.tif", tmp_path / "mask.png")]

    def crop(cutting):
        return pack_crops(pairs, tmp_path / "crops", cutting).load(("image",))["image"][0, 0].numpy()

    chosen = [(0, 0, "0"), (0, 0, "1"), (0, 2, "1"), (1, 2, "1"), (1, "max", "1"), (0, 0, "0")]
    for time, z, channel in chosen:
        planes = stack[time, :, int(channel)]
        wanted = planes.max(0) if z == "max" else planes[z]
        found = crop(Cutting(32, planes=ImagePlanes(t=time, z=z, channels=(channel,))))
        assert np.array_equal(found, wanted[:, :32]), (time, z, channel)
    plain = Cutting(32, planes=ImagePlanes(t=0, z=0, channels=("0",)))
    for change in ({"size": 16}, {"scale": 0.5}, {"stretched": True}, {"instances": True}):
        kept = pack_crops(pairs, tmp_path / "crops", plain).manifest
        assert pack_crops(pairs, tmp_path / "crops", plain).manifest == kept
        pack_crops(pairs, tmp_path / "crops", replace(plain, **change))
        assert find_change(pairs, tmp_path / "crops", plain).startswith(next(iter(change)))


def test_more_objects_than_a_crop_can_number_are_refused():
    labels = np.arange(1, 2**16 + 1, dtype=np.int32).reshape(256, 256)

    with pytest.raises(ImageError, match="65536 objects in one crop"):
        next(cut(np.zeros((256, 256, 3), np.uint8), labels, Cutting(256, instances=True)))


def test_scenes_are_drawn_while_training_and_a_stopped_run_ends_with_the_same_bits(tmp_path, monkeypatch):
    config = SegmentTrainConfig(**QUICK | {"epochs": 2}, scenes=("nuclei",), scenes_per_epoch=12)
    asked = iter(range(100))
    seeds = []

    class Noted(Drawing):
        def __init__(self, names, seed, size):
            seeds.append(seed)
            super().__init__(names, seed, size)

    monkeypatch.setattr(run, "Drawing", Noted)

    whole = train(None, None, config, tmp_path / "whole", device="cpu")
    train(None, None, config, tmp_path / "cut", device="cpu", stop=lambda: next(asked) >= 3)
    resumed = train(None, None, config, tmp_path / "cut", device="cpu")

    assert (whole.task, whole.training.steps, resumed.training.steps) == ("instances", 6, 6)
    assert len(set(seeds)) == 2  # none is both trained on and scored
    one, other = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read_metadata(tmp_path / "whole")["contrast"] == "stretch"
    assert not (tmp_path / "whole/crops").exists()


def test_a_run_starts_from_weights_at_the_scale_they_know(cells):
    scenes = SegmentTrainConfig(**QUICK, scenes=("nuclei",), scenes_per_epoch=4)
    train(None, None, scenes, cells / "start", device="cpu")
    for folder in ("images", "masks"):
        for file in (cells / folder).iterdir():
            pixels = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
            cv2.imwrite(str(file), cv2.resize(pixels, None, fx=4, fy=4, interpolation=cv2.INTER_NEAREST))

    train(cells / "images", cells / "masks", SegmentTrainConfig(**QUICK), cells / "run", device="cpu",
          weights=cells / "start")  # fmt: skip

    start, found = (weights_of(cells / name) for name in ("start", "run"))
    assert all(torch.equal(start[name], found[name]) for name in start if "running" in name)  # few images would spoil
    assert not torch.equal(start["score.weight"], found["score.weight"])
    about = read_metadata(cells / "run")
    labels = [read_labels(file) for file in sorted((cells / "masks").iterdir())]
    areas = np.concatenate([np.unique(image, return_counts=True)[1][1:] for image in labels])
    assert (about["task"], about["contrast"]) == ("instances", "stretch")
    assert float(about["scale"]) == pytest.approx(STANDARD_DIAMETER / np.sqrt(np.median(areas) * 4 / np.pi), abs=1e-3)


def test_maps_are_learned_by_their_own_losses():
    labels = torch.zeros((1, 40, 40), dtype=torch.int32)
    labels[0, 4:24, 4:20], labels[0, 10:30, 20:36] = 1, 2
    perfect = torch.stack([(labels > 0) * 40.0 - 20, torch.logit(heights(labels, 2), eps=1e-6)], 1)

    for number in range(2):
        wrong = perfect.clone()
        wrong[:, number] = wrong[:, number].flip(1)
        assert instance_losses(perfect, labels, 2) < 0.01 < instance_losses(wrong, labels, 2)


def test_a_mask_with_soft_edges_is_no_label_image(tmp_path):
    soft = np.zeros((32, 32), np.uint8)
    soft[8:24, 8:24], soft[7, 8:24], soft[24, 8:24] = 255, 90, 180
    cv2.imwrite(str(tmp_path / "soft.png"), soft)
    gaps = np.zeros((32, 32), np.uint16)
    gaps[2:9, 2:9], gaps[9:20, 2:9], gaps[20:30, 20:30] = 7, 300, 60000
    cv2.imwrite(str(tmp_path / "gaps.png"), gaps)

    assert not numbers_objects(tmp_path / "soft.png")
    assert set(np.unique(read_labels(tmp_path / "soft.png"))) == {0, 1}
    assert numbers_objects(tmp_path / "gaps.png")
    assert set(np.unique(read_labels(tmp_path / "gaps.png"))) == {0, 7, 300, 60000}


@pytest.mark.parametrize(
    ("images", "changes", "reason"),
    [(None, {}, "images"), ("images", {"scenes": ("nuclei",)}, "scenes"), (None, {"scenes": ("sheep",)}, "scenes")],
)
def test_what_to_train_on_is_named_once(cells, images, changes, reason):
    with pytest.raises(ConfigError) as failure:
        train(images and cells / images, None, SegmentTrainConfig(**QUICK, **changes), cells / "run", device="cpu")

    assert failure.value.field.startswith(reason)
    assert not (cells / "run").exists()


def test_reflections_of_an_object_are_objects_of_their_own():
    labels = np.zeros((20, 32), np.int32)
    labels[4:10, 3:9], labels[12:20, 15:25] = 5, 9

    (row,) = cut(np.zeros((20, 32, 3), np.uint8), labels, Cutting(32, instances=True))

    assert int(row["objects"]) == 3  # the second reaches the edge: its reflection continues it
    assert len(np.unique(row["label"][0, 4:10, 3:9])) == 1


def test_packed_weights_have_half_the_bits_their_recipe_and_a_hash(tmp_path):
    train(
        None, None, SegmentTrainConfig(**QUICK, scenes=("round",), scenes_per_epoch=4), tmp_path / "run", device="cpu"
    )

    pack(tmp_path / "run", tmp_path / "half.safetensors")

    one, half = weights_of(tmp_path / "run"), load_file(tmp_path / "half.safetensors")
    about = read_metadata(tmp_path / "half.safetensors")
    assert all(torch.allclose(one[name].double(), half[name].double(), rtol=1e-3, atol=1e-4) for name in one)
    assert half["score.weight"].dtype == torch.float16
    assert (about["contrast"], json.loads(about["recipe"])["scenes"]) == ("stretch", ["round"])
    assert about["sha256"] == digest(half)


def test_the_default_model_is_as_it_was_packed():
    about, tensors = read_metadata(default_weights()), load_file(default_weights())

    assert about["sha256"] == digest(tensors)
    assert default_weights().stat().st_size < 8e6
    assert {"model", "task", "recipe"} <= about.keys()


def test_scenes_of_a_seed_are_drawn_and_every_second_one_is_stretched():
    index = torch.tensor([6, 7], dtype=torch.int32)
    drawn = Drawing(("nuclei",), 9, 64)(index)
    plain = draw(("nuclei",), 9, index, 64, 64)

    assert torch.equal(drawn.labels, plain.labels)
    assert torch.equal(drawn.images[0], plain.images[0])
    assert torch.equal(drawn.images[1:], stretch_batch(plain.images[1:]))
    assert not torch.equal(drawn.images[1], plain.images[1])


def test_a_source_of_scenes_gives_each_number_once():
    source = SceneSource(10, 4, torch.device("cpu"))

    numbers = [int(n) for epoch in range(2) for batch in source.epoch(epoch) for n in batch["index"]]

    assert numbers == list(range(24))
    assert (source.num_batches, source.num_items) == (3, 12)
    assert [batch["index"][0].item() for batch in source.epoch(1, 2)] == [20]
