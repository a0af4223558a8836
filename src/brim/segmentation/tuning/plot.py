"""A chart of tuning: throughput, latency and memory against batch size, one row per model."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from brim.errors import ConfigError
from brim.report.plot_file import GREY, STYLE, check_plot, save_figure

if TYPE_CHECKING:
    from brim.segmentation.tuning.tuner import Tuned

_BLUE, _ORANGE, _GREEN, _RED = "#1f6fb4", "#e07b00", "#2a9d4a", "#c62f2f"
_STYLE = {**STYLE, "figure.constrained_layout.h_pad": 0.12, "legend.fontsize": 8.5, "lines.markersize": 4}


def plot(file: Path | str, tuned: "Mapping[str, Tuned]", *, device: str = "") -> None:
    """Write a PNG of every model's trials, with the chosen and the largest safe batch marked."""
    if not tuned:
        raise ConfigError(f"{file}: nothing was tuned, so there is nothing to plot; tune at least one model")
    check_plot()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(13.0, 3.1 * len(tuned) + 0.5), layout="constrained", facecolor="white")
        rows = figure.subplots(len(tuned), 3, squeeze=False)
        for row, (name, result) in zip(rows, tuned.items(), strict=True):
            _draw_model(row, name, result)
        title = f"Batch sizes on {device}" if device else "Batch sizes"
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
        save_figure(figure, file)


def _draw_model(axes: Any, name: str, tuned: "Tuned") -> None:
    swept = [trial for trial in tuned.trials if trial["kind"] == "sweep"]
    entry, batches = tuned.entry, sorted({int(trial["batch"]) for trial in swept if trial["throughput"]})
    groups = [[trial for trial in swept if trial["batch"] == batch and trial["throughput"]] for batch in batches]

    def line(axis: Any, key: str, style: str, colour: str, label: str = "", scale: float = 1.0) -> None:
        last = {trial["batch"]: trial[key] / scale for group in groups for trial in group if trial.get(key)}
        axis.plot(list(last), list(last.values()), style, color=colour, label=label)

    throughput, latency, memory = axes
    rates = [median(trial["throughput"] for trial in group) for group in groups]
    spreads = [max(trial.get("spread") or 0.0 for trial in group) for group in groups]
    high = [rate * (1 + spread) for rate, spread in zip(rates, spreads, strict=True)]
    low = [rate * (1 - spread) for rate, spread in zip(rates, spreads, strict=True)]
    throughput.fill_between(batches, low, high, color=_BLUE, alpha=0.18, linewidth=0, label="spread")
    throughput.plot(batches, rates, "o-", color=_BLUE, label="median")
    throughput.plot(entry.optimal_batch_size, entry.expected_throughput, "o", color=_GREEN, markersize=9, zorder=5)
    throughput.set_ylabel("images/s")
    throughput.set_ylim(0, 1.22 * max(high))
    throughput.legend(loc="lower right")

    latency.set_yscale("log")
    line(latency, "p50_ms", "o-", _BLUE, "p50")
    line(latency, "p95_ms", "s--", _ORANGE, "p95")
    latency.plot(entry.optimal_batch_size, entry.p50_latency_ms, "o", color=_GREEN, markersize=9, zorder=5)
    latency.set_ylabel("latency of a batch, ms")
    latency.legend(loc="upper left")

    limit_gb = entry.memory_limit_mb / 1e3
    line(memory, "peak_bytes", "o-", _BLUE, scale=1e9)
    memory.axhline(limit_gb, color=_RED, linewidth=1.2, linestyle="--")
    memory.text(
        0.02, limit_gb, f"limit {limit_gb:.4g} GB", color=_RED, va="bottom", transform=memory.get_yaxis_transform()
    )
    memory.set_ylabel("peak memory, GB")
    memory.set_ylim(0, 1.18 * max(limit_gb, memory.get_ylim()[1]))

    failed = sorted({int(trial["batch"]) for trial in swept if not trial["throughput"]} - set(batches))
    for axis in axes:
        _mark_batches(axis, batches, failed, entry.optimal_batch_size, entry.max_safe_batch_size)
    best = f"batch {entry.optimal_batch_size}: {entry.expected_throughput:.4g} images/s"
    setting = " ".join([entry.precision, entry.layout, *["compiled"] * entry.compiled])
    title = f"{name}  ·  {entry.image_size}²  ·  {setting}  ·  {best}"
    throughput.set_title(title, loc="left", fontsize=10.5, fontweight="bold")


def _mark_batches(axis: Any, batches: list[int], failed: list[int], optimal: int, safe: int) -> None:
    """The same batch axis in every chart: chosen batch in green, largest safe one in grey, failed ones in red."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axvline(optimal, color=_GREEN, linewidth=1.2, alpha=0.7, zorder=1)
    axis.axvline(safe, color=GREY, linewidth=1.2, linestyle=":", zorder=1)
    for batch in failed:
        axis.plot([batch], [0.03], "x", color=_RED, markersize=6, transform=axis.get_xaxis_transform(), clip_on=False)
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(batches) / 1.3, max([*batches, safe, *failed]) * 1.3)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=14))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    marks = [f"chosen {optimal}", f"safe up to {safe}"]
    marks += [f"× did not fit: {', '.join(map(str, failed))}"] * bool(failed)
    axis.set_xlabel(f"batch size   ({'  ·  '.join(marks)})", fontsize=8.5)
