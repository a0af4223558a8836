"""tune_batch: a module and an example of its input → the fastest batch and the largest safe one."""

from typing import Any, ClassVar

import pytest
import torch
from fake_time import FakeTime
from torch import nn

import brim
from brim.errors import ConfigError

clock = FakeTime()


class Overhead(nn.Module):
    """A call takes 20 ms, whatever the batch, and 5 ms for each item above 32: 32 is the knee."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        clock.sleep(0.02 + 0.005 * max(0, len(x) - 32))
        return x * self.weight


def test_the_knee_is_found_and_the_model_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.engine.tuning.prober.time", clock)
    model = Overhead()
    found = brim.tune_batch(model, torch.zeros(1, 3), mode="train", device="cpu", seconds=600, max_batch=64)

    assert found.batch == 32
    assert found.max_safe >= found.batch
    assert "times batch 1" in found.verdict
    assert "fastest batch" in repr(found)
    assert model.weight.grad is None
    assert torch.equal(model.weight, torch.ones(3))


class Watched(nn.Linear):
    """Remembers how it was called, as do its copies."""

    seen: ClassVar[set[tuple[bool, bool]]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add((self.training, torch.is_grad_enabled()))
        return super().forward(x)


@pytest.mark.parametrize("mode", ["train", "predict"])
def test_what_is_tuned_is_a_training_step_or_a_prediction(mode: str) -> None:
    Watched.seen.clear()
    brim.tune_batch(Watched(4, 1), torch.zeros(1, 4), mode=mode, device="cpu", seconds=0.01, max_batch=1)
    assert ((True, True) in Watched.seen) == (mode == "train")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.layer(x) * scale[:, None]}


@pytest.mark.parametrize(
    ("model", "example", "options"),
    [
        (nn.Conv2d(3, 2, 3), torch.zeros(3, 8, 8).numpy(), {}),
        (nn.Linear(4, 1), (torch.zeros(1, 4), torch.zeros(1)), {}),
        (nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)), torch.zeros(1, 4), {}),  # refuses one item
        (Named(), {"x": torch.zeros(1, 4), "scale": torch.ones(1)}, {"mode": "predict"}),
        (
            nn.Linear(4, 1),
            (torch.zeros(1, 4), torch.zeros(1)),
            {"loss_fn": lambda model, batch: nn.functional.mse_loss(model(batch[0])[:, 0], batch[1])},
        ),
    ],
)
def test_an_example_is_a_batch_an_item_or_several_of_them(model: Any, example: Any, options: Any) -> None:
    assert brim.tune_batch(model, example, device="cpu", seconds=0.01, max_batch=2, **options).batch in (1, 2)


@pytest.mark.parametrize(
    ("model", "example", "options", "message"),
    [
        (nn.Linear(4, 1), torch.zeros(1, 3), {}, r"does not run on the example .*give a batch of its inputs"),
        (nn.Linear(4, 1), "x", {}, "part 0 is a str"),
        (nn.ReLU(), torch.zeros(1, 4), {}, 'give mode="predict"'),
    ],
)
def test_what_cannot_be_tuned_is_refused(model: Any, example: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        brim.tune_batch(model, example, seconds=1, **options)
