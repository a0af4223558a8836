"""Packing: a folder of .npy sequences in, a corpus out; killed at any point it goes on where it was.

    jobs ──▶ read, check, convert (a thread per core) ──▶ append to shards (one thread) ──▶ the caller, who is told

All headers are checked before anything is written, and all frames of a file before any of them is appended. The
table of sequences comes last, then the manifest that says the corpus is complete.
"""

# Axes: T frames, D features

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from brim.engine.device import worker_count
from brim.engine.pipeline import Pipeline, Stage
from brim.engine.storage import MANIFEST, Dataset, ShardWriter
from brim.errors import ConfigError, DatasetError
from brim.sequences.corpus.folder import Folder, Skipped, refusal, survey
from brim.sequences.corpus.items import TABLE, write_items
from brim.sequences.corpus.labels import number_classes
from brim.sequences.corpus.npy import CHUNK_VALUES, STORED, NpyFile
from brim.sequences.corpus.pack_jobs import Job, Read, bytes_before, plan_jobs, read_job
from brim.sequences.corpus.pack_report import PackProgress, PackReport
from brim.sequences.corpus.packed import FRAMES, KIND, Corpus, read_skipped

_Result = TypeVar("_Result")

SHARD_BYTES = 64 << 20
_READERS = 4  # at most; more only wait for the one that writes


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
    once a second, from the caller's thread; `stop` is asked between jobs.
    """
    if dtype not in STORED:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(STORED)}")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes} must be above 0")
    packing = _Packing(Path(folder), Path(out), dtype, skip_bad, shard_bytes)
    packing.progress = progress
    return packing.execute(labels, resume, stop)


class _Packing:
    """One call of pack: what its stages share."""

    def __init__(self, path: Path, out: Path, dtype: str, skip_bad: bool, shard_bytes: int) -> None:
        self.path, self.out, self.dtype, self.skip_bad, self.shard_bytes = path, out, dtype, skip_bad, shard_bytes
        self.progress: Callable[[PackProgress], None] | None = None
        self.began_s = time.perf_counter()
        self.message, self.done_bytes, self.total_bytes, self.packed_bytes = "reading headers", 0, 0, 0
        self.folder: Folder
        self.writer: ShardWriter
        self.skipped: list[list[str]] = []  # as the manifest lists them at every commit: a resume needs them
        self.bad: list[Skipped] = []  # those of them found by this call, by their frames
        self.is_complete = self.is_refused = False

    def execute(self, labels: Path | str | None, resume: bool, stop: Callable[[], bool] | None) -> PackReport:
        """Check everything, write what is missing, say what came of it."""
        begun = (self.out / MANIFEST).is_file()
        if begun and not resume:
            raise DatasetError(f"{self.out} is not empty; add --resume to continue it or choose another --out")
        self.folder = self._attend("reading headers", lambda: survey(self.path, labels, skip_bad=self.skip_bad))
        if not (begun and self._is_finished()):
            missing = [place for place in (self.out, *self.out.parents) if not place.exists()]
            try:
                self._make(resume, stop)
            finally:
                if self.is_refused:  # what is there can never become complete
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
        """Whether the corpus is packed already, verified then; one of another folder or other options raises."""
        found = Dataset(self.out).manifest
        self._compare(found)
        self.skipped = [[skipped.file, skipped.fault] for skipped in read_skipped(self.out, found)]
        if not found["complete"]:
            return False
        corpus = Corpus.open(self.out)
        self._attend("verifying", corpus.verify)
        self.is_complete = True
        return True

    def _compare(self, found: dict[str, Any]) -> None:
        """Raise DatasetError where a corpus was begun from another folder or with other options."""
        if found.get("kind") != KIND:
            raise DatasetError(f"{self.out} is no corpus but of kind {found.get('kind')!r}; choose another --out")
        now, then = self.folder.fingerprint, found.get("source")
        if now != then:
            raise DatasetError(
                f"{self.path} is not as it was when {self.out} was begun: {_say(then)} then, {_say(now)} now; "
                "pack it anew into another --out"
            )
        for key, value in {**self._identity(), "items_per_shard": self._frames_per_shard()}.items():
            if found.get(key) != value:
                raise DatasetError(
                    f"{self.out} was begun with {key}={found.get(key)!r}, now it is {value!r}; "
                    "use the same options, or another --out"
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
        """The files that are not known to be bad, by now."""
        known = {file for file, _ in self.skipped}
        return [file for file in self.folder.files if file.id not in known]

    # Running

    def _make(self, resume: bool, stop: Callable[[], bool] | None) -> None:
        with ExitStack() as stack:
            writer = self._writer(resume)
            self.writer = self._attend("opening", lambda: stack.enter_context(writer))
            try:
                self._run(stop)
            except DatasetError:
                self.is_refused = True
                raise

    def _run(self, stop: Callable[[], bool] | None) -> None:
        stages: list[Stage[Any, Any]] = [
            Stage(name="read", work=self._read, workers=min(_READERS, worker_count())),
            Stage(name="write", work=self._write, depth=1),
        ]
        files = self._files()
        self.total_bytes = sum(file.nbytes for file in files)
        jobs = plan_jobs(files, self.writer.items)
        self.done_bytes = bytes_before(files, self.writer.items)
        self.message = "packing"
        with Pipeline(_and_end(jobs), stages, source_name="plan", tick=self._tick) as results:
            for _ in results:
                self._tick()
                if not self.is_complete and stop is not None and stop():
                    break
        if self.bad and not self.skip_bad:
            raise refusal(self.path, self.bad)

    def _read(self, job: Job | None) -> Read | None:
        return None if job is None else read_job(job, STORED[self.dtype])

    def _write(self, read: Read | None) -> None:
        """Append what was read; after a bad file that may not be skipped, only look for further ones."""
        if read is None:
            if self.skip_bad or not self.bad:
                self._finish()
            return
        name = read.job.parts[0].file.id
        if read.job.piece and any(skipped.file == name for skipped in self.bad):
            return
        if read.job.piece and read.faults:
            raise DatasetError(f"{self.path / name} {read.faults[0].fault}, and was good when checked; pack it again")
        for fault in read.faults:
            self.bad.append(fault)
            self.skipped.append([fault.file, fault.fault])  # before frames of later files are listed
        if len(read.frames) and (self.skip_bad or not self.bad):
            self._append(read.frames)
        self.packed_bytes += read.job.nbytes
        self.done_bytes += read.job.nbytes

    def _append(self, frames: Tensor) -> None:
        step = max(1, CHUNK_VALUES // self.folder.dim)
        for first in range(0, len(frames), step):
            self.writer.append({FRAMES: frames[first : first + step]}, {})

    def _finish(self) -> None:
        self.message = "finishing"
        files = self._files()
        if not files:
            raise refusal(self.path, self.bad, "no file is left to pack")
        table = write_items(self.out, self._columns(files))
        self.writer.finish(sequences=len(files), table=table)
        self.is_complete = True

    def _columns(self, files: list[NpyFile]) -> dict[str, Any]:
        found = [self.folder.labels.of[file.id] for file in files]
        lengths = [file.length for file in files]
        classes, numbers = number_classes([label.name for label in found])
        return {
            "ids": [file.id for file in files],
            "starts": list(accumulate(lengths, initial=0))[:-1],
            "lengths": lengths,
            "labels": numbers,
            "split": [label.split for label in found],
            "classes": classes,
        }

    # Telling

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

    def _attend(self, message: str, work: Callable[[], _Result]) -> _Result:
        """Run something long in a thread, telling the caller that it goes on."""
        self.message = message
        with Pipeline([None], [Stage(name="work", work=lambda _: work())], tick=self._tick) as results:
            result: _Result = next(results)
            return result

    def _report(self) -> PackReport:
        found = Dataset(self.out)
        frames, seconds = len(found), time.perf_counter() - self.began_s
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
            bytes=sum(entry.bytes for entry in found.shards),
            labelled=sum(bool(name) for name in names),
            classes=number_classes(names)[0],
            labels_from=self.folder.labels.source,
            skipped=tuple(Skipped(file=file, fault=fault) for file, fault in self.skipped),
            source_bytes=self.packed_bytes,
            seconds=seconds,
            bytes_per_s=self.packed_bytes / seconds,
        )


def _and_end(jobs: Iterator[Job]) -> Iterator[Job | None]:
    """The jobs, then None for the end: finishing syncs, and the caller is told while it does."""
    yield from jobs
    yield None


def _say(source: Any) -> str:
    if not isinstance(source, dict):
        return "another thing"
    return f"{source.get('files')} files of {source.get('bytes')} bytes, {str(source.get('sha256'))[:8]}"


_OURS = re.compile(r"[0-9]{6}\.safetensors|\.[0-9]{6}\.tmp")


def _discard(out: Path, missing: list[Path]) -> None:
    """Remove a corpus that was refused, its manifest first; files that are not ours stay, and their folders."""
    with suppress(OSError):
        for name in (MANIFEST, f".{MANIFEST}.tmp", TABLE, f".{TABLE}.tmp"):
            (out / name).unlink(missing_ok=True)
        for file in (out / "shards").iterdir():
            if _OURS.fullmatch(file.name):
                file.unlink()
        for place in (out / "shards", *missing):
            place.rmdir()
