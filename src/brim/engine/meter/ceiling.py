"""The ceiling of a run, measured between its batches: how fast the compute stage is alone, and the share reached.

A ceiling measured after the run compares two moments of a machine; on a busy one the share came out as 1.2 or 2.5.
Measured every now and then during the run, whatever slows one slows the other.
"""

import math
import statistics
from dataclasses import dataclass, field

FIRST_S = 0.2  # of the run before the first measurement
GROWTH = 1.5  # between measurements, in seconds of the run
LONGEST_S = 20.0  # between measurements
BUDGET = 0.05  # share of the run that may be spent on measuring
LEAST = 3  # measurements from which the share is known
UNEVEN = 0.15  # relative standard error of the ceilings above which nothing is known
ROUNDING = 0.03  # by which a share may exceed 1 though the ceilings agree
TOO_SHORT = "run too short"
TOO_UNEVEN = "the timings are too uneven"


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingShare:
    share: float | None = None  # None: not measured
    spread: float | None = None  # standard deviation of the share between the measurements
    reason: str = TOO_SHORT  # why it is None

    def words(self) -> str:
        if self.share is None:
            return f"ceiling not measured: {self.reason}"
        spread = "" if self.spread is None else f" ± {self.spread:.1%}"
        return f"{self.share:.1%}{spread} of the ceiling"


@dataclass(slots=True)
class CeilingProbe:
    """Decides when to measure, and what the measurements say."""

    rates: list[float] = field(default_factory=list)  # items/s of the compute stage alone
    cost_s: float = 0.0  # of measuring, not part of the run
    _next_s: float = FIRST_S

    def due(self, run_s: float, estimate_s: float) -> bool:
        """Whether to measure now; estimate_s: how long that would take."""
        return run_s >= self._next_s and BUDGET * run_s >= self.cost_s + estimate_s

    def add(self, rate: float, cost_s: float, run_s: float) -> None:
        self.rates.append(rate)
        self.cost_s += cost_s
        self._next_s = min(GROWTH * run_s, run_s + LONGEST_S)

    def share(self, rate: float) -> CeilingShare:
        """The share that a run of this rate reached, if enough was measured and the measurements agree."""
        if len(self.rates) < LEAST or rate <= 0:
            return CeilingShare()
        middle = statistics.median(self.rates)
        share, uneven = rate / middle, statistics.stdev(self.rates) / middle
        spread = uneven * share
        if uneven / math.sqrt(len(self.rates)) > UNEVEN or share > 1 + max(ROUNDING, 2 * spread):
            return CeilingShare(reason=TOO_UNEVEN)
        return CeilingShare(share=min(1.0, share), spread=spread)


def of_several(rate: float, ceiling: float | None) -> CeilingShare:
    """Share of a run of several workers, whose ceilings were added up; no share where it cannot be right."""
    if not ceiling or rate <= 0:
        return CeilingShare()
    share = rate / ceiling
    return CeilingShare(reason=TOO_UNEVEN) if share > 1 + ROUNDING else CeilingShare(share=min(1.0, share))
