"""Datasets taken away over HTTP: every format as a zip that can be read again, and nothing left behind."""

import http.client
import io
import json
import shutil
import socket
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pytest
from live_api import TOKEN, Answer, Api
from test_datasets_api import NAMED, SEQUENCES, Part, array, picture, upload

from brim.engine.storage import Dataset
from brim.rf import from_mapping
from brim.rf.generation.dataset import generate
from waiting import until


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exported")
    short = {"duration_s": 0.2, "samples_per_shard": 3}
    generate(from_mapping(short), folder / "features", 7, device="cpu")
    generate(from_mapping({**short, "dataset_type": "iq_raw"}), folder / "iq", 4, device="cpu")
    return {"features": folder / "features", "iq": folder / "iq"}


def bring(api: Api, path: Path, **values: Any) -> str:
    return api.add_dataset(**{"name": "night sky!", "path": str(path), "owned": False, **values}).id


def fetch(api: Api, id: str, fmt: str | None, folder: Path) -> Path:
    """The zip, unpacked."""
    answer = api.get(f"/api/datasets/{id}/export" + ("" if fmt is None else f"?format={fmt}"))
    assert answer.status == 200, answer.body[:500]
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.body)) as archive:
        assert archive.testzip() is None
        archive.extractall(folder)
    for file in folder.rglob("*"):
        assert not file.is_file() or str(api.settings.data.parent).encode() not in file.read_bytes(), file.name
    until(lambda: left(api) == [])
    return folder


def left(api: Api) -> list[Path]:
    return list((api.settings.data / "uploads").iterdir())


def free_slots(api: Api) -> int:
    return int(api.api.state.context.exports.num_free)


# Formats


@pytest.mark.parametrize("fmt", ["parquet", None])
def test_parquet_is_what_radio_samples_are_exported_as(api, made, tmp_path, fmt):
    table = pyarrow.dataset.dataset(fetch(api, bring(api, made["features"]), fmt, tmp_path / "out")).to_table()

    valid = Dataset(made["features"]).load(("valid",))["valid"]
    assert len(table) == int(valid.sum())
    manifest = json.loads(table.schema.metadata[b"brim"])
    assert manifest["config"] == Dataset(made["features"]).manifest["config"]
    assert "dataset" not in manifest["report"]


def test_hdf5_holds_the_tensors(api, made, tmp_path):
    import h5py

    out = fetch(api, bring(api, made["iq"]), "hdf5", tmp_path / "out")

    rows = Dataset(made["iq"]).load()
    with h5py.File(out / "dataset.h5") as file:
        assert set(file) == set(rows)
        for name, tensor in rows.items():
            np.testing.assert_array_equal(file[name][:], tensor.numpy())


def test_sigmf_holds_a_recording_for_every_receiver_that_heard(api, made, tmp_path):
    from sigmf.sigmffile import fromfile

    out = fetch(api, bring(api, made["iq"]), "sigmf", tmp_path / "out")

    present = Dataset(made["iq"]).load(("present",))["present"]
    found = sorted(out.glob("*.sigmf-meta"))
    assert len(found) == int(present.sum())
    assert len(fromfile(str(found[0])).read_samples()) == 40_000


def test_a_radio_datasets_own_files_are_a_dataset(api, made, tmp_path):
    out = fetch(api, bring(api, made["features"]), "files", tmp_path / "out")

    again, before = Dataset(out), Dataset(made["features"])
    again.verify()
    assert len(again) == 7
    assert again.manifest["config"] == before.manifest["config"]
    assert str(made["features"]) in before.manifest["report"]["dataset"]
    assert str(made["features"].parent) not in json.dumps(again.manifest)


@pytest.mark.parametrize("masks", [True, False])
def test_images_come_back_as_they_were_brought(api, tmp_path, masks):
    parts: list[Part] = [("images", "a.png", picture()), ("images", "b b.png", picture(9, 7))]
    if masks:
        parts += [("masks", name, content) for _, name, content in parts]
    id = upload(api, [*NAMED, *parts]).json["id"]

    out = fetch(api, id, None, tmp_path / "out")

    files = {file.relative_to(out).as_posix(): file.read_bytes() for file in out.rglob("*.png")}
    assert files == {f"{field}/{name}": content for field, name, content in parts}


