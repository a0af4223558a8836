"""One run: its losses as they come, its speed beside what the device could do, and what evaluations measured."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import charts, layout, words
from brim.service.dashboard.client import Api, JsonValue, Rejected, part
from brim.service.dashboard.maps import Map, Scale

POINTS = 500  # of a series that is read as a whole
MAX_LINES = 4 * POINTS  # of metrics, after which they are read as a whole again, thinned
MAPPED = 400  # errors with their ellipses: more would hide one another
RUN_KINDS: Final = {"rf.train": "Locator", "segment.train": "Segmentation", "sequence.train": "Sequences"}
_SHARES: Final = {"dice": "Dice", "iou": "IoU", "val_accuracy": "accuracy"}
_OBJECTS: Final = {"ap50": "AP 0.5", "ap75": "AP 0.75", "ap50_90": "AP 0.5–0.9", "pq": "PQ", "f1": "F1"}
_MISTAKES: Final = {"merges": "merges", "splits": "splits"}
_SCORES: Final = {"ari": "adjusted Rand index", "nmi": "mutual information", "items": "sequences"}
METHODS: Final = {
    "centroid": "centroid of the stations",
    "strength": "strength alone",
    "arrival_strength": "solver: arrivals and strength",
    "geman_mcclure": "solver, Geman-McClure loss",
    "drop_one": "solver without its worst arrival",
    "unknown_power": "solver, unknown power",
    "mixture": "solver, law of blocked paths",
    "grid": "posterior on a grid",
    "fingerprint": "fingerprinting",
}
_ERRORS: Final = ("median_error_m", "mean_error_m", "p95_error_m", "crlb_ratio")

Series = list[tuple[float, float]]


def add(api: Api) -> None:
    @ui.page("/runs/{id}", response_timeout=30)
    async def run(id: str) -> None:
        place = f"/api/runs/{part(id)}"
        run = await layout.load(api, place, "/runs")
        if run is None:
            return
        with layout.frame(run["name"], "/runs"):
            view = RunView(api, place, run)
        ui.timer(0, view.read, once=True)
        layout.every(2.0, view.look)


def _median_m(run: JsonValue) -> float | None:
    judged = run["quality"]
    return judged["value"] if judged and judged["name"] == "median_error_m" else None


def best(summary: JsonValue | None) -> str:
    """The figure by which a run is judged."""
    summary = summary or {}
    if summary.get("ap50") is not None:
        return f"AP 0.5 {summary['ap50']:.3f}"
    if summary.get("dice") is not None:
        return f"Dice {summary['dice']:.3f}"
    accuracy = (summary.get("scores") or {}).get("accuracy")
    if accuracy is not None:
        return f"accuracy {words.share(accuracy)}"
    return words.NONE if summary.get("best_val_loss") is None else f"loss {words.number(summary['best_val_loss'])}"


def epochs(run: JsonValue) -> str:
    """Trained, of those requested."""
    done = (run["summary"] or {}).get("epoch")
    wanted = (run["config"] or {}).get("epochs")
    if done is None:
        return words.NONE
    return f"{done} of {wanted}" if wanted else str(done)


class RunView:
    """The catalogue's entry, charts of the metrics, the newest evaluation, and the config."""

    def __init__(self, api: Api, place: str, run: JsonValue) -> None:
        self._api, self._place, self._run = api, place, run
        self._metrics = RunMetrics(api, f"{place}/metrics")
        self._charts: dict[str, ui.echart] = {}
        with layout.card():
            self._figures = layout.Live()
            with layout.tools():
                _draw_links(run)
                if run["state"] != "training":
                    _draw_use(api, run)
        with layout.card("Loss"):
            self._no_losses = layout.muted("Nothing is logged yet.")
            self._losses = charts.draw(charts.lines({}), "Loss over steps").classes("brim-chart-high")
            self._is_log = ui.switch("Logarithmic", on_change=self._draw_losses).props("dense")
        self._more = ui.element("div").classes("brim-grid")
        self._evaluation = layout.Live()
        _draw_remarks(api, place, run)
        with layout.card("Settings"):
            layout.fold_json("Settings as JSON", "Config", run["config"])
            self._summary = layout.Live()
        self._show()

    async def look(self) -> None:
        """While it trains: what is new."""
        if self._run["state"] == "training":
            self._run = await self._api.seen(self._place)
            self._show()
            await self.read()

    async def read(self) -> None:
        """The metrics, and the newest evaluation of a trained run."""
        async with self._evaluation.rejections():
            if await self._metrics.read():
                self._draw_losses()
                self._draw_more()
            if self._run["kind"] == "segment.train":
                title = "Held out" if self._run["state"] == "training" else "The worst of what was held out"
                return self._evaluation.show(await self._worst(), partial(_draw_worst, title))
            if self._run["state"] == "training" or self._run["kind"] not in _EVALUATIONS:
                return self._evaluation.show((), lambda _: None)
            name, kind, question, draw = _EVALUATIONS[self._run["kind"]]
            try:
                evaluation = await self._api.get(f"{self._place}/{name}")
                self._evaluation.show(evaluation, partial(draw, self._api.settings.tile_url))
            except Rejected as failure:
                if failure.status != 404:
                    raise
                target = f"/jobs/new?kind={kind}&run_id={part(self._run['id'])}"
                hint = (question, "There is no evaluation of this run yet.", "Evaluate it on a dataset", target)
                self._evaluation.show(hint, lambda hint: layout.empty(*hint))
        return None

    async def _worst(self) -> JsonValue:
        try:
            return await self._api.get(f"{self._place}/worst")
        except Rejected as failure:
            if failure.status != 404:
                raise
            return {"note": "", "pictures": []}  # of a run that was not evaluated yet, or of an older version

    def _draw_losses(self) -> None:
        is_log = self._is_log.value
        named = {"training": self._metrics.series("loss"), "held out": self._metrics.series("val_loss")}
        drawn = {
            name: [point for point in points if point[1] > 0 or not is_log] for name, points in named.items() if points
        }
        self._no_losses.set_visibility(not drawn)
        self._losses.set_visibility(bool(drawn))
        options = charts.lines(drawn, x_name="step", is_log=is_log)
        options["legend"]["show"] = True  # a single line could be either
        charts.redraw(self._losses, options)

    def _draw_more(self) -> None:
        """Each chart appears with its first point, and keeps its place."""
        series, summary = self._metrics.series, self._run["summary"] or {}
        if shares := {title: points for name, title in _SHARES.items() if (points := series(name))}:
            self._chart(f"Held-out {' and '.join(shares)}", charts.lines(shares, x_name="step", is_share=True))
        if objects := {name: points for key, name in _OBJECTS.items() if (points := series(key))}:
            self._chart("Held-out objects", charts.lines(objects, x_name="step", is_share=True))
        if mistakes := {name: points for key, name in _MISTAKES.items() if (points := series(key))}:
            self._chart(
                "Objects merged and split", charts.lines(mistakes, x_name="step", y_name="objects", from_zero=True)
            )
        if error := series("val_median_error_m"):
            self._chart("Held-out median error", charts.lines({"median error": error}, x_name="step", y_name="m"))
        if rate := series("samples_per_s"):
            drawn, mean, share = {"samples per second": rate}, _rate(summary), summary.get("ceiling_share")
            if mean and share:  # the ceiling is the rate of the training step on one fixed batch
                drawn["ceiling"] = [(0.0, mean / share), (rate[-1][0], mean / share)]
            options = charts.lines(drawn, x_name="step", y_name="samples/s", from_zero=True)
            self._chart("Throughput against the ceiling", options)
        if lr := series("lr"):
            self._chart("Learning rate", charts.lines({"learning rate": lr}, x_name="step"))

    def _chart(self, title: str, options: JsonValue) -> None:
        if title in self._charts:
            charts.redraw(self._charts[title], options)
        else:
            with self._more, layout.card(title):
                self._charts[title] = charts.draw(options, title)

    def _show(self) -> None:
        run, summary = self._run, self._run["summary"] or {}
        values = {
            "kind": RUN_KINDS.get(run["kind"], run["kind"]),
            "state": run["state"],
            "epochs": epochs(run),
            "best": words.NONE if _median_m(run) is not None else best(run["summary"]),
            "median error": words.metres(_median_m(run)),
            "throughput": words.rate(_rate(summary)),
            "of the ceiling": words.share(summary.get("ceiling_share")),
            "device busy": words.share(summary.get("busy_share")),
            "peak memory": words.in_bytes(summary.get("peak_bytes")),
        }
        values = {name: value for name, value in values.items() if value != words.NONE}
        self._figures.show(values, layout.figures)
        self._summary.show(run["summary"], partial(layout.fold_json, "Summary as JSON", "Summary"))


