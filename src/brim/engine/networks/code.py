"""Modules made by the code of others: a factory in a file, or in an installed package.

Their errors become one sentence with the file's path: the code may be anybody's.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from brim.engine.device.memory import guard
from brim.engine.networks.program import load_program
from brim.engine.networks.source import NetworkSource, entry_of, find_source
from brim.errors import BrimError, ConfigError, with_article

NetworkFactory = Callable[..., nn.Module]
_SIZES = ((1, 64, 64), (2, 96, 64))  # images, rows, columns: two sizes show that any size works


def factory_of(source: NetworkSource) -> NetworkFactory:
    """The function that makes the network; the file is imported when it is first called."""

    def make(**settings: Any) -> nn.Module:
        if source.kind == "program":
            return load_program(Path(source.path))
        return make_module(_imported(source), source.reference, **settings)

    return make


def make_module(factory: NetworkFactory, name: str, **settings: Any) -> nn.Module:
    """factory(**settings), checked to be a module."""
    with _said(f"{name} raised"):
        module = factory(**settings)
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise _unusable(f"{name} returned the class {module.__name__}, expected a module; call it")
    if not isinstance(module, nn.Module):
        raise _unusable(f"{name} returned {_a(module)}, expected a torch.nn.Module")
    return module


@torch.no_grad()
def check_module(module: nn.Module, name: str, outputs: int) -> None:
    """Raise unless (B, 3, H, W) becomes (B, outputs, H, W), for any number of images and any size."""
    was_training, device = module.training, _device(module)
    if device.type == "meta":
        return
    module.eval()
    try:
        for images, rows, columns in _SIZES:
            _check_outputs(module, name, (images, 3, rows, columns), outputs, device)
    finally:
        module.train(was_training)


def _check_outputs(module: nn.Module, name: str, shape: Sequence[int], outputs: int, device: torch.device) -> None:
    with _said(f"{name} does not accept images of shape {list(shape)}:"), guard():
        result = module(torch.zeros(*shape, device=device))
    if not isinstance(result, Tensor):
        raise _unusable(f"{name} returned {_a(result)} for an image, expected one tensor of logits")
    expected = [shape[0], outputs, *shape[2:]]
    if list(result.shape) != expected:
        raise _unusable(
            f"{name} turned images of shape {list(shape)} into {list(result.shape)}, expected {expected}; "
            f"return {outputs} map{'s' * (outputs != 1)} as large as the image"
        )
    if not result.is_floating_point():
        raise _unusable(
            f"{name} returned {str(result.dtype).removeprefix('torch.')}, expected logits in floating point"
        )


def source_of_object(factory: Any) -> NetworkSource | None:
    """Where a function or class is defined, if another process can import it from there."""
    name = getattr(factory, "__qualname__", "")
    try:
        file = inspect.getsourcefile(factory)
    except TypeError:
        return None
    if file is None or not name.isidentifier() or not Path(file).is_file():  # local functions and lambdas have dots
        return None
    return find_source(f"{Path(file).absolute()}:{name}")


def _imported(source: NetworkSource) -> NetworkFactory:
    if source.kind == "package":
        with _said(f"{source.package} ({source.path}) cannot be imported:"):
            return cast(NetworkFactory, entry_of(source.package).load())
    module = _module(Path(source.path), source.sha256)
    if not hasattr(module, source.factory):
        offered = [name for name, value in vars(module).items() if _is_offered(value, module.__name__)]
        known = f"it has {', '.join(offered)}" if offered else "it defines no functions"
        raise _unusable(f'{source.path} has no "{source.factory}"; {known}')
    factory = getattr(module, source.factory)
    if not callable(factory):
        raise _unusable(f"{source.reference} is {_a(factory)}, expected a function that makes a module")
    return cast(NetworkFactory, factory)


def _module(path: Path, sha256: str) -> ModuleType:
    """The file as a module, imported once for each content; it may import its neighbours."""
    name = f"brim_network_{path.stem}_{sha256[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _unusable(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        with _said(f"{path} cannot be imported:"):
            # not the loader's: it takes cached bytecode of another file of that size and second
            exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), module.__dict__)
    except ConfigError:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _is_offered(value: Any, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


@contextmanager
def _said(doing: str) -> Any:
    """Errors of other people's code as one sentence."""
    try:
        yield
    except BrimError:
        raise
    except (Exception, SystemExit) as failure:
        reason = " ".join(str(failure).split("\n")[0].split())[:200]
        raise _unusable(f"{doing} {type(failure).__name__}{f': {reason}' if reason else ''}") from failure


def _unusable(text: str) -> ConfigError:
    return ConfigError(text, field="network", code="unusable")


def _a(value: Any) -> str:
    return "nothing" if value is None else with_article(value)


def _device(module: nn.Module) -> torch.device:
    tensor = next(iter(module.state_dict().values()), None)
    return torch.device("cpu") if tensor is None else tensor.device
