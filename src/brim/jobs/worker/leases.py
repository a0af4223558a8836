"""Which GPUs a job has: a lock for each, so that a job on several of them and the other workers' jobs take turns.

A worker's job has the worker's own GPU, and where it asked for more, others besides. Everybody takes them in one order
and keeps what it has: nobody waits for somebody who waits for him, and no stream of small jobs starves a large one.
Locks end with their process.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from brim.jobs.kinds.task import Stopped
from brim.jobs.worker.process import FileLock

LOOK_S: Final = 0.3


def choose(gpus: Sequence[str], own: str, wanted: Any, is_free: Callable[[str], bool]) -> tuple[str, ...]:
    """The GPUs for a job of one worker: its own, then free ones, then those that others have now; in their order.

    More than there are is all there are: the kind says what is wrong with that.
    """
    count = len(gpus) if wanted == "all" else min(int(wanted), len(gpus))
    others = sorted((name for name in gpus if name != own), key=lambda name: not is_free(name))
    return tuple(sorted((own, *others[: max(0, count - 1)]), key=gpus.index))


@contextmanager
def leased(
    folder: Path, gpus: Sequence[str], own: str, wanted: Any, tell: Callable[[str], None], stop: Callable[[], bool]
) -> Iterator[tuple[str, ...]]:
    """Have the GPUs of a job, for as long as the block runs; while others have them, that is told again and again.

    folder  where the locks are, one for all workers
    """
    names = choose(gpus, own, wanted, lambda name: _is_free(folder, name))
    with ExitStack() as stack:
        for name in names:
            lock = FileLock(_file(folder, name))
            while not lock.take():
                tell(f"waiting for GPU {name}, which another job has")
                if stop():
                    raise Stopped
                time.sleep(LOOK_S)
            stack.callback(lock.release)
        yield names


def _is_free(folder: Path, name: str) -> bool:
    lock = FileLock(_file(folder, name))
    if not lock.take():
        return False
    lock.release()
    return True


def _file(folder: Path, name: str) -> Path:
    return folder / f"gpu-{''.join(letter if letter.isalnum() else '-' for letter in name)}.lock"
