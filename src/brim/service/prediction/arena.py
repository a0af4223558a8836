"""Bytes between two processes: slots in shared memory, written with one copy.

The memory has no name (`memfd_create`): its descriptor is sent over a Unix socket, and the kernel frees it with the
last process that has it, however that ends. One process puts and frees; the other only reads.
"""

import bisect
import fcntl
import mmap
import os

from brim.errors import ConfigError, Overloaded

ALIGN = 64
KEPT_BYTES = 32 * 1024**2  # kept when the arena is empty again; more is returned to the system
FULL_RETRY_S = 1.0


class Shared:
    """Memory mapped by two processes: the one that created it writes, the other reads."""

    def __init__(self, descriptor: int, prot: int = mmap.PROT_READ) -> None:
        """Map the memory of a descriptor, which is owned from now on."""
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self.map = mmap.mmap(descriptor, self.size_bytes, prot=prot)

    @classmethod
    def make(cls, size_bytes: int) -> "Shared":
        """New memory; its size is sealed, so that nobody can shrink it while another process reads."""
        descriptor = os.memfd_create("brim", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(descriptor, mmap.PROT_READ | mmap.PROT_WRITE)

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes of it, without a copy."""
        if not 0 <= offset <= offset + length <= self.size_bytes:
            raise ConfigError(f"bytes {offset} to {offset + length} are outside of {self.size_bytes} shared ones")
        return memoryview(self.map)[offset : offset + length]

    def close(self) -> None:
        """Unmap it, once no view is held."""
        os.close(self.descriptor)
        try:
            self.map.close()
        except BufferError:
            return


class Arena:
    """First-fit slots in shared memory."""

    def __init__(self, shared: Shared, start: int = 0) -> None:
        """Use the memory from `start` on."""
        self.shared = shared
        self._start, self._end = start, shared.size_bytes
        self._free = [(start, shared.size_bytes - start)]  # (offset, length), by offset, no two adjacent
        self._taken: dict[int, int] = {}  # offset → length
        self._touched = start  # end of what was written since memory was last returned

    @property
    def used_bytes(self) -> int:
        return sum(self._taken.values())

    def put(self, data: bytes | bytearray | memoryview) -> int:
        """Copy data in and return its offset; Overloaded if there is no room."""
        offset = self.reserve(len(data))
        self.shared.map[offset : offset + len(data)] = data
        return offset

    def reserve(self, length: int) -> int:
        """The offset of a new slot."""
        need = max(ALIGN, -(-length // ALIGN) * ALIGN)
        for index, (offset, free) in enumerate(self._free):
            if free >= need:
                self._free[index : index + 1] = [(offset + need, free - need)] if free > need else []
                self._taken[offset] = need
                self._touched = max(self._touched, offset + need)
                return offset
        if need > self._end - self._start:
            raise ConfigError(f"{length} bytes are more than the {self._end - self._start} that can be sent at once")
        raise Overloaded("too many bytes are on their way to the models; try again soon", retry_after_s=FULL_RETRY_S)

    def free(self, offset: int) -> None:
        """Free a slot and join it with free neighbours."""
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
