"""A run's metrics as one series of lines: all phases in the order they were written, numbered from 0.

A file may have grown for days, so nothing here holds more of it than it gives out. A line still being written is left
for the next reading; one that is no JSON keeps its number and is left out.
"""

import json
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

METRICS = "metrics.jsonl"
_TAIL_BYTES = 1024**2

Line = dict[str, Any]


class Lines(NamedTuple):
    """Some of the lines."""

    lines: list[Line]
    next: int  # number of the line after them


def read_lines(run: Path, after: int = 0, limit: int = 1000) -> Lines:
    """Up to `limit` lines from the one with that number on.

    Fewer lines than `after`, since a run that went on from a checkpoint dropped some: none, and how many there are.
    """
    number, found = 0, list[Line]()
    for number, (phase, line) in enumerate(islice(_lines(run), after + limit), 1):
        if number > after and (value := _parse(line)) is not None:
            found.append({**phase, **value})
    return Lines(found, number)


def thin_lines(run: Path, points: int) -> Lines:
    """At most so many lines of each sort, evenly over the whole series with its ends.

    Lines with the same names in the same phase are a sort: else those of evaluations, one in thousands, would be lost.
    """
    sorts: dict[Hashable, list[int]] = {}
    number = 0
    for number, (phase, line) in enumerate(_lines(run), 1):
        if (value := _parse(line)) is not None:
            sorts.setdefault((*phase.values(), *value), []).append(number - 1)
    kept = {place for places in sorts.values() for place in _evenly(places, points)}
    found: list[Line] = []
    for place, (phase, line) in enumerate(islice(_lines(run), number)):
        if place in kept and (value := _parse(line)) is not None:  # None: a worker went back meanwhile
            found.append({**phase, **value})
    return Lines(found, number)


def last_lines(run: Path, limit: int) -> list[Line]:
    """The last lines, without reading those before."""
    found: deque[Line] = deque(maxlen=limit)
    for phase, file in _files(run):
        parsed = (_parse(line) for line in _tail(file, limit))
        found.extend({**phase, **value} for value in parsed if value is not None)
    return list(found)


# Files


def _files(run: Path) -> list[tuple[dict[str, str], Path]]:
    """Phase and file of each, in the order they were written; none while there are none."""
    if (run / METRICS).is_file():
        return [({}, run / METRICS)]
    return [({"phase": file.parent.name}, file) for file in sorted(run.glob(f"*/{METRICS}"), key=_written)]


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _lines(run: Path) -> Iterator[tuple[dict[str, str], bytes]]:
    for phase, file in _files(run):
        try:
            opened = file.open("rb")
        except OSError:
            continue  # just deleted
        with opened:
            for line in opened:
                if line.endswith(b"\n"):
                    yield phase, line


def _tail(file: Path, limit: int) -> list[bytes]:
    try:
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, 2) - _TAIL_BYTES)
            opened.seek(start)
            return opened.read().splitlines()[1 if start else 0 :][-limit:]  # the first may be cut
    except OSError:
        return []


def _parse(line: bytes) -> Line | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _evenly(places: list[int], points: int) -> list[int]:
    """At most so many of them, the last always, the first unless there is but one."""
    if len(places) <= points:
        return places
    if points == 1:
        return places[-1:]
    step = (len(places) - 1) / (points - 1)
    return [places[round(number * step)] for number in range(points)]
