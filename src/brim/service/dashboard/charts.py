"""ECharts options from plain numbers, and points added to a chart that is already drawn.

Charts are drawn as SVG, where the theme's `currentColor` is the page's text colour, so that they follow light and dark.
Points are (x, y); a y of None is a gap. Times are shown in the browser's time zone.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nicegui import ui

ChartOptions = dict[str, Any]
Point = Sequence[float | None]  # x and y

THEME: Final = json.loads(Path(__file__).with_name("chart_theme.json").read_text())
# JavaScript functions
_PERCENT: Final = "v => Math.round(100 * v) + ' %'"
_PERCENT_1: Final = "v => Math.round(1000 * v) / 10 + ' %'"
_SHORT: Final = (
    "v => v === null || v === undefined ? '' : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) "
    "? v.toExponential(2) : String(Math.round(1000 * v) / 1000)"
)
_PUSH: Final = """<script>
window.brimPush = (id, fresh, since) => {
  const chart = getElement(id)?.chart;
  if (!chart) return;
  const series = chart.getOption().series.map((one, at) => {
    return { data: one.data.filter((point) => point[0] >= since).concat(fresh[at] ?? []) };
  });
  chart.setOption({ series });
};
</script>"""


def draw(options: ChartOptions, label: str) -> ui.echart:
    """The chart, labelled for screen readers."""
    chart = ui.echart(options, renderer="svg", theme=THEME)
    return chart.classes("brim-chart").props(f'role="img" aria-label="{label}"')


def redraw(chart: ui.echart, options: ChartOptions) -> None:
    chart.options.clear()
    chart.options.update(options)
    chart.update()


def allow_push() -> None:
    """Needed once in a page whose charts get new points."""
    ui.add_head_html(_PUSH)


def push(chart: ui.echart, fresh: Sequence[Sequence[Point]], *, since: float) -> None:
    """Add points to each series, in order, and drop those with x < since; only the new points are sent."""
    ui.run_javascript(f"brimPush({chart.id}, {json.dumps(fresh)}, {json.dumps(since)})")


def in_ms(at_s: float) -> int:
    """Epoch seconds as a time axis takes them."""
    return round(1000 * at_s)


def lines(
    series: Mapping[str, Sequence[Point]],
    *,
    x_name: str = "",
    y_name: str = "",
    is_time: bool = False,
    is_share: bool = False,
    is_log: bool = False,
    from_zero: bool = False,
    right: tuple[str, str] | None = None,
) -> ChartOptions:
    """Lines over a common x; shares from 0 to 100 %. Right: one series with its own axis, and that axis's name."""
    y_axis = {**_y_axis(y_name, is_log=is_log), "scale": not from_zero}
    y_axes = [y_axis | _SHARE_AXIS if is_share else y_axis]
    if right:
        y_axes.append({**_y_axis(right[1]), "position": "right", "min": 0, "splitLine": {"show": False}})
    drawn = []
    for name, points in series.items():
        is_right = right is not None and name == right[0]
        tip = _PERCENT_1 if is_share and not is_right else _SHORT
        drawn.append({**_line(name, points), "yAxisIndex": int(is_right), "tooltip": {":valueFormatter": tip}})
    x_axis = {"type": "time" if is_time else "value", "name": x_name, "scale": True}
    return _options(x_axis, y_axes, drawn, legend=len(series) > 1)


def band(
    x: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    name: str,
    x_name: str,
    marks: Mapping[str, float],
) -> ChartOptions:
    """A line with its spread behind it over a logarithmic x, and named upright marks."""
    hidden = {"type": "line", "stack": "spread", "symbol": "none", "silent": True, "lineStyle": {"opacity": 0}}
    hidden["tooltip"] = {"show": False}
    spread = [(at, top - bottom) for at, bottom, top in zip(x, low, high, strict=True)]
    line = {**_line(name, list(zip(x, middle, strict=True))), "symbol": "circle", "symbolSize": 6, "showSymbol": True}
    third = (2 * min(x, default=0) + max(x, default=0)) / 3  # names of marks keep away from the edges
    line["markLine"] = {
        "silent": True,
        "symbol": "none",
        "lineStyle": {"color": THEME["color"][1], "type": "dashed", "width": 1.5},
        "label": {"color": "currentColor", "formatter": "{b}", "position": "end"},
        "data": [
            {"name": mark, "xAxis": at, "label": {"align": "left" if at <= third else "right"}}
            for mark, at in marks.items()
        ],
    }
    low_line = {**hidden, "name": "low", "data": list(zip(x, low, strict=True))}
    area = {**hidden, "name": "high", "data": spread, "areaStyle": {"color": THEME["color"][0], "opacity": 0.22}}
    y_axis = {"type": "value", "min": 0, "axisLabel": {"showMaxLabel": False}}  # the names of the marks are there
    return _options({"type": "log", "logBase": 2, "name": x_name}, y_axis, [line, low_line, area])


