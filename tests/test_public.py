"""The public names: what semantic versioning covers. A name may be added; removing one needs a new major version."""

import subprocess
import sys
from pathlib import Path

import brim

PUBLIC = {
    "Batcher", "Dataset", "Resident", "contours", "errors", "load_run", "loggers", "sql", "train", "tune_batch",
    "why",
}  # fmt: skip
LOGGERS = {"CSV", "Logger", "LogsValues", "MLflow", "TensorBoard", "WandB", "parse", "using"}


def test_no_public_name_is_gone() -> None:
    assert set(brim.__all__) >= PUBLIC
    assert set(brim.loggers.__all__) == LOGGERS
    assert all(getattr(brim, name) is not None for name in brim.__all__)


def test_every_public_name_is_documented() -> None:
    assert all(name == "errors" or name == "loggers" or getattr(brim, name).__doc__ for name in brim.__all__)


def test_the_page_about_what_is_public_lists_every_name() -> None:
    page = (Path(__file__).parents[1] / "docs/public.md").read_text(encoding="utf-8")
    assert [name for name in PUBLIC if f"`brim.{name}`" not in page] == []
    assert [name for name in LOGGERS if f"`{name}`" not in page] == []


def test_importing_brim_imports_a_hundred_modules_at_most_all_of_python_or_its_own() -> None:
    code = "import sys; old = {*sys.modules}; import brim, brim.loggers, brim.errors; print(*{*sys.modules} - old)"

    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"brim"}
    assert len(names) <= 100
