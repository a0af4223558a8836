"""Audio files as sequences: log mel spectra, cepstral coefficients, or frames of a local speech model.

Lengths are known from headers. Files are decoded, mixed to one channel and resampled on the host, several at a time;
the frames of all of them are then computed together on the device (acoustics.py). Files that are silent, truncated or
unreadable are listed and left out; clipped ones are used and listed.
"""

# Axes: N samples, T frames, D features

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import guard, resolve_device
from brim.engine.pipeline import Pipeline, Stage
from brim.errors import ConfigError
from brim.sequences.config import SourceConfig
from brim.sequences.corpus.acoustics import SpeechModel, load_speech_model, num_frames, spectra, width
from brim.sequences.corpus.source import SequencePart, SequenceSource, Skipped, convert

SUFFIXES = (".wav", ".flac", ".ogg", ".oga", ".opus", ".aiff", ".aif", ".aifc", ".au", ".mp3")

_READERS = 8
_CHUNK_FILES = 64
_SILENT = 1e-4  # largest sample, of 1; 80 dB below full scale
_CLIP_LEVEL, _CLIP_RUN, _CLIP_SHARE = 0.999, 3, 1e-3  # samples at full scale, several in a row, this share of all
_LOW_HZ, _HIGH_HZ = 100, 1_000_000
_MAX_RATIO = 4096
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)  # of WAV data that was written to a pipe

AudioSamples = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFile(SequenceSource):
    """The header of an audio file, and what becomes of its samples."""

    rate_hz: int
    channels: int
    samples: int  # in each channel
    subtype: str  # of libsndfile, such as PCM_16
    source: SourceConfig
    device: str
    remarks: dict[str, str]  # shared by all files: what was noticed while reading, by id

    @property
    def row_bytes(self) -> int:
        return self.dim * 4

    def read(self, first: int, out: Tensor) -> str:
        return self.read_all([SequencePart(self, first, first + len(out))], [out])[0]

    @classmethod
    def read_all(cls, parts: Sequence[SequencePart], outs: Sequence[Tensor]) -> list[str]:
        """Decode all files, then compute their frames together."""
        files = [part.source for part in parts]
        decoded = [decode(file) for file in files if isinstance(file, AudioFile)]
        good = [number for number, one in enumerate(decoded) if not isinstance(one, str)]
        faults = ["" if not isinstance(one, str) else one for one in decoded]
        first = files[0]
        assert isinstance(first, AudioFile)
        device = resolve_device(first.device)
        signals = [torch.from_numpy(one) for one in decoded if not isinstance(one, str)]
        with guard():
            if first.source.speech_model is not None:
                model = load_speech_model(first.source.speech_model, device)
                features = [model.frames(signal, first.source) for signal in signals]
            else:
                features = spectra(signals, first.source, device)
        for number, frames in zip(good, features, strict=True):
            part, out = parts[number], outs[number]
            rows = frames[part.first : part.stop]
            faults[number] = "changed while it was being packed" if len(rows) != len(out) else ""
            faults[number] = faults[number] or convert(rows.numpy(), part.first, out)
        return faults


def read_headers(folder: Path, names: Sequence[str], source: SourceConfig) -> list[AudioFile | Skipped]:
    """The header of every file, or its fault."""
    sound = _soundfile()
    model: SpeechModel | None = None
    if source.speech_model is not None:
        model = load_speech_model(source.speech_model, resolve_device(source.device))
    remarks: dict[str, str] = {}

    def read(chunk: Sequence[str]) -> list[AudioFile | Skipped]:
        return [_read_header(sound, folder, name, source, model, remarks) for name in chunk]

    chunks = (names[start : start + _CHUNK_FILES] for start in range(0, len(names), _CHUNK_FILES))
    files: list[AudioFile | Skipped] = []
    with Pipeline(chunks, [Stage(name="header", work=read, workers=_READERS)]) as results:
        for result in results:
            files += result
    return files


def _read_header(
    sound: Any, folder: Path, name: str, source: SourceConfig, model: SpeechModel | None, remarks: dict[str, str]
) -> AudioFile | Skipped:
    path = folder / name
    try:
        status = path.stat()
        info = sound.info(str(path))
        fault = _truncation(path, status.st_size)
    except (OSError, RuntimeError, ValueError, TypeError) as failure:  # of libsndfile
        words = str(failure).replace(str(path), "").removeprefix("Error opening ''").strip(" :'.")
        words = words or type(failure).__name__
        return Skipped(
            file=name, fault=f"is not readable audio ({words[:200]}); convert it to WAV or FLAC, or remove it"
        )
    if not fault and info.frames < 1:
        fault = "has no samples; record it again, or remove it"
    if not fault and not _LOW_HZ <= info.samplerate <= _HIGH_HZ:
        fault = f"has a sample rate of {info.samplerate} Hz, expected {_LOW_HZ} to {_HIGH_HZ}; correct its header"
    if fault:
        return Skipped(file=name, fault=fault)
    count = _resampled(info.frames, info.samplerate, source.sample_rate)
    length = num_frames(count, source) if model is None else model.num_frames(count)
    if length < 1:
        return Skipped(file=name, fault=f"has {info.frames} samples, too few for the speech model; remove it")
    return AudioFile(
        id=name, path=path, length=length, size=status.st_size, mtime_ns=status.st_mtime_ns,
        dim=width(source) if model is None else model.width(source),
        layers=1 if model is None else model.layers(source),
        rate_hz=info.samplerate, channels=info.channels, samples=info.frames, subtype=info.subtype, source=source,
        device=source.device, remarks=remarks,
    )  # fmt: skip


