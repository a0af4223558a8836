"""What the readers of packing do in one go, and how it is done.

A job is at most JOB_BYTES of neighbouring files. A longer file is read twice, first to check all of it, then piece by
piece, so that memory does not grow with it.
"""

# Axes: T frames, D features

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from brim.engine.device import guard
from brim.sequences.corpus.folder import Skipped
from brim.sequences.corpus.npy import FrameReader, NpyFile

JOB_BYTES = 8 << 20  # of source: amortises hand-overs, and a few of them in flight are little memory


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring frames of one file."""

    file: NpyFile
    first: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the frames in the file."""
        return (self.stop - self.first) * self.file.row_bytes


@dataclass(frozen=True, slots=True)
class Job:
    """Whole files, or the check of a long one, or a piece of a long one that a job before has checked."""

    parts: tuple[Part, ...]
    check: bool = False  # read and keep nothing
    piece: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that are packed by it; a check packs none."""
        return 0 if self.check else sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Read:
    """Frames of a job's good files, (n, D), and what is wrong with the others."""

    job: Job
    frames: Tensor
    faults: list[Skipped]


def plan_jobs(files: Sequence[NpyFile], first_frame: int) -> Iterator[Job]:
    """The jobs that give the frames of the files, in order, from first_frame of all of them on."""
    waiting: list[Part] = []
    waiting_bytes = 0
    for file in files:
        first = min(first_frame, file.length)
        first_frame -= first
        part = Part(file, first, file.length)
        if waiting and waiting_bytes + part.nbytes > JOB_BYTES:
            yield Job(tuple(waiting))
            waiting, waiting_bytes = [], 0
        if file.nbytes > JOB_BYTES:
            yield from _split(file, first)
        elif first < file.length:
            waiting.append(part)
            waiting_bytes += part.nbytes
    if waiting:
        yield Job(tuple(waiting))


def bytes_before(files: Sequence[NpyFile], first_frame: int) -> int:
    """Bytes that the frames before first_frame have in their files."""
    total = 0
    for file in files:
        if first_frame <= 0:
            break
        total += min(first_frame, file.length) * file.row_bytes
        first_frame -= file.length
    return total


def _split(file: NpyFile, first: int) -> Iterator[Job]:
    if first == 0:  # else frames of it are stored, and so it was checked before
        yield Job((Part(file, 0, file.length),), check=True)
    step = max(1, JOB_BYTES // file.row_bytes)
    for start in range(first, file.length, step):
        yield Job((Part(file, start, min(start + step, file.length)),), piece=True)


def read_job(job: Job, dtype: torch.dtype) -> Read:
    """Read, check and convert; a bad file leaves no frame."""
    dim, faults = job.parts[0].file.dim, []
    if job.check:
        file = job.parts[0].file
        fault = FrameReader(file).check(dtype)
        return Read(job, torch.empty(0, dim, dtype=dtype), [Skipped(file=file.id, fault=fault)] if fault else [])
    with guard():
        out = torch.empty(sum(part.stop - part.first for part in job.parts), dim, dtype=dtype)
    filled = 0
    for part in job.parts:
        num = part.stop - part.first
        fault = FrameReader(part.file).read(part.first, out[filled : filled + num])
        if fault:
            faults.append(Skipped(file=part.file.id, fault=fault))
        else:
            filled += num
    return Read(job, out[:filled], faults)
