"""Images through the default model: one polygon for each cell, its measurements, formats that other programs read."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import tifffile
import torch
import zarr
from entries import sizes_file
from PIL import Image
from scipy.ndimage import gaussian_filter
from shapely.geometry import shape

from brim.segmentation import ModelLoader
from brim.segmentation.config import FilesConfig, PredictConfig
from brim.segmentation.networks import default_weights
from brim.segmentation.networks.network import ModelTraits
from brim.segmentation.objects.scores import ObjectScores
from brim.segmentation.prediction import predict_files
from brim.segmentation.prediction.instances import InstanceTracer, Size
from brim.segmentation.prediction.patches import ImageFrame
from brim.segmentation.scenes.drawing import draw
from real_data import real_files

SIDE = 224


@pytest.fixture(scope="module")
def scene():
    """An image (H, W, 3) uint8 of nuclei, and its labels."""
    drawn = draw(("nuclei",), 5, torch.arange(1, 2, dtype=torch.int32), SIDE, SIDE)
    return drawn.images[0].permute(1, 2, 0).contiguous().numpy(), drawn.labels[0].numpy()


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """Its batch sizes are known: nothing is tuned here."""
    sizes = tmp_path_factory.mktemp("sizes") / "batch_sizes.json"
    return ModelLoader({"cells": default_weights()}, "cpu", sizes_file(sizes, "cells", layout="channels_last"))


@pytest.fixture(scope="module")
def prediction(loader, scene):
    return loader.predict(scene[0], "cells")


def score(true, predicted) -> dict[str, float]:
    scores = ObjectScores()
    scores.add(true, predicted)
    return scores.as_dict()


def test_real_nuclei_are_found_one_by_one(loader):
    """Two hundred nuclei of a real field: AP50 counted by hand, .82 on average over fields of this kind."""
    (image, *_), (mask, *_) = (real_files(f"cells/nuclei_520/{folder}/*.png") for folder in ("images", "masks"))
    true = np.asarray(Image.open(mask)).astype(np.int64)

    predicted = np.asarray(loader.predict(image.read_bytes(), "cells").labels, np.int64)

    both = np.bincount((true * (predicted.max() + 1) + predicted).ravel()).astype(float)
    both = np.pad(both, (0, (true.max() + 1) * (predicted.max() + 1) - len(both))).reshape(true.max() + 1, -1)
    iou = both / (both.sum(0) + both.sum(1, keepdims=True) - both)
    hits = (iou[1:, 1:] > 0.5).sum()  # each object has at most one
    assert hits / (true.max() + predicted.max() - hits) > 0.75


def test_every_cell_has_its_polygon(prediction, scene):
    found = score(scene[1], prediction.labels)

    assert found["ap50"] > 0.7
    assert len(prediction.polygons) == prediction.labels.max() == len(prediction.measurements.values)
    for number, polygon in enumerate(prediction.polygons, 1):
        left, top = polygon.points.min(0)
        right, bottom = polygon.points.max(0)
        assert (prediction.labels[top:bottom, left:right] == number).sum() == polygon.area
    assert np.array_equal(prediction.mask > 0, prediction.labels > 0)


@pytest.mark.parametrize(("scale", "least"), [(0.4, 0.72), (4, 0.8)])
def test_cells_of_other_sizes_are_found_at_their_scale(loader, scale, least):
    """At the image's own scale it would be 0.61 and 0.54."""
    drawn = draw(("nuclei",), 5, torch.tensor([6], dtype=torch.int32), SIDE, SIDE)
    side = round(scale * SIDE)
    image = Image.fromarray(drawn.images[0].permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.BOX)

    found = loader.predict(np.asarray(image), "cells")

    assert found.labels.shape == (side, side)
    back = np.asarray(Image.fromarray(found.labels.astype(np.int32)).resize((SIDE, SIDE), Image.Resampling.NEAREST))
    assert score(drawn.labels[0].numpy(), back)["f1"] > least


