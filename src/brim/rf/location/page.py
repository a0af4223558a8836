"""One HTML page that shows how well a run places transmitters: map, bound, baselines, SNR, receivers, ellipses.

Axes: B samples, R receivers. Metrics are shown as `evaluate` returned them; curves are drawn from the estimates.
"""

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.errors import ConfigError
from brim.report.page import card, chart, count, document, legend, metres, number, percent, table, tiles, write_page
from brim.report.svg import ChartAxis, MapFrame, Plot, stacked_bars
from brim.rf.config import GenerateConfig
from brim.rf.features import F
from brim.rf.location.evaluate import LEVELS, ellipse_rings, ellipse_scale
from brim.rf.location.model import Estimate
from brim.rf.location.run import LocatorEvaluation
from brim.rf.location.solver import TX_HEIGHT_M, SampleRows, geographic, target
from brim.rf.physics.geometry import to_local

MAX_DRAWN = 300  # samples on the map
MAX_ELLIPSES = 60  # of them
MAX_POINTS = 2_000  # dots of a scatter or of a map
LEVEL = 0.95  # probability inside an ellipse of the map
MAX_STATIONS = 40  # more positions than these are not a fixed network
NUM_BINS = 10  # of the SNR
SERIES = ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")  # the model first
NAMES = {
    "centroid": "power-weighted centroid",
    "strength": "strength",
    "arrival_strength": "arrival times + strength",
    "geman_mcclure": "the same, Geman-McClure loss",
    "drop_one": "the same without the worst arrival",
    "unknown_power": "the same, power unknown",
    "mixture": "the same, with the law of blocked paths",
    "grid": "posterior on a grid",
    "fingerprint": "kernel fingerprinting",
}
_CLOSE = 0.05  # coverage this near to nominal is as it should be
_FEW = 5  # samples
_LEAST_M = 0.01  # keeps the logarithm of an exact answer finite
_MEDIAN_UNITS = 8.0  # length of the median error on the map


@dataclass(frozen=True, slots=True)
class _View:
    """What the sections draw, on the host."""

    metrics: dict[str, Any]
    rows: SampleRows
    estimate: Estimate
    true: Tensor  # (B, 2) m in the estimate's frame
    bound: NDArray[np.float64]  # (B,) m
    errors: dict[str, NDArray[np.float64]]  # (B,) m by name, the model's first


def write_evaluation(
    run: str,
    dataset: str,
    metrics: dict[str, Any],
    rows: SampleRows,
    estimate: Estimate,
    baselines: dict[str, Estimate],
    html_path: Path | str,
) -> None:
    """Write the page of an evaluation.

    metrics    as `evaluate.evaluate` returns them
    rows       columns of the dataset: features, present, receivers, transmitter, crlb_m
    estimate   the model's answers to the rows, in their order
    baselines  other answers to the rows, by name
    """
    rows = {name: rows[name].detach().cpu() for name in ("features", "present", "receivers", "transmitter", "crlb_m")}
    if not len(rows["present"]):
        raise ConfigError("nothing to report: the split has no samples; give a dataset with at least one")
    model, *others = (Estimate(*(v.detach().cpu().double() for v in one)) for one in (estimate, *baselines.values()))
    errors = {
        name: (one.position_en - _true(rows, one)).norm(dim=-1).numpy()
        for name, one in zip(("model", *baselines), (model, *others), strict=True)
    }
    view = _View(metrics, rows, model, _true(rows, model), rows["crlb_m"].double().numpy(), errors)
    drawn = (_map, _coverage, _against_bound, _cumulative, _against_snr, _against_receivers)
    title = f"LocatorEvaluation of {run}"
    head = f"<header><h1>{escape(title)}</h1><p>on {escape(dataset)}</p></header>\n{_headline(view)}\n{_compared(view)}"
    write_page(Path(html_path), document(f"{title} · brim", head, [draw(view) for draw in drawn]))


def _true(rows: SampleRows, estimate: Estimate) -> Tensor:
    """(B, 2) true positions in the frame of the estimate, at the height that solvers assume."""
    place = rows["transmitter"].double().clone()
    place[:, 2] = TX_HEIGHT_M
    return to_local(place, estimate.origin)[:, :2]


# Numbers


