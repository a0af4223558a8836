"""ONNX files of segmentation networks answer as the networks do, at other sizes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brim.cli import main
from brim.errors import ConfigError
from brim.segmentation import create_model
from brim.segmentation.config import REGISTERED
from brim.segmentation.networks import normalise, save_weights
from brim.segmentation.networks.onnx_file import OnnxGraph, _compare


class TwoScales(nn.Module):
    """The operations that depend on the size: half of it and back, beside what was there, and a mean over all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.last = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Conv2d(7, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = self.norm(self.down(x)).relu()
        low = low * low.mean((2, 3), keepdim=True)
        up = nn.functional.interpolate(low, size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.last(torch.cat((x, up), 1))


@torch.no_grad()
def test_an_exported_network_answers_as_torch_at_any_size(tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    monkeypatch.setitem(REGISTERED, "test_two_scales", TwoScales)
    module = create_model("test_two_scales").eval()
    save_weights(module, tmp_path / "w.safetensors", {"model": "test_two_scales"})

    assert (
        main(["segment", "export-onnx", str(tmp_path / "w.safetensors"), "--out", str(tmp_path / "n.onnx"), "--json"])
        == 0
    )

    written = json.loads(capsys.readouterr().out)
    assert (written["inputs"], written["outputs"], written["task"]) == (["images"], ["logits"], "mask")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["n.onnx", "w.safetensors"]
    session = runtime.InferenceSession(str(tmp_path / "n.onnx"), providers=["CPUExecutionProvider"])
    for shape in ((2, 3, 128, 32), (5, 3, 32, 96)):
        images = torch.randint(0, 256, shape, dtype=torch.uint8)
        (logits,) = session.run(None, {"images": images.float().numpy()})
        np.testing.assert_allclose(logits, module(normalise(images)).numpy(), atol=1e-4)


def test_a_graph_that_answers_otherwise_is_refused(tmp_path):
    runtime = SimpleNamespace(
        InferenceSession=lambda file, providers: SimpleNamespace(run=lambda _, given: [own(given["images"]) + off])
    )
    graph = OnnxGraph(nn.Conv2d(3, 1, 1)).eval()

    def own(images):
        with torch.no_grad():
            return graph(torch.from_numpy(images)).numpy()

    off = 0.0
    assert _compare(runtime, tmp_path / "n.onnx", graph) == 0
    off = 0.01
    with pytest.raises(ConfigError, match=r"differs from torch by 0\.0"):
        _compare(runtime, tmp_path / "n.onnx", graph)


def test_what_cannot_be_exported_is_said(tmp_path, capsys):
    assert main(["segment", "export-onnx", str(tmp_path / "nowhere"), "--out", str(tmp_path / "n.onnx")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["segment", "export-onnx", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())
