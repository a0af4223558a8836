"""Slides tile by tile, against the answer on the whole image; discs that touch no other are exact objects."""

import json
import tracemalloc
from contextlib import closing

import cv2
import numpy as np
import pytest
import safetensors.torch
import tifffile
import torch

from brim.errors import ImageError
from brim.segmentation.config import REGISTERED, FilesConfig
from brim.segmentation.images.reading import open_by_part, read_picture
from brim.segmentation.images.stacks import ImageWindow
from brim.segmentation.networks import create_model, default_weights, save_weights
from brim.segmentation.prediction import ModelLoader, predict_files, slide_files
from brim.segmentation.prediction.slide_files import write_slide
from brim.segmentation.prediction.slides import TileLabels, TileObjects, predict_slide


class Array:
    """A slide in memory."""

    def __init__(self, image: np.ndarray) -> None:
        self.image, (self.height, self.width) = image, image.shape[:2]

    def tile(self, window: ImageWindow) -> np.ndarray:
        return np.ascontiguousarray(self.image[window.top : window.bottom, window.left : window.right])


def exact(tiles):
    """Every bright 4-connected region is an object."""
    for tile in tiles:
        yield TileLabels(cv2.connectedComponents((tile[..., 0] > 127).astype(np.uint8), connectivity=4)[1])


def run(image, tmp_path, core, halo, segment=exact):
    written: list[TileObjects] = []
    labels = predict_slide(segment, Array(image), written.append, tmp_path, core=core, halo=halo)
    whole = labels.read(ImageWindow(0, 0, *image.shape[:2]))
    labels.close()
    return written, whole, labels


def same_partition(one, two):
    """Whether two label images have the same objects, whatever their numbers."""
    pairs = np.unique(np.stack([one.ravel(), two.ravel()]), axis=1)
    return pairs.shape[1] == len(np.unique(one)) == len(np.unique(two))


def discs(side, num, most, seed, least=2):
    """Discs that do not touch, some at the borders."""
    rng, image, taken = np.random.default_rng(seed), np.zeros((side, side, 3), np.uint8), np.zeros((side, side), bool)
    for _ in range(num):
        radius, (y, x) = int(rng.integers(least, most)), rng.integers(0, side, 2)
        place = np.zeros((side, side), np.uint8)
        cv2.circle(place, (int(x), int(y)), radius + 2, 1, -1)
        if not (taken & (place > 0)).any():
            taken |= place > 0
            cv2.circle(image, (int(x), int(y)), radius, (200, 200, 200), -1)
    return image


@pytest.mark.parametrize(("most", "halo"), [(8, 32), (14, 24), (40, 24), (120, 16)])
@pytest.mark.parametrize("core", [64, 100, 256])
def test_tiles_give_the_objects_of_the_whole_image(most, halo, core, tmp_path):
    image = discs(430, 150, most, most + core)
    truth = next(exact([image])).labels

    written, whole, labels = run(image, tmp_path, core, halo)

    assert same_partition(whole, truth)
    assert labels.num_objects == truth.max() == sum(len(found.objects.table) for found in written)
    areas = np.concatenate([found.objects.table[:, 0].numpy() for found in written])
    assert sorted(areas) == sorted(np.bincount(truth.ravel())[1:])
    numbers = [found.first + k for found in written for k in range(len(found.objects.table))]
    assert sorted(numbers) == sorted(set(whole.ravel().tolist()) - {0})


def test_shapes_larger_than_a_tile_are_joined_whole(tmp_path):
    image = np.zeros((500, 600, 3), np.uint8)
    cv2.circle(image, (300, 250), 200, (255,) * 3, 9)  # a ring through all tiles
    cv2.circle(image, (300, 250), 20, (255,) * 3, -1)
    cv2.line(image, (0, 490), (599, 480), (255,) * 3, 5)
    image[:, 5:9] = 255
    image[40:400, 580:585] = image[100:400, 520:525] = image[395:400, 520:585] = 255  # two parts that meet below
    image[200:205, 510:525] = 255
    truth = next(exact([image])).labels

    written, whole, labels = run(image, tmp_path, 64, 16)

    assert same_partition(whole, truth)
    assert labels.num_objects == truth.max()
    assert sorted(found.objects.table[0, 0].item() for found in written) == sorted(np.bincount(truth.ravel())[1:])


def box(shape, rows, columns, number=1):
    labels = np.zeros(shape, np.int32)
    labels[slice(*rows), slice(*columns)] = number
    return labels


def given(*found):
    """A segmenter that finds these labels, tile by tile, or labels with confidences."""

    def segment(tiles):
        for _, one in zip(tiles, found, strict=True):
            yield one if isinstance(one, TileLabels) else TileLabels(one)

    return segment


