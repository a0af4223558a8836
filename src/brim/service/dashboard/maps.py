"""Maps by Leaflet, which ask nobody for tiles unless somebody chose a server of them."""

import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from nicegui import elements, ui
from nicegui.element import Element
from nicegui.elements import leaflet  # noqa: F401  registers the module that the map's script imports

from brim.service.dashboard import words
from brim.service.dashboard.client import JsonValue

_ASSETS: Final = Path(elements.__file__).with_name("leaflet") / "dist"
_COLOURS: Final = ("#3b4cc0", "#4a90d9", "#35a79c", "#8bbd3c", "#e8b10a", "#e8710a", "#c0262d")  # small to large


class Map(Element, component=Path(__file__).with_name("map_view.js")):
    """Stations by name, points by colour, errors with their ellipses, over lines of latitude and longitude.

    The map's own element of NiceGUI would ask for tiles by itself, and takes its points one message at a time.
    """

    def __init__(
        self,
        label: str,
        *,
        stations: Sequence[JsonValue] = (),
        points: Sequence[Sequence[Any]] = (),
        errors: Sequence[JsonValue] = (),
        tile_url: str = "",
        on_pick: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self.add_resource(_ASSETS)
        places = [{name: one[name] for name in ("name", "lat", "lon")} for one in stations]
        self._props |= {"stations": places, "points": list(points), "errors": list(errors), "tile-url": tile_url}
        self.classes("brim-map").props(f'role="region" aria-label="{label}"')
        if on_pick is not None:
            self.on("pick", lambda event: on_pick(int(event.args)))

    def choose(self, place: JsonValue) -> None:
        """A ring around a place."""
        self.run_method("choose", place["lat"], place["lon"])


class Scale:
    """Colours for values from the smallest to the largest, by their logarithms."""

    def __init__(self, values: Sequence[float | None]) -> None:
        """Take all that will be shown; the most extreme two in a hundred share the colours at the ends."""
        known = sorted(value for value in values if value is not None and value > 0)
        self.low = known[len(known) // 50] if known else 1.0
        self.high = max(known[-1 - len(known) // 50], self.low) if known else 1.0

    def colour(self, value: float | None) -> str:
        """Grey where it is not known."""
        if value is None or value <= 0:
            return "#888888"
        span = math.log(self.high / self.low) or 1.0
        share = min(1.0, max(0.0, math.log(value / self.low) / span))
        return _COLOURS[min(len(_COLOURS) - 1, int(share * len(_COLOURS)))]

    def draw(self, name: str) -> None:
        with ui.row(align_items="center").classes("brim-legend"):
            ui.label(f"{name}: {metres(self.low)}")
            with ui.row().classes("brim-legend-bar").props('aria-hidden="true"'):
                for colour in _COLOURS:
                    ui.element("span").style(f"background: {colour}")
            ui.label(metres(self.high))


def metres(value: float | None) -> str:
    """12 m, 3.4 km."""
    if value is None:
        return words.NONE
    if value >= 9950:
        return f"{words.number(round(value / 1000))} km"
    return f"{value / 1000:.1f} km" if value >= 999.5 else f"{value:.3g} m"
