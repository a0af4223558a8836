"""A caller's optimiser on a GPU: captured steps train as eager ones do, schedules included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.engine.config import TrainConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

X = torch.arange(8000.0).reshape(1000, 8).sin()
Y = X.sum(1, keepdim=True)


def trained(out: Path, compile: Any, optimizer: Any, scheduler: Any) -> tuple[torch.Tensor, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    recipe = TrainConfig(
        compile=compile, precision="fp32", tensorboard=False, measure_ceiling=False, clip_norm=None, epochs=5
    )
    data = brim.Resident((X, Y), batch_size=100, device="cuda")
    report = brim.train(model, nn.MSELoss(), data, out=out, optimizer=optimizer, scheduler=scheduler, config=recipe)
    data.close()
    return torch.cat([param.detach().flatten() for param in model.parameters()]).cpu(), report.step_kind


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "kind"),
    [
        (lambda params: torch.optim.SGD(params, 0.05, momentum=0.9), None, "graph"),
        (
            lambda params: torch.optim.SGD(params, 0.05),
            lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5),
            "graph",
        ),
        (lambda params: torch.optim.Adam(params, 0.01), lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2), "graph"),
        (lambda params: torch.optim.Adagrad(params, 0.05), None, "eager"),
    ],
)
def test_captured_steps_equal_eager_ones(optimizer: Any, scheduler: Any, kind: str, tmp_path: Path) -> None:
    captured, how = trained(tmp_path / "captured", "auto", optimizer, scheduler)
    eager, _ = trained(tmp_path / "eager", "none", optimizer, scheduler)

    assert how == kind
    torch.testing.assert_close(captured, eager, atol=1e-4, rtol=1e-3)
