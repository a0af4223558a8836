"""The class and the split of each sequence, from a CSV file or from sub-folders."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from brim.errors import DatasetError, StorageError

LABELS = "labels.csv"
SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLabel:
    """Class and split of one file."""

    name: str = ""  # of the class; empty without a label
    split: str = ""  # "train", "test" or empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The files to use, in order, and where their labels came from."""

    of: dict[str, SequenceLabel]  # path below the folder → label
    source: str  # "folders", "none" or the path of the CSV file


def find_labels(folder: Path, ids: Sequence[str], csv_file: Path | str | None = None) -> Labels:
    """The label of each file: from the given CSV file, else from labels.csv in the folder, else from sub-folders.

    ids are all .npy files below the folder, with /. Files that a CSV file does not name are left out. Sub-folders are
    classes if every file lies exactly one folder deep and there are at least two folders.
    """
    file = _find_csv(folder, csv_file)
    if file is not None:
        return Labels(of=_match(read_csv(file), ids, file, folder), source=str(file))
    names = [PurePosixPath(name).parts for name in ids]
    if names and all(len(parts) == 2 for parts in names) and len({parts[0] for parts in names}) > 1:
        return Labels(of={name: SequenceLabel(name=name.split("/")[0]) for name in ids}, source="folders")
    return Labels(of={name: SequenceLabel() for name in ids}, source="none")


def number_classes(names: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """The classes in natural order, 2 before 10, and the number of each name's class; -1 for the empty name."""
    classes = tuple(sorted({name for name in names if name}, key=_natural))
    number = {name: index for index, name in enumerate(classes)}
    return classes, [number.get(name, -1) for name in names]


def _natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    parts = (part for part in re.split(r"([0-9]+)", name) if part)
    return [_magnitude(part.lstrip("0")) if part[0] in "0123456789" else (1, 0, part) for part in parts], name


def _magnitude(digits: str) -> tuple[int, int, str]:
    """A key that sorts like the number; int() does not accept thousands of digits."""
    return 0, len(digits), digits


# The CSV file


def _find_csv(folder: Path, csv_file: Path | str | None) -> Path | None:
    if csv_file is None:
        return folder / LABELS if (folder / LABELS).is_file() else None
    for file in (Path(csv_file), folder / csv_file):
        if file.is_file():
            return file
    fault = "is not a file" if Path(csv_file).exists() else "does not exist"
    raise DatasetError(f"{csv_file} {fault}", field="labels", hint="give a CSV file with the header file,label[,split]")


def read_csv(file: Path) -> dict[str, SequenceLabel]:
    """Path → label of every line; an error names the line."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            lines = csv.reader(opened, strict=True)
            columns = [name.strip().lower() for name in next(lines, [])]
            _check_columns(columns, file)
            labels: dict[str, SequenceLabel] = {}
            for row in lines:
                if any(cell.strip() for cell in row):
                    _add(labels, columns, row, f"{file}, line {lines.line_num}")
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure
    except (csv.Error, UnicodeDecodeError) as failure:
        raise DatasetError(f"{file} is not a CSV file in UTF-8 ({failure}); expected file,label[,split]") from failure
    if not labels:
        raise DatasetError(f"{file} names no file; add lines of file,label or leave the labels out")
    _check_splits(labels, file)
    return labels


def _check_columns(columns: list[str], file: Path) -> None:
    required = {"file", "label"}
    if not required <= set(columns) <= required | {"split"} or len(set(columns)) < len(columns):
        raise DatasetError(f"{file}: the first line is {','.join(columns)!r}, expected file,label or file,label,split")


def _add(labels: dict[str, SequenceLabel], columns: list[str], row: list[str], where: str) -> None:
    if len(row) != len(columns):
        raise DatasetError(f"{where}: {len(row)} values, expected {len(columns)} ({','.join(columns)})")
    values = dict(zip(columns, (cell.strip() for cell in row), strict=True))
    name, label, split = str(PurePosixPath(values["file"])), values["label"], values.get("split", "")
    if not values["file"]:
        raise DatasetError(f"{where}: no file named; expected a path relative to the folder")
    if not label:
        raise DatasetError(f"{where}: {name} has an empty label; give it one or remove the line")
    if split and split not in SPLITS:
        raise DatasetError(f"{where}: {name} has split {split!r}, expected train or test")
    if name in labels:
        raise DatasetError(f"{where}: {name} is named twice; keep one line for each file")
    labels[name] = SequenceLabel(name=label, split=split)


def _check_splits(labels: dict[str, SequenceLabel], file: Path) -> None:
    """Raise if only some files have a split: putting the others into either part would be a guess."""
    without = [name for name, label in labels.items() if not label.split]
    if without and len(without) < len(labels):
        raise DatasetError(
            f"{file}: {without[0]} has no split, {len(labels) - len(without)} others have one; "
            "give every file train or test, or none"
        )


def _match(labels: dict[str, SequenceLabel], ids: Sequence[str], file: Path, folder: Path) -> dict[str, SequenceLabel]:
    known = set(ids)
    unknown = [name for name in labels if name not in known]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise DatasetError(
            f"{file} names {unknown[0]}{more}, which is not among the {len(ids)} .npy files of {folder}; "
            "paths are relative to that folder"
        )
    return {name: labels[name] for name in ids if name in labels}
