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
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from brim.engine.device import guard, worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.storage import MANIFEST, Dataset, ShardWriter
from brim.errors import ConfigError, DatasetError
from brim.sequences.corpus.folder import FolderSurvey, Skipped, bad_files, survey
from brim.sequences.corpus.labels import number_classes
from brim.sequences.corpus.npy import CHUNK_VALUES, STORED, FrameReader, NpyFile
from brim.sequences.corpus.packed import FRAMES, KIND, TABLE, Corpus, read_skipped, write_items

_Result = TypeVar("_Result")

SHARD_BYTES = 64 << 20
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def pack(
    folder: Path | str,
    out: Path | str,
    *,
    labels: Path | str | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    skip_bad: bool = False,
    resume: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[PackProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> PackReport:
    """Pack the .npy sequences below a folder, each (T, D) with one D, into a corpus.

    `labels` is a CSV file with the header file,label[,split]; without one, labels.csv in the folder or the
    sub-folders are used. Bad files are an error, and nothing is left behind, unless `skip_bad` leaves them out.
    `resume` continues a corpus that was stopped or killed, and gives the same bytes. `progress` is called at least
    once a second, from the caller's thread; `stop` is called between chunks.
    """
    if dtype not in STORED:
        raise ConfigError(f"must be one of {', '.join(STORED)}", field="dtype", value=dtype, code="unknown_choice")
    if shard_bytes < 1:
        raise ConfigError("must be above 0", field="shard_bytes", value=shard_bytes, code="out_of_range")
    packing = _Packing(Path(folder), Path(out), dtype, skip_bad, shard_bytes, progress)
    return packing.execute(labels, resume, stop)


class _Packing:
    """The state of one call of pack."""

    def __init__(
        self,
        path: Path,
        out: Path,
        dtype: str,
        skip_bad: bool,
        shard_bytes: int,
        progress: Callable[[PackProgress], None] | None,
    ) -> None:
        self.path, self.out, self.dtype, self.skip_bad, self.shard_bytes = path, out, dtype, skip_bad, shard_bytes
        self.progress = progress
        self.began_s = time.perf_counter()
        self.message, self.done_bytes, self.total_bytes, self.packed_bytes = "reading headers", 0, 0, 0
        self.folder: FolderSurvey
        self.writer: ShardWriter
        self.skipped: list[list[str]] = []  # as the manifest lists them at every commit: a resume needs them
        self.bad: list[Skipped] = []  # those of them that this call found while reading frames
        self.is_complete = self.is_rejected = False

    def execute(self, labels: Path | str | None, resume: bool, stop: Callable[[], bool] | None) -> PackReport:
        """Check everything, write what is missing, and report."""
        begun = (self.out / MANIFEST).is_file()
        if begun and not resume:
            raise DatasetError(
                f"{self.out} is not empty", code="occupied", hint="add {resume} to continue it or choose another {out}"
            )
        self.folder = self._run_in_thread("reading headers", lambda: survey(self.path, labels, skip_bad=self.skip_bad))
        if not (begun and self._is_finished()):
            missing = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
            try:
                self._make(resume, stop)
            finally:
                if self.is_rejected:  # it can never become complete
                    _discard(self.out, missing)
        return self._report()

    # Opening

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "dim": self.folder.dim,
            "dtype": self.dtype,
            "skip_bad": self.skip_bad,
            "source": self.folder.fingerprint,
        }

    def _is_finished(self) -> bool:
        """Whether the corpus is packed already, and verified; raises if it began with another folder or settings."""
        manifest = Dataset(self.out).manifest
        self._compare(manifest)
        self.skipped = [[skipped.file, skipped.fault] for skipped in read_skipped(self.out, manifest)]
        if not manifest["complete"]:
            return False
        corpus = Corpus.open(self.out)
        self._run_in_thread("verifying", corpus.verify)
        self.is_complete = True
        return True

    def _compare(self, manifest: dict[str, Any]) -> None:
        """Raise DatasetError if the corpus was begun from another folder or with other settings."""
        if manifest.get("kind") != KIND:
            raise DatasetError(
                f"{self.out} is not a corpus but of kind {manifest.get('kind')!r}", hint="choose another {out}"
            )
        now, then = self.folder.fingerprint, manifest.get("source")
        if now != then:
            raise DatasetError(
                f"{self.path} has changed since {self.out} was begun: {_summary(then)} then, {_summary(now)} now",
                code="changed",
                hint="pack it again into another {out}",
            )
        for key, value in {**self._identity(), "items_per_shard": self._frames_per_shard()}.items():
            if manifest.get(key) != value:
                raise DatasetError(
                    f"{self.out} was begun with {key}={manifest.get(key)!r}, now it is {value!r}",
                    code="conflict",
                    hint="use the same settings, or another {out}",
                )

    def _frames_per_shard(self) -> int:
        return max(1, self.shard_bytes // (self.folder.dim * STORED[self.dtype].itemsize))

    def _writer(self, resume: bool) -> ShardWriter:
        self.skipped = self.skipped or [[skipped.file, skipped.fault] for skipped in self.folder.bad]
        identity = self._identity()
        header = {**identity, "skipped": self.skipped}
        per_shard = self._frames_per_shard()
        return ShardWriter(self.out, header, items_per_shard=per_shard, identity=tuple(identity), resume=resume)

    def _files(self) -> list[NpyFile]:
        """The files not known to be bad so far."""
        known = {file for file, _ in self.skipped}
        return [file for file in self.folder.files if file.id not in known]

    # Running

    def _make(self, resume: bool, stop: Callable[[], bool] | None) -> None:
        with ExitStack() as stack:
            writer = self._writer(resume)
            self.writer = self._run_in_thread("opening", lambda: stack.enter_context(writer))
            try:
                self._run(stop)
            except DatasetError:
                self.is_rejected = True
                raise

    def _run(self, stop: Callable[[], bool] | None) -> None:
        stages: list[Stage[Any, Any]] = [
            Stage(name="read", work=self._read, workers=min(_READERS, worker_count())),
            Stage(name="write", work=self._write, depth=1),
        ]
        files = self._files()
        self.total_bytes = sum(file.nbytes for file in files)
        chunks = plan_chunks(files, self.writer.items)
        self.done_bytes = bytes_before(files, self.writer.items)
        self.message = "packing"
        with Pipeline(_and_end(chunks), stages, source_name="plan", tick=self._tick) as results:
            for _ in results:
                self._tick()
                if not self.is_complete and stop is not None and stop():
                    break
        if self.bad and not self.skip_bad:
            raise bad_files(self.path, self.bad)

    def _read(self, chunk: "_Chunk | None") -> "_ChunkFrames | None":
        return None if chunk is None else _read_chunk(chunk, STORED[self.dtype])

    def _write(self, read: "_ChunkFrames | None") -> None:
        """Append the frames; after a bad file that may not be skipped, only look for further bad ones."""
        if read is None:
            if self.skip_bad or not self.bad:
                self._finish()
            return
        name = read.chunk.parts[0].file.id
        if read.chunk.is_piece and any(skipped.file == name for skipped in self.bad):
            return
        if read.chunk.is_piece and read.faults:
            raise DatasetError(f"{self.path / name} {read.faults[0].fault}, and was good when checked; pack it again")
        for fault in read.faults:
            self.bad.append(fault)
            self.skipped.append([fault.file, fault.fault])  # before frames of later files are listed
        if len(read.frames) and (self.skip_bad or not self.bad):
            self._append(read.frames)
        self.packed_bytes += read.chunk.nbytes
        self.done_bytes += read.chunk.nbytes

    def _append(self, frames: Tensor) -> None:
        step = max(1, CHUNK_VALUES // self.folder.dim)
        for first in range(0, len(frames), step):
            self.writer.append({FRAMES: frames[first : first + step]}, {})

    def _finish(self) -> None:
        self.message = "finishing"
        files = self._files()
        if not files:
            raise bad_files(self.path, self.bad, any_left=False)
        table = write_items(self.out, self._columns(files))
        self.writer.finish(sequences=len(files), table=table)
        self.is_complete = True

    def _columns(self, files: list[NpyFile]) -> dict[str, Any]:
        labels = [self.folder.labels.of[file.id] for file in files]
        lengths = [file.length for file in files]
        classes, numbers = number_classes([label.name for label in labels])
        return {
            "ids": [file.id for file in files],
            "starts": list(accumulate(lengths, initial=0))[:-1],
            "lengths": lengths,
            "labels": numbers,
            "split": [label.split for label in labels],
            "classes": classes,
        }

    # Progress and report

    def _tick(self) -> None:
        if self.progress is None:
            return
        rate = self.packed_bytes / max(time.perf_counter() - self.began_s, 1e-9)
        self.progress(
            PackProgress(
                message=self.message,
                done_bytes=self.done_bytes,
                total_bytes=self.total_bytes,
                bytes_per_s=rate,
                eta_s=(self.total_bytes - self.done_bytes) / rate if rate else float("inf"),
            )
        )

    def _run_in_thread(self, message: str, work: Callable[[], _Result]) -> _Result:
        """Run something long in a thread while this one reports progress."""
        self.message = message
        with Pipeline([None], [Stage(name="work", work=lambda _: work())], tick=self._tick) as results:
            result: _Result = next(results)
            return result

    def _report(self) -> PackReport:
        dataset = Dataset(self.out)
        frames, seconds = len(dataset), time.perf_counter() - self.began_s
        ends = accumulate(file.length for file in self._files())
        whole = [file for file, end in zip(self._files(), ends, strict=True) if end <= frames]
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
            source_bytes=self.packed_bytes,
            seconds=seconds,
            bytes_per_s=self.packed_bytes / seconds,
        )


def _and_end(chunks: "Iterator[_Chunk]") -> "Iterator[_Chunk | None]":
    """The chunks, then None for the end: finishing syncs, and progress is reported meanwhile."""
    yield from chunks
    yield None


def _summary(source: Any) -> str:
    if not isinstance(source, dict):
        return "something else"
    return f"{source.get('files')} files of {source.get('bytes')} bytes, {str(source.get('sha256'))[:8]}"


_OURS = re.compile(r"[0-9]{6}\.safetensors|\.[0-9]{6}\.tmp")


def _discard(out: Path, missing: list[Path]) -> None:
    """Remove a rejected corpus, its manifest first; files that are not ours stay, and their folders."""
    with suppress(OSError):
        for name in (MANIFEST, f".{MANIFEST}.tmp", TABLE, f".{TABLE}.tmp"):
            (out / name).unlink(missing_ok=True)
        for file in (out / "shards").iterdir():
            if _OURS.fullmatch(file.name):
                file.unlink()
        for folder in (out / "shards", *missing):
            folder.rmdir()


# Chunks


@dataclass(frozen=True, slots=True)
class _FileFrames:
    """Neighbouring frames of one file."""

    file: NpyFile
    first: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.first) * self.file.row_bytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Whole files, or the check of a long file, or a piece of a long file that an earlier chunk has checked."""

    parts: tuple[_FileFrames, ...]
    is_check: bool = False  # read and keep nothing
    is_piece: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that it packs; a check packs none."""
        return 0 if self.is_check else sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class _ChunkFrames:
    """Frames of a chunk's good files, (n, D), and the faults of the others."""

    chunk: _Chunk
    frames: Tensor
    faults: list[Skipped]


def plan_chunks(files: Sequence[NpyFile], first_frame: int) -> Iterator[_Chunk]:
    """Chunks with the frames of the files, in order, beginning with frame first_frame of all of them."""
    waiting: list[_FileFrames] = []
    waiting_bytes = 0
    for file in files:
        first = min(first_frame, file.length)
        first_frame -= first
        part = _FileFrames(file, first, file.length)
        if waiting and waiting_bytes + part.nbytes > CHUNK_BYTES:
            yield _Chunk(tuple(waiting))
            waiting, waiting_bytes = [], 0
        if file.nbytes > CHUNK_BYTES:
            yield from _split(file, first)
        elif first < file.length:
            waiting.append(part)
            waiting_bytes += part.nbytes
    if waiting:
        yield _Chunk(tuple(waiting))


def bytes_before(files: Sequence[NpyFile], first_frame: int) -> int:
    """Bytes of the frames before first_frame in their files."""
    total = 0
    for file in files:
        if first_frame <= 0:
            break
        total += min(first_frame, file.length) * file.row_bytes
        first_frame -= file.length
    return total


def _split(file: NpyFile, first: int) -> Iterator[_Chunk]:
    if first == 0:  # otherwise some of its frames are stored, so it has been checked
        yield _Chunk((_FileFrames(file, 0, file.length),), is_check=True)
    step = max(1, CHUNK_BYTES // file.row_bytes)
    for start in range(first, file.length, step):
        yield _Chunk((_FileFrames(file, start, min(start + step, file.length)),), is_piece=True)


def _read_chunk(chunk: _Chunk, dtype: torch.dtype) -> _ChunkFrames:
    """Read, check and convert; a bad file contributes no frame."""
    dim = chunk.parts[0].file.dim
    faults: list[Skipped] = []
    if chunk.is_check:
        file = chunk.parts[0].file
        fault = FrameReader(file).check(dtype)
        return _ChunkFrames(
            chunk, torch.empty(0, dim, dtype=dtype), [Skipped(file=file.id, fault=fault)] if fault else []
        )
    with guard():
        out = torch.empty(sum(part.stop - part.first for part in chunk.parts), dim, dtype=dtype)
    filled = 0
    for part in chunk.parts:
        num = part.stop - part.first
        fault = FrameReader(part.file).read(part.first, out[filled : filled + num])
        if fault:
            faults.append(Skipped(file=part.file.id, fault=fault))
        else:
            filled += num
    return _ChunkFrames(chunk, out[:filled], faults)
