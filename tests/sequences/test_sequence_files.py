"""Files that people have: what is packed from them is what was written to them."""

import numpy as np
import pytest
import torch

from brim.errors import BrimError
from brim.sequences import Corpus, pack
from brim.sequences.config import SourceConfig
from brim.sequences.corpus import SequenceFolder, open_sequences
from brim.sequences.corpus.archives import parse_archive


def packed(path, out, **settings):
    report = pack(path, out, **settings)
    return Corpus.open(out), report


def frames(corpus, name):
    return corpus.sequence(corpus.ids.index(name)).float().numpy()


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# .npy


def test_layers_are_stored_side_by_side_and_a_single_one_is_none(tmp_path):
    arrays = {"a": random(3, 7, 4), "b": np.asfortranarray(random(3, 5, 4, seed=1))}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    single = tmp_path / "single"
    single.mkdir()
    np.save(single / "c.npy", random(1, 6, 4))

    corpus, report = packed(tmp_path, tmp_path / "out", labels=labels(tmp_path, "a.npy", "b.npy"), dtype="float32")
    one, _ = packed(single, tmp_path / "one", dtype="float32")

    assert (corpus.layers, corpus.dim, one.layers, one.dim) == (3, 12, 1, 4)
    for name, array in arrays.items():
        np.testing.assert_array_equal(frames(corpus, f"{name}.npy").reshape(-1, 3, 4), array.transpose(1, 0, 2))
    np.testing.assert_array_equal(frames(one, "c.npy"), random(1, 6, 4)[0])
    assert "3 layers of 4 features" in " ".join(report.notes)
    out = torch.empty(5, 12)
    SequenceFolder(tmp_path, tmp_path / "some.csv").read_item(1, out)
    np.testing.assert_array_equal(out.numpy(), frames(corpus, "b.npy"))  # not packed, the same


def labels(folder, *files):
    file = folder / "some.csv"
    file.write_text("file,label\n" + "".join(f"{name},{number % 2}\n" for number, name in enumerate(files)))
    return file


def test_features_first_is_recognised_and_said(tmp_path):
    arrays = [random(4, length, seed=length) for length in (7, 9, 12)]
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)

    corpus, report = packed(tmp_path, tmp_path / "out", dtype="float32")
    with pytest.raises(BrimError, match="has 9 features"):
        pack(tmp_path, tmp_path / "other", source=SourceConfig(layout="frames-first"))

    assert corpus.dim == 4
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(frames(corpus, f"{number}.npy"), array.T)
    assert "(features, frames)" in report.notes[0]
    unpacked = SequenceFolder(tmp_path)
    out = torch.empty(9, 4)
    unpacked.read_item(1, out)
    np.testing.assert_array_equal(out.numpy(), arrays[1].T)
    alike = tmp_path / "alike"
    alike.mkdir()
    np.save(alike / "a.npy", arrays[0])
    assert packed(alike, tmp_path / "asked", source=SourceConfig(layout="features-first"))[0].dim == 4


def test_one_file_of_another_width_is_not_taken_for_transposed(tmp_path):
    for number, dim in enumerate((3, 3, 3, 2)):
        np.save(tmp_path / f"{number}.npy", random(6, dim))

    with pytest.raises(BrimError, match=r"3\.npy has 2 features, most of the 4 files have 3"):
        pack(tmp_path, tmp_path / "out")


# Archives

TS = "# about\n@problemName a\n@timeStamps false\n@classLabel true x y\n@data\n1,2,3:4,5,6:x\n\n7,8:9,10:y\n"


def test_both_parts_of_an_archive_are_packed_with_their_split(tmp_path):
    (tmp_path / "a_TRAIN.ts").write_text(TS)
    (tmp_path / "a_TEST.ts").write_text(TS.replace("1,2,3", "1,2,?").replace("4,5,6", "4,5,NaN"))
    (tmp_path / "a_TRAIN.arff").write_text("not looked at")

    for source in (tmp_path, tmp_path / "a_TEST.ts"):
        corpus, report = packed(source, tmp_path / f"out-{source.name}")

        assert corpus.split == ("test", "test", "train", "train")
        assert corpus.label_names() == ["x", "y", "x", "y"]
        np.testing.assert_array_equal(frames(corpus, "a_TRAIN.ts/000001"), [[1, 4], [2, 5], [3, 6]])
        np.testing.assert_array_equal(frames(corpus, "a_TEST.ts/000001"), [[1, 4], [2, 5]])
        assert "cut off as padding" in " ".join(report.notes)


