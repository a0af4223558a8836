"""Names of a package that are imported when they are first used, so that importing the package loads no torch.

A package lists its public names once, as ordinary imports that only type checkers run:

    if TYPE_CHECKING:
        from brim.rf.generation.dataset import generate as generate

    __getattr__, __all__ = lazy(__name__, __file__)
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package, from the imports in its TYPE_CHECKING block."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    origins = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = origins[name]
        own = module == package  # a module of the package itself
        value = import_module(f"{package}.{name}") if own else getattr(import_module(module), attribute)
        setattr(import_module(package), name, value)
        return value

    return load, sorted(origins)
