"""The map page of positions: regions, stations and which of them disagree, correlations of pairs; one HTML file.

A picture of the regions alone, as PNG, where the file's name asks for it.
"""

import base64
import math
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from brim.errors import ConfigError
from brim.report.page import card, chart, document, legend, number, percent, table, tiles, write_page, write_whole
from brim.report.svg import ChartAxis, MapFrame, Plot
from brim.rf.location.answers import Located
from brim.rf.location.regions import picture, region_geometry, wrap

MAX_PAIRS = 28  # correlations that are drawn: those of eight stations
_SHADES = {"95": "s0", "90": "s1", "50": "s3"}


def write_map(located: list[Located], file: Path) -> None:
    """Write the page, or the picture of the first answer if the file is a PNG."""
    if file.suffix.lower() == ".png":
        write_whole(file, picture(located[0].posterior)[0], "map_file")
        return
    if file.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            "is neither an HTML nor a PNG file", field="map_file", value=str(file), hint="end it in .html or .png"
        )
    write_page(file, map_page(located))


def map_page(located: list[Located]) -> str:
    parts = [_section(one) for one in located]
    title = "Positions" if len(located) > 1 else f"Position of {located[0].prepared.sighting.name}"
    return document(f"{title} · brim", f"<header><h1>{escape(title)}</h1></header>\n" + "\n".join(parts))


def _section(one: Located) -> str:
    cards = [_map(one), _stations(one), _picture(one), *_pairs(one)]
    return _headline(one) + '\n<div class="cards">' + "\n".join(cards) + "</div>"


def _headline(one: Located) -> str:
    about = one.features[0]["properties"]
    lon, lat = one.features[0]["geometry"]["coordinates"]
    chi2 = about["chi2_dof"]
    names = ", ".join(entry["name"] for entry in one.left_out) or "none"
    return tiles(
        [
            ("latitude", f"{lat:.5f}°", ""),
            ("longitude", f"{lon:.5f}°", ""),
            (
                "95 % region",
                f"{number(about['region_km2']['95'])} km²",
                f"50 %: {number(about['region_km2']['50'])} km²",
            ),
            ("places", number(len(one.modes)), f"the first with {percent(one.modes[0].weight)}"),
            ("χ² per degree of freedom", number(chi2), f"{about['dof']} degrees; about 1 if all agree"),
            ("stations", number(len(about["stations"])), f"left out: {names}"),
        ]
    )


def _map(one: Located) -> str:
    seen = one.prepared.sighting
    shapes = {name: _outlines(region_geometry(one.posterior, name)) for name in _SHADES}
    edges = np.concatenate(shapes["95"]) if shapes["95"] else np.empty((0, 2))
    lats, lons = np.append(seen.lat, edges[:, 1]), np.append(seen.lon, edges[:, 0])
    frame = MapFrame.around(lats, lons)
    marks = [
        frame.paths(ring[None, :, 1], ring[None, :, 0], _SHADES[name] + " thin")
        for name, rings in shapes.items()
        for ring in rings
    ]
    spots = np.array([(mode.lat, mode.lon) for mode in one.modes])
    marks += [*frame.sites(seen.lat, seen.lon, list(seen.stations)), frame.dots(spots[:, 0], spots[:, 1], "c")]
    keys = [("dot c", "likely places"), ("tri", "station"), ("stroke s0 dot", "95, 90 and 50 % regions")]
    words = f"{len(one.modes)} places fit" if len(one.modes) > 1 else "One place fits"
    note = "Regions hold the transmitter with 50, 90 and 95 % probability."
    return card("map", words, note, frame.render(marks, words) + legend(keys))


def _outlines(geometry: dict[str, Any]) -> list[Any]:
    polygons = geometry["coordinates"] if geometry["type"] == "MultiPolygon" else [geometry["coordinates"]]
    return [np.array(ring) for polygon in polygons for ring in polygon]


def _stations(one: Located) -> str:
    seen, fit = one.prepared.sighting, one.fit
    reasons = {entry["name"]: entry["reason"] for entry in one.left_out}
    rows = []
    for n, name in enumerate(seen.stations):
        off = f"{fit.off_us[n]:+.2f}".replace("-", "−") if seen.timed[n] else "–"
        rows.append(
            [name, f"{fit.distance_m[n] / 1e3:.1f}", off, f"{fit.sigma_us[n]:.2f}", percent(one.posterior.wrong[n])]
        )
    rows += [[name, "–", "–", "–", "–"] for name in reasons if name not in seen.stations]
    head = ["station", "km", "late, µs", "σ, µs", "wrong with"]
    if reasons:
        rows, head = [[*row, reasons.get(row[0], "")] for row in rows], [*head, "left out because"]
    title = f"{len(reasons)} of {len(rows)} stations left out" if reasons else f"All {len(rows)} stations agree"
    note = "How much later the signal arrived than the other stations say, at the most likely place."
    return card("stations", title, note, f'<div class="wide">{table(rows, head)}</div>')


def _picture(one: Located) -> str:
    data, (south, north, west, east) = picture(one.posterior)
    image = f'<img alt="regions" style="max-width:100%" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
    note = f"From {south:.4f}° to {north:.4f}° N and from {wrap(west):.4f}° to {wrap(east):.4f}° E."
    return card("picture", "The regions close by", note, image)


def _pairs(one: Located) -> list[str]:
    """Correlations around their peaks, as the measurement wrote them."""
    cards: list[str] = []
    for pair in (one.prepared.document.get("pairs") or [])[:MAX_PAIRS]:
        curve = pair.get("curve") if isinstance(pair, dict) else None
        if not isinstance(curve, dict) or not isinstance(curve.get("values"), list) or len(curve["values"]) < 2:
            continue
        values = np.array(curve["values"], np.float64)
        lags = float(curve["start_us"]) + float(curve["step_us"]) * np.arange(len(values))
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        plot = Plot(ChartAxis.linear(lags[0], lags[-1]), ChartAxis.linear(min(low, 0.0), high or 1.0), 200.0)
        plot.line(lags, values, "a")
        plot.rule_x(float(pair["difference_us"]), "measured")
        title = f"{pair['reference']} to {pair['station']}: {pair['difference_us']:.1f} ± {pair['sigma_us']:.1f} µs"
        note = f"By {pair.get('kind', 'complex')}, correlation {number(pair.get('peak'))} at the peak."
        expected = _expected(one, str(pair["reference"]), str(pair["station"]))
        note += f" The place found explains {expected:.1f} µs." if math.isfinite(expected) else ""
        cards.append(chart(f"pair{len(cards)}", title, note, plot, ("difference of arrivals (µs)", "correlation")))
    return cards


def _expected(one: Located, reference: str, station: str) -> float:
    """The difference that the place found explains, µs; not a number if a station is not in use."""
    seen, names = one.prepared.sighting, one.prepared.sighting.stations
    if reference not in names or station not in names:
        return math.nan
    travel = seen.travel_us(one.fit.distance_m)
    return float(travel[names.index(station)] - travel[names.index(reference)])
