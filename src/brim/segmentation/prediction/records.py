"""Which images of a bulk prediction are finished: records beside the results, in files that appear whole.

A record names an image and the hash of its bytes. It is written after the image's result, so it never promises what
is not there; and it holds for one recipe only: other weights or another threshold make all results anew. Records come
in small files, one for each parcel of images, and are gathered into one by the next run.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from brim.engine.storage import Place

FOLDER = ".brim"
_RECORDS = f"{FOLDER}/records"
_READERS = 16  # files asked for at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finished image."""

    name: str  # path or URL
    sha256: str  # of its bytes
    polygons: int
    height: int  # pixels
    width: int


class Records:
    """The records of one recipe in a place; pickled, others add to them."""

    def __init__(self, place: Place, recipe: str, run: int = 0) -> None:
        """Store; recipe stands for all that results depend on besides the images, run counts those before."""
        self._place, self._recipe, self._run = place, recipe, run

    def open(self) -> dict[str, Record]:
        """What runs before this one finished, by name; this run counts from here on.

        Records of another recipe are removed: this run writes over their results.
        """
        names = self._place.names(_RECORDS)
        own = [name for name in names if name.startswith(f"{self._recipe}-")]
        for name in set(names).difference(own):
            self._place.remove(f"{_RECORDS}/{name}")
        with ThreadPoolExecutor(_READERS) as pool:
            read = list(pool.map(self._read, own))
        found = _latest(zip(map(_run_of, own), read, strict=True))
        self._run = max(map(_run_of, own), default=-1) + 1
        if len(own) > 1:
            self.add(found.values())
            self._run += 1
            for name in own:
                self._place.remove(f"{_RECORDS}/{name}")
        return found

    def add(self, records: Iterable[Record]) -> None:
        """Record finished images; the same ones again change nothing."""
        data = b"".join(json.dumps(asdict(record)).encode() + b"\n" for record in records)
        if data:
            digest = hashlib.sha256(data).hexdigest()[:16]
            self._place.put_bytes(data, f"{_RECORDS}/{self._recipe}-{self._run:06d}-{digest}.jsonl")

    def _read(self, name: str) -> list[Record]:
        try:
            lines = self._place.read_bytes(f"{_RECORDS}/{name}").splitlines()
            return [Record(**json.loads(line)) for line in lines]
        except (FileNotFoundError, ValueError, TypeError):  # gone, or not ours: its images are made again
            return []


def recipe_of(facts: dict[str, Any]) -> str:
    """A short name of all that results depend on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _run_of(name: str) -> int:
    number = name.split("-")[1] if name.count("-") == 2 else ""
    return int(number) if number.isdigit() else 0


def _latest(found: Iterable[tuple[int, list[Record]]]) -> dict[str, Record]:
    """The last record of each image; one that two runs at once made differently is none."""
    latest: dict[str, tuple[int, Record | None]] = {}
    for run, record in _flat(found):
        known = latest.get(record.name)
        if known is None or known[0] < run:
            latest[record.name] = (run, record)
        elif known[0] == run and known[1] != record:
            latest[record.name] = (run, None)
    return {name: record for name, (_, record) in latest.items() if record is not None}


def _flat(found: Iterable[tuple[int, list[Record]]]) -> Iterator[tuple[int, Record]]:
    for run, records in found:
        for record in records:
            yield run, record
