"""Figures as people read them: bytes, seconds, rates, shares, times; "–" where there is none."""

from datetime import UTC, datetime
from typing import Any, Final

from brim.jobs.kinds import KINDS

NONE: Final = "–"
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def in_bytes(value: float | None) -> str:
    """12.3 GB."""
    if value is None:
        return NONE
    unit = 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 99.5 else f"{value:.1f} {_UNITS[unit]}"


def seconds(value: float | None) -> str:
    """3 s, 4 min 05 s, 2 h 10 min, 3 d 4 h."""
    if value is None or value < 0:
        return NONE
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def number(value: Any) -> str:
    """Four digits of a number, with thin spaces between thousands; anything else as text."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}".replace(",", "\u202f")
    if isinstance(value, float):
        return f"{value:,.1f}".replace(",", "\u202f") if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def metres(value: float | None) -> str:
    """12 m, 3.4 km."""
    if value is None:
        return NONE
    if value >= 9950:
        return f"{number(round(value / 1000))} km"
    return f"{value / 1000:.1f} km" if value >= 999.5 else f"{value:.3g} m"


def share(value: float | None) -> str:
    """83 %."""
    return NONE if value is None else f"{100 * value:.0f} %"


def rate(value: float | None) -> str:
    """1 234 /s."""
    return NONE if not value else f"{number(round(value) if value >= 100 else value)} /s"


def when(text: str | None) -> str:
    """A time of the API, in UTC to the second."""
    return NONE if not text else text[:19].replace("T", " ") + " UTC"


def ago(text: str | None, now: datetime | None = None) -> str:
    """How long ago a time of the API was, roughly."""
    if not text:
        return NONE
    passed = ((now or datetime.now(UTC)) - datetime.fromisoformat(text)).total_seconds()
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if passed >= unit_s:
            return f"{passed // unit_s:.0f} {unit} ago"
    return "just now"


def elapsed(start: str, end: str | None) -> str:
    """The time between two times of the API, or since the first."""
    until = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return seconds(max(0.0, (until - datetime.fromisoformat(start)).total_seconds()))


_SUFFIXES: Final[tuple[tuple[str, Any], ...]] = (  # ends of names, and how their values are written
    ("_per_s", rate),
    ("_bytes", in_bytes),
    ("_seconds", seconds),
    ("_share", share),
    ("_rate", share),
    ("_m", metres),
    ("_ms", lambda value: f"{number(value)} ms"),
    ("_db", lambda value: f"{number(value)} dB"),
    ("_s", seconds),
)
_NAMES: Final = {
    "ap50": "AP 0.5",
    "ap75": "AP 0.75",
    "ari": "adjusted Rand index",
    "best_val_loss": "best held-out loss",
    "crlb_ratio": "times the bound",
    "gdop": "rejected for GDOP",
    "iou": "IoU",
    "min_snr": "rejected for SNR",
    "nmi": "mutual information",
    "num_files": "files",
    "num_samples": "samples",
    "seconds": "time",
    "p95_error_m": "95 % are below",
    "pq": "PQ",
    "uar": "UAR",
    "val_loss": "held-out loss",
}


def figure(name: str, value: Any) -> tuple[str, str]:
    """A value of a result with its name, as people say them: peak_bytes 381157376 is "peak", "381 MB"."""
    for suffix, write in _SUFFIXES:
        if name.endswith(suffix) and isinstance(value, int | float) and not isinstance(value, bool):
            plain = _NAMES.get(name, name.removesuffix(suffix).replace("_", " "))
            return plain + (" rate" if suffix == "_rate" else ""), write(value)
    return _NAMES.get(name, name.replace("_", " ")), number(value)


def kind(name: str) -> str:
    """What a job does: rf.evaluate is "Evaluate a locator"."""
    return KINDS[name].title if name in KINDS else name


def network(name: object) -> str:
    """What a network is for, in a sentence; empty for one that is not built in."""
    return _NETWORKS.get(str(name), "")


_NETWORKS = {
    "unet_tiny": "0.12 M weights: for a first try; trains in minutes without a GPU.",
    "cells": "2.0 M weights: the network of the model in the box, for cells and nuclei.",
    "unet_resnet18": "14.3 M weights: a U-Net that can begin from weights of torchvision.",
    "unet_resnet34": "24.4 M weights: the same, deeper.",
    "unet_resnet50": "32.5 M weights: the same, deeper still.",
    "resunet_small": "56.5 M weights: a residual U-Net with attention.",
    "hrnet": "65.8 M weights: keeps the full resolution throughout, for thin and crowded objects.",
    "resunet_advanced": "77.0 M weights: the slowest; self-attention, for objects that need their surroundings.",
}
