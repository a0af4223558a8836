"""Maps by Leaflet, which ask nobody for tiles unless a tile server is configured."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from nicegui import elements, ui
from nicegui.element import Element
from nicegui.elements import leaflet  # noqa: F401  registers the module that the map's script imports

from brim.report.land import land_areas, land_lines
from brim.service.dashboard import words
from brim.service.dashboard.client import JsonValue

_ASSETS: Final = Path(elements.__file__).with_name("leaflet") / "dist"
_LEAST_AROUND_DEG: Final = 2.0
_COLOURS: Final = ("#3b4cc0", "#4a90d9", "#35a79c", "#8bbd3c", "#e8b10a", "#e8710a", "#c0262d")  # small to large


class Map(Element, component=Path(__file__).with_name("map_view.js")):
    """Stations by name, points by colour, errors with their ellipses, over lines of latitude and longitude.

    NiceGUI's own map element would ask for tiles by itself, and takes its points one message at a time.
    """

    def __init__(
        self,
        label: str,
        *,
        stations: Sequence[JsonValue] = (),
        points: Sequence[Sequence[Any]] = (),
        errors: Sequence[JsonValue] = (),
        tile_url: str = "",
        on_pick: Callable[[int], object] | None = None,
        on_place: Callable[[float, float], object] | None = None,
    ) -> None:
        """On_pick is told the index of a point that is clicked, on_place the position of a click anywhere."""
        super().__init__()
        self.add_resource(_ASSETS)
        places = [{name: one[name] for name in ("name", "lat", "lon")} for one in stations]
        self._props |= {"stations": places, "points": list(points), "errors": list(errors), "tile-url": tile_url}
        self._props["land"] = _land(stations, points, errors)
        self.classes("brim-map").props(f'role="region" aria-label="{label}"')
        if on_pick is not None:
            self.on("pick", lambda event: on_pick(int(event.args)))
        if on_place is not None:
            self._props["placing"] = True
            self.on("place", lambda event: on_place(*map(float, event.args)))

    def set_stations(self, stations: Sequence[JsonValue]) -> None:
        """Other stations than before."""
        self.run_method("setStations", stations, _land(stations, (), ()))

    def choose(self, place: JsonValue, heard_by: Sequence[JsonValue] = ()) -> None:
        """A ring around a place, with a line to each receiver that heard it."""
        receivers = [{name: one[name] for name in ("name", "lat", "lon")} for one in heard_by]
        self.run_method("choose", place["lat"], place["lon"], receivers)


def _land(
    stations: Sequence[JsonValue], points: Sequence[Sequence[Any]], errors: Sequence[JsonValue]
) -> dict[str, Any]:
    """Areas of land, and lines as (is it a border, points), some way around what the map shows."""
    places = [(one["lat"], one["lon"]) for one in stations] + [(one[0], one[1]) for one in points]
    places += [one["truth"] for one in errors]
    if not places:
        return {"areas": [], "lines": []}
    lats, lons = zip(*places, strict=True)
    more = max(_LEAST_AROUND_DEG, max(lats) - min(lats), max(lons) - min(lons))
    box = (min(lats) - more, max(lats) + more, min(lons) - 2 * more, max(lons) + 2 * more)  # maps are wide
    return {
        "areas": [ring.round(2).tolist() for ring in land_areas(*box)],
        "lines": [(line.is_border, np.stack([line.lat, line.lon], 1).round(2).tolist()) for line in land_lines(*box)],
    }


class Scale:
    """Colours by the logarithm of a value; the smallest and the largest 2 % of the values share the end colours."""

    def __init__(self, values: Sequence[float | None]) -> None:
        known = sorted(value for value in values if value is not None and value > 0)
        self.low = known[len(known) // 50] if known else 1.0
        self.high = max(known[-1 - len(known) // 50], self.low) if known else 1.0

    def colour(self, value: float | None) -> str:
        """Grey if the value is not known."""
        if value is None or value <= 0:
            return "#888888"
        span = math.log(self.high / self.low) or 1.0
        share = min(1.0, max(0.0, math.log(value / self.low) / span))
        return _COLOURS[min(len(_COLOURS) - 1, int(share * len(_COLOURS)))]

    def draw(self, name: str) -> None:
        with ui.row(align_items="center").classes("brim-legend"):
            ui.label(f"{name}: {words.metres(self.low)}")
            with ui.row().classes("brim-legend-bar").props('aria-hidden="true"'):
                for colour in _COLOURS:
                    ui.element("span").style(f"background: {colour}")
            ui.label(words.metres(self.high))
