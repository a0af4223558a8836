"""Which tier, the order of rows in an epoch, and the layout that moves rows of any dtype as plain integers.

Axes: N rows.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from brim.engine.config import TIERS, Tier
from brim.engine.device import format_size, stream
from brim.engine.storage import RowFields
from brim.engine.training import Batch, Fetcher
from brim.errors import ConfigError

Shuffle = bool | Literal["blocks"]

HOST = torch.device("cpu")

_BLOCK_BYTES = 32 * 2**20  # largest block: the first one of an epoch has to be waited for
_NUM_BLOCKS = 32  # fewest blocks of a dataset: a quarter of it is a window of eight


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
    """The fastest tier that has room for the data besides the memory the model needs."""
    name = device_name or str(device)
    data, host = format_size(data_bytes), f"{format_size(host_free_bytes)} free on the host"
    fits_host = data_bytes <= 0.8 * host_free_bytes  # the page cache and others live there too
    if device.type == "cpu":
        if data_bytes + reserve_bytes <= 0.8 * host_free_bytes:
            return Choice("ram", f"{data} of data in {host}")
        return Choice("window", f"{data} of data do not fit in {host}")
    # a tenth is kept for fragmentation and libraries, unless the caller insists
    room_bytes = device_free_bytes if preload_to_gpu else int(0.9 * device_free_bytes)
    room = f"{format_size(device_free_bytes)} free on {name}"
    beside = f" beside {format_size(reserve_bytes)} for the model" if reserve_bytes else ""
    if preload_to_gpu is not False and data_bytes + reserve_bytes <= room_bytes:
        return Choice("vram", f"{data} of data in {room}{beside}")
    reason = "preload_to_gpu is off" if preload_to_gpu is False else f"{room} are too few{beside}"
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
    """Blocks of positions of which this rank has positions first, first + step, first + 2·step, …; by default all."""

    whole: int  # positions of a block of the whole
    step: int = 1
    first: int = 0

    @property
    def items(self) -> int:
        """Largest number of positions of a block on this rank."""
        return -(-self.whole // self.step)

    def of(self, positions: Tensor) -> Tensor:
        """The blocks that hold these positions, counted among those of this rank."""
        return torch.div(positions * self.step + self.first, self.whole, rounding_mode="floor")

    def start(self, block: Any) -> Any:
        """First position of a block, or of each of several."""
        return -((self.first - block * self.whole) // self.step)


class Turns:
    """An epoch's order as a sequence of blocks (turns), and as positions in a ring of slots."""

    def __init__(self, positions: Tensor, sizes: Blocks, num_slots: int) -> None:
        block = sizes.of(positions)
        blocks, lengths = torch.unique_consecutive(block, return_counts=True)
        self.blocks: list[int] = blocks.tolist()
        self._ends = lengths.cumsum(0)
        turn = torch.repeat_interleave(torch.arange(len(blocks)), lengths)
        self.ring_index = (turn % num_slots) * sizes.items + (positions - sizes.start(block))

    def block_at(self, place: int) -> int:
        """The turn whose block holds this position of the order; one past the last beyond the end."""
        return int(torch.searchsorted(self._ends, place, right=True))


def check_tier(tier: str) -> None:
    """Raise ConfigError for a name that is neither a tier nor "auto"."""
    if tier not in ("auto", *TIERS):
        raise ConfigError(f"tier={tier} is unknown", hint=f"choose one of auto, {', '.join(TIERS)}")


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
        raise ConfigError(f'preload_to_gpu={preload_to_gpu} contradicts tier="{tier}"', hint="give one of them")
    if shuffle not in (True, False, "blocks"):
        raise ConfigError(f"shuffle={shuffle!r} is not known", hint='use True, False or "blocks"')
    if tier == "window" and shuffle is True:
        raise ConfigError('tier="window" holds a part of the rows and shuffles by blocks', hint='give shuffle="blocks"')
    for name, value in (("batch_size", batch_size), ("window_bytes", window_bytes), ("block_items", block_items)):
        needed = name == "batch_size"
        if (value is not None or needed) and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{name}={value!r} must be a whole number, at least 1")
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if not 0 < window_share <= 1:
        raise ConfigError(f"window_share={window_share} must be above 0 and at most 1", hint="0.25 holds a quarter")


_CARRIERS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_ALIGN = 256  # bytes between fields in one buffer, as a GPU's allocator aligns


