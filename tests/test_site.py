"""The documentation site: builds without a warning, loads nothing from elsewhere, names everything public."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import brim.rf
import brim.segmentation
import brim.sequences

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
        reason="mkdocs-material or mkdocstrings is not installed: pip install -e '.[docs]'",
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return out


def pages(site: Path) -> dict[str, str]:
    return {file.relative_to(site).as_posix(): file.read_text() for file in site.rglob("*.html")}


def test_every_document_is_a_page(built):
    documents = [file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md")]

    found = pages(built)

    assert [str(file) for file in documents if file.with_suffix(".html").as_posix() not in found] == []
    assert "<h1" in found["index.html"]  # the README
    assert "examples/submit_jobs.py" in found["examples.html"]
    assert (built / "examples" / "submit_jobs.py").is_file()


def test_nothing_is_loaded_from_another_host(built):
    loading = re.compile(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(https?:)?//')

    assert [name for name, text in pages(built).items() if loading.search(text)] == []


@pytest.mark.parametrize("package", [brim.rf, brim.segmentation, brim.sequences], ids=lambda package: package.__name__)
def test_every_public_class_and_function_is_in_the_reference(built, package):
    text = (built / "api" / f"{package.__name__.rpartition('.')[2]}.html").read_text()
    public = [getattr(package, name) for name in package.__all__]
    named = [f"{item.__module__}.{item.__qualname__}" for item in public if inspect.isclass(item) or callable(item)]

    assert [name for name in named if f'id="{name}"' not in text] == []
