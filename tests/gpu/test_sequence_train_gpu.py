"""Training on sequences on a GPU: it learns in every tier and precision, by captured steps that never wait."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.engine.meter import find_syncs
from brim.engine.training import Ranks, Stepper
from brim.sequences.batches import SequenceBatches, two_views
from brim.sequences.config import Augmentation, SequenceTraining
from brim.sequences.corpus import make_sequences, open_sequences, pack, split
from brim.sequences.evaluation import FeatureStatistics, embed, evaluate, measure
from brim.sequences.model import Classifier, Encoder
from brim.sequences.training import SelfSupervised, classification_loss, self_supervised_loss, train
from brim.sequences.training.phases import SequenceRun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

GPU = torch.device("cuda", 0)
SUPERVISED = SequenceTraining(mode="supervised", classifier_epochs=8, batch_size=32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    make_sequences(path / "npy", 600, dim=64, classes=4, mean_length=60)
    pack(path / "npy", path / "corpus")
    return path / "corpus"


@pytest.mark.parametrize("tier", ["vram", "ram", "window"])
def test_supervised_training_learns_in_every_tier(corpus: Path, tmp_path: Path, tier: Any) -> None:
    report = train(corpus, tmp_path / "run", replace(SUPERVISED, tier=tier), device="cuda")

    assert report.tier == tier
    assert report.scores is not None
    assert (report.scores["accuracy"] or 0) >= 0.95
    assert report.peak_bytes > 0


def test_training_without_labels_finds_the_classes_and_scores_alike_on_the_cpu(corpus: Path, tmp_path: Path) -> None:
    config = SequenceTraining(iterations=1, encoder_epochs=8, classifier_epochs=5, batch_size=64)

    report = train(corpus, tmp_path / "run", config, device="cuda")

    assert report.scores is not None
    assert (report.scores["probe_accuracy"] or 0) >= 0.95
    assert (report.scores["matched_accuracy"] or 0) >= 0.5  # of four classes; 0.63 and 0.78 on a CPU with two seeds
    here, there = (evaluate(tmp_path / "run", corpus, device=name) for name in ("cuda", "cpu"))
    assert here.items == there.items == 120
    assert abs((here.matched_accuracy or 0) - (there.matched_accuracy or 0)) <= 2 / 120
    found = embed(tmp_path / "run", corpus, tmp_path / "all.safetensors", device="cuda")
    assert found["items"] == 600


@pytest.mark.parametrize("mode", ["self", "supervised"])
def test_a_step_never_waits_for_the_device(corpus: Path, tmp_path: Path, mode: Any) -> None:
    config, data = replace(SUPERVISED, mode=mode), open_sequences(corpus)
    parts = split(data.labels, data.split, config)
    with SequenceBatches(data, config, GPU) as batches:
        mean, std = (part.to(GPU) for part in measure(batches.view(parts.train, shuffle=False), GPU))
        run = SequenceRun(
            out=tmp_path, data=data, split=parts, config=config, batches=batches, ranks=Ranks(device=GPU),
            statistics=FeatureStatistics(mean, std),
        )  # fmt: skip
        encoder = Encoder(config.shape(data.dim)).to(GPU)
        if mode == "self":

            def views(batch: Any, rng: torch.Generator) -> Any:
                return two_views(batch, rng, Augmentation(), mean=mean, std=std)

            module, loss, transform = SelfSupervised(encoder).to(GPU), self_supervised_loss, views
        else:
            module, transform = Classifier(encoder, 4).to(GPU), run.augmented()

            def loss(module: Any, batch: Any) -> torch.Tensor:
                return classification_loss(module, batch, 0.1)

        stepper = Stepper(module, loss, config=config.recipe(1), device=GPU, transform=transform)
        batch = next(iter(run.view(parts.train, "test").epoch(0)))
        stepper.prepare(batch)

        assert stepper.kind == "graph"
        assert find_syncs(lambda: stepper.step(batch, 0, 1e-3)) == []
        other = {name: tensor[:7].clone() for name, tensor in batch.items()}  # eager: a shape seen for the first time
        stepper.step({name: tensor.clone() for name, tensor in other.items()}, 1, 1e-3)
        assert find_syncs(lambda: stepper.step(other, 2, 1e-3)) == []
