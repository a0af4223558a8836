"""A network with its weights as an ONNX file, checked with onnxruntime at sizes that it was not exported with.

Axes: B images, H rows, W columns; H and W are multiples of 32, as brim pads images to.
"""

import logging
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from brim.engine.networks import import_onnx
from brim.errors import ConfigError, StorageError
from brim.segmentation.networks.network import MEAN, STD
from brim.segmentation.networks.registry import load_model, recall, task_of

_STEP = 32  # pixels that sides are multiples of
_MOST_STEPS = 2048
_CHECKED = ((1, 96, 160), (3, 64, 32))  # images, rows, columns
_TOLERANCE = 1e-3  # of the largest logit: float32 kernels differ by far less


class OnnxGraph(nn.Module):
    """Images (B, 3, H, W) float32 of 0 to 255, in RGB → logits (B, maps, H, W); the normalisation is part of it."""

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("mean", 255 * torch.tensor(MEAN)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(STD)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.module((images - self.mean) / self.std))


def export_onnx(weights: Path | str, file: Path | str, model: str | None = None) -> dict[str, Any]:
    """Write the network of a FILE of weights or a RUN as ONNX; nothing is left behind if it cannot be checked."""
    file = Path(file)
    if file.is_dir():
        raise ConfigError(f"{file} is a directory", field="out", code="occupied", hint="give a file in {out}")
    name = model or recall(weights)
    if name is None:
        raise ConfigError(f"{weights} does not say what network it is of", field="model", code="missing")
    runtime, graph = import_onnx(), OnnxGraph(load_model(name, weights)).eval()
    new = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(graph, new)
        off = _compare(runtime, new, graph)
        new.replace(file)
    except torch.onnx.OnnxExporterError as failure:
        raise ConfigError(f"torch {torch.__version__} cannot export the network {name}", field="model") from failure
    except OSError as failure:
        raise StorageError(
            f"{file}: cannot write, {failure.strerror or failure}", hint="choose another {out}"
        ) from failure
    finally:
        new.unlink(missing_ok=True)
    return {
        "file": str(file), "bytes": file.stat().st_size, "inputs": ["images"], "outputs": ["logits"],
        "task": task_of(weights), "max_difference": off,
    }  # fmt: skip


def _write(graph: OnnxGraph, file: Path) -> None:
    sides = {
        axis: _STEP * torch.export.Dim(name, min=1, max=_MOST_STEPS) for axis, name in ((2, "rows"), (3, "columns"))
    }
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's and its libraries' own
        torch.onnx.export(
            graph, kwargs={"images": torch.zeros(2, 3, 64, 96)}, f=file, dynamo=True, verbose=False,
            dynamic_shapes={"images": {0: torch.export.Dim("batch"), **sides}}, output_names=["logits"],
            external_data=False,
        )  # fmt: skip


@torch.no_grad()
def _compare(runtime: Any, file: Path, graph: OnnxGraph) -> float:
    """Largest difference from torch's logits, over the largest logit."""
    session, off = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"]), 0.0
    rng = torch.Generator().manual_seed(0)
    for images, rows, columns in _CHECKED:
        pixels = 255 * torch.rand(images, 3, rows, columns, generator=rng)
        expected = graph(pixels)
        (logits,) = session.run(None, {"images": pixels.numpy()})
        off = max(off, float((torch.from_numpy(logits) - expected).abs().max() / expected.abs().max().clamp(min=1e-6)))
    if not off <= _TOLERANCE:
        raise ConfigError(
            f"the exported graph differs from torch by {off:.3g} of the largest logit",
            hint="use other versions of torch and onnxruntime",
        )
    return off
