"""The public names: what semantic versioning covers. A name may be added; removing one needs a new major version."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

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


LAZY = """
from typing import TYPE_CHECKING
from brim.lazy import lazy
if TYPE_CHECKING:
    from json import dumps as write
    from shop import stock as stock
__getattr__, __all__ = lazy(__name__, __file__)
"""


def test_a_lazy_name_is_imported_from_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").write_text(LAZY)
    (tmp_path / "shop/stock.py").write_text("apples = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    shop = importlib.import_module("shop")

    assert shop.__all__ == ["stock", "write"]
    assert not {"write", "stock"} & set(vars(shop))
    assert (shop.write([1]), shop.stock.apples) == ("[1]", 3)
    with pytest.raises(AttributeError, match="module 'shop' has no attribute 'pears'"):
        _ = shop.pears
