"""Radio samples: where they are, what became of the attempts, how good they are, and one of them by its spectra."""

import asyncio
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import charts, words
from brim.service.dashboard.client import Api, JsonValue, Refused
from brim.service.dashboard.layout import card, draw_table, figure, show_refusal
from brim.service.dashboard.maps import Map, Scale, metres

WAIT_S = 0.2  # after the last movement of the slider
_HISTOGRAMS: Final = {
    "snr_db": ("Signal-to-noise ratio", "dB"),
    "gdop": ("Dilution of precision", "GDOP"),
    "crlb_m": ("Bound of the error", "m"),
}


def draw_rf(api: Api, place: str, figures: JsonValue) -> None:
    """All cards; place is the dataset's in the API."""
    if not figures["samples"]:
        ui.label("No samples are written yet.").classes("brim-muted")
        return
    sample = SampleView(api, place, figures)
    with card("Where"):
        sample.draw_map(api.settings.tile_url)
    with card("One sample"):
        sample.draw()
    with ui.element("div").classes("brim-grid brim-pairs"):
        with card("Acceptance by gate"):
            _draw_gates(figures)
        for name, (title, unit) in _HISTOGRAMS.items():
            one = figures["histograms"].get(name)
            if one and one["counts"]:
                with card(title):
                    options = charts.histogram(one["edges"], one["counts"], x_name=unit, y_name="")
                    charts.draw(options, f"{title}, histogram")


def _draw_gates(figures: JsonValue) -> None:
    attempted = figures["attempted"]
    if attempted:
        kept = {"kept": figures["samples"] / attempted}
        refused = {name: count / attempted for name, count in figures["rejected"].items()}
        gates = kept | dict(sorted(refused.items(), key=lambda one: -one[1]))
        gates = {name.replace("_", " "): value for name, value in gates.items()}
        charts.draw(charts.bars(gates, is_share=True), "Share of the attempts by what became of them")
    with ui.row().classes("brim-figures"):
        figure("accepted", words.share(figures["acceptance_rate"]))
        figure("attempts", words.number(attempted))


class SampleView:
    """The map, and one sample chosen there or by its number."""

    def __init__(self, api: Api, place: str, figures: JsonValue) -> None:
        """Nothing is drawn yet."""
        self._api, self._place, self._figures = api, place, figures
        self._last = figures["samples"] - 1
        self._asked = 0

    def draw_map(self, tile_url: str) -> None:
        """Receivers by name, transmitters by their bound; a click chooses one."""
        transmitters = self._figures["transmitters"]
        scale = Scale([one["crlb_m"] for one in transmitters])
        points = [
            (one["lat"], one["lon"], scale.colour(one["crlb_m"]), _words(one), one["index"]) for one in transmitters
        ]
        self._map = Map(
            "Map of receivers and transmitters",
            stations=self._figures["receivers"],
            points=points,
            tile_url=tile_url,
            on_pick=self._pick,
        )
        with ui.row(align_items="center").classes("brim-tools"):
            scale.draw("bound of the error")
            ui.space()
            ui.label(f"{words.number(len(points))} of {words.number(self._last + 1)} transmitters").classes(
                "brim-muted"
            )

    def draw(self) -> None:
        """The choice, and what it shows."""
        with ui.row(align_items="center").classes("brim-tools"):
            self._number = ui.number("Sample", value=0, min=0, max=self._last, precision=0, on_change=self._chosen)
            self._number.props("outlined dense").classes("brim-field-short")
            self._slider = ui.slider(min=0, max=max(1, self._last), value=0, on_change=self._chosen)
            self._slider.props('dense aria-label="Sample"').classes("brim-slider")
        self._shown = ui.column().classes("brim-stack")
        ui.timer(0, self._read, once=True)

    async def _pick(self, index: int) -> None:
        self._number.set_value(index)  # the rest follows

    async def _chosen(self, event: Any) -> None:
        value = event.value
        if value is None or not 0 <= value <= self._last:
            return
        for other in (self._number, self._slider):
            if other is not event.sender and other.value != value:
                other.set_value(int(value))
        await self._read()

    async def _read(self) -> None:
        self._asked += 1
        mine = self._asked
        await asyncio.sleep(WAIT_S)
        if mine != self._asked:
            return
        index = min(self._last, max(0, int(self._number.value or 0)))
        try:
            found = await self._api.seen(f"{self._place}/samples/{index}", fresh_s=60.0)
        except Refused as failure:
            if mine == self._asked:
                self._shown.clear()
                with self._shown:
                    show_refusal(failure)
            return
        if mine == self._asked:  # else another is on its way
            self._show(found)

    def _show(self, sample: JsonValue) -> None:
        self._map.choose(sample["transmitter"])
        heard = [one for one in sample["receivers"] if one["spectrum"]]
        self._shown.clear()
        with self._shown:
            with ui.row().classes("brim-figures"):
                figure("latitude, longitude", f"{sample['transmitter']['lat']:.4f}, {sample['transmitter']['lon']:.4f}")
                figure("GDOP", words.number(sample["gdop"]))
                figure("bound of the error", metres(sample["crlb_m"]))
                figure("heard by", f"{sum(one['heard'] for one in sample['receivers'])} of {len(sample['receivers'])}")
            if sample["note"]:
                ui.label(sample["note"]).classes("brim-muted")
            with ui.element("div").classes("brim-split" if heard else ""):
                if heard:
                    series = {one["name"]: _spectrum(one["spectrum"]) for one in heard}
                    options = charts.lines(series, x_name="kHz from the carrier", y_name="dBm/Hz")
                    charts.draw(options, f"Spectra of sample {sample['index']} by receiver").classes("brim-chart-high")
                rows = [(one["name"], one["snr_db"] if one["heard"] else "not heard") for one in sample["receivers"]]
                draw_table("Receivers of the sample", ("Receiver", "SNR, dB"), rows)


def _spectrum(spectrum: JsonValue) -> list[tuple[float, float]]:
    pairs = zip(spectrum["frequency_hz"], spectrum["power_db"], strict=True)
    return [(round(frequency / 1000, 3), round(power, 2)) for frequency, power in pairs]


def _words(transmitter: JsonValue) -> str:
    bound, snr = metres(transmitter["crlb_m"]), words.number(transmitter["snr_db"])
    return f"Sample {transmitter['index']}: bound {bound}, SNR {snr} dB, GDOP {words.number(transmitter['gdop'])}"
