"""Weights of other libraries under brim's names, by rules; every tensor of both sides is accounted for.

    timm, HRNet's authors, the segmentation hub   hrnet
    timm and torchvision, ResNet                  the encoder of unet_resnet18 | 34 | 50
    segmentation_models_pytorch, Unet             unet_resnet18 | 34 | 50, whole

A rule is a pattern of their names and a template of ours. A convolution's bias that ours lacks because a norm follows
is moved into that norm's running mean, which gives the same result.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from brim.errors import CheckpointError
from brim.segmentation.networks.registry import create_model, read_tensors, save_weights

Rules = Sequence[tuple[re.Pattern[str], str]]
_COUNTER = "num_batches_tracked"  # of a norm: it has no influence on results
_END = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_WRAPPED = re.compile(r"(encoder\.model|encoder|backbone|model|net)\.(.+)")


def _rules(*pairs: tuple[str, str]) -> Rules:
    """Patterns in which # is a number and every name ends with that of a tensor."""
    rules = []
    for theirs, ours in pairs:
        pattern = re.escape(theirs).replace(r"\#", r"(\d+)")
        rules.append((re.compile(rf"{pattern}\.{_END}"), ours))
    return rules


def _block(prefix: str, ours: str, convolutions: int, *, names: Sequence[str]) -> list[tuple[str, str]]:
    """A residual block: conv1, bn1, … and the two parts of its shortcut."""
    pairs = []
    for number, name in zip(range(1, convolutions + 1), names, strict=True):
        pairs += [(f"{prefix}.conv{number}", f"{ours}.{name}.conv"), (f"{prefix}.bn{number}", f"{ours}.{name}.norm")]
    return [
        *pairs,
        (f"{prefix}.downsample.0", f"{ours}.shortcut.conv"),
        (f"{prefix}.downsample.1", f"{ours}.shortcut.norm"),
    ]


def _hrnet() -> Rules:
    pairs = [
        ("conv1", "stem.0.conv"), ("bn1", "stem.0.norm"), ("conv2", "stem.1.conv"), ("bn2", "stem.1.norm"),
        *_block("layer1.#", "stage1.{0}", 3, names=("body.0", "body.1", "last")),
        ("transition1.0.0", "entries.0.0.conv"), ("transition1.0.1", "entries.0.0.norm"),
        ("transition1.1.0.0", "entries.0.1.conv"), ("transition1.1.0.1", "entries.0.1.norm"),
        ("transition2.2.0.0", "entries.1.0.conv"), ("transition2.2.0.1", "entries.1.0.norm"),
        ("transition3.3.0.0", "entries.2.0.conv"), ("transition3.3.0.1", "entries.2.0.norm"),
        ("last_layer.0", "head.mix.conv"), ("last_layer.1", "head.mix.norm"), ("last_layer.3", "head.score"),
    ]  # fmt: skip
    for stage in (2, 3, 4):
        ours, theirs = f"stages.{stage - 2}.{{0}}", f"stage{stage}.#"
        for number, name in ((1, "first"), (2, "last")):
            pairs += [
                (f"{theirs}.branches.#.#.conv{number}", f"{ours}.branches.{{1}}.{{2}}.{name}.conv"),
                (f"{theirs}.branches.#.#.bn{number}", f"{ours}.branches.{{1}}.{{2}}.{name}.norm"),
            ]
        for part, name in ((0, "conv"), (1, "norm")):
            pairs += [
                (f"{theirs}.fuse_layers.#.#.{part}", f"{ours}.rows.{{1}}.{{2}}.{name}"),  # from a coarser branch
                (f"{theirs}.fuse_layers.#.#.#.{part}", f"{ours}.rows.{{1}}.{{2}}.{{3}}.{name}"),
            ]
    return _rules(*pairs)


def _resnet_unet(names: Sequence[str]) -> Rules:
    pairs = [("conv1", "stem.conv"), ("bn1", "stem.norm"), ("segmentation_head.0", "score")]
    for level in range(4):
        pairs += _block(f"layer{level + 1}.#", f"levels.{level}.{{0}}", len(names), names=names)
    for number in (1, 2):
        for part, name in ((0, "conv"), (1, "norm")):
            pairs.append((f"decoder.blocks.#.conv{number}.{part}", f"decoder.{{0}}.{number - 1}.{name}"))
    return _rules(*pairs)


