"""One HTML page that shows a dataset: map, histograms, a spectrum, rejections, throughput, configuration."""

from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from brim.engine.storage import Dataset
from brim.errors import ConfigError
from brim.report.page import (
    card,
    chart,
    count,
    document,
    legend,
    metres,
    number,
    percent,
    size,
    table,
    tiles,
    with_unit,
    write_page,
)
from brim.report.svg import ChartAxis, MapFrame, Plot, Values, stacked_bars
from brim.rf.config import CHANNEL_HZ, SAMPLE_RATE_HZ
from brim.rf.datasets.records import IQ, recordings, welch
from brim.rf.datasets.summary import SITE, ShardProgress, Summary, Survey, fixed_receivers, survey
from brim.rf.physics.geometry import SPEED_OF_LIGHT

MAX_POINTS = 3_000  # drawn on the map
NUM_COLOURS = 5
REASONS = {"receivers": "too few receivers heard it", "gdop": "GDOP too high"}


def write_report(
    path: Path | str, html_path: Path | str, *, verify: bool = True, progress: ShardProgress | None = None
) -> Summary:
    """Write the page of a dataset; returns the summary it shows."""
    view = survey(path, verify=verify, progress=progress)
    name = view.data.place.name
    head = f"<header><h1>{escape(name)}</h1>{_subtitle(view)}</header>\n{_headline(view.summary)}"
    write_page(Path(html_path), document(f"{name} · brim", head, list(_cards(view)), _configuration(view)))
    return view.summary


def _cards(view: Survey) -> Iterator[str]:
    if view.summary.samples:
        yield _map(view)
        yield _snr(view)
        yield _bound(view)
        yield _gdop(view)
        yield _arrival(view)
        yield from _spectrum(view.data)
    else:
        yield card("samples", "No samples yet", "Generation stopped before the first shard was written.")
    yield _rejections(view.summary)
    yield _throughput(view.summary)


# Head of the page


def _subtitle(view: Survey) -> str:
    summary, config = view.summary, view.data.manifest.get("config") or {}
    parts = [
        summary.waveform and f"{summary.waveform} at {config.get('frequency_mhz', 0):g} MHz",
        summary.dataset_type,
        summary.seed is not None and f"seed {summary.seed}",
        summary.device and f"made on {summary.device}",
        summary.brim and f"brim {summary.brim}",
        summary.torch and f"torch {summary.torch}",
        summary.created,
    ]
    line = " · ".join(escape(str(part)) for part in parts if part)
    state = "" if summary.complete else '<span class="badge">stopped before the end</span>'
    return f"<p>{line}</p>{state}"


def _headline(summary: Summary) -> str:
    median = {key: (values or {}).get("median") for key, values in summary.snr_db.items()}
    per_sample = (summary.receivers_per_sample or {}).get("mean")
    speed = (summary.throughput or {}).get("samples_per_s")
    return tiles(
        [
            ("samples", number(summary.samples), f"in {count(summary.shards, 'shard')}"),
            ("IQ records", number(summary.records), f"{number(per_sample)} receivers per sample"),
            ("accepted", percent(summary.acceptance_rate), f"of {count(summary.attempted, 'attempt')}"),
            ("median SNR", with_unit(median["measured"], "dB"), f"link {with_unit(median['link'], 'dB')}"),
            ("median GDOP", number((summary.gdop or {}).get("median")), "geometry"),
            ("median bound", metres((summary.crlb_m or {}).get("median")), "on the position error"),
            ("throughput", number(speed), "samples/s"),
            ("on disk", size(summary.bytes), "checksums verified" if summary.verified else "not verified"),
        ]
    )


# Map


