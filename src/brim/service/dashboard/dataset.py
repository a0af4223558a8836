"""One dataset: what is in it by figures and charts, radio samples on a map and by their spectra, export, deletion."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, Final

from nicegui import ui
from nicegui.element import Element

from brim.service.dashboard import charts, layout, words
from brim.service.dashboard.client import Api, JsonValue, part
from brim.service.dashboard.maps import Map, Scale

PREVIEWED = 20  # items
WAIT_S = 0.2  # after the last movement of the slider
KINDS: Final = {"rf": "Radio samples", "images": "Images", "sequences": "Sequences", "recordings": "Recordings"}
UNITS: Final = {"rf": "samples", "images": "images", "sequences": "sequences", "recordings": "recordings"}
_EXPORTS: Final = {"parquet": "Parquet", "hdf5": "HDF5", "sigmf": "SigMF"}  # of radio samples
_NEXT: Final = {
    "rf": ("Train a locator on it", "rf.train"),
    "images": ("Train segmentation on it", "segment.train"),
    "sequences": ("Train on it", "sequence.train"),
    "recordings": ("Locate its transmission", "rf.measure"),
}
_OUTCOMES: Final = {"kept": "accepted", "receivers": "too few receivers", "gdop": "GDOP too large"}
_HISTOGRAMS: Final = {
    "snr_db": ("Signal-to-noise ratio", "dB"),
    "gdop": ("Dilution of precision", "GDOP"),
    "crlb_m": ("Bound of the error", "m"),
}


def add(api: Api) -> None:
    @ui.page("/datasets/{id}", response_timeout=30)
    async def dataset(id: str) -> None:
        place = f"/api/datasets/{part(id)}"
        dataset = await layout.load(api, place, "/datasets")
        if dataset is None:
            return
        with layout.frame(dataset["name"], "/datasets"):
            with layout.card():
                facts = layout.Live()
                with layout.tools():
                    _draw_links(api, place, dataset)
            contents = layout.Live()
        facts.show(dataset, _draw_facts)
        contents.show("Reading the dataset …", layout.muted)

        async def read() -> None:
            async with contents.rejections():
                statistics = await api.seen(f"{place}/statistics", fresh_s=2.0)
                items: list[JsonValue] = []
                if statistics["kind"] != "rf":
                    items = (await api.get(f"{place}/preview", limit=PREVIEWED))["items"]
                contents.show((statistics, items), partial(_draw_contents, api, place))

        async def look() -> None:
            facts.show(await api.seen(place), _draw_facts)
            await read()

        ui.timer(0, read, once=True)  # after the first paint: a large dataset takes seconds
        if dataset["state"] == "writing":
            layout.every(5.0, look)


def _draw_facts(dataset: JsonValue) -> None:
    layout.figures(
        {
            "kind": KINDS[dataset["kind"]],
            UNITS[dataset["kind"]]: words.number(dataset["items"]),
            "size": words.in_bytes(dataset["bytes"]),
            "state": dataset["state"],
            "made": words.when(dataset["created_at"]),
        }
    )


def _draw_links(api: Api, place: str, dataset: JsonValue) -> None:
    async def delete() -> None:
        text = "Its files are deleted too, unless it only refers to them. Runs that were trained on it stay."
        if await layout.confirm_delete(f"Delete “{dataset['name']}”?", text):
            async with layout.notified():
                await api.delete(place)
                ui.navigate.to("/datasets")

    text, kind = _NEXT[dataset["kind"]]
    ui.link(text, f"/jobs/new?kind={kind}&dataset_ids={part(dataset['id'])}")
    if dataset["job_id"]:
        ui.link("The job that made it", f"/jobs/{part(dataset['job_id'])}")
    ui.space()
    layout.muted("Export:")
    for name, label in (_EXPORTS if dataset["kind"] == "rf" else {"files": "Files as .zip"}).items():
        ui.link(label, f"{place}/export?format={name}").props("download")
    ui.button("Delete", icon="delete", on_click=delete).props("outline dense no-caps color=negative")


def _draw_contents(api: Api, place: str, contents: tuple[JsonValue, list[JsonValue]]) -> None:
    statistics, items = contents
    if statistics["kind"] == "images":
        _draw_images(place, statistics, items)
    elif statistics["kind"] == "sequences":
        _draw_sequences(statistics, items)
    elif statistics["kind"] == "recordings":
        with layout.card("Recordings"):
            rows = [(one["name"], words.number(one["bytes"])) for one in items]
            layout.draw_table("The recordings", ("Name", "Bytes"), rows)
    elif statistics["samples"]:
        _draw_rf(api, place, statistics)
    else:
        layout.muted("No samples are written yet.")


class ImageGrid(Element, component=Path(__file__).with_name("image_grid.js")):
    """Thumbnails of all images with the outlines of their masks, and one of them large."""

    def __init__(self, place: str, items: int, has_masks: bool, job_id: str = "") -> None:
        """job_id: a prediction, whose outlines are shown too."""
        super().__init__()
        self._props |= {"place": place, "items": items, "has-masks": has_masks, "job": job_id}
        self.classes("brim-stack")


def _draw_images(place: str, statistics: JsonValue, items: list[JsonValue]) -> None:
    if statistics["items"]:
        with layout.card("Images"):
            ImageGrid(place, statistics["items"], statistics["masks"] > 0)
    sizes = {f"{one['width']} × {one['height']}": one["count"] for one in statistics["sizes"][:12]}
    counts = {"with a mask": f"{words.number(statistics['masks'])} of {words.number(statistics['items'])}"}
    if statistics["unreadable"]:
        counts["cannot be read"] = words.number(statistics["unreadable"])
    with ui.element("div").classes("brim-grid"):
        with layout.card("Sizes in pixels"):
            if sizes:
                charts.draw(charts.bars(sizes, x_name="images"), "Images by size")
            layout.figures(counts)
        with layout.card(f"First {len(items)}" if items else "No images yet"):
            rows = [(one["name"], one["width"], one["height"]) for one in items]
            layout.draw_table("The first images", ("Name", "Width", "Height"), rows)


def _draw_sequences(statistics: JsonValue, items: list[JsonValue]) -> None:
    frames = statistics["histograms"]["frames"]
    classes = dict(sorted(statistics["classes"].items(), key=lambda one: -one[1])[:20])
    with ui.element("div").classes("brim-grid"):
        with layout.card("Lengths"):
            if frames["counts"]:
                options = charts.histogram(frames["edges"], frames["counts"], x_name="frames", y_name="sequences")
                charts.draw(options, "Sequences by length")
        with layout.card("Classes"):
            if classes:
                charts.draw(charts.bars(classes, x_name="sequences"), "Sequences by class")
            features, unlabelled = words.number(statistics["features"]), words.number(statistics["unlabelled"])
            layout.figures({"features per frame": features, "without a label": unlabelled})
    with layout.card(f"First {len(items)}" if items else "No sequences yet"):
        rows = [(one["id"], one["frames"], one["label"]) for one in items]
        layout.draw_table("The first sequences", ("Name", "Frames", "Label"), rows)


# Radio samples


def _draw_rf(api: Api, place: str, statistics: JsonValue) -> None:
    SampleView(api, place, statistics)
    attempted = statistics["attempted"]
    with ui.element("div").classes("brim-grid brim-pairs"):
        with layout.card("Acceptance by gate"):
            if attempted:
                rejected = sorted(statistics["rejected"].items(), key=lambda one: -one[1])
                counts = {"kept": statistics["samples"], **dict(rejected)}
                shares = {_OUTCOMES.get(name, name.replace("_", " ")): n / attempted for name, n in counts.items()}
                charts.draw(charts.bars(shares, is_share=True), "Share of the attempts by outcome")
            rate = words.share(statistics["acceptance_rate"])
            layout.figures({"accepted": rate, "attempts": words.number(attempted)})
        for name, (title, unit) in _HISTOGRAMS.items():
            one = statistics["histograms"].get(name)
            if one and one["counts"]:
                with layout.card(title):
                    charts.draw(charts.histogram(one["edges"], one["counts"], x_name=unit), f"{title}, histogram")


class SampleView:
    """The map, and one sample that is chosen there or by its number."""

    def __init__(self, api: Api, place: str, statistics: JsonValue) -> None:
        self._api, self._place = api, place
        self._last = statistics["samples"] - 1
        self._requests = 0
        with layout.card("Where"):
            self._draw_map(statistics)
        with layout.card("One sample"):
            with layout.tools():
                self._number = ui.number("Sample", value=0, min=0, max=self._last, precision=0, on_change=self._choose)
                self._number.props("outlined dense").classes("brim-field-short")
                self._slider = ui.slider(min=0, max=max(1, self._last), value=0, on_change=self._choose)
                self._slider.props('dense aria-label="Sample"').classes("brim-slider")
            self._sample = layout.Live()
        ui.timer(0, self._read, once=True)

    def _draw_map(self, statistics: JsonValue) -> None:
        """Receivers by name, transmitters coloured by their bound; a click chooses one."""
        transmitters = statistics["transmitters"]
        scale = Scale([one["crlb_m"] for one in transmitters])
        self._map = Map(
            "Map of receivers and transmitters",
            stations=statistics["receivers"],
            points=[
                (one["lat"], one["lon"], scale.colour(one["crlb_m"]), _tip(one), one["index"]) for one in transmitters
            ],
            tile_url=self._api.settings.tile_url,
            on_pick=lambda index: self._number.set_value(index),  # the rest follows from its change
        )
        with layout.tools():
            scale.draw("bound of the error")
            ui.space()
            layout.muted(f"{words.number(len(transmitters))} of {words.number(self._last + 1)} transmitters")

    async def _choose(self, event: Any) -> None:
        value = event.value
        if value is None or not 0 <= value <= self._last:
            return
        for other in (self._number, self._slider):
            if other is not event.sender and other.value != value:
                other.set_value(int(value))
        await self._read()

    async def _read(self) -> None:
        self._requests += 1
        mine = self._requests
        await asyncio.sleep(WAIT_S)
        if mine != self._requests:
            return
        index = min(self._last, max(0, int(self._number.value or 0)))
        async with self._sample.rejections():
            sample = await self._api.seen(f"{self._place}/samples/{index}", fresh_s=60.0)
            if mine == self._requests:  # otherwise another one was chosen meanwhile
                self._map.choose(sample["transmitter"], [one for one in sample["receivers"] if one["heard"]])
                self._sample.show(sample, _draw_sample)


def _draw_sample(sample: JsonValue) -> None:
    transmitter, receivers = sample["transmitter"], sample["receivers"]
    layout.figures(
        {
            "latitude, longitude": f"{transmitter['lat']:.4f}, {transmitter['lon']:.4f}",
            "GDOP": words.number(sample["gdop"]),
            "bound of the error": words.metres(sample["crlb_m"]),
            "heard by": f"{sum(one['heard'] for one in receivers)} of {len(receivers)}",
        }
    )
    if sample["note"]:
        layout.muted(sample["note"])
    series = {one["name"]: _spectrum(one["spectrum"]) for one in receivers if one["spectrum"]}
    with ui.element("div").classes("brim-split" if series else ""):
        if series:
            options = charts.lines(series, x_name="kHz from the carrier", y_name="dBm/Hz")
            charts.draw(options, f"Spectra of sample {sample['index']} by receiver").classes("brim-chart-high")
        rows = [(one["name"], one["snr_db"] if one["heard"] else "not heard") for one in receivers]
        layout.draw_table("Receivers of the sample", ("Receiver", "SNR, dB"), rows)


def _spectrum(spectrum: JsonValue) -> list[tuple[float, float]]:
    pairs = zip(spectrum["frequency_hz"], spectrum["power_db"], strict=True)
    return [(round(frequency / 1000, 3), round(power, 2)) for frequency, power in pairs]


def _tip(transmitter: JsonValue) -> str:
    bound, snr = words.metres(transmitter["crlb_m"]), words.number(transmitter["snr_db"])
    return f"Sample {transmitter['index']}: bound {bound}, SNR {snr} dB, GDOP {words.number(transmitter['gdop'])}"
