import pytest

from brim.errors import DatasetError
from brim.sequences.corpus.labels import SequenceLabel, find_labels, number_classes

IDS = ["a.npy", "b/c.npy", "b/d e.npy"]


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_a_csv_file_chooses_files_and_gives_labels_and_split(tmp_path):
    text = 'file,label,split\nb/d e.npy,"x, y",test\n\n./a.npy, ü ,train\n'
    found = find_labels(tmp_path, IDS, write(tmp_path / "l.csv", text, "utf-8-sig"))
    assert found.of == {
        "a.npy": SequenceLabel(name="ü", split="train"),
        "b/d e.npy": SequenceLabel(name="x, y", split="test"),
    }
    assert list(found.of) == ["a.npy", "b/d e.npy"]
    assert found.source == str(tmp_path / "l.csv")
    assert find_labels(tmp_path, IDS, tmp_path / "l.csv", own={"a.npy": SequenceLabel(name="z")}) == found


BAD = {
    "": "first line",
    "file,label\na.npy,x\na.npy,y\n": "line 3: a.npy is named twice",
    "file,label\na.npy,x\nz.npy,x\n../a.npy,x\n": "z.npy and 1 more",
    "file,label\na.npy,\n": "line 2: a.npy has an empty label",
    "file,label,split\na.npy,x,eval\n": "split 'eval', expected train, validation, test",
    "file,label,split\na.npy,x,train\nb/c.npy,x,\n": "b/c.npy has no split",
    'file,label\n"a.npy,x\n': "not a CSV file",
}


@pytest.mark.parametrize("text", BAD)
def test_a_csv_file_that_does_not_fit_is_refused(tmp_path, text):
    with pytest.raises(DatasetError) as failure:
        find_labels(tmp_path, IDS, write(tmp_path / "l.csv", text))
    assert BAD[text] in str(failure.value)
    assert "l.csv" in str(failure.value)


def test_other_columns_are_kept_and_one_of_them_may_be_the_label(tmp_path):
    file = write(tmp_path / "l.csv", "File,Speaker,valence,split\na.npy,s1,0.5,dev\nb/c.npy,s2,,test\n")

    asked = find_labels(tmp_path, IDS, file, "valence")

    assert asked.of["a.npy"] == SequenceLabel(name="0.5", split="validation", more={"speaker": "s1"})
    assert asked.of["b/c.npy"] == SequenceLabel(split="test", more={"speaker": "s2"})
    assert (asked.column, find_labels(tmp_path, IDS, file).column) == ("valence", "")
    with pytest.raises(DatasetError, match="no column 'arousal'; its columns are speaker, valence"):
        find_labels(tmp_path, IDS, file, "arousal")


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (["a/1.npy", "b/2.npy", "b/3.npy"], ["a", "b", "b"]),
        (["a/1.npy", "2.npy"], ["", ""]),
        (["1.npy", "2.npy"], ["", ""]),
        (["a/1.npy", "b/c/2.npy"], ["", ""]),
        (["a/1.npy", "a/2.npy"], ["", ""]),  # one class tells nothing apart
    ],
)
def test_sub_folders_are_classes_when_all_files_are_one_deep(tmp_path, ids, names):
    found = find_labels(tmp_path, ids)
    assert [found.of[name].name for name in ids] == names
    assert found.source == ("folders" if any(names) else "none")


def test_classes_are_numbered_in_natural_order():
    large = "9" * 5000  # more digits than Python makes a number of
    classes, numbers = number_classes(["10", "9", "", "b2", "b10", "9", large])
    assert classes == ("9", "10", large, "b2", "b10")
    assert numbers == [1, 0, -1, 3, 4, 0, 2]