def test_only_images_of_a_folder_by_reference_are_taken(api, tmp_path):
    place = tmp_path / "theirs"
    (place / "below").mkdir(parents=True)
    (place / "below" / "a.png").write_bytes(picture())
    (place / "secret.txt").write_text("not an image")

    out = fetch(api, bring(api, place, kind="images"), "files", tmp_path / "out")

    assert [file.name for file in out.rglob("*") if file.is_file()] == ["a.png"]


def test_sequences_come_back_as_a_corpus(api, tmp_path):
    from brim.sequences.corpus.packed import Corpus

    parts: list[Part] = [("sequences", f"{n}.npy", array(5 + n, 3)) for n in range(3)]
    labels: Part = ("labels", "labels.csv", b"file,label\n0.npy,walk\n1.npy,walk\n2.npy,run\n")
    id = upload(api, [*SEQUENCES, *parts, labels]).json["id"]

    corpus = Corpus.open(fetch(api, id, "", tmp_path / "out"))

    corpus.verify()
    assert corpus.ids == ("0.npy", "1.npy", "2.npy")
    assert corpus.classes == ("run", "walk")


def test_refusals_are_documented_as_what_they_are(api):
    responses = api.get("/openapi.json").json["paths"]["/api/datasets/{id}/export"]["get"]["responses"]

    assert responses["200"]["content"].keys() == {"application/zip"}
    for status in ("404", "409", "422", "429", "507"):
        assert responses[status]["content"].keys() == {"application/json"}, status


def test_the_download_is_named_after_the_dataset(api, made):
    id = bring(api, made["features"], name='../né "x"\r\n y')

    for fmt, name in (("files", "n-x-y.zip"), ("parquet", "n-x-y.parquet.zip")):
        answer = api.get(f"/api/datasets/{id}/export?format={fmt}")
        assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'


def test_files_that_need_64_bit_sizes_are_taken(tmp_path, monkeypatch):
    from brim.service.api import export

    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 3000)  # in place of 2 GiB, which would take the test its time
    monkeypatch.setattr(export, "LARGE_BYTES", 1000)
    sizes = {"large": 5000, "small": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))

    whole = b"".join(export.zipped((name, tmp_path / name) for name in sizes))

    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None
        assert {one.filename: one.file_size for one in archive.infolist()} == sizes


# What is refused


def test_what_cannot_be_exported_is_refused_in_words(api, made, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    features, images = bring(api, made["features"]), bring(api, tmp_path, kind="images")
    writing = bring(api, tmp_path / "later", state="writing")
    gone = bring(api, tmp_path / "gone")
    for id, fmt, words in (
        (features, "sigmf", "needs IQ records"),
        (images, "parquet", "format=files only"),
        (writing, "files", "still being written"),
        (gone, "hdf5", "cannot be exported"),
        (gone, "files", "cannot be read"),
    ):
        answer = api.get(f"/api/datasets/{id}/export?format={fmt}")
        assert (answer.status, words in answer.json["detail"]) == (409, True), answer.json
        assert str(tmp_path) not in answer.json["detail"]
    refused = api.get(f"/api/datasets/{features}/export?format=csv")
    assert (refused.status, refused.json["field"]) == (422, "format")
    assert api.get(f"/api/datasets/{'0' * 32}/export").status == 404
    assert left(api) == []
    assert free_slots(api) == 2


@pytest.mark.parametrize("fmt", ["parquet", "files"])
def test_a_damaged_shard_is_noticed_before_anything_is_sent(api, made, tmp_path, fmt):
    place = tmp_path / "damaged"
    shutil.copytree(made["features"], place)
    shard = place / "shards" / "000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4] + b"abcd")

    answer = api.get(f"/api/datasets/{bring(api, place)}/export?format={fmt}")

    assert (answer.status, "checksum differs" in answer.json["detail"]) == (409, True)
    assert left(api) == []


def test_what_does_not_fit_on_the_disk_is_refused(api, made, tmp_path, monkeypatch):
    id = bring(api, made["iq"])
    (tmp_path / "free").write_text(str(2**20 + 1000))
    monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(tmp_path / "free"))

    answer = api.get(f"/api/datasets/{id}/export?format=hdf5")

    assert answer.status == 507
    assert "format=files, which needs none" in answer.json["detail"]
    assert left(api) == []
    assert free_slots(api) == 2
    assert fetch(api, id, "files", tmp_path / "out").is_dir()