@pytest.mark.parametrize(("first", "second"), [((90, 105), (86, 121)), ((80, 115), (98, 113))])
def test_an_object_that_one_of_two_tiles_sees_smaller_is_one_object(first, second, tmp_path):
    one = box((100, 140), (40, 60), first)
    other = box((100, 140), (40, 60), [side - 60 for side in second])

    written, _, labels = run(np.zeros((100, 200, 3), np.uint8), tmp_path, 100, 40, given(one, other))

    assert labels.num_objects == 1
    assert [found.objects.table[:, 0].tolist() for found in written] == [[20 * (first[1] - first[0])]]


def test_a_neighbour_that_two_tiles_see_overlap_is_trimmed(tmp_path):
    one, other = box((100, 140), (40, 60), (80, 100)), box((100, 140), (40, 60), (96 - 60, 126 - 60))

    written, whole, labels = run(np.zeros((100, 200, 3), np.uint8), tmp_path, 100, 40, given(one, other))

    assert labels.num_objects == 2
    assert [found.objects.table[0, 0].item() for found in written] == [20 * 20, 20 * 26]
    assert np.bincount(whole.ravel())[1:].tolist() == [20 * 20, 20 * 26]


def test_a_small_object_inside_a_large_one_does_not_hide_it(tmp_path):
    """The large one lies in columns 92 to 340, over three tiles."""
    small, large = box((100, 140), (45, 55), (95, 105)), box((100, 180), (10, 90), (92 - 60, 180))
    rest = box((100, 180), (10, 90), (0, 180)), box((100, 140), (10, 90), (0, 60))

    written, _, _ = run(np.zeros((100, 400, 3), np.uint8), tmp_path, 100, 40, given(small, large, *rest))

    assert [found.objects.table[0, 0].item() for found in written] == [10 * 10, 80 * 248 - 10 * 10]


def test_the_confidence_of_a_joined_object_is_the_mean_over_its_pixels(tmp_path):
    """90, 100, 100 and 10 columns of it are new to the four tiles."""
    columns, widths = [(30, 120), (0, 140), (0, 140), (0, 50)], [120, 140, 140, 120]
    found = [
        TileLabels(box((60, width), (20, 40), at), np.array([confidence]))
        for width, at, confidence in zip(widths, columns, (0.2, 0.4, 0.6, 0.8), strict=True)
    ]

    (joined,), _, _ = run(np.zeros((60, 400, 3), np.uint8), tmp_path, 100, 20, given(*found))

    assert joined.objects.table[0, 0] == 20 * 300
    assert joined.confidence.tolist() == pytest.approx([(90 * 0.2 + 100 * 0.4 + 100 * 0.6 + 10 * 0.8) / 300])


def test_each_object_keeps_its_own_confidence(tmp_path):
    labels = box((60, 60), (5, 15), (5, 15), 5) + box((60, 60), (30, 45), (30, 45), 3)
    found = TileLabels(labels, np.array([0.1, 0.2, 0.3, 0.4, 0.5]))

    (written,), _, _ = run(np.zeros((60, 60, 3), np.uint8), tmp_path, 100, 20, given(found))

    assert written.objects.table[:, 0].tolist() == [100, 225]
    assert written.confidence.tolist() == [0.5, 0.3]


def test_an_outline_at_a_lower_resolution_has_the_sizes_of_the_slide(tmp_path, monkeypatch):
    monkeypatch.setattr("brim.segmentation.prediction.slides._OUTLINED_PIXELS", 1000)
    image = box((60, 400), (20, 40), (28, 328), 200).astype(np.uint8)

    _, file = result_of(write_file(tmp_path / "slide.tif", image), tmp_path, "geojson", monkeypatch)

    (feature,) = json.loads(file.read_text())["features"]
    values, ring = feature["properties"]["measurements"], np.array(feature["geometry"]["coordinates"][0])
    assert (values["area_px"], values["x_px"], values["y_px"]) == (20 * 300, 178, 30)
    assert (ring.min(0).tolist(), ring.max(0).tolist()) == ([28, 20], [328, 40])
    assert values["perimeter_px"] == pytest.approx(2 * (20 + 300), rel=0.08)
    assert values["mean_intensity"] == 200


def test_an_image_of_nothing_has_no_objects(tmp_path):
    written, whole, labels = run(np.zeros((300, 300, 3), np.uint8), tmp_path, 128, 16)

    assert (written, labels.num_objects, whole.any()) == ([], 0, False)


# Files


def write_file(path, image, **options):
    tifffile.imwrite(path, image, photometric="minisblack", tile=(64, 64), **options)
    return path


