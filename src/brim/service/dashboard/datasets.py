"""Datasets: all of them, newest first, by kind; and a form that brings images or sequences of one's own."""

from pathlib import Path
from typing import Final

from nicegui import ui
from nicegui.element import Element

from brim.service.dashboard import words
from brim.service.dashboard.client import Api, JsonValue, part
from brim.service.dashboard.layout import empty, every, frame, heading
from brim.service.dashboard.listing import Listing, page_number

KINDS: Final = {"rf": "Radio samples", "images": "Images", "sequences": "Sequences"}
UNITS: Final = {"rf": "samples", "images": "images", "sequences": "sequences"}
_COLUMNS: Final = {
    "name": "Name",
    "kind": "Kind",
    "items": "Items",
    "size": "Size",
    "state": "State",
    "created": "Made",
}


def add(api: Api) -> None:
    @ui.page("/datasets", response_timeout=30)
    async def datasets(kind: str = "", page: str = "1") -> None:
        wanted = {"kind": kind if kind in KINDS else "", "page": page_number(page)}
        with frame("Datasets", "/datasets"):
            with ui.row(align_items="center").classes("brim-tools"):
                chosen = ui.select({"": "any", **KINDS}, label="Kind", value=wanted["kind"])
                chosen.props("outlined dense").classes("brim-field-short")
                ui.space()
                form = _form()
                ui.button("Bring your own", icon="upload", on_click=form.open).props("no-caps outline")
                ui.button("Generate", icon="add", on_click=lambda: ui.navigate.to("/jobs/new?kind=rf.generate")).props(
                    "no-caps unelevated"
                )
            listed = Listing(api, "datasets", wanted, columns=_COLUMNS, row=_row, nothing=_nothing)
        chosen.on_value_change(lambda event: listed.want(kind=event.value))
        await listed.look()
        every(2.0, listed.look)


class Bring(Element, component=Path(__file__).with_name("bring_view.js")):
    """A form whose files go from the browser to the API as they are."""


def _form() -> ui.dialog:
    with ui.dialog() as dialog, ui.card().classes("brim-dialog"):
        heading("Bring a dataset")
        bring = Bring()
        bring.on("brought", lambda event: ui.navigate.to(f"/datasets/{part(str(event.args))}"))
        bring.on("leave", dialog.close)
    return dialog


def _row(dataset: JsonValue) -> JsonValue:
    items = f"{words.number(dataset['items'])} {UNITS[dataset['kind']]}"
    return {
        "id": dataset["id"],
        "name": dataset["name"],
        "kind": KINDS[dataset["kind"]],
        "items": words.number(dataset["items"]),
        "size": words.in_bytes(dataset["bytes"]),
        "state": dataset["state"],
        "created": words.ago(dataset["created_at"]),
        "narrow": f"{items} · {words.in_bytes(dataset['bytes'])} · {dataset['state']}",
    }


def _nothing(is_filtered: bool) -> None:
    if is_filtered:
        empty("No dataset is like that", "Choose another kind.", action="Show all datasets", target="/datasets")
    else:
        empty(
            "No datasets yet",
            "Generate radio samples, bring images or sequences with the button above, or add a folder with "
            '"brim datasets add NAME PATH --kind rf|images|sequences".',
            action="Generate radio samples",
            target="/jobs/new?kind=rf.generate",
        )
