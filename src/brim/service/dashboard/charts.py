"""ECharts options from plain numbers, readable in light and dark; and points added to a chart that is already drawn.

Charts are drawn as SVG, where `currentColor` is the page's own colour of text, so that a chart follows light and dark.
Points are (x, y); a y of None is a gap. Times are epoch seconds, and shown in the browser's own time zone.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nicegui import ui

ChartOptions = dict[str, Any]
Point = Sequence[float | None]  # x and y

COLOURS: Final = ("#1f77d0", "#e8710a", "#1a9c5b", "#c2367e", "#8250df", "#9a7b00", "#0e8f9c", "#d1383d")
TEXT: Final = {"color": "currentColor"}
_FAINT: Final = {"color": "currentColor", "opacity": 0.14}
_PUSH: Final = """<script>
window.brimPush = (id, fresh, since) => {
  const chart = getElement(id)?.chart;
  if (!chart) return;
  const series = chart.getOption().series.map((one, at) => {
    const kept = since === null ? one.data : one.data.filter((point) => point[0] >= since);
    return { data: kept.concat(fresh[at] ?? []) };
  });
  chart.setOption({ series });
};
</script>"""


def draw(options: ChartOptions, label: str) -> ui.echart:
    """The chart, with a name for who cannot see it."""
    return ui.echart(options, renderer="svg").classes("brim-chart").props(f'role="img" aria-label="{label}"')


def allow_push() -> None:
    """Needed once in a page whose charts get new points."""
    ui.add_head_html(_PUSH)


def push(chart: ui.echart, fresh: Sequence[Sequence[Point]], *, since: float | None = None) -> None:
    """Add points to each series, in their order, and let go of those before a time: only new ones are sent.

    Times as in the chart: `in_ms` of epoch seconds where its x axis is one of time.
    """
    ui.run_javascript(f"brimPush({chart.id}, {json.dumps([list(one) for one in fresh])}, {json.dumps(since)})")


def in_ms(at_s: float) -> int:
    """Epoch seconds as an axis of time takes them."""
    return round(1000 * at_s)


def lines(
    series: Mapping[str, Sequence[Point]],
    *,
    x_name: str = "",
    y_name: str = "",
    is_time: bool = False,
    is_share: bool = False,
    is_log: bool = False,
    right: Mapping[str, str] | None = None,
) -> ChartOptions:
    """Lines over a common x; shares are drawn from 0 to 100 %; `right` names the axis of those with their own."""
    right = right or {}
    x_axis = {**_axis("time" if is_time else "value", x_name), "scale": True}
    left = {**_upright("log" if is_log else "value", y_name), "scale": not is_share}
    if is_share:
        left |= {"min": 0, "max": 1, ":axisLabel": _labels("v => Math.round(100 * v) + ' %'")}
    own = list(dict.fromkeys(right.values()))
    far = [{**_upright("value", name), "position": "right", "min": 0, "splitLine": {"show": False}} for name in own]
    drawn = [
        {
            **_line(name, points),
            "yAxisIndex": 1 + own.index(right[name]) if name in right else 0,
            ":tooltip": _tip("v => Math.round(1000 * v) / 10 + ' %'" if is_share and name not in right else _SHORT),
        }
        for name, points in series.items()
    ]
    return {**_base(legend=len(series) > 1, x_name=x_name), "xAxis": x_axis, "yAxis": [left, *far], "series": drawn}


def band(
    x: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    name: str,
    x_name: str,
    y_name: str,
    marks: Mapping[str, float] | None = None,
    is_log: bool = False,
) -> ChartOptions:
    """A line with its spread behind it, and upright marks by their names; `is_log` is about x."""
    colour = COLOURS[0]
    hidden = {"type": "line", "stack": "spread", "symbol": "none", "silent": True, "lineStyle": {"opacity": 0}}
    spread = [top - bottom for bottom, top in zip(low, high, strict=True)]
    drawn = [
        {**_line(name, list(zip(x, middle, strict=True))), "symbol": "circle", "symbolSize": 6, "showSymbol": True},
        {**hidden, "name": "low", "data": list(zip(x, low, strict=True)), "tooltip": {"show": False}},
        {
            **hidden,
            "name": "high",
            "data": list(zip(x, spread, strict=True)),
            "areaStyle": {"color": colour, "opacity": 0.22},
            "tooltip": {"show": False},
        },
    ]
    drawn[0]["markLine"] = _marks(marks or {}, min(x, default=0), max(x, default=0))
    x_axis = {**_axis("log" if is_log else "value", x_name), **({"logBase": 2} if is_log else {"scale": True})}
    y_axis = {**_axis("value", y_name), "min": 0}
    y_axis["axisLabel"] |= {"showMaxLabel": False}  # the names of the marks are there
    return {**_base(legend=False, x_name=x_name), "xAxis": x_axis, "yAxis": y_axis, "series": drawn}


def histogram(edges: Sequence[float], counts: Sequence[float], *, x_name: str, y_name: str = "") -> ChartOptions:
    """Bars from edge to edge, drawn as steps whose area is filled; edges that grow by a factor have a log axis."""
    steps = [[edge, count] for edge, count in zip(edges, [*counts, 0], strict=True)]
    drawn = {
        **_line(x_name, steps),
        "step": "end",
        "areaStyle": {"opacity": 0.45},
        "lineStyle": {"width": 1},
    }
    grows = len(edges) > 2 and edges[0] > 0 and edges[-1] - edges[-2] > 1.5 * (edges[1] - edges[0])
    x_axis = _axis("log" if grows else "value", x_name)
    if edges:
        x_axis |= {"min": edges[0], "max": edges[-1], ":axisLabel": _labels("v => String(Number(v.toPrecision(3)))")}
    y_axis = {**_upright("value", y_name), "min": 0}
    return {**_base(legend=False, x_name=x_name), "xAxis": x_axis, "yAxis": y_axis, "series": [drawn]}


def bars(values: Mapping[str, float], *, x_name: str = "", is_share: bool = False) -> ChartOptions:
    """Bars that lie, the first on top, each with its name."""
    names = list(values)[::-1]
    axis: ChartOptions = {**_axis("value", x_name), "min": 0}
    written = "p => Math.round(1000 * p.value) / 10 + ' %'" if is_share else f"p => ({_SHORT})(p.value)"
    if is_share:
        axis |= {"max": 1, ":axisLabel": _labels("v => Math.round(100 * v) + ' %'")}
    drawn = {
        "type": "bar",
        "data": [values[name] for name in names],
        "barMaxWidth": 22,
        "itemStyle": {"color": COLOURS[0], "borderRadius": [0, 4, 4, 0]},
        "label": {"show": True, "position": "right", "color": "currentColor", ":formatter": written},
    }
    grid = {**_GRID, "top": 8, "right": 56}
    sides = {"xAxis": axis, "yAxis": {**_axis("category", ""), "data": names, "splitLine": {"show": False}}}
    return {**_base(legend=False), "grid": grid, **sides, "series": [drawn], "tooltip": {"show": False}}


def scatter(
    groups: Mapping[str, Sequence[Point]],
    *,
    x_name: str,
    y_name: str,
    diagonal: float | None = None,
    is_log: bool = False,
) -> ChartOptions:
    """Points by group; with a diagonal, the line where x and y are the same up to there. `is_log` is about both."""
    sort = "log" if is_log else "value"
    drawn: list[ChartOptions] = [
        {"type": "scatter", "name": name, "data": list(points), "symbolSize": 5, "itemStyle": {"opacity": 0.65}}
        for name, points in groups.items()
    ]
    if diagonal is not None:
        low = min((x for points in groups.values() for x, _ in points if x), default=1.0) if is_log else 0.0
        ends = [[low, low], [diagonal, diagonal]]
        drawn.append({**_line("equal", ends), "lineStyle": {"type": "dashed", "width": 1}, "color": "currentColor"})
    axes = {"xAxis": {**_axis(sort, x_name), "scale": True}, "yAxis": {**_upright(sort, y_name), "scale": True}}
    return {**_base(legend=len(groups) > 1, x_name=x_name), **axes, "series": drawn, "tooltip": {"trigger": "item"}}


# Parts


_GRID: Final = {"left": 8, "right": 16, "top": 36, "bottom": 8, "containLabel": True}
_SHORT: Final = (
    "v => v === null || v === undefined ? '' : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) "
    "? v.toExponential(2) : String(Math.round(1000 * v) / 1000)"
)


def _base(*, legend: bool, x_name: str = "") -> ChartOptions:
    return {
        "animation": False,
        "color": list(COLOURS),
        "grid": {**_GRID, "bottom": 26 if x_name else _GRID["bottom"]},
        "legend": {
            "show": legend,
            "type": "scroll",  # one line, however many there are
            "top": 0,
            "textStyle": TEXT,
            "pageTextStyle": TEXT,
            "pageIconColor": COLOURS[0],
            "inactiveColor": "#888",
            "itemHeight": 8,
        },
        "tooltip": {"trigger": "axis", "confine": True},
        "textStyle": {"fontFamily": "Roboto, sans-serif"},
    }


def _axis(sort: str, name: str) -> ChartOptions:
    return {
        "type": sort,
        "name": name,
        "nameLocation": "middle",
        "nameGap": 26,
        "nameTextStyle": TEXT,
        "axisLabel": {**TEXT, "hideOverlap": True, "fontSize": 12},
        "axisLine": {"onZero": False, "lineStyle": _FAINT},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": _FAINT},
    }


def _upright(sort: str, name: str) -> ChartOptions:
    """An axis whose name stands above it."""
    return {**_axis(sort, name), "nameLocation": "end", "nameGap": 10, "nameTextStyle": {**TEXT, "align": "left"}}


def _labels(formatter: str) -> str:
    """Labels of an axis by a function of the browser's."""
    return f"({{color: 'currentColor', hideOverlap: true, formatter: {formatter}}})"


def _tip(formatter: str) -> str:
    return f"({{valueFormatter: {formatter}}})"


def _line(name: str, points: Sequence[Point]) -> ChartOptions:
    return {
        "type": "line",
        "name": name,
        "data": [list(point) for point in points],
        "showSymbol": len(points) == 1,
        "lineStyle": {"width": 1.8},
        "connectNulls": False,
    }


def _marks(marks: Mapping[str, float], low: float, high: float) -> ChartOptions:
    """Upright lines with their names, which keep away from the edges."""

    def side(place: float) -> str:
        return "left" if place <= low + (high - low) / 3 else "right"

    return {
        "silent": True,
        "symbol": "none",
        "lineStyle": {"color": COLOURS[1], "type": "dashed", "width": 1.5},
        "label": {"color": "currentColor", "formatter": "{b}", "position": "end"},
        "data": [{"name": name, "xAxis": at, "label": {"align": side(at)}} for name, at in marks.items()],
    }
