"""Bytes that cross between two processes: slots in one piece of memory that both have mapped, and copy once.

The memory has no name (`memfd_create`): its descriptor is handed over a Unix socket, and the kernel takes it back with
the last process that has it, however that ends. One process puts and frees; the other only reads where it is told to.
"""

import bisect
import fcntl
import mmap
import os

from brim.errors import ConfigError, Overloaded

ALIGN = 64
KEPT_BYTES = 32 * 1024**2  # what an arena that is empty again keeps of its memory; more goes back to the system
FULL_RETRY_S = 1.0


class Shared:
    """Memory that two processes have mapped: the one that made it writes, the other reads."""

    def __init__(self, descriptor: int, prot: int = mmap.PROT_READ) -> None:
        """Map what the descriptor names, to read; the descriptor is ours from now on."""
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self.map = mmap.mmap(descriptor, self.size_bytes, prot=prot)

    @classmethod
    def make(cls, size_bytes: int) -> "Shared":
        """New memory; its size is sealed, so that nobody can cut it off under another's reading."""
        descriptor = os.memfd_create("brim", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(descriptor, mmap.PROT_READ | mmap.PROT_WRITE)

    def view(self, offset: int, length: int) -> memoryview:
        """Those bytes, without a copy."""
        if not 0 <= offset <= offset + length <= self.size_bytes:
            raise ConfigError(f"bytes {offset} to {offset + length} are outside of {self.size_bytes} shared ones")
        return memoryview(self.map)[offset : offset + length]

    def close(self) -> None:
        """Let it go; views that are still held keep it until they end."""
        os.close(self.descriptor)
        try:
            self.map.close()
        except BufferError:
            return


class Arena:
    """Slots in shared memory: first fit, bounded; a slot stays its owner's until it is freed."""

    def __init__(self, shared: Shared, start: int = 0) -> None:
        """Take the memory from `start` on."""
        self.shared = shared
        self._start, self._end = start, shared.size_bytes
        self._free = [(start, shared.size_bytes - start)]  # (offset, length), by offset, no two adjacent
        self._taken: dict[int, int] = {}  # offset → length
        self._touched = start  # how far it was ever written since memory last went back

    @property
    def used_bytes(self) -> int:
        """What its slots take."""
        return sum(self._taken.values())

    def put(self, data: bytes | bytearray | memoryview) -> int:
        """Copy in; the offset. Overloaded when there is no room."""
        offset = self.reserve(len(data))
        self.shared.map[offset : offset + len(data)] = data
        return offset

    def reserve(self, length: int) -> int:
        """Room for so many bytes; its offset."""
        need = max(ALIGN, -(-length // ALIGN) * ALIGN)
        for index, (offset, free) in enumerate(self._free):
            if free >= need:
                self._free[index : index + 1] = [(offset + need, free - need)] if free > need else []
                self._taken[offset] = need
                self._touched = max(self._touched, offset + need)
                return offset
        if need > self._end - self._start:
            raise ConfigError(f"{length} bytes are more than the {self._end - self._start} that can be sent at once")
        raise Overloaded("too many bytes are under way to the models; try again soon", retry_after_s=FULL_RETRY_S)

    def free(self, offset: int) -> None:
        """Give a slot back; its neighbours that are free become one with it."""
        length = self._taken.pop(offset)
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            before, more = self._free.pop(index - 1)
            index, offset, length = index - 1, before, length + more
        self._free.insert(index, (offset, length))
        if not self._taken:
            self._give_back()

    def _give_back(self) -> None:
        kept = self._start + KEPT_BYTES
        if self._touched > kept:
            self.shared.map.madvise(mmap.MADV_REMOVE, kept, self._end - kept)
            self._touched = kept
