"""`brim datasets` as others build on it: JSON, exit codes, sentences; on files in --data and on PostgreSQL."""

import json
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from brim.cli import main
from brim.sequences.corpus.synthetic import make_sequences

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))


KEYS = ["id", "name", "kind", "state", "path", "owned", "items", "bytes", "job_id", "about", "created_at"]


@pytest.fixture
def cells(tmp_path):
    folder = tmp_path / "cells"
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
        assert cv2.imwrite(str(folder / name / "a.png"), np.zeros((8, 8, 3), np.uint8))
    return folder


@pytest.fixture
def run(tmp_path, capsys):
    """A command on a data directory of its own: exit code, standard output, standard error."""

    def command(*argv, data=tmp_path / "data"):
        capsys.readouterr()
        code = main(["datasets", *map(str, argv), "--data", str(data)])
        return (code, *capsys.readouterr())

    return command


def test_a_dataset_is_added_listed_and_removed(run, cells, tmp_path):
    code, out, err = run("add", "my cells", cells, "--kind", "images", "--json")
    added = json.loads(out)
    assert (code, err, list(added)) == (0, "", KEYS)
    assert (added["name"], added["kind"], added["items"], added["state"]) == ("my cells", "images", 1, "ready")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700

    code, out, _ = run("list", "--json")
    assert json.loads(out) == {"datasets": [added], "page": 1, "pages": 1, "total": 1}

    code, out, _ = run("remove", "my cells", "--json")
    assert (code, json.loads(out)) == (0, {"id": added["id"], "name": "my cells", "files_deleted": False})
    assert (cells / "images" / "a.png").exists()
    assert run("list") == (0, "", "no datasets\n")


def test_lines_for_people_name_the_id(run, cells):
    _, out, _ = run("add", "c", cells, "--kind", "images")
    assert run("list", "--kind", "rf")[2] == "no datasets\n"
    head, row = (line.split() for line in run("list", "--kind", "images")[1].splitlines())
    assert head == ["ID", "NAME", "KIND", "ITEMS", "SIZE", "STATE"]
    assert row == [out.split()[0], "c", "images", "1", "0.0", "MB", "ready"]
    assert out.split("  ")[1:] == ["c", "images, 1 items, 0.0 MB\n"]


def test_a_folder_of_sequences_is_packed_and_its_files_go_with_it(run, tmp_path):
    make_sequences(tmp_path / "npy", 12, dim=4, classes=2, mean_length=6)

    code, out, _ = run("add", "s", tmp_path / "npy", "--kind", "sequences", "--json")
    added = json.loads(out)
    assert (code, added["path"]) == (0, f"datasets/{added['id']}")
    assert (tmp_path / "data" / added["path"] / "manifest.json").is_file()

    code, out, _ = run("remove", added["id"], "--json")
    assert json.loads(out)["files_deleted"]
    assert not (tmp_path / "data" / added["path"]).exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["add", "n", "{tmp}/nowhere", "--kind", "rf"], "nowhere"),
        (["add", "n", "{tmp}", "--kind", "images"], "{tmp}"),
        (["add", " ", "{tmp}", "--kind", "rf"], "NAME"),
        (["add", "n", "{tmp}", "--kind", "rf", "--labels", "x.csv"], "--labels"),
        (["add", "n", "{tmp}", "--kind", "rf", "--database", "mysql://x/y"], "--database"),
        (["list"], "holds no catalogue"),
        (["remove", "x"], "holds no catalogue"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(run, tmp_path, argv, words):
    code, out, err = run(*(part.replace("{tmp}", str(tmp_path)) for part in argv))

    assert (code, out) == (2, "")
    assert words.replace("{tmp}", str(tmp_path)) in err
    assert err.startswith("error: ")
    assert len([line for line in err.splitlines() if not line.startswith("run ")]) == 1


def test_an_ambiguous_or_unknown_name_is_not_guessed(run, cells):
    run("add", "c", cells, "--kind", "images")
    run("add", "c", cells / "images", "--kind", "images")

    code, _, err = run("remove", "c")
    assert (code, "2 datasets" in err) == (2, True)
    code, _, err = run("remove", "d")
    assert (code, "brim datasets list" in err) == (2, True)


def test_a_server_that_does_not_answer_is_said_with_its_reason_and_without_the_password(run, cells):
    url = "postgresql://brim:secret@127.0.0.1:1/x"

    code, out, err = run("add", "c", cells, "--kind", "images", "--database", url)

    assert (code, out) == (2, "")
    assert "does not answer" in err
    assert "refused" in err
    assert "secret" not in err
