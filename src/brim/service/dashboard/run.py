"""One run: its losses as they come, how fast it was beside what the device could do, and what it can."""

import json
from collections.abc import Sequence
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import charts, words
from brim.service.dashboard.client import Api, JsonValue, Refused, part
from brim.service.dashboard.layout import card, draw_table, empty, every, figure, frame, show_refusal
from brim.service.dashboard.maps import Map, Scale, metres
from brim.service.dashboard.runs import KINDS, best, epochs

POINTS = 500  # of a series that is read as a whole
MOST = 4 * POINTS  # lines, after which it is thinned again
SHARES = {"dice": "Dice", "iou": "IoU", "val_accuracy": "accuracy"}  # by what they are called

Series = list[tuple[float, float]]
MAPPED = 400  # errors with their ellipses: more would hide one another
_SCORES: Final = {
    "accuracy": "accuracy",
    "ari": "adjusted Rand index",
    "nmi": "mutual information",
    "items": "sequences",
}


def add(api: Api) -> None:
    @ui.page("/runs/{id}", response_timeout=30)
    async def run(id: str) -> None:
        place = f"/api/runs/{part(id)}"
        try:
            found = await api.get(place)
        except Refused as failure:
            with frame("Run", "/runs"):
                show_refusal(failure)
                ui.link("All runs", "/runs")
            return
        with frame(found["name"], "/runs"):
            shown = RunView(api, place, found)
        ui.timer(0, shown.read, once=True)
        every(2.0, shown.look)


class RunView:
    """What the catalogue says, charts of the metrics, what evaluations found, and how it was told to train."""

    def __init__(self, api: Api, place: str, run: JsonValue) -> None:
        """Draw what is known at once."""
        self._api, self._place, self._run = api, place, run
        self._metrics = RunMetrics(api, f"{place}/metrics")
        self._is_log = False
        with card():
            self._figures = ui.row().classes("brim-figures")
            with ui.row(align_items="center").classes("brim-tools"):
                self._draw_ways()
        with card("Loss"):
            self._quiet = ui.label("Nothing is logged yet.").classes("brim-muted")
            self._losses = charts.draw(charts.lines({}), "Loss over steps").classes("brim-chart-high")
            ui.switch("Logarithmic", on_change=self._turn).props("dense")
        self._more = ui.element("div").classes("brim-grid")
        self._inside = ui.column().classes("brim-stack")
        with ui.element("div").classes("brim-grid"):
            with card("Config"):
                _draw_json("Config", run["config"])
            with card("Summary"):
                self._summary = ui.column().classes("brim-stack")
        self._charts: dict[str, ui.echart] = {}
        self._show()

    async def look(self) -> None:
        """While it trains: what is new."""
        if self._run["state"] != "training":
            return
        self._run = await self._api.seen(self._place)
        self._show()
        await self._draw_new()
        await self._draw_evaluated()

    async def read(self) -> None:
        """The metrics, and what evaluations left."""
        try:
            await self._draw_new()
        except Refused as failure:
            with self._inside:
                show_refusal(failure)
        await self._draw_evaluated()

    async def _draw_evaluated(self) -> None:
        draw = {"rf.train": draw_errors, "sequence.train": draw_embedding}.get(self._run["kind"])
        if draw is not None and self._run["state"] != "training":
            with self._inside:
                await draw(self._api, self._place)

    async def _draw_new(self) -> None:
        if await self._metrics.read():
            self._draw_losses()
            self._draw_more()

    def _turn(self, event: Any) -> None:
        self._is_log = event.value
        self._draw_losses()

    def _draw_losses(self) -> None:
        named = {"training": self._metrics.series("loss"), "held out": self._metrics.series("val_loss")}
        drawn = {
            name: [point for point in points if point[1] > 0] if self._is_log else points
            for name, points in named.items()
            if points
        }
        self._quiet.set_visibility(not drawn)
        self._losses.set_visibility(bool(drawn))
        options = charts.lines(drawn, x_name="step", is_log=self._is_log)
        options["legend"]["show"] = True  # one alone could be either
        _redraw(self._losses, options)

    def _draw_more(self) -> None:
        """Each chart appears with its first point, and keeps its place."""
        metrics = self._metrics
        shares = {SHARES[name]: metrics.series(name) for name in metrics.names(among=tuple(SHARES))}
        if shares:
            self._chart(f"Held-out {' and '.join(shares)}", charts.lines(shares, x_name="step", is_share=True))
        if error := metrics.series("val_median_error_m"):
            self._chart("Held-out median error", charts.lines({"median error": error}, x_name="step", y_name="m"))
        if rate := metrics.series("samples_per_s"):
            self._chart("Throughput against the ceiling", _throughput(rate, self._ceiling()))
        if lr := metrics.series("lr"):
            self._chart("Learning rate", charts.lines({"learning rate": lr}, x_name="step"))

    def _chart(self, title: str, options: JsonValue) -> None:
        if title in self._charts:
            return _redraw(self._charts[title], options)
        with self._more, card(title):
            self._charts[title] = charts.draw(options, title)
        return None

    def _ceiling(self) -> float | None:
        """Samples a second of the step on one fixed batch, where it was measured."""
        summary = self._run["summary"] or {}
        rate, share = summary.get("samples_per_s") or summary.get("images_per_s"), summary.get("ceiling_share")
        return rate / share if rate and share else None

    def _show(self) -> None:
        run, summary = self._run, self._run["summary"] or {}
        shown = {
            "kind": KINDS.get(run["kind"], run["kind"]),
            "state": run["state"],
            "epochs": epochs(run),
            "best": best(run["summary"]),
            "throughput": words.rate(summary.get("samples_per_s") or summary.get("images_per_s")),
            "of the ceiling": words.share(summary.get("ceiling_share")),
            "device busy": words.share(summary.get("busy_share")),
            "peak memory": words.in_bytes(summary.get("peak_bytes")),
        }
        self._figures.clear()
        with self._figures:
            for name, value in shown.items():
                if value != words.NONE or name in ("state", "best"):
                    figure(name, value)
        self._summary.clear()
        with self._summary:
            _draw_json("Summary", run["summary"])

    def _draw_ways(self) -> None:
        run = self._run
        evaluate = {"rf.train": "rf.evaluate", "sequence.train": "sequence.evaluate"}.get(run["kind"])
        if evaluate:
            target = f"/jobs/new?kind={evaluate}&run_id={part(run['id'])}"
            ui.button("Evaluate", icon="straighten", on_click=lambda: ui.navigate.to(target)).props(
                "no-caps unelevated dense"
            )
        if run["kind"] == "segment.train":
            ui.link("Try it on an image", "/segment")
        if run["job_id"]:
            ui.link("The job that made it", f"/jobs/{part(run['job_id'])}")
        for id in (run["config"] or {}).get("dataset_ids", [])[:3]:
            ui.link("Its dataset", f"/datasets/{part(id)}")


