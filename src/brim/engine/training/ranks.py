"""Several processes (ranks) that train as one: joining, agreeing on values, and handling the failure of one of them.

torch.distributed is used only here, and not at all by a single process. torchrun assigns the ranks through environment
variables. Rank 0 writes files and reports; the others compute. Two process groups connect them:

    control  gloo, on the host: flags, errors, small objects. Waits for as long as rank 0 evaluates or writes
    data     NCCL if every rank has its own GPU, else the same gloo: gradients and sums over a batch
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from brim.engine.device import gpu_uuid, resolve_device
from brim.errors import BrimError, ConfigError, RankLost

log = logging.getLogger("brim")

MEET_S = 60.0  # in which all ranks must have joined
WAIT_S = 7 * 24 * 3600.0  # longest wait for rank 0; a rank that dies is noticed at once
LOOK_S = 0.25  # between two checks whether any rank wants to stop, log or save
_BLAME_S = 3.0  # how long a failing rank may take to report why before the others end
_DRAIN_S = 0.1
_FAILURE = "brim-failure"
# found in torch's messages
_BROKEN = ("gloo", "connection closed", "connection reset", "broken pipe", "nccl", "socket")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """The processes that train together, and which of them this one is."""

    device: torch.device
    rank: int = 0
    size: int = 1
    restarted: bool = False  # by torchrun, after a rank died: the run is to be continued
    _control: Any = None
    _data: Any = None
    _store: Any = field(default=None, repr=False)

    @property
    def main(self) -> bool:
        """Whether this rank writes files and reports progress."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    # Objects, on the host

    def from_main(self, make: Callable[[], T]) -> T:
        """The value that rank 0 computes, on every rank; the others wait for it, and its error ends them too."""
        if self.alone:
            return make()
        box: list[Any] = [None, None]
        if self.main:
            try:
                box[0] = make()
            except BrimError as failure:
                box[1] = str(failure)
                distributed.broadcast_object_list(box, 0, self._control)
                raise
        distributed.broadcast_object_list(box, 0, self._control)
        if box[1] is not None:
            raise RankLost(f"rank 0 failed: {box[1]}")
        value: T = box[0]
        return value

    def all_of(self, mine: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        if self.alone:
            return [mine]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, mine, self._control)
        return values

    def greatest(self, *values: int) -> list[int]:
        """The maximum of each value over all ranks."""
        if self.alone:
            return list(values)
        together = torch.tensor(values)
        distributed.all_reduce(together, distributed.ReduceOp.MAX, self._control)
        return [int(value) for value in together]

    def leave(self) -> None:
        """Close the connections, once all ranks are here: the first to leave would break those of the others."""
        self.greatest(0)
        distributed.barrier(self._control)  # of no tensors
        # gloo's threads release the last tensors only now and need the interpreter lock for it
        time.sleep(_DRAIN_S)
        distributed.destroy_process_group()

    # Tensors, on the device

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; with NCCL it is queued, not waited for."""
        if not self.alone:
            distributed.all_reduce(tensor, distributed.ReduceOp.SUM, self._data)
        return tensor

    def averaging(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over the ranks, sent while the backward pass computes others."""
        if self.alone:
            return module
        known = signature(nn.parallel.DistributedDataParallel).parameters
        renamed = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {"process_group": self._data, "gradient_as_bucket_view": True, renamed: False}
        return nn.parallel.DistributedDataParallel(module, **options)

    # Failures

    def explained(self, failure: Exception) -> Exception:
        """What to raise when this rank cannot continue: its own failure, noted for the others, or that of another."""
        text = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        if isinstance(failure, RankLost):
            return failure
        if not _is_broken(failure):
            if not self._is_told(text):
                log.error("rank %d of %d: %s", self.rank, self.size, text)
            return failure
        if reason := self._noted(_FAILURE, _BLAME_S):
            return RankLost(f"{reason}; every rank ends with it")
        return RankLost(
            "another rank ended without a message",
            code="rank_lost",
            hint="look for what ended it, such as too little memory, then continue with {resume}; torchrun restarts "
            "ranks on its own if its max-restarts is set",
        )

    def _is_told(self, text: str) -> bool:
        """Record this rank's failure; returns whether rank 0, which reports for all, failed in the same way."""
        with suppress(RuntimeError):
            self._store.set(_FAILURE, f"rank {self.rank} failed: {text}")
            self._store.set(f"{_FAILURE}-{self.rank}", text)
        return self.main or self._noted(f"{_FAILURE}-0", _BLAME_S / 2) == text

    def _noted(self, name: str, wait_s: float) -> str:
        """The failure recorded under a name within wait_s; polled, because the store's own wait logs a warning."""
        until_s = time.monotonic() + wait_s
        with suppress(RuntimeError):  # the store may be gone too
            while time.monotonic() < until_s:
                if self._store.check([name]):
                    return str(self._store.get(name).decode())
                time.sleep(0.05)
        return ""


