"""Batches on a device without touching the disk."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.engine.device import resolve_device
from brim.rf.config import NUM_CHUNKS, GenerateConfig
from brim.rf.features import estimators as ft
from brim.rf.generation.batch import Backend, Measured, make_work
from brim.rf.generation.cpu import CpuBackend
from brim.rf.generation.rows import assemble
from brim.rf.physics.scene import make_scenes


@contextmanager
def open_backend(config: GenerateConfig, device: torch.device, workers: int | None = None) -> Iterator[Backend]:
    """The backend for a device; its threads end with the block."""
    if device.type == "cuda":
        from brim.rf.generation.cuda import CudaBackend  # Triton is imported only where there is a GPU

        yield CudaBackend(config, device)
        return
    with CpuBackend(config, workers) as backend:
        yield backend


def generate_batch(
    config: GenerateConfig,
    indices: NDArray[np.int64] | Tensor | list[int] | range,
    device: torch.device | str = "auto",
    *,
    chunks: bool = False,
) -> dict[str, Tensor]:
    """Rows of the accepted ones among the given attempts, in the order given, without touching the disk."""
    index = np.asarray(indices, np.int64).reshape(-1)
    scenes = make_scenes(config, index)
    work = make_work(config, scenes[np.nonzero(scenes.accepted)[0]])
    iq = config.dataset_type == "iq_raw"
    if not len(work):
        return assemble(config, work, _nothing(config, iq=iq), chunks=chunks)
    with open_backend(config, resolve_device(str(device))) as backend:
        return assemble(config, work, backend.measure(work, iq=iq).to("cpu"), chunks=chunks)


def _nothing(config: GenerateConfig, *, iq: bool) -> Measured:
    """The measurements of no records."""
    return Measured(
        peak=torch.empty(0),
        truth=torch.empty(0, NUM_CHUNKS, 2),
        features=torch.empty(0, len(ft.FEATURES), len(ft.STATISTICS)),
        chunks=torch.empty(0, NUM_CHUNKS, len(ft.FEATURES)),
        iq=torch.empty(0, config.num_samples_iq, dtype=torch.complex64) if iq else None,
    )
