"""Datasets taken away over HTTP: every format as a zip that can be read again, and nothing left behind."""

import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from live_api import Api, Part, array, picture
from test_datasets_api import NAMED, SEQUENCES, upload

from brim.engine.storage import Dataset
from brim.rf import from_mapping
from brim.rf.generation.dataset import generate
from waiting import until


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Radio datasets; the export of the large one is more than sockets hold."""
    folder = tmp_path_factory.mktemp("exported")
    short = {"duration_s": 0.2, "samples_per_shard": 3}
    generate(from_mapping(short), folder / "features", 7, device="cpu")
    generate(from_mapping({**short, "dataset_type": "iq_raw"}), folder / "iq", 4, device="cpu")
    generate(from_mapping({"dataset_type": "iq_raw", "samples_per_shard": 2}), folder / "large", 4, device="cpu")
    assert sum(entry.bytes for entry in Dataset(folder / "large").shards) > 40_000_000
    return {name: folder / name for name in ("features", "iq", "large")}


def bring(api: Api, path: Path, **values: Any) -> str:
    return api.add_dataset(**{"name": "night sky!", "path": str(path), "owned": False, **values}).id


def fetch(api: Api, id: str, fmt: str, folder: Path) -> Path:
    """The zip, unpacked."""
    answer = api.get(f"/api/datasets/{id}/export" + (f"?format={fmt}" if fmt else ""))
    assert answer.status == 200, answer.body[:500]
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.body)) as archive:
        assert archive.testzip() is None
        archive.extractall(folder)
    for file in folder.rglob("*"):
        assert not file.is_file() or str(api.settings.data.parent).encode() not in file.read_bytes(), file.name
    until(lambda: is_done(api))
    return folder


def free_slots(api: Api) -> int:
    return int(api.context.exports.num_free)


def is_done(api: Api) -> bool:
    """Whether every export has given back its place and left nothing."""
    return api.uploads() == [] and free_slots(api) == 2


# Formats


def test_radio_samples_are_exported_as_parquet_hdf5_and_sigmf(api, made, tmp_path):
    features, iq = Dataset(made["features"]), Dataset(made["iq"])
    table = pyarrow.dataset.dataset(fetch(api, bring(api, made["features"]), "", tmp_path / "parquet")).to_table()
    assert len(table) == int(features.load(("valid",))["valid"].sum())
    manifest = json.loads(table.schema.metadata[b"brim"])
    assert manifest["config"] == features.manifest["config"]
    assert "dataset" not in manifest["report"]

    rows = iq.load()
    iq_id = bring(api, made["iq"])
    assert (fetch(api, iq_id, "hdf5", tmp_path / "hdf5") / "dataset.h5").is_file()
    found = sorted(fetch(api, iq_id, "sigmf", tmp_path / "sigmf").glob("*.sigmf-meta"))
    assert len(found) == int(rows["present"].sum())


def test_a_radio_datasets_own_files_are_a_dataset(api, made, tmp_path):
    again, before = Dataset(fetch(api, bring(api, made["features"]), "files", tmp_path)), Dataset(made["features"])

    again.verify()
    assert len(again) == 7
    assert again.manifest["config"] == before.manifest["config"]
    assert str(made["features"].parent) not in json.dumps(again.manifest)


def test_images_and_sequences_come_back_as_they_were_brought(api, tmp_path):
    from brim.sequences.corpus.packed import Corpus

    parts: list[Part] = [("images", "a.png", picture()), ("images", "b b.png", picture(9, 7))]
    parts += [("masks", name, content) for _, name, content in parts]
    out = fetch(api, upload(api, [*NAMED, *parts]).json["id"], "", tmp_path / "images")
    files = {file.relative_to(out).as_posix(): file.read_bytes() for file in out.rglob("*.png")}
    assert files == {f"{field}/{name}": content for field, name, content in parts}

    parts = [("sequences", f"{n}.npy", array(5 + n, 3)) for n in range(3)]
    parts.append(("labels", "labels.csv", b"file,label\n0.npy,walk\n1.npy,walk\n2.npy,run\n"))
    corpus = Corpus.open(fetch(api, upload(api, [*SEQUENCES, *parts]).json["id"], "", tmp_path / "sequences"))
    corpus.verify()
    assert corpus.ids == ("0.npy", "1.npy", "2.npy")
    assert corpus.classes == ("run", "walk")


def test_only_images_of_a_folder_by_reference_are_taken(api, tmp_path):
    place = tmp_path / "theirs"
    (place / "below").mkdir(parents=True)
    (place / "below" / "a.png").write_bytes(picture())
    (place / "secret.txt").write_text("not an image")

    out = fetch(api, bring(api, place, kind="images"), "files", tmp_path / "out")

    assert [file.name for file in out.rglob("*") if file.is_file()] == ["a.png"]


def test_the_download_is_named_after_the_dataset(api, made):
    id = bring(api, made["features"], name='../né "x"\r\n y')

    for fmt, name in (("files", "n-x-y.zip"), ("parquet", "n-x-y.parquet.zip")):
        answer = api.get(f"/api/datasets/{id}/export?format={fmt}")
        assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'


# What is refused


def test_what_cannot_be_exported_is_refused_in_words(api, made, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    shutil.copytree(made["features"], tmp_path / "damaged")
    shard = tmp_path / "damaged" / "shards" / "000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + b"abcd")
    damaged = bring(api, tmp_path / "damaged")
    for id, fmt, words in (
        (bring(api, made["features"]), "sigmf", "needs IQ records"),
        (bring(api, tmp_path, kind="images"), "parquet", "format=files only"),
        (bring(api, tmp_path / "later", state="writing"), "files", "still being written"),
        (bring(api, tmp_path / "gone"), "hdf5", "cannot be exported"),
        (damaged, "parquet", "checksum differs"),
        (damaged, "files", "checksum differs"),
    ):
        answer = api.get(f"/api/datasets/{id}/export?format={fmt}")
        assert (answer.status, words in answer.json["detail"]) == (409, True), answer.json
        assert str(tmp_path) not in answer.json["detail"]
    refused = api.get(f"/api/datasets/{damaged}/export?format=csv")
    assert (refused.status, refused.json["field"]) == (422, "format")
    assert is_done(api)


def test_what_does_not_fit_on_the_disk_is_refused_before_and_while_it_is_written(api, made, tmp_path, monkeypatch):
    from brim.rf.datasets import formats as library

    free, table = tmp_path / "free", library._table
    monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(free))
    free.write_text(str(2**20 + 1000))
    iq = bring(api, made["iq"])
    before = api.get(f"/api/datasets/{iq}/export?format=hdf5")
    assert (before.status, "format=files, which needs none" in before.json["detail"]) == (507, True)
    assert fetch(api, iq, "files", tmp_path / "out").is_dir()

    free.write_text(str(2**30))
    monkeypatch.setattr(library, "_table", lambda *args: (free.write_text("1000"), table(*args))[1])
    meanwhile = api.get(f"/api/datasets/{bring(api, made['features'])}/export?format=parquet")
    assert (meanwhile.status, "must stay free" in meanwhile.json["detail"]) == (507, True)
    assert is_done(api)


# Clients that leave, and many at once


@pytest.mark.parametrize("fmt", ["hdf5", "files"])
def test_a_client_that_leaves_while_it_is_sent_leaves_nothing(api, made, fmt, caplog):
    with api.connect("GET", f"/api/datasets/{bring(api, made['large'])}/export?format={fmt}") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert free_slots(api) == 1
        assert len(api.uploads()) == (1 if fmt == "hdf5" else 0)
    until(lambda: is_done(api))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_two_at_once_and_no_more(api, made):
    path, other = (f"/api/datasets/{bring(api, made[name])}/export" for name in ("large", "features"))
    with api.connect("GET", f"{path}?format=files") as one, api.connect("GET", f"{path}?format=files") as two:
        assert one.recv(1000)
        assert two.recv(1000)
        answer = api.get(other)
        assert (answer.status, answer.headers["retry-after"]) == (429, "10")
    until(lambda: is_done(api))
    assert api.get(other).status == 200