def _draw_json(label: str, value: Any) -> None:
    text = "–" if value is None else json.dumps(value, indent=1, ensure_ascii=False)
    ui.label(text).classes("brim-mono brim-log").props(f'tabindex=0 aria-label="{label}"')


def _throughput(rate: Series, ceiling: float | None) -> JsonValue:
    """Beside the rate, a line where the device could not be faster."""
    if ceiling is None:
        return charts.lines({"samples a second": rate}, x_name="step", y_name="samples/s")
    across = [(0.0, ceiling), (rate[-1][0], ceiling)]
    options = charts.lines({"samples a second": rate, "ceiling": across}, x_name="step", y_name="samples/s")
    options["series"][1]["lineStyle"] = {"type": "dashed", "width": 1.5}
    options["yAxis"][0] |= {"scale": False, "min": 0}
    return options


def _redraw(chart: ui.echart, options: JsonValue) -> None:
    chart.options.clear()
    chart.options.update(options)
    chart.update()


# Metrics


class RunMetrics:
    """The lines so far."""

    def __init__(self, api: Api, place: str) -> None:
        """Nothing is read yet; place is that of the run's metrics in the API."""
        self._api, self._place, self._next = api, place, -1
        self.lines: list[JsonValue] = []

    async def read(self) -> bool:
        """Read on; whether there was anything new."""
        if self._next < 0 or len(self.lines) > MOST:
            return await self._read_all()
        found = await self._api.get(self._place, after=self._next)
        if found["next"] < self._next:  # a worker went back to its checkpoint
            return await self._read_all()
        self._next = found["next"]
        self.lines += found["lines"]
        return bool(found["lines"])

    async def _read_all(self) -> bool:
        found = await self._api.get(self._place, points=POINTS)
        self.lines, self._next = found["lines"], found["next"]
        return True

    def series(self, name: str) -> Series:
        """Steps and values of one name; steps of a later phase go on from the one before."""
        return series(self.lines, name)

    def names(self, *, among: Sequence[str]) -> list[str]:
        """Which of these there are."""
        return [name for name in among if any(name in line for line in self.lines)]


def series(lines: Sequence[JsonValue], name: str) -> Series:
    """Steps and values of one name, over all phases."""
    found: Series = []
    phase, start, last = None, 0, 0
    for line in lines:
        if line.get("phase") != phase:
            phase, start = line.get("phase"), start + last
            last = 0
        last = max(last, int(line["step"]))
        if line.get(name) is not None:
            found.append((start + int(line["step"]), float(line[name])))
    return found


# Evaluations