def _draw_remarks(api: Api, place: str, run: JsonValue) -> None:
    """Tags and notes, stored when the field is left."""
    with layout.card("Tags and notes"):
        tags = ui.input("Tags, separated by commas", value=", ".join(run["tags"])).props("outlined dense")
        notes = ui.textarea("Notes", value=run["notes"]).props("outlined dense autogrow maxlength=4000")
        tags.classes("brim-field")
        notes.classes("brim-field")

        async def save() -> None:
            async with layout.notified():
                words_of = dict.fromkeys(filter(None, (one.strip() for one in (tags.value or "").split(","))))
                await api.patch(place, {"tags": list(words_of), "notes": notes.value or ""})
                ui.notify("Saved.", type="positive", position="bottom")

        ui.button("Save", on_click=save).props("outline dense no-caps")


def _rate(summary: dict[str, Any]) -> float | None:
    return summary.get("samples_per_s") or summary.get("images_per_s")


def _draw_links(run: JsonValue) -> None:
    if run["kind"] in _EVALUATIONS:
        target = f"/jobs/new?kind={_EVALUATIONS[run['kind']][1]}&run_id={part(run['id'])}"
        button = ui.button("Evaluate", icon="straighten", on_click=lambda: ui.navigate.to(target))
        button.props("no-caps unelevated dense")
    if run["kind"] == "segment.train" and run["state"] != "training":
        ui.link("Try it on an image", f"/segment?run={part(run['id'])}")
    if run["job_id"]:
        ui.link("The job that made it", f"/jobs/{part(run['job_id'])}")
    for id in (run["config"] or {}).get("dataset_ids", [])[:3]:
        ui.link("Its dataset", f"/datasets/{part(id)}")


