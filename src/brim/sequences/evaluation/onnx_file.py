"""A trained run as an ONNX file, checked with onnxruntime at sizes that it was not exported with.

Axes: B sequences, T frames, D features, K classes; H hidden units of a direction, J dilations, F features of kernels.
The graph holds everything between frames and probabilities: normalisation, kernels, network and heads. It computes
without the tricks that training needs: ONNX has an LSTM that knows lengths, and kernels are dilated convolutions.
"""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.engine.networks import import_onnx
from brim.errors import ConfigError, StorageError
from brim.sequences.evaluation.runs import load_run
from brim.sequences.model import Encoder, Network
from brim.sequences.model.lstm import BiLstm
from brim.sequences.rocket import Rocket, RocketBlend
from brim.sequences.rocket.hydra import GRID, LARGEST, WEIGHTS, Hydra
from brim.sequences.rocket.kernels import TAPS, MiniRocket
from brim.sequences.rocket.summary import summary

_CHECKED = ((1, 2), (4, 37), (3, 90))  # sequences, frames
_EXPORTED = (3, 20)
_TOLERANCE = 1e-3  # of a probability, or of the largest number: sums in another order may move a value over a threshold


def export_onnx(run: Path | str, file: Path | str) -> dict[str, Any]:
    """Write a run as ONNX; nothing is left behind if it cannot be checked.

    Inputs are frames (B, T, D) float32, T at least 2, and length (B,) int64; the output is probabilities (B, K), or
    values (B, 1). Of a sequence of more than 2048 frames all are compared with kernels, where brim takes every second.
    """
    file = Path(file)
    if file.is_dir():
        raise ConfigError(f"{file} is a directory", field="out", code="occupied", hint="give a file in {out}")
    loaded = load_run(run)
    runtime, module = import_onnx(), loaded.module
    graph, new = _Exported(module).eval(), file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(graph, module.dim, new)
        off = _compare(runtime, new, module)
        new.replace(file)
    except torch.onnx.OnnxExporterError as failure:
        raise ConfigError(f"torch {torch.__version__} cannot export the model of {run}", field="run") from failure
    except OSError as failure:
        raise StorageError(
            f"{file}: cannot write, {failure.strerror or failure}", hint="choose another {out}"
        ) from failure
    finally:
        new.unlink(missing_ok=True)
    return {
        "file": str(file), "bytes": file.stat().st_size, "inputs": ["frames", "length"], "outputs": [_output(module)],
        "classes": loaded.about.get("classes"), "max_difference": off,
    }  # fmt: skip


def _output(module: Network) -> str:
    return "values" if module.is_regression else "probabilities"


def _write(graph: nn.Module, dim: int, file: Path) -> None:
    num, frames = _EXPORTED
    batch, length = torch.export.Dim("batch"), torch.export.Dim("frames", min=3)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's and its libraries' own
        torch.onnx.export(
            graph, kwargs={"frames": torch.zeros(num, frames, dim), "length": torch.tensor([frames, 5, 2])}, f=file,
            dynamo=True, verbose=False, dynamic_shapes={"frames": {0: batch, 1: length}, "length": {0: batch}},
            output_names=[_output(cast(_Exported, graph).module)], external_data=False,
        )  # fmt: skip


@torch.no_grad()
def _compare(runtime: Any, file: Path, module: Network) -> float:
    """Largest difference from torch, of a probability or in shares of the largest value."""
    session, off = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"]), 0.0
    rng = torch.Generator().manual_seed(0)
    shift, scale = _statistics(module)
    for num, frames in _CHECKED:
        rows = torch.randn(num, frames, module.dim, generator=rng).cumsum(1) / frames**0.5
        rows, length = rows / scale + shift, torch.randint(1, frames + 1, (num,), generator=rng)
        length[0] = frames
        outputs = module(rows, length)
        expected = outputs if module.is_regression else outputs.softmax(-1)
        (given,) = session.run(None, {"frames": rows.numpy(), "length": length.numpy()})
        size = expected.abs().max().clamp(min=1e-6) if module.is_regression else 1.0
        off = max(off, float((torch.from_numpy(given) - expected).abs().max() / size))
    if not off <= _TOLERANCE:
        raise ConfigError(
            f"the exported graph differs from torch by {off:.3g}", hint="use other versions of torch and onnxruntime"
        )
    return off


