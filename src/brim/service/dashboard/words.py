"""Figures as people read them: bytes, seconds, rates, shares, times; "–" where there is none."""

from datetime import UTC, datetime
from typing import Any, Final

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
    """Four figures of a number with thin spaces between thousands; else the thing itself."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}".replace(",", "\u202f")
    if isinstance(value, float):
        return f"{value:,.1f}".replace(",", "\u202f") if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def share(value: float | None) -> str:
    """83 %."""
    return NONE if value is None else f"{100 * value:.0f} %"


def rate(value: float | None) -> str:
    """1 234 /s; nothing where it is not known."""
    return NONE if not value else f"{number(round(value) if value >= 100 else value)} /s"


def watts(value: float | None) -> str:
    """412 W."""
    return NONE if value is None else f"{value:.0f} W"


def when(text: str | None) -> str:
    """A time of the API's, to the second, in UTC as it says it."""
    return NONE if not text else text[:19].replace("T", " ") + " UTC"


def ago(text: str | None, now: datetime | None = None) -> str:
    """How long since a time of the API's, roughly."""
    if not text:
        return NONE
    passed = ((now or datetime.now(UTC)) - moment(text)).total_seconds()
    if passed < 60:
        return "just now"
    if passed < 3600:
        return f"{passed // 60:.0f} min ago"
    if passed < 86400:
        return f"{passed // 3600:.0f} h ago"
    return f"{passed // 86400:.0f} d ago"


def moment(text: str) -> datetime:
    """A time of the API's."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def since(text: str, now: datetime | None = None) -> str:
    """Seconds since a time of the API's, in words."""
    return seconds(max(0.0, ((now or datetime.now(UTC)) - moment(text)).total_seconds()))
