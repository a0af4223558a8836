"""A small table of figures, as plain as it can be; it scrolls by itself where the page is narrow."""

from collections.abc import Sequence
from typing import Any

from nicegui import ui

from brim.service.dashboard import words


def draw_table(label: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows of texts and numbers below their names; label is for who cannot see it."""
    if not rows:
        return
    table = ui.element("table").classes("brim-plain-table").props(f'aria-label="{label}"')
    table.move(ui.element("div").classes("brim-scroll"))
    with table:
        with ui.element("thead"), ui.element("tr"):
            for name in names:
                _cell("th", name)
        with ui.element("tbody"):
            for row in rows:
                with ui.element("tr"):
                    for value in row:
                        _cell("td", words.number(value))


def _cell(tag: str, text: str) -> None:
    with ui.element(tag):
        ui.label(text)
