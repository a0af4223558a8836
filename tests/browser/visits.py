"""A visit to the dashboard: a page that is logged in by the token's address, and what went wrong on it.

Whatever its console complains of, whatever fails to load, and any request to another host fails the test.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from fault_service import Serve

from waiting import PATIENCE_S


class Visit:
    """One page of a browser on one service, and what went wrong on it."""

    def __init__(self, page: Any, serve: Serve, screenshots: Path) -> None:
        self.page, self.serve, self._screenshots = page, serve, screenshots
        self.base = f"http://127.0.0.1:{serve.port}"
        self.faults: list[str] = []
        page.set_default_timeout(1e3 * PATIENCE_S)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.faults.append(f"error in the page: {error}"))
        page.on("request", self._watch)
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)
        page.goto(f"{self.base}/?token={serve.token}")

    def open(self, path: str) -> Any:
        """The page at a path, once it listens."""
        self.page.goto(f"{self.base}{path}")
        self.page.wait_for_selector("h1")
        self.page.wait_for_function("window.did_handshake")
        return self.page

    def shot(self, name: str) -> Path:
        """Keep a picture."""
        file = self._screenshots / f"{name}.png"
        self.page.wait_for_timeout(300)  # a chart is drawn after it is there
        self.page.screenshot(path=file, full_page=True)
        return file

    def barriers(self) -> list[str]:
        """What axe-core finds serious or critical: barriers for people who see, hear or move differently."""
        if not self.page.evaluate("'axe' in window"):
            import axe_playwright_python

            self.page.evaluate(Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']}: {node['html'][:160]} {node['failureSummary'][-200:]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"][:3]
        ]

    def let_go(self, name: str, data: bytes) -> None:
        """A file dragged over the page and let go of."""
        carried = self.page.evaluate_handle(
            """([name, bytes]) => {
              const carried = new DataTransfer();
              carried.items.add(new File([new Uint8Array(bytes)], name));
              return carried;
            }""",
            [name, list(data)],
        )
        for event in ("dragover", "drop"):
            self.page.locator(".brim-drop").dispatch_event(event, {"dataTransfer": carried})

    def dark(self) -> None:
        """Switch to dark, as a person does."""
        self.page.get_by_role("button", name="Light or dark").click()
        self.page.wait_for_selector("body.body--dark")

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def _watch(self, request: Any) -> None:
        if not request.url.startswith((f"{self.base}/", f"ws://127.0.0.1:{self.serve.port}/", "data:", "blob:")):
            self.faults.append(f"a request to another host: {request.url}")

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # by going to another page, or what became a download
            self.faults.append(f"failed: {request.url} {request.failure}")

    def _answered(self, response: Any) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status}: {response.url}")


def cell_files(count: int, side: int) -> list[tuple[str, tuple[str, bytes]]]:
    """Images of cells and their masks, as an upload takes them."""
    import cv2

    from brim.segmentation.scenes import make_cells

    files = []
    for index in range(count):
        image, mask = make_cells(3, index, side, side)
        for field, pixels in (("images", image[..., ::-1]), ("masks", mask.astype(np.uint8) * 255)):
            files.append((field, (f"{index:02d}.png", cv2.imencode(".png", pixels)[1].tobytes())))
    return files


def npy(array: np.ndarray) -> bytes:
    """An array as the bytes of a file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()
