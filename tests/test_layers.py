"""Imports point one way: service → jobs → cluster → rf | segmentation | sequences → engine → errors."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "src" / "brim"

# Greater numbers may import smaller ones; equal numbers only their own layer.
HEIGHT = {
    "__main__": 9,
    "cli": 8,
    "doctor": 7,
    "service": 6,
    "jobs": 5,
    "runs": 4,
    "cluster": 4,
    "rf": 3,
    "segmentation": 3,
    "sequences": 3,
    "diagnosis": 3,
    "engine": 2,
    "report": 1,
    "config": 1,
    "loggers": 1,
    "lazy": 0,
    "errors": 0,
    "__init__": 0,
}

COMPUTE = {"numpy", "safetensors", "torch", "triton", "pynvml"}  # all that a GPU box needs besides Python
HOMES = {  # where else than in COMPUTE's layers a package may be imported, by path prefixes
    "rich": ("cli/", "doctor.py"),
    "typer": ("cli/",),
    "triton": (
        "rf/generation/cuda.py",
        "rf/generation/kernels.py",
        "segmentation/networks/kernels.py",
        "segmentation/objects/kernels.py",
        "segmentation/scenes/kernels.py",
        "doctor.py",
    ),
    "cv2": ("segmentation/",),
    "PIL": ("segmentation/",),
    "tifffile": ("segmentation/images/", "rf/physics/terrain.py"),
    "imagecodecs": ("segmentation/images/",),
    "zarr": ("segmentation/images/",),
    "czifile": ("segmentation/images/vendors.py",),
    "liffile": ("segmentation/images/vendors.py",),
    "nd2": ("segmentation/images/vendors.py",),
    "openslide": ("segmentation/images/vendors.py",),
    "shapely": ("segmentation/objects/polygons.py",),
    "matplotlib": ("segmentation/tuning/plot.py", "sequences/ablation/plot.py", "sequences/evaluation/tables.py"),
    "pynvml": ("engine/nvml.py", "doctor.py"),
    "fsspec": ("engine/storage/places.py",),
    "pyarrow": (
        "rf/datasets/formats.py",
        "engine/rows/sql.py",
        "engine/rows/columns.py",
        "engine/rows/opening.py",
        "sequences/corpus/tables.py",
    ),
    "scipy": ("sequences/corpus/audio.py",),
    "soundfile": ("sequences/corpus/audio.py",),
    "transformers": ("sequences/corpus/acoustics.py",),
    "h5py": ("rf/datasets/formats.py", "rf/physics/paths.py"),
    "adbc_driver_manager": ("engine/rows/sql.py",),
    "adbc_driver_postgresql": ("engine/rows/sql.py",),
    "adbc_driver_sqlite": ("engine/rows/sql.py",),
    "onnx": ("rf/location/run.py", "rf/location/training.py"),
    "onnxruntime": ("engine/networks/program.py", "rf/location/run.py", "rf/location/training.py"),
    "onnxscript": ("engine/networks/program.py", "rf/location/run.py", "rf/location/training.py"),
    "tensorboard": (),
    "mlflow": ("loggers.py",),
    "wandb": ("loggers.py",),
    "pandas": ("report/frames.py",),
    "dbos": ("jobs/durable.py",),
    "sqlalchemy": ("jobs/store/",),
    "alembic": ("jobs/store/",),
    "pydantic": ("service/",),
    "fastapi": ("service/",),
    "fastapi_offline": ("service/",),
    "starlette": ("service/",),
    "uvicorn": ("service/",),
    "httpx": ("service/",),
    "joserfc": ("service/api/sign_in.py",),
    "nicegui": ("service/dashboard/",),
    "websockets": ("service/",),
    "prometheus_client": ("service/",),
    "ray": ("cluster/",),
    "grpc": ("cluster/exposure.py",),
    "s3fs": ("engine/storage/places.py",),
    "botocore": ("engine/storage/places.py",),
    "aiobotocore": ("engine/storage/places.py",),
}
# Of the extra `service`: the command line imports jobs and service only inside functions.
SERVICE = {name for name, homes in HOMES.items() if "".join(homes).startswith(("jobs/", "service/"))} - {"joserfc"}
# Optional, or useless without a GPU: imported when needed.
INSIDE_FUNCTIONS = set(HOMES) - SERVICE - {"rich", "typer", "triton", "cv2", "PIL"}


class Import(NamedTuple):
    """One import statement: where it stands and what it names, in full."""

    file: str  # relative to src/brim
    line: int
    name: str  # dotted
    in_function: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


def layer_of_file(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def layer_of_name(name: str) -> str:
    """brim.rf.config → rf; brim.__version__ → __init__."""
    parts = name.split(".")
    own = parts[1] if len(parts) > 1 else "__init__"
    return own if own in HEIGHT else "__init__"


def imports_in(source: str, file: str) -> Iterator[Import]:
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        for name in _names(node, file):
            yield Import(file, getattr(node, "lineno", 0), name, id(node) in inner)


def _names(node: ast.AST, file: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:  # relative: count up from the file's own package
            above = ("brim", *Path(file).parent.parts)
            base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and _is_dynamic(node.func) and node.args:
        return [str(node.args[0].value)] if isinstance(node.args[0], ast.Constant) else ["a name known when it runs"]
    return []


def _is_dynamic(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


@cache
def all_imports() -> list[Import]:
    files = sorted(ROOT.rglob("*.py"))
    return [found for file in files for found in imports_in(file.read_text(), str(file.relative_to(ROOT)))]


def upward(imports: list[Import]) -> list[str]:
    """The arrows that do not point down."""
    faults = []
    for found in imports:
        if found.name.partition(".")[0] != "brim":
            continue
        here, there = layer_of_file(found.file), layer_of_name(found.name)
        if here == "__init__":  # the public names, imported when they are first used
            continue
        if here != there and HEIGHT[there] >= HEIGHT[here] and there not in ("errors", "lazy", "__init__"):
            faults.append(str(found))
    return faults


def misplaced(imports: list[Import]) -> list[str]:
    """Packages imported where they have no home, or too early."""
    faults = []
    for found in imports:
        package = _package(found.name)
        if package == "brim" or package in sys.stdlib_module_names:
            continue
        early = package in INSIDE_FUNCTIONS and not found.in_function
        if early or not _is_at_home(package, found.file):
            faults.append(str(found))
    return faults


def _package(name: str) -> str:
    """What must be installed for it: torch's own module of that name needs TensorBoard."""
    return "tensorboard" if name.startswith("torch.utils.tensorboard") else name.partition(".")[0]


