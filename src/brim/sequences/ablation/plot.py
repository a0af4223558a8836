"""A plot of an ablation: a row for each step; steps without a difference are grey."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import ConfigError
from brim.report.plot_file import check_plot, save_figure

if TYPE_CHECKING:
    from brim.sequences.ablation.report import Ablation, AblationStep

_BLUE, _RED, _INK, _GREY = "#1f6fb4", "#c62f2f", "#2b2b2b", "#8a8a8a"
_COLOURS = {"start": _INK, "faster": _BLUE, "slower": _RED, "no difference": "#c9c9c9"}
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
    "axes.grid.axis": "x",
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "figure.constrained_layout.w_pad": 0.08,
}


def plot(file: Path | str, ablation: "Ablation") -> None:
    """Write a PNG: samples/s, busy and ceiling share and memory of every step."""
    if not ablation.steps:
        raise ConfigError(f"{file}: nothing was measured, there is nothing to plot")
    check_plot()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        height = 0.36 * len(ablation.steps) + 1.7
        figure = Figure(figsize=(14.0, height), layout="constrained", facecolor="white")
        axes = figure.subplots(1, 4, sharey=True, width_ratios=(2.2, 1, 1, 1.2))
        _draw(axes[0], ablation.steps, "samples/s", lambda step: step.samples_per_s, _rate_of)
        _draw(
            axes[1], ablation.steps, "busy share", lambda step: step.busy_share, lambda step: f"{step.busy_share:.0%}"
        )
        _draw(
            axes[2], ablation.steps, "share of the ceiling",
            lambda step: step.ceiling_share, lambda step: f"{step.ceiling_share:.0%}",
        )  # fmt: skip
        _draw(
            axes[3], ablation.steps, "peak memory, GB",
            lambda step: None if step.peak_bytes is None else step.peak_bytes / 1e9,
            lambda step: f"{(step.peak_bytes or 0) / 1e9:.3g}",
        )  # fmt: skip
        _percent(axes[1], axes[2])
        _legend(axes[0])
        axes[0].set_yticks(range(len(ablation.steps)), [_label(k, step) for k, step in enumerate(ablation.steps)])
        for text, step in zip(axes[0].get_yticklabels(), ablation.steps, strict=True):
            text.set_color(_GREY if step.verdict in ("no difference", "did not fit") else _INK)
        figure.suptitle(
            f"What each step is worth on {ablation.device}", fontsize=12, fontweight="bold", x=0.01, ha="left"
        )
        save_figure(figure, file)


def _draw(
    axis: Any,
    steps: "tuple[AblationStep, ...]",
    title: str,
    value: "Callable[[AblationStep], float | None]",
    label: "Callable[[AblationStep], str]",
) -> None:
    """Horizontal bars from the top down, each followed by its number."""
    values = [value(step) or 0.0 for step in steps]
    axis.barh(range(len(steps)), values, color=[_COLOURS.get(step.verdict, "white") for step in steps], height=0.7)
    widest = max(values) or 1.0
    for place, (step, width) in enumerate(zip(steps, values, strict=True)):
        text = "did not fit" if value(step) is None else label(step)
        colour = _GREY if step.verdict in ("no difference", "did not fit") else _INK
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}  # above the grid lines
        axis.text(width + 0.02 * widest, place, text, va="center", fontsize=8.5, color=colour, bbox=box)
    axis.set_xlim(0, 1.32 * widest)
    axis.set_ylim(len(steps) - 0.4, -0.6)
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axis.tick_params(axis="y", length=0)


def _rate_of(step: "AblationStep") -> str:
    rate = step.samples_per_s or 0.0
    text = f"{rate:,.0f}".replace(",", " ") if rate >= 100 else f"{rate:.3g}"
    change = "" if step.change is None else f"  × {step.change:.2f}"
    return f"{text}{change}"


def _label(place: int, step: "AblationStep") -> str:
    return f"+ {step.name}" if place else step.name


def _percent(*axes: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    for axis in axes:
        axis.set_xlim(0, max(1.3, axis.get_xlim()[1]))
        axis.axvline(1.0, color=_GREY, linewidth=0.8, linestyle=":")
        axis.set_xticks([0, 0.5, 1])
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _legend(axis: Any) -> None:
    from matplotlib.patches import Patch

    names = {"faster": "faster", "slower": "slower", "no difference": "no difference beyond the noise"}
    patches = [Patch(color=_COLOURS[key], label=name) for key, name in names.items()]
    axis.legend(
        handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=3, frameon=False, fontsize=8.5
    )  # fmt: skip
