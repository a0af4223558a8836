"""Locate: recordings of several receivers in, a map of where the transmitter is out, with the correlations."""

from pathlib import Path

from nicegui import ui
from nicegui.element import Element

from brim.service.dashboard import layout
from brim.service.dashboard.client import Api


def add(api: Api) -> None:
    @ui.page("/locate")
    async def locate() -> None:
        with layout.frame("Locate", "/locate"), layout.card():
            layout.muted(
                "Recordings of one transmission by two or more receivers, of which the position is known: "
                "in their metadata, or in a CSV of stations."
            )
            LocateView()


class LocateView(Element, component=Path(__file__).with_name("locate_view.js")):
    """Files to the API, and the page it answers with: map, stations and correlations; all in the browser."""
