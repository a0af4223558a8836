"""Several kinds of object in one model: a class table in training, a class of each polygon in prediction."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from brim.errors import DatasetError
from brim.segmentation import ModelLoader
from brim.segmentation.config import FilesConfig, SegmentTrainConfig
from brim.segmentation.objects.instances import kinds_of
from brim.segmentation.objects.tables import CLASS
from brim.segmentation.prediction import predict_files
from brim.segmentation.prediction.scoring import instance_maps
from brim.segmentation.training import train
from brim.segmentation.training.crops import ImagePair, pair_files, with_classes

SIDE = 96


def draw(number: int) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """An image of bright and dim discs, their labels with gaps, and their classes."""
    rng = np.random.default_rng(number)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    image, labels, kinds = np.full((SIDE, SIDE), 20.0), np.zeros((SIDE, SIDE), np.uint16), dict[int, str]()
    for place in range(9):
        top, left = 16 + 32 * (place // 3) + rng.integers(-3, 4), 16 + 32 * (place % 3) + rng.integers(-3, 4)
        inside = (rows - top) ** 2 + (columns - left) ** 2 < rng.uniform(8, 12) ** 2
        bright = rng.random() < 0.5
        image[inside], labels[inside], kinds[3 * place + 2] = 220 if bright else 110, 3 * place + 2, "bright, new"
        kinds[3 * place + 2] = "bright, new" if bright else "dim"
    return (image + rng.normal(0, 4, image.shape)).clip(0, 255).astype(np.uint8), labels, kinds


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Folders of images and of label images, and a class table."""
    folder = tmp_path_factory.mktemp("cells")
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    with (folder / "classes.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "label", "class"])
        for number in range(12):
            image, labels, kinds = draw(number)
            Image.fromarray(image).save(folder / f"images/{number}.png")
            Image.fromarray(labels).save(folder / f"masks/{number}.png")
            table.writerows([f"{number}.png", label, kind] for label, kind in kinds.items())
    return folder


@pytest.fixture(scope="module")
def run(cells, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    config = SegmentTrainConfig(
        model="unet_tiny", size=SIDE, epochs=8, batch_size=1, learning_rate=1e-2, precision="fp32"
    )
    report = train(cells / "images", cells / "masks", config, out, device="cpu", classes=cells / "classes.csv")
    return out, report


def test_training_learns_the_classes(run):
    out, report = run

    assert report.task == "instances"
    assert {name for name in report.to_json() if name.startswith("ap50 ")} == {"ap50 bright, new", "ap50 dim"}
    assert report.scores["ap50 dim"] > 0.7
    assert report.scores["ap50 bright, new"] > 0.7
    assert "bright, new" in (out / "report.html").read_text()


def test_each_polygon_has_its_class_in_every_format(run, tmp_path):
    image, labels, kinds = draw(100)
    Image.fromarray(image).save(tmp_path / "new.png")
    loader = ModelLoader({"unet_tiny": run[0]}, "cpu", None)

    for form in ("geojson", "csv", "coco"):
        predict_files([tmp_path / "new.png"], loader, tmp_path / form, FilesConfig(format=form, batch_size=1))
    found = loader.predict(image, "unet_tiny")

    named = [found.measurements.classes[kind] for kind in found.measurements.kind]
    features = json.loads((tmp_path / "geojson/new.geojson").read_text())["features"]
    assert [feature["properties"]["classification"]["name"] for feature in features] == named
    assert len({tuple(feature["properties"]["classification"]["color"]) for feature in features}) == 2
    assert [row["class"] for row in csv.DictReader((tmp_path / "csv/new.csv").read_text().splitlines())] == named
    coco = json.loads((tmp_path / "coco/annotations.json").read_text())
    assert coco["categories"] == [{"id": 1, "name": "bright, new"}, {"id": 2, "name": "dim"}]
    assert [coco["categories"][one["category_id"] - 1]["name"] for one in coco["annotations"]] == named
    assert found.to_coco()["categories"] == coco["categories"]
    true = [kinds[int(np.bincount(labels[found.labels == number]).argmax())] for number in range(1, len(named) + 1)]
    assert len(named) == 9
    assert np.mean([one == other for one, other in zip(true, named, strict=True)]) > 0.8


def test_other_classes_start_from_the_same_network(run, cells, tmp_path):
    text = (cells / "classes.csv").read_text().replace("dim", "faint").replace("2.png,2,", "2.png,2,other ")
    (tmp_path / "more.csv").write_text(text)
    config = SegmentTrainConfig(model="unet_tiny", size=SIDE, epochs=1, precision="fp32")

    train(
        cells / "images", cells / "masks", config, tmp_path / "run", device="cpu", weights=run[0],
        classes=tmp_path / "more.csv",
    )  # fmt: skip

    found = ModelLoader({"unet_tiny": tmp_path / "run"}, "cpu", None).predict(draw(7)[0], "unet_tiny")
    assert len(found.measurements.classes) > 2
    assert CLASS not in found.measurements.classes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "first line must name the columns image,label,class"),
        ("image,label,class\nnone.png,1,a\n", "line 2: there is no image none.png"),
        ("image,label,class\n0.png,-1,a\n", 'line 2: label "-1"'),
        ("image,label,class\n0.png,1,\n", "names 0 classes"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(cells, tmp_path, text, words):
    (tmp_path / "table.csv").write_text(text)

    with pytest.raises(DatasetError, match=words):
        with_classes(pair_files(cells / "images", cells / "masks"), tmp_path / "table.csv")


def test_a_table_of_one_image_needs_no_image_column(tmp_path):
    (tmp_path / "table.csv").write_text("label,class\n4,b\n5,a\n")

    pairs, classes = with_classes([ImagePair("one.png", tmp_path, tmp_path)], tmp_path / "table.csv")

    assert classes == ("a", "b")
    assert pairs[0].kinds == {4: 2, 5: 1}


def test_maps_are_probabilities_and_those_of_classes_sum_to_one():
    logits = torch.tensor([0.0, 2.0, 1.0, 3.0]).view(1, 4, 1, 1)

    found = instance_maps(logits).flatten().tolist()

    second = 1 / (1 + np.exp(3 - 1))
    assert found == pytest.approx([0.5, 1 / (1 + np.exp(-2)), second, 1 - second])


def test_an_objects_class_is_that_of_most_of_its_probability():
    labels = torch.tensor([[[1, 1, 0, 2]], [[0, 1, 1, 1]]], dtype=torch.int32)
    first = torch.tensor([[[0.9, 0.4, 0.0, 0.1]], [[1.0, 0.2, 0.3, 0.7]]])

    kinds = kinds_of(labels, torch.stack([first, 1 - first], 1), torch.tensor([0, 2, 3]))

    assert kinds.tolist() == [0, 1, 1]
