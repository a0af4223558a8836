"""What each optimisation gains on this machine, measured."""

from brim.sequences.ablation.report import Ablation, AblationProgress, AblationStep
from brim.sequences.ablation.run import ablate

__all__ = ["Ablation", "AblationProgress", "AblationStep", "ablate"]
