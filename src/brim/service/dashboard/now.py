"""Now: what the devices do, where the waiting goes, and the jobs that run."""

from nicegui import ui

from brim.service.dashboard.client import Api
from brim.service.dashboard.layout import frame


def add(api: Api) -> None:
    """The page."""

    @ui.page("/")
    async def now() -> None:
        with frame("Now", "/"):
            ui.label("…")
