"""Runs as others share models: config.json, model.safetensors and README.md, which alone are enough."""

import json
import shutil

import pytest

from brim.cli import main
from brim.sequences.corpus.synthetic import make_sequences

HUB = ("config.json", "model.safetensors", "README.md")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


def answer(capsys, *argv):
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == 0, capsys.readouterr().err
    values = json.loads(capsys.readouterr().out)
    return {name: value for name, value in values.items() if not name.endswith("_s") and name != "overhead"}


def shared(run):
    """A copy of the three files alone."""
    copy = run.with_name(f"{run.name}-shared")
    copy.mkdir()
    for name in HUB:
        shutil.copy(run / name, copy)
    assert "| metric | value |" in (run / "README.md").read_text()
    assert json.loads((run / "config.json").read_text())["model_type"].startswith("brim-")
    return copy


def test_segmentation(place, capsys):
    cells, run = place / "cells", place / "run"
    answer(capsys, "segment", "sample", "--out", cells, "--images", 4, "--size", 64, "--device", "cpu")
    data = ["--images", cells / "images", "--masks", cells / "masks", "--model", "unet_tiny"]
    options = ["--epochs", 1, "--size", 64, "--batch-size", 2, "--device", "cpu"]
    trained = answer(capsys, "segment", "train", *data, *options, "--out", run)
    copy = shared(run)
    assert f"| dice | {trained['dice']:.4g} |" in (run / "README.md").read_text()

    results = []
    for weights in (run, copy):
        out = place / f"{weights.name}-polygons"
        predict = ["--batch-size", 1, "--device", "cpu", "--out", out]
        answer(capsys, "segment", "predict", cells / "images", "--weights", weights, *predict)
        results.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert results[0] == results[1]
    assert answer(capsys, "models", "add", "a", copy, "--data", place / "data")["network"] == "unet_tiny"


def test_sequences(place, capsys):
    make_sequences(place / "npy", 16, dim=4, classes=2, mean_length=6)
    answer(capsys, "sequence", "pack", place / "npy", "--out", place / "corpus")
    options = ["--mode", "supervised", "--model", "cnn_lstm", "--classifier-epochs", 1, "--device", "cpu"]
    answer(capsys, "sequence", "train", place / "corpus", "--out", place / "steps", *options)
    copy = shared(place / "steps")
    scores = [answer(capsys, "sequence", "evaluate", run, place / "corpus") for run in (place / "steps", copy)]
    assert scores[0] == scores[1]
    assert answer(capsys, "models", "add", "b", copy, "--data", place / "data")["kind"] == "classify"


def test_locators(place, capsys):
    answer(capsys, "rf", "generate", "--out", place / "radio", "--samples", 12)
    answer(capsys, "rf", "train", place / "radio", "--out", place / "locator", "--epochs", 1, "--device", "cpu")
    copy = shared(place / "locator")
    scores = [
        answer(capsys, "rf", "evaluate", run, place / "radio", "--device", "cpu") for run in (place / "locator", copy)
    ]
    assert scores[0] == scores[1]
    assert answer(capsys, "models", "add", "c", copy, "--data", place / "data")["kind"] == "locate"
