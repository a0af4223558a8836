"""Networks of one's own for sequences: trained, scored, embedded, added as a model, and refused in one sentence."""

import json
import warnings

import numpy as np
import pytest
import torch

from brim.cli import main
from brim.engine.networks import find_source
from brim.errors import ConfigError

CODE = """
from torch import nn

class Mean(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.score = nn.Linear(dim, classes)

    def forward(self, frames, length):
        return self.score(frames.sum(1) / length.unsqueeze(-1))

def one(dim, classes):
    return Mean(dim, 1)

def other():
    return None
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two classes that differ in the mean of a feature."""
    folder, rng = tmp_path_factory.mktemp("sequences"), np.random.default_rng(0)
    for label in (0, 1):
        (folder / "npy" / str(label)).mkdir(parents=True)
        for number in range(24):
            frames = rng.normal(size=(rng.integers(5, 12), 4)).astype(np.float32)
            frames[:, 1] += 3 * label
            np.save(folder / "npy" / str(label) / f"{number}.npy", frames)
    (folder / "net.py").write_text(CODE)
    assert main(["sequence", "pack", str(folder / "npy"), "--out", str(folder / "corpus"), "--json"]) == 0
    space: dict = {}
    exec(CODE, space)
    auto = torch.export.Dim.AUTO
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own classes
        program = torch.export.export(
            space["Mean"](4, 2),
            (torch.rand(3, 7, 4), torch.tensor([7, 5, 3])),
            dynamic_shapes=({0: auto, 1: auto}, {0: auto}),
        )
        torch.export.save(program, folder / "net.pt2")
    return folder


@pytest.fixture
def brim(place, capsys, monkeypatch):
    monkeypatch.chdir(place)

    def command(*argv):
        capsys.readouterr()
        code = main([*map(str, argv)])
        return (code, *capsys.readouterr())

    return command


OPTIONS = ["--classifier-epochs", 30, "--learning-rate", 0.05, "--device", "cpu", "--json"]


@pytest.mark.parametrize("network", ["net.py:Mean", "net.pt2"])
def test_a_network_of_one_s_own_learns_and_is_found_again(brim, place, tmp_path, network):
    source = find_source(network)
    code, out, err = brim("sequence", "train", "corpus", "--network", network, "--out", tmp_path / "run", *OPTIONS)
    assert code == 0, err
    report = json.loads(out)
    assert (report["model"], report["scores"]["accuracy"] > 0.9) == (source.title, True)
    assert f"{source.reference}, sha256 {source.sha256}" in err
    assert json.loads((tmp_path / "run/run.json").read_text())["network"] == source.as_dict()

    code, out, err = brim("sequence", "evaluate", tmp_path / "run", "corpus", "--json", "--device", "cpu")
    assert (code, json.loads(out)["accuracy"]) == (0, report["scores"]["accuracy"]), err
    code, out, err = brim("models", "add", "own", tmp_path / "run", "--data", tmp_path / "data", "--json")
    assert code == 0, err
    assert json.loads(out)["about"]["source"]["sha256"] == source.sha256


def test_changed_code_is_said_and_not_served(brim, place, tmp_path):
    from brim.jobs.registry.models import look
    from brim.sequences.evaluation.serving import ClassifyServable

    file = tmp_path / "mine.py"
    file.write_text(CODE)
    options = ["--classifier-epochs", 1, "--device", "cpu", "--json"]
    code, _, err = brim("sequence", "train", "corpus", "--network", f"{file}:Mean", "--out", tmp_path / "run", *options)
    assert code == 0, err
    with pytest.raises(ConfigError, match="administrator"):
        look(tmp_path / "run")
    file.write_text(CODE + "\n")
    code, _, err = brim("sequence", "evaluate", tmp_path / "run", "corpus", "--json", "--device", "cpu")
    assert (code, "has changed since" in err) == (0, True)
    with pytest.raises(ConfigError, match="has changed"):
        ClassifyServable(tmp_path / "run", torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--network", "net.py:one"], "expected [1, 2]"),
        (["--network", "net.py:other"], "TypeError"),
        (["--network", "net.py:Mean", "--mode", "self"], "learns from labels"),
        (["--network", "net.py:Mean", "--task", "regression"], "learns classes"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(brim, tmp_path, options, words):
    code, out, err = brim("sequence", "train", "corpus", *options, "--out", tmp_path / "run")
    errors = [line for line in err.splitlines() if not line.startswith("network: ")]
    assert (code, out, len(errors)) == (2, "", 1), err
    assert words in errors[0]
    assert not (tmp_path / "run").exists()
