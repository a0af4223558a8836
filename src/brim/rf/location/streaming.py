"""Samples that are made in memory to train on, and never written."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from brim.config import Range, check
from brim.errors import ConfigError
from brim.rf.config import GenerateConfig
from brim.rf.features import FEATURES
from brim.rf.generation.attempts import accepted_batches
from brim.rf.generation.drawn import DRAWN, draw_accepted
from brim.rf.generation.stages import Stages
from brim.rf.physics.impairments import is_impaired


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What is made: the samples that a dataset of these settings would hold."""

    generation: GenerateConfig
    samples: Annotated[int, Range(2)]
    drawn: bool = False  # from the paths alone, without IQ: far faster on a CPU, but only strengths and arrivals

    def __post_init__(self) -> None:
        check(self)
        if self.drawn and is_impaired(replace(self.generation, adc_clip_db=0.0)):
            raise ConfigError(
                "knows nothing of interference and of receivers that ripple, drift or lose blocks",
                field="feature_level",
                code="conflict",
                hint="leave {feature_level} out, or those settings",
            )

    @property
    def features(self) -> tuple[str, ...]:
        """Those that mean something."""
        return DRAWN if self.drawn else tuple(name for name, _ in FEATURES)

    def rows(self, device: torch.device) -> dict[str, Tensor]:
        """The samples, on the host."""
        if self.drawn:
            return draw_accepted(self.generation, self.samples)
        parts = []
        with Stages(self.generation, device) as stages:
            first = next(accepted_batches(self.generation, 1, {}, lambda: 1)).scenes
            stages.prepare(first, None, None)
            batches = accepted_batches(self.generation, self.samples, {}, stages.next_batch)
            stages.meter.start()
            with stages.run((batch.scenes, None) for batch in batches) as results:
                parts = [rows for rows, _ in results]
            stages.meter.stop()
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