async def draw_errors(api: Api, place: str) -> None:
    """Where a locator puts transmitters, and how far that is from what is possible."""
    with ui.column().classes("brim-stack") as inside:
        pass
    found = await _left(api, f"{place}/errors", inside, "How well does it locate?")
    if found is None:
        return
    with inside:
        with card("Errors"):
            _draw_error_figures(found)
        with card("Where it is wrong"):
            _draw_error_map(found, api.settings.tile_url)
        with card("Error against bound"):
            pairs = [(one["bound_m"], one["error_m"]) for one in found["points"] if one["bound_m"] and one["error_m"]]
            if pairs:
                top = max(max(pair) for pair in pairs)
                options = charts.scatter(
                    {"samples": pairs}, x_name="bound, m", y_name="error, m", diagonal=top, is_log=True
                )
                charts.draw(options, "Error against bound, both logarithmic").classes("brim-chart-high")
            ui.label(
                "On the dashed line the error is as large as its Cramér-Rao bound; single errors lie on both sides."
            ).classes("brim-muted")


async def draw_embedding(api: Api, place: str) -> None:
    """What a network makes of sequences, along the two axes that tell most."""
    with ui.column().classes("brim-stack") as inside:
        pass
    found = await _left(api, f"{place}/embedding", inside, "How well does it tell sequences apart?")
    if found is None:
        return
    groups: dict[str, list[tuple[float, float]]] = {}
    for one in found["points"]:
        groups.setdefault(one["label"], []).append((one["x"], one["y"]))
    across, up = (
        f"axis {axis + 1}, {words.share(share)} of the variance" for axis, share in enumerate(found["explained"])
    )
    with inside, card("Embedding"):
        with ui.row().classes("brim-figures"):
            for name, value in found["scores"].items():
                if value is not None and not isinstance(value, dict | list):
                    figure(_SCORES.get(name, name.replace("_", " ")), _score(name, value))
        options = charts.scatter(dict(sorted(groups.items())), x_name=across, y_name=up)
        charts.draw(options, "Sequences in the plane, by label").classes("brim-chart-high")
        wrong = sum(one["label"] != one["predicted"] for one in found["points"])
        ui.link(f"From the newest evaluation: {wrong} of {len(found['points'])} are told apart wrongly", _job(found))


async def _left(api: Api, place: str, inside: ui.column, question: str) -> JsonValue | None:
    """What an evaluation left; where there is none, how to get it."""
    try:
        found: JsonValue = await api.get(place)
        return found
    except Refused as failure:
        with inside, card():
            if failure.status != 404:
                show_refusal(failure)
            else:
                is_rf = place.endswith("/errors")
                id = place.split("/")[3]
                empty(
                    question,
                    "Nobody evaluated this run yet, or not with what this page shows.",
                    action="Evaluate it on a dataset",
                    target=f"/jobs/new?kind={'rf' if is_rf else 'sequence'}.evaluate&run_id={id}",
                )
        return None


def _draw_error_figures(found: JsonValue) -> None:
    metrics = found["metrics"]
    with ui.row().classes("brim-figures"):
        figure("median error", metres(metrics["median_error_m"]))
        figure("mean error", metres(metrics["mean_error_m"]))
        figure("95 % are below", metres(metrics["p95_error_m"]))
        figure("times the bound", words.number(metrics["crlb_ratio"]))
        for level, share in metrics["coverage"].items():
            figure(f"inside {level} % ellipses", f"{100 * share:.1f} %")
    rows = [("this run", *_row(metrics))] + [
        (name.replace("_", " and "), *_row(one)) for name, one in metrics.get("baselines", {}).items()
    ]
    names = ("Method", "Median, m", "Mean, m", "95 %, m", "× bound")
    draw_table("This run beside simpler methods", names, rows)
    ui.link(f"From the newest evaluation, {words.number(found['samples'])} samples", _job(found))


def _row(metrics: JsonValue) -> tuple[Any, ...]:
    names = ("median_error_m", "mean_error_m", "p95_error_m", "crlb_ratio")
    return tuple(round(metrics[name], 2) if metrics.get(name) is not None else None for name in names)


def _draw_error_map(found: JsonValue, tile_url: str) -> None:
    points = found["points"]
    taken = points[:: max(1, -(-len(points) // MAPPED))]
    scale = Scale([one["error_m"] for one in taken])
    errors = [
        {
            "truth": one["truth"],
            "estimate": one["estimate"],
            "axes": _axes(one["ellipse"]),
            "azimuth": one["ellipse"]["azimuth_deg"],
            "colour": scale.colour(one["error_m"]),
            "words": f"Error {metres(one['error_m'])}, bound {metres(one['bound_m'])}",
        }
        for one in taken
    ]
    Map("Map of errors with their ellipses", errors=errors, tile_url=tile_url)
    with ui.row(align_items="center").classes("brim-tools"):
        scale.draw("error")
        ui.space()
        ui.label(
            f"{words.number(len(taken))} of {words.number(found['samples'])}: point, line to the estimate, "
            f"{words.share(found['level'])} ellipse"
        ).classes("brim-muted")


def _axes(ellipse: JsonValue) -> list[float] | None:
    axes = [ellipse["semi_major_m"], ellipse["semi_minor_m"]]
    return None if None in axes else axes


def _score(name: str, value: Any) -> str:
    return words.share(value) if "accuracy" in name else words.number(value)


def _job(found: JsonValue) -> str:
    return f"/jobs/{part(found['job_id'])}"
