"""The result of a cross-validation as files: tables for a paper, predictions for one's own analysis, and a page.

Also a plot of embeddings.

RUN/table.csv        each measure: mean, standard deviation and interval
RUN/table.tex        the same as a LaTeX table (booktabs)
RUN/per_class.csv    precision, recall, F1 and number of sequences
RUN/confusion.csv    true classes in rows, predicted ones in columns
RUN/predictions.csv  every held-out sequence with its fold, seed, truth and prediction
RUN/report.html      all of it, and the embeddings of the first fold
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from brim.engine.storage import LocalPlace
from brim.errors import ConfigError
from brim.report.page import card, chart, document, table, tiles, write_page
from brim.report.plot_file import GREY, STYLE, check_plot, save_figure
from brim.report.svg import ChartAxis, Plot
from brim.sequences.corpus import FoldPlan, Sequences
from brim.sequences.evaluation.folds import MEASURE_NAMES, CrossValidation
from brim.sequences.evaluation.scoring import principal_plane

_LATEX = {"macro_f1": r"macro $F_1$", "r2": "$R^2$"}
_SPECIAL = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
_SERIES = ("a", "b", "c", "s3", "s1", "s4", "s0", "s2")
_MAX_POINTS = 2000
_MAX_KEYS = 20  # classes that the legend of a plot names


def write_tables(out: Path, data: Sequences, done: CrossValidation) -> None:
    place, result, (rows, _, vectors) = LocalPlace(out), done.report.as_dict(), done.first
    files = {"table.csv": _csv(_scores(result)), "table.tex": latex(result)}
    if result["classes"]:
        columns = result["per_class"]
        files["per_class.csv"] = _csv([["class", *columns], *zip(result["classes"], *columns.values(), strict=True)])
        names = result["classes"]
        counts = [[name, *row] for name, row in zip(names, result["confusion"], strict=True)]
        files["confusion.csv"] = _csv([["true class", *names], *counts])
    files["predictions.csv"] = _csv(_predictions(data, done.plan, result, done.outputs))
    for name, text in files.items():
        place.put_bytes(text.encode(), name)
    write_page(out / "report.html", page(out.name, data, result, (rows, vectors)))


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(["" if cell is None else cell for cell in row] for row in rows)
    return text.getvalue()


def _scores(result: dict[str, Any]) -> list[list[Any]]:
    rows: list[list[Any]] = [["measure", "mean", "std", "ci_low", "ci_high", "folds", "seeds"]]
    for name, score in result["scores"].items():
        values = [score[key] for key in ("mean", "std", "low", "high")]
        rows.append([name, *values, len(result["folds"]), len(result["seeds"])])
    return rows


def _predictions(data: Sequences, plan: FoldPlan, result: dict[str, Any], outputs: Tensor) -> Iterable[Sequence[Any]]:
    yield ["file", "fold", "seed", "truth", "predicted"]
    names = data.label_names()
    for seed, output in zip(result["seeds"], outputs, strict=True):
        for fold in plan.folds:
            for row in fold.rows.tolist():
                value = float(output[row, 0]) if data.targets is not None else data.classes[int(output[row].argmax())]
                yield [data.ids[row], fold.name, seed, names[row], value]


def latex(result: dict[str, Any]) -> str:
    """A table for a paper; needs the package booktabs."""
    lines = [r"\begin{tabular}{lccc}", r"\toprule", r"measure & mean & std & 95\,\% interval \\", r"\midrule"]
    for name, score in result["scores"].items():
        mean, std, low, high = (_number(score[key]) for key in ("mean", "std", "low", "high"))
        lines.append(f"{_LATEX.get(name, MEASURE_NAMES[name])} & {mean} & {std} & {low} to {high} \\\\")
    lines += [r"\midrule"] if result["classes"] else []
    for row, name in enumerate(result["classes"]):
        recall, f1 = (_number(result["per_class"][key][row]) for key in ("recall", "f1"))
        lines.append(f"{_escaped(name)} & \\multicolumn{{3}}{{l}}{{recall {recall}, $F_1$ {f1}}} \\\\")
    groups = f", no {_escaped(result['groups'])} in two of them" if result["groups"] else ""
    about = f"% {len(result['folds'])} folds{groups}, {len(result['seeds'])} seeds; {result['interval']}"
    return "\n".join([about, *lines, r"\bottomrule", r"\end{tabular}", ""])


def _number(value: float | None) -> str:
    return "--" if value is None else f"{value:.3f}"


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


# Page


def page(name: str, data: Sequences, result: dict[str, Any], embedding: tuple[Tensor, Tensor]) -> str:
    """The result as an HTML document."""
    groups = f", no {result['groups']} in two of them" if result["groups"] else ""
    seeds = f", {len(result['seeds'])} seeds" if len(result["seeds"]) > 1 else ""
    text = f"{result['sequences']} sequences, {len(result['folds'])} folds{groups}{seeds}"
    head = f"<header><h1>{escape(name)}</h1><p>{escape(text)}</p></header>"
    boxes = [
        (MEASURE_NAMES[key], f"{_number(score['mean'])} ± {_number(score['std'])}",
         f"{_number(score['low'])} to {_number(score['high'])}")
        for key, score in result["scores"].items()
    ]  # fmt: skip
    cards = []
    if result["classes"]:
        columns = result["per_class"]
        rows = [[name, *values] for name, *values in zip(result["classes"], *columns.values(), strict=True)]
        shown = [
            [f"{cell:.3f}" if isinstance(cell, float) else "–" if cell is None else cell for cell in row]
            for row in rows
        ]
        cards.append(card("classes", "Classes", "Pooled over folds and seeds.", table(shown, ["class", *columns])))
        counts = [[name, *row] for name, row in zip(result["classes"], result["confusion"], strict=True)]
        body = f'<div class="wide">{table(counts, ["true", *result["classes"]])}</div>'
        cards.append(card("confusion", "Confusion", "Rows are true classes, columns predicted ones.", body))
    if embedding[1].shape[1] and len(embedding[0]) > 2:
        cards.append(_embedding_card(data, *embedding))
    foot = f"<p>Interval: {escape(result['interval'])}.</p>"
    return document(name, head + tiles(boxes), cards, foot)


def _embedding_card(data: Sequences, rows: Tensor, vectors: Tensor) -> str:
    """Held-out sequences of the first fold in the plane of their two principal axes."""
    chosen = torch.arange(len(rows))[:: -(-len(rows) // _MAX_POINTS)]
    rows, (points, explained) = rows[chosen], principal_plane(vectors[chosen])
    x, y = (points[:, axis].numpy() for axis in (0, 1))
    across, up = (ChartAxis.linear(float(one.min()), float(one.max())) for one in (x, y))
    plot = Plot(across, up)
    keys = []
    for number, name in enumerate(data.classes):
        series, of_class = _SERIES[number % len(_SERIES)], (data.labels[rows] == number).numpy()
        if of_class.any():
            plot.dots(x[of_class], y[of_class], series)
            keys.append((f"dot {series}", name))
    note = f"Held-out sequences of the first fold; the axes hold {sum(explained):.0%} of the variance."
    return chart("embedding", "Embeddings", note, plot, ("first axis", "second axis"), keys[: len(_SERIES)])


def plot_embeddings(file: Path | str, embeddings: Path | str) -> None:
    """Write a PNG of a file that `embed` wrote: the plane of two principal axes, coloured by the true label."""
    with safe_open(embeddings, "pt") as stored:
        vectors, labels = stored.get_tensor("embedding"), stored.get_tensor("label")
        classes = json.loads(stored.metadata()["classes"])
    if len(vectors) < 3:
        raise ConfigError(
            f"{file}: a plot of {len(vectors)} embeddings tells nothing, expected at least 3", field="plot"
        )
    check_plot()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    chosen = torch.arange(0, len(vectors), -(-len(vectors) // _MAX_POINTS))
    (points, explained), labels = principal_plane(vectors[chosen]), labels[chosen]
    x, y = points[:, 0].numpy(), points[:, 1].numpy()
    known = ~labels.isnan() if labels.is_floating_point() else labels >= 0
    dots: dict[str, Any] = {"s": 14, "linewidths": 0, "alpha": 0.8}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 5.5), layout="constrained", facecolor="white")
        axes = figure.subplots()
        if not bool(known.all()):
            axes.scatter(x[~known], y[~known], color=GREY, label="no label", **dots)
        if labels.is_floating_point():
            shown = axes.scatter(x[known], y[known], c=labels[known].numpy(), cmap="viridis", **dots)
            figure.colorbar(shown, ax=axes, label="label")
        else:
            for number in torch.unique(labels[known]).tolist():
                own = (labels == number).numpy()
                name = classes[number] if number < _MAX_KEYS else None
                axes.scatter(x[own], y[own], color=f"C{number % 10}", label=name, **dots)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_xlabel(f"first principal axis, {explained[0]:.0%} of the variance")
        axes.set_ylabel(f"second principal axis, {explained[1]:.0%} of the variance")
        save_figure(figure, file)
