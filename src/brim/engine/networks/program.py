"""Traced programs as modules: torch.export's .pt2, and TorchScript for prediction only.

A file that would run pickled code while it is read is refused: .pt2 archives may hold pickled tensors and objects.
"""

import copy
import json
import os
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self, cast

import torch
from torch import Tensor, fx, nn

from brim.engine.networks.source import PROGRAMS
from brim.errors import ConfigError

_aten: Final = torch.ops.aten
_loading = threading.Lock()
program_suffixes = PROGRAMS


def is_program(file: Path) -> bool:
    """Whether a file holds a program rather than weights; .pt is the suffix of both."""
    if file.suffix == ".pt2":
        return True
    if file.suffix not in PROGRAMS or not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any("/code/" in name for name in archive.namelist())


def load_program(file: Path) -> "ProgramModule":
    """The program of a file as a module on the host, in eval mode; a program for a GPU raises without one."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if file.suffix != ".pt2":
                return _script(file, names)
            devices = _inspect(archive, names, file)
    except (zipfile.BadZipFile, OSError) as failure:
        kind = "a program of torch.export" if file.suffix == ".pt2" else "a TorchScript program"
        raise _unusable(f"{file} is not {kind}; save one with torch.export.save") from failure
    here = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    if foreign := sorted(devices - here):
        raise _unusable(f"{file} was exported for {foreign[0]}; export it on the cpu, it then runs on every device")
    try:
        with warnings.catch_warnings(), _no_pickles():
            warnings.simplefilter("ignore")  # the loader's own
            module = ProgramModule(torch.export.load(file).module())
    except Exception as failure:  # whatever a damaged archive makes of torch
        raise _unusable(f"{file} cannot be loaded as a program ({_reason(failure)}); export it again") from failure
    return module.to("cpu")


class ProgramModule(nn.Module):
    """A program that behaves as a module: it can be copied, moved, trained and folded for inference."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, *inputs: Tensor) -> Tensor:
        return cast(Tensor, self.program(*inputs))

    @property
    def trainable(self) -> bool:
        return not isinstance(self.program, torch.jit.ScriptModule)

    def train(self, mode: bool = True) -> Self:
        """The mode is fixed in the program: it was exported in one."""
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """After a move, operations that create tensors create them on the new device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tensor = next(iter(self.program.state_dict().values()), None)
        if isinstance(self.program, fx.GraphModule) and tensor is not None:
            created = [
                node for node in self.program.graph.nodes if node.kwargs.get("device") not in (None, tensor.device)
            ]
            for node in created:
                node.update_kwarg("device", tensor.device)
            if created:
                self.program.recompile()
        return self

    def state_dict(self, *args: Any, **settings: Any) -> Any:
        return self.program.state_dict(*args, **settings)

    def fold(self) -> None:
        """Move batch norms into the convolutions before them; for inference only."""
        if isinstance(self.program, fx.GraphModule):
            _fold(self.program)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProgramModule":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about its own classes
            return ProgramModule(copy.deepcopy(self.program, memo))


@contextmanager
def _no_pickles() -> Iterator[None]:
    """torch.export.load unpickles what its safe reader refuses, as in sample inputs or the older layout; not here."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    with _loading:
        before, os.environ[name] = os.environ.get(name), "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _script(file: Path, names: list[str]) -> ProgramModule:
    if not any("/code/" in name for name in names):
        text = "it is a file of weights, or pickled code; save a program with torch.export.save"
        raise _unusable(f"{file} holds no TorchScript program: {text}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            program = torch.jit.load(file, map_location="cpu").eval()  # type: ignore[no-untyped-call]
    except RuntimeError as failure:
        raise _unusable(f"{file} cannot be loaded as TorchScript ({_reason(failure)}); save it again") from failure
    for parameter in program.parameters():
        parameter.requires_grad_(False)  # copies would not be leaves
    return ProgramModule(program)


def _inspect(archive: zipfile.ZipFile, names: list[str], file: Path) -> set[str]:
    """The types of the devices it was exported for; raises if reading it would run code."""
    if not any(name.endswith("models/model.json") for name in names):
        text = "holds compiled code" if any("aotinductor" in name for name in names) else "is not of torch.export"
        raise _unusable(f"{file} {text}; save the program with torch.export.save")
    if len({name.lower() for name in names}) < len(names):  # torch might read the other one
        raise _unusable(f"{file} holds a name twice; export it again")
    devices: set[str] = set()
    try:
        for name in names:
            if name.lower().endswith(("_weights_config.json", "_constants_config.json")):
                for tensor, payload in json.loads(archive.read(name))["config"].items():
                    plain = payload["path_name"].startswith(("weight_", "tensor_"))  # others are unpickled
                    if payload["use_pickle"] or payload["tensor_meta"] is None or not plain:
                        raise _unusable(f"{file}: {tensor} is pickled, and could run code; export plain tensors")
                    devices.add(payload["tensor_meta"]["device"]["type"])
            elif name.endswith("models/model.json"):
                devices |= _devices(json.loads(archive.read(name)))
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise _unusable(f"{file} is damaged ({_reason(failure)}); export it again") from failure
    return devices


def _devices(value: Any) -> set[str]:
    """Types of all devices that a description of a program names."""
    if isinstance(value, list):
        return set().union(*map(_devices, value))
    if not isinstance(value, dict):
        return set()
    devices = set().union(*map(_devices, value.values()))
    for name in ("device", "as_device"):
        if isinstance(device := value.get(name), dict) and isinstance(device.get("type"), str):
            devices.add(device["type"])
    return devices


def _reason(failure: Exception) -> str:
    return (str(failure).strip().split("\n")[0] or type(failure).__name__)[:200]


def _unusable(text: str) -> ConfigError:
    return ConfigError(text, field="network", code="unusable")


# Batch norms


@torch.no_grad()
def _fold(program: fx.GraphModule) -> None:
    """Every batch norm with fixed statistics behind a convolution that only it reads becomes part of that."""
    for norm in list(program.graph.nodes):
        if norm.target is not _aten.batch_norm.default or norm.args[5]:
            continue
        conv = norm.args[0]
        if conv.target is not _aten.conv2d.default or len(conv.users) > 1:
            continue
        tensors = [_tensor(program, node) for node in (conv.args[1], *norm.args[1:5])]
        bias = _tensor(program, conv.args[2]) if len(conv.args) > 2 else None
        if any(tensor is None for tensor in tensors):
            continue
        weight, gain, shift, mean, variance = cast("list[Tensor]", tensors)
        scale = gain * torch.rsqrt(variance + float(norm.args[7]))
        _replace(program, conv, 1, weight * scale[:, None, None, None])
        _replace(program, conv, 2, shift + ((0 if bias is None else bias) - mean) * scale)
        norm.replace_all_uses_with(conv)
        program.graph.erase_node(norm)
    program.graph.eliminate_dead_code()
    program.recompile()


def _tensor(program: fx.GraphModule, node: Any) -> Tensor | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = program
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return cast(Tensor, value)


def _replace(program: fx.GraphModule, conv: fx.Node, at: int, value: Tensor) -> None:
    """Give a convolution a weight or bias of its own."""
    name = f"folded_{conv.name}_{at}"
    setattr(program, name, nn.Parameter(value, requires_grad=False))
    with program.graph.inserting_before(conv):
        node = program.graph.get_attr(name)
    arguments = [*conv.args, *([None] * (at + 1 - len(conv.args)))]
    arguments[at] = node
    conv.args = tuple(arguments)


def import_onnx() -> Any:
    """onnxruntime, which checks what was exported."""
    try:
        import onnxruntime  # optional, as what torch exports with
        import onnxscript  # noqa: F401
    except ImportError as failure:
        raise ConfigError(
            f"export to ONNX needs {failure.name}", code="missing_package", hint="pip install 'brim[onnx]'"
        ) from failure
    return onnxruntime
