"""A hand-written training loop in which every optimisation is a switch.

Axes: B sequences, T frames, D features, H hidden units of a direction.
"""

from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from brim.engine.config import BucketConfig, TrainConfig
from brim.engine.rows import RaggedResident
from brim.engine.training import Batch, Stepper
from brim.sequences.batches import BatchPlan, SequenceLoader, augment
from brim.sequences.config import Augmentation, LoaderConfig, SequenceConfig
from brim.sequences.corpus import Corpus, SequenceFolder
from brim.sequences.model import BiLstm, Classifier, Encoder
from brim.sequences.training import classification_loss

AUGMENTATION = Augmentation()
CLIP_NORM = 1.0
LEARNING_RATE = 1e-3
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetup:
    """The optimisations that are switched on; the defaults are the first configuration of the report."""

    batch_size: int = 16
    num_workers: int = 0
    prefetch_factor: int = 2  # the DataLoader's default
    persistent: bool = False  # persistent workers, pinned memory and non-blocking copies
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    autotuner: bool = False  # cuDNN's
    set_to_none: bool = False
    packed: bool = False  # the corpus instead of single files
    device_augmentation: bool = False  # instead of on the CPU, in the workers
    buckets: bool = False  # and plain padded batches; without them pack_padded_sequence
    resident: bool = False  # instead of a DataLoader
    compiled: bool = False  # CUDA graphs on a GPU, torch.compile on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationData:
    """The same sequences as files and as rows of a corpus."""

    files: SequenceFolder
    corpus: Corpus
    rows: Tensor  # (n,) int64, of the corpus; file k is row rows[k]
    labels: Tensor  # int64, of every row of the corpus
    num_classes: int


@dataclass(frozen=True, slots=True)
class FedBatch:
    """A batch on the device, and its sizes on the host."""

    batch: Batch
    length: Tensor | None = None  # (B,) on the host, if the loader had it there
    num_frames: int = 0  # without padding, before any augmentation

    @property
    def num_padded(self) -> int:
        return self.batch["frames"].shape[:2].numel()


# Batches


def make_source(
    setup: LoopSetup, data: AblationData, device: torch.device, seed: int
) -> SequenceLoader | RaggedResident:
    """Resident data, or a DataLoader over the corpus or over single files."""
    buckets, fields = BucketConfig(batch_size=setup.batch_size), {"label": data.labels}
    if setup.resident:
        return RaggedResident(data.corpus, buckets=buckets, device=device, seed=seed, rows=data.rows, fields=fields)
    config = LoaderConfig(
        batch_size=setup.batch_size,
        num_workers=setup.num_workers,
        prefetch_factor=setup.prefetch_factor,
        persistent_workers=setup.persistent,
        pin_memory=setup.persistent,
        non_blocking=setup.persistent,
        augmentation=None if setup.device_augmentation else AUGMENTATION,
        buckets=buckets if setup.buckets else None,
    )
    if setup.packed:
        return SequenceLoader(data.corpus, config, device=device, seed=seed, rows=data.rows, fields=fields)
    return SequenceLoader(data.files, config, device=device, seed=seed, fields={"label": data.labels[data.rows]})


def endless(source: SequenceLoader | RaggedResident, lengths: Tensor) -> Generator[FedBatch]:
    """Batches epoch after epoch, inside the source's with block; lengths are those of all its sequences."""
    for number in count():
        loader = source if isinstance(source, SequenceLoader) else None
        with closing(loader.host_epoch(number) if loader else source.epoch(number)) as epoch:
            planned = source.order(number)
            rows = [torch.tensor(p.rows) if isinstance(p, BatchPlan) else p.items for p in planned]
            for batch, items in zip(epoch, rows, strict=True):
                num_frames = int(lengths[items].sum())
                if loader is None:
                    yield FedBatch(batch, None, num_frames)
                else:
                    yield FedBatch(loader.to_device(batch), batch["length"], num_frames)


# Steps


