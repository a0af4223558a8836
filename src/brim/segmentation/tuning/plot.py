"""A picture of what tuning measured: throughput, latency and memory against batch size, a row per model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from brim.errors import ConfigError
from brim.report.plot_file import check_plot, save_figure

if TYPE_CHECKING:
    from brim.segmentation.tuning.tuner import Tuned

_BLUE, _ORANGE, _GREEN, _RED, _INK, _GREY = "#1f6fb4", "#e07b00", "#2a9d4a", "#c62f2f", "#2b2b2b", "#8a8a8a"
_ROW_INCHES, _WIDTH_INCHES = 3.1, 13.0
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "figure.constrained_layout.h_pad": 0.12,  # inches
    "figure.constrained_layout.w_pad": 0.08,
}

_FAILED = ("oom", "over budget", "failed")

Trials = Sequence[Mapping[str, Any]]


def plot(file: Path | str, tuned: "Mapping[str, Tuned]", *, device: str = "") -> None:
    """Write a PNG of every model's trials, with the chosen and the largest safe batch marked."""
    if not tuned:
        raise ConfigError(f"{file}: nothing was tuned, so there is nothing to plot; tune at least one model")
    check_plot()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        height = _ROW_INCHES * len(tuned) + 0.5
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained", facecolor="white")
        rows = figure.subplots(len(tuned), 3, squeeze=False)
        for row, (name, found) in zip(rows, tuned.items(), strict=True):
            _draw_model(row, name, found)
        figure.suptitle(
            f"Batch sizes{f' on {device}' * bool(device)}", fontsize=12, fontweight="bold", x=0.01, ha="left"
        )
        save_figure(figure, file)


def _draw_model(axes: Any, name: str, tuned: "Tuned") -> None:
    swept = [trial for trial in tuned.trials if trial["kind"] == "sweep"]
    timed = _per_batch(swept)
    entry = tuned.entry
    draw: tuple[Callable[[Any, Trials, Any], None], ...] = (_throughput, _latency, _memory)
    for axis, one in zip(axes, draw, strict=True):
        one(axis, timed, entry)
        _mark_batches(axis, timed, swept, entry)
    setting = " ".join([entry.precision, entry.layout, *["compiled"] * entry.compiled])
    axes[0].set_title(f"{name}  ·  {entry.image_size}²  ·  {setting}", loc="left", fontsize=10.5, fontweight="bold")


