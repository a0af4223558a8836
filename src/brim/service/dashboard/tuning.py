"""Tuning: throughput, latency and memory against batch size, per device and network."""

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from nicegui import ui

from brim.service.dashboard import charts, words
from brim.service.dashboard.client import Api, JsonValue, Refused, part
from brim.service.dashboard.layout import card, empty, figure, frame, heading, in_words, show_refusal

_COLUMNS: Final = [
    {"name": name, "label": label, "field": name, "align": "right"}
    for name, label in (
        ("batch", "Batch"),
        ("throughput", "Images/s"),
        ("spread", "±"),
        ("p50_ms", "p50, ms"),
        ("p95_ms", "p95, ms"),
        ("peak", "Memory"),
        ("status", "Verdict"),
    )
]


def add(api: Api) -> None:
    @ui.page("/tuning", response_timeout=30)
    async def tuning() -> None:
        with frame("Tuning", "/tuning"):
            try:
                devices = (await api.get("/api/batch-sizes"))["devices"]
            except Refused as failure:
                return show_refusal(failure)
            found = [(key, one, model) for key, one in devices.items() for model in one["batch_configurations"]]
            for key, device, model in found:
                _draw(api, key, model, device["batch_configurations"][model], device["detailed_results"].get(model, []))
            if not found:
                empty(
                    "Nothing is tuned yet",
                    "Tuning finds, for each segmentation network, the batch size that is fastest on this device and "
                    "safe for its memory; predictions then use it.",
                    action="Tune batch sizes",
                    target="/jobs/new?kind=segment.tune",
                )
        return None


def _draw(api: Api, device: str, model: str, entry: JsonValue, trials: list[JsonValue]) -> None:
    rows = per_batch(trials)
    with card():
        with ui.row(align_items="center").classes("brim-tools"):
            heading(f"{model} on {device}")
            ui.space()
            place = ui.row(align_items="center")
            with place:
                again = ui.button("Tune again", icon="refresh")
                again.props("outline dense no-caps").on_click(lambda: _retune(api, model, entry, again, place))
        setting = [entry["precision"], entry["layout"].replace("_", " "), *["compiled"] * bool(entry["compiled"])]
        ui.label(f"{entry['image_size']}² pixels · {' · '.join(setting)}").classes("brim-muted")
        _draw_figures(entry)
        if rows:
            with ui.element("div").classes("brim-grid"):
                for name, options in options_of(rows, entry).items():
                    with ui.column().classes("brim-stack"):
                        ui.label(name).classes("brim-muted")
                        charts.draw(options, f"{name} of {model} against batch size")
            _draw_table(rows, trials, entry)


def _draw_figures(entry: JsonValue) -> None:
    with ui.row().classes("brim-figures"):
        figure("chosen batch size", words.number(entry["optimal_batch_size"]))
        figure("safe up to", words.number(entry["max_safe_batch_size"]))
        figure("images/s", words.number(float(entry["expected_throughput"])))
        figure("p50, ms", words.number(float(entry["p50_latency_ms"])))
        figure("p95, ms", words.number(float(entry["p95_latency_ms"])))
        figure("memory allowed", words.in_bytes(entry["memory_limit_mb"] * 1e6))


def _draw_table(rows: Sequence[JsonValue], trials: Sequence[JsonValue], entry: JsonValue) -> None:
    timed = {row["batch"] for row in rows}
    failed = [one for one in trials if one["kind"] == "sweep" and one["batch"] not in timed]
    shown = [_table_row(row, entry) for row in rows]
    shown += [
        {"batch": one["batch"], "status": one["status"]} for one in {one["batch"]: one for one in failed}.values()
    ]
    table = ui.table(rows=shown, columns=_COLUMNS, row_key="batch").classes("brim-table")
    table.props('flat dense bordered hide-bottom aria-label="What was measured"')


