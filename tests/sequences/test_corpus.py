import json
import os

import numpy as np
import pytest
import torch

from brim.engine.storage.writer import ShardWriter
from brim.errors import ConfigError, DatasetError, ShardCorrupt, StorageError
from brim.sequences import Corpus, make_sequences, pack
from brim.sequences.corpus import packing
from brim.sequences.corpus.npy import FrameReader

torch.set_num_threads(1)
SMALL = 500  # bytes of a shard: many shards, sequences across them


def make(folder, lengths=(5, 1, 30, 12), dim=3, dtype=np.float32):
    """Sequences 0.npy, 1.npy, … whose values say which they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, length in enumerate(lengths):
        array = 100 * index + np.arange(length * dim).reshape(length, dim) / 4
        np.save(folder / f"{index}.npy", array.astype(dtype))
    return folder


def files_of(path):
    """Every file's bytes, with the manifest's time left out."""
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    del manifest["created"]
    return files, manifest


# Packing


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("source", [np.float64, np.int16])
def test_a_folder_becomes_a_corpus_with_the_same_frames(tmp_path, dtype, source):
    folder = make(tmp_path / "in", dtype=source)
    report = pack(folder, tmp_path / "out", dtype=dtype, shard_bytes=SMALL)
    corpus = Corpus.open(tmp_path / "out")
    corpus.verify()
    assert corpus.ids == ("0.npy", "1.npy", "2.npy", "3.npy")
    assert corpus.lengths.tolist() == [5, 1, 30, 12]
    assert corpus.starts.tolist() == [0, 5, 6, 36]
    assert (corpus.dim, corpus.dtype) == (3, getattr(torch, dtype))
    for index, name in enumerate(corpus.ids):
        assert torch.equal(corpus.sequence(index), torch.from_numpy(np.load(folder / name)).to(corpus.dtype))
    assert (report.items, report.frames, report.dim, report.complete) == (4, 48, 3, True)
    assert report.source_bytes == 48 * 3 * np.dtype(source).itemsize
    assert report.bytes == sum(file.stat().st_size for file in (tmp_path / "out" / "shards").iterdir())
    assert report.bytes_per_s == report.source_bytes / report.seconds
    json.dumps(report.as_dict())


def test_labels_split_and_choice_come_from_the_csv_file(tmp_path):
    folder = make(tmp_path / "in")
    (folder / "labels.csv").write_text("file,label,split\n3.npy,b,test\n0.npy,a,train\n1.npy,b,train\n")
    (folder / "2.npy").write_bytes(b"not named, so not read")
    report = pack(folder, tmp_path / "out")
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.ids == ("0.npy", "1.npy", "3.npy")
    assert corpus.classes == report.classes == ("a", "b")
    assert corpus.labels.tolist() == [0, 1, 1]
    assert corpus.split == ("train", "train", "test")
    assert (report.labelled, report.labels_from) == (3, str(folder / "labels.csv"))


def test_sub_folders_are_labels_and_a_flat_folder_has_none(tmp_path):
    folder = make_sequences(tmp_path / "in", 12, 4, 3, mean_length=10)
    report = pack(folder, tmp_path / "out")
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.classes == ("class_0", "class_1", "class_2")
    assert corpus.labels.bincount().tolist() == [4, 4, 4]
    assert (report.labelled, report.labels_from) == (12, "folders")
    report = pack(make(tmp_path / "flat"), tmp_path / "plain")
    assert Corpus.open(tmp_path / "plain").labels.tolist() == [-1] * 4
    assert (report.labelled, report.classes, report.labels_from) == (0, (), "none")


def test_hidden_files_are_left_out_and_links_are_not_followed_in_circles(tmp_path):
    folder, elsewhere = make(tmp_path / "in"), make(tmp_path / "elsewhere", (3, 4))
    (folder / "._0.npy").write_bytes(b"x")
    (folder / "notes.txt").touch()
    make(folder / ".trash")
    (folder / "more").symlink_to(elsewhere)
    (folder / "again").symlink_to(folder)
    (elsewhere / "back").symlink_to(folder)
    pack(folder, tmp_path / "out")
    assert Corpus.open(tmp_path / "out").ids == ("0.npy", "1.npy", "2.npy", "3.npy", "more/0.npy", "more/1.npy")


@pytest.mark.parametrize("job_bytes", [1, 250])
def test_long_files_are_packed_in_pieces_to_the_same_bytes(tmp_path, monkeypatch, job_bytes):
    folder = make(tmp_path / "in")
    pack(folder, tmp_path / "whole", shard_bytes=SMALL)
    monkeypatch.setattr(packing, "CHUNK_BYTES", job_bytes)
    pack(folder, tmp_path / "pieces", shard_bytes=SMALL)
    assert files_of(tmp_path / "pieces") == files_of(tmp_path / "whole")


# Bad files


def spoil(folder):
    """Two bad headers, and two files with bad frames; 2.npy and 5.npy are good."""
    make(folder, (5, 4, 30, 12, 6, 7))
    np.save(folder / "0.npy", np.zeros((4, 5), np.float32))
    (folder / "1.npy").write_bytes(b"rubbish")
    for name, frame, value in (("3.npy", 9, np.nan), ("4.npy", 0, 1e6)):
        array = np.load(folder / name)
        array[frame] = value
        np.save(folder / name, array)
    return folder


def test_a_bad_header_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(DatasetError, match=r"0\.npy has 5 features, most of the 5 files have 3 \(2 bad files in all\)"):
        pack(spoil(tmp_path / "in"), tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("job_bytes", [1, 8 << 20])
def test_a_bad_frame_is_an_error_that_leaves_nothing(tmp_path, monkeypatch, job_bytes):
    monkeypatch.setattr(packing, "CHUNK_BYTES", job_bytes)
    folder = spoil(tmp_path / "in")
    for name in ("0.npy", "1.npy"):
        (folder / name).unlink()
    with pytest.raises(DatasetError, match=r"3\.npy frame 9 holds nan.*\(2 bad files in all\).*skip_bad"):
        pack(folder, tmp_path / "deep" / "out", dtype="float16", shard_bytes=SMALL)
    assert not (tmp_path / "deep").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError):
        pack(folder, tmp_path / "empty", shard_bytes=SMALL)
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("job_bytes", [1, 8 << 20])
def test_bad_files_are_skipped_and_listed_on_request(tmp_path, monkeypatch, job_bytes):
    monkeypatch.setattr(packing, "CHUNK_BYTES", job_bytes)
    folder = spoil(tmp_path / "in")
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"{row}.npy,{row}\n" for row in range(6)))
    report = pack(folder, tmp_path / "out", dtype="float16", skip_bad=True, shard_bytes=SMALL)
    faults = {skipped.file: skipped.fault for skipped in report.skipped}
    assert list(faults) == ["0.npy", "1.npy", "3.npy", "4.npy"]
    assert "frame 9 holds nan" in faults["3.npy"]
    assert "dtype float32" in faults["4.npy"]
    corpus = Corpus.open(tmp_path / "out")
    corpus.verify()
    assert (corpus.ids, corpus.label_names()) == (("2.npy", "5.npy"), ["2", "5"])
    assert torch.equal(corpus.sequence(1), torch.from_numpy(np.load(folder / "5.npy")).half())
    assert corpus.skipped == report.skipped
    assert report.items == 2


def test_what_holds_nothing_to_pack_is_refused(tmp_path):
    folder = make(tmp_path / "in", (3, 3))
    for name in ("0.npy", "1.npy"):
        np.save(folder / name, np.full((3, 3), np.inf, np.float32))
    os.mkfifo(make(tmp_path / "pipe") / "9.npy")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("in", r"0\.npy frame 0 holds inf.*2 bad files.*no good file is left"),
        ("none", "not a directory"), ("empty", r"holds no \.npy"), ("pipe", r"9\.npy is not a file"),
    ):  # fmt: skip
        with pytest.raises(DatasetError, match=words):
            pack(tmp_path / name, tmp_path / "out", skip_bad=name == "in")
    with open(os.fsencode(folder) + b"/\xff.npy", "wb"), pytest.raises(DatasetError, match="not UTF-8"):  # noqa: PTH123
        pack(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Where it goes


def test_an_occupied_or_foreign_directory_is_refused_and_untouched(tmp_path):
    folder = make(tmp_path / "in")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with ShardWriter(tmp_path / "other", {"kind": "rf"}, items_per_shard=4) as writer:
        writer.append({"x": torch.zeros(4)}, {})
        writer.finish()
    pack(folder, tmp_path / "out")
    before = {name: sorted((tmp_path / name).rglob("*")) for name in ("notes", "other", "out")}
    for name in before:
        with pytest.raises(DatasetError, match="is not empty"):
            pack(folder, tmp_path / name)
    with pytest.raises(DatasetError, match="kind"):
        pack(folder, tmp_path / "other", resume=True)
    with pytest.raises(DatasetError, match="no manifest"):
        pack(folder, tmp_path / "notes", resume=True)
    with pytest.raises(DatasetError, match="dtype"):
        pack(folder, tmp_path / "out", dtype="float16", resume=True)
    assert {name: sorted((tmp_path / name).rglob("*")) for name in before} == before


def test_resuming_a_finished_corpus_verifies_it_and_reads_no_frames(tmp_path):
    folder = make(tmp_path / "in")
    first = pack(folder, tmp_path / "out")
    again = pack(folder, tmp_path / "out", resume=True)
    assert (again.items, again.frames, again.classes) == (first.items, first.frames, first.classes)
    assert (again.complete, again.source_bytes) == (True, 0)
    flip(next((tmp_path / "out" / "shards").iterdir()))
    with pytest.raises(ShardCorrupt):
        pack(folder, tmp_path / "out", resume=True)


# Stopping, killing, going on


def test_stop_leaves_something_to_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "CHUNK_BYTES", 100)
    folder = make(tmp_path / "in", range(1, 40))
    pack(folder, tmp_path / "whole", shard_bytes=SMALL)
    asked = []
    report = pack(folder, tmp_path / "out", shard_bytes=SMALL, stop=lambda: asked.append(1) or len(asked) > 9)
    assert not report.complete
    assert 0 < report.items < 39
    with pytest.raises(DatasetError, match="not packed to its end"):
        Corpus.open(tmp_path / "out")
    report = pack(folder, tmp_path / "out", shard_bytes=SMALL, resume=True)
    assert report.complete
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_disk_that_is_full_before_the_table_is_written_leaves_all_frames_for_a_resume(tmp_path, monkeypatch):
    folder = spoil(tmp_path / "in")
    pack(folder, tmp_path / "whole", skip_bad=True, shard_bytes=SMALL)

    def refuse(*_):
        raise StorageError("items.json: no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(packing, "write_items", refuse)
        with pytest.raises(StorageError, match="no space"):
            pack(folder, tmp_path / "out", skip_bad=True, shard_bytes=SMALL)
    with pytest.raises(DatasetError, match="not packed to its end"):
        Corpus.open(tmp_path / "out")
    report = pack(folder, tmp_path / "out", skip_bad=True, shard_bytes=SMALL, resume=True)

    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert [skipped.file for skipped in report.skipped] == ["0.npy", "1.npy", "3.npy"]


def add(folder):
    np.save(folder / "9.npy", np.zeros((2, 3), np.float32))


def touch(folder):
    array = np.load(folder / "1.npy")
    np.save(folder / "1.npy", array + 1)


def label(folder):
    (folder / "labels.csv").write_text("file,label\n0.npy,b\n1.npy,b\n2.npy,b\n3.npy,b\n")


@pytest.mark.parametrize("change", [add, touch, label, lambda folder: (folder / "3.npy").unlink()])
def test_a_folder_that_changed_before_the_resume_is_noticed(tmp_path, change):
    folder = make(tmp_path / "in")
    pack(folder, tmp_path / "out", shard_bytes=SMALL, stop=lambda: True)
    kept = files_of(tmp_path / "out")
    change(folder)
    with pytest.raises(DatasetError, match="has changed since"):
        pack(folder, tmp_path / "out", shard_bytes=SMALL, resume=True)
    assert files_of(tmp_path / "out") == kept


def test_a_file_that_changes_while_it_is_packed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "CHUNK_BYTES", 1)
    folder = make(tmp_path / "in")

    def change(_):
        if not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            touch(folder)

    read = FrameReader.check
    monkeypatch.setattr(FrameReader, "check", lambda self, dtype: (read(self, dtype), change(0))[0])
    with pytest.raises(DatasetError, match=r"1\.npy changed while it was being packed"):
        pack(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Altered after packing


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture
def packed(tmp_path):
    pack(make(tmp_path / "in"), tmp_path / "out", shard_bytes=SMALL)
    return tmp_path / "out"


def edit_manifest(packed, **changes):
    manifest = json.loads((packed / "manifest.json").read_text())
    (packed / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


ALTERED = {
    "shards/000000.safetensors": [
        (flip, r"000000\.safetensors: checksum"),
        (cut, "has .* bytes"),
        (os.unlink, "is missing"),
    ],
    "items.json": [(flip, r"items\.json: checksum differs"), (os.unlink, r"items\.json is missing")],
    "manifest.json": [(os.unlink, "no manifest")],
}


@pytest.mark.parametrize(("name", "change", "words"), [(name, *case) for name in ALTERED for case in ALTERED[name]])
def test_a_damaged_or_missing_file_is_found(packed, name, change, words):
    change(packed / name)
    with pytest.raises((DatasetError, ShardCorrupt), match=words):
        Corpus.open(packed).verify()


@pytest.mark.parametrize(
    "changes", [{"kind": "rf"}, {"complete": False}, {"dim": 4}, {"dtype": "float16"}, {"items": 47}, {"skipped": 3}]
)
def test_an_edited_manifest_is_found(packed, changes):
    edit_manifest(packed, **changes)
    with pytest.raises(DatasetError):
        Corpus.open(packed).verify()


def test_a_large_corpus_is_stored_in_half_the_memory(tmp_path, monkeypatch):
    folder = make(tmp_path / "in")
    small = pack(folder, tmp_path / "small")
    monkeypatch.setattr(packing, "SMALL_VALUES", 48 * 3 - 1)

    assert (small.dtype, pack(folder, tmp_path / "large").dtype) == ("float32", "float16")
    assert pack(folder, tmp_path / "small", resume=True).dtype == "float32"  # as it was begun


# Reading


def test_a_corpus_reads_any_frames_of_all_sequences(packed):
    corpus = Corpus.open(packed)
    every = torch.cat([corpus.sequence(index) for index in range(4)])
    for start, stop in ((0, 48), (3, 3), (4, 40), (47, 48)):
        out = torch.empty(stop - start, 3, dtype=torch.float16)
        corpus.read(start, stop, out)
        assert torch.equal(out, every[start:stop])
    assert (corpus.num_items, corpus.num_frames, corpus.fields["label"].tolist()) == (4, 48, [-1] * 4)
    for rows in ([], [4], [-1]):
        with pytest.raises(ConfigError):
            corpus.rows(rows)


# Made-up sequences


def test_made_up_sequences_are_the_same_for_a_seed_and_vary_in_length(tmp_path):
    first, again = (make_sequences(tmp_path / name, 60, 5, 3, seed=4, mean_length=30) for name in ("a", "b"))
    names = sorted(path.relative_to(first) for path in first.rglob("*.npy"))
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)
    lengths = [len(np.load(first / name)) for name in names]
    fewer = make_sequences(
        tmp_path / "fewer", 7, 5, 3, seed=4, mean_length=30
    )  # a sequence depends on its number alone
    assert all(file.read_bytes() == (first / file.relative_to(fewer)).read_bytes() for file in fewer.rglob("*.npy"))
    assert len(set(lengths)) > 20
    assert 22 < np.mean(lengths) < 38
    with pytest.raises(DatasetError, match="not empty"):
        make_sequences(first, 3)
    with pytest.raises(ConfigError, match="classes=0"):
        make_sequences(tmp_path / "c", classes=0)
