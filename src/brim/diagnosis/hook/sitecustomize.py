"""Runs in every interpreter that a watched command starts, before its script; then the sitecustomize it hides.

Only the standard library, Python 3.10 and later: this is the script's interpreter, not brim's.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would be loaded into every script


def _hidden_sitecustomize() -> None:
    """Run the module of this name that would have been found without this folder."""
    paths = [path for path in sys.path if os.path.abspath(path) != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_hidden_sitecustomize()
if "BRIM_WHY_OUT" in os.environ:
    importlib.import_module("brim_probe").start()
