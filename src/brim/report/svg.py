"""Small charts as inline SVG text: axes with round ticks, histograms, lines, bars and a map.

Knows no dataset. Colours are classes (a, b, c for series; s0 to s4 for a scale), so that the page's style sheet
decides them for light and dark. Charts are WIDTH units wide and scale with the page.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from brim.report.land import land_areas, land_lines

Values = NDArray[np.floating[Any]]

WIDTH = 480.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 14.0, 12.0, 46.0
_CHARACTER = 7.4  # width of a letter of a label, a little more than true: labels must not touch


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """A range of values with its ticks; a logarithmic one takes the logarithm itself."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def linear(cls, low: float, high: float, num_ticks: int = 5) -> Self:
        """Ticks at 1, 2 or 5 times a power of ten; an empty range is widened."""
        if not high > low:
            low, high = low - 0.5, high + 0.5
        step = _round_up((high - low) / num_ticks)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, tuple(round(k * step, 12) for k in range(first, last + 1)))

    @classmethod
    def logarithmic(cls, low: float, high: float) -> Self:
        """Ticks at powers of ten, and at 2 and 5 times those where there is room."""
        if not high > low:
            low, high = low / 2, high * 2
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        within = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
        plain = [tick for tick in within if _mantissa(tick) == 1]
        return cls(low, high, tuple(plain if len(within) > 8 and len(plain) > 1 else within), True)

    @classmethod
    def fitting(cls, values: Values, spread: float = 20.0) -> Self:
        """Around the values; logarithmic when they are positive and spread over more than the given ratio."""
        low, high = float(values.min()), float(values.max())
        if low > 0 and high / low > spread:
            return cls.logarithmic(low, high)
        return cls.linear(low, high)

    @classmethod
    def spanning(cls, *values: Values, margin: float = 1.15) -> Self:
        """Logarithmic, around all positive values but the outermost thousandths, with a margin."""
        known = np.concatenate([np.empty(0), *(v[np.isfinite(v) & (v > 0)] for v in values)])
        low, high = np.quantile(known, [0.001, 0.999]) if len(known) else (1.0, 10.0)
        return cls.logarithmic(float(low) / margin, float(high) * margin)

    def share(self, value: Any) -> Any:
        """Where values lie between the ends, 0 to 1."""
        if self.log:
            return np.log(np.asarray(value) / self.low) / math.log(self.high / self.low)
        return (np.asarray(value) - self.low) / (self.high - self.low)

    def edges(self, num_bins: int) -> Values:
        """(num_bins + 1,) edges of bins that are equally wide as drawn."""
        return (np.geomspace if self.log else np.linspace)(self.low, self.high, num_bins + 1)


def num_bins(values: Values) -> int:
    """Bins of a histogram of so many values."""
    return int(np.clip(2 * len(values) ** (1 / 3), 10, 48))


