"""One run: its losses as they come, how fast it was beside what the device could do, and what it can."""

import json
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import charts, words
from brim.service.dashboard.client import Api, Json, Refused, part
from brim.service.dashboard.layout import card, every, figure, frame, show_refusal
from brim.service.dashboard.run_metrics import SHARES, Metrics, Series
from brim.service.dashboard.run_views import draw_embedding, draw_errors
from brim.service.dashboard.runs import KINDS, best, epochs

_EVALUATED: Final = {"rf.train": draw_errors, "sequence.train": draw_embedding}


def add(api: Api) -> None:
    """The page."""

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
            shown = Shown(api, place, found)
        ui.timer(0, shown.read, once=True)
        every(2.0, shown.look)


class Shown:
    """What the catalogue says, charts of the metrics, what evaluations found, and how it was told to train."""

    def __init__(self, api: Api, place: str, run: Json) -> None:
        """Draw what is known at once."""
        self._api, self._place, self._run = api, place, run
        self._metrics = Metrics(api, f"{place}/metrics")
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
        draw = _EVALUATED.get(self._run["kind"])
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

    def _chart(self, title: str, options: Json) -> None:
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


def _throughput(rate: Series, ceiling: float | None) -> Json:
    """Beside the rate, a line where the device could not be faster."""
    if ceiling is None:
        return charts.lines({"samples a second": rate}, x_name="step", y_name="samples/s")
    across = [(0.0, ceiling), (rate[-1][0], ceiling)]
    options = charts.lines({"samples a second": rate, "ceiling": across}, x_name="step", y_name="samples/s")
    options["series"][1]["lineStyle"] = {"type": "dashed", "width": 1.5}
    options["yAxis"][0] |= {"scale": False, "min": 0}
    return options


def _redraw(chart: ui.echart, options: Json) -> None:
    chart.options.clear()
    chart.options.update(options)
    chart.update()