def _draw_use(api: Api, run: JsonValue) -> None:
    """A button that lists what the run trained as a model, under a name of the user's."""
    with ui.dialog() as dialog, ui.card().classes("brim-dialog"):
        layout.heading("Use this model")
        network = (run["config"] or {}).get("model")
        kind = f"{network} from" if isinstance(network, str) else "The network of"
        ui.label(f"{kind} the run “{run['name']}”. Requests and the pages can then name it.")
        name = ui.input("Name", value=_model_name(run["name"])).props("outlined dense autofocus")
        refusal = layout.Live()

        async def add() -> None:
            async with refusal.rejections():
                model = await api.post("/api/models", {"name": name.value, "run_id": run["id"]})
                dialog.close()
                verb = "replaced" if model["replaced"] else "added"
                ui.notify(f"Model {model['name']} ({model['network']}) {verb}.", type="positive", position="bottom")

        with ui.row().classes("brim-tools justify-end"):
            ui.button("Not now", on_click=dialog.close).props("flat no-caps")
            ui.button("Use it", on_click=add).props("unelevated no-caps")
    ui.button("Use this model", icon="add_task", on_click=dialog.open).props("no-caps outline dense")


def _model_name(text: str) -> str:
    """A name that requests can use, from the name of a run."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    return name[:100] or "model"


class RunMetrics:
    """The metrics of a run: read as a whole once, thinned, and then only new lines."""

    def __init__(self, api: Api, place: str) -> None:
        self._api, self._place, self._next = api, place, -1
        self.lines: list[JsonValue] = []

    async def read(self) -> bool:
        """Read on; whether there was anything new."""
        if self._next >= 0 and len(self.lines) <= MAX_LINES:
            answer = await self._api.get(self._place, after=self._next)
            if answer["next"] >= self._next:  # otherwise a worker went back to its checkpoint
                self._next = answer["next"]
                self.lines += answer["lines"]
                return bool(answer["lines"])
        answer = await self._api.get(self._place, points=POINTS)
        self.lines, self._next = answer["lines"], answer["next"]
        return True

    def series(self, name: str) -> Series:
        return series(self.lines, name)


def series(lines: Sequence[JsonValue], name: str) -> Series:
    """Steps and values of one metric; the steps of a phase continue those of the phase before."""
    points: Series = []
    phase, start, last = None, 0, 0
    for line in lines:
        if line.get("phase") != phase:
            phase, start, last = line.get("phase"), start + last, 0
        last = max(last, int(line["step"]))
        if line.get(name) is not None:
            points.append((start + int(line["step"]), float(line[name])))
    return points


# Evaluations


def _draw_errors(tile_url: str, evaluation: JsonValue) -> None:
    """Where a locator puts transmitters, and how its errors compare with their bounds."""
    with layout.card("Errors"):
        _draw_error_figures(evaluation)
    with layout.card("Where it is wrong"):
        _draw_error_map(evaluation, tile_url)
    with layout.card("Error against bound"):
        pairs = [(one["bound_m"], one["error_m"]) for one in evaluation["points"] if one["bound_m"] and one["error_m"]]
        if pairs:
            top = max(max(pair) for pair in pairs)
            options = charts.scatter({"samples": pairs}, x_name="bound, m", y_name="error, m", diagonal=top)
            charts.draw(options, "Error against bound, both logarithmic").classes("brim-chart-high")
        layout.muted("On the dashed line the error equals its Cramér-Rao bound; single errors lie on both sides.")


def _draw_error_figures(evaluation: JsonValue) -> None:
    metrics = evaluation["metrics"]
    if metrics.get("verdict"):
        ui.label(metrics["verdict"]).classes("brim-verdict")
    for name, one in (metrics.get("differences") or {}).items():
        text = (
            f"{name} is {words.number(one['data'])} in this data, the run was trained with {words.number(one['run'])}."
        )
        layout.show_rejection(text)
    coverage = {f"inside {level} % ellipses": f"{100 * share:.1f} %" for level, share in metrics["coverage"].items()}
    layout.figures(
        {
            "median error": words.metres(metrics["median_error_m"]),
            "mean error": words.metres(metrics["mean_error_m"]),
            "95 % are below": words.metres(metrics["p95_error_m"]),
            "times the bound": words.number(metrics["crlb_ratio"]),
            **coverage,
        }
    )
    methods = {"this run": metrics, **metrics.get("baselines", {})}
    rows = [
        (METHODS.get(method, method), *(None if one.get(name) is None else round(one[name], 2) for name in _ERRORS))
        for method, one in methods.items()
    ]
    layout.draw_table("This run beside simpler methods", ("Method", "Median, m", "Mean, m", "95 %, m", "× bound"), rows)
    _link_evaluation(evaluation, f"{words.number(evaluation['samples'])} samples")


def _draw_error_map(evaluation: JsonValue, tile_url: str) -> None:
    points = evaluation["points"]
    points = points[:: max(1, -(-len(points) // MAPPED))]
    scale = Scale([one["error_m"] for one in points])
    errors = []
    for one in points:
        axes = [one["ellipse"]["semi_major_m"], one["ellipse"]["semi_minor_m"]]
        errors.append(
            {
                "truth": one["truth"],
                "estimate": one["estimate"],
                "axes": None if None in axes else axes,
                "azimuth": one["ellipse"]["azimuth_deg"],
                "colour": scale.colour(one["error_m"]),
                "words": f"Error {words.metres(one['error_m'])}, bound {words.metres(one['bound_m'])}",
            }
        )
    Map("Map of errors with their ellipses", errors=errors, tile_url=tile_url)
    with layout.tools():
        scale.draw("error")
        ui.space()
        count = f"{words.number(len(points))} of {words.number(evaluation['samples'])}"
        layout.muted(f"{count}: point, line to the estimate, {words.share(evaluation['level'])} ellipse")


def _draw_worst(title: str, worst: JsonValue) -> None:
    if not worst["pictures"]:
        return
    with layout.card(title):
        layout.muted(worst["note"])
        with ui.element("div").classes("brim-grid"):
            for one in worst["pictures"]:
                with ui.element("figure").style("margin: 0"):
                    ui.image(f"data:image/jpeg;base64,{one['picture']}").props["alt"] = one["caption"]
                    layout.muted(one["caption"])


def _draw_embedding(_tile_url: str, evaluation: JsonValue) -> None:
    """Sequences in the plane of the two axes with the largest variance."""
    groups: dict[str, Series] = {}
    for one in evaluation["points"]:
        groups.setdefault(one["label"], []).append((one["x"], one["y"]))
    first, second = (
        f"axis {axis}, {words.share(share)} of the variance" for axis, share in enumerate(evaluation["explained"], 1)
    )
    with layout.card("Embedding"):
        layout.figures(
            {
                _SCORES.get(name, name.replace("_", " ")): (words.share if "accuracy" in name else words.number)(value)
                for name, value in evaluation["scores"].items()
                if value is not None and not isinstance(value, dict | list)
            }
        )
        options = charts.scatter(dict(sorted(groups.items())), x_name=first, y_name=second)
        charts.draw(options, "Sequences in the plane, by label").classes("brim-chart-high")
        wrong = sum(one["label"] != one["predicted"] for one in evaluation["points"])
        _link_evaluation(evaluation, f"{wrong} of {len(evaluation['points'])} are classified wrongly")


def _link_evaluation(evaluation: JsonValue, text: str) -> None:
    ui.link(f"From the newest evaluation: {text}", f"/jobs/{part(evaluation['job_id'])}")


_EVALUATIONS: Final = {  # by kind of run: part of the address, kind of job, question, drawing
    "rf.train": ("errors", "rf.evaluate", "How well does it locate?", _draw_errors),
    "sequence.train": ("embedding", "sequence.evaluate", "How well does it classify?", _draw_embedding),
}