def _is_at_home(package: str, file: str) -> bool:
    if package in HOMES:
        return file.startswith(HOMES[package])
    if package == "a name known when it runs":
        return file in ("rf/datasets/formats.py", "lazy.py", "service/run/prepared.py", "engine/library/modules.py")
    return package in COMPUTE or layer_of_file(file) not in ("engine", "rf", "segmentation", "sequences")


# The package


def test_imports_point_down():
    assert upward(all_imports()) == []


def test_packages_are_imported_at_home():
    assert misplaced(all_imports()) == []


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            "brim.rf, brim.rf.datasets.formats, brim.rf.datasets.summary, brim.rf.datasets.page",
            {"rich", "typer", "pyarrow", "h5py", "triton"},
        ),
        (
            "brim.segmentation, brim.segmentation.images.writing, brim.segmentation.prediction",
            {"rich", "typer", "matplotlib", "triton", "shapely", "scipy"},
        ),
        (
            "brim.engine.rows.resident, brim.engine.rows.files, brim.engine.rows.sql, brim.engine.training.trainer",
            {"rich", "typer", "pyarrow", "adbc_driver_manager", "onnx", "tensorboard"},
        ),
        ("brim.engine.config, brim.rf.config", {"torch", "triton", "cv2"}),
    ],
)
def test_a_room_imports_nothing_that_only_others_need(modules, absent):
    code = f"import sys, {modules}\nprint(*{absent} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


# The rule itself


@pytest.mark.parametrize(
    ("file", "line", "is_upward"),
    [
        ("engine/storage/dataset.py", "from ...rf import config", True),
        ("rf/generation/dataset.py", "from brim.segmentation.networks import hrnet", True),
        ("jobs/kinds/specs.py", "def f():\n    from brim.service import routes", True),
        ("cluster/pool.py", "importlib.import_module('brim.jobs')", True),
        ("cli/rf.py", "from brim.rf import generate", False),
        ("rf/generation/dataset.py", "from .config import GenerateConfig", False),
    ],
)
def test_an_upward_arrow_is_seen_and_no_other(file, line, is_upward):
    assert bool(upward(list(imports_in(line, file)))) == is_upward


@pytest.mark.parametrize(
    ("file", "line", "is_misplaced"),
    [
        ("rf/datasets/page.py", "from typer import Option", True),
        ("rf/datasets/formats.py", "import pyarrow", True),
        ("rf/datasets/summary.py", "def f(name):\n    return import_module(name)", True),
        ("cluster/ray_pool.py", "def f():\n    import ray", False),
    ],
)
def test_a_package_away_from_home_is_seen_and_no_other(file, line, is_misplaced):
    assert bool(misplaced(list(imports_in(line, file)))) == is_misplaced
