"""The steps of a bulk prediction, one after the other in this process, and the records that it leaves."""

import json
from pathlib import Path

import cv2
import pytest
import torch
from entries import sizes_file

from brim.engine.storage.places import place_of
from brim.engine.tuning import ProbeConfig
from brim.segmentation.config import FORMATS, FilesConfig
from brim.segmentation.images.writing import Writer
from brim.segmentation.networks import ModelTraits, create_model, save_weights, traits_of
from brim.segmentation.prediction import (
    BulkScorer,
    BulkTask,
    ModelLoader,
    Recipe,
    Record,
    Records,
    bulk,
    pack_weights,
    predict_files,
    read_parcels,
    recipe_name,
    split_tasks,
    write_parcel,
)
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning import tuner

NUM = 7
pytestmark = pytest.mark.usefixtures("short_ceiling", "one_thread")


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_weights(create_model("unet_tiny"), path, {})
    return path


@pytest.fixture
def images(tmp_path) -> list[Path]:
    """The second is broken, the last is larger than a tile of 64."""
    paths = [tmp_path / f"images/{index}.png" for index in range(NUM)]
    paths[0].parent.mkdir()
    for index, path in enumerate(paths):
        cv2.imwrite(str(path), make_cells(5, index, 40, 100 if index == NUM - 1 else 56)[0])
    paths[1].write_bytes(paths[1].read_bytes()[:200])
    return paths


def recipe(**changes) -> Recipe:
    return Recipe(files=FilesConfig(**{"model": "unet_tiny", "strict": True, "tile": 64, **changes}), device="cpu")


def tasks_of(images, done=None) -> list[BulkTask]:
    return [
        BulkTask(index=index, name=str(path), image=path, file=f"{path.stem}.out", done=(done or {}).get(str(path)))
        for index, path in enumerate(images)
    ]


def alone(images, weights, out, made: Recipe) -> dict[str, bytes]:
    """What one process writes."""
    loader = ModelLoader({"unet_tiny": weights}, "cpu", None, tile=made.files.tile)
    predict_files(images, loader, out, made.files)
    return tree(out)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The steps


@pytest.mark.parametrize("form", FORMATS)
def test_the_steps_make_the_bytes_of_one_process(images, weights, tmp_path, form):
    made = recipe(format=form)
    score = BulkScorer(made, pack_weights("unet_tiny", weights))

    sheets = [sheet for parcel in read_parcels(tasks_of(images)) for sheet in write_parcel(score(parcel), form).sheets]
    with Writer(tmp_path / "many", form, images) as writer:
        for sheet in sheets:
            if sheet.error is None and form == "coco":
                writer.put_lines(sheet.name, (sheet.height, sheet.width), sheet.result)
            elif sheet.error is None:
                writer.put(sheet.name, sheet.result)

    assert tree(tmp_path / "many") == alone(images, weights, tmp_path / "one", made)
    assert len(list((tmp_path / "many").iterdir())) == (1 if form == "coco" else NUM - 1)
    assert [sheet.polygons > 0 for sheet in sheets] == [index != 1 for index in range(NUM)]


def test_what_is_finished_is_only_looked_at(images):
    (first,) = read_parcels(tasks_of(images))
    known = {sheet.name: sheet.record() for sheet in first.sheets if sheet.error is None}
    cv2.imwrite(str(images[3]), make_cells(9, 9, 40, 56)[0])  # changed since

    (again,) = read_parcels(tasks_of(images, known))

    assert [sheet.index for sheet in again.sheets if sheet.pixels is not None] == [3]
    assert [sheet.index for sheet in again.sheets if sheet.kept] == [0, 2, 4, 5, 6]


def test_a_parcel_holds_no_more_than_its_bytes_but_always_one_image(images, monkeypatch):
    monkeypatch.setattr(bulk, "PARCEL_BYTES", 2 * 40 * 56 * 3)

    found = list(read_parcels(tasks_of(images)))

    assert [[sheet.index for sheet in parcel.sheets] for parcel in found] == [[0, 1, 2], [3, 4], [5], [6]]


@pytest.mark.parametrize(
    ("num", "batch_size", "workers", "sizes"),
    [
        (100, 16, 1, [32, 32, 32, 4]),
        (100, 24, 1, [48, 48, 4]),
        (10, 1, 2, [2] * 5),
        (10, 4, 8, [4, 4, 2]),
        (1, 8, 8, [1]),
    ],
)
def test_parcels_are_whole_batches_and_enough_for_all(num, batch_size, workers, sizes):
    work = split_tasks(tasks_of([Path(f"{index}.png") for index in range(num)]), batch_size, workers)

    assert [len(tasks) for tasks in work] == sizes
    assert [task.index for tasks in work for task in tasks] == list(range(num))


