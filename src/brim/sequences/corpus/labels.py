"""What each sequence is called and whether it is for training or for testing: a CSV file, or the sub-folders."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from brim.errors import DatasetError, StorageError

LABELS = "labels.csv"
SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What is known of one file before it is read."""

    name: str = ""  # of its class; empty without one
    split: str = ""  # "train", "test" or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The files to use, in order, and where their labels came from."""

    of: dict[str, Label]  # path below the folder → label
    source: str  # "folders", "none" or the path of the CSV file


def find_labels(folder: Path, ids: Sequence[str], csv_file: Path | str | None = None) -> Labels:
    """The label of each file: from the CSV file named, else from labels.csv in the folder, else from sub-folders.

    ids are all .npy files below the folder, with /. A CSV file chooses: those it does not name are left out.
    Sub-folders are classes when every file lies exactly one folder deep and there are at least two of them.
    """
    file = _find_csv(folder, csv_file)
    if file is not None:
        return Labels(of=_match(read_csv(file), ids, file, folder), source=str(file))
    names = [PurePosixPath(name).parts for name in ids]
    if names and all(len(parts) == 2 for parts in names) and len({parts[0] for parts in names}) > 1:
        return Labels(of={name: Label(name=name.split("/")[0]) for name in ids}, source="folders")
    return Labels(of={name: Label() for name in ids}, source="none")


def number_classes(names: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """The classes in natural order, 2 before 10, and the number of each name's class; -1 for the empty name."""
    classes = tuple(sorted({name for name in names if name}, key=_natural))
    number = {name: index for index, name in enumerate(classes)}
    return classes, [number.get(name, -1) for name in names]


def _natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    parts = (part for part in re.split(r"([0-9]+)", name) if part)
    return [_magnitude(part.lstrip("0")) if part[0] in "0123456789" else (1, 0, part) for part in parts], name


def _magnitude(digits: str) -> tuple[int, int, str]:
    """Sorts as the number does, however many digits it has: int() refuses thousands of them."""
    return 0, len(digits), digits


# The CSV file


def _find_csv(folder: Path, csv_file: Path | str | None) -> Path | None:
    if csv_file is None:
        return folder / LABELS if (folder / LABELS).is_file() else None
    for place in (Path(csv_file), folder / csv_file):
        if place.is_file():
            return place
    fault = "is no file" if Path(csv_file).exists() else "no such file"
    raise DatasetError(f"labels {csv_file}: {fault}; give a CSV file with the header file,label[,split]")


def read_csv(file: Path) -> dict[str, Label]:
    """Path → label of every line; whatever does not fit is an error that names the line."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            lines = csv.reader(opened, strict=True)
            columns = [name.strip().lower() for name in next(lines, [])]
            _check_columns(columns, file)
            found: dict[str, Label] = {}
            for row in lines:
                if any(cell.strip() for cell in row):
                    _add(found, columns, row, f"{file}, line {lines.line_num}")
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure
    except (csv.Error, UnicodeDecodeError) as failure:
        raise DatasetError(f"{file} is no CSV file in UTF-8 ({failure}); expected file,label[,split]") from failure
    if not found:
        raise DatasetError(f"{file} names no file; add lines of file,label or leave the labels out")
    _check_splits(found, file)
    return found


def _check_columns(columns: list[str], file: Path) -> None:
    wanted = {"file", "label"}
    if not wanted <= set(columns) <= wanted | {"split"} or len(set(columns)) < len(columns):
        raise DatasetError(f"{file}: the first line is {','.join(columns)!r}, expected file,label or file,label,split")


def _add(found: dict[str, Label], columns: list[str], row: list[str], where: str) -> None:
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
    if name in found:
        raise DatasetError(f"{where}: {name} is named twice; keep one line for each file")
    found[name] = Label(name=label, split=split)


def _check_splits(found: dict[str, Label], file: Path) -> None:
    """Raise where only some have a split: leaving those in either part would be a guess."""
    without = [name for name, label in found.items() if not label.split]
    if without and len(without) < len(found):
        raise DatasetError(
            f"{file}: {without[0]} has no split, {len(found) - len(without)} others have one; "
            "give every file train or test, or none"
        )


def _match(found: dict[str, Label], ids: Sequence[str], file: Path, folder: Path) -> dict[str, Label]:
    known = set(ids)
    unknown = [name for name in found if name not in known]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise DatasetError(
            f"{file} names {unknown[0]}{more}, which is not among the {len(ids)} .npy files of {folder}; "
            "paths are relative to that folder"
        )
    return {name: found[name] for name in ids if name in found}