def _soundfile() -> Any:
    try:
        import soundfile
    except (ModuleNotFoundError, OSError) as failure:  # OSError: without the library it wraps
        raise ConfigError("soundfile is not installed; audio needs: pip install 'brim[audio]'") from failure
    return soundfile


def _truncation(path: Path, size: int) -> str:
    """The fault of a WAV file that is shorter than its header says: libsndfile reads what is left of it as if whole."""
    with path.open("rb") as opened:
        start = opened.read(12)
        if start[:4] not in (b"RIFF", b"RIFX") or start[8:12] != b"WAVE":
            return ""
        order = "little" if start[:4] == b"RIFF" else "big"
        place = 12
        while place + 8 <= size:
            opened.seek(place)
            chunk = opened.read(8)
            length = int.from_bytes(chunk[4:8], order)  # type: ignore[arg-type]
            if chunk[:4] == b"data":
                left = size - place - 8
                if length in _UNKNOWN_SIZES or length <= left:
                    return ""
                return (
                    f"is truncated: its header promises {length} bytes of samples, the file holds {left}; copy it again"
                )
            place += 8 + length + length % 2
    return ""


def _ratio(rate_hz: int, target_hz: int) -> Fraction:
    """Target rate over rate; odd rates are rounded, by less than a ten-millionth, so that the filter stays short."""
    return Fraction(target_hz, rate_hz).limit_denominator(_MAX_RATIO)


def _resampled(samples: int, rate_hz: int, target_hz: int) -> int:
    return math.ceil(samples * _ratio(rate_hz, target_hz))


def decode(file: AudioFile) -> AudioSamples | str:
    """Samples in one channel at the target rate, or the fault; what is noticed goes to the file's remarks."""
    try:
        samples, rate_hz = _soundfile().read(str(file.path), dtype="float32", always_2d=True)
    except (OSError, RuntimeError, ValueError, TypeError, MemoryError) as failure:
        words = str(failure).replace(str(file.path), "").strip(" :'") or type(failure).__name__
        return f"cannot be decoded ({words[:200]}); copy or convert it again"
    if len(samples) < file.samples or rate_hz != file.rate_hz:
        return f"is truncated: {file.samples} samples announced, {len(samples)} found; copy it again"
    if not np.isfinite(samples).all():
        return "holds samples that are not finite numbers; export it again as 16-bit PCM"
    if len(samples) == 0 or float(np.abs(samples).max()) < _SILENT:
        return "is silent; record it again, or remove it"
    if _is_clipped(samples):
        file.remarks[file.id] = "is clipped: many samples are at full scale"
    mono: AudioSamples = np.ascontiguousarray(samples.mean(1) if samples.shape[1] > 1 else samples[:, 0])
    return resample(mono, rate_hz, file.source.sample_rate)


def resample(samples: AudioSamples, rate_hz: int, target_hz: int) -> AudioSamples:
    """(N,) at another rate, by a polyphase filter."""
    if rate_hz == target_hz:
        return samples
    from scipy.signal import resample_poly

    ratio = _ratio(rate_hz, target_hz)
    changed: AudioSamples = resample_poly(samples, ratio.numerator, ratio.denominator).astype(np.float32)
    return changed


def _is_clipped(samples: AudioSamples) -> bool:
    """Whether a share of the samples lies in runs at full scale; the loudest of good recordings touch it singly."""
    full = np.asarray((np.abs(samples) >= _CLIP_LEVEL).any(1), dtype=np.int8)
    num = len(samples)
    if int(full.sum()) < max(_CLIP_RUN, _CLIP_SHARE * num):
        return False
    edges = np.flatnonzero(np.diff(full, prepend=0, append=0))
    runs = edges[1::2] - edges[::2]
    return bool(runs[runs >= _CLIP_RUN].sum() >= _CLIP_SHARE * num)


def describe(files: Sequence[SequenceSource], source: SourceConfig) -> list[str]:
    """What is done with the files, in words."""
    audio = [file for file in files if isinstance(file, AudioFile)]
    if not audio:
        return []
    if source.speech_model is not None:
        kind = f"hidden states of {Path(source.speech_model).name}"
    else:
        words = "log mel bands" if source.features == "logmel" else "cepstral coefficients"
        kind = f"{width(source)} {words} every {source.hop_ms:g} ms"
    notes = [f"audio at {source.sample_rate} Hz as {kind}"]
    rates = Counter(file.rate_hz for file in audio if file.rate_hz != source.sample_rate)
    notes += [f"{num} files are resampled from {rate} Hz" for rate, num in sorted(rates.items())]
    several = Counter(file.channels for file in audio if file.channels > 1)
    notes += [f"{num} files have {channels} channels, which are averaged" for channels, num in sorted(several.items())]
    coarse = [file.id for file in audio if file.subtype in ("PCM_U8", "PCM_S8", "ULAW", "ALAW")]
    if coarse:
        notes.append(f"{len(coarse)} files have 8 bits per sample, such as {coarse[0]}: expect noise in quiet passages")
    return notes