def _per_batch(trials: Trials) -> list[dict[str, Any]]:
    """What ran, the repeated trials of a batch as one, in order of size."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for trial in trials:
        if trial["throughput"]:
            groups.setdefault(int(trial["batch"]), []).append(trial)

    def known(group: Trials, name: str) -> list[float]:
        return [float(trial[name]) for trial in group if trial.get(name) is not None]

    return [
        {
            "batch": batch,
            "throughput": median(rates := known(group, "throughput")),
            "spread": max([(max(rates) - min(rates)) / 2 / median(rates), *known(group, "spread")]),
            "p50_ms": [0.0, *known(group, "p50_ms")][-1],  # the last knows all steps of its batch
            "p95_ms": [0.0, *known(group, "p95_ms")][-1],
            "peak_bytes": max(known(group, "peak_bytes"), default=0.0),
        }
        for batch, group in sorted(groups.items())
    ]


def _throughput(axis: Any, trials: Trials, entry: Any) -> None:
    batches, rates = _batches(trials), [trial["throughput"] for trial in trials]
    low, high = _band(rates, [trial["spread"] for trial in trials])
    axis.fill_between(batches, low, high, color=_BLUE, alpha=0.18, linewidth=0, label="spread")
    axis.plot(batches, rates, "o-", color=_BLUE, markersize=4, label="median")
    axis.set_ylabel("images/s")
    axis.set_ylim(0, 1.22 * max(high))
    axis.plot([entry.optimal_batch_size], [entry.expected_throughput], "o", color=_GREEN, markersize=9, zorder=5)
    is_left = entry.optimal_batch_size <= batches[len(batches) // 2]
    axis.annotate(
        f"batch {entry.optimal_batch_size}: {entry.expected_throughput:.4g} images/s",
        (entry.optimal_batch_size, entry.expected_throughput),
        xytext=(6 if is_left else -6, 10),
        textcoords="offset points",
        ha="left" if is_left else "right",
        color=_GREEN,
        fontweight="bold",
    )
    axis.legend(
        loc="lower right", bbox_to_anchor=(1, 0.08), frameon=True, framealpha=0.9, edgecolor="white", fontsize=8.5
    )


def _latency(axis: Any, trials: Trials, entry: Any) -> None:
    axis.set_yscale("log")
    for name, style, colour in (("p50", "o-", _BLUE), ("p95", "s--", _ORANGE)):
        known = [(trial["batch"], trial[f"{name}_ms"]) for trial in trials if trial[f"{name}_ms"]]
        axis.plot([batch for batch, _ in known], [ms for _, ms in known], style, color=colour, markersize=4, label=name)
    axis.set_ylabel("latency of a batch, ms")
    axis.plot([entry.optimal_batch_size], [entry.p50_latency_ms], "o", color=_GREEN, markersize=9, zorder=5)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, high / 8), high * 1.6)  # a decade or so, or its axis would have no numbers
    _plain(axis.yaxis, base=10, steps=(1, 2, 5))
    axis.legend(loc="upper left", frameon=True, framealpha=0.9, edgecolor="white", fontsize=8.5)


def _memory(axis: Any, trials: Trials, entry: Any) -> None:
    known = [(trial["batch"], trial["peak_bytes"] / 1e9) for trial in trials if trial["peak_bytes"]]
    limit = entry.memory_limit_mb / 1e3
    axis.plot([batch for batch, _ in known], [peak for _, peak in known], "o-", color=_BLUE, markersize=4)
    axis.axhline(limit, color=_RED, linewidth=1.2, linestyle="--")
    axis.text(0.02, limit, f"limit {limit:.4g} GB", color=_RED, va="bottom", transform=axis.get_yaxis_transform())
    axis.set_ylabel("peak memory, GB")
    axis.set_ylim(0, 1.18 * max([limit, *(peak for _, peak in known)]))


def _mark_batches(axis: Any, timed: Trials, swept: Trials, entry: Any) -> None:
    """The same batch axis everywhere: chosen in green, safe in grey, what did not fit in red."""
    optimal, safe = entry.optimal_batch_size, entry.max_safe_batch_size
    axis.axvline(optimal, color=_GREEN, linewidth=1.2, alpha=0.7, zorder=1)
    axis.axvline(safe, color=_GREY, linewidth=1.2, linestyle=":", zorder=1)
    failed = sorted({int(trial["batch"]) for trial in swept if trial["status"] in _FAILED} - set(_batches(timed)))
    for batch in failed:
        axis.plot([batch], [0.03], "x", color=_RED, markersize=6, transform=axis.get_xaxis_transform(), clip_on=False)
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(_batches(timed)) / 1.3, max([*_batches(timed), safe, *failed]) * 1.3)
    _plain(axis.xaxis, base=2, steps=(1,))
    marks = [
        f"chosen {optimal}",
        f"safe up to {safe}",
        *[f"× did not fit: {', '.join(map(str, failed))}"] * bool(failed),
    ]
    axis.set_xlabel(f"batch size   ({'  ·  '.join(marks)})", fontsize=8.5)


def _plain(axis: Any, base: int, steps: tuple[int, ...]) -> None:
    """Numbers as a person writes them, at few places."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=base, subs=steps, numticks=14))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _batches(trials: Trials) -> list[int]:
    return [int(trial["batch"]) for trial in trials]


def _band(middle: list[float], spread: list[float]) -> tuple[list[float], list[float]]:
    """Below and above a median by a relative spread."""
    pairs = list(zip(middle, spread, strict=True))
    return [value * (1 - half) for value, half in pairs], [value * (1 + half) for value, half in pairs]