def make_module(config: SequenceConfig, num_classes: int, setup: LoopSetup, device: torch.device) -> Classifier:
    """The classifier, always with the same initial weights; without buckets its LSTM packs sequences."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        module = Classifier(Encoder(config), num_classes)
    if not setup.buckets:
        module.encoder.lstm = PackedLstm(module.encoder.lstm)  # type: ignore[assignment]
    return module.to(device).train()


class PackedLstm(nn.Module):
    """torch's LSTM over packed sequences, with the weights and the results of a BiLstm."""

    def __init__(self, lstm: BiLstm) -> None:
        super().__init__()
        self.lstm = nn.LSTM(
            lstm.inputs, lstm.hidden, lstm.layers,
            batch_first=True, bidirectional=True, dropout=lstm.dropout if lstm.layers > 1 else 0.0,
        )  # fmt: skip
        self.lstm.load_state_dict(lstm.state_dict())
        self.host_length: Tensor | None = None  # if the loop knows it; otherwise packing waits for the device

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        """States of both directions, (B, T, 2 H), 0 behind each end."""
        known = length.cpu() if self.host_length is None else self.host_length
        on_cpu = x.device.type == "cpu"  # where autocast does not support LSTMs
        with torch.autocast("cpu", enabled=False) if on_cpu else nullcontext():
            packed = pack_padded_sequence(x.float() if on_cpu else x, known, batch_first=True, enforce_sorted=False)
            out, _ = self.lstm(packed)
            states, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return states


class HandStep:
    """Forward, loss, backward, clipping and a fused AdamW; nothing is copied to the host."""

    kind = "eager"

    def __init__(self, module: Classifier, setup: LoopSetup, device: torch.device, seed: int) -> None:
        self.module, self.setup, self.device = module, setup, device
        self.optimizer = torch.optim.AdamW(module.parameters(), LEARNING_RATE, weight_decay=0.01, fused=True)
        self.dtype = DTYPES[setup.precision]
        self.scaler = torch.amp.GradScaler(device.type, enabled=setup.precision == "fp16")
        self.rng = torch.Generator(device).manual_seed(seed)

    def __call__(self, fed: FedBatch) -> Tensor:
        """Train on a batch; returns its loss, on the device."""
        batch, host_length = fed.batch, fed.length
        if self.setup.device_augmentation:
            length = augment(batch["frames"], batch["length"], self.rng, AUGMENTATION)
            batch, host_length = batch | {"length": length}, None
        lstm = self.module.encoder.lstm
        if isinstance(lstm, PackedLstm):
            lstm.host_length = host_length
        self.optimizer.zero_grad(set_to_none=self.setup.set_to_none)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = classification_loss(self.module, batch)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP_NORM, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


class EngineStep:
    """The same with the engine's Stepper: a captured CUDA graph per shape, or torch.compile on a CPU."""

    def __init__(self, module: Classifier, setup: LoopSetup, device: torch.device, seed: int) -> None:
        config = TrainConfig(
            learning_rate=LEARNING_RATE, clip_norm=CLIP_NORM, precision=setup.precision, seed=seed,
            compile="graph" if device.type == "cuda" else "compile",
        )  # fmt: skip
        transform = _augmented if setup.device_augmentation else None
        self.stepper = Stepper(module, classification_loss, config=config, device=device, transform=transform)
        self.number = 0

    @property
    def kind(self) -> str:
        return self.stepper.kind

    def prepare(self, fed: FedBatch) -> None:
        """Capture this shape now, not while it is measured."""
        if self.stepper.needs_preparation(fed.batch):
            self.stepper.prepare(fed.batch)
        self(fed)
        if self.stepper.needs_preparation(fed.batch):  # shapes after the first are captured when they come again
            self.stepper.prepare(fed.batch)

    def __call__(self, fed: FedBatch) -> Tensor:
        """Train on a batch; returns its loss, on the device."""
        self.number += 1
        return self.stepper.step(fed.batch, self.number, LEARNING_RATE)


TrainStep = HandStep | EngineStep


def _augmented(batch: Batch, rng: torch.Generator) -> Batch:
    return batch | {"length": augment(batch["frames"], batch["length"], rng, AUGMENTATION)}