class RowLayout:
    """Fields viewed as matrices of the widest integers that divide a row: one gather for every dtype.

    matrices  (N, row bytes / width)  int64, int32, int16 or uint8
    """

    def __init__(self, fields: RowFields) -> None:
        self.fields = fields
        self._matrices: dict[str, tuple[torch.dtype, int]] = {}
        for name, (dtype, shape) in fields.items():
            size = dtype.itemsize * prod(shape)
            width, carrier = next(pair for pair in _CARRIERS if size % pair[0] == 0)
            self._matrices[name] = (carrier, size // width)

    def pack(self, tensors: Batch) -> Batch:
        return {
            name: tensors[name].view(len(tensors[name]), prod(shape)).view(self._matrices[name][0])
            for name, (_, shape) in self.fields.items()
        }

    def unpack(self, matrices: Batch) -> Batch:
        return {
            name: matrices[name].view(dtype).view(len(matrices[name]), *shape)
            for name, (dtype, shape) in self.fields.items()
        }

    def allocate(self, num_rows: int, device: torch.device) -> Batch:
        return {
            name: torch.empty((num_rows, columns), dtype=carrier, device=device)
            for name, (carrier, columns) in self._matrices.items()
        }

    def flat_bytes(self, num_rows: int) -> int:
        """Bytes of one buffer for all fields of num_rows rows."""
        return sum(self._padded(num_rows, name) for name in self.fields)

    def carve(self, flat: Tensor, num_rows: int) -> Batch:
        """Matrices one after another in one buffer, so that one copy moves them all."""
        matrices, offset = {}, 0
        for name, (carrier, columns) in self._matrices.items():
            size = num_rows * columns * carrier.itemsize
            matrices[name] = flat[offset : offset + size].view(carrier).view(num_rows, columns)
            offset += self._padded(num_rows, name)
        return matrices

    def _padded(self, num_rows: int, name: str) -> int:
        carrier, columns = self._matrices[name]
        return -(-num_rows * columns * carrier.itemsize // _ALIGN) * _ALIGN


class Target:
    """Static tensors that batches are copied into; tensors of one width share one launch."""

    def __init__(self, layout: RowLayout, out: Batch) -> None:
        self._out = out
        self._matrices = layout.pack(out)
        self._rows = len(next(iter(self._matrices.values())))
        self._groups: dict[torch.dtype, list[str]] = {}
        for name, matrix in self._matrices.items():
            self._groups.setdefault(matrix.dtype, []).append(name)

    def take(self, chunk: Batch, rows: slice) -> Batch:
        """Copy these rows of a chunk, and return the tensors that hold them."""
        num = rows.stop - rows.start
        for names in self._groups.values():
            targets = [self._matrices[name][:num] for name in names]
            parts = [chunk[name][rows] for name in names]
            if targets[0].is_cuda:
                torch._foreach_copy_(targets, parts)
                continue
            for target, part in zip(targets, parts, strict=True):
                np.copyto(target.numpy(), part.numpy())  # as in gather
        return self._out if num == self._rows else {name: tensor[:num] for name, tensor in self._out.items()}


class RowFetcher(Fetcher):
    """Batches of rows that are on the device, in the order of an epoch that is there too.

    rows   by name (N, columns)  as RowLayout has them
    order  of an epoch: (N,)  int64  positions of the rows, on the host
    """

    def __init__(
        self, rows: Batch, layout: RowLayout, batch_size: int, num_batches: int, order: Callable[[int], Tensor]
    ) -> None:
        self._rows, self._layout, self._batch_size, self._num_batches, self._order = (
            rows,
            layout,
            batch_size,
            num_batches,
            order,
        )
        device = next(iter(rows.values())).device
        self._matrices = [layout.allocate(batch_size, device) for _ in range(2)]
        self.inputs = (layout.unpack(self._matrices[0]), layout.unpack(self._matrices[1]))
        self._positions = torch.zeros(len(next(iter(rows.values()))), dtype=torch.int64, device=device)
        self._at = torch.zeros((), dtype=torch.int64, device=device)  # position in the order of the batch fetched next
        self._batch = torch.arange(batch_size, device=device)
        self._places, self._index = torch.zeros_like(self._batch), torch.zeros_like(self._batch)

    def fetch(self, turn: int) -> None:
        torch.add(self._batch, self._at, out=self._places)
        self._places.clamp_(max=len(self._positions) - 1)  # after the last full batch something is fetched in vain
        torch.index_select(self._positions, 0, self._places, out=self._index)
        gather(self._rows, self._index, self._matrices[turn])
        self._at += self._batch_size

    def epoch(self, number: int, start_batch: int) -> Generator[Batch]:
        order = self._order(number)
        num_full = len(order) // self._batch_size
        on_gpu = self._positions.is_cuda
        self._positions.copy_(order.pin_memory() if on_gpu else order, non_blocking=on_gpu)
        self._at.fill_(start_batch * self._batch_size)
        if start_batch < num_full:
            self.fetch(0)
        for batch in range(start_batch, self._num_batches):
            if batch < num_full:
                yield self.inputs[(batch - start_batch) % 2]
            else:
                yield self._layout.unpack(gather(self._rows, self._positions[num_full * self._batch_size :]))


def gather(rows: Batch, index: Tensor, out: Batch | None = None) -> Batch:
    """Gather rows by index, all on one device; on the host with NumPy, as torch's threads cost more than they save."""
    if index.is_cuda:
        if out is None:
            return {name: torch.index_select(matrix, 0, index) for name, matrix in rows.items()}
        for name, matrix in rows.items():
            torch.index_select(matrix, 0, index, out=out[name])
        return out
    if out is None:
        out = {name: matrix.new_empty((len(index), matrix.shape[1])) for name, matrix in rows.items()}
    for name, matrix in rows.items():
        # clip: the index is known to be in bounds; NumPy's check would copy twice
        np.take(matrix.numpy(), index.numpy(), axis=0, out=out[name].numpy(), mode="clip")
    return out


def check_out(out: Batch, fields: RowFields, batch_size: int, device: torch.device) -> None:
    """Raise ConfigError unless out has a tensor for every field that a full batch can be written into."""
    for name, (dtype, shape) in fields.items():
        tensor, expected = out.get(name), (batch_size, *shape)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != expected:
            actual = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ConfigError(
                f'out["{name}"] is {actual}, expected {dtype} {list(expected)}', hint="use static_batch()"
            )
        if tensor.device != device or not tensor.is_contiguous() or tensor.data_ptr() % 8:
            raise ConfigError(f'out["{name}"] must be contiguous on {device}', hint="use static_batch()")
