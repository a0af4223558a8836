"""Runs as others share models: config.json, model.safetensors and README.md, which alone are enough."""

import json
import shutil

import pytest
from cli_commands import answer, without_times

from brim.sequences.corpus.synthetic import make_sequences

HUB = ("config.json", "model.safetensors", "README.md")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


def shared(run):
    """A copy of the three files alone."""
    copy = run.with_name(f"{run.name}-shared")
    copy.mkdir()
    for name in HUB:
        shutil.copy(run / name, copy)
    assert "| metric | value |" in (run / "README.md").read_text()
    assert json.loads((run / "config.json").read_text())["model_type"].startswith("brim-")
    return copy


def test_segmentation(place):
    cells, run = place / "cells", place / "run"
    answer("segment", "sample", "--out", cells, "--images", 4, "--size", 64, "--device", "cpu")
    data = ["--images", cells / "images", "--masks", cells / "masks", "--model", "unet_tiny"]
    options = ["--epochs", 1, "--size", 64, "--batch-size", 2, "--device", "cpu"]
    trained = answer("segment", "train", *data, *options, "--out", run)
    copy = shared(run)
    assert f"| dice | {trained['dice']:.4g} |" in (run / "README.md").read_text()

    results = []
    for weights in (run, copy):
        out = place / f"{weights.name}-polygons"
        predict = ["--batch-size", 1, "--device", "cpu", "--out", out]
        answer("segment", "predict", cells / "images", "--weights", weights, *predict)
        results.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert results[0] == results[1]
    assert answer("models", "add", "a", copy, "--data", place / "data")["network"] == "unet_tiny"


def test_sequences(place):
    make_sequences(place / "npy", 16, dim=4, classes=2, mean_length=6)
    answer("sequence", "pack", place / "npy", "--out", place / "corpus")
    options = ["--mode", "supervised", "--model", "cnn_lstm", "--classifier-epochs", 1, "--device", "cpu"]
    answer("sequence", "train", place / "corpus", "--out", place / "steps", *options)
    copy = shared(place / "steps")
    scores = [answer("sequence", "evaluate", run, place / "corpus") for run in (place / "steps", copy)]
    assert without_times(scores[0]) == without_times(scores[1])
    assert answer("models", "add", "b", copy, "--data", place / "data")["kind"] == "classify"


def test_locators(place):
    answer("rf", "generate", "--out", place / "radio", "--samples", 12)
    answer("rf", "train", place / "radio", "--out", place / "locator", "--epochs", 1, "--device", "cpu")
    copy = shared(place / "locator")
    scores = [answer("rf", "evaluate", run, place / "radio", "--device", "cpu") for run in (place / "locator", copy)]
    assert without_times(scores[0]) == without_times(scores[1])
    assert answer("models", "add", "c", copy, "--data", place / "data")["kind"] == "locate"