def _statistics(module: Network) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation of the features, so that made-up frames look like real ones."""
    if isinstance(module, RocketBlend):
        module = module.rocket
    if isinstance(module, Rocket):
        return module.features.mean, module.features.scale.clamp(min=1e-6)
    own: Any = getattr(module, "encoder", module)
    scale = own.scale.clamp(min=1e-6)
    return -own.shift / scale, scale


# The graph


class _Exported(nn.Module):
    """A model, its parts replaced by those that ONNX has."""

    def __init__(self, module: Network) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        for part in list(self.module.modules()):
            if isinstance(part, Encoder):
                part.lstm = _Lstm(part.lstm)  # type: ignore[assignment]
        rocket = self.module.rocket if isinstance(self.module, RocketBlend) else self.module
        if isinstance(rocket, Rocket):
            rocket.features = _Features(rocket.features)  # type: ignore[assignment]

    def forward(self, frames: Tensor, length: Tensor) -> Tensor:
        outputs: Tensor = self.module(frames, length).float()
        return outputs if self.module.is_regression else outputs.softmax(-1)


class _Lstm(nn.Module):
    """BiLstm as ONNX's operator, whose reverse direction begins at each sequence's own end."""

    def __init__(self, lstm: BiLstm) -> None:
        super().__init__()
        self.hidden, self.layers = lstm.hidden, lstm.layers
        for layer in range(lstm.layers):
            for name in ("weight_ih", "weight_hh"):
                sides = [_reordered(getattr(lstm, f"{name}_l{layer}{side}")) for side in ("", "_reverse")]
                self.register_buffer(f"{name}{layer}", torch.stack(sides))
            both = [
                torch.cat([_reordered(getattr(lstm, f"{name}_l{layer}{side}")) for name in ("bias_ih", "bias_hh")])
                for side in ("", "_reverse")
            ]
            self.register_buffer(f"bias{layer}", torch.stack(both))

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        h, lengths = x.transpose(0, 1), length.int()
        for layer in range(self.layers):
            weights = [getattr(self, f"{name}{layer}") for name in ("weight_ih", "weight_hh", "bias")]
            y = torch.onnx.ops.symbolic(
                "LSTM", [h, *weights, lengths], {"hidden_size": self.hidden, "direction": "bidirectional"},
                dtype=h.dtype, shape=[h.shape[0], 2, h.shape[1], self.hidden],
            )  # fmt: skip
            h = y.transpose(1, 2).flatten(2)
        return h.transpose(0, 1)


def _reordered(parameter: Tensor) -> Tensor:
    """Gates in ONNX's order, input, output, forget, cell, from torch's: input, forget, cell, output."""
    i, f, c, o = parameter.detach().chunk(4)
    return torch.cat([i, o, f, c])


class _Features(nn.Module):
    """RocketFeatures with kernels as dilated convolutions."""

    mean: Tensor
    scale: Tensor

    def __init__(self, features: Any) -> None:
        super().__init__()
        self.widths, self.dim = features.widths, features.dim
        self.register_buffer("mean", features.mean)
        self.register_buffer("scale", features.scale)
        self.kernels = nn.ModuleDict({name: _Kernels(one) for name, one in features.kernels.items()})
        self.hydra = None if features.hydra is None else _HydraKernels(features.hydra)

    def of_batch(self, frames: Tensor, length: Tensor) -> Tensor:
        x = (frames - self.mean) * self.scale
        parts = [self.kernels["frames"](x, length)] if "frames" in self.kernels else []
        if "steps" in self.kernels:  # a single frame has no steps; its own values stand for them
            steps = torch.where((length == 1)[:, None, None], x[:, :-1], x[:, 1:] - x[:, :-1])
            parts.append(self.kernels["steps"](steps, (length - 1).clamp(min=1)))
        if self.hydra is not None:
            parts.append(self.hydra(x, length))
        return torch.cat([*parts, summary(x, length)], 1)


class _Kernels(nn.Module):
    """MiniRocket: at each dilation one convolution for all 84 kernels."""

    def __init__(self, kernels: MiniRocket) -> None:
        super().__init__()
        self.dilations, self.counts = kernels.dilations.tolist(), kernels.per_kernel.tolist()
        for number in range(len(self.dilations)):
            weight = torch.zeros(84, kernels.dim, 9)
            for kernel, taps in enumerate(TAPS):
                row = kernels.channels[number * 84 + kernel]
                one = torch.full((9,), -1.0)
                one[list(taps)] = 2.0
                weight[kernel, row[row >= 0].tolist()] = one
            self.register_buffer(f"weight{number}", weight)
        ends = [84 * count for count in self.counts]
        for number, part in enumerate(torch.split(torch.from_numpy(kernels.thresholds), ends)):
            self.register_buffer(f"thresholds{number}", part.reshape(84, -1, 1))

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """(B, F) shares of the frames at which each convolution exceeds its threshold."""
        frames = torch.arange(x.shape[1], device=x.device)
        padded = x.masked_fill((frames >= length[:, None])[..., None], 0).transpose(1, 2)  # (B, D, T)
        parts = []
        for number, dilation in enumerate(self.dilations):
            weight, thresholds = getattr(self, f"weight{number}"), getattr(self, f"thresholds{number}")
            values = functional.conv1d(padded, weight, padding=4 * dilation, dilation=dilation)  # (B, 84, T)
            is_inner = (torch.arange(84, device=x.device) + number) % 2 == 1
            margin = torch.where(length >= 8 * dilation + 1, 4 * dilation, 0)[:, None]
            low = torch.where(is_inner, margin, 0)  # (B, 84)
            high = length[:, None] - low
            counted = (frames >= low[..., None]) & (frames < high[..., None])
            above = (values.unsqueeze(2) > thresholds) & counted.unsqueeze(2)  # (B, 84, count, T)
            parts.append((above.float().sum(-1) / (high - low).unsqueeze(-1)).flatten(1))
        return torch.cat(parts, 1)


class _HydraKernels(nn.Module):
    """Hydra: at each dilation one convolution for the groups of the sequence, and one for those of its steps."""

    scale: Tensor
    weights: Tensor
    channels: Tensor

    def __init__(self, hydra: Hydra) -> None:
        super().__init__()
        self.dilations = hydra.dilations.tolist()
        for name in ("scale", "weights", "channels"):
            self.register_buffer(name, getattr(hydra, name))

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """(B, F) of normalised frames (B, T, D)."""
        steps = (x[:, 1:] - x[:, :-1]) * self.scale
        parts = []
        for view, (values, num) in enumerate(((x, length), (steps, length - 1))):
            counted = torch.arange(values.shape[1], device=x.device) < num[:, None]
            rows = values.masked_fill(~counted[..., None], 0).transpose(1, 2)  # (B, D, T)
            total = num.clamp(min=1)[:, None, None]
            for number, dilation in enumerate(self.dilations):
                response = self._responses(rows, view, number, dilation)
                largest, smallest = response.amax(2, keepdim=True), response.amin(2, keepdim=True)
                inside = counted[:, None, None]
                gain = torch.where((response == largest) & inside, response, 0.0).sum(-1) / (GRID * WEIGHTS)
                count = ((response == smallest) & inside).float().sum(-1)
                parts += [(side / total).clamp(min=0).sqrt().flatten(1) for side in (gain, count)]
        return torch.cat(parts, 1)

    def _responses(self, rows: Tensor, view: int, number: int, dilation: int) -> Tensor:
        """(B, G, 8, T) multiples of the grid."""
        weights, channels = self.weights[view, number], self.channels[view, number]  # (G, 8, 9), (G, M)
        if rows.shape[1] > 1:
            mixed = rows[:, channels[:, 0]]
            for other in channels.T[1:]:
                mixed = mixed + rows[:, other]
            rows = mixed / float(channels.shape[1]) ** 0.5
        grid = (rows.clamp(-LARGEST, LARGEST) * GRID).round()
        flat = weights.flatten(0, 1)[:, None]
        values = functional.conv1d(grid, flat, padding=4 * dilation, dilation=dilation, groups=rows.shape[1])
        return values.reshape(-1, *weights.shape[:2], values.shape[2])