class Pace:
    """Decides at which steps the ranks synchronise, so that all of them stop, log or save at the same step.

    Rank 0 sets the number of steps until the next check from its clock: a few checks a second, however long a step is.
    """

    def __init__(self, ranks: Ranks, step: int) -> None:
        self._ranks = ranks
        self._due, self._looked, self._looked_s = step + 1, step, time.perf_counter()

    def any(self, step: int, wanted: bool) -> bool:
        """Whether any rank wants it, at a step with a check; False at other steps."""
        if self._ranks.alone:
            return wanted
        return step >= self._due and bool(self._ranks.greatest(int(wanted))[0])

    def go_on(self, step: int) -> None:
        """After a check, decide at which step the next one is."""
        if self._ranks.alone or step < self._due:
            return
        now_s = time.perf_counter()
        step_s = (now_s - self._looked_s) / max(1, step - self._looked)
        ahead = max(1, min(1000, int(LOOK_S / max(step_s, 1e-9)))) if self._ranks.main else 0
        self._due, self._looked, self._looked_s = step + self._ranks.greatest(ahead)[0], step, now_s


# Joining


@contextmanager
def joined(device: str = "auto") -> Iterator[Ranks]:
    """The ranks this process belongs to, from the environment that torchrun sets; a single process without it.

    A rank that fails ends all of them: the others find their connections closed.
    """
    rank, size, local = _place(os.environ)
    if size == 1:
        yield Ranks(device=resolve_device(device))
        return
    ranks = _join(rank, size, _device(device, local))
    try:
        yield ranks
        ranks.leave()
    except Exception as failure:
        reason = ranks.explained(failure)
        if reason is failure:
            raise
        raise reason from failure


def _place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of ranks and rank on this machine."""
    size = _number(environment, "WORLD_SIZE", 1)
    if size < 2:
        return 0, 1, 0
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={size} means that this is one of {size} ranks, but {' and '.join(missing)} are not set",
            hint="start the ranks with torchrun, or unset WORLD_SIZE",
        )
    rank = _number(environment, "RANK", 0)
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} must be from 0 to {size - 1}, as WORLD_SIZE={size}", hint="start with torchrun")
    return rank, size, _number(environment, "LOCAL_RANK", rank)


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name) or str(otherwise)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} is not a whole number", hint="torchrun sets it, or unset it")
    return int(text)


def _device(name: str, local_rank: int) -> torch.device:
    """As resolve_device, but without a number the ranks of a machine take its GPUs in turn."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return resolve_device(f"cuda:{local_rank % torch.cuda.device_count()}")
    return resolve_device(name)


def _join(rank: int, size: int, device: torch.device) -> Ranks:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        meeting = rendezvous("env://", rank, size, timeout=timedelta(seconds=MEET_S))
        store, rank, size = next(meeting)
        # torchrun's store outlives restarted ranks: each start uses another prefix
        store = PrefixStore(f"brim-{_restarts()}", store)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=MEET_S)
        )
        control = distributed.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        data = distributed.new_group(backend="nccl", device_id=device) if _own_gpus(device, size, control) else control
    except (RuntimeError, OSError, ValueError) as failure:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"rank {rank} of {size} did not meet the others at {where} within {MEET_S:.0f} s "
            f"({str(failure).splitlines()[0]}); start all of them with one torchrun, and check that the port is free"
        ) from failure
    ranks = Ranks(
        device=device, rank=rank, size=size, restarted=_restarts() > 0, _control=control, _data=data, _store=store
    )  # fmt: skip
    if ranks.main:
        log.info("%d ranks train as one; gradients go by %s", size, "gloo" if data is control else "NCCL")
    return ranks


def _restarts() -> int:
    return _number(os.environ, "TORCHELASTIC_RESTART_COUNT", 0)


def _own_gpus(device: torch.device, size: int, control: Any) -> bool:
    """Whether NCCL can connect all ranks: it does not support two on one GPU."""
    mine = f"{socket.gethostname()} {gpu_uuid(device) or device}" if device.type == "cuda" else ""
    names: list[Any] = [None] * size
    distributed.all_gather_object(names, mine, control)
    return all(names) and len(set(names)) == size and distributed.is_nccl_available()


def _is_broken(failure: Exception) -> bool:
    """Whether a connection between ranks was lost; for most of torch only the message of the error tells."""
    known = isinstance(failure, distributed.DistError)
    text = str(failure).lower()
    return known or (isinstance(failure, RuntimeError) and any(word in text for word in _BROKEN))
