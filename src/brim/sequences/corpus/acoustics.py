"""Features of sound, on the device: log mel spectra, cepstral coefficients, and hidden states of a speech model.

A frame is centred on its time and sees zeros beyond the ends of the recording, so that it does not depend on what else
is computed with it. Frames of all recordings are cut from one long signal and computed in blocks.
"""

# Axes: N samples of a signal, T frames, W samples of a window, F frequencies, M mel bands, D features

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.errors import ConfigError, DatasetError
from brim.sequences.config import SourceConfig

_BLOCK = 8192  # frames computed at once: 13 MB of windows
_FLOOR = 1e-8  # power added before the logarithm: 80 dB below a full-scale tone, about the noise of 16 bits


def width(source: SourceConfig) -> int:
    return source.mels if source.features == "logmel" else min(source.coefficients, source.mels)


def num_frames(samples: int, source: SourceConfig) -> int:
    """T for so many samples at the target rate."""
    return 1 + (samples - 1) // _sizes(source)[1] if samples > 0 else 0


def spectra(signals: Sequence[Tensor], source: SourceConfig, device: torch.device) -> list[Tensor]:
    """Features of each signal, (T, D) float32 on the host; signals are (N,) float32 at the target rate."""
    if not signals:
        return []
    window, hop = _sizes(source)
    starts, parts, at = [], [], 0
    for signal in signals:
        count = num_frames(len(signal), source)
        starts.append(at + hop * torch.arange(count))
        padded = torch.nn.functional.pad(signal, (window // 2, window))
        parts.append(padded)
        at += len(padded)
    stream, first = torch.cat(parts).to(device), torch.cat(starts).to(device)
    offsets, bank = torch.arange(window, device=device), mel_bank(source).to(device)
    shape = torch.hann_window(window, device=device)
    scale = 2 / shape.sum()  # a full-scale tone has power 1
    blocks = []
    for part in torch.split(first, _BLOCK):
        frames = stream[part[:, None] + offsets] * shape
        power = (torch.fft.rfft(frames, n=_transform(window)) * scale).abs().square()  # (T, F)
        blocks.append(torch.log(power @ bank + _FLOOR))
    mel = torch.cat(blocks)
    features = mel if source.features == "logmel" else mel @ cosines(source.mels, width(source)).to(device)
    return list(torch.split(features.cpu(), [len(one) for one in starts]))


def _sizes(source: SourceConfig) -> tuple[int, int]:
    """Samples of a window and between windows."""
    window = max(2, round(source.window_ms * source.sample_rate / 1000))
    return window, max(1, round(source.hop_ms * source.sample_rate / 1000))


def _transform(window: int) -> int:
    return 1 << (window - 1).bit_length()


@lru_cache(maxsize=4)
def mel_bank(source: SourceConfig) -> Tensor:
    """(F, M) float32: triangles, evenly spaced in mel from 20 Hz to half the sample rate, each with sum 1 over bins.

    A band narrower than the distance of two frequencies takes the nearest one.
    """
    window, _ = _sizes(source)
    bins = _transform(window) // 2 + 1
    frequency = torch.linspace(0, source.sample_rate / 2, bins, dtype=torch.float64)
    low, high = (2595 * math.log10(1 + hz / 700) for hz in (20.0, source.sample_rate / 2))
    edges = 700 * (10 ** (torch.linspace(low, high, source.mels + 2, dtype=torch.float64) / 2595) - 1)
    left, middle, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequency[:, None] - left) / (middle - left)
    falling = (right - frequency[:, None]) / (right - middle)
    bank = torch.minimum(rising, falling).clamp(min=0)
    empty = bank.sum(0) == 0
    nearest = (frequency[:, None] - middle).abs().argmin(0)
    bank[nearest[empty], empty.nonzero().flatten()] = 1
    return (bank / bank.sum(0)).float()


@cache
def cosines(bands: int, coefficients: int) -> Tensor:
    """(M, D) float32: the first columns of the orthonormal DCT-II."""
    place = torch.arange(bands, dtype=torch.float64)[:, None] + 0.5
    number = torch.arange(coefficients, dtype=torch.float64)
    table = torch.cos(math.pi / bands * place * number) * math.sqrt(2 / bands)
    table[:, 0] /= math.sqrt(2)
    return table.float()


# Speech models


class SpeechModel:
    """A Hugging Face model of the wav2vec 2.0 family (HuBERT, WavLM, data2vec …), in a local folder."""

    def __init__(self, path: str, device: torch.device) -> None:
        try:
            import transformers
        except ModuleNotFoundError as failure:
            raise ConfigError(
                "needs the package transformers: pip install transformers",
                field="speech_model", value=path, hint="or set {features} to logmel",
            ) from failure  # fmt: skip
        if not (Path(path) / "config.json").is_file():
            raise DatasetError(
                f"{path} is not the folder of a speech model: it has no config.json",
                field="speech_model",
                hint="download one, and give its folder",
            )
        try:
            model: Any = transformers.AutoModel.from_pretrained(path, local_files_only=True)
            self._extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(path, local_files_only=True)
            self._lengths = model._get_feat_extract_output_lengths
        except (OSError, ValueError, AttributeError, ImportError) as failure:
            words = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
            raise DatasetError(
                f"{path} is not a speech model that takes samples ({words[:200]})",
                field="speech_model",
                hint="give one of the wav2vec 2.0 family, such as WavLM or HuBERT",
            ) from failure
        self._model, self._device = model.to(device).eval(), device

    def num_frames(self, samples: int) -> int:
        return max(0, int(self._lengths(torch.tensor(samples))))

    def layers(self, source: SourceConfig) -> int:
        return int(self._model.config.num_hidden_layers) + 1 if source.speech_layers == "all" else 1

    def width(self, source: SourceConfig) -> int:
        return int(self._model.config.hidden_size) * self.layers(source)

    @torch.no_grad()
    def frames(self, signal: Tensor, source: SourceConfig) -> Tensor:
        """(T, D) float32 on the host; of all layers (T, L D)."""
        inputs = self._extractor(signal.numpy(), sampling_rate=source.sample_rate, return_tensors="pt")
        everything = source.speech_layers == "all"
        output = self._model(inputs["input_values"].to(self._device), output_hidden_states=everything)
        states = torch.stack(output.hidden_states, 2)[0] if everything else output.last_hidden_state[0]
        return states.flatten(1).float().cpu()


@lru_cache(maxsize=1)
def load_speech_model(path: str, device: torch.device) -> SpeechModel:
    return SpeechModel(path, device)