def _headline(view: _View) -> str:
    metrics, inside = view.metrics, view.metrics["coverage"]
    errors = [
        ("samples", number(len(view.true)), "evaluated"),
        ("median error", metres(metrics["median_error_m"]), f"bound {metres(float(np.median(view.bound)))}"),
        ("mean error", metres(metrics["mean_error_m"]), f"bound {metres(float(view.bound.mean()))}"),
        ("95th percentile", metres(metrics["p95_error_m"]), "of the errors"),
        (
            "error / bound",
            number(metrics["crlb_ratio"]),
            f"{number(metrics['crlb_ratio_trimmed'])} without the worst 1 %, "
            f"{number(metrics['crlb_ratio_median'])} of the medians",
        ),
    ]
    shares = [(f"in {name} % ellipses", percent(inside[name]), _verdict(inside[name], LEVELS[name])) for name in LEVELS]
    return tiles(errors + shares)


def _verdict(share: float, nominal: float) -> str:
    if abs(share - nominal) <= _CLOSE:
        return "as it should be"
    return "ellipses too small" if share < nominal else "ellipses too large"


def _compared(view: _View) -> str:
    listed = view.metrics["baselines"]
    lines = []
    for name, metrics in {"model": view.metrics, **listed}.items():
        errors = [metres(metrics[key]) for key in ("median_error_m", "mean_error_m", "p95_error_m")]
        ratios = [number(metrics[key]) for key in ("crlb_ratio", "crlb_ratio_trimmed", "crlb_ratio_median")]
        lines.append(
            [NAMES.get(name, name), *errors, *ratios, *(percent(metrics["coverage"][level]) for level in LEVELS)]
        )
    head = ["", "median", "mean", "95th percentile", "error / bound", "without worst 1 %", "of medians"]
    best = min(listed, key=lambda name: listed[name]["median_error_m"])
    ratio = view.metrics["median_error_m"] / max(listed[best]["median_error_m"], _LEAST_M)
    title = f"Median error {ratio:.3f} times that of the best other answer, {NAMES.get(best, best)}"
    note = "Error / bound: root mean square of the errors, each over its Cramér-Rao bound; without the worst 1 %; "
    note += "median error over median bound. Last, the share of true positions inside the ellipses."
    body = f'<div class="wide">{table(lines, [*head, *(f"in {level} %" for level in LEVELS)])}</div>'
    return card("baselines", title, note, body)


# Map


