"""Datasets that people bring: taken as they are, or refused in words that name what is wrong."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from desk import Asked
from PIL import Image

from brim.engine.storage.writer import ShardWriter
from brim.errors import BrimError, Conflict, DatasetError
from brim.jobs.registry import datasets as sources
from brim.jobs.store import Catalogue, upgrade
from brim.rf.config import GenerateConfig
from brim.segmentation.images.reading import read_image
from brim.sequences.corpus.packed import Corpus
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.synthetic import make_sequences

sys.path.insert(0, str(Path(__file__).parents[1] / "rf"))

from small_dataset import header, write_dataset


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def catalogue(data):
    """On SQLite alone: what differs between databases is tested elsewhere."""
    url = f"sqlite:///{data}/catalogue.sqlite"
    upgrade(url)
    with Catalogue.open(url) as opened:
        yield opened


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "cells"
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), number).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def npy(tmp_path):
    """Twelve sequences of four features in two classes."""
    return make_sequences(tmp_path / "npy", 12, dim=4, classes=2, mean_length=6)


@pytest.fixture
def add(catalogue, data):
    def run(path, kind, **options):
        return sources.add(catalogue, data, name="mine", path=path, kind=kind, **options)

    return run


# Taken


@pytest.mark.parametrize("finish", [True, False])
def test_radio_samples_stay_where_they_are(add, tmp_path, finish):
    made = write_dataset(tmp_path / "rf", GenerateConfig(seed=2), finish=finish)

    row = add(tmp_path / "rf", "rf")

    assert (row.kind, row.owned, row.path) == ("rf", False, str(tmp_path / "rf"))
    assert row.state == ("ready" if finish else "partial")
    assert row.items == len(made["index"])
    assert row.bytes == sum(file.stat().st_size for file in (tmp_path / "rf" / "shards").iterdir())
    assert row.about["config"]["seed"] == 2


def test_images_may_come_with_masks_or_alone(add, images):
    row, alone = add(images, "images"), add(images / "images", "images")

    assert (row.items, row.about, row.owned) == (3, {"masks": True}, False)
    assert row.bytes == sum(file.stat().st_size for file in images.rglob("*.png"))
    assert (alone.items, alone.about) == (3, {"masks": False})
    assert sources.image_folders(images) == (images / "images", images / "masks")
    assert sources.image_folders(images / "images") == (images / "images", None)


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "bmp", "webp", "jp2", "ppm", "pgm", "gif"])
def test_every_format_that_can_be_read_is_taken(tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(np.zeros((16, 16) if suffix == "pgm" else (16, 16, 3), np.uint8)).save(file)
    assert read_image(file).shape == (16, 16, 3)

    assert sources.look(tmp_path, "images").items == 1


def test_a_folder_of_sequences_is_packed_into_the_data_directory(add, data, npy):
    row = add(npy, "sequences")

    corpus = Corpus.open(data / row.path)
    assert (row.items, row.owned, row.path) == (12, True, f"datasets/{row.id}")
    assert row.about == {"frames": corpus.num_frames, "features": 4, "classes": list(corpus.classes), "labelled": 12}
    assert list((data / "uploads").iterdir()) == []


def test_a_packed_corpus_stays_where_it_is(add, tmp_path, npy):
    pack(npy, tmp_path / "corpus")

    row = add(tmp_path / "corpus", "sequences")

    assert (row.items, row.owned, row.path) == (12, False, str(tmp_path / "corpus"))


def test_a_recording_counts_once_and_its_stations_and_metadata_do_not(add, tmp_path):
    folder = tmp_path / "recordings"
    folder.mkdir()
    for name in ("a.wav", "b.sigmf-meta", "b.sigmf-data", "stations.csv", "about.json", ".hidden"):
        (folder / name).write_bytes(bytes(10))

    row = add(folder, "recordings")

    assert (row.items, row.bytes, row.about) == (2, 60, {"stations": True})
    assert [file.name for file in sources.recording_files(folder)] == ["a.wav", "b.sigmf-meta"]


# Refused


def test_what_is_missing_empty_or_foreign_is_refused(add, catalogue, data, tmp_path, images):
    empty, text, odd = tmp_path / "empty", tmp_path / "text", tmp_path / "odd"
    for folder in (empty, text, odd):
        folder.mkdir()
    (text / "a.png").write_text("not an image")
    np.save(odd / "a.npy", np.zeros(3))
    write_dataset(tmp_path / "rf", GenerateConfig(seed=2))
    with ShardWriter(tmp_path / "none", header(GenerateConfig()), items_per_shard=5) as writer:
        writer.finish()

    for path, kind, words in [
        (tmp_path / "nowhere", "rf", "is not a directory"),
        (images, "rf", "has no manifest.json"),
        (tmp_path / "none", "rf", "holds no samples"),
        (empty, "images", "holds no images"),
        (text, "images", "is no image, whatever its name says"),
        (empty, "sequences", "holds no .npy"),
        (odd, "sequences", "a.npy"),
        (tmp_path / "rf", "sequences", "is not a packed corpus"),
        (empty, "recordings", "holds no recordings"),
        (data / "datasets", "images", "own data directory"),
    ]:
        with pytest.raises(BrimError, match=words):
            add(path, kind)
    assert catalogue.datasets.page().total == 0
    assert not list(data.rglob("*.safetensors"))


def test_an_image_without_its_mask_is_named(add, images):
    (images / "masks" / "1.png").unlink()

    with pytest.raises(DatasetError, match=r"1\.png has no mask"):
        add(images, "images")


def test_a_shard_that_is_cut_short_is_found(add, tmp_path):
    write_dataset(tmp_path / "rf", GenerateConfig(seed=2))
    shard = next((tmp_path / "rf" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])

    with pytest.raises(DatasetError, match="bytes, the manifest says"):
        add(tmp_path / "rf", "rf")


def test_the_same_path_is_not_listed_twice(add, images):
    first = add(images, "images")

    with pytest.raises(Conflict, match=f"listed already.*{first.id}"):
        add(images / "masks" / "..", "images")


def test_packing_that_is_stopped_or_cannot_be_listed_leaves_nothing(add, catalogue, data, npy, monkeypatch):
    def refuse(**_):
        raise Conflict("no")

    with monkeypatch.context() as patched:
        patched.setattr("brim.sequences.corpus.packing.CHUNK_BYTES", 1)  # a chunk for each: there is time to stop
        assert add(npy, "sequences", stop=lambda: True) is None
    with monkeypatch.context() as patched:
        patched.setattr(catalogue.datasets, "add", refuse)
        with pytest.raises(Conflict):
            add(npy, "sequences")

    assert list((data / "uploads").iterdir()) == []
    assert not list(data.rglob("*.safetensors"))
    assert catalogue.datasets.page().total == 0


def test_a_packing_that_was_killed_is_swept_away_and_one_that_goes_on_is_not(add, catalogue, data, npy):
    code = (
        "import os, signal, sys; from pathlib import Path; from brim.jobs.registry import datasets as sources\n"
        "sources.pack(Path(sys.argv[1]), Path(sys.argv[2]), 'a' * 32, progress=lambda p: os.kill(os.getpid(), 9))"
    )
    killed = subprocess.run([sys.executable, "-c", code, npy, data], check=False)
    assert killed.returncode == -9
    (data / "uploads" / f"{'a' * 32}.packing").mkdir(exist_ok=True)
    (data / "uploads" / "odd.lock").mkdir()  # one that cannot be opened stops no start
    seen = []

    def look(_):
        sources.tidy(catalogue, data)
        seen.append(sorted(file.suffix for file in (data / "uploads").iterdir() if file.name != "odd.lock"))

    row = add(npy, "sequences", progress=look)

    assert [".lock", ".packing"] in seen  # its own
    assert Corpus.open(data / row.path)
    assert [file.name for file in (data / "uploads").iterdir()] == ["odd.lock"]


# Removed


def test_files_of_others_survive_removal_and_our_own_go_with_the_dataset(add, catalogue, data, images, npy):
    theirs, ours = add(images, "images"), add(npy, "sequences")

    for row in (theirs, ours):
        sources.remove(catalogue, data, row.id)

    assert catalogue.datasets.page().total == 0
    assert len(list(images.rglob("*.png"))) == 6
    assert not (data / ours.path).exists()
    assert list((data / "trash").iterdir()) == []


def test_a_removal_that_was_killed_is_gone_on_with(add, catalogue, data, npy):
    first, second = add(npy, "sequences"), add(npy, "sequences")
    for row in (first, second):
        catalogue.datasets.retire(row.id)
    (data / "trash").mkdir()
    (data / first.path).rename(data / "trash" / first.id)  # one was killed after the rename, one before

    sources.tidy(catalogue, data)

    assert list((data / "datasets").iterdir()) == list((data / "trash").iterdir()) == []
    assert catalogue.datasets.retired() == []


def test_a_dataset_in_use_keeps_its_files(add, catalogue, data, npy):
    row = add(npy, "sequences")
    asked = Asked("sequence.train", "t", {})
    catalogue.jobs.submit(asked, makes="run", inputs={"dataset_ids": [row.id]}, reads="sequences")

    with pytest.raises(Conflict, match="in use"):
        sources.remove(catalogue, data, row.id)
    assert Corpus.open(data / row.path)