def test_a_line_of_a_tsv_is_a_label_and_a_sequence(tmp_path):
    (tmp_path / "a_TRAIN.tsv").write_text("1\t0.5\t1\t2\n-1\t3\t4\tNaN\n")
    (tmp_path / "a_TEST.tsv").write_text("1\t1\t2\t3\n")

    corpus, _ = packed(tmp_path / "a_TRAIN.tsv", tmp_path / "out")

    assert corpus.split == ("test", "train", "train")
    assert corpus.label_names() == ["1", "1", "-1"]
    np.testing.assert_array_equal(frames(corpus, "a_TRAIN.tsv/000001"), [[0.5], [1], [2]])
    np.testing.assert_array_equal(frames(corpus, "a_TRAIN.tsv/000002"), [[3], [4]])


def test_a_damaged_cache_is_packed_anew(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a.ts"
    file.write_text(TS)
    before = open_sequences(file)
    (place,) = (tmp_path / "cache" / "brim" / "sequences").iterdir()
    for name in ("manifest.json", "shards/000000.safetensors"):
        content = (place / name).read_bytes()
        (place / name).write_bytes(content[:-2] + b"??")

        again = open_sequences(file)

        assert caplog.text.count("is not used") == 1
        caplog.clear()
        np.testing.assert_array_equal(again.sequence(0), before.sequence(0))


def test_a_file_is_packed_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a.ts"
    file.write_text(TS)
    open_sequences(file)
    (place,) = (tmp_path / "cache" / "brim" / "sequences").iterdir()
    before = (place / "manifest.json").stat().st_mtime_ns

    open_sequences(file)
    assert (place / "manifest.json").stat().st_mtime_ns == before
    file.write_text(TS.replace("1,2,3", "1,2,8"))  # of the same size
    np.testing.assert_array_equal(open_sequences(file).sequence(0)[:, 0], [1, 2, 8])


MALFORMED = {
    "no @data": (TS.replace("@data", "@date"), "line 6: '1,2,3:4,5,6:x' comes before @data"),
    "not a number": (TS.replace("9,10", "9,ten"), r"000002 \(line 8\) has a value in channel 1 that is not a number"),
    "one channel less": (TS.replace("7,8:9,10", "7,8"), "has 1 features, most of the"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_archive_is_refused_with_its_line(tmp_path, case):
    text, words = MALFORMED[case]
    (tmp_path / "a.ts").write_text(text + ("1,2:3,4:x\n" if case == "one channel less" else ""))

    with pytest.raises(BrimError, match=words) as failure:
        pack(tmp_path / "a.ts", tmp_path / "out")

    assert "a.ts" in str(failure.value)
    assert not (tmp_path / "out").exists()


def test_an_archive_without_labels_or_with_times_is_parsed():
    text = "@timeStamps true\n@classLabel false\n@data\n(2020-01-01 10:30,1),(2020-01-01 10:31,2)\n"

    (one,) = parse_archive(text, "a", ".ts").sequences

    np.testing.assert_array_equal(one.frames, [[1], [2]])
    assert one.label == ""


def test_an_arff_line_is_a_sequence_with_its_label_last():
    begin = "@relation a\n@attribute t0 numeric\n@attribute t1 numeric\n"
    several = "@attribute b relational\n@attribute c0 numeric\n@end b\n@attribute class {x,y}\n@data\n"
    texts = (
        begin + "@attribute class {x,y}\n@data\n1,2,x\n3,4,?\n", several + "'1,2,3\\n4,5,6',y\n",
        begin + "@attribute target numeric\n@data\n1,2,0.5\n", begin + "@attribute t2 numeric\n@data\n1,2,0.5\n",
    )  # fmt: skip

    found = [
        [(one.frames.tolist(), one.label) for one in parse_archive(text, "a", ".arff").sequences] for text in texts
    ]

    assert found == [
        [([[1], [2]], "x"), ([[3], [4]], "")],
        [([[1, 4], [2, 5], [3, 6]], "y")],
        [([[1], [2]], "0.5")],
        [([[1], [2], [0.5]], "")],
    ]
    assert parse_archive("@classLabel true x\n@data\n1,2:?\n", "a", ".ts").sequences[0].label == ""


def test_a_part_alone_divides_nothing_and_of_several_problems_a_folder_means_its_own(tmp_path):
    (tmp_path / "b").mkdir()
    for name in "abc":
        (tmp_path / "b" / f"{name}_TRAIN.ts").write_text(TS)

    corpus, _ = packed(tmp_path / "b", tmp_path / "out")
    (tmp_path / "b").rename(tmp_path / "d")

    assert corpus.ids == ("b_TRAIN.ts/000001", "b_TRAIN.ts/000002")
    assert corpus.split == ("", "")
    with pytest.raises(BrimError, match="holds 3 problems: a, b, c"):
        pack(tmp_path / "d", tmp_path / "other")


# .npz, .csv, .parquet


def test_an_npz_file_says_lengths_parts_and_the_label_of_a_single_array(tmp_path):
    stack = random(4, 5, 2)
    np.savez(tmp_path / "parts.npz", X_train=stack[:2], lengths_train=[2, 5], X_val=stack[2:], y_val=[7, 8])
    for name in "ab":
        (tmp_path / "single").mkdir(exist_ok=True)
        np.savez(tmp_path / "single" / f"{name}.npz", x=stack[0], label=name * 2)

    parts, _ = packed(tmp_path / "parts.npz", tmp_path / "1")
    single, _ = packed(tmp_path / "single", tmp_path / "2")

    assert parts.lengths.tolist() == [2, 5, 5, 5]
    np.testing.assert_array_equal(frames(parts, "parts.npz/X_train/000000"), stack[0, :2])
    assert (parts.split, parts.label_names()) == (("train",) * 2 + ("validation",) * 2, ["", "", "7", "8"])
    assert single.label_names() == ["aa", "bb"]


def test_tables_are_ordered_by_time_read_again_when_large_and_chosen_by_labels(tmp_path, monkeypatch):
    folder = tmp_path / "tables"
    folder.mkdir()
    for number in (1, 2):
        lines = [f"9,{who},{time},{100 * (who == 'b') + 10 * number + time}\n" for who in "ba" for time in (2, 1)]
        (folder / f"{number}.csv").write_text("id,who,time,x\n" + "".join(lines))
    (folder / "labels.csv").write_text("file,label\n1.csv/b,p\n2.csv/a,q\n")
    monkeypatch.setattr("brim.sequences.corpus.survey._KEPT_BYTES", 0)

    corpus, _ = packed(folder, tmp_path / "out", source=SourceConfig(id_column="who"))
    (tmp_path / "alone.csv").write_text("time,x\n2,20\n1,10\n")
    alone, _ = packed(tmp_path / "alone.csv", tmp_path / "one")

    assert (corpus.ids, corpus.label_names()) == (("1.csv/b", "2.csv/a"), ["p", "q"])
    np.testing.assert_array_equal(frames(corpus, "1.csv/b"), [[9, 111], [9, 112]])
    np.testing.assert_array_equal(frames(corpus, "2.csv/a"), [[9, 21], [9, 22]])
    np.testing.assert_array_equal(frames(alone, "alone.csv"), [[10], [20]])
    (tmp_path / "gap.csv").write_text("x,y\n1,2\n3,\n")
    with pytest.raises(BrimError, match="frame 1 holds nan"):
        pack(tmp_path / "gap.csv", tmp_path / "gap")


def test_an_npz_file_holds_sequences_or_stacks_of_them(tmp_path):
    ragged = {"one": random(3, 2), "two": random(5, 2, seed=1)}
    np.savez(tmp_path / "ragged.npz", **ragged)
    stack = random(6, 4, 2)
    y, speaker = np.array([0, 1, 0, 1, 0, 1]), np.array(["s1", "s1", "s2", "s2", "s3", "s3"])
    np.savez_compressed(tmp_path / "stack.npz", X=stack, y=y, speaker=speaker)
    np.savez(tmp_path / "parts.npz", X_train=stack[:2], y_train=y[:2], X_test=stack[2:4], y_test=y[1:3])

    some, _ = packed(tmp_path / "ragged.npz", tmp_path / "1", dtype="float32")
    stacked, _ = packed(tmp_path / "stack.npz", tmp_path / "2", dtype="float32")
    parts, _ = packed(tmp_path / "parts.npz", tmp_path / "3", dtype="float32")

    for name, array in ragged.items():
        np.testing.assert_array_equal(frames(some, f"ragged.npz/{name}"), array)
    np.testing.assert_array_equal(frames(stacked, "stack.npz/000004"), stack[4])
    assert stacked.label_names() == list("010101")
    assert stacked.columns["speaker"] == ("s1", "s1", "s2", "s2", "s3", "s3")
    other, _ = packed(tmp_path / "stack.npz", tmp_path / "4", label="speaker")
    assert (other.classes, other.columns["label"]) == (("s1", "s2", "s3"), tuple("010101"))
    assert parts.ids[0] == "parts.npz/X_test/000000"
    assert parts.split == ("test", "test", "train", "train")
    assert parts.label_names() == ["1", "0", "0", "1"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_long_table_has_a_sequence_for_each_id(tmp_path, suffix):
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.table(
        {
            "id": ["b", "a", "b", "a", "a"],
            "time": [1.0, 0.2, 0.5, 0.1, 0.3],
            "x": [1.5, 2.0, 3.0, 4.0, 5.0],
            "n": [1, 2, 3, 4, 5],
            "label": ["run", "walk", "run", "walk", "walk"],
            "subject": [7, 8, 7, 8, 8],
        }
    )
    file = tmp_path / f"long{suffix}"
    (csv.write_csv if suffix == ".csv" else parquet.write_table)(table, file)

    corpus, _ = packed(file, tmp_path / "out")

    assert corpus.ids == (f"{file.name}/a", f"{file.name}/b")
    np.testing.assert_array_equal(frames(corpus, f"{file.name}/a"), [[4, 4], [2, 2], [5, 5]])
    np.testing.assert_array_equal(frames(corpus, f"{file.name}/b"), [[3, 3], [1.5, 1]])
    assert corpus.label_names() == ["walk", "run"]
    assert corpus.columns == {"subject": ("8", "7")}


def test_tables_of_one_sequence_each_take_labels_from_folders(tmp_path):
    for name, text in {"up/1": "x;y\n1;2\n3;4\n", "down/1": "1,2\n5,6\n", "down/2": "x\ty\n7\t8\n"}.items():
        file = tmp_path / f"{name}.csv"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    corpus, _ = packed(tmp_path, tmp_path / "out")

    assert corpus.label_names() == ["down", "down", "up"]
    np.testing.assert_array_equal(frames(corpus, "down/1.csv"), [[1, 2], [5, 6]])
    np.testing.assert_array_equal(frames(corpus, "up/1.csv"), [[1, 2], [3, 4]])


BAD_FILES = {
    "a.npz": (b"PK\x03\x04nothing", "is not a readable .npz file"),
    "a.csv": (b"name,label\nx,y\n", "has no column of numbers"),
    "c.csv": (b"id,x,label\n1,2,a\n1,3,b\n", "has several values in the column label, such as a, b"),
    "a.txt": (b"1 2 3", "is not a directory; give a folder or file of .npy"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_table_is_refused_in_a_sentence(tmp_path, name):
    content, words = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)

    with pytest.raises(BrimError) as failure:
        pack(tmp_path / name, tmp_path / "out")

    assert words in str(failure.value)
    assert name in str(failure.value)
    assert not (tmp_path / "out").exists()
