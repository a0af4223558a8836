"""A trained network as a servable: one .npy sequence in, its class and all probabilities out.

Axes: B sequences, T frames, D features, K classes or clusters. Sequences are padded to one of a few lengths, so that
different requests can share a batch; values behind a sequence's end have no influence.
"""

import io
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brim.engine.batching import Answer, DecodedRequest, Payload, RequestShape
from brim.engine.batching.warm_up import ladder
from brim.errors import DatasetError, UnsupportedType
from brim.sequences.corpus import parse, parse_header
from brim.sequences.evaluation.runs import load_run

MEDIA_TYPE = "application/json"
MOST = {"cuda": 256, "cpu": 32}  # sequences per batch
MAX_VALUES = 2**26  # frames × features of a batch, padding included: a quarter of a gigabyte
_SHORTEST = 16  # frames; shorter ones are padded to it
_EXAMPLE_FRAMES = 128
_HEADER_BYTES = 1 << 16  # longer than any header that NumPy reads

_numbers = itertools.count()


class ClassifyServable:
    def __init__(
        self, run: str | Path, device: torch.device, *, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        """The lock is held while the device is used."""
        loaded = load_run(run, strict=True)
        self._module, self._device, self._lock = loaded.module.to(device), device, lock or threading.RLock()
        self._dim = loaded.module.dim
        about = loaded.about  # clusters are named by their numbers
        self._classes = list(
            about["classes"] if about["mode"] == "supervised" else map(str, range(int(about["outputs"])))
        )
        self.weight_bytes = sum(tensor.nbytes for tensor in self._module.state_dict().values())
        self.max_batch_size = MOST[device.type]
        self.sizes: Sequence[int] = ladder(self.max_batch_size)
        self.tuned = False
        self.expected_s: Mapping[int, float] = {}
        self._number = next(_numbers)  # in the keys: no batch holds parts of two versions of a model

    # Requests

    def inspect(self, payload: Payload) -> RequestShape:
        """Batching key and cost, from the file's header."""
        name = payload.name or "the sequence"
        if bytes(payload.data[:6]) != b"\x93NUMPY":
            raise UnsupportedType(f"{name} is not an .npy file; save it with numpy.save")
        header = parse_header(io.BytesIO(payload.data[:_HEADER_BYTES]), len(payload.data))
        if isinstance(header, str):
            raise DatasetError(f"{name} {header}")
        (length, dim), *_ = header
        self._check_dim(name, dim)
        frames = padded(length)
        scale = frames / _EXAMPLE_FRAMES
        most = max(1, MAX_VALUES // (frames * self._dim))  # long sequences allow smaller batches
        sizes = self.sizes if most >= self.sizes[-1] else ladder(most)
        return RequestShape(
            (self._number, frames), cost=float(frames), sizes=sizes,
            expected_s={size: seconds * scale for size, seconds in self.expected_s.items()},
        )  # fmt: skip

    def decode(self, payload: Payload) -> DecodedRequest:
        """Frames, padded with zeros; in pinned memory for a GPU."""
        name = payload.name or "the sequence"
        frames = parse(payload.data)
        if isinstance(frames, str):
            raise DatasetError(f"{name} {frames}")
        self._check_dim(name, frames.shape[1])
        length = padded(len(frames))
        return DecodedRequest((self._number, length), [self._padded(frames, length)], name)

    def forward(self, parts: list["_PaddedSequence"]) -> Tensor:
        """Run sequences of one padded length; probabilities (B, K) on the device, not waited for."""
        length = torch.tensor([part.length for part in parts])
        with self._lock, torch.inference_mode():
            frames = torch.stack([part.frames.to(self._device, non_blocking=True) for part in parts])
            logits: Tensor = self._module(frames, length.to(self._device))
            return logits.float() if self._module.is_regression else logits.float().softmax(-1)

    def collect(self, running: Tensor) -> list[Any]:
        """Probabilities (K,) of each, on the host."""
        return list(running.cpu())

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        """The most likely class, and the probability of each; of numbers the predicted one."""
        (probability,) = outputs
        if not bool(probability.isfinite().all()):
            raise DatasetError(f"the network's output for {item.context} is not finite; check its values")
        if self._module.is_regression:
            value = float(probability[0])
            return Answer(json.dumps({"value": value}).encode(), MEDIA_TYPE, {"value": f"{value:.6g}"})
        values = [round(value, 6) for value in probability.tolist()]
        best = int(probability.argmax())
        answer = {
            "class": self._classes[best],
            "confidence": values[best],
            "probabilities": dict(zip(self._classes, values, strict=True)),
        }
        return Answer(json.dumps(answer, ensure_ascii=False).encode(), MEDIA_TYPE, {"class": self._classes[best]})

    def close(self) -> None:
        del self._module

    # Warming up

    def example(self, num: int) -> list["_PaddedSequence"]:
        return [self._padded(torch.zeros(_EXAMPLE_FRAMES, self._dim), _EXAMPLE_FRAMES)] * num

    def _padded(self, sequence: Tensor, length: int) -> "_PaddedSequence":
        frames = torch.zeros(length, self._dim, pin_memory=self._device.type == "cuda")
        frames[: len(sequence)] = sequence
        return _PaddedSequence(frames, len(sequence))

    def _check_dim(self, name: str, dim: int) -> None:
        if dim != self._dim:
            raise DatasetError(f"{name} has {dim} features, the model was trained on {self._dim}; send the same kind")


class _PaddedSequence(NamedTuple):
    frames: Tensor  # (T, D) float32, 0 behind the end
    length: int


def padded(length: int) -> int:
    """The length a sequence is padded to: 16, 24, 32, 48, … so that there are few shapes."""
    step = max(_SHORTEST, 1 << (max(1, length) - 1).bit_length())
    return step * 3 // 4 if step > _SHORTEST and length <= step * 3 // 4 else step
