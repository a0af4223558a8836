import math
from dataclasses import dataclass

import pytest
import torch

from brim.engine.config import TrainConfig, learning_rate_at, recipe_of
from brim.engine.training.step import resolve_precision
from brim.errors import ConfigError


def test_learning_rate_rises_then_follows_a_cosine() -> None:
    config = TrainConfig(learning_rate=0.4, warmup=0.2)
    rates = [learning_rate_at(config, step, 10) for step in range(10)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.4])
    assert rates[6] == pytest.approx(0.2 * (1 + math.cos(math.pi * 4 / 8)))
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0 < rates[-1] < 0.02


def test_learning_rate_without_warmup_starts_at_its_height() -> None:
    config = TrainConfig(learning_rate=0.4, warmup=0.0)
    assert learning_rate_at(config, 0, 1) == 0.4
    assert learning_rate_at(config, 100, 100) == pytest.approx(0.0)


def test_a_recipe_takes_what_settings_have_of_it() -> None:
    @dataclass
    class Settings:
        epochs: int = 9
        learning_rate: float = 0.5
        tier: str = "ram"

    found = recipe_of(Settings(), 3)
    assert found == TrainConfig(epochs=3, learning_rate=0.5, tensorboard=found.tensorboard)
    with pytest.raises(ConfigError, match="learning_rate"):
        recipe_of(Settings(learning_rate=-1.0), 3)


def test_a_cpu_trains_in_fp32_unless_told() -> None:
    cpu = torch.device("cpu")
    assert (resolve_precision("auto", cpu), resolve_precision("bf16", cpu)) == ("fp32", "bf16")
