"""What is to be packed: the sequences of a folder or file, known from headers, or from parsing where there are none.

    .npy                    a sequence each, (T, D), (1, T, D), (L, T, D) or (D, T)
    .ts, .arff, .tsv        archives of UEA and UCR; NAME_TRAIN and NAME_TEST are one corpus with its split
    .npz, .csv, .parquet    a sequence each, or many
    .wav, .flac, .ogg, …    audio, from which features are computed

A folder is taken to hold the first of these kinds that it has files of; the others are ignored, and a note says so.
"""

# Axes: T frames, D features, L layers

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from brim.engine.pipeline import Pipeline, Stage
from brim.errors import DatasetError, StorageError
from brim.sequences.config import SourceConfig
from brim.sequences.corpus import archives, audio
from brim.sequences.corpus.labels import LABELS, Labels, SequenceLabel, find_labels, normal_split
from brim.sequences.corpus.npy import NpyFile, read_header
from brim.sequences.corpus.sequences import digest
from brim.sequences.corpus.source import DecodedSequence, Frames, SequenceSource, Skipped
from brim.sequences.corpus.tables import TableSequence, read_npz, read_table

_HEADER_READERS = 8  # waiting for a network disk, not computing
_CHUNK_FILES = 64
_MIN_ALIKE = 3  # files, to tell frames from features
_KEPT_BYTES = 2**30  # of parsed frames; beyond, files are parsed again when they are packed

KINDS: dict[str, tuple[str, ...]] = {  # in the order in which a folder's kind is decided
    "npy": (".npy",), "ts": (".ts",), "arff": (".arff",), "tsv": (".tsv",), "npz": (".npz",), "audio": audio.SUFFIXES,
    "parquet": (".parquet",), "csv": (".csv",),
}  # fmt: skip
_ARCHIVES = ("ts", "arff", "tsv")
ALL_SUFFIXES = tuple(suffix for suffixes in KINDS.values() for suffix in suffixes)
EXPECTED = "give a folder or file of .npy, .npz, .csv, .parquet, .ts, .arff, .tsv or audio sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSurvey:
    """The contents of a folder or file, known before any frame is packed."""

    path: Path
    kind: str
    files: tuple[SequenceSource, ...]  # those that can be packed, sorted by id
    bad: tuple[Skipped, ...]
    labels: Labels
    dim: int  # features of a stored frame
    layers: int
    notes: tuple[str, ...]  # what was recognised, in words
    fingerprint: dict[str, Any]  # differs when a file or a label does


@dataclass(slots=True)
class _Content:
    """The sequences of one kind."""

    files: list[SequenceSource] = field(default_factory=list)
    bad: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own: dict[str, SequenceLabel] = field(default_factory=dict)  # what the files say themselves


def survey(
    path: Path,
    labels: Path | str | None = None,
    *,
    label: str | None = None,
    skip_bad: bool = False,
    source: SourceConfig | None = None,
) -> FolderSurvey:
    """What is to be packed; a bad file is an error that names the first, unless skip_bad lists them."""
    source = source or SourceConfig()
    kind, names, notes = list_files(path, labels)
    folder = path if path.is_dir() else path.parent
    if kind == "npy":
        chosen = find_labels(path, names, labels, label)
        content = _survey_npy(folder, list(chosen.of), source)
    else:
        content = _PARSERS[kind](folder, names, source)
        ids = sorted([file.id for file in content.files] + [skipped.file for skipped in content.bad])
        chosen = find_labels(path, ids, labels, label, content.own if _says_anything(content) else None)
    good = [file for file in content.files if file.id in chosen.of]
    bad = [skipped for skipped in content.bad if skipped.file in chosen.of]
    shape = Counter((file.dim, file.layers) for file in good).most_common(1)[0][0] if good else (0, 1)
    dim, layers = shape
    bad += [
        Skipped(file=file.id, fault=_other_shape(file, dim, layers, len(good)))
        for file in good
        if (file.dim, file.layers) != shape
    ]
    bad.sort(key=lambda skipped: skipped.file)
    good = sorted((file for file in good if (file.dim, file.layers) == shape), key=lambda file: file.id)
    if bad and not ((skip_bad or kind == "audio") and good):
        raise bad_files(folder, bad, any_left=bool(good))
    if layers > 1:
        content.notes.append(f"{layers} layers of {dim // layers} features: their weights are learned")
    marks = [(file.id, file.size, file.mtime_ns) for file in good] + [(skipped.file, 0, 0) for skipped in bad]
    rows = sorted((*mark, *_summary(chosen.of[mark[0]])) for mark in marks)
    fingerprint = {"files": len(rows), "bytes": sum(row[1] for row in rows), "sha256": digest(rows)}
    return FolderSurvey(
        path=folder, kind=kind, files=tuple(good), bad=tuple(bad), labels=chosen, dim=dim, layers=layers,
        notes=(*notes, *content.notes), fingerprint=fingerprint,
    )  # fmt: skip


