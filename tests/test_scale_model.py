"""The model of a cluster in benchmarks/simulate_cluster.py: its formula agrees with its simulation."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "simulate_cluster.py"


@pytest.fixture(scope="module")
def model() -> Any:
    spec = importlib.util.spec_from_file_location("simulate_cluster", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("samples", "workers", "nodes", "items"),
    [(10_000_000, 1, 1, 512), (50_000_000, 64, 64, 4096)],
)
def test_the_formula_says_what_the_simulation_finds(model, samples, workers, nodes, items):
    plan = model.Plan(samples=samples, workers=workers, nodes=nodes, shard_items=items)
    machine = model.Machine()

    assert model.forecast(plan, machine).seconds == pytest.approx(model.simulate(plan, machine).seconds, rel=0.1)