@dataclass(slots=True)
class Plot:
    """A chart under construction; marks are drawn in the order they are added."""

    x: ChartAxis
    y: ChartAxis
    height: float = 280.0
    marks: list[str] = field(default_factory=list)

    @classmethod
    def histograms(cls, x: ChartAxis, filled: Values, outlined: Values | None = None, *, centred: bool = False) -> Self:
        """Histograms of one or two quantities; centred: one bin lies in the middle."""
        edges = x.edges(num_bins(filled) | int(centred))
        counts = [np.histogram(values, edges)[0] for values in (filled, outlined) if values is not None]
        plot = cls(x, ChartAxis.linear(0, 1.06 * max(1, *(int(c.max()) for c in counts)), 4))
        plot.bars(edges, counts[0], "a")
        if outlined is not None:
            plot.steps(edges, counts[1], "b")
        return plot

    def at_x(self, value: Any) -> Any:
        return _LEFT + self.x.share(value) * (WIDTH - _LEFT - _RIGHT)

    def at_y(self, value: Any) -> Any:
        return self.height - _BOTTOM - self.y.share(value) * (self.height - _BOTTOM - _TOP)

    def bars(self, edges: Values, counts: Values, series: str) -> None:
        left, top, base = self.at_x(edges), self.at_y(counts), self.at_y(self.y.low)
        parts = [
            f"M{left[k] + 0.5:.1f} {base:.1f}V{top[k]:.1f}H{left[k + 1] - 0.5:.1f}V{base:.1f}z"
            for k in range(len(counts))
            if counts[k] > 0
        ]
        self.marks.append(f'<path class="fill {series}" d="{"".join(parts)}"/>')

    def steps(self, edges: Values, counts: Values, series: str) -> None:
        left, top, base = self.at_x(edges), self.at_y(counts), self.at_y(self.y.low)
        parts = [f"V{top[k]:.1f}H{left[k + 1]:.1f}" for k in range(len(counts))]
        self.marks.append(f'<path class="line {series}" d="M{left[0]:.1f} {base:.1f}{"".join(parts)}V{base:.1f}"/>')

    def line(self, x: Values, y: Values, series: str) -> None:
        """A curve; what lies beyond the axes is cut off at them."""
        across = self.at_x(x)
        up = np.clip(self.at_y(y), _TOP, self.height - _BOTTOM)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True))
        self.marks.append(f'<polyline class="line {series}" points="{points}"/>')

    def dots(self, x: Values, y: Values, series: str) -> None:
        """Points as one path; those beyond the axes lie on them."""
        across = np.clip(self.at_x(x), _LEFT, WIDTH - _RIGHT)
        up = np.clip(self.at_y(y), _TOP, self.height - _BOTTOM)
        path = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(across, up, strict=True))
        self.marks.append(f'<path class="dots {series}" d="{path}"/>')

    def band(self, low: float, high: float, label: str) -> None:
        """Shade a range of x and name it."""
        left, right = (float(self.at_x(min(max(v, self.x.low), self.x.high))) for v in (low, high))
        tall = self.height - _BOTTOM - _TOP
        middle = min(max((left + right) / 2, _LEFT + 50), WIDTH - _RIGHT - 50)
        self.marks.append(
            f'<rect class="band" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{tall:.1f}"/>'
            f'<text class="note" x="{middle:.1f}" y="{_TOP + 14}" text-anchor="middle">{escape(label)}</text>'
        )

    def rule_x(self, value: float, label: str) -> None:
        if not self.x.low <= value <= self.x.high:
            return
        x = float(self.at_x(value))
        anchor, shift = ("end", -5) if x > WIDTH / 2 else ("start", 5)
        self.marks.append(
            f'<path class="rule" d="M{x:.1f} {_TOP}V{self.height - _BOTTOM:.1f}"/>'
            f'<text class="note" x="{x + shift:.1f}" y="{_TOP + 12}" text-anchor="{anchor}">{escape(label)}</text>'
        )

    def rule_y(self, value: float, label: str) -> None:
        y = float(self.at_y(value))
        right = WIDTH - _RIGHT
        self.marks.append(
            f'<path class="rule" d="M{_LEFT} {y:.1f}H{right}"/>'
            f'<text class="note" x="{right - 4}" y="{y + 15:.1f}" text-anchor="end">{escape(label)}</text>'
        )

    def render(self, x_label: str, y_label: str, title: str) -> str:
        """The chart as SVG; the title is for those who hear the page."""
        base = self.height - _BOTTOM
        grid = "".join(f"M{_LEFT} {self.at_y(tick):.1f}H{WIDTH - _RIGHT}" for tick in self.y.ticks)
        marks = [f'<path class="grid" d="{grid}"/>', *self.marks]
        marks.append(f'<path class="axis" d="M{_LEFT} {base:.1f}H{WIDTH - _RIGHT}"/>')
        for tick in self.y.ticks:
            y = self.at_y(tick) + 4
            marks.append(f'<text x="{_LEFT - 7}" y="{y:.1f}" text-anchor="end">{tick_text(tick)}</text>')
        for tick in self.x.ticks:
            x = self.at_x(tick)
            marks.append(f'<text x="{x:.1f}" y="{base + 17:.1f}" text-anchor="middle">{tick_text(tick)}</text>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        marks.append(
            f'<text class="label" x="{middle}" y="{self.height - 8:.1f}" text-anchor="middle">{escape(x_label)}</text>'
            f'<text class="label" transform="translate(12 {(base + _TOP) / 2:.1f}) rotate(-90)" '
            f'text-anchor="middle">{escape(y_label)}</text>'
        )
        return drawing(self.height, marks, title)


def drawing(height: float, marks: Sequence[str], title: str) -> str:
    """An SVG element of the usual width."""
    box = f"0 0 {WIDTH:.0f} {height:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(title)}">{"".join(marks)}</svg>'


