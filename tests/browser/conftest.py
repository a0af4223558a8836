"""A real browser before a real `brim serve`: Debian's Chromium, driven by Playwright; skipped where there is neither.

With BRIM_NEED_BROWSER they fail instead. Screenshots are kept in BRIM_SCREENSHOTS, or in a temporary folder.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from fault_service import Serve
from visits import Visit, cell_files, npy

from waiting import PATIENCE_S

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-background-networking", "--disable-gpu", "--disable-dev-shm-usage"]
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser; one for all tests of a file, as it keeps an event loop in the tests' thread."""
    if CHROMIUM is None and os.environ.get("BRIM_NEED_BROWSER"):
        pytest.fail("there is no chromium on this machine, and BRIM_NEED_BROWSER is set; apt-get install chromium")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine; apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures are kept."""
    chosen = os.environ.get("BRIM_SCREENSHOTS")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def service(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """The service that tests give jobs and data to."""
    yield from _serving(tmp_path_factory.mktemp("browser") / "data")


@pytest.fixture(scope="module")
def empty_service(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A service that nobody gives anything."""
    yield from _serving(tmp_path_factory.mktemp("browser_empty") / "data")


@pytest.fixture
def visit(browser: Any, service: Serve, screenshots: Path) -> Iterator[Visit]:
    """A page on the service with data."""
    yield from _visiting(browser, service, screenshots, WIDE)


@pytest.fixture
def phone(browser: Any, service: Serve, screenshots: Path) -> Iterator[Visit]:
    """The same as wide as a phone."""
    yield from _visiting(browser, service, screenshots, PHONE)


@pytest.fixture
def empty_visit(browser: Any, empty_service: Serve, screenshots: Path) -> Iterator[Visit]:
    """A page on the service without anything."""
    yield from _visiting(browser, empty_service, screenshots, WIDE)


@pytest.fixture(scope="module")
def upload(service: Serve) -> Callable[..., str]:
    """Upload a dataset over the API: `upload(name, kind, files)` gives its id."""

    def send(name: str, kind: str, files: list[tuple[str, tuple[str, bytes]]]) -> str:
        answer = httpx.post(
            f"http://127.0.0.1:{service.port}/api/datasets",
            headers={"Authorization": f"Bearer {service.token}"},
            data={"name": name, "kind": kind},
            files=files,
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    return send


@pytest.fixture(scope="module")
def images(upload: Callable[..., str]) -> str:
    """Id of a dataset of 6 small images of cells with masks."""
    return upload("cells", "images", cell_files(6, 64))


@pytest.fixture(scope="module")
def sequences(upload: Callable[..., str]) -> str:
    """Id of a dataset of 16 short sequences of two kinds."""
    rng = np.random.default_rng(5)
    files, labels = [], ["file,label"]
    for index in range(16):
        rising = index % 2
        frames = rng.normal(size=(int(rng.integers(6, 12)), 4)).astype(np.float32) * 0.3 + 2.0 * rising
        files.append(("sequences", (f"{index:02d}.npy", npy(frames))))
        labels.append(f"{index:02d}.npy,{'rise' if rising else 'rest'}")
    return upload("walks", "sequences", [*files, ("labels", ("labels.csv", "\n".join(labels).encode()))])


def _serving(data: Path) -> Iterator[Serve]:
    made = Serve(data, dashboard=True)
    try:
        yield made.start()
    finally:
        made.close()


def _visiting(browser: Any, serve: Serve, screenshots: Path, viewport: dict[str, int]) -> Iterator[Visit]:
    context = browser.new_context(viewport=viewport)
    try:
        made = Visit(context.new_page(), serve, screenshots)
        yield made
        assert not made.faults, made.faults
    finally:
        context.close()
