"""Networks that people bring: code, packages, traced programs; found again by a run, and refused in one sentence."""

import io
import json
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from brim.cli import main
from brim.engine.networks.program import load_program
from brim.engine.networks.source import _entry_points, find_source
from brim.errors import ConfigError
from brim.runs import load_run
from brim.segmentation import create_model
from brim.segmentation.config import REGISTERED, network_names
from brim.segmentation.networks import InferenceNetwork, default_setting

CODE = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.score = nn.Conv2d(4, outputs, 1)

    def forward(self, x):
        y = self.score(nn.functional.max_pool2d(self.body(x), 2))
        return nn.functional.interpolate(y, size=x.shape[2:], mode="bilinear")

def make(outputs=1):
    return Small(outputs)

def nothing():
    return None

def raises():
    raise RuntimeError("no such layer")

def halves():
    return nn.Conv2d(3, 1, 3, stride=2, padding=1)

class Several(Small):
    def forward(self, x):
        return {"out": super().forward(x)}
"""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget():
    """What a command brought stays in its process only."""
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Code, programs and images."""
    folder = tmp_path_factory.mktemp("brought")
    (folder / "net.py").write_text(CODE)
    (folder / "broken.py").write_text("def make(:\n")
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number in range(4):
        mask = np.zeros((64, 64), np.uint8)
        mask[8 : 30 + number, 10:40] = 255
        cv2.imwrite(str(folder / f"masks/{number}.png"), mask)
        noise = rng.integers(0, 60, (64, 64, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"images/{number}.png"), noise + (mask // 2)[..., None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own classes
        export(folder)
    (folder / "evil.pt").write_bytes(pickle.dumps(eval))
    changed(folder / "net.pt2", folder / "other_device.pt2", '"cpu"', '"cuda"')
    changed(folder / "net.pt2", folder / "pickled.pt2", '"use_pickle": false', '"use_pickle": true')
    return folder


def export(folder: Path) -> None:
    module, auto = small(folder), torch.export.Dim.AUTO
    sizes = ({0: auto, 2: auto, 3: auto},)
    torch.export.save(
        torch.export.export(module, (torch.rand(2, 3, 64, 64),), dynamic_shapes=sizes), folder / "net.pt2"
    )
    torch.export.save(torch.export.export(module, (torch.rand(1, 3, 64, 64),)), folder / "fixed.pt2")
    torch.jit.trace(module, torch.rand(2, 3, 64, 64), check_trace=False).save(str(folder / "net.pt"))


def small(folder: Path) -> torch.nn.Module:
    torch.manual_seed(3)
    space: dict = {}
    exec((folder / "net.py").read_text(), space)
    module = space["make"]()
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return module.eval()


def changed(file: Path, copy: Path, old: str, new: str) -> None:
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data.replace(old.encode(), new.encode()) if name.endswith(".json") else data)


@pytest.fixture
def brim(place, capsys, monkeypatch):
    monkeypatch.chdir(place)

    def command(*argv):
        capsys.readouterr()
        code = main([*map(str, argv)])
        return (code, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def run(place, tmp_path_factory) -> Path:
    """Trained by the command line with code of a file that tests may change."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copy(place / "net.py", folder / "mine.py")
    images = ["--images", str(place / "images"), "--masks", str(place / "masks")]
    options = ["--epochs", "1", "--size", "64", "--batch-size", "2", "--device", "cpu", "--json"]
    network = f"{folder / 'mine.py'}:make"
    assert main(["segment", "train", *images, "--network", network, "--out", str(folder / "run"), *options]) == 0
    return folder / "run"


def predict(brim, tmp_path, *options):
    always = ("--batch-size", 1, "--device", "cpu", "--json")
    return brim("segment", "predict", "images", "--out", tmp_path / "out", *always, *options)


def test_a_run_finds_its_code_again_and_says_when_it_changed(brim, run, tmp_path):
    REGISTERED.clear()
    file = run.parent / "mine.py"
    source = find_source(f"{file}:make")
    assert json.loads((run / "config.json").read_text())["network"] == source.as_dict()

    code, out, err = predict(brim, tmp_path, "--weights", run)
    assert code == 0, err
    assert json.loads(out)["network"]["sha256"] == source.sha256
    assert f"{file}:make, sha256 {source.sha256}" in err
    assert "changed" not in err

    REGISTERED.clear()
    assert load_run(run, device="cpu").predict(next(Path("images").iterdir())).error is None

    REGISTERED.clear()
    before = file.read_text()
    file.write_text(before + "\n# another line\n")
    try:
        code, out, err = predict(brim, tmp_path, "--weights", run)
        assert (code, "has changed since" in err) == (0, True)
        assert json.loads(out)["network"]["sha256"] != source.sha256
        file.unlink()
        REGISTERED.clear()
        code, out, err = predict(brim, tmp_path, "--weights", run)
        assert (code, out, str(file) in err, "--network" in err) == (2, "", True, True)
    finally:
        file.write_text(before)


@pytest.mark.parametrize("program", ["net.pt2", "net.pt"])
def test_a_program_predicts_what_its_module_does(brim, place, tmp_path, program):
    name = find_source(str(place / program)).name
    code, _, err = predict(brim, tmp_path, "--network", program)
    assert code == 0, err
    images = torch.randint(0, 256, (3, 3, 96, 160), dtype=torch.uint8)
    expected = InferenceNetwork(small(place), CPU, default_setting(CPU))(images)
    folded = InferenceNetwork(create_model(name), CPU, default_setting(CPU))(images)
    torch.testing.assert_close(folded, expected, rtol=1e-4, atol=1e-5)


def test_a_program_can_be_trained_further_but_torchscript_not(brim, place, tmp_path):
    options = ["--images", "images", "--masks", "masks", "--epochs", 1, "--size", 64, "--device", "cpu", "--json"]
    code, _, err = brim("segment", "train", *options, "--network", "net.pt2", "--out", tmp_path / "run")
    assert code == 0, err
    assert predict(brim, tmp_path, "--weights", tmp_path / "run")[0] == 0
    code, _, err = brim("segment", "train", *options, "--network", "net.pt", "--out", tmp_path / "none")
    assert (code, "TorchScript" in err, (tmp_path / "none").exists()) == (2, True, False)


def test_declared_networks_have_names(brim, place, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIM_NETWORKS", f"ours={place}/net.py:make")
    package = tmp_path / "site"
    (package / "their_net-1.dist-info").mkdir(parents=True)
    (package / "their_net.py").write_text(CODE)
    (package / "their_net-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: their-net\nVersion: 1\n")
    (package / "their_net-1.dist-info/entry_points.txt").write_text("[brim.networks]\ntheirs = their_net:make\n")
    monkeypatch.syspath_prepend(str(package))
    _entry_points.cache_clear()
    try:
        assert {"ours", "theirs"} <= set(network_names())
        options = ["--images", "images", "--masks", "masks", "--epochs", 1, "--size", 64, "--device", "cpu", "--json"]
        code, out, err = brim("segment", "train", *options, "--network", "theirs", "--out", tmp_path / "run")
        assert code == 0, err
        assert json.loads(out)["network"]["package"] == "theirs"
        REGISTERED.clear()
        assert predict(brim, tmp_path, "--weights", tmp_path / "run")[0] == 0
    finally:
        _entry_points.cache_clear()


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("net.py:nothing", "returned nothing, expected a torch.nn.Module"),
        ("net.py:raises", "raised RuntimeError: no such layer"),
        ("net.py:halves", "into [1, 1, 32, 32], expected [1, 1, 64, 64]"),
        ("net.py:Several", "returned a dict"),
        ("net.py:unknown", 'has no "unknown"; it has Small, make'),
        ("nowhere.py:make", "does not exist"),
        ("broken.py:make", "SyntaxError"),
        ("evil.pt", "not a TorchScript program"),
        ("pickled.pt2", "is pickled, and could run code"),
        ("other_device.pt2", "was exported for cuda"),
        ("fixed.pt2", "does not accept images of shape [2, 3, 96, 64]"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(brim, run, tmp_path, network, words):
    code, out, err = predict(brim, tmp_path, "--network", network, "--weights", run)

    errors = [line for line in err.splitlines() if not line.startswith("network: ")]
    assert (code, out, len(errors)) == (2, "", 1), err
    assert words in errors[0]
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["sample inputs", "an object"])
def test_a_program_with_pickled_code_in_any_part_runs_none_of_it(place, tmp_path, part):
    evil, proof = tmp_path / "evil.pt2", tmp_path / "proof"
    pickled = io.BytesIO()
    torch.save(Touch(proof), pickled)
    with zipfile.ZipFile(place / "net.pt2") as whole:
        files = {name: whole.read(name) for name in whole.namelist()}
    inputs = next(name for name in files if name.endswith("sample_inputs/model.pt"))
    constants = next(name for name in files if name.endswith("_constants_config.json"))
    if part == "sample inputs":
        files[inputs] = pickled.getvalue()
    else:
        weights = next(name for name in files if name.endswith("_weights_config.json"))
        payload = next(iter(json.loads(files[weights])["config"].values()))
        files[constants] = json.dumps({"config": {"c": payload | {"path_name": "opaque_obj_0"}}}).encode()
        files[constants.rpartition("/")[0] + "/opaque_obj_0"] = pickle.dumps(Touch(proof))
    with zipfile.ZipFile(evil, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)

    with pytest.raises(ConfigError):
        load_program(evil)

    assert not proof.exists()


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def test_a_service_refuses_code_that_changed_and_never_takes_it_from_others(brim, place, run, tmp_path):
    from brim.jobs.registry.models import look
    from brim.segmentation.prediction import SegmentServable

    file = tmp_path / "served.py"
    file.write_text(CODE)
    name = find_source(f"{file}:make").name
    SegmentServable(name, run, CPU, may_tune=False)
    REGISTERED.clear()
    file.write_text(CODE + "\n")
    with pytest.raises(ConfigError, match="has changed"):
        SegmentServable(name, run, CPU, may_tune=False)
    with pytest.raises(ConfigError, match="is unknown"):
        look(run)  # as on a request: a run's own word is not enough
