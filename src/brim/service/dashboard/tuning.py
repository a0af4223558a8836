"""Tuning: throughput, latency and memory against batch size, per device and network."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from nicegui import ui

from brim.service.dashboard import charts, layout, words
from brim.service.dashboard.client import Api, JsonValue, part
from brim.service.dashboard.job import JOBS


def add(api: Api) -> None:
    @ui.page("/tuning", response_timeout=30)
    async def tuning() -> None:
        with layout.frame("Tuning", "/tuning"):
            devices = (await api.get("/api/batch-sizes"))["devices"]
            for key, device in devices.items():
                for model, entry in device["batch_configurations"].items():
                    _draw(api, key, model, entry, device["detailed_results"].get(model, []))
            if not any(device["batch_configurations"] for device in devices.values()):
                layout.empty(
                    "Nothing is tuned yet",
                    "Tuning finds, for each segmentation network, the batch size that is fastest on this device and "
                    "fits its memory; predictions then use it.",
                    "Tune batch sizes",
                    "/jobs/new?kind=segment.tune",
                )


def per_batch(trials: Sequence[JsonValue]) -> list[JsonValue]:
    """Repeated trials of a batch size as one, in order of size; low and high are the spread of its throughput."""
    groups: dict[int, list[JsonValue]] = {}
    for trial in trials:
        if trial["kind"] == "sweep" and trial["throughput"]:
            groups.setdefault(int(trial["batch"]), []).append(trial)
    rows = []
    for batch, group in sorted(groups.items()):
        rates = [float(trial["throughput"]) for trial in group]
        half = max(float(trial.get("spread") or 0.0) for trial in group)
        middle = median(rates)
        row = {
            "batch": batch,
            "throughput": middle,
            "low": min([*rates, middle * (1 - half)]),
            "high": max([*rates, middle * (1 + half)]),
            "peak_bytes": max((trial["peak_bytes"] for trial in group if trial.get("peak_bytes")), default=None),
            "status": group[-1]["status"],
        }
        for name in ("p50_ms", "p95_ms"):  # the last trial knows all steps of its batch
            row[name] = next((float(trial[name]) for trial in reversed(group) if trial.get(name) is not None), None)
        rows.append(row)
    return rows


def options_of(rows: Sequence[JsonValue], entry: JsonValue) -> dict[str, charts.ChartOptions]:
    """Charts by title, with the chosen and the largest safe batch size marked."""
    chosen, safe = entry["optimal_batch_size"], entry["max_safe_batch_size"]
    marks = {"chosen": chosen, "safe": safe} if chosen != safe else {"chosen, safe": chosen}

    def band(unit: str, middle: str, low: str, high: str, scale: float = 1.0) -> charts.ChartOptions:
        known = [row for row in rows if row[middle] is not None and row[high] is not None]
        columns = ([row[name] / scale for row in known] for name in (middle, low, high))
        return charts.band([row["batch"] for row in known], *columns, name=unit, x_name="batch size", marks=marks)

    options = {
        "Throughput, images/s": band("images/s", "throughput", "low", "high"),
        "Latency of a batch, ms: p50, shaded up to p95": band("p50, ms", "p50_ms", "p50_ms", "p95_ms"),
        "Peak memory, GB": band("GB", "peak_bytes", "peak_bytes", "peak_bytes", 1e9),
    }
    return {title: one for title, one in options.items() if one["series"][0]["data"]}


def _draw(api: Api, device: str, model: str, entry: JsonValue, trials: list[JsonValue]) -> None:
    rows = per_batch(trials)
    with layout.card():
        with layout.tools():
            layout.heading(f"{model} on {device}")
            ui.space()
            with ui.row(align_items="center") as place:
                button = ui.button("Tune again", icon="refresh").props("outline dense no-caps")
                button.on_click(lambda: _retune(api, model, entry, button, place))
        setting = [entry["precision"], entry["layout"].replace("_", " "), *["compiled"] * bool(entry["compiled"])]
        layout.muted(f"{entry['image_size']}² pixels · {' · '.join(setting)}")
        layout.figures(
            {
                "chosen batch size": words.number(entry["optimal_batch_size"]),
                "safe up to": words.number(entry["max_safe_batch_size"]),
                "images/s": words.number(float(entry["expected_throughput"])),
                "p50, ms": words.number(float(entry["p50_latency_ms"])),
                "p95, ms": words.number(float(entry["p95_latency_ms"])),
                "memory allowed": words.in_bytes(entry["memory_limit_mb"] * 1e6),
            }
        )
        if rows:
            with ui.element("div").classes("brim-grid"):
                for title, options in options_of(rows, entry).items():
                    with ui.column().classes("brim-stack"):
                        layout.muted(title)
                        charts.draw(options, f"{title} of {model} against batch size")
            names = ("Batch", "Images/s", "±", "p50, ms", "p95, ms", "Memory", "Verdict")
            layout.draw_table("Measurements", names, _table(rows, trials, entry))


def _table(rows: Sequence[JsonValue], trials: Sequence[JsonValue], entry: JsonValue) -> list[tuple[Any, ...]]:
    """Measured batch sizes, then those that failed."""
    table: dict[int, tuple[Any, ...]] = {}
    for row in rows:
        verdict = [row["status"]]
        verdict += ["chosen"] * (row["batch"] == entry["optimal_batch_size"])
        verdict += ["largest safe"] * (row["batch"] == entry["max_safe_batch_size"])
        spread = words.share((row["high"] - row["low"]) / 2 / row["throughput"])
        latency, peak = (row["p50_ms"], row["p95_ms"]), words.in_bytes(row["peak_bytes"])
        table[row["batch"]] = (row["batch"], row["throughput"], spread, *latency, peak, ", ".join(verdict))
    measured = {row["batch"] for row in rows}
    for trial in trials:
        if trial["kind"] == "sweep" and trial["batch"] not in measured:
            table[trial["batch"]] = (trial["batch"], *[""] * 5, trial["status"])
    return list(table.values())


async def _retune(api: Api, model: str, entry: JsonValue, button: ui.button, place: ui.row) -> None:
    """Submit a job that tunes the same network at the same image size."""
    config = {"model": model, "size": entry["image_size"]}
    button.disable()
    async with layout.notified():
        job = await api.post(JOBS, {"kind": "segment.tune", "name": f"tune {model}", "config": config})
        with place:
            ui.link("Watch it tune", f"/jobs/{part(job['id'])}")
        return
    button.enable()