RULES: Final[dict[str, Rules]] = {
    "hrnet": _hrnet(),
    "unet_resnet18": _resnet_unet(("body.0", "last")),
    "unet_resnet34": _resnet_unet(("body.0", "last")),
    "unet_resnet50": _resnet_unet(("body.0", "body.1", "last")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What became of every tensor of the file, and of every one of the network."""

    file: str
    network: str
    out: str
    mapped: list[dict[str, Any]] = field(default_factory=list)  # from, to, shape
    missing: list[str] = field(default_factory=list)  # of the network, not in the file: they keep initial values
    left_over: list[dict[str, Any]] = field(default_factory=list)  # of the file, not used: name, shape, reason

    @property
    def untrained(self) -> list[str]:
        """What must be trained before the network is of use."""
        return [name for name in self.missing if not name.endswith(_COUNTER)]

    def as_dict(self) -> dict[str, Any]:
        counts = {
            "num_mapped": len(self.mapped),
            "num_missing": len(self.missing),
            "num_left_over": len(self.left_over),
        }
        return {
            "file": self.file, "as": self.network, "out": self.out, "complete": not self.untrained, **counts,
            "mapped": self.mapped, "missing": self.missing, "left_over": self.left_over,
        }  # fmt: skip


def import_weights(file: Path | str, network: str, out: Path | str) -> ImportReport:
    """Write the tensors of a file as weights of that network to `out`, a .safetensors file.

    Raises CheckpointError if no tensor fits, or the file cannot be read without running code.
    """
    file, out = Path(file), Path(out)
    if file.resolve() == out.resolve():
        raise CheckpointError(f"{out} is the file to read", field="out", code="conflict", hint="choose another {out}")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # what is missing is the same every time
        module = create_model(network)
    report = ImportReport(file=str(file), network=network, out=str(out))
    _fill(module, read_tensors(file), RULES.get(network, ()), report)
    if not report.mapped:
        first = ", ".join(each["name"] for each in report.left_over[:3]) or "nothing"
        raise CheckpointError(
            f"{file}: none of its {len(report.left_over)} tensors is of {network} ({first}, …)",
            code="wrong_kind",
            hint="name the network that it is of",
        )
    about = {"model": network, "task": "mask", "format_version": "1", "imported_from": file.name}
    if report.untrained:
        about["untrained"] = ", ".join(report.untrained)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_weights(module, out, about)
    return report


@torch.no_grad()
def _fill(module: nn.Module, tensors: Mapping[str, Tensor], rules: Rules, report: ImportReport) -> None:
    targets = module.state_dict()
    biases: dict[str, tuple[str, Tensor]] = {}  # our norm → the bias of the convolution before it
    taken: set[str] = set()
    for theirs, tensor in tensors.items():
        ours = _name(theirs, rules, targets)
        about: dict[str, Any] = {"name": theirs, "shape": list(tensor.shape)}
        norm = None if ours is None else _norm_behind(ours, targets)
        if norm is not None:
            biases[norm] = (theirs, tensor)
        elif ours is None or ours not in targets:
            report.left_over.append({**about, "reason": "the network has no such layer"})
        elif ours in taken:
            report.left_over.append({**about, "reason": f"{ours} has a value already"})
        elif tensor.shape != targets[ours].shape:
            report.left_over.append({**about, "reason": f"{ours} has the shape {list(targets[ours].shape)}"})
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            report.left_over.append({**about, "reason": "it holds NaN or Inf"})
        else:
            targets[ours].copy_(tensor)
            taken.add(ours)
            report.mapped.append({"from": theirs, "to": ours, "shape": list(tensor.shape)})
    for norm, (theirs, bias) in biases.items():
        mean = f"{norm}.running_mean"
        if mean not in taken or bias.shape != targets[mean].shape:
            reason = f"{mean}, which would hold it, is missing"
            report.left_over.append({"name": theirs, "shape": list(bias.shape), "reason": reason})
            continue
        targets[mean].sub_(bias)
        report.mapped.append({"from": theirs, "to": mean, "shape": list(bias.shape)})
    report.missing.extend(name for name in targets if name not in taken)


def _name(theirs: str, rules: Rules, targets: Mapping[str, Tensor]) -> str | None:
    """Our name of their tensor, with or without the name of a part that it is wrapped in."""
    candidates = [theirs]
    while (match := _WRAPPED.fullmatch(candidates[-1])) is not None:
        candidates.append(match[2])
    for name in candidates:
        for pattern, template in rules:
            if (match := pattern.fullmatch(name)) is not None:
                *numbers, end = match.groups()
                return f"{template.format(*numbers)}.{end}"
        if name in targets:
            return name
    return None


def _norm_behind(ours: str, targets: Mapping[str, Tensor]) -> str | None:
    """The norm behind a convolution whose bias our network leaves out."""
    if not ours.endswith(".conv.bias") or ours in targets:
        return None
    norm = f"{ours.removesuffix('.conv.bias')}.norm"
    return norm if f"{norm}.running_mean" in targets else None
