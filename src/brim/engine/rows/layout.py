"""Rows as plain integers: one layout for every dtype, gathered and copied in few steps.

Axes: N rows.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

from brim.engine.storage.dataset import Fields
from brim.errors import ConfigError

Batch = dict[str, Tensor]

_CARRIERS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_ALIGN = 256  # bytes, between fields in one buffer: what a GPU's own allocator gives


class Layout:
    """Fields seen as matrices of the widest integers that fit a row: one gather for every dtype, in few steps.

    matrices  (N, row bytes / width)  int64, int32, int16 or uint8
    """

    def __init__(self, fields: Fields) -> None:
        """Find the widest integers for every field."""
        self.fields = fields
        self._matrices: dict[str, tuple[torch.dtype, int]] = {}
        for name, (dtype, shape) in fields.items():
            size = dtype.itemsize * prod(shape)
            width, carrier = next(pair for pair in _CARRIERS if size % pair[0] == 0)
            self._matrices[name] = (carrier, size // width)

    def pack(self, tensors: Batch) -> Batch:
        """The same memory as matrices."""
        return {name: self._pack(name, tensors[name]) for name in self.fields}

    def unpack(self, matrices: Batch) -> Batch:
        """The same memory as fields."""
        return {
            name: matrices[name].view(dtype).view(len(matrices[name]), *shape)
            for name, (dtype, shape) in self.fields.items()
        }

    def allocate(self, num_rows: int, device: torch.device) -> Batch:
        """Matrices for so many rows, not initialised."""
        return {
            name: torch.empty((num_rows, columns), dtype=carrier, device=device)
            for name, (carrier, columns) in self._matrices.items()
        }

    def flat_bytes(self, num_rows: int) -> int:
        """Bytes of one buffer for all fields of so many rows."""
        return sum(self._padded(num_rows, name) for name in self.fields)

    def carve(self, flat: Tensor, num_rows: int) -> Batch:
        """Matrices behind each other in one buffer, so that one copy moves them all."""
        matrices, offset = {}, 0
        for name, (carrier, columns) in self._matrices.items():
            size = num_rows * columns * carrier.itemsize
            matrices[name] = flat[offset : offset + size].view(carrier).view(num_rows, columns)
            offset += self._padded(num_rows, name)
        return matrices

    def _padded(self, num_rows: int, name: str) -> int:
        carrier, columns = self._matrices[name]
        return -(-num_rows * columns * carrier.itemsize // _ALIGN) * _ALIGN

    def _pack(self, name: str, tensor: Tensor) -> Tensor:
        _, shape = self.fields[name]
        return tensor.view(len(tensor), prod(shape)).view(self._matrices[name][0])


class Target:
    """Static tensors that batches are copied into; tensors of one width go in one launch."""

    def __init__(self, layout: Layout, out: Batch) -> None:
        """Group the tensors by width."""
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


def gather(rows: Batch, index: Tensor, out: Batch | None = None) -> Batch:
    """Rows by index, all on one device; on a host without torch's threads, which cost more than they copy."""
    if index.is_cuda:
        if out is None:
            return {name: torch.index_select(matrix, 0, index) for name, matrix in rows.items()}
        for name, matrix in rows.items():
            torch.index_select(matrix, 0, index, out=out[name])
        return out
    if out is None:
        out = {name: matrix.new_empty((len(index), matrix.shape[1])) for name, matrix in rows.items()}
    for name, matrix in rows.items():
        # clip: the index is ours and in bounds; NumPy's check would make it copy twice
        np.take(matrix.numpy(), index.numpy(), axis=0, out=out[name].numpy(), mode="clip")
    return out


def check_out(out: Batch, fields: Fields, batch_size: int, device: torch.device) -> None:
    """Raise ConfigError unless out has a tensor for every field that a full batch can be written into."""
    for name, (dtype, shape) in fields.items():
        tensor, expected = out.get(name), (batch_size, *shape)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != expected:
            found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ConfigError(f'out["{name}"] is {found}, expected {dtype} {list(expected)}; use static_batch()')
        if tensor.device != device or not tensor.is_contiguous() or tensor.data_ptr() % 8:
            raise ConfigError(f'out["{name}"] must be contiguous on {device}; use static_batch()')
