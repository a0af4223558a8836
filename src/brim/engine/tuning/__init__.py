"""The search for the fastest batch size that fits in memory."""

from brim.engine.tuning.prober import MakeStep, ProbeConfig, Prober, budget_bytes, tune
from brim.engine.tuning.search import Sweep, sweep
from brim.engine.tuning.trials import Trial, merge

__all__ = ["MakeStep", "ProbeConfig", "Prober", "Sweep", "Trial", "budget_bytes", "merge", "sweep", "tune"]