def histogram(edges: Sequence[float], counts: Sequence[float], *, x_name: str, y_name: str = "") -> ChartOptions:
    """Bars from edge to edge, drawn as filled steps; edges that grow by a factor get a logarithmic axis."""
    steps = list(zip(edges, [*counts, 0], strict=True))
    drawn = {**_line(x_name, steps), "step": "end", "areaStyle": {"opacity": 0.45}, "lineStyle": {"width": 1}}
    grows = len(edges) > 2 and edges[0] > 0 and edges[-1] - edges[-2] > 1.5 * (edges[1] - edges[0])
    label = {":formatter": "v => String(Number(v.toPrecision(3)))"}
    x_axis: ChartOptions = {"type": "log" if grows else "value", "name": x_name, "axisLabel": label}
    x_axis |= {"min": edges[0], "max": edges[-1]}
    return _options(x_axis, {**_y_axis(y_name), "min": 0}, [drawn])


def bars(values: Mapping[str, float], *, x_name: str = "", is_share: bool = False) -> ChartOptions:
    """Horizontal bars with their names, the first on top."""
    names = list(values)[::-1]
    label = {":formatter": f"p => ({_PERCENT_1 if is_share else _SHORT})(p.value)"}
    x_axis = {"type": "value", "name": x_name, "min": 0} | (_SHARE_AXIS if is_share else {})
    drawn = {"type": "bar", "data": [values[name] for name in names], "label": label}
    options = _options(x_axis, {"type": "category", "data": names}, [drawn], tooltip={"show": False})
    options["grid"] |= {"top": 8, "right": 56}
    return options


def scatter(
    groups: Mapping[str, Sequence[Point]], *, x_name: str, y_name: str, diagonal: float | None = None
) -> ChartOptions:
    """Points by group; with a diagonal, both axes are logarithmic and a line shows x = y up to there."""
    is_log = diagonal is not None
    drawn: list[ChartOptions] = [
        {"type": "scatter", "name": name, "data": list(points)} for name, points in groups.items()
    ]
    if diagonal is not None:
        low = min((x for points in groups.values() for x, _ in points if x), default=1.0)
        ends = [(low, low), (diagonal, diagonal)]
        drawn.append({**_line("equal", ends), "lineStyle": {"type": "dashed", "width": 1}, "color": "currentColor"})
    x_axis = {"type": "log" if is_log else "value", "name": x_name, "scale": True}
    y_axis = {**_y_axis(y_name, is_log=is_log), "scale": True}
    options = _options(x_axis, y_axis, drawn, legend=len(groups) > 1, tooltip={"trigger": "item"})
    options["grid"] |= {"right": 32}  # half of the last number
    return options


_SHARE_AXIS: Final = {"min": 0, "max": 1, "axisLabel": {":formatter": _PERCENT}}


def _options(
    x_axis: ChartOptions, y_axis: Any, series: list[ChartOptions], *, legend: bool = False, tooltip: Any = None
) -> ChartOptions:
    return {
        "grid": {"bottom": 26 if x_axis.get("name") else 8},
        "legend": {"show": legend, "type": "scroll"},  # in one line: names of axes are below it
        "tooltip": tooltip or {"trigger": "axis"},
        "xAxis": x_axis,
        "yAxis": y_axis,
        "series": series,
    }


def _y_axis(name: str, *, is_log: bool = False) -> ChartOptions:
    """An axis with its name above it."""
    above = {"nameLocation": "end", "nameGap": 10, "nameTextStyle": {"align": "left"}}
    return {"type": "log" if is_log else "value", "name": name, **above}


def _line(name: str, points: Sequence[Point]) -> ChartOptions:
    return {"type": "line", "name": name, "data": [list(point) for point in points], "showSymbol": len(points) == 1}