def _says_anything(content: _Content) -> bool:
    return any(label.name or label.split or label.more for label in content.own.values())


def _other_shape(file: SequenceSource, dim: int, layers: int, num_files: int) -> str:
    if file.layers != layers:
        return f"has {file.layers} layers, most of the {num_files} files have {layers}"
    return f"has {file.dim // layers} features, most of the {num_files} files have {dim // layers}"


def _summary(label: SequenceLabel) -> tuple[Any, ...]:
    return (label.name, label.split, *([sorted(label.more.items())] if label.more else []))


def bad_files(path: Path, bad: Sequence[Skipped], *, any_left: bool = True) -> DatasetError:
    """The error for files that cannot be packed: the first in full, the others counted."""
    more = f" ({len(bad)} bad files in all)" if len(bad) > 1 else ""
    hint = (
        "repair or remove it, or leave such files out with {sequence pack} and {skip_bad}"
        if any_left
        else "no good file is left"
    )
    return DatasetError(f"{path / bad[0].file} {bad[0].fault}{more}", code="bad_files", hint=hint)


# Listing


def list_files(path: Path, labels: Path | str | None = None) -> tuple[str, list[str], list[str]]:
    """Kind of the sequences, their files as paths with /, sorted, and notes; hidden files and folders are left out."""
    if not path.is_dir():
        return _list_file(path)
    others = {LABELS} | ({Path(labels).name} if labels is not None else set())
    of_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for folder, files in _walk(path):
        below = "" if folder == str(path) else os.path.relpath(folder, path).replace(os.sep, "/") + "/"
        for name in files:
            suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122  millions of names
            kind = _KIND_OF.get(suffix)
            if kind is not None and not name.startswith(".") and name not in others:
                of_kind[kind].append(below + name)
    kind = next((kind for kind, names in of_kind.items() if names), None)
    if kind is None:
        raise DatasetError(f"{path} holds no .npy file and no other sequence; {EXPECTED}")
    ignored = {name: names for name, names in of_kind.items() if names and name != kind}
    if kind == "ts":
        ignored = {name: names for name, names in ignored.items() if name not in _ARCHIVES}  # the same data again
    notes = [f"{len(names)} {', '.join(KINDS[name])} files are ignored" for name, names in ignored.items()]
    names = of_kind[kind]
    if kind in _ARCHIVES:
        names, more = _choose_problem(path, names)
        notes += more
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # undecodable bytes, which JSON cannot hold
            raise DatasetError(f"{path}: the file name {name!a} is not UTF-8; rename it")
    return kind, sorted(names), notes


_KIND_OF = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}