def _map(view: _View) -> str:
    every = max(1, -(-len(view.true) // MAX_DRAWN))
    off = (view.estimate.position_en - view.true)[::every]
    finite = off.isfinite().all(-1)
    estimate = view.estimate
    true, origin, root = (v[::every][finite] for v in (view.true, estimate.origin, estimate.root))
    off = off[finite]
    places = np.unique(view.rows["receivers"].double()[view.rows["present"]][:, :2].numpy(), axis=0)
    fixed = len(places) <= MAX_STATIONS
    sites = places if fixed else places[:: -(-len(places) // MAX_DRAWN)]
    here = geographic(true, origin)[:, :2].numpy()
    ground = MapFrame.around(*np.concatenate([here, sites]).T)
    metre = ground.per_deg_lat / 111_195  # units
    stretch = _MEDIAN_UNITS / max(metre * view.metrics["median_error_m"], 1e-6)
    times = ChartAxis.logarithmic(1.0, stretch).ticks[-1] if stretch > 1 else 1.0  # a round number
    answer = geographic(true + times * off, origin)[:, :2].numpy()
    shown = ground.holds(*answer.T)
    ends = np.stack([here[shown], answer[shown]], 1)
    some = np.nonzero(shown)[0][:: max(1, -(-int(shown.sum()) // MAX_ELLIPSES))]
    around = ellipse_rings(true[some] + times * off[some], times * root[some], origin[some], 0.9, points=32)
    rings = around.flip(-1).numpy()  # latitude first
    rings = rings[ground.holds(rings[..., 0], rings[..., 1]).all(-1)]
    lat, lon = sites.T
    stations = ground.sites(lat, lon, [""] * len(lat)) if fixed else [ground.dots(lat, lon, "site")]
    lines = [ground.paths(p[..., 0], p[..., 1], kind) for p, kind in ((rings, "c thin"), (ends, "off"))]
    dots = [ground.dots(p[:, 0], p[:, 1], kind) for p, kind in ((here, "a fine"), (answer[shown], "c fine"))]
    scale = f", errors drawn {number(times)} times their size" if times > 1 else ""
    title = f"Where the transmitters are and where the model puts them{scale}"
    far = int((~shown).sum())
    notes = [
        f"{count(len(here), 'sample')} of {number(len(view.true))}, ellipses of {number(len(rings))}.",
        "Stretched about the true positions: these are inside their ellipses where drawn so." if times > 1 else "",
        f"{count(far, 'answer')} would lie beyond the map and {'is' if far == 1 else 'are'} left out." if far else "",
        "" if fixed else "Receivers are drawn anew for every sample.",
    ]
    keys = [("dot a", "true"), ("dot c", "estimated"), ("off", "error"), ("ring", "90 % ellipse")]
    keys.append(("tri" if fixed else "dot site", "receiver"))
    body = ground.render([*stations, *lines, *dots], title) + legend(keys)
    return card("map", title, " ".join(filter(None, notes)), body)


# Charts


def _coverage(view: _View) -> str:
    overall = view.metrics["coverage"]
    groups = [("all samples", overall)]
    for key, words in (("coverage_by_arrival_sigma", "arrival sigma"), ("coverage_by_gdop", "GDOP")):
        groups += [(f"{words}, {name} third", third["coverage"]) for name, third in view.metrics[key].items()]
    bars = []
    for name, inside in groups:
        shares = [inside[level] for level in LEVELS]
        parts = [shares[0], *(b - a for a, b in pairwise(shares))]
        bars.append((name, parts, " · ".join(f"{share * 100:.3g}" for share in shares) + " %"))
    off = max(abs(overall[level] - LEVELS[level]) for level in LEVELS)
    worst = max(abs(inside[level] - LEVELS[level]) for _, inside in groups for level in LEVELS)
    title = f"The 90 % ellipses hold {percent(overall['90'])} of the true positions"
    note = "Bars end at the share inside the 50, 90 and 95 % ellipses, marks show where they should. Off by at most "
    note += f"{off * 100:.2g} points over all, {worst * 100:.2g} in a third of the samples by arrival_sigma_us or GDOP."
    keys = legend([("a", "in 50 %"), ("c", "in 90 %"), ("d", "in 95 %"), ("tick", "nominal")])
    body = stacked_bars(bars, ("a", "c", "d"), 1.0, title, tuple(LEVELS.values()))
    return card("coverage", title, note, body + keys)


def _against_bound(view: _View) -> str:
    known = np.isfinite(view.errors["model"]) & np.isfinite(view.bound) & (view.bound > 0)
    error, bound = np.maximum(view.errors["model"][known], _LEAST_M), view.bound[known]
    every = max(1, -(-len(error) // MAX_POINTS))
    plot = Plot(ChartAxis.spanning(bound), ChartAxis.spanning(error), 340.0)
    plot.dots(bound[::every], error[::every], "a fine")
    low, high = max(plot.x.low, plot.y.low), min(plot.x.high, plot.y.high)
    if high > low:
        plot.line(np.array([low, high]), np.array([low, high]), "rule")
    below = float((error <= bound).mean()) if len(error) else None
    title = f"Error against bound: {percent(below)} of the errors are smaller than their bound"
    note = "Every dot a sample; its bound is the root mean square error that no unbiased answer beats. "
    note += "Of answers that reach it, about two thirds lie below the line."
    keys = [("dot a", "sample"), ("rule", "error = bound")]
    return chart("bound", title, note, plot, ("bound crlb_m (m), logarithmic", "error (m), logarithmic"), keys)


def _cumulative(view: _View) -> str:
    errors = {name: np.sort(values[np.isfinite(values)]) for name, values in view.errors.items()}
    errors = {name: np.maximum(values, _LEAST_M) for name, values in errors.items() if len(values)}
    x = ChartAxis.spanning(*errors.values())
    plot = Plot(x, ChartAxis.linear(0, 100))
    at = x.edges(160)
    for series, values in reversed(list(zip(SERIES, errors.values(), strict=False))):
        plot.line(at, 100 * np.searchsorted(values, at, side="right") / len(values), series)
    plot.rule_y(50, "half")
    title = f"Half of the errors are below {metres(view.metrics['median_error_m'])}"
    halves = [f"{NAMES.get(name, name)} {metres(float(np.median(values)))}" for name, values in errors.items()]
    note = "Share of samples whose error is below the value on the axis; further left is better. "
    note += f"Medians: {', '.join(halves)}."
    keys = [(f"stroke {series}", NAMES.get(name, name)) for series, name in zip(SERIES, errors, strict=False)]
    return chart("cumulative", title, note, plot, ("error (m), logarithmic", "samples (%)"), keys)


def _against_snr(view: _View) -> str:
    here = view.rows["present"]
    values = torch.where(here, view.rows["features"][..., F["snr_db"], 0].double(), 0.0)
    snr = (values.sum(-1) / here.sum(-1).clamp(min=1)).numpy()
    bins = min(NUM_BINS, max(1, len(snr) // 20))
    parts = np.array_split(np.argsort(snr, kind="stable"), bins)
    at = [float(np.median(snr[part])) for part in parts]
    note = f"Measured SNR, mean over a sample's receivers; {count(bins, 'bin')} of equally many samples."
    return _trend(view, "snr", ChartAxis.linear(min(at) - 1, max(at) + 1), at, parts, ("mean SNR (dB)", "dB"), note)


def _against_receivers(view: _View) -> str:
    heard = view.rows["present"].sum(-1).numpy()
    sizes = np.bincount(heard)
    at = [n for n, size in enumerate(sizes) if size >= min(_FEW, sizes.max())]
    ticks = tuple(range(min(at), max(at) + 1, 1 + (max(at) - min(at)) // 12))
    x = ChartAxis(min(at) - 0.5, max(at) + 0.5, ticks)
    note = f"Receivers that heard the transmission; numbers with fewer than {_FEW} samples are left out."
    return _trend(view, "receivers", x, at, [np.nonzero(heard == n)[0] for n in at], ("receivers", "receivers"), note)


def _trend(
    view: _View, kind: str, x: ChartAxis, at: list[Any], parts: list[Any], words: tuple[str, str], note: str
) -> str:
    """Median and 90th percentile of the errors, and the median bound, in parts of the samples."""
    error = np.maximum(np.nan_to_num(view.errors["model"], nan=np.inf), _LEAST_M)
    middle, high = (np.array([np.quantile(error[part], q, method="lower") for part in parts]) for q in (0.5, 0.9))
    bound = np.array([np.median(view.bound[part]) for part in parts])
    plot = Plot(x, ChartAxis.spanning(middle, high, bound, margin=1.4))
    where = np.array(at, np.float64)
    for values, series in ((bound, "rule"), (high, "b"), (middle, "a")):
        known = np.isfinite(values)
        plot.line(where[known], values[known], series)
        if series != "rule":
            plot.dots(where[known], values[known], series)
    ends = [f"{metres(float(middle[k]))} at {number(round(at[k], 1))}" for k in (0, -1)]
    title = f"Median error {ends[0]} {words[1]}" + (f", {ends[1]} {words[1]}" if len(at) > 1 else "")
    keys = [("stroke a", "median error"), ("stroke b", "90th percentile"), ("rule", "median bound")]
    return chart(kind, title, note, plot, (words[0], "error (m), logarithmic"), keys)


# Points for a map


def error_points(
    evaluation: LocatorEvaluation, config: GenerateConfig, limit: int = MAX_POINTS
) -> list[dict[str, Any]]:
    """Truth, estimate, error, bound and 95 % ellipse of at most `limit` samples, by the names of the API.

    config is the run's: its solver assumes a height, so that errors are those of the metrics.
    """
    total = len(evaluation.estimate.position_en)
    rows = torch.arange(0, total, max(1, math.ceil(total / limit)))
    position, covariance, origin = (part[rows].double() for part in evaluation.estimate[:3])
    true = {"transmitter": evaluation.rows["transmitter"][rows]}
    error = (position - target(true, origin, config)).norm(dim=-1)
    variance, axes = torch.linalg.eigh(covariance)  # ascending; axes are columns
    minor, major = (ellipse_scale(LEVEL) * variance.clamp(min=0).sqrt()).unbind(-1)
    azimuth = torch.rad2deg(torch.atan2(axes[:, 0, 1], axes[:, 1, 1])) % 180  # of the longer axis, from north
    place = geographic(position, origin)
    columns = (true["transmitter"], place, error, evaluation.rows["crlb_m"][rows], major, minor, azimuth)
    return [
        {
            "truth": [round(value, 7) for value in truth[:2]],
            "estimate": [round(value, 7) for value in estimate[:2]],
            "error_m": _metres(error_m),
            "bound_m": _metres(bound_m),
            "ellipse": {
                "semi_major_m": _metres(major_m),
                "semi_minor_m": _metres(minor_m),
                "azimuth_deg": round(azimuth_deg, 3) % 180,
            },
        }
        for truth, estimate, error_m, bound_m, major_m, minor_m, azimuth_deg in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _metres(value: float) -> float | None:
    """To the centimetre; JSON has no infinity."""
    return round(value, 2) if math.isfinite(value) else None
