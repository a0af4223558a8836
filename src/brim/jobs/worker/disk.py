"""Disk space: checked before a job starts, watched while it runs.

A job that fills the disk harms all others and the databases, so a reserve stays free.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from brim.errors import StorageError

RESERVE_BYTES: Final = 512 * 1024**2  # left to databases, logs and checkpoints; BRIM_MIN_FREE_BYTES sets another
FREE_BYTES_FILE: Final = "BRIM_FREE_BYTES_FILE"  # a file whose number stands in for the disk's, for tests


def reserve_bytes() -> int:
    text = os.environ.get("BRIM_MIN_FREE_BYTES", "")
    return int(text) if text.isdigit() else RESERVE_BYTES


def free_bytes(folder: Path) -> int:
    """Free bytes of the folder's disk; the folder itself need not exist yet."""
    if stand_in := os.environ.get(FREE_BYTES_FILE):
        return int(Path(stand_in).read_text())
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def used_bytes(folder: Path) -> int:
    """Bytes of the files in a folder; 0 if it does not exist."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(top, name)).st_size  # noqa: PTH118
            except FileNotFoundError:  # removed or renamed meanwhile
                continue
    return total


def check(folder: Path, need_bytes: int, reserve: int | None = None) -> None:
    """Reject a job whose estimated bytes do not fit; what it wrote before is counted."""
    reserve = reserve_bytes() if reserve is None else reserve
    missing = max(0, need_bytes - used_bytes(folder))
    check_room(folder, missing, reserve, "job", "free some space, then resume the job")


def check_room(folder: Path, need_bytes: int, reserve: int, thing: str, hint: str) -> None:
    """Reject what would leave less than the reserve free."""
    free = free_bytes(folder)
    if need_bytes + reserve > free:
        text = f"the {thing} needs about {words(need_bytes)} of disk and {words(reserve)} must stay free, but only "
        raise StorageError(f"{text}{words(free)} are free", hint=hint)


def watch(folder: Path, reserve: int | None = None) -> StorageError | None:
    """The error to stop a running job with if the disk is nearly full."""
    reserve = reserve_bytes() if reserve is None else reserve
    free = free_bytes(folder)
    if free >= reserve:
        return None
    return StorageError(
        f"the disk is nearly full: {words(free)} are free and {words(reserve)} must stay so; what was made so far is "
        "kept; free some space, then resume the job"
    )


def words(num_bytes: int) -> str:
    """1536 → '1.5 KiB'."""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