def per_batch(trials: Sequence[JsonValue]) -> list[JsonValue]:
    """What ran, the repeated trials of a batch as one, in order of size; low and high are what was measured of them."""
    groups: dict[int, list[JsonValue]] = {}
    for trial in trials:
        if trial["kind"] == "sweep" and trial["throughput"]:
            groups.setdefault(int(trial["batch"]), []).append(trial)
    return [_as_one(batch, group) for batch, group in sorted(groups.items())]


def options_of(rows: Sequence[JsonValue], entry: JsonValue) -> dict[str, dict[str, Any]]:
    """The three charts by their names, the chosen and the safe size marked."""
    chosen, safe = entry["optimal_batch_size"], entry["max_safe_batch_size"]
    marks = {"chosen": chosen, "safe": safe} if chosen != safe else {"chosen, safe": chosen}
    batches = [row["batch"] for row in rows]
    speed = charts.band(
        batches, _of(rows, "throughput"), _of(rows, "low"), _of(rows, "high"),
        name="images/s", x_name="batch size", y_name="", marks=marks, is_log=True,
    )  # fmt: skip
    made = {"Throughput, images/s": speed}
    if timed := [row for row in rows if row["p50_ms"] is not None and row["p95_ms"] is not None]:
        p50, p95 = _of(timed, "p50_ms"), _of(timed, "p95_ms")
        sizes = [row["batch"] for row in timed]
        made["Latency of a batch, ms: p50, shaded up to p95"] = charts.band(
            sizes, p50, p50, p95, name="p50, ms", x_name="batch size", y_name="", marks=marks, is_log=True
        )
    if known := [row for row in rows if row["peak_bytes"]]:
        peak = [row["peak_bytes"] / 1e9 for row in known]
        sizes = [row["batch"] for row in known]
        made["Peak memory, GB"] = charts.band(
            sizes, peak, peak, peak, name="GB", x_name="batch size", y_name="", marks=marks, is_log=True
        )
    return made


def _as_one(batch: int, group: list[JsonValue]) -> JsonValue:
    rates = [float(trial["throughput"]) for trial in group]
    half = max(float(trial.get("spread") or 0.0) for trial in group)
    middle = median(rates)
    return {
        "batch": batch,
        "throughput": middle,
        "low": min([*rates, middle * (1 - half)]),
        "high": max([*rates, middle * (1 + half)]),
        "p50_ms": _last(group, "p50_ms"),  # the last knows all steps of its batch
        "p95_ms": _last(group, "p95_ms"),
        "peak_bytes": max((trial["peak_bytes"] for trial in group if trial.get("peak_bytes")), default=None),
        "status": group[-1]["status"],
    }


def _table_row(row: JsonValue, entry: JsonValue) -> JsonValue:
    chosen, safe = entry["optimal_batch_size"], entry["max_safe_batch_size"]
    verdict = [row["status"], *["chosen"] * (row["batch"] == chosen), *["largest safe"] * (row["batch"] == safe)]
    return {
        "batch": row["batch"],
        "throughput": words.number(row["throughput"]),
        "spread": words.share((row["high"] - row["low"]) / 2 / row["throughput"]),
        "p50_ms": words.number(row["p50_ms"]),
        "p95_ms": words.number(row["p95_ms"]),
        "peak": words.in_bytes(row["peak_bytes"]),
        "status": ", ".join(verdict),
    }


async def _retune(api: Api, model: str, entry: JsonValue, button: ui.button, place: ui.row) -> None:
    """The same network at the same size again."""
    button.disable()
    config = {"model": model, "size": entry["image_size"]}
    async with in_words():
        job = await api.post("/api/training/jobs", {"kind": "segment.tune", "name": f"tune {model}", "config": config})
        with place:
            ui.link("Watch it tune", f"/jobs/{part(job['id'])}")
        return
    button.enable()


def _last(group: Sequence[JsonValue], name: str) -> float | None:
    known = [float(trial[name]) for trial in group if trial.get(name) is not None]
    return known[-1] if known else None


def _of(rows: Sequence[JsonValue], name: str) -> list[float]:
    return [row[name] for row in rows]
