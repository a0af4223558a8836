"""What is known of each sequence besides its frames: label, split and other columns, from a CSV file or sub-folders.

The CSV file has the column `file`, may have `split`, and holds labels and groups in any others. One column is the
label: the one that is asked for, else `label`, else the only one there is.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from brim.errors import DatasetError, StorageError

LABELS = "labels.csv"
SPLITS = ("train", "validation", "test")
FILE, SPLIT, FOLD, LABEL = "file", "split", "fold", "label"

_SPLIT_NAMES = {name: name for name in SPLITS} | dict.fromkeys(("val", "valid", "dev", "development"), "validation")
_HEADER = "a CSV file with a column file, a column label, and split, speaker or others where you have them"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLabel:
    """What is known of one file."""

    name: str = ""  # of the class, or a number as text; empty without a label
    split: str = ""  # one of SPLITS or empty
    more: dict[str, str] = field(default_factory=dict)  # the other columns: groups, folds, further labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The files to use, in order, and where their labels came from."""

    of: dict[str, SequenceLabel]  # path below the folder → label
    source: str  # "folders", "none", "files" (the data files hold them) or the path of the CSV file
    column: str = LABEL  # name of the column that is the label; empty if none of several was chosen


def find_labels(
    folder: Path,
    ids: Sequence[str],
    csv_file: Path | str | None = None,
    column: str | None = None,
    own: Mapping[str, SequenceLabel] | None = None,
) -> Labels:
    """The label of each file: from the given CSV file, else from labels.csv in the folder, else from sub-folders.

    ids are all sequences below the folder, with /. Those that a CSV file does not name are left out. Sub-folders are
    classes if every file lies exactly one folder deep and there are at least two folders. `own` is what the data files
    say themselves; a CSV file replaces it. `column` names the CSV file's column that is the label.
    """
    file = _find_csv(folder, csv_file)
    if file is not None:
        read = read_csv(file, column)
        return Labels(of=_match(read.of, ids, file, folder), source=str(file), column=read.column)
    if own:
        if column is not None and any(column in label.more for label in own.values()):
            own = {name: _moved(label, column) for name, label in own.items()}
        return Labels(of={name: own.get(name, SequenceLabel()) for name in ids}, source="files", column=column or LABEL)
    names = [PurePosixPath(name).parts for name in ids]
    if names and all(len(parts) == 2 for parts in names) and len({parts[0] for parts in names}) > 1:
        return Labels(of={name: SequenceLabel(name=name.split("/")[0]) for name in ids}, source="folders")
    return Labels(of={name: SequenceLabel() for name in ids}, source="none")


def number_classes(names: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """The classes in natural order, 2 before 10, and the number of each name's class; -1 for the empty name."""
    classes = tuple(sorted({name for name in names if name}, key=_natural))
    number = {name: index for index, name in enumerate(classes)}
    return classes, [number.get(name, -1) for name in names]


def normal_split(name: str) -> str:
    """A split as it is stored, empty if it is not one."""
    return _SPLIT_NAMES.get(name.strip().lower(), "")


def merge_columns(labels: Sequence[SequenceLabel]) -> dict[str, tuple[str, ...]]:
    """The other columns of all sequences, empty where one has no value."""
    names = dict.fromkeys(name for label in labels for name in label.more)
    return {name: tuple(label.more.get(name, "") for label in labels) for name in names}


def _natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    parts = (part for part in re.split(r"([0-9]+)", name) if part)
    # a number sorts by its digits: int() does not accept thousands of them
    stripped = [(part, part.lstrip("0")) for part in parts]
    return [(0, len(bare), bare) if part[0] in "0123456789" else (1, 0, part) for part, bare in stripped], name


# The CSV file


def _find_csv(folder: Path, csv_file: Path | str | None) -> Path | None:
    if csv_file is None:
        return folder / LABELS if (folder / LABELS).is_file() else None
    for file in (Path(csv_file), folder / csv_file):
        if file.is_file():
            return file
    fault = "is not a file" if Path(csv_file).exists() else "does not exist"
    raise DatasetError(f"{csv_file} {fault}", field="labels", hint=f"give {_HEADER}")


def read_csv(file: Path, column: str | None = None) -> Labels:
    """Label, split and other columns by path; an error names the line."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            lines = csv.reader(opened, strict=True)
            columns = [name.strip().lower() for name in next(lines, [])]
            label = _label_column(columns, column, file)
            labels: dict[str, SequenceLabel] = {}
            for row in lines:
                if any(cell.strip() for cell in row):
                    _add(labels, columns, label, row, f"{file}, line {lines.line_num}")
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure
    except (csv.Error, UnicodeDecodeError) as failure:
        raise DatasetError(f"{file} is not a CSV file in UTF-8 ({failure}); expected {_HEADER}") from failure
    if not labels:
        raise DatasetError(f"{file} names no file; add lines of file,label or leave the labels out")
    without = [name for name, label in labels.items() if not label.split]
    if without and len(without) < len(labels):  # putting these into either part would be a guess
        raise DatasetError(
            f"{file}: {without[0]} has no split, {len(labels) - len(without)} others have one; "
            "give every file train or test, or none"
        )
    return Labels(of=labels, source=str(file), column=label)


def _label_column(columns: list[str], asked: str | None, file: Path) -> str:
    """Name of the column that is the label; empty if there are several and none was asked for."""
    others = [name for name in columns if name not in (FILE, SPLIT, FOLD)]
    if FILE not in columns or not others or "" in columns or len(set(columns)) < len(columns):
        first = ",".join(columns)
        raise DatasetError(f"{file}: the first line is {first[:200]!r}, expected {_HEADER}, each once")
    if asked is not None:
        if asked.lower() not in others:
            raise DatasetError(f"{file} has no column {asked!r}; its columns are {', '.join(others)}", field="label")
        return asked.lower()
    return LABEL if LABEL in others else others[0] if len(others) == 1 else ""


def _add(labels: dict[str, SequenceLabel], columns: list[str], label: str, row: list[str], where: str) -> None:
    if len(row) != len(columns):
        raise DatasetError(f"{where}: {len(row)} values, expected {len(columns)} ({','.join(columns)})")
    values = dict(zip(columns, (cell.strip() for cell in row), strict=True))
    name, split = str(PurePosixPath(values.pop(FILE))), values.pop(SPLIT, "")
    if name == ".":
        raise DatasetError(f"{where}: no file named; expected a path relative to the folder")
    if label == LABEL and not values[LABEL]:
        raise DatasetError(f"{where}: {name} has an empty label; give it one or remove the line")
    if split and split.lower() not in _SPLIT_NAMES:
        raise DatasetError(f"{where}: {name} has split {split!r}, expected {', '.join(SPLITS)}")
    if name in labels:
        raise DatasetError(f"{where}: {name} is named twice; keep one line for each file")
    split = _SPLIT_NAMES.get(split.lower(), "")
    labels[name] = SequenceLabel(name=values.pop(label, ""), split=split, more=values)


def _moved(label: SequenceLabel, column: str) -> SequenceLabel:
    """The same with another column as the label."""
    more = {**label.more, LABEL: label.name}
    return SequenceLabel(name=more.pop(column, ""), split=label.split, more=more)


def _match(labels: dict[str, SequenceLabel], ids: Sequence[str], file: Path, folder: Path) -> dict[str, SequenceLabel]:
    known = set(ids)
    unknown = [name for name in labels if name not in known]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise DatasetError(
            f"{file} names {unknown[0]}{more}, which is not among the {len(ids)} sequences of {folder}; "
            "paths are relative to that folder"
        )
    return {name: labels[name] for name in ids if name in labels}