def test_a_given_diameter_is_used(loader, scene, tmp_path):
    large = Image.fromarray(scene[0]).resize((2 * SIDE, 2 * SIDE))
    large.save(tmp_path / "large.png")

    predict_files(
        [tmp_path / "large.png"], loader, tmp_path / "out",
        FilesConfig(model="cells", batch_size=1, diameter=48, format="labels"),
    )  # fmt: skip

    labels = tifffile.imread(tmp_path / "out/large_labels.tif")
    assert score(scene[1], labels[::2, ::2])["ap50"] > 0.6


def test_small_cells_are_left_out(loader, scene):
    every, some = (
        next(loader.stream([scene[0]], "cells", FilesConfig(batch_size=1, min_area=area))) for area in (0, 300)
    )

    areas = [polygon.area for polygon in some.polygons]
    assert min(areas) >= 300
    assert 0 < len(areas) < len(every.polygons)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((1, 1), np.uint8), np.zeros((64, 64), np.uint8), np.full((40, 300, 3), 255, np.uint8),
        np.full((33, 33), 9000, np.uint16),
    ],
)  # fmt: skip
def test_an_image_of_one_value_has_no_cells(loader, image):
    found = loader.predict(image, "cells")

    assert found.polygons == ()
    assert found.labels.shape == image.shape[:2]


# Files


@pytest.fixture(scope="module")
def written(loader, scene, tmp_path_factory):
    """A function that writes the scene in a format and returns the folder."""
    folder = tmp_path_factory.mktemp("formats")
    Image.fromarray(scene[0]).save(folder / "scene.png")

    def write(form):
        out = folder / form
        predict_files([folder / "scene.png"], loader, out, FilesConfig(model="cells", batch_size=1, format=form))
        return out

    return write


def test_geojson_numbers_and_measures_cells(written, prediction, scene):
    features = json.loads((written("geojson") / "scene.geojson").read_text())["features"]

    assert [feature["id"] for feature in features] == list(range(1, len(prediction.polygons) + 1))
    for feature in features:
        polygon, values = shape(feature["geometry"]), feature["properties"]["measurements"]
        inside = prediction.labels == feature["id"]
        assert polygon.is_valid
        assert polygon.area == values["area_px"] == inside.sum()
        means = [values[f"mean_{colour}"] for colour in ("red", "green", "blue")]
        assert means == pytest.approx(scene[0][inside].mean(0).tolist(), abs=0.006)
        assert 0.75 * polygon.length < values["perimeter_px"] < polygon.length
        assert feature["properties"]["class"] == "cell"


def test_a_group_of_ome_zarr_holds_the_labels(written, prediction):
    group = zarr.open_group(written("ome-zarr") / "scene.ome.zarr", mode="r", zarr_format=2)

    assert np.array_equal(group["labels/cells/0"][:], prediction.labels)
    assert group["labels"].attrs["labels"] == ["cells"]
    assert group["labels/cells"].attrs["multiscales"][0]["version"] == "0.4"
    # readers that are given the folder itself, such as ome-zarr-py, look for an image there
    (level,) = group.attrs["multiscales"][0]["datasets"]
    assert np.array_equal(group[level["path"]][:], prediction.labels)