def tick_text(value: float) -> str:
    """A round number for an axis, with a true minus and thin spaces between thousands."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    return text.replace(",", "\u202f").replace("-", "−")


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[float], str]],
    series: Sequence[str],
    limit: float,
    title: str,
    ticks: Sequence[float] = (),
) -> str:
    """Horizontal bars with a name above and a value at the end: (name, lengths by series, value in words).

    ticks are marked across every bar, to compare with.
    """
    marks, wide, step = [], WIDTH, 46.0
    for number, (name, lengths, value) in enumerate(rows):
        top, x = number * step, 0.0
        marks.append(f'<text class="name" x="0" y="{top + 14:.0f}">{escape(name)}</text>')
        marks.append(f'<text x="{wide:.0f}" y="{top + 14:.0f}" text-anchor="end">{escape(value)}</text>')
        marks.append(f'<rect class="track" x="0" y="{top + 21:.0f}" width="{wide:.0f}" height="12" rx="3"/>')
        for kind, length in zip(series, lengths, strict=True):
            part = max(0.0, min(length / limit * wide, wide - x))
            if part > 0:
                shown = max(1.0, part - 1.5)  # a gap between neighbours
                marks.append(
                    f'<rect class="fill {kind}" x="{x:.1f}" y="{top + 21:.0f}" width="{shown:.1f}" height="12" rx="3"/>'
                )
            x += part
        path = "".join(f"M{tick / limit * wide:.1f} {top + 18:.0f}v18" for tick in ticks)
        marks += [f'<path class="tick" d="{path}"/>'] if path else []
    return drawing(len(rows) * step - 6, marks, title)


@dataclass(frozen=True, slots=True)
class MapFrame:
    """The part of the Earth a map shows, both scales equal in metres."""

    west: float
    south: float
    per_deg_lon: float  # units
    per_deg_lat: float
    height: float

    @classmethod
    def around(cls, lat: Values, lon: Values, tallest: float = 560.0, flattest: float = 260.0) -> Self:
        """The smallest frame of WIDTH that holds the points, with a margin."""
        south, north, west, east = lat.min(), lat.max(), lon.min(), lon.max()
        squeeze = max(0.05, math.cos(math.radians((south + north) / 2)))
        tall, wide = max(north - south, 0.02), max((east - west) * squeeze, 0.02)
        inner = WIDTH - _LEFT - _RIGHT
        height = min(max(inner * tall / wide, flattest), tallest)
        scale = 0.94 * min(inner / wide, height / tall)  # units per degree of latitude
        return cls(
            west=(west + east) / 2 - inner / (2 * scale * squeeze),
            south=(south + north) / 2 - height / (2 * scale),
            per_deg_lon=scale * squeeze,
            per_deg_lat=scale,
            height=height,
        )

    def at(self, lat: Any, lon: Any) -> tuple[Any, Any]:
        x = _LEFT + (np.asarray(lon) - self.west) * self.per_deg_lon
        return x, _TOP + self.height - (np.asarray(lat) - self.south) * self.per_deg_lat

    def holds(self, lat: Any, lon: Any) -> Any:
        x, y = self.at(lat, lon)
        return (x > _LEFT) & (x < WIDTH - _RIGHT) & (y > _TOP) & (y < _TOP + self.height)

    def graticule(self) -> list[str]:
        """Parallels and meridians at round degrees, with their names at the left and below."""
        wide = WIDTH - _LEFT - _RIGHT
        lats = ChartAxis.linear(self.south, self.south + self.height / self.per_deg_lat)
        lons = ChartAxis.linear(self.west, self.west + wide / self.per_deg_lon)
        base, marks, path = _TOP + self.height, [], ""
        for lat in lats.ticks:
            y = float(self.at(lat, self.west)[1])
            path += f"M{_LEFT} {y:.1f}H{_LEFT + wide}"
            marks.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_degrees(lat, "NS")}</text>')
        for lon in lons.ticks:
            x = float(self.at(self.south, lon)[0])
            path += f"M{x:.1f} {_TOP}V{base:.1f}"
            marks.append(f'<text x="{x:.1f}" y="{base + 17:.1f}" text-anchor="middle">{_degrees(lon, "EW")}</text>')
        return [f'<path class="grid" d="{path}"/>', *marks]

    def land(self) -> list[str]:
        """Land, coasts and borders."""
        wide = (WIDTH - _LEFT - _RIGHT) / self.per_deg_lon
        box = (self.south, self.south + self.height / self.per_deg_lat, self.west, self.west + wide)
        lines = land_lines(*box)
        kinds = {kind: [line for line in lines if line.is_border == (kind == "border")] for kind in ("coast", "border")}
        shapes = {kind: [self.at(line.lat, line.lon) for line in chosen] for kind, chosen in kinds.items()}
        shapes = {"land": [self.at(ring[:, 0], ring[:, 1]) for ring in land_areas(*box)], **shapes}
        return [_path(shape, kind) for kind, shape in shapes.items() if shape]

    def box(self, lat: Values, lon: Values) -> str:
        (left, right), (base, top) = self.at([lat.min(), lat.max()], [lon.min(), lon.max()])
        size = f'width="{right - left:.1f}" height="{base - top:.1f}"'
        return f'<rect class="box" x="{left:.1f}" y="{top:.1f}" {size}/>'

    def dots(self, lat: Values, lon: Values, kind: str) -> str:
        """Points as one path: a thousand of them take 15 kB."""
        x, y = self.at(lat, lon)
        path = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(x, y, strict=True))
        return f'<path class="dots {kind}" d="{path}"/>'

    def paths(self, lat: Values, lon: Values, kind: str) -> str:
        """Lines through points: (lines, points) each, all in one path."""
        x, y = self.at(lat, lon)
        return _path(zip(x, y, strict=True), f"line {kind}")

    def sites(self, lat: Values, lon: Values, names: Sequence[str]) -> list[str]:
        """Triangles, each with its name beside it where that touches no other; a name may be empty."""
        x, y = (np.asarray(v, np.float64) for v in self.at(lat, lon))
        towns = []
        taken = [(a - 7, b - 8, a + 7, b + 6) for a, b in zip(x, y, strict=True)]
        for a, b, name in zip(x, y, names, strict=True):
            spot = self._free_spot(float(a), float(b), _CHARACTER * len(name), taken) if name else None
            if spot is not None:
                anchor, at_x, at_y, area = spot
                taken.append(area)
                towns.append(
                    f'<text class="town" x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{escape(name)}</text>'
                )
        triangles = [
            f'<path class="site" d="M{a:.1f} {b - 7:.1f}l6.5 11.5h-13z"><title>{escape(name)}</title></path>'
            for a, b, name in zip(x, y, names, strict=True)
        ]
        return [*towns, *triangles]

    def _free_spot(
        self, x: float, y: float, wide: float, taken: list[tuple[float, float, float, float]]
    ) -> tuple[str, float, float, tuple[float, float, float, float]] | None:
        """Right, left, above, below or further off: the first place for a text that is on the map and free."""
        for anchor, at_x, at_y in (
            ("start", x + 10, y + 5), ("end", x - 10, y + 5), ("middle", x, y - 12), ("middle", x, y + 20),
            ("start", x + 8, y - 9), ("end", x - 8, y - 9), ("start", x + 8, y + 18), ("end", x - 8, y + 18),
            ("start", x + 2, y - 24), ("end", x - 2, y - 24), ("start", x + 2, y + 33), ("end", x - 2, y + 33),
        ):  # fmt: skip
            left = at_x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
            area = (left, at_y - 13, left + wide, at_y + 4)
            if area[0] < _LEFT or area[2] > WIDTH - 4 or area[1] < _TOP or area[3] > _TOP + self.height:
                continue
            if not any(
                area[0] < other[2] and other[0] < area[2] and area[1] < other[3] and other[1] < area[3]
                for other in taken
            ):
                return anchor, at_x, at_y, area
        return None

    def render(self, marks: Sequence[str], title: str) -> str:
        wide = WIDTH - _LEFT - _RIGHT
        edge = f'<rect class="edge" x="{_LEFT}" y="{_TOP}" width="{wide}" height="{self.height:.1f}"/>'
        return drawing(_TOP + self.height + 26, [edge, *self.graticule(), *self.land(), *marks], title)


def _path(lines: Iterable[tuple[Any, Any]], kind: str) -> str:
    joined = ("L".join(f"{a:.1f} {b:.1f}" for a, b in zip(*line, strict=True)) for line in lines)
    return f'<path class="{kind}" d="{"".join(f"M{points}" for points in joined)}"/>'


def _degrees(value: float, signs: str) -> str:
    return f"{abs(value):.6g}°{signs[value < 0] if value else ''}"


def _round_up(value: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


def _mantissa(value: float) -> float:
    return round(value / 10.0 ** math.floor(math.log10(value) + 1e-9), 6)