def result_of(path, tmp_path, format, monkeypatch):
    monkeypatch.setattr(slide_files.predict_slide, "__kwdefaults__", {"core": 100, "halo": 24, "progress": None})
    num = write_slide(path, tmp_path / "result", FilesConfig(format=format), lambda slide: exact)
    return num, tmp_path / "result"


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
def test_a_file_becomes_geojson_labels_and_a_table_of_the_same_objects(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(slide_files, "CORE", 50)  # rows of which intensities are read together
    image = discs(430, 150, 40, 5)[..., 0]
    full = {"uint8": 255, "uint16": 4095, "float32": 1}[kind]
    stored = (image / 255 * full).astype(kind)
    path = write_file(tmp_path / "slide.tif", stored, resolution=(20000, 20000), resolutionunit="CENTIMETER")
    truth = next(exact([np.dstack([image] * 3)])).labels

    num, file = result_of(path, tmp_path, "labels", monkeypatch)
    labels = tifffile.imread(file)
    assert (num, labels.dtype) == (truth.max(), np.uint16)
    assert read_picture(file).pixel_um == pytest.approx(0.5)
    assert same_partition(labels, truth)

    assert result_of(path, tmp_path, "geojson", monkeypatch)[0] == num
    features = json.loads(file.read_text())["features"]
    assert len(features) == num == len({feature["id"] for feature in features})
    for feature in features:
        ring = np.array(feature["geometry"]["coordinates"][0], np.int32)
        measured = feature["properties"]["measurements"]
        here = truth == truth[int(measured["y_px"]), int(measured["x_px"])]
        assert measured["area_px"] == here.sum()
        assert measured["mean_intensity"] == pytest.approx(stored[here].mean(), abs=0.006)
        rows, columns = np.nonzero(here)
        assert (ring.min(0) == (columns.min(), rows.min())).all()
        assert (ring.max(0) == (columns.max() + 1, rows.max() + 1)).all()
        assert measured["area_um2"] == pytest.approx(measured["area_px"] / 4)

    assert result_of(path, tmp_path, "csv", monkeypatch)[0] == num
    rows = file.read_text().splitlines()
    assert rows[0].startswith("id,class,area_px,")
    assert sorted(int(row.split(",")[0]) for row in rows[1:]) == sorted(feature["id"] for feature in features)
    assert {path.name for path in tmp_path.iterdir()} == {"slide.tif", "result"}


def test_the_size_of_objects_is_that_of_the_median_one(tmp_path):
    image, areas = np.zeros((300, 300), np.uint8), []
    for number, radius in enumerate((5, 9, 9, 9, 40)):
        disc = np.zeros_like(image)
        cv2.circle(disc, (30 + 35 * number + 60 * (number == 4), 60 + 100 * (number == 4)), radius, 255, -1)
        image, areas = image | disc, [*areas, (disc > 0).sum()]
    with closing(open_by_part(write_file(tmp_path / "slide.tif", image))) as stack:
        slide = slide_files.Slide(stack, FilesConfig(), "slide")

        found = slide_files._diameter(exact, slide, slide.samples())

    assert found == pytest.approx(2 * np.sqrt(areas[1] / np.pi))


@pytest.mark.parametrize("harm", ["cut", "damaged", "nan"])
def test_a_broken_slide_is_a_sentence_and_leaves_nothing(harm, tmp_path, monkeypatch):
    image = discs(430, 50, 40, 5)[..., 0]
    if harm == "nan":
        image = np.where(image > 0, np.float32(np.nan), np.float32(0.5))
    path = write_file(tmp_path / "slide.tif", image, compression="deflate")
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        start = file.pages[0].dataoffsets[30]
    if harm == "damaged":
        data[start + 8 : start + 12] = b"\xff\0\xff\0"
    path.write_bytes(data[: start + 5] if harm == "cut" else data)

    with pytest.raises(ImageError, match=r"slide.tif: .*(truncated|corrupt|NaN)"):
        result_of(path, tmp_path, "geojson", monkeypatch)

    assert list(tmp_path.iterdir()) == [path]


def test_a_slide_takes_little_memory_and_every_square_is_found_once(tmp_path, monkeypatch):
    monkeypatch.setattr(slide_files.predict_slide, "__kwdefaults__", {"core": 400, "halo": 40, "progress": None})
    image = np.tile(box((80, 80), (20, 60), (20, 60), 255).astype(np.uint8), (30, 30))
    path, result = write_file(tmp_path / "slide.tif", image, compression="deflate"), tmp_path / "result"
    tracemalloc.start()

    num = write_slide(path, result, FilesConfig(format="labels"), lambda slide: exact)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    areas = np.bincount(tifffile.imread(result).ravel())[1:]
    assert (num, areas.tolist()) == (900, [40 * 40] * 900)
    assert peak < 3 * image.size  # its labels alone would take four times as much


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of a small network, untrained."""
    torch.manual_seed(0)
    model = create_model("unet_tiny")
    safetensors.torch.save_file(model.state_dict(), path := tmp_path_factory.mktemp("weights") / "w.safetensors")
    return path


def test_large_files_are_predicted_by_tile_beside_others(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(slide_files, "SLIDE_PIXELS", 300 * 300)
    monkeypatch.setattr(slide_files.predict_slide, "__kwdefaults__", {"core": 200, "halo": 32, "progress": None})
    images = tmp_path / "images"
    images.mkdir()
    picture = discs(430, 60, 40, 5)
    cv2.imwrite(str(images / "small.png"), picture[:100, :100])
    write_file(images / "slide.tif", picture[..., 0], compression="deflate")
    (images / "cut.tif").write_bytes((images / "slide.tif").read_bytes()[:-2000])
    loader, seen = ModelLoader({"unet_tiny": weights}, "cpu", None), []

    report = predict_files(
        [images], loader, tmp_path / "out", FilesConfig(format="geojson", batch_size=1), progress=seen.append
    )

    assert list(report.failures) == [str(images / "cut.tif")]
    assert "truncated" in report.failures[str(images / "cut.tif")]
    assert (report.written, report.report.images, report.report.failed, report.stopped) == (2, 3, 1, False)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"slide.geojson", "small.geojson"}
    assert max(progress.share for progress in seen) == 1
    assert {progress.total for progress in seen} == {3}

    stopped = predict_files([images], loader, tmp_path / "no", FilesConfig(batch_size=1), stop=lambda: True)
    assert stopped.stopped
    assert not (tmp_path / "no/slide.geojson").exists()  # the small image may have been written before

    other = predict_files([images / "slide.tif"], loader, tmp_path / "mask", FilesConfig(format="mask", batch_size=1))
    assert other.failures == {}  # small enough to be predicted whole


class Bright(torch.nn.Module):
    """Sees what is brighter than the middle of the scale."""

    def __init__(self):
        super().__init__()
        self.middle = torch.nn.Parameter(torch.tensor((0.5 - 0.485) / 0.229))

    def forward(self, x):
        return 20 * (x[:, :1] - self.middle)


def test_all_tiles_of_a_slide_are_shown_with_one_contrast(tmp_path, monkeypatch):
    monkeypatch.setitem(REGISTERED, "bright", Bright)
    save_weights(Bright(), tmp_path / "bright.safetensors", {"contrast": "stretch", "scale": "1"})
    monkeypatch.setattr(slide_files, "SLIDE_PIXELS", 1000)
    monkeypatch.setattr(slide_files.predict_slide, "__kwdefaults__", {"core": 150, "halo": 16, "progress": None})
    faint, clear = discs(300, 40, 14, 3, least=8)[..., 0] // 8, discs(300, 40, 14, 4, least=8)[..., 0]
    path = write_file(tmp_path / "slide.tif", np.hstack([faint, clear]))
    loader = ModelLoader({"bright": tmp_path / "bright.safetensors"}, "cpu", None)

    predict_files([path], loader, tmp_path / "out", FilesConfig(format="labels", batch_size=1))

    labels = tifffile.imread(tmp_path / "out/slide_labels.tif")
    assert np.array_equal(labels > 0, np.hstack([faint, clear]) > 100)


def test_the_default_model_finds_by_tile_what_it_finds_in_the_whole_image(tmp_path, monkeypatch):
    picture = cv2.GaussianBlur(discs(330, 90, 13, 7, least=8)[..., 0], (0, 0), 1.2) * 0.8
    noise = np.random.default_rng(0).normal(20, 4, picture.shape)
    path = write_file(tmp_path / "slide.tif", ((picture + noise).clip(0, 255) * 16).astype(np.uint16))
    loader = ModelLoader({"cells": default_weights()}, "cpu", None)
    config = FilesConfig(model="cells", format="labels", batch_size=1, diameter=20.0)

    predict_files([path], loader, tmp_path / "whole", config)
    monkeypatch.setattr(slide_files, "SLIDE_PIXELS", 1000)
    monkeypatch.setattr(slide_files.predict_slide, "__kwdefaults__", {"core": 150, "halo": 60, "progress": None})
    predict_files([path], loader, tmp_path / "tiles", config)

    whole, tiles = (tifffile.imread(tmp_path / name / "slide_labels.tif") for name in ("whole", "tiles"))
    assert whole.max() > 30
    assert len(np.unique(tiles)) == len(np.unique(whole))
    for number in range(1, int(whole.max()) + 1):
        own = whole == number
        other = tiles == np.bincount(tiles[own]).argmax()
        assert (own & other).sum() > 0.8 * (own | other).sum()
