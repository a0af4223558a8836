"""Files read back by readers that are not ours: json and shapely, pycocotools, roifile, Pillow."""

import contextlib
import io
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import roifile
import shapely
import tifffile
import zarr
from PIL import Image
from pycocotools.coco import COCO

from brim.errors import ConfigError, ImageError, StorageError
from brim.segmentation.config import FORMATS
from brim.segmentation.images.writing import Writer, outlined, output_stems, overlay
from brim.segmentation.objects import (
    Polygon,
    Prediction,
    csv_text,
    fill,
    geojson,
    geojson_of,
    roi_bytes,
    to_measurements,
    to_polygons,
)
from brim.segmentation.objects.label_files import label_tiff, zarr_files
from brim.segmentation.objects.rings import find_rings, trace

HEIGHT, WIDTH = 40, 56


def cells(seed: int = 0) -> np.ndarray:
    """Blobs, some with holes, some at the border, some touching by a corner."""
    rng, y, x = np.random.default_rng(seed), *np.mgrid[:HEIGHT, :WIDTH]
    mask = rng.random((HEIGHT, WIDTH)) < 0.02
    for _ in range(6):
        distance = np.hypot(y - rng.integers(HEIGHT), x - rng.integers(WIDTH))
        mask = (mask | (distance < 9)) & ~(distance < 4)
    mask[:, -1] = mask[0] = True
    return mask


def predict(name: str, seed: int = 0) -> Prediction:
    mask = cells(seed)
    probability = np.random.default_rng(seed).random(mask.shape, np.float32)
    return Prediction(name, HEIGHT, WIDTH, tuple(trace(mask, probability)))


def write(out: Path, form: str, *predictions: Prediction) -> list[Path | None]:
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    with Writer(out, form, [p.name for p in predictions]) as writer:
        return [writer.write(prediction, image) for prediction in predictions]


# Each format


@pytest.mark.parametrize("scale", [1, 37, 40_000])
@pytest.mark.parametrize("num", [0, 1, None])
def test_geojson_is_what_json_writes(num, scale):
    found = [
        Polygon(p.points * scale, tuple(hole[::-1] * scale for hole in p.holes), p.area, p.confidence)  # either way
        for p in predict("a").polygons[:num]
    ]  # fmt: skip

    text = geojson(found).decode()

    assert text == json.dumps(json.loads(text), separators=(",", ":"))
    features = json.loads(text)["features"]
    assert len(features) == len(found)
    for feature, polygon in zip(features, found, strict=True):
        rings = feature["geometry"]["coordinates"]
        for ring, points in zip(rings, (polygon.points, *polygon.holes), strict=True):
            assert ring[0] == ring[-1]
            assert ring[:-1] in (points.tolist(), points[::-1].tolist())
        shape = shapely.geometry.shape(feature["geometry"])
        assert shape.exterior.is_ccw
        assert not any(hole.is_ccw for hole in shape.interiors)
        assert shape.is_valid
        assert shape.equals(shapely.Polygon(polygon.points, polygon.holes))
        assert feature["properties"] == {
            "objectType": "annotation", "classification": {"name": "object", "color": [255, 200, 0]},
            "measurements": {"area_px": polygon.area, "confidence": round(polygon.confidence, 6)},
        }  # fmt: skip


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_measurements_are_written_as_python_formats_them_with_their_units():
    rng = np.random.default_rng(0)
    table = np.abs(rng.normal(0, 10.0 ** rng.integers(-3, 6, (2000, 9))))
    table[:, 0] = rng.integers(1, 10**6, 2000)
    area, x, y, perimeter, eccentricity, confidence, *means = table.T

    header, *rows = csv_text(to_measurements(table, 0.5), first_number=7).decode().splitlines()

    expected = {
        "id": np.arange(7, 2007), "area_px": area, "x_px": x, "y_px": y, "perimeter_px": perimeter,
        "eccentricity": eccentricity, "confidence": confidence, "area_um2": area / 4, "perimeter_um": perimeter / 2,
        "mean_red": means[0], "mean_green": means[1], "mean_blue": means[2],
    }  # fmt: skip
    found = {name: column for name, *column in zip(header.split(","), *(row.split(",") for row in rows), strict=True)}
    assert set(found) == {*expected, "class"}
    assert set(found.pop("class")) == {"cell"}
    for name, values in expected.items():
        decimals = {"id": 0, "area_px": 0, "confidence": 4, "eccentricity": 4, "area_um2": 4, "perimeter_um": 4}
        assert found[name] == [f"{value:.{decimals.get(name, 2)}f}" for value in values.tolist()], name


