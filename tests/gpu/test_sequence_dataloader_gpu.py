"""The DataLoader beside a GPU in use: workers start after CUDA, batches arrive there; the ablation runs to its end."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from brim.sequences.ablation.run import ablate
from brim.sequences.batches.dataloader import SequenceLoader
from brim.sequences.config import Augmentation, LoaderConfig, SequenceConfig
from brim.sequences.corpus.folder import SequenceFolder
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.synthetic import make_sequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


@pytest.mark.parametrize("is_tuned", [True, False])
def test_workers_started_after_cuda_feed_the_gpu(tmp_path: Path, is_tuned: bool) -> None:
    sequences = SequenceFolder(make_sequences(tmp_path / "in", 50, 16, 2, mean_length=20))
    torch.randn(100, device="cuda").sum().item()  # CUDA is in use before any worker starts
    config = LoaderConfig(
        batch_size=8, num_workers=2, prefetch_factor=2, persistent_workers=is_tuned, pin_memory=is_tuned,
        non_blocking=is_tuned, augmentation=Augmentation(),
    )  # fmt: skip
    with (
        SequenceLoader(sequences, config, device=torch.device("cuda", 0)) as there,
        SequenceLoader(sequences, LoaderConfig(batch_size=8, num_workers=0, augmentation=Augmentation()),
                       device=torch.device("cpu")) as here,
    ):  # fmt: skip
        for epoch in (0, 1):
            for moved, wanted in zip(there.epoch(epoch), here.epoch(epoch), strict=True):
                assert all(moved[name].is_cuda and torch.equal(moved[name].cpu(), wanted[name]) for name in wanted)
        assert all(batch["frames"].is_pinned() == is_tuned for batch in there.host_epoch(2))
    assert multiprocessing.active_children() == []


def test_an_ablation_ends_with_captured_graphs_of_a_resident_corpus(tmp_path: Path) -> None:
    pack(make_sequences(tmp_path / "in", 300, 32, 3, mean_length=30), tmp_path / "corpus")
    model = SequenceConfig(dim=32, channels=32, hidden=16, attention=16, embedding=16)
    found = ablate(tmp_path / "corpus", steps=20, device="cuda", model=model, cap_s=1.0)
    assert all(step.samples_per_s and step.peak_bytes for step in found.steps)
    assert all(0 < step.busy_share <= 1 for step in found.steps if step.busy_share is not None)
    assert "tier vram" in found.steps[-2].note
    assert found.steps[-1].note == "graph"
    assert not torch.backends.cudnn.benchmark
