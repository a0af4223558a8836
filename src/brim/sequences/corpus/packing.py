"""Packing: a folder of .npy sequences becomes a corpus; killed at any point, it continues where it was.

    chunks of files ──▶ read, check, convert (a thread per core) ──▶ append to shards (one thread) ──▶ progress

All headers are checked before anything is written, and all frames of a file before any of them is appended. The
table of sequences is written last, then the manifest that says the corpus is complete.

A chunk is at most CHUNK_BYTES of neighbouring files. A longer file is read twice, first to check all of it, then piece
by piece, so that memory does not grow with it.
"""

# Axes: T frames, D features

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from brim.engine.device import guard, worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.storage import MANIFEST, Dataset, ShardWriter
from brim.errors import ConfigError, DatasetError
from brim.sequences.config import SourceConfig
from brim.sequences.corpus.audio import AudioFile
from brim.sequences.corpus.labels import merge_columns, number_classes
from brim.sequences.corpus.npy import CHUNK_VALUES
from brim.sequences.corpus.packed import FRAMES, KIND, Corpus, read_skipped, write_items
from brim.sequences.corpus.source import STORED, SequencePart, SequenceSource, Skipped
from brim.sequences.corpus.survey import FolderSurvey, bad_files, survey

_Result = TypeVar("_Result")

