"""Which attempts become samples: accepted scenes in ascending order, with counts of what was refused and why."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from brim.errors import NothingAccepted
from brim.rf.config import GenerateConfig
from brim.rf.physics.scene import Scenes, make_scenes

REASONS = ("receivers", "gdop")  # a sample that fails both counts under the first
MAX_TRIES = 200_000  # attempts in a row without an accepted one before we say that the gates refuse everything
BLOCK = 4_096  # scenes made at once, at most: some tens of ms

Totals = dict[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Accepted scenes with the running totals after each: attempts, and refusals by reason."""

    scenes: Scenes
    totals: Totals

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, rows: slice) -> "Accepted":
        return Accepted(scenes=self.scenes[rows], totals={name: values[rows] for name, values in self.totals.items()})


def accepted_batches(
    config: GenerateConfig, num_samples: int, start: dict[str, int], batch_size: Callable[[], int]
) -> Iterator[Accepted]:
    """The next `num_samples` accepted samples in batches, from the totals of an earlier run on.

    batch_size is asked before every batch: it may have shrunk for want of memory.
    """
    at = start.get("attempted", 0)
    refused = {reason: start.get(reason, 0) for reason in REASONS}
    waiting, in_vain = _gate(config, np.arange(0), refused)[0], 0
    while num_samples > 0:
        size = max(1, min(batch_size(), num_samples))
        while len(waiting) < size:
            block = max(2 * (size - len(waiting)) + 16, in_vain)  # the more refused in a row, the more at once
            index = np.arange(at, at + min(BLOCK, block))
            more, refused = _gate(config, index, refused)
            at, in_vain = at + len(index), 0 if len(more) else in_vain + len(index)
            if in_vain >= MAX_TRIES:
                raise NothingAccepted(complaint(config, in_vain, refused))
            waiting = _join(waiting, more)
        yield waiting[:size]
        waiting, num_samples = waiting[size:], num_samples - size


def first_accepted(config: GenerateConfig) -> Scenes:
    """The first accepted sample; raises NothingAccepted when the gates refuse everything."""
    return next(accepted_batches(config, 1, {}, lambda: 1)).scenes


def _gate(config: GenerateConfig, index: NDArray[np.int64], refused: dict[str, int]) -> tuple[Accepted, dict[str, int]]:
    """The accepted ones among some attempts, and the refusals after the last."""
    scenes = make_scenes(config, index)
    keep = np.nonzero(scenes.accepted)[0]
    few = refused["receivers"] + np.cumsum(~scenes.enough)
    wide = refused["gdop"] + np.cumsum(scenes.enough & ~scenes.accepted)
    totals = {"attempted": index[keep] + 1, "receivers": few[keep], "gdop": wide[keep]}
    after = {"receivers": int(few[-1]), "gdop": int(wide[-1])} if len(index) else refused
    return Accepted(scenes=scenes[keep], totals=totals), after


def _join(first: Accepted, second: Accepted) -> Accepted:
    def both(name: str) -> NDArray[np.float64]:
        return np.concatenate([getattr(first.scenes, name), getattr(second.scenes, name)])

    return Accepted(
        scenes=Scenes(**{field.name: both(field.name) for field in fields(Scenes)}),  # type: ignore[arg-type]
        totals={name: np.concatenate([first.totals[name], second.totals[name]]) for name in first.totals},
    )


def complaint(config: GenerateConfig, tried: int, refused: dict[str, int]) -> str:
    """What to say when so many attempts in a row were refused, and what to change."""
    rules = {
        "receivers": f"fewer than min_receivers={config.min_receivers} heard it at min_snr_db={config.min_snr_db:g} "
        f"with tx_power_dbm={config.tx_power_dbm:g}: raise the power, or lower min_snr_db or min_receivers",
        "gdop": f"its GDOP was above max_gdop={config.max_gdop:g}: raise max_gdop or spread the stations",
    }
    counts = ", ".join(f"{reason} {refused[reason]}" for reason in REASONS)
    worst = max(REASONS, key=lambda reason: refused[reason])
    return f"none of {tried} attempts in a row was accepted (refused so far: {counts}); mostly {rules[worst]}"