def _map(view: Survey) -> str:
    every = max(1, -(-len(view.columns.crlb_m) // MAX_POINTS))
    place, bound = view.columns.transmitter[::every], view.columns.crlb_m[::every]
    stations = fixed_receivers(view.data)
    sites = np.array([[s["lat"], s["lon"]] for s in stations]) if stations else view.columns.sites[:, :2]
    if not stations:
        sites = sites[:: max(1, -(-len(sites) // MAX_POINTS))]
    everything = np.concatenate([place[:, :2], sites])
    frame = MapFrame.around(everything[:, 0], everything[:, 1])
    limits = _limits(bound)
    groups, group = _groups(limits), np.searchsorted(limits, bound, side="right")
    dots = [frame.dots(place[group == k, 0], place[group == k, 1], kind) for k, (kind, _) in enumerate(groups)]
    lat, lon = sites[:, 0], sites[:, 1]
    if stations:
        marks = [frame.box(lat, lon), *dots, *frame.sites(lat, lon, [str(s["name"]) for s in stations])]
        about = "Dashed: the receivers' bounding box."
    else:
        marks = [frame.dots(lat, lon, "site"), *dots]
        about = "Receivers are drawn anew for every sample."
    title = f"Where {count(view.summary.samples, 'transmitter')} are, and how well they can be placed"
    drawn = f" {number(len(bound))} transmitters drawn." if every > 1 else ""
    note = f"Colour: the Cramér-Rao bound on the horizontal position error (crlb_m). {about}{drawn}"
    keys = [*((f"dot {kind}", text) for kind, text in groups), ("tri" if stations else "dot site", "receiver")]
    return card("map", title, note, frame.render(marks, title) + legend(keys))


def _limits(bound: Values) -> list[float]:
    """Round values that part the bounds into at most NUM_COLOURS groups of some size."""
    low, high = np.quantile(bound, [0.1, 0.9])
    if not 0 < low < high < np.inf:
        return []
    steps = [m * 10.0**k for k in range(-3, 12) for m in (1, 2, 5)]
    inside = [step for step in steps if low < step < high]
    if len(inside) < 3:  # too narrow for round steps: equal groups
        return sorted({float(f"{level:.2g}") for level in np.quantile(bound, [0.2, 0.4, 0.6, 0.8])})
    picks = np.linspace(0, len(inside) - 1, min(len(inside), NUM_COLOURS - 1)).round().astype(int)
    return [inside[k] for k in dict.fromkeys(picks.tolist())]


def _groups(limits: list[float]) -> list[tuple[str, str]]:
    """Colour and name of each group; the groups are spread over the whole scale of colours."""
    if not limits:
        return [(f"s{NUM_COLOURS // 2}", "transmitter")]
    middle = [f"{metres(a)} – {metres(b)}" for a, b in pairwise(limits)]
    names = [f"< {metres(limits[0])}", *middle, f"≥ {metres(limits[-1])}"]
    return [(f"s{round(k * (NUM_COLOURS - 1) / len(limits))}", name) for k, name in enumerate(names)]


# Histograms


def _snr(view: Survey) -> str:
    truth, measured = view.columns.truth_snr_db, view.columns.measured_snr_db
    low, high = np.quantile(np.concatenate([truth, measured]), [0.001, 0.999])
    plot = Plot.histograms(ChartAxis.linear(float(low), float(high), 6), truth, measured)
    measured_db, true_db, off_db = (
        with_unit(float(np.median(values)), "dB") for values in (measured, truth, np.abs(measured - truth))
    )
    title = f"SNR: median {measured_db} measured, {true_db} true"
    note = f"Mean over the chunks of a record, fading included. Median difference between the two: {off_db}."
    keys = [("a", "true"), ("stroke b", "measured")]
    return chart("snr", title, note, plot, ("SNR in the 12.5 kHz channel (dB)", "IQ records"), keys)


def _gdop(view: Survey) -> str:
    title = f"Geometry: median GDOP {number((view.summary.gdop or {}).get('median'))}"
    limit = (view.data.manifest.get("config") or {}).get("max_gdop")
    note = "Horizontal position and emission time, from the receivers that heard; lower is better."
    return _spread("gdop", title, note, view.columns.gdop, "GDOP (dimensionless)", limit)


def _bound(view: Survey) -> str:
    title = f"Best possible position error: median {metres((view.summary.crlb_m or {}).get('median'))}"
    note = "Cramér-Rao bound from strengths and arrival times, clock errors included; echoes and fading are not in it."
    return _spread("bound", title, note, view.columns.crlb_m, "bound crlb_m (m)", None)


def _spread(kind: str, title: str, note: str, values: Values, label: str, limit: float | None) -> str:
    """Histogram of one quantity, logarithmic where it spans decades."""
    values = values[np.isfinite(values)]
    if not len(values):
        return card(kind, title, note)
    x = ChartAxis.fitting(values)
    plot = Plot.histograms(x, values)
    if limit is not None:
        plot.rule_x(limit, f"max_{kind} {limit:g}")
    return chart(kind, title, note, plot, (f"{label}, logarithmic" if x.log else label, "samples"))


def _arrival(view: Survey) -> str:
    error = view.columns.arrival_error_us
    if not len(error):
        title = "Arrival differences could not be measured"
        note = f"The waveform {view.summary.waveform} carries no timing, or no second receiver heard."
        return card("arrival", title, note)
    reach = float(np.quantile(np.abs(error), 0.99)) or 1.0
    beyond = float((np.abs(error) > reach).mean())
    middle = float(np.median(np.abs(error)))
    plot = Plot.histograms(ChartAxis.linear(-reach, reach, 6), error, centred=True)
    title = f"Arrival differences: median error {with_unit(middle, 'µs')}"
    rms = float(np.sqrt(np.mean(error[np.abs(error) <= reach].astype(np.float64) ** 2)))
    note = (
        "Measured minus true, mean over the chunks; "
        f"{with_unit(middle, 'µs')} is {metres(middle * 1e-6 * SPEED_OF_LIGHT)} of path. "
        f"Rms {with_unit(rms, 'µs')} of those shown; {percent(beyond)} lie beyond the axis."
    )
    return chart("arrival", title, note, plot, ("measured − true arrival difference (µs)", "IQ records"))


# Spectrum


def _spectrum(data: Dataset) -> Iterator[str]:
    """Two views of the strongest record of the first sample."""
    try:
        iq, index, receiver = first_record(data)
    except ConfigError as failure:
        yield card("spectrum", "Spectrum: the record could not be made again", str(failure))
        return
    config = data.manifest.get("config") or {}
    names = fixed_receivers(data)
    where = str(names[receiver]["name"]) if names else f"receiver {receiver}"
    floor = data.manifest.get("noise_dbm")
    density = None if floor is None else floor - 10 * np.log10(CHANNEL_HZ)
    carrier = f"frequency from the carrier at {config.get('frequency_mhz', 0):g} MHz (kHz)"
    for kind, half_khz, points in (("spectrum", 100.0, 1024), ("channel", 10.0, 4096)):
        spectrum = welch(iq, points).within(half_khz * 1e3)
        level = spectrum.power_dbm_hz
        lowest = min(float(np.quantile(level, 0.02)), density if density is not None else np.inf) - 6
        y = ChartAxis.linear(lowest, float(level.max()) + 10, 5)
        plot = Plot(ChartAxis.linear(-half_khz, half_khz, 5), y)
        plot.band(-CHANNEL_HZ / 2e3, CHANNEL_HZ / 2e3, "12.5 kHz channel")
        plot.line(spectrum.frequency_hz / 1e3, level, "a")
        if density is not None:
            plot.rule_y(density, "noise")
        band = "whole sampled band" if kind == "spectrum" else "channel close up"
        title = f"Spectrum at {where}, {band}"
        note = (
            f"Sample {index}, the receiver with the greatest power. Welch's method, "
            f"{with_unit(SAMPLE_RATE_HZ / points, 'Hz')} per bin; peak {with_unit(float(level.max()), 'dBm/Hz')}."
        )
        yield chart(kind, title, note, plot, (carrier, "power density (dBm/Hz)"))


def first_record(data: Dataset) -> tuple[IQ, int, int]:
    """IQ in sqrt(mW), attempt number and receiver of the first sample's strongest record."""
    row = data.rows(0, 1, ("index", "reference"))
    index, receiver = int(row["index"][0]), int(row["reference"][0])
    return next(recordings(data, 0, [receiver])), index, receiver


# Bars


def _rejections(summary: Summary) -> str:
    attempted = summary.attempted
    if not attempted:
        return card("rejections", "Attempts were not counted", "The manifest has no counts.")
    kinds = [("accepted", summary.samples, "a")]
    kinds += [(f"rejected: {REASONS.get(key, key)}", n, "b") for key, n in summary.rejected.items()]
    rows = [
        (name, (n, 0) if kind == "a" else (0, n), f"{number(n)} · {percent(n / attempted)}") for name, n, kind in kinds
    ]
    title = f"Gates: {number(summary.samples)} of {count(attempted, 'attempt')} accepted"
    note = "Attempts are refused before any IQ is made; one that fails both gates counts under receivers."
    return card("rejections", title, note, stacked_bars(rows, ("a", "b"), float(attempted), title))


def _throughput(summary: Summary) -> str:
    report = summary.throughput or {}
    seconds, stages = float(report.get("seconds") or 0), report.get("stages") or {}
    if not seconds or not stages:
        note = "Generation writes it when it ends; this dataset was stopped before."
        return card("throughput", "Throughput was not recorded", note)
    kinds = ("busy_s", "wait_input_s", "wait_room_s")
    rows = []
    for name, stage in stages.items():
        parts = [float(stage.get(kind) or 0) / seconds for kind in kinds]
        rows.append((str(name), parts, f"{percent(parts[0])} busy · {number(stage.get('items'))} items"))
    longest = max(1.0, *(sum(parts) for _, parts, _ in rows))
    ceiling = report.get("ceiling_share")
    title = f"Throughput: {number(report.get('samples_per_s'))} samples/s" + (
        f", {percent(ceiling)} of the ceiling" if ceiling is not None else ""
    )
    peak = report.get("peak_bytes")
    facts = [
        f"{number(report.get('iq_per_s'))} IQ records/s over {number(seconds)} s",
        f"batches of {number(report['batch_size'])}" if report.get("batch_size") else "",
        f"peak memory {size(peak)}" if peak else "",
    ]
    scale_note = f"A full bar is {percent(longest)} of the run; stages overlap, threads add up."
    note = f"{', '.join(filter(None, facts))}. {scale_note}"
    body = stacked_bars(rows, ("a", "c", "d"), longest, title)
    keys = legend([("a", "busy"), ("c", "waiting for input"), ("d", "waiting for room")])
    return card("throughput", title, note, body + keys)


# Configuration


def _configuration(view: Survey) -> str:
    manifest = view.data.manifest
    config = dict(manifest.get("config") or {})
    stations = config.pop("stations", None) or []
    rows = {**config, "noise_dbm": manifest.get("noise_dbm"), **(manifest.get("waveform") or {})}
    tables = table([[key, value] for key, value in rows.items() if value is not None])
    if stations and not config.get("use_random_receivers"):
        head = ["station", "lat (°)", "lon (°)", "alt (m)"]
        tables += table([[station.get(key) for key in SITE] for station in stations], head)
    return (
        '<details class="card" id="configuration"><summary>Configuration</summary>'
        f'<div class="tables">{tables}</div></details>'
    )