@pytest.mark.parametrize("detect_holes", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_rings_are_written_as_their_polygons_would_be(detect_holes, share):
    rng = np.random.default_rng(3)
    mask, probability = rng.random((60, 70)) < share, rng.random((60, 70), np.float32)
    (rings,) = find_rings([mask], [probability], detect_holes=detect_holes)

    assert geojson_of(rings) == geojson(to_polygons(rings))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools' own
def test_coco_is_read_back_pixel_by_pixel(tmp_path):
    predictions = [predict("in/a.png", 1), predict("in/b/c.png", 2)]

    write(tmp_path, "coco", *predictions)

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(tmp_path / "annotations.json")
    assert [coco.imgs[i]["file_name"] for i in sorted(coco.imgs)] == ["a.png", "b/c.png"]
    assert sorted(coco.anns) == list(range(1, len(coco.anns) + 1))
    for number, prediction in enumerate(predictions, 1):
        found = coco.imgToAnns[number]
        for annotation, polygon in zip(found, prediction.polygons, strict=True):
            np.testing.assert_array_equal(coco.annToMask(annotation), fill([polygon], HEIGHT, WIDTH))
            assert annotation["area"] == polygon.area
            assert annotation["score"] == pytest.approx(polygon.confidence, abs=1e-6)
            assert annotation["iscrowd"] == 0
            x, y, width, height = annotation["bbox"]
            assert shapely.box(x, y, x + width, y + height).equals(shapely.Polygon(polygon.points).envelope)


def test_imagej_regions_are_read_back_with_their_holes(tmp_path):
    prediction = predict("cells.png", 3)
    assert any(polygon.holes for polygon in prediction.polygons)

    write(tmp_path, "roi", prediction)

    regions = roifile.roiread(tmp_path / "cells.zip")
    assert len({*zipfile.ZipFile(tmp_path / "cells.zip").namelist()}) == len(prediction.polygons)
    for region, polygon in zip(regions, prediction.polygons, strict=True):
        rings = [*region.coordinates(multi=True)]
        assert len(rings) == 1 + len(polygon.holes)
        shape = shapely.Polygon(rings[0], rings[1:])
        assert shape.equals(shapely.Polygon(polygon.points, polygon.holes))
        assert (region.left, region.top) == tuple(polygon.points.min(0))
        assert region.roitype == (roifile.ROI_TYPE.RECT if polygon.holes else roifile.ROI_TYPE.TRACED)


@pytest.mark.parametrize("far", [False, True])
def test_regions_beyond_16_bits_are_shapes(far):
    x = np.arange(40_000).repeat(2) // (1 if not far else 10_000)
    teeth = np.stack([x, np.where(np.arange(len(x)) // 2 % 2, 2, 1)], 1)[1:]
    points = np.concatenate([teeth, [[x[-1], 0], [0, 0]]]).astype(np.int32)
    if far:
        points = np.array([[40_000, 5], [40_010, 5], [40_010, 9], [40_000, 9]], np.int32)

    region = roifile.ImagejRoi.frombytes(roi_bytes(Polygon(points, (), 0, 0)))

    (ring,) = region.coordinates(multi=True)
    np.testing.assert_array_equal(ring[: len(points)], points)


def test_a_mask_has_the_size_of_the_image_and_two_values(tmp_path):
    prediction = predict("cells.png")

    write(tmp_path, "mask", prediction)

    with Image.open(tmp_path / "cells.png") as image:
        assert image.mode == "L"
        np.testing.assert_array_equal(np.asarray(image), cells() * np.uint8(255))


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_label_files_have_16_bits_while_they_suffice_and_the_size_of_a_pixel(largest, dtype, tmp_path):
    labels = np.zeros((3, 1100), np.int64)
    labels[1, 7], labels[2, 1099] = 1, largest
    (tmp_path / "a.tif").write_bytes(label_tiff(labels, 0.25))
    for name, content in zarr_files(labels, 0.25).items():
        (tmp_path / "a.zarr" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a.zarr" / name).write_bytes(content)

    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        page = file.pages.first
        assert (page.dtype, page.tags["ResolutionUnit"].value) == (dtype, 3)
        assert page.tags["XResolution"].value[0] / page.tags["XResolution"].value[1] == 40_000  # pixels in 1 cm
        assert np.array_equal(page.asarray(), labels)
    group = zarr.open_group(tmp_path / "a.zarr", mode="r", zarr_format=2)
    level = group["labels/cells"].attrs["multiscales"][0]["datasets"][0]
    assert group["labels/cells/0"].dtype == dtype
    assert np.array_equal(group["labels/cells/0"][:], labels)
    assert level["coordinateTransformations"] == [{"type": "scale", "scale": [0.25, 0.25]}]


@pytest.mark.parametrize("ground", [0, 128, 255])
def test_an_overlay_differs_from_any_ground_and_leaves_it_untouched(ground):
    image = np.full((HEIGHT, WIDTH, 3), ground, np.uint8)
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[10:30, 10:30] = True

    drawn = overlay(image, trace(mask)).astype(int)

    assert (image == ground).all()
    assert (drawn[:5] == ground).all()
    assert np.abs(drawn[20, 20] - ground).max() > 20  # tinted inside
    assert np.ptp(drawn[20, 6:14].sum(1)) > 250  # bright beside dark on the outline


@pytest.mark.parametrize("source", ["mask", "geojson"])
def test_a_thumbnail_shows_the_edges_of_objects_where_they_are(tmp_path, source):
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[10:20, 24:40] = 255
    files = {name: tmp_path / name for name in ("image.png", "mask.png", "image.geojson")}
    Image.fromarray(0 * mask).save(files["image.png"])
    Image.fromarray(mask).save(files["mask.png"])
    files["image.geojson"].write_bytes(geojson(trace(mask)))
    given = {"mask": {"mask": files["mask.png"]}, "geojson": {"mask": None, "predicted": files["image.geojson"]}}

    found = outlined(files["image.png"], side=100, **given[source])

    shown = np.asarray(Image.open(io.BytesIO(found.png))).any(2)
    assert (found.width, found.height, found.areas.tolist()) == (WIDTH, HEIGHT, [160])
    assert np.flatnonzero(shown[:, 30]).tolist() == [10, 20]  # where it begins, and the first row after it
    assert np.flatnonzero(shown[15]).tolist() == [24, 40]
    assert outlined(files["image.png"], side=28, **given[source]).width == WIDTH


def test_an_overlay_is_an_rgb_file(tmp_path):
    red = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    red[..., 0] = 200
    with Writer(tmp_path, "overlay", ["a.png"]) as writer:
        writer.write(Prediction("a.png", HEIGHT, WIDTH), red)

    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a_overlay.png")), red)


@pytest.mark.parametrize("form", FORMATS)
def test_an_image_without_objects_has_a_file_too(tmp_path, form):
    (path,) = write(tmp_path, form, Prediction("empty.tif", HEIGHT, WIDTH))

    assert path is not None
    assert path.stat().st_size > 0
    if form == "roi":
        assert zipfile.ZipFile(path).namelist() == []


# Names


def test_files_keep_the_folders_below_the_common_one(tmp_path):
    stems = output_stems(["data/a/x.png", "data/b/x.png", "data/b/deep/y.tif"])

    assert [path.as_posix() for path in stems.values()] == ["a/x", "b/x", "b/deep/y"]


def test_images_that_differ_by_suffix_keep_it():
    stems = output_stems([Path("x.png"), "x.tif", "y.tif", "X.bmp", "x.png.tif", "sub/../z.png"])

    assert [path.name for path in stems.values()] == ["x.png", "x.tif", "y", "X.bmp", "x.png.tif", "z"]


def test_no_name_leads_out_of_the_directory(tmp_path):
    for names in (["../../a.png", "b.png"], ["/etc/a.png", "b.png"], ["a.png"]):
        with Writer(tmp_path / "out", "geojson", names) as writer:
            assert all((tmp_path / "out") in writer.path(name).resolve().parents for name in names)


def test_an_input_image_is_never_replaced(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "x.png")

    with pytest.raises(ConfigError, match=r"x.png would replace an input image"):
        Writer(tmp_path, "mask", [tmp_path / "x.png"]).__enter__()


# Failures


@pytest.mark.parametrize("form", FORMATS)
def test_a_failed_image_has_no_file(tmp_path, form):
    failed = Prediction("bad.png", 0, 0, error="bad.png: truncated")

    paths = write(tmp_path, form, predict("good.tif"), failed)

    assert paths[1] is None
    assert len(list(tmp_path.iterdir())) == 1
    if form == "coco":
        found = json.loads((tmp_path / "annotations.json").read_text())
        assert [image["file_name"] for image in found["images"]] == ["good.tif"]


def test_leaving_by_an_exception_keeps_what_was_finished(tmp_path):
    def run() -> None:
        with Writer(tmp_path, "coco", ["a.png", "b.png"]) as writer:
            writer.write(predict("a.png"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert [image["id"] for image in json.loads((tmp_path / "annotations.json").read_text())["images"]] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["annotations.json"]


def test_a_directory_that_cannot_be_made_is_known_before_any_work(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(StorageError, match=r"file.out: cannot be written: Not a directory"):
        Writer(tmp_path / "file" / "out", "coco", ["a.png"]).__enter__()


@pytest.mark.parametrize("form", ["geojson", "coco"])
def test_a_full_disk_leaves_the_file_of_an_earlier_run(tmp_path, form, monkeypatch):
    (file,) = write(tmp_path, form, predict("a.png", 1))  # by an earlier run
    before, writer = file.read_bytes(), Writer(tmp_path, form, ["a.png"])

    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    def run() -> None:
        with writer:
            monkeypatch.setattr(Path, "replace", refuse)
            writer.write(predict("a.png"))

    with pytest.raises(StorageError, match="No space left on device"):
        run()
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == before


@pytest.mark.parametrize("form", FORMATS)
def test_threads_write_what_one_thread_writes(tmp_path, form):
    predictions = [predict(f"{number}.tif", number) for number in range(8)]
    write(tmp_path / "one", form, *predictions)
    image, ready = np.zeros((HEIGHT, WIDTH, 3), np.uint8), threading.Barrier(4)

    def work(part: int) -> None:
        ready.wait()
        for prediction in reversed(predictions[part::4]):
            writer.write(prediction, image)

    names = [p.name for p in predictions]
    with Writer(tmp_path / "many", form, names) as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    one, many = (tree(tmp_path / folder) for folder in ("one", "many"))
    assert one == many


# Without files


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pycocotools' own
def test_a_prediction_goes_to_other_programs_without_files(tmp_path):
    prediction, mask = predict("a.png"), cells()

    shapes = prediction.to_shapely()
    assert [shape.area for shape in shapes] == [polygon.area for polygon in prediction.polygons]
    assert all(shape.is_valid for shape in shapes)
    features = prediction.to_geojson()["features"]
    pairs = zip(features, shapes, strict=True)
    assert all(shapely.geometry.shape(feature["geometry"]).equals(shape) for feature, shape in pairs)

    labels = prediction.to_labels()
    assert (labels.dtype, labels.shape) == (np.uint16, (HEIGHT, WIDTH))
    assert np.array_equal(labels > 0, mask)
    assert np.bincount(labels.ravel())[1:].tolist() == [polygon.area for polygon in prediction.polygons]

    (tmp_path / "coco.json").write_text(json.dumps(prediction.to_coco()))
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(tmp_path / "coco.json")
    for number, annotation in coco.anns.items():
        assert np.array_equal(coco.annToMask(annotation) > 0, labels == number)


def test_a_prediction_that_failed_says_so():
    with pytest.raises(ImageError, match="cut short"):
        Prediction("a.png", 0, 0, error="the file is cut short").to_labels()
