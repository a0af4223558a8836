"""One dataset: what is in it by figures and charts, where radio samples are, export, and an end to it."""

from typing import Final

from nicegui import ui

from brim.service.dashboard import charts, words
from brim.service.dashboard.client import Api, JsonValue, Refused, part
from brim.service.dashboard.dataset_rf import draw_rf
from brim.service.dashboard.datasets import KINDS, UNITS
from brim.service.dashboard.layout import card, draw_table, every, figure, frame, heading, in_words, show_refusal

PREVIEWED = 20  # items
_EXPORTS: Final = {
    "rf": {"parquet": "Parquet", "hdf5": "HDF5", "sigmf": "SigMF"},
    "images": {"files": "Files as .zip"},
    "sequences": {"files": "Files as .zip"},
}
_NEXT: Final = {
    "rf": ("Train a locator on it", "rf.train"),
    "images": ("Train segmentation on it", "segment.train"),
    "sequences": ("Train on it", "sequence.train"),
}


def add(api: Api) -> None:
    @ui.page("/datasets/{id}", response_timeout=30)
    async def dataset(id: str) -> None:
        place = f"/api/datasets/{part(id)}"
        try:
            found = await api.get(place)
        except Refused as failure:
            with frame("Dataset", "/datasets"):
                show_refusal(failure)
                ui.link("All datasets", "/datasets")
            return
        with frame(found["name"], "/datasets"):
            shown = DatasetView(api, place, found)
        ui.timer(0, shown.read, once=True)  # after the first paint: of a large dataset it takes seconds
        if found["state"] == "writing":
            every(5.0, shown.look)


class DatasetView:
    """What the catalogue says, and below it what is in the files."""

    def __init__(self, api: Api, place: str, dataset: JsonValue) -> None:
        """Draw what is known at once."""
        self._api, self._place, self._dataset = api, place, dataset
        with card():
            with ui.row().classes("brim-figures"):
                figure("kind", KINDS[dataset["kind"]])
                self._items = figure(UNITS[dataset["kind"]], words.NONE)
                self._size = figure("size", words.NONE)
                self._state = figure("state", words.NONE)
                figure("made", words.when(dataset["created_at"]))
            with ui.row(align_items="center").classes("brim-tools"):
                self._draw_ways()
        self._inside = ui.column().classes("brim-stack")
        with self._inside, ui.row(align_items="center").classes("brim-muted"):
            ui.spinner(size="sm")
            ui.label("Reading the dataset …")
        self._show(dataset)

    async def look(self) -> None:
        """While it is written: how far it is, and what is in it by now."""
        if self._dataset["state"] != "writing":
            return
        found = await self._api.seen(self._place)
        has_changed = (found["state"], found["items"]) != (self._dataset["state"], self._dataset["items"])
        self._dataset = found
        self._show(found)
        if has_changed:
            await self.read()

    async def read(self) -> None:
        """What is in the files, as charts."""
        try:
            figures = await self._api.seen(f"{self._place}/statistics", fresh_s=2.0)
            items = [] if figures["kind"] == "rf" else await self._preview()
        except Refused as failure:
            self._inside.clear()
            with self._inside:
                show_refusal(failure)
            return
        self._inside.clear()
        with self._inside:
            if figures["kind"] == "rf":
                draw_rf(self._api, self._place, figures)
            elif figures["kind"] == "images":
                _draw_images(figures, items)
            else:
                _draw_sequences(figures, items)

    async def _preview(self) -> list[JsonValue]:
        found: list[JsonValue] = (await self._api.get(f"{self._place}/preview", limit=PREVIEWED))["items"]
        return found

    def _show(self, dataset: JsonValue) -> None:
        self._items.set_text(words.number(dataset["items"]))
        self._size.set_text(words.in_bytes(dataset["bytes"]))
        self._state.set_text(dataset["state"])

    def _draw_ways(self) -> None:
        dataset = self._dataset
        text, kind = _NEXT[dataset["kind"]]
        ui.link(text, f"/jobs/new?kind={kind}&dataset_ids={part(dataset['id'])}")
        if dataset["job_id"]:
            ui.link("The job that made it", f"/jobs/{part(dataset['job_id'])}")
        ui.space()
        ui.label("Export:").classes("brim-muted")
        for name, label in _EXPORTS[dataset["kind"]].items():
            ui.link(label, f"{self._place}/export?format={name}").props("download")
        dialog = self._make_sure()
        ui.button("Delete", icon="delete", on_click=dialog.open).props("outline dense no-caps color=negative")

    def _make_sure(self) -> ui.dialog:
        with ui.dialog() as dialog, ui.card().classes("brim-dialog"):
            heading(f"Delete “{self._dataset['name']}”?")
            ui.label("Its files go too, unless they were only referred to. Runs that were trained on it stay.")
            with ui.row().classes("brim-tools justify-end"):
                ui.button("Keep it", on_click=dialog.close).props("flat no-caps autofocus")
                ui.button("Delete it", on_click=self._delete).props("unelevated no-caps color=negative")
        return dialog

    async def _delete(self) -> None:
        async with in_words():
            await self._api.delete(self._place)
            ui.navigate.to("/datasets")


def _draw_images(figures: JsonValue, items: list[JsonValue]) -> None:
    sizes = {f"{one['width']} × {one['height']}": one["count"] for one in figures["sizes"][:12]}
    with ui.element("div").classes("brim-grid"):
        with card("Sizes in pixels"):
            if sizes:
                charts.draw(charts.bars(sizes, x_name="images"), "Images by size")
            with ui.row().classes("brim-figures"):
                figure("with a mask", f"{words.number(figures['masks'])} of {words.number(figures['items'])}")
                if figures["unreadable"]:
                    figure("cannot be read", words.number(figures["unreadable"]))
        with card(f"First {len(items)}" if items else "No images yet"):
            rows = [(one["name"], one["width"], one["height"]) for one in items]
            draw_table("The first images", ("Name", "Width", "Height"), rows)


def _draw_sequences(figures: JsonValue, items: list[JsonValue]) -> None:
    frames = figures["histograms"]["frames"]
    classes = dict(sorted(figures["classes"].items(), key=lambda one: -one[1])[:20])
    with ui.element("div").classes("brim-grid"):
        with card("Lengths"):
            if frames["counts"]:
                options = charts.histogram(frames["edges"], frames["counts"], x_name="frames", y_name="sequences")
                charts.draw(options, "Sequences by length")
        with card("Classes"):
            if classes:
                charts.draw(charts.bars(classes, x_name="sequences"), "Sequences by class")
            with ui.row().classes("brim-figures"):
                figure("features a frame", words.number(figures["features"]))
                figure("without a label", words.number(figures["unlabelled"]))
    with card(f"First {len(items)}" if items else "No sequences yet"):
        rows = [(one["id"], one["frames"], one["label"]) for one in items]
        draw_table("The first sequences", ("Name", "Frames", "Label"), rows)
