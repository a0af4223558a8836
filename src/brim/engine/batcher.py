"""Which waiting requests run next, in one batch; and whether one more can still be answered in time.

Pure policy: no threads, no torch, no clock. Every method is told the time, so that tests run hours in seconds.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from brim.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """What runs in one place of a batch."""

    request: int
    number: int  # 0 … parts − 1 of its request
    key: Hashable  # only parts of one key share a batch
    deadline_s: float
    alone: bool = False  # strict, or retried after a death: never shares a batch


@dataclass(frozen=True, slots=True)
class Start:
    """Run these now, as one batch."""

    batch: list[Part]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run before until_s; None: before something happens."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherConfig:
    """When a batch starts and what may be promised."""

    max_queue_delay_ms: float = 5.0  # longest an idle device waits for a fuller batch, and only where that pays
    lead_ms: float = 2.0  # the next batch is formed this long before the running one should end: no gap on a device
    margin: float = 0.05  # of an estimate, kept back when promising
    max_waiting: int = 4096  # parts

    def __post_init__(self) -> None:
        if self.max_queue_delay_ms < 0 or self.lead_ms < 0:
            raise ConfigError(
                f"max_queue_delay_ms={self.max_queue_delay_ms} and lead_ms={self.lead_ms} must not be negative; "
                "0 turns each of them off"
            )
        if not 0 <= self.margin < 1:
            raise ConfigError(f"margin={self.margin} must be in [0, 1); 0.05 keeps 5 % of an estimate back")
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting={self.max_waiting} must be at least 1 part")


class BatchPolicy:
    """Admits requests, forms batches in order of deadline, learns how long they take."""

    def __init__(self, sizes: Callable[[Hashable], Sequence[int]], config: BatcherConfig | None = None) -> None:
        raise NotImplementedError

    def expect(self, key: Hashable, size: int, seconds: float) -> None:
        """A first guess of a batch's time, from tuning or warm-up; what is measured later replaces it."""
        raise NotImplementedError

    def admit(
        self,
        key: Hashable,
        parts: int,
        deadline_s: float,
        now_s: float,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        alone: bool = False,
    ) -> int:
        """Queue a request and return its id, or raise Overloaded; its parts run only after `ready`."""
        raise NotImplementedError

    def ready(self, request: int, now_s: float, *, key: Hashable | None = None, parts: int | None = None) -> None:
        """It is decoded: its parts may run; key and parts where they differ from what was admitted."""
        raise NotImplementedError

    def next(self, now_s: float) -> Start | Wait:
        """What to do now; a Start counts as waiting until `started`."""
        raise NotImplementedError

    def started(self, batch: Sequence[Part], now_s: float) -> None:
        """The batch was handed to the device."""
        raise NotImplementedError

    def finished(self, batch: Sequence[Part], now_s: float, *, learn: bool = True) -> None:
        """The batch left the device; learn=False: it failed, its time says nothing."""
        raise NotImplementedError

    def leave(self, request: int) -> None:
        """Cancelled, or failed in decoding: its waiting parts go."""
        raise NotImplementedError

    def expire(self, now_s: float) -> list[int]:
        """Take out the requests that can no longer be answered in time, and name them."""
        raise NotImplementedError

    def wait_s(self, key: Hashable, now_s: float) -> float:
        """Seconds until a request of this key that arrives now would leave the device."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Parts that wait, decoded or not."""
        raise NotImplementedError

    @property
    def running(self) -> int:
        """Parts on the device."""
        raise NotImplementedError
