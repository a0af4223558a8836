"""The plugin for napari, without a window: its manifest, its readers on written results, its widget's function."""

from importlib import import_module, resources

import numpy as np
import pytest
import torch
import yaml

from brim.errors import ImageError
from brim.segmentation import ModelLoader
from brim.segmentation.config import FilesConfig, PredictConfig
from brim.segmentation.images.writing import Writer
from brim.segmentation.napari import get_reader, segment_cells
from brim.segmentation.networks import default_weights
from brim.segmentation.scenes.drawing import draw


@pytest.fixture(scope="module")
def image():
    return draw(("nuclei",), 5, torch.arange(1, 2, dtype=torch.int32), 160, 160).images[0, 0].numpy()


@pytest.fixture(scope="module")
def prediction(image):
    (found,) = ModelLoader({"cells": default_weights()}, "cpu", None).stream(
        [image], "cells", FilesConfig(batch_size=1)
    )
    return found


def test_the_manifest_names_functions_that_exist():
    manifest = yaml.safe_load((resources.files("brim.segmentation") / "napari.yaml").read_text())

    assert (manifest["name"], manifest["schema_version"]) == ("brim", "0.2.1")
    commands = {command["id"]: command["python_name"] for command in manifest["contributions"]["commands"]}
    for place in commands.values():
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name))
    contributed = [each["command"] for kind in ("readers", "widgets") for each in manifest["contributions"][kind]]
    assert contributed == list(commands)


def test_written_results_are_opened_as_layers(prediction, tmp_path):
    for form in ("geojson", "labels", "ome-zarr"):
        with Writer(tmp_path, form, [prediction.name]) as writer:
            writer.write(prediction)

    (outlines, options, kind), *_ = get_reader(str(tmp_path / "image 0.geojson"))(str(tmp_path / "image 0.geojson"))
    assert (kind, options["shape_type"], len(outlines)) == ("shapes", "polygon", len(prediction.polygons))
    assert len(outlines) > 3
    np.testing.assert_array_equal(outlines[0], prediction.polygons[0].points[::-1, ::-1] - 0.5)
    assert options["features"]["area_px"] == [polygon.area for polygon in prediction.polygons]
    for name in ("image 0_labels.tif", "image 0.ome.zarr"):
        ((labels, _, kind),) = get_reader([str(tmp_path / name)])([str(tmp_path / name)])
        assert kind == "labels"
        np.testing.assert_array_equal(labels, prediction.labels)


def test_other_files_are_left_to_other_plugins(tmp_path):
    assert get_reader("cells.png") is None
    assert get_reader(str(tmp_path / "other.ome.zarr")) is None
    (tmp_path / "map.geojson").write_text('{"type": "Point"}')
    with pytest.raises(ImageError, match="not GeoJSON with the polygons"):
        get_reader(str(tmp_path / "map.geojson"))(str(tmp_path / "map.geojson"))


def test_the_widget_labels_cells(image, prediction):
    np.testing.assert_array_equal(segment_cells(image), prediction.labels)
    floats = segment_cells(np.where(image > 250, np.nan, image / 255).astype(np.float32))
    assert floats.shape == image.shape


def test_the_settings_of_the_widget_are_used(image):
    loader = ModelLoader({"cells": default_weights()}, "cpu", None)
    config = PredictConfig(batch_size=1, diameter=45.0, threshold=0.7, min_area=90)
    (wanted,) = loader.stream([image], "cells", config)

    np.testing.assert_array_equal(segment_cells(image, 45.0, 0.7, 90), wanted.labels)
