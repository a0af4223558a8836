"""The receivers of a form: from a CSV file, or placed on a map by clicks; its field holds them as JSON."""

import csv
import io
import json
from contextlib import suppress
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import layout
from brim.service.dashboard.client import JsonValue
from brim.service.dashboard.maps import Map

COLUMNS: Final = ("name", "lat", "lon", "alt")
ALT_M: Final = 100.0  # of a receiver that was clicked


class ReceiverMap:
    """A map below the field; what is placed or read there is written into the field, and the reverse."""

    def __init__(self, field: Any, default: list[JsonValue]) -> None:
        """default: the receivers that an empty field means."""
        self._field, self._default = field, default
        with ui.column().classes("brim-stack brim-form-wide"):
            layout.muted("Click the map to add a receiver, or choose a CSV file with the columns name, lat, lon, alt.")
            self._map = Map("Map of the receivers", stations=default, on_place=self._place)
            with layout.tools():
                layout.TextFile("Receivers, CSV", ".csv,text/csv").on("text", self._read)
                ui.button("Remove the last", on_click=self._remove).props("outline dense no-caps")
                ui.button("As built in", on_click=lambda: self._write([])).props("outline dense no-caps")
        self._refusal = layout.Live()
        field.on_value_change(self._show)

    def _own(self) -> list[JsonValue]:
        with suppress(ValueError):
            stations = json.loads(self._field.value or "[]")
            if isinstance(stations, list) and all(isinstance(one, dict) for one in stations):
                return stations
        return []

    def _write(self, stations: list[JsonValue]) -> None:
        self._field.value = json.dumps(stations, ensure_ascii=False) if stations else ""

    def _place(self, lat: float, lon: float) -> None:
        own = self._own()
        names = {one.get("name") for one in own}
        name = next(name for number in range(1, len(own) + 2) if (name := f"R{number}") not in names)
        self._write([*own, {"name": name, "lat": round(lat, 5), "lon": round(lon, 5), "alt": ALT_M}])

    def _remove(self) -> None:
        self._write(self._own()[:-1])

    def _read(self, event: Any) -> None:
        try:
            self._write(read_receivers(str(event.args)))
            self._refusal.show((), lambda _: None)
        except ValueError as failure:
            self._refusal.show(str(failure), layout.show_rejection)

    def _show(self) -> None:
        self._map.set_stations([one for one in self._own() or self._default if {"name", "lat", "lon"} <= one.keys()])


def read_receivers(text: str) -> list[JsonValue]:
    """Receivers from CSV; a ValueError says what is wrong in it."""
    rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff")), skipinitialspace=True))
    if not rows or any(column not in rows[0] for column in COLUMNS):
        raise ValueError("the file needs the header name,lat,lon,alt and a line for each receiver")
    stations = []
    for number, row in enumerate(rows, 2):
        try:
            place: dict[str, Any] = {name: float(row[name]) for name in COLUMNS[1:]}
        except (TypeError, ValueError):
            raise ValueError(f"line {number}: lat, lon and alt must be numbers") from None
        stations.append({"name": (row["name"] or "").strip(), **place})
    return stations
