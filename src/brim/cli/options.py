"""Options that several commands share, and how they are read and checked."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from brim.cli.words import nearest
from brim.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]

TIERS = ("auto", "vram", "ram", "window")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")


@contextmanager
def needing_service(what: str) -> Iterator[None]:
    """Around imports of what only the service's extra brings: without it, an error that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as failure:
        if (failure.name or "").startswith("brim"):
            raise
        raise ConfigError(f"{failure.name} is not installed; {what} needs: pip install 'brim[service]'") from failure


def whole(text: str) -> int:
    """A whole number as typed; the message of a wrong one names it, which typer's own does not."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """A number as typed."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def percent(text: str | float) -> float:
    """A percentage as typed, 20 or 20%, or a default's number; whoever takes it knows its range."""
    try:
        value = float(str(text).strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is not a percentage; write it like 20 or 20%")
    return value


def check_choice(flag: str, value: str | None, choices: Collection[str]) -> None:
    """Refuse a name that is none of the choices, with the nearest."""
    if value is None or value in choices:
        return
    near = nearest(value, choices)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(f"{flag} {value} is unknown; choose one of {', '.join(choices)}{hint}")


def one_of(*choices: str) -> Callable[[str], list[str]]:
    """What the shell offers for an option with these choices."""

    def offer(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return offer


def place(text: str) -> str:
    """Where a dataset is, as typed: a URL as it is, anything else as a path; Path itself would eat a slash of s3://."""
    from brim.engine.storage import place_of

    return str(place_of(text))


def directories(incomplete: str) -> list[str]:
    """What the shell offers for a directory; URLs are typed."""
    folder, _, start = incomplete.rpartition("/")
    try:
        found = Path(folder + "/" if incomplete.startswith("/") else folder or ".").iterdir()
        names = sorted(entry.name for entry in found if entry.name.startswith(start) and entry.is_dir())
    except OSError:
        return []
    return [f"{folder}/{name}" if folder or incomplete.startswith("/") else name for name in names]


Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Work on a Ray cluster: auto, local or ray://HOST:PORT.",
        autocompletion=one_of("auto", "local"),
    ),
]

Device = Annotated[
    str,
    typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.", autocompletion=one_of("auto", "cpu", "cuda")),
]


def check_positive(flag: str, value: int | None) -> None:
    """Refuse a count below one, by the name the user knows it by."""
    if value is not None and value < 1:
        raise ConfigError(f"{flag} {value} must be at least 1")