def test_intensities_are_those_of_the_file_in_every_channel(loader, scene, tmp_path):
    dapi = scene[0][..., 2].astype(np.uint16) * 200
    planes = np.stack([dapi, np.random.default_rng(0).integers(0, 4000, dapi.shape, np.uint16)])
    about = {"axes": "CYX", "Channel": {"Name": ["DAPI", 'a "b", c']}, "PhysicalSizeX": 500, "PhysicalSizeXUnit": "nm"}
    tifffile.imwrite(tmp_path / "two.ome.tif", planes, metadata=about, photometric="minisblack")
    config = FilesConfig(model="cells", batch_size=1, format="geojson", channels=("DAPI",))
    predict_files([tmp_path / "two.ome.tif"], loader, tmp_path / "out", config)
    labels = loader.predict(dapi, "cells").labels

    features = json.loads((tmp_path / "out" / "two.ome.geojson").read_text())["features"]
    assert len(features) == labels.max()
    for feature in features:
        values = feature["properties"]["measurements"]
        means = planes[:, labels == feature["id"]].mean(1)
        assert [values["mean_DAPI"], values["mean_a__b___c"]] == pytest.approx(means, abs=0.006)
        assert values["mean_intensity"] == values["mean_DAPI"]
        assert values["area_um2"] == values["area_px"] / 4
        assert values["perimeter_um"] == pytest.approx(values["perimeter_px"] / 2, abs=0.003)


# Images unlike the scenes


class Dark:
    """A network that sees dark squares on a bright ground blurred, and bright squares as sharply as it is told."""

    def __init__(self, blur):
        self.blur, self.device, self.traits = blur, torch.device("cpu"), ModelTraits(task="instances", scale=None)

    def __call__(self, images):
        values = images[:, :1].float() / 255
        is_bright = values.mean() > 0.5
        blur = 9 if is_bright else self.blur
        shown = torch.nn.functional.avg_pool2d(1 - values if is_bright else values, blur, 1, blur // 2)
        return torch.logit(shown.clamp(0.01, 0.99)).repeat(1, 2, 1, 1)


@pytest.mark.parametrize(("blur", "is_inverted"), [(1, True), (9, False)])
def test_a_bright_image_is_shown_inverted_if_that_is_clearer(blur, is_inverted):
    squares = np.kron(np.eye(4, dtype=bool)[:, [1, 0, 3, 2]], np.pad(np.ones((20, 20), bool), 6))
    pixels = np.where(squares, 0, 255).astype(np.uint8)[..., None].repeat(3, 2)
    frame = ImageFrame(0, "image", 128, 128, pixels=pixels)
    tracer = InstanceTracer(Dark(blur), nullcontext(), PredictConfig(), lambda: 1)

    maps = tracer._rescaled(frame, Size(20.0, 0.95, 2.5))

    assert (maps is not None) == is_inverted
    assert not is_inverted or np.array_equal(maps[0].numpy() > 0.9, squares)
    frame.pixels = 255 - pixels  # a dark ground is never inverted
    assert tracer._rescaled(frame, Size(20.0, 0.95, 2.5)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda image: np.dstack([0 * image, 0 * image, image]),  # one stain, in blue
        lambda image: image.astype(np.uint16) * 12 + 32_768,
        lambda image: image.astype(np.float32) * 900 - 20_000,
    ],
    ids=["blue", "on an offset", "any floats"],
)
def test_values_and_colours_do_not_matter(loader, scene, change):
    grey = scene[0].mean(2).round().astype(np.uint8)

    found, usual = loader.predict(change(grey), "cells"), loader.predict(grey, "cells")

    assert score(usual.labels, found.labels)["ap50"] > 0.9


def test_blurred_noisy_and_inverted_cells_are_found(loader):
    rows, columns = np.mgrid[:192, :192]
    image = np.full(rows.shape, 20.0)
    for number, (top, left) in enumerate((20 + 38 * row, 20 + 38 * column) for row in range(5) for column in range(5)):
        radius = 11 + number % 4
        image[(rows - top) ** 2 + (columns - left) ** 2 < radius**2] = 120 + 15 * (number % 5)
    rng = np.random.default_rng(0)
    cases = {
        "blurred": gaussian_filter(image, 3) + rng.normal(0, 1, image.shape),
        "noisy": image + rng.normal(0, 30, image.shape),
        "inverted": 255 - image + rng.normal(0, 2, image.shape),
    }

    counts = {
        name: len(loader.predict(case.clip(0, 255).astype(np.uint8), "cells").polygons) for name, case in cases.items()
    }

    assert all(23 <= count <= 27 for count in counts.values()), counts