def test_weights_travel_with_what_they_say_of_images(tmp_path):
    about = {"task": "instances", "contrast": "stretch", "scale": "0.5", "classes": '["a", "b"]'}
    save_weights(create_model("unet_tiny", "instances", 2), tmp_path / "w.safetensors", about)

    (tmp_path / "packed.safetensors").write_bytes(pack_weights("unet_tiny", tmp_path / "w.safetensors"))

    expected = ModelTraits(task="instances", stretches=True, classes=("a", "b"), scale=0.5)
    assert traits_of(tmp_path / "packed.safetensors") == expected


@pytest.mark.parametrize(
    ("changes", "needed"), [({"strict": False}, True), ({}, False), ({"strict": False, "batch_size": 1}, False)]
)
def test_only_batches_of_several_images_need_tuning(changes, needed):
    assert recipe(**changes).needs_tuning == needed


def test_a_scorer_takes_what_was_tuned_elsewhere_and_tells_what_it_tuned(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "brim.segmentation.prediction.loader.ModelLoader.__init__.__kwdefaults__",
        {"overlap": None, "planes": None, "tune_seconds": 0.3},
    )
    monkeypatch.setattr(tuner, "ProbeConfig", lambda **_: ProbeConfig(settle_s=0.0, block_s=0.001))
    monkeypatch.setitem(tuner._LIMITS, "cpu", 8)
    packed, made = pack_weights("unet_tiny", weights), recipe(strict=False)

    tuned = BulkScorer(made, packed)

    assert tuned.batch_sizes is not None
    (found,) = json.loads(tuned.batch_sizes)["devices"].values()
    assert found["batch_configurations"]["unet_tiny"]["optimal_batch_size"] == tuned.batch_size
    sizes = sizes_file(tmp_path / "sizes.json", optimal_batch_size=3)
    assert BulkScorer(made, packed, sizes.read_text()).batch_size == 3


# Records


def record(name: str, sha256: str = "a") -> Record:
    return Record(name=name, sha256=sha256, polygons=1, height=2, width=3)


def opened(out: Path, name: str = "one") -> tuple[Records, dict[str, Record]]:
    records = Records(place_of(out), recipe_name({"weights": name}))
    return records, records.open()


def test_what_was_recorded_is_found_again(tmp_path):
    records, nothing = opened(tmp_path)
    records.add([record("a"), record("b")])
    records.add([record("c")])
    records.add([record("c")])

    assert nothing == {}
    assert opened(tmp_path)[1] == {name: record(name) for name in "abc"}


def test_another_recipe_starts_anew(tmp_path):
    """Its results replace the others, so that their records would lie."""
    opened(tmp_path)[0].add([record("a")])

    assert opened(tmp_path, "two")[1] == {}
    assert opened(tmp_path)[1] == {}


def test_the_last_run_that_made_an_image_counts(tmp_path):
    for content in ("one", "other", "one", "third"):
        opened(tmp_path)[0].add([record("a", content), record(content)])

    assert opened(tmp_path)[1]["a"] == record("a", "third")


def test_two_runs_at_once_that_saw_different_bytes_leave_no_record(tmp_path):
    first, second = opened(tmp_path)[0], opened(tmp_path)[0]
    first.add([record("a", "before"), record("b")])
    second.add([record("a", "after"), record("b")])

    assert opened(tmp_path)[1] == {"b": record("b")}


def test_a_damaged_file_costs_its_images_and_no_others(tmp_path):
    records, _ = opened(tmp_path)
    records.add([record("a")])
    (broken,) = (tmp_path / ".brim/records").iterdir()
    records.add([record("b")])
    broken.write_bytes(broken.read_bytes()[:10])

    assert opened(tmp_path)[1] == {"b": record("b")}


def test_written_results_are_recorded_after_they_are_there(images, weights, tmp_path):
    place = place_of(tmp_path / "out")
    records = Records(place, "x")
    score = BulkScorer(recipe(), pack_weights("unet_tiny", weights))

    (parcel,) = read_parcels(tasks_of(images))
    done = write_parcel(score(parcel), "geojson", place, records)

    assert set(Records(place, "x").open()) == {str(path) for path in images} - {str(images[1])}
    assert [place.size(sheet.file) > 0 for sheet in done.sheets if sheet.error is None] == [True] * (NUM - 1)
    assert done.ceiling is not None
    assert done.pixels == (NUM - 2 + 3) * 64 * 64  # padded to 32s; the last in three windows
