"""Sequences as ONNX: the whole model, for sizes that it was not exported with."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.cli import main
from brim.sequences import load_run

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    words = ["--sequences", "40", "--features", "4", "--mean-length", "8"]  # few dilations, so a small graph
    assert main(["sequence", "sample", "--out", str(folder / "rows"), *words]) == 0
    assert main(["sequence", "pack", str(folder / "rows"), "--out", str(folder / "corpus")]) == 0
    return folder / "corpus"


@pytest.mark.parametrize("model", [pytest.param("rocket", marks=pytest.mark.long), "cnn_lstm"])
def test_the_graph_gives_the_runs_probabilities_at_any_length(
    model: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = tmp_path / "run", tmp_path / "model.onnx"
    words = ["--mode", "supervised", "--model", model, "--classifier-epochs", "1", "--device", "cpu"]
    assert main(["sequence", "train", str(corpus), "--out", str(run), *words]) == 0
    capsys.readouterr()

    assert main(["sequence", "export-onnx", str(run), "--out", str(file), "--json"]) == 0

    written = json.loads(capsys.readouterr().out)
    assert (written["inputs"], written["outputs"]) == (["frames", "length"], ["probabilities"])
    assert written["max_difference"] < 1e-3
    module, length = load_run(run).module, torch.tensor([55, 1, 13, 40, 2])
    frames = torch.randn(5, 55, module.dim, generator=torch.Generator().manual_seed(1))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (given,) = session.run(None, {"frames": frames.numpy(), "length": length.numpy()})
    with torch.no_grad():
        expected = module(frames, length).softmax(-1)
    np.testing.assert_allclose(given, expected.numpy(), atol=2e-3)