def test_a_disk_that_fills_meanwhile_ends_it(api, made, tmp_path, monkeypatch):
    from brim.rf.datasets import formats as library

    free = tmp_path / "free"
    free.write_text(str(2**30))
    monkeypatch.setenv("BRIM_FREE_BYTES_FILE", str(free))
    table = library._table
    monkeypatch.setattr(library, "_table", lambda *args: (free.write_text("1000"), table(*args))[1])

    answer = api.get(f"/api/datasets/{bring(api, made['features'])}/export?format=parquet")

    assert (answer.status, "must stay free" in answer.json["detail"]) == (507, True)
    assert left(api) == []


# Clients that leave, and many at once


def ask(api: Api, path: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", api.port))
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose export is more than sockets hold."""
    place = tmp_path_factory.mktemp("large") / "made"
    generate(from_mapping({"dataset_type": "iq_raw", "samples_per_shard": 2}), place, 4, device="cpu")
    assert sum(entry.bytes for entry in Dataset(place).shards) > 40_000_000
    return place


@pytest.mark.parametrize("fmt", ["hdf5", "files"])
def test_a_client_that_leaves_while_it_is_sent_leaves_nothing(api, large, fmt, caplog):
    with ask(api, f"/api/datasets/{bring(api, large)}/export?format={fmt}") as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert free_slots(api) == 1
        assert len(left(api)) == (1 if fmt == "hdf5" else 0)
    until(lambda: left(api) == [] and free_slots(api) == 2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_file_that_goes_meanwhile_cuts_the_download_short(api, tmp_path):
    place = tmp_path / "theirs"
    place.mkdir()
    for name in ("a.png", "b.png"):
        (place / name).write_bytes(picture() + bytes(40_000_000))
    id = bring(api, place, kind="images")
    with ask(api, f"/api/datasets/{id}/export") as connection, http.client.HTTPResponse(connection) as answer:
        answer.begin()
        assert answer.read(1000)
        (place / "b.png").unlink()
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    until(lambda: free_slots(api) == 2)


def test_two_at_once_and_no_more(api, large, made):
    id, other = bring(api, large), bring(api, made["features"])
    with (
        ask(api, f"/api/datasets/{id}/export?format=files") as first,
        ask(api, f"/api/datasets/{id}/export?format=files") as second,
    ):
        assert first.recv(1000)
        assert second.recv(1000)
        answer = api.get(f"/api/datasets/{other}/export")
        assert (answer.status, answer.headers["retry-after"]) == (429, "10")
        assert api.get("/health").status == 200
    until(lambda: free_slots(api) == 2)
    assert api.get(f"/api/datasets/{other}/export").status == 200


def test_many_small_ones_give_their_places_back(api, made):
    id, found = bring(api, made["features"]), list[Answer]()

    def ask_for_three() -> None:
        for _ in range(3):
            found.append(api.get(f"/api/datasets/{id}/export?format=parquet"))

    threads = [threading.Thread(target=ask_for_three) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {answer.status for answer in found} <= {200, 429}
    until(lambda: free_slots(api) == 2 and left(api) == [])


def test_what_a_killed_process_left_goes_at_the_next_start(api_with, tmp_path):
    (tmp_path / "data" / "uploads" / ("0" * 32) / "export").mkdir(parents=True)
    with api_with() as api:
        assert left(api) == []