SHARD_BYTES = 64 << 20
SMALL_VALUES = 1 << 26  # of a corpus that has room for float32, which some data needs
CHUNK_BYTES = 8 << 20  # of source: amortises hand-overs, and a few of them in flight need little memory
_READERS = 4  # at most; more would only wait for the writer


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """Progress of packing; bytes are those of the frames in the source files."""

    message: str  # reading headers, opening, verifying, packing, finishing
    done_bytes: int
    total_bytes: int  # 0 until the headers are read
    bytes_per_s: float
    eta_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    path: str
    complete: bool  # False when stopped: continue with resume
    items: int  # sequences stored whole
    frames: int
    dim: int
    dtype: str
    bytes: int  # of the shards
    labelled: int  # sequences with a label
    classes: tuple[str, ...]
    labels_from: str  # "folders", "none" or the CSV file
    skipped: tuple[Skipped, ...]
    source_bytes: int  # read and packed by this call
    seconds: float  # of this call, from the first header to the last sync
    bytes_per_s: float  # source_bytes / seconds
    notes: tuple[str, ...] = ()  # what was recognised or noticed, in words

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def pack(
    folder: Path | str,
    out: Path | str,
    *,
    labels: Path | str | None = None,
    label: str | None = None,
    dtype: Literal["auto", "float16", "float32"] = "auto",
    source: SourceConfig | None = None,
    skip_bad: bool = False,
    resume: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[PackProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> PackReport:
    """Pack the sequences of a folder or file, each (T, D) with one D, into a corpus.

    survey.py says which files are read, and `source` how. dtype "auto" is float32 for up to 2²⁶
    values, and above that float16 for .npy and audio.
    `labels` is a CSV file with the columns file, label, and split or others; without one, labels.csv in the folder or
    the sub-folders are used. `label` names the column that is the label, if it is not called so. Bad files are an
    error, and nothing is left behind, unless `skip_bad` leaves them out.
    `resume` continues a corpus that was stopped or killed, and gives the same bytes. `progress` is called at least
    once a second, from the caller's thread; `stop` is called between chunks.
    """
    if dtype not in ("auto", *STORED):
        raise ConfigError(
            f"must be one of auto, {', '.join(STORED)}", field="dtype", value=dtype, code="unknown_choice"
        )
    if shard_bytes < 1:
        raise ConfigError("must be above 0", field="shard_bytes", value=shard_bytes, code="out_of_range")
    path, out, state = Path(folder), Path(out), _Progress(progress)
    begun = (out / MANIFEST).is_file()
    if begun and not resume:
        raise DatasetError(
            f"{out} is not empty", code="occupied", hint="add {resume} to continue it or choose another {out}"
        )
    content = state.run("reading headers", lambda: survey(path, labels, label=label, skip_bad=skip_bad, source=source))
    stored: str = dtype
    if dtype == "auto":
        is_small = sum(file.length * file.dim for file in content.files) <= SMALL_VALUES
        stored = "float32" if is_small or content.kind not in ("npy", "audio") else "float16"
        if begun and (known := Dataset(out).manifest.get("dtype")) in STORED:
            stored = str(known)
    skip_bad = skip_bad or content.kind == "audio"
    packing = _Packing(content, out, stored, skip_bad, state)
    identity = _identity(content, stored, skip_bad, source)
    per_shard = max(1, shard_bytes // (content.dim * STORED[stored].itemsize))
    if begun:
        manifest = Dataset(out).manifest
        _compare(manifest, {**identity, "items_per_shard": per_shard}, path, out)
        known = [[skipped.file, skipped.fault] for skipped in read_skipped(out, manifest)]
        packing.skipped = known or packing.skipped
        if manifest["complete"]:
            state.run("verifying", Corpus.open(out).verify)
            packing.is_complete = True
    if not packing.is_complete:
        missing = [parent for parent in (out, *out.parents) if not parent.exists()]
        header, is_rejected = {**identity, "skipped": packing.skipped}, False
        writer = ShardWriter(out, header, items_per_shard=per_shard, identity=tuple(identity), resume=resume)
        try:
            with ExitStack() as stack:
                state.run("opening", lambda: stack.enter_context(writer))
                try:
                    packing.run(writer, stop)
                except DatasetError:
                    is_rejected = True
                    raise
        finally:
            if is_rejected:  # it can never become complete
                _discard(out, missing)
    return packing.report()


def _identity(content: FolderSurvey, stored: str, skip_bad: bool, source: SourceConfig | None) -> dict[str, Any]:
    """What must be the same when packing is resumed."""
    identity: dict[str, Any] = {
        "kind": KIND, "dim": content.dim, "dtype": stored, "skip_bad": skip_bad, "source": content.fingerprint,
    }  # fmt: skip
    if content.layers > 1:
        identity["layers"] = content.layers
    if content.kind == "audio":
        settings = asdict(source or SourceConfig())
        identity["audio"] = {name: value for name, value in settings.items() if name != "device"}
    return identity


class _Progress:
    """What is being done and how far it is, reported while threads work."""

    def __init__(self, call: Callable[[PackProgress], None] | None) -> None:
        self.call, self.began_s = call, time.perf_counter()
        self.message, self.done_bytes, self.total_bytes = "reading headers", 0, 0
        self.packed_bytes = 0  # by this call

    def tick(self) -> None:
        if self.call is not None:
            rate = self.packed_bytes / max(time.perf_counter() - self.began_s, 1e-9)
            eta_s = (self.total_bytes - self.done_bytes) / rate if rate else float("inf")
            self.call(
                PackProgress(
                    message=self.message, done_bytes=self.done_bytes, total_bytes=self.total_bytes,
                    bytes_per_s=rate, eta_s=eta_s,
                )
            )  # fmt: skip

    def run(self, message: str, work: Callable[[], _Result]) -> _Result:
        """Run something long in a thread while this one reports progress."""
        self.message = message
        with Pipeline([None], [Stage(name="work", work=lambda _: work())], tick=self.tick) as results:
            result: _Result = next(results)
            return result


class _Packing:
    """The frames of a folder on their way into a corpus."""

    writer: ShardWriter

    def __init__(self, folder: FolderSurvey, out: Path, dtype: str, skip_bad: bool, progress: _Progress) -> None:
        self.folder, self.out, self.dtype, self.skip_bad, self.progress = folder, out, dtype, skip_bad, progress
        # as the manifest lists them at every commit: a resume needs them
        self.skipped = [[skipped.file, skipped.fault] for skipped in folder.bad]
        self.bad: list[Skipped] = []  # those of them that this call found while reading frames
        self.is_complete = False

    def files(self) -> list[SequenceSource]:
        """The files not known to be bad so far."""
        known = {file for file, _ in self.skipped}
        return [file for file in self.folder.files if file.id not in known]

    def run(self, writer: ShardWriter, stop: Callable[[], bool] | None) -> None:
        """Write what is missing, until done or stopped."""
        self.writer, progress, files = writer, self.progress, self.files()
        progress.message, progress.total_bytes = "packing", sum(file.nbytes for file in files)
        progress.done_bytes = bytes_before(files, writer.items)
        stored = STORED[self.dtype]
        stages: list[Stage[Any, Any]] = [
            Stage(
                name="read",
                work=lambda chunk: chunk and _read_chunk(chunk, stored),
                workers=min(_READERS, worker_count()),
            ),
            Stage(name="write", work=self._write, depth=1),
        ]
        # None is the end: finishing syncs, and progress is reported meanwhile
        chunks = chain(plan_chunks(files, writer.items), [None])
        with Pipeline(chunks, stages, source_name="plan", tick=progress.tick) as results:
            for _ in results:
                progress.tick()
                if not self.is_complete and stop is not None and stop():
                    break
        if self.bad and not self.skip_bad:
            raise bad_files(self.folder.path, self.bad)

    def _write(self, read: "_ChunkFrames | None") -> None:
        """Append the frames; after a bad file that may not be skipped, only look for further bad ones."""
        if read is None:
            if self.skip_bad or not self.bad:
                self._finish()
            return
        name = read.chunk.parts[0].source.id
        if read.chunk.is_piece and any(skipped.file == name for skipped in self.bad):
            return
        if read.chunk.is_piece and read.faults:
            reason = read.faults[0].fault
            raise DatasetError(f"{self.folder.path / name} {reason}, and was good when checked; pack it again")
        for fault in read.faults:
            self.bad.append(fault)
            self.skipped.append([fault.file, fault.fault])  # before frames of later files are listed
        if len(read.frames) and (self.skip_bad or not self.bad):
            for frames in torch.split(read.frames, max(1, CHUNK_VALUES // self.folder.dim)):
                self.writer.append({FRAMES: frames}, {})
        self.progress.packed_bytes += read.chunk.nbytes
        self.progress.done_bytes += read.chunk.nbytes

    def _finish(self) -> None:
        self.progress.message = "finishing"
        files = self.files()
        if not files:
            raise bad_files(self.folder.path, self.bad, any_left=False)
        labels = [self.folder.labels.of[file.id] for file in files]
        lengths = [file.length for file in files]
        classes, numbers = number_classes([label.name for label in labels])
        columns = {
            "ids": [file.id for file in files],
            "starts": list(accumulate(lengths, initial=0))[:-1],
            "lengths": lengths,
            "labels": numbers,
            "split": [label.split for label in labels],
            "classes": classes,
            "columns": merge_columns(labels),
            "label_column": self.folder.labels.column,
        }
        self.writer.finish(sequences=len(files), table=write_items(self.out, columns))
        self.is_complete = True

    def report(self) -> PackReport:
        dataset, packed_bytes = Dataset(self.out), self.progress.packed_bytes
        frames, seconds = len(dataset), time.perf_counter() - self.progress.began_s
        files = self.files()
        whole = [file for file, end in zip(files, accumulate(f.length for f in files), strict=True) if end <= frames]
        names = [self.folder.labels.of[file.id].name for file in whole]
        return PackReport(
            path=str(self.out),
            complete=self.is_complete,
            items=len(whole),
            frames=frames,
            dim=self.folder.dim,
            dtype=self.dtype,
            bytes=sum(entry.bytes for entry in dataset.shards),
            labelled=sum(bool(name) for name in names),
            classes=number_classes(names)[0],
            labels_from=self.folder.labels.source,
            skipped=tuple(Skipped(file=file, fault=fault) for file, fault in self.skipped),
            source_bytes=packed_bytes,
            seconds=seconds,
            bytes_per_s=packed_bytes / seconds,
            notes=(*self.folder.notes, *_remarks(self.folder)),
        )


def _remarks(folder: FolderSurvey) -> list[str]:
    """What was noticed while audio was decoded; every file shares the same remarks."""
    first = next((file for file in folder.files if isinstance(file, AudioFile)), None)
    return [] if first is None else [f"{file} {remark}" for file, remark in sorted(first.remarks.items())]


def _compare(manifest: dict[str, Any], now: dict[str, Any], path: Path, out: Path) -> None:
    """Raise DatasetError if the corpus was begun from another folder or with other settings."""
    if manifest.get("kind") != KIND:
        raise DatasetError(f"{out} is not a corpus but of kind {manifest.get('kind')!r}", hint="choose another {out}")
    if manifest.get("source") != now["source"]:
        then = _summary(manifest.get("source"))
        raise DatasetError(
            f"{path} has changed since {out} was begun: {then} then, {_summary(now['source'])} now",
            code="changed",
            hint="pack it again into another {out}",
        )
    for key, value in now.items():
        if manifest.get(key) != value:
            raise DatasetError(
                f"{out} was begun with {key}={manifest.get(key)!r}, now it is {value!r}",
                code="conflict",
                hint="use the same settings, or another {out}",
            )


def _summary(source: Any) -> str:
    if not isinstance(source, dict):
        return "something else"
    return f"{source.get('files')} files of {source.get('bytes')} bytes, {str(source.get('sha256'))[:8]}"


_OURS = re.compile(r"[0-9]{6}\.safetensors|\.[0-9]{6}\.tmp|\.?(manifest|items)\.json(\.[0-9a-f]+)?(\.tmp)?")


def _discard(out: Path, missing: list[Path]) -> None:
    """Remove a rejected corpus, its manifest first; files that are not ours stay, and their folders."""
    with suppress(OSError):
        (out / MANIFEST).unlink(missing_ok=True)
        for file in (*out.iterdir(), *(out / "shards").iterdir()):
            if _OURS.fullmatch(file.name):
                file.unlink()
        for folder in (out / "shards", *missing):
            folder.rmdir()


# Chunks


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Whole files, or the check of a long file, or a piece of a long file that an earlier chunk has checked."""

    parts: tuple[SequencePart, ...]
    is_check: bool = False  # read and keep nothing
    is_piece: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that it packs; a check packs none."""
        return 0 if self.is_check else sum(part.nbytes for part in self.parts)


class _ChunkFrames(NamedTuple):
    chunk: _Chunk
    frames: Tensor  # (n, D) of its good files
    faults: list[Skipped]  # of the others


def plan_chunks(files: Sequence[SequenceSource], first_frame: int) -> Iterator[_Chunk]:
    """Chunks with the frames of the files, in order, beginning with frame first_frame of all of them."""
    waiting: list[SequencePart] = []
    waiting_bytes = 0
    for file in files:
        first = min(first_frame, file.length)
        first_frame -= first
        part = SequencePart(file, first, file.length)
        if waiting and waiting_bytes + part.nbytes > CHUNK_BYTES:
            yield _Chunk(tuple(waiting))
            waiting, waiting_bytes = [], 0
        if file.in_pieces and file.nbytes > CHUNK_BYTES:
            if first == 0:  # otherwise some of its frames are stored, so it has been checked
                yield _Chunk((part,), is_check=True)
            step = max(1, CHUNK_BYTES // file.row_bytes)
            for start in range(first, file.length, step):
                piece = SequencePart(file, start, min(start + step, file.length))
                yield _Chunk((piece,), is_piece=True)
        elif first < file.length:
            waiting.append(part)
            waiting_bytes += part.nbytes
    if waiting:
        yield _Chunk(tuple(waiting))


def bytes_before(files: Sequence[SequenceSource], first_frame: int) -> int:
    """Bytes of the frames before first_frame in their files."""
    total = 0
    for file in files:
        if first_frame <= 0:
            break
        total += min(first_frame, file.length) * file.row_bytes
        first_frame -= file.length
    return total


def _read_chunk(chunk: _Chunk, dtype: torch.dtype) -> _ChunkFrames:
    """Read, check and convert; a bad file contributes no frame."""
    skipped: list[Skipped] = []
    num = 0 if chunk.is_check else sum(part.stop - part.first for part in chunk.parts)
    with guard():
        out = torch.empty(num, chunk.parts[0].source.dim, dtype=dtype)
    if chunk.is_check:
        faults = [part.source.check(dtype) for part in chunk.parts]
    else:
        outs = list(torch.split(out, [part.stop - part.first for part in chunk.parts]))
        faults = type(chunk.parts[0].source).read_all(chunk.parts, outs)
        if any(faults):
            out = torch.cat([rows for rows, fault in zip(outs, faults, strict=True) if not fault] or [out[:0]])
    for part, fault in zip(chunk.parts, faults, strict=True):
        if fault:
            skipped.append(Skipped(file=part.source.id, fault=fault))
    return _ChunkFrames(chunk, out, skipped)