def _list_file(path: Path) -> tuple[str, list[str], list[str]]:
    """A single file; of an archive, the other part of its split too."""
    kind = _KIND_OF.get(path.suffix.lower())
    if not path.exists():
        raise DatasetError(f"{path} is not a directory and not a file; {EXPECTED}")
    if kind is None or not path.is_file():
        raise DatasetError(f"{path} is not a directory; {EXPECTED}")
    if kind not in _ARCHIVES:
        return kind, [path.name], []
    problem, split = archives.problem_of(path)
    if not split:
        return kind, [path.name], []
    both = [
        file.name
        for file in sorted(path.parent.iterdir())
        if file.suffix.lower() == path.suffix.lower()
        and archives.problem_of(file) in ((problem, "train"), (problem, "test"))
    ]
    notes = [f"{', '.join(name for name in both if name != path.name)} is the other part"] if len(both) > 1 else []
    return kind, both, notes


def _choose_problem(path: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The files of one problem: the only one, or that with the folder's name."""
    problems: dict[str, list[str]] = {}
    for name in names:
        problem, _ = archives.problem_of(Path(name))
        problems.setdefault(problem, []).append(name)
    if len(problems) == 1:
        return names, []
    own = path.resolve().name
    if own not in problems:
        shown = ", ".join(sorted(problems)[:4])
        raise DatasetError(
            f"{path} holds {len(problems)} problems: {shown}",
            hint=f"give one of its files, such as {path / sorted(names)[0]}",
        )
    return problems[own], [f"{own} is used, not the {len(problems) - 1} other problems beside it"]


def _walk(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders and the file names in them; links are followed, but not in circles."""
    ancestors: dict[str, set[str]] = {str(path): {os.path.realpath(path)}}  # folder → real paths from the top to it

    def unreadable(failure: OSError) -> None:
        reason = failure.strerror or failure
        raise StorageError(f"{failure.filename} cannot be read: {reason}; check its permissions") from failure

    for folder, folders, files in os.walk(path, onerror=unreadable, followlinks=True):
        above = ancestors.pop(folder)
        inner = {name: str(Path(folder) / name) for name in folders if not name.startswith(".")}
        real = {name: os.path.realpath(below) for name, below in inner.items()}
        folders[:] = [name for name in inner if real[name] not in above]
        ancestors |= {os.path.join(folder, name): above | {real[name]} for name in folders}  # noqa: PTH118  as os.walk does
        yield folder, files


# Kinds


def _survey_npy(folder: Path, names: list[str], source: SourceConfig) -> _Content:
    chunks = (names[start : start + _CHUNK_FILES] for start in range(0, len(names), _CHUNK_FILES))

    def read(chunk: list[str]) -> dict[str, NpyFile | str]:
        return {name: read_header(folder / name, name) for name in chunk}

    headers: dict[str, NpyFile | str] = {}
    with Pipeline(chunks, [Stage(name="header", work=read, workers=_HEADER_READERS)]) as results:
        for result in results:
            headers |= result
    files = [file for file in headers.values() if isinstance(file, NpyFile)]
    content = _Content()
    content.bad = [Skipped(file=name, fault=fault) for name, fault in headers.items() if isinstance(fault, str)]
    if _is_transposed(files, source):
        content.notes.append(
            f"files are read as (features, frames): all have {files[0].length} rows, and different numbers of columns"
        )
        files = [file.transposed() for file in files]
    elif source.layout == "auto" and len(files) >= _MIN_ALIKE and len({(file.length, file.dim) for file in files}) == 1:
        length, dim = files[0].length, files[0].dim
        if length < dim and files[0].layers == 1:
            content.notes.append(
                f"all files are read as {length} frames of {dim} features; if that is the wrong way round, pack them "
                "with layout features-first"
            )
    content.files = list(files)
    return content


def _is_transposed(files: list[NpyFile], source: SourceConfig) -> bool:
    """Whether files are (D, T): one number of rows, and numbers of columns of which none is that of most files."""
    if source.layout != "auto":
        return source.layout == "features-first"
    if len(files) < _MIN_ALIKE or len({file.length for file in files}) > 1 or files[0].layers > 1:
        return False
    columns = Counter(file.dim for file in files)
    return len(columns) > 1 and columns.most_common(1)[0][1] <= len(files) / 2


def _survey_archive(folder: Path, names: list[str], source: SourceConfig) -> _Content:
    content, num_padded = _Content(), 0
    for name in names:
        file, (_, split) = folder / name, archives.problem_of(Path(name))
        archive = archives.read_archive(file)
        num_padded += archive.num_padded
        mtime_ns = file.stat().st_mtime_ns
        for number, (frames, label, line) in enumerate(archive.sequences, 1):
            one = f"{name}/{number:06d}"
            content.own[one] = SequenceLabel(name=label, split=split)
            if isinstance(frames, str):
                content.bad.append(Skipped(file=one, fault=f"(line {line}) {frames}"))
            else:
                content.files.append(_decoded(one, file, frames, mtime_ns))
    if num_padded:
        content.notes.append(f"{num_padded} sequences end in missing values, which were cut off as padding")
    if content.own and len({label.split for label in content.own.values()}) == 1:  # one part alone divides nothing
        content.own = {one: replace(label, split="") for one, label in content.own.items()}
    return content


def _survey_tables(folder: Path, names: list[str], source: SourceConfig) -> _Content:
    content, kept_bytes = _Content(), 0
    for name in names:
        file = folder / name
        mtime_ns = file.stat().st_mtime_ns
        try:
            parsed = _parse(file, source)
        except DatasetError as failure:
            if len(names) == 1:
                raise
            content.bad.append(Skipped(file=name, fault=f"cannot be used: {failure}"))
            content.own[name] = SequenceLabel()
            continue
        for place, one in enumerate(parsed):
            key = f"{name}/{one.name}" if one.name else name
            fault = one.frames if isinstance(one.frames, str) else _fault(one.frames)
            content.own[key] = _label(one.about)
            if fault or isinstance(one.frames, str):
                content.bad.append(Skipped(file=key, fault=fault))
                continue
            kept_bytes += one.frames.nbytes
            keep = kept_bytes <= _KEPT_BYTES or len(names) == 1
            content.files.append(_decoded(key, file, one.frames, mtime_ns, None if keep else (place, source)))
    return content


def _parse(file: Path, source: SourceConfig) -> list[TableSequence]:
    suffix = file.suffix.lower()
    if suffix == ".npz":
        return read_npz(file, str(file))
    return read_table(file, str(file), suffix, source.id_column, source.time_column)


def _fault(frames: Frames) -> str:
    if frames.ndim != 2 or min(frames.shape) < 1:
        return f"has shape {list(frames.shape)}, expected [frames, features]"
    return "" if frames.dtype.kind in "fiub" else f"holds {frames.dtype}, expected numbers"


def _label(about: dict[str, str]) -> SequenceLabel:
    more = dict(about)
    name, split = more.pop("label", ""), more.pop("split", "")
    return SequenceLabel(name=name, split=normal_split(split), more=more)


def _decoded(
    id: str, file: Path, frames: Frames, mtime_ns: int, again: tuple[int, SourceConfig] | None = None
) -> DecodedSequence:
    """A sequence that keeps its frames, or parses its file again."""
    load = partial(_same, frames) if again is None else partial(_parse_again, file, *again)
    length, dim = frames.shape
    return DecodedSequence(id=id, path=file, length=length, dim=dim, size=frames.nbytes, mtime_ns=mtime_ns, load=load)


def _same(frames: Frames) -> Frames | str:
    return frames


def _parse_again(file: Path, place: int, source: SourceConfig) -> Frames | str:
    try:
        return _parse(file, source)[place].frames
    except (DatasetError, IndexError, OSError) as failure:
        return f"changed while it was being packed ({failure})"


def _survey_audio(folder: Path, names: list[str], source: SourceConfig) -> _Content:
    content = _Content()
    for one in audio.read_headers(folder, names, source):
        if isinstance(one, Skipped):
            content.bad.append(one)
        else:
            content.files.append(one)
    content.notes += audio.describe(content.files, source)
    return content


_PARSERS = {
    **dict.fromkeys(_ARCHIVES, _survey_archive), "npz": _survey_tables, "parquet": _survey_tables,
    "csv": _survey_tables, "audio": _survey_audio,
}  # fmt: skip
