"""`brim models` as others build on it: JSON, exit codes, sentences; what is listed has been loaded once."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from brim.cli import main
from brim.jobs.store import Catalogue
from brim.segmentation import create_model
from brim.segmentation.networks import WEIGHTS, save_weights
from brim.segmentation.training import RUN
from brim.sequences.corpus.synthetic import make_sequences

KEYS = ["name", "kind", "network", "path", "version", "about", "added_at"]


@pytest.fixture
def brim(tmp_path, capsys):
    """A command on a data directory of its own: exit code, standard output, standard error."""

    def command(*argv, data=tmp_path / "data"):
        capsys.readouterr()
        code = main(["models", *map(str, argv), "--data", str(data)])
        return (code, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    torch.manual_seed(0)
    save_weights(create_model("unet_tiny"), file, {})
    return file


@pytest.fixture(scope="module")
def segment_run(tmp_path_factory, weights) -> Path:
    """As training leaves it."""
    run = tmp_path_factory.mktemp("runs") / "cells"
    run.mkdir()
    save_file(load_file(weights), run / WEIGHTS, metadata={"model": "unet_tiny"})
    RUN.write(run, {"format_version": 1, "kind": "segment-train", "training": {"model": "unet_tiny"}})
    return run


@pytest.fixture(scope="module")
def sequence_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sequences")
    make_sequences(folder / "npy", 16, dim=4, classes=2, mean_length=6)
    assert main(["sequence", "pack", str(folder / "npy"), "--out", str(folder / "corpus"), "--json"]) == 0
    options = ["--mode", "supervised", "--classifier-epochs", "1", "--device", "cpu", "--json"]
    assert main(["sequence", "train", str(folder / "corpus"), "--out", str(folder / "run"), *options]) == 0
    return folder / "run"


def test_a_model_is_added_listed_replaced_and_removed(brim, weights, segment_run):
    code, out, err = brim("add", "cells", weights, "--network", "unet_tiny", "--json")
    added = json.loads(out)
    assert (code, err, list(added)) == (0, "", [*KEYS, "replaced"])
    assert (added["kind"], added["network"], added["path"]) == ("segment", "unet_tiny", str(weights))
    assert added["about"]["parameters"] > 0
    assert not added.pop("replaced")
    assert json.loads(brim("list", "--json")[1]) == {"models": [added]}

    again = json.loads(brim("add", "cells", segment_run, "--json")[1])
    assert again["replaced"]
    assert again["version"] != added["version"]
    assert again["path"] == str(segment_run)
    assert len(json.loads(brim("list", "--json")[1])["models"]) == 1

    code, out, _ = brim("remove", "cells", "--json")
    assert (code, json.loads(out)) == (0, {"name": "cells", "path": str(segment_run)})
    assert segment_run.exists()
    assert brim("list") == (0, "", 'no models; add one with "brim models add NAME RUN"\n')


def test_lines_for_people_end_with_what_came_of_it(brim, segment_run):
    code, out, err = brim("add", "cells", segment_run)
    assert (code, err) == (0, "")
    assert out.startswith("cells  segment, unet_tiny, ")
    assert out.endswith(": added; requests may name it now\n")
    assert ": replaced;" in brim("add", "cells", segment_run)[1]
    assert str(segment_run) in brim("list")[1]
    assert brim("remove", "cells")[1] == f"cells: removed; its files stay in {segment_run}\n"


def test_a_run_says_itself_what_it_is_of(brim, sequence_run):
    code, out, err = brim("add", "steps", sequence_run, "--json")
    assert code == 0, err
    added = json.loads(out)
    assert (added["kind"], added["network"]) == ("classify", "cnn_lstm")
    assert added["about"]["classes"] == ["class_0", "class_1"]

    code, _, err = brim("add", "steps", sequence_run, "--network", "hrnet")
    assert (code, str(sequence_run) in err) == (2, True)


def test_runs_of_a_service_are_listed_by_kind_and_served_by_their_id(brim, segment_run, tmp_path, capsys):
    data = ["--data", str(tmp_path / "data")]
    brim("add", "cells", segment_run)
    with Catalogue.open(f"sqlite:///{tmp_path}/data/catalogue.sqlite") as catalogue:
        config = {"model": "unet_tiny"}
        run = catalogue.runs.add(name="r", kind="segment.train", path=str(segment_run), config=config, summary={})
        catalogue.jobs.submit(SimpleNamespace(kind="rf.train", name="now", config={}), makes="run")
        training = catalogue.runs.page(kind="rf.train").rows[0]
    capsys.readouterr()

    assert main(["runs", "list", "--kind", "segment.train", "--json", *data]) == 0
    listed = json.loads(capsys.readouterr().out)
    added = json.loads(brim("add", "other", run.id, "--json")[1])

    assert ([row["id"] for row in listed["runs"]], listed["total"]) == ([run.id], 1)
    assert (added["name"], added["path"], added["network"]) == ("other", str(segment_run), "unet_tiny")
    code, _, err = brim("add", "third", training.id)
    assert (code, 'the run "now" is still training' in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["add", "a b", "{run}"], "NAME"),
        (["add", "n", "{tmp}/nowhere"], "nowhere"),
        (["add", "n", "{weights}"], "--network"),
        (["add", "n", "{weights}", "--network", "hrnet"], "tiny.safetensors"),
        (["add", "n", "{run}", "--network", "hrnet"], "unet_tiny"),
        (["list"], "--data"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(brim, tmp_path, weights, segment_run, argv, words):
    places = {"{tmp}": tmp_path, "{run}": segment_run, "{weights}": weights}
    for mark, place in places.items():
        argv = [part.replace(mark, str(place)) for part in argv]

    code, out, err = brim(*argv)

    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: save_file({k: v * float("nan") for k, v in load_file(file).items()}, file), "holds NaN or Inf"),
        (lambda file: save_file(dict(list(load_file(file).items())[1:]), file), "is missing"),
    ],
)
def test_damaged_weights_are_not_listed(brim, weights, tmp_path, damage, words):
    file = Path(shutil.copy(weights, tmp_path / "w.safetensors"))
    damage(file)

    code, _, err = brim("add", "n", file, "--network", "unet_tiny")

    assert (code, words in err) == (2, True), err
    assert brim("list")[2].startswith("no models")
