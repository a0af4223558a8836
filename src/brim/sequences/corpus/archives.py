"""Files of the UEA and UCR archives: .ts, .arff and .tsv, one or many channels, of equal length or not.

    .ts     @problemName …, @classLabel true a b, @data, then a line per sequence: channel:channel:…:label, a channel
            being values separated by commas, or (time,value) pairs
    .arff   @attribute …, @data, then a line per sequence: values,label; of several channels 'channel\\nchannel…',label
    .tsv    a line per sequence of one channel: the label, then the values, separated by tabs

Values that are missing (? or NaN) at the end of all channels are padding and cut off. Others are a fault of the
sequence.
"""

# Axes: T frames, D channels

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from brim.errors import DatasetError, StorageError
from brim.sequences.corpus.source import Frames

SUFFIXES = (".ts", ".arff", ".tsv")
MAX_HEADER_LINES = 100_000

_MISSING = re.compile(r"\?|NaN|nan")
_PAIR = re.compile(r"\(([^(),]*),([^(),]*)\)")
_PART = re.compile(r"(.+)_(TRAIN|TEST)", re.IGNORECASE)


class ArchiveSequence(NamedTuple):
    frames: Frames | str  # (T, D) float64, or the fault
    label: str  # empty without one
    line: int  # of the file


class Archive(NamedTuple):
    sequences: list[ArchiveSequence]
    num_padded: int  # sequences whose missing values at the end were cut off


def problem_of(file: Path) -> tuple[str, str]:
    """Name of the problem and the split that a file name says: ("GunPoint", "train") for GunPoint_TRAIN.ts."""
    match = _PART.fullmatch(file.stem)
    return (match[1], match[2].lower()) if match else (file.stem, "")


def read_archive(file: Path) -> Archive:
    """All sequences of a file; one that is not of its format is a DatasetError that names the line."""
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure
    return parse_archive(text, str(file), file.suffix.lower())


def parse_archive(text: str, name: str, suffix: str) -> Archive:
    lines = text.split("\n")
    if suffix == ".ts":
        start, parse = _read_ts_header(lines, name)
    elif suffix == ".arff":
        start, parse = _read_arff_header(lines, name)
    else:
        start, parse = 0, _parse_tsv
    sequences, num_padded = [], 0
    for number, line in enumerate(lines[start:], start + 1):
        stripped = line.strip()
        if not stripped or stripped.startswith(("#", "%")):
            continue
        channels, label = parse(stripped)
        frames = _frames(channels)
        if not isinstance(frames, str):
            frames, was_padded = _without_padding(frames)
            num_padded += was_padded
        sequences.append(ArchiveSequence(frames, label, number))
    if not sequences:
        raise DatasetError(f"{name} has no sequence{' after @data' if start else ''}", hint="download the file again")
    return Archive(sequences, num_padded)


# A parser takes a line to its channels, as text, and its label
_LineParser = Callable[[str], tuple[list[str], str]]


def _header(lines: list[str], name: str) -> list[tuple[int, list[str]]]:
    """Lines of the header up to @data: (number, words)."""
    header = []
    for number, line in enumerate(lines[:MAX_HEADER_LINES], 1):
        words = line.split()
        if not words or words[0].startswith(("#", "%")):
            continue
        if not words[0].startswith("@"):
            raise DatasetError(
                f"{name}, line {number}: {line.strip()[:60]!r} comes before @data",
                code="malformed",
                hint="check that it is a file of the UEA or UCR archive, or download it again",
            )
        header.append((number, words))
        if words[0].lower() == "@data":
            return header
    raise DatasetError(f"{name} has no line @data", code="malformed", hint="download the file again")


def _read_ts_header(lines: list[str], name: str) -> tuple[int, _LineParser]:
    """Number of lines before the data, and how to read these."""
    has_label, has_times = True, False
    header = _header(lines, name)
    for _, words in header:
        key, value = words[0].lower(), words[1].lower() if len(words) > 1 else ""
        if key in ("@classlabel", "@targetlabel"):
            has_label = value == "true"
        elif key == "@timestamps":
            has_times = value == "true"

    def parse(line: str) -> tuple[list[str], str]:
        channels = line.split(":") if not has_times else re.split(r":(?![^(]*\))", line)  # times may be 10:30
        label = channels.pop().strip() if has_label else ""
        if has_times:
            channels = [",".join(value for _, value in _PAIR.findall(channel)) for channel in channels]
        return channels, "" if label == "?" else label

    return header[-1][0], parse


def _read_arff_header(lines: list[str], name: str) -> tuple[int, _LineParser]:
    kinds: list[str] = []
    header, relational = _header(lines, name), False
    for _, words in header:
        key = words[0].lower()
        if key == "@attribute":
            kinds.append(words[-1].lower() if "{" not in " ".join(words) else "nominal")
            relational |= kinds[-1] == "relational"
    if not kinds:
        raise DatasetError(f"{name} has no @attribute", code="malformed", hint="download the file again")
    has_label = relational or kinds[-1] in ("nominal", "string") or _is_target(lines, header[-1][0])

    def parse(line: str) -> tuple[list[str], str]:
        if relational:
            quote = line[0]
            end = line.rfind(quote, 1) if quote in "'\"" else -1
            if end < 0:
                return [""], ""
            label = line[end + 1 :].lstrip(", ")
            return line[1:end].replace("\\n", "\n").split("\n"), label.strip("'\" ")
        values, _, label = line.rpartition(",") if has_label else (line, "", "")
        return [values], "" if label.strip() == "?" else label.strip("'\" ")

    return header[-1][0], parse


def _parse_tsv(line: str) -> tuple[list[str], str]:
    label, _, values = line.partition("\t")
    return [",".join(values.split("\t"))], label.strip()


def _is_target(lines: list[str], number: int) -> bool:
    """Whether the last attribute is a number to predict, by its name."""
    last = [line for line in lines[:number] if line.lower().startswith("@attribute")][-1].split()
    return len(last) > 1 and last[1].strip("'\"").lower() in ("target", "class", "label", "response", "y")


def _frames(channels: list[str]) -> Frames | str:
    """(T, D) float64 of channels as text, or the fault."""
    columns = []
    for number, text in enumerate(channels):
        text = _MISSING.sub("nan", text.strip())
        expected = text.count(",") + 1
        try:
            values = np.fromstring(text, dtype=np.float64, sep=",")
        except (ValueError, DeprecationWarning):  # a warning of NumPy for text that is not a number
            values = np.empty(0)
        if len(values) != expected or not text:
            return f"has a value in channel {number} that is not a number; correct it, or download the file again"
        columns.append(values)
    lengths = {len(column) for column in columns}
    if not columns:
        return "has no values; correct the line, or download the file again"
    if len(lengths) > 1:
        return (
            f"has channels of {min(lengths)} to {max(lengths)} values; give all channels of a sequence the same length"
        )
    return np.stack(columns, 1)


def _without_padding(frames: Frames) -> tuple[Frames | str, bool]:
    """Frames without those at the end that have no value in any channel."""
    missing = np.isnan(frames)
    if not missing.any():
        return frames, False
    known = np.flatnonzero(~missing.all(1))
    if not len(known):
        return "has no values at all; remove the line", False
    cut = frames[: known[-1] + 1]
    inside = np.argwhere(np.isnan(cut))
    if len(inside):
        frame, channel = inside[0]
        return f"has no value at frame {frame} of channel {channel}; fill it in, or leave the sequence out", False
    return cut, True
