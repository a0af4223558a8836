"""Which tier, and which row when: choices made from numbers alone. Nothing here reads, copies or waits."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from brim.engine.config import TIERS, Tier
from brim.engine.device.devices import stream
from brim.engine.device.memory import format_size
from brim.errors import ConfigError

Shuffle = bool | Literal["blocks"]

HOST = torch.device("cpu")

_BLOCK_BYTES = 32 * 2**20  # of a block, at most: the first one of an epoch is waited for
_NUM_BLOCKS = 32  # in a dataset, at least: a quarter of it is a window of eight


@dataclass(frozen=True, slots=True)
class Choice:
    """A tier and the reason for it."""

    tier: Tier
    why: str


def choose_tier(
    device: torch.device,
    *,
    data_bytes: int,
    reserve_bytes: int,
    device_free_bytes: int,
    host_free_bytes: int,
    preload_to_gpu: bool | None = None,
    device_name: str = "",
) -> Choice:
    """The fastest tier that has room for the data beside what the model will need."""
    name = device_name or str(device)
    data, host = format_size(data_bytes), f"{format_size(host_free_bytes)} free on the host"
    fits_host = data_bytes <= 0.8 * host_free_bytes  # the page cache and others live there too
    if device.type == "cpu":
        if data_bytes + reserve_bytes <= 0.8 * host_free_bytes:
            return Choice("ram", f"{data} of data in {host}")
        return Choice("window", f"{data} of data do not fit in {host}")
    # a tenth for fragments and libraries, which is not asked for when the caller insists
    room_bytes = device_free_bytes if preload_to_gpu else int(0.9 * device_free_bytes)
    there = f"{format_size(device_free_bytes)} free on {name}"
    beside = f" beside {format_size(reserve_bytes)} for the model" if reserve_bytes else ""
    if preload_to_gpu is not False and data_bytes + reserve_bytes <= room_bytes:
        return Choice("vram", f"{data} of data in {there}{beside}")
    reason = "preload_to_gpu is off" if preload_to_gpu is False else f"{there} are too few{beside}"
    if preload_to_gpu is False or fits_host:
        return Choice("ram", f"{data} of data in {host}; {reason}")
    return Choice("window", f"{data} of data do not fit in {host}; {reason}")


def epoch_order(num_items: int, *, seed: int, epoch: int, shuffle: Shuffle, block_items: int) -> Tensor:
    """Positions in the order of an epoch, int64 on the host; a function of its arguments alone."""
    if shuffle is False:
        return torch.arange(num_items)
    rng = stream(seed, "order", epoch, device=HOST)
    if shuffle is True:
        return torch.randperm(num_items, generator=rng)
    blocks = torch.randperm(-(-num_items // block_items), generator=rng).tolist()
    parts = []
    for block in blocks:
        start = block * block_items
        parts.append(torch.randperm(min(block_items, num_items - start), generator=rng) + start)
    return torch.cat(parts)


def default_block(num_items: int, item_bytes: int) -> int:
    """Rows of a block, from the number and size of the rows."""
    return max(1, min(-(-num_items // _NUM_BLOCKS), _BLOCK_BYTES // max(1, item_bytes)))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a whole of which every step-th position is here, from the first-th on; by default all of them."""

    whole: int  # positions of a block of the whole
    step: int = 1
    first: int = 0

    @property
    def items(self) -> int:
        """Positions of a block that are here, at most."""
        return -(-self.whole // self.step)

    def of(self, positions: Tensor) -> Tensor:
        """The blocks that hold these positions, which are counted among those here."""
        return torch.div(positions * self.step + self.first, self.whole, rounding_mode="floor")

    def start(self, block: Any) -> Any:
        """First position of a block, or of each of several."""
        return -((self.first - block * self.whole) // self.step)


class Turns:
    """An epoch's order as blocks, one turn each, and as places in a ring of slots."""

    def __init__(self, positions: Tensor, sizes: Blocks, num_slots: int) -> None:
        block = sizes.of(positions)
        blocks, lengths = torch.unique_consecutive(block, return_counts=True)
        self.blocks: list[int] = blocks.tolist()
        self._ends = lengths.cumsum(0)
        turn = torch.repeat_interleave(torch.arange(len(blocks)), lengths)
        self.ring_index = (turn % num_slots) * sizes.items + (positions - sizes.start(block))

    def block_at(self, place: int) -> int:
        """Turn whose block holds this place in the order; one past the last beyond the end."""
        return int(torch.searchsorted(self._ends, place, right=True))


def check_tier(tier: str) -> None:
    """Refuse a name that is neither a tier nor "auto"."""
    if tier not in ("auto", *TIERS):
        raise ConfigError(f"tier={tier} is unknown; choose one of auto, {', '.join(TIERS)}")


def check_options(
    tier: str,
    preload_to_gpu: bool | None,
    shuffle: Shuffle,
    batch_size: int,
    window_share: float,
    window_bytes: int | None,
    block_items: int | None,
) -> None:
    """Raise ConfigError when options are unknown, out of range or contradict each other."""
    check_tier(tier)
    if tier != "auto" and preload_to_gpu is not None and preload_to_gpu != (tier == "vram"):
        raise ConfigError(f'preload_to_gpu={preload_to_gpu} contradicts tier="{tier}"; give one of them')
    if shuffle not in (True, False, "blocks"):
        raise ConfigError(f'shuffle={shuffle!r} is not known; use True, False or "blocks"')
    if tier == "window" and shuffle is True:
        raise ConfigError('tier="window" holds a part of the rows and shuffles by blocks; give shuffle="blocks"')
    for name, value in (("batch_size", batch_size), ("window_bytes", window_bytes), ("block_items", block_items)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if not 0 < window_share <= 1:
        raise ConfigError(f"window_share={window_share} must be above 0 and at most 1; 0.25 holds a quarter")
