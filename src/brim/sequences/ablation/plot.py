"""A plot of an ablation: a row for each step; steps without a difference are grey."""

from pathlib import Path
from typing import Any

from brim.errors import ConfigError
from brim.report.plot_file import GREY, INK, STYLE, check_plot, save_figure
from brim.sequences.ablation.report import Ablation, AblationStep, format_rate

_COLOURS = {"start": INK, "faster": "#1f6fb4", "slower": "#c62f2f", "no difference": "#c9c9c9"}
_GREYED = ("no difference", "did not fit")


def plot(file: Path | str, ablation: Ablation) -> None:
    """Write a PNG: samples/s, busy and ceiling share and memory of every step."""
    if not ablation.steps:
        raise ConfigError(f"{file}: nothing was measured, there is nothing to plot")
    check_plot()
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import PercentFormatter

    steps = ablation.steps
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(14.0, 0.36 * len(steps) + 1.7), layout="constrained", facecolor="white")
        axes = figure.subplots(1, 4, sharey=True, width_ratios=(2.2, 1, 1, 1.2))
        _draw(axes[0], steps, "samples/s", [step.samples_per_s for step in steps], [_rate(step) for step in steps])
        for axis, title, name in (
            (axes[1], "busy share", "busy_share"),
            (axes[2], "share of the ceiling", "ceiling_share"),
        ):
            shares = [getattr(step, name) for step in steps]
            _draw(axis, steps, title, shares, [f"{share or 0:.0%}" for share in shares])
            axis.set_xlim(0, max(1.3, axis.get_xlim()[1]))
            axis.axvline(1.0, color=GREY, linewidth=0.8, linestyle=":")
            axis.set_xticks([0, 0.5, 1])
            axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        sizes = [None if step.peak_bytes is None else step.peak_bytes / 1e9 for step in steps]
        _draw(axes[3], steps, "peak memory, GB", sizes, [f"{size or 0:.3g}" for size in sizes])
        axes[0].set_yticks(range(len(steps)), [f"{'+ ' if k else ''}{step.name}" for k, step in enumerate(steps)])
        for text, step in zip(axes[0].get_yticklabels(), steps, strict=True):
            text.set_color(GREY if step.verdict in _GREYED else INK)
        names = {"faster": "faster", "slower": "slower", "no difference": "no difference beyond the noise"}
        patches = [Patch(color=_COLOURS[key], label=name) for key, name in names.items()]
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.07)}
        axes[0].legend(handles=patches, ncols=3, frameon=False, fontsize=8.5, **below)
        title = f"What each step is worth on {ablation.device}"
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
        save_figure(figure, file)


def _draw(
    axis: Any, steps: tuple[AblationStep, ...], title: str, values: list[float | None], labels: list[str]
) -> None:
    """Horizontal bars from the top down, each followed by its number."""
    widths = [value or 0.0 for value in values]
    axis.barh(range(len(steps)), widths, color=[_COLOURS.get(step.verdict, "white") for step in steps], height=0.7)
    widest = max(widths) or 1.0
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}  # above the grid lines
    for place, (step, value, label) in enumerate(zip(steps, values, labels, strict=True)):
        text = "did not fit" if value is None else label
        colour = GREY if step.verdict in _GREYED else INK
        axis.text((value or 0) + 0.02 * widest, place, text, va="center", fontsize=8.5, color=colour, bbox=box)
    axis.set_xlim(0, 1.32 * widest)
    axis.set_ylim(len(steps) - 0.4, -0.6)
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axis.tick_params(axis="y", length=0)


def _rate(step: AblationStep) -> str:
    return format_rate(step.samples_per_s or 0.0) + ("" if step.change is None else f"  × {step.change:.2f}")
