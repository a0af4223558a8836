"""A locator trained on a GPU: every tier, and what comes out of it."""

import math

import pytest
import torch

from brim.rf import from_mapping, generate
from brim.rf.config import LocatorTraining
from brim.rf.location import evaluate_run, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Samples to train on and samples held out."""
    path = tmp_path_factory.mktemp("gpu")
    for name, samples, seed in (("data", 1500, 1), ("held", 300, 2)):
        config = from_mapping({"duration_s": 0.2, "seed": seed}, preset="production")
        generate(config, path / name, samples, device="cuda")
    return path / "data", path / "held"


@pytest.mark.parametrize("precision", ["auto", "fp32"])
@pytest.mark.parametrize("tier", ["vram", "ram", "window"])
def test_every_tier_trains_and_finds_transmitters(datasets, tmp_path, tier, precision):
    data, held = datasets
    config = LocatorTraining(epochs=2, batch_size=128, tier=tier, precision=precision)

    report = train([data], tmp_path / "run", config, device="cuda")
    found = evaluate_run(tmp_path / "run", held, device="cuda").metrics

    assert (report.tier, report.epochs) == (tier, 2)
    assert math.isfinite(report.best_val_loss)
    assert found["median_error_m"] < 1.1 * found["baselines"]["arrival_strength"]["median_error_m"]
    assert found["coverage"]["90"] == pytest.approx(0.9, abs=0.15)
