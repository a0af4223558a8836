"""The fastest batch that fits: a search over batch sizes that knows no device and no workload.

    growth      1, 2, 4, … until throughput stops rising, or memory, latency or time ends it
    refinement  the sizes around the knee: throughput may go up and down in saw-teeth
    race        the finalists in turn, repeatedly, so that noise and drift do not decide
    proof       the largest batch that repeated steps show to stay within memory

A probe measures one size briefly; repeating it gives more precision. `prober.py` measures real steps.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from brim.engine.config import SweepConfig
from brim.engine.tuning.trials import Trial, TrialBook, verdict
from brim.errors import OutOfMemory
from brim.report.page import number
from brim.report.summary import Summarised

Probe = Callable[[int], Trial]  # batch → one short measurement; OutOfMemory when it does not fit
Prove = Callable[[int, int], Trial]  # batch, steps → that many steps at least, with the peak memory of all

SHARE = 0.06  # of what measuring every size up to twice the optimum in full would take; a tenth is promised
LEAST_PROBES = 20  # with fewer, a knee at a few items could not be distinguished from noise
PROOF_SHARE = 0.25  # of the seconds kept for the proof of the largest batch
PROBE_STEPS = 5  # of one probe, its warm-up included, where each takes long
AIM = 0.97  # share of the allowed memory aimed at, so that the first guess of the largest batch does not overshoot
LEAP = 8  # a proof goes at most this many times beyond the largest size that ran
WORTH = 0.03  # gain in the safe batch that is worth another try
FAILURES = 5  # tries above the proven size that may fail


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep(Summarised):
    batch: int  # the optimum: the smallest within noise and tolerance of the best
    max_safe: int  # the largest that repeated steps have shown to fit; never below the optimum
    trials: list[Trial]  # all, in the order in which they ran
    best: Trial  # the size of the highest throughput, its trials merged
    chosen: Trial  # the optimum, its trials merged
    skipped: list[str] = field(default_factory=list)  # what was not tried, and why
    verdict: str = ""  # what batching is worth here, and what limits the step
    seconds: float = 0.0  # the whole search took
    warmup_s: float = 0.0  # of these, in first calls: compilation, plan search, capture
    proof_s: float = 0.0  # of these, in the proof of the largest batch

    def _summary(self) -> tuple[str, Mapping[str, Any]]:
        ran = {trial.batch: trial for trial in self.trials if trial.status == "ok"}
        rates = ", ".join(f"{batch}: {number(ran[batch].throughput)}" for batch in sorted(ran)[:12])
        facts = {"verdict": self.verdict, "items/s": rates, "took": f"{self.seconds:.1f} s"}
        return f"Sweep: fastest batch {self.batch}, largest safe batch {self.max_safe}", facts


def sweep(
    probe: Probe,
    config: SweepConfig,
    *,
    prove: Prove | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[Trial], None] | None = None,
) -> Sweep:
    """Find the fastest batch and the largest safe one.

    Without prove, probes are repeated until their steps are enough.
    """
    search = _Search(probe, config, prove, clock, progress)
    search.grow()
    search.refine()
    search.race()
    searched_s = search.elapsed_s()
    chosen = search.choose()
    max_safe = search.prove_largest(chosen)
    chosen = min(search.choose(), max_safe)  # proofs are measurements too, also of sizes there was no time for before
    book, seconds = search.book, search.elapsed_s()
    return Sweep(
        batch=chosen, max_safe=max_safe, trials=book.trials, best=book.merged(book.best() or chosen),
        chosen=book.merged(chosen), skipped=search.skipped, verdict=verdict(book, chosen),
        seconds=clock() - search.began_s, warmup_s=sum(trial.warmup_s for trial in book.trials),
        proof_s=seconds - searched_s,
    )  # fmt: skip


class _Search:
    def __init__(
        self,
        probe: Probe,
        config: SweepConfig,
        prove: Prove | None,
        clock: Callable[[], float],
        progress: Callable[[Trial], None] | None,
    ) -> None:
        self.probe, self.config, self.prove = probe, config, prove
        self.clock, self.progress = clock, progress
        self.book = TrialBook(config.limit)
        self.skipped: list[str] = []
        self.ceiling = config.limit  # the largest size not known to be too large to choose
        self.costs_s: dict[int, float] = {}  # of the quickest probe of each size
        self.spent_s = 0.0  # in all of them
        self.began_s = clock()
        self.search_ends_s = config.seconds * (1 - PROOF_SHARE)

    # One size

    def measure(self, batch: int, steps: int | None = None) -> Trial | None:
        """Probe a size, or prove it by steps; None when it cannot be chosen."""
        began_s = self.elapsed_s()
        trial = self._judged(self._run(batch, steps))
        self.book.add(trial)
        cost_s = self.elapsed_s() - began_s
        self.costs_s[batch] = min(cost_s, self.costs_s.get(batch, cost_s))
        self.spent_s += cost_s
        if self.progress is not None:
            self.progress(trial)
        if trial.status != "ok":
            self.ceiling = min(self.ceiling, max(1, batch - 1))
        return trial if trial.status == "ok" else None

    def _run(self, batch: int, steps: int | None) -> Trial:
        try:
            return self.probe(batch) if steps is None or self.prove is None else self.prove(batch, steps)
        except OutOfMemory as failure:
            if batch == 1:
                raise OutOfMemory(
                    f"a batch of 1 does not fit ({failure})", hint="use smaller items or free memory"
                ) from None
            return Trial(batch=batch, seconds=0.0, steps=0, status="oom", detail=_first_line(failure))
        except RuntimeError as failure:
            # A size that ran before and fails now is not too large: the device has a problem.
            if batch == 1 or self.book.ran(batch):
                raise
            return Trial(batch=batch, seconds=0.0, steps=0, status="failed", detail=_first_line(failure))

    def _judged(self, trial: Trial) -> Trial:
        """The trial, with its status for memory and latency."""
        if trial.status != "ok":
            return trial
        allowed, p95_ms = self.config.allowed_bytes, self.config.p95_ms
        if allowed is not None and trial.peak_bytes is not None and trial.peak_bytes > allowed:
            return replace(
                trial, status="over budget", detail=f"peak {_mb(trial.peak_bytes)} of {_mb(allowed)} allowed"
            )
        if p95_ms is not None and trial.latency_ms > p95_ms:
            return replace(trial, status="slow", detail=f"p95 {trial.latency_ms:.4g} ms of {p95_ms:.4g} ms allowed")
        return trial

    def elapsed_s(self) -> float:
        """Seconds that count against the time limit."""
        warmup_s = sum(trial.warmup_s for trial in self.book.trials)
        return self.clock() - self.began_s - min(warmup_s, self.config.warmup_seconds)

    def _worth_trying(self, batch: int) -> bool:
        """Whether memory and time allow a size that was not tried; records the reason if not."""
        predicted, allowed = self.book.predict_bytes(batch), self.config.allowed_bytes
        if predicted is not None and allowed is not None and predicted > allowed:
            self._skip(f"batch {batch}: expected to take {_mb(predicted)} of {_mb(allowed)} allowed")
            return False
        left_s, cost_s = self.search_ends_s - self.elapsed_s(), self._expected_cost_s(batch)
        if cost_s > left_s:
            self._skip(f"batch {batch}: would take {cost_s:.2g} s of the {max(0.0, left_s):.2g} s left for the search")
            return False
        return True

    def _expected_cost_s(self, batch: int) -> float:
        below = max((size for size in self.costs_s if size <= batch and self.book.ran(size)), default=None)
        if below is None:
            return 0.0
        # a probe of short steps takes a fixed time, one of long steps as long as its minimum number of steps
        return max(self.costs_s[below], PROBE_STEPS * self.book.merged(below).seconds * batch / below)

    def _skip(self, reason: str) -> None:
        if reason not in self.skipped:
            self.skipped.append(reason)

    # Growth

    def grow(self) -> None:
        """Double until throughput stops rising or something ends it, then look for the end between."""
        if self.measure(1) is None:
            return
        batch, rising = 1, True
        while rising and batch * 2 <= self.config.limit:
            if not self._worth_trying(batch * 2):
                break
            if self.measure(batch * 2) is None:
                break
            batch *= 2
            rising = not (self._levelled_off() and self._still_levelled_off())
        if rising:
            self._approach(batch)
        elif batch < self.config.limit:
            self._skip(f"batches above {batch}: throughput stopped rising at {self.book.best()}")

    def _levelled_off(self) -> bool:
        """Whether two doublings in a row brought no gain."""
        rates = [self.book.rate(size) for size in self.book.sizes()]
        gain = 1 + self.config.tolerance
        return len(rates) >= 3 and max(rates[-2:]) <= gain * max(rates[:-2])

    def _still_levelled_off(self) -> bool:
        """_levelled_off, after more probes if noise exceeds the tolerance."""
        for _ in range(2):
            if self.book.error(self.book.best()) <= self.config.tolerance or not self._may_probe():
                break
            for size in {self.book.best(), *self.book.sizes()[-2:]}:
                self.measure(size)
        return self._levelled_off()

    def _approach(self, batch: int) -> None:
        """Sizes between the last that ran and the limit that ended growth while throughput still rose."""
        allowed = self.config.allowed_bytes
        top = None if allowed is None else self.book.largest_within(AIM * allowed)
        for _ in range(4):
            wall = min(self.ceiling + 1, 2 * batch, self.config.limit + 1)
            middle = (batch + wall) // 2 if top is None else min(top, wall - 1)
            top = None
            if middle <= batch or not self._worth_trying(middle):
                return
            if self.measure(middle) is not None:
                batch = middle

    # Refinement

    def refine(self) -> None:
        """Bisect for the smallest size that is good enough, then look for saw-teeth around it."""
        if len(self.book.sizes()) < 2:
            return
        while self._may_probe() and (middle := self._knee_middle()) is not None:
            if not self._worth_trying(middle) or self.measure(middle) is None:
                break
        for _ in range(self.config.refine):
            hopeful = self._most_hopeful() if self._may_probe() else None
            if hopeful is None or not self._worth_trying(hopeful):
                return
            self.measure(hopeful)

    def _knee_middle(self) -> int | None:
        """The size between the last that is too slow and the first that is good enough."""
        sizes = self.book.sizes()
        knee = self._knee()
        below = max((size for size in sizes if size < knee), default=0)
        gap = knee - below
        return None if gap <= max(1, self.config.tolerance * knee) else below + gap // 2

    def _most_hopeful(self) -> int | None:
        """The middle of the interval that might hide the best size, or a smaller one as good.

        A step of more items takes no less time, so between two measured sizes throughput stays below
        (upper − 1) / seconds(lower): tile quantisation reaches that, and nothing else does.
        """
        knee, best = self._knee(), self.book.best()
        top = min(self.ceiling + 1, max(2 * knee, best) + 1)
        sizes = [size for size in self.book.sizes() if size < top] + [top]
        hopes: list[tuple[float, int]] = []
        for lower, upper in pairwise(sizes):
            if upper - lower <= max(1, self.config.tolerance * upper):
                continue
            needed = self._margin_rate() if lower < knee else self.book.rate(best)
            hope = (upper - 1) / lower * self.book.rate(lower) / needed
            hopes.append((hope, (lower + upper) // 2))
        hope, middle = max(hopes, default=(0.0, 0))
        return middle if hope > 1 + self.config.tolerance / 2 else None

    def _smallest_good(self, *, slack: float = 0.0) -> int:
        needed = (1 - slack) * self._margin_rate()
        return next((size for size in self.book.sizes() if self.book.rate(size) >= needed), 1)

    def _knee(self) -> int:
        """Where to refine: the smallest good size, or one that only noise may have made too slow."""
        return self._smallest_good(slack=self.book.error(self.book.best()))

    def _margin_rate(self) -> float:
        """The rate from which a size is as good as the best; 0 if none may be chosen.

        Within noise, but no less than half the tolerance, so that on a device without noise a batch of
        twice the size does not win by a per mille; and no more than the tolerance, whatever the noise.
        """
        best = self.book.best()
        if not best:
            return 0.0
        margin = max(self.config.tolerance / 2, min(self.config.tolerance, 2 * self.book.error(best)))
        return (1 - margin) * self.book.rate(best)

    def _may_probe(self) -> bool:
        """Whether the search is still well below the cost of measuring every size."""
        if self.elapsed_s() >= self.search_ends_s:
            return False
        if len(self.book.trials) < LEAST_PROBES:
            return True
        top = 2 * self._smallest_good()
        costs_s = [self.costs_s[size] for size in self.book.sizes() if size <= top]
        if not sum(costs_s):  # a probe that takes no time, as simulated ones: count them instead
            return len(self.book.trials) < SHARE * top * self.config.full
        return self.spent_s < SHARE * top * self.config.full * sum(costs_s) / len(costs_s)

    # Race

    def race(self) -> None:
        """Probe the finalists in turn until the smallest good one is certain."""
        while (finalists := self._finalists()) and self._may_probe():
            for size in finalists:
                if self._may_probe():
                    self.measure(size)
        if len(finalists) > 1:
            error = max(map(self.book.error, finalists))
            sizes = ", ".join(map(str, finalists))
            self._skip(f"batches {sizes}: told apart no further than ±{error:.1%}")

    def choose(self) -> int:
        """The smallest good size, once enough steps have shown that it fits; 1 if no size keeps the limits."""
        while not self._prove(chosen := self._smallest_good()) and chosen > 1:
            pass  # a size that failed is no longer in the book
        return chosen

    def _finalists(self) -> list[int]:
        """Sizes that another probe could make the result, and the best; empty when the result is certain."""
        open_sizes: list[int] = []
        for size in self.book.sizes():
            if self._is_open(size):
                open_sizes.append(size)
            elif self.book.rate(size) >= self._margin_rate():
                break  # certainly good enough: no larger size can be the result
        return sorted({*open_sizes[:3], self.book.best()}) if open_sizes else []

    def _is_open(self, size: int) -> bool:
        """Whether it is uncertain on which side of the margin a size is."""
        book, best = self.book, self.book.best()
        if size == best or (self._settled(size) and self._settled(best)):
            return False
        doubt = 2 * math.hypot(book.error(size), book.error(best))
        return abs(book.rate(size) - self._margin_rate()) < doubt * book.rate(best)

    def _settled(self, size: int) -> bool:
        """Whether a size is measured so precisely that its error no longer matters, or in full."""
        count = self.book.count(size)
        return count >= self.config.full or (count >= 3 and self.book.error(size) < self.config.tolerance / 4)

    # Proof

    def prove_largest(self, chosen: int) -> int:
        """The largest size that repeated steps show to fit; the chosen one at least."""
        proven, failures = self._largest_proven(chosen), 0
        while failures < FAILURES and (target := self._target(proven, failures)) is not None:
            if (affordable := self._affordable(target)) < target:
                self._skip(
                    f"max safe: {target} may fit, but there was time to prove no more than {max(proven, affordable)}"
                )
                target = affordable
            if target <= proven:
                break
            if self._prove(target):
                proven = target
            else:
                failures += 1
        else:
            if failures and proven < self.book.top:
                self._skip(f"max safe: sizes between {proven} and {self.book.top + 1} were not proven")
        return proven

    def _prove(self, batch: int) -> bool:
        """Run a size until it has enough steps; False if they did not fit."""
        for _ in range(self.config.prove_steps + 1):
            if batch > self.book.top:
                return False
            done = max(self.book.merged(batch).steps, self.book.count(batch)) if self.book.ran(batch) else 0
            if done >= self.config.prove_steps or (batch == 1 and done and self.elapsed_s() > self.config.seconds):
                return True  # nothing is smaller than 1: if time is up, more steps would change nothing
            self.measure(batch, self.config.prove_steps - done)
        return False

    def _largest_proven(self, chosen: int) -> int:
        enough = self.config.prove_steps
        sizes = [size for size in self.costs_s if self.book.ran(size) and size <= self.book.top]
        return max([size for size in sizes if self.book.merged(size).steps >= enough] + [chosen])

    def _target(self, proven: int, failures: int) -> int | None:
        """The size to prove next: from the memory model, else by doubling; None if none is worth it."""
        allowed, top = self.config.allowed_bytes, self.book.top
        for aim in (AIM, 1.0):
            fits = None if allowed is None else self.book.largest_within(aim * allowed)
            target = 2 * proven if fits is None else fits
            if target > top and top < self.config.limit:  # a size failed that memory would have allowed
                # Try just below it first; if that fails too, the model is useless and any size between is as likely.
                target = proven + round(0.7 * (top - proven)) if failures < 2 else math.isqrt(proven * top)
                target = max(target, proven + 1)
            # memory may be modelled from a few items, but time is not: a jump further than this could take minutes
            target = min(target, top, LEAP * max(proven, max(self.costs_s)))
            if target > proven and target >= (1 + WORTH) * proven:
                return target
        return None

    def _affordable(self, target: int) -> int:
        """The largest size up to target that can be proven in the remaining time."""
        left_s = self.config.seconds - self.elapsed_s()
        nearest = max(size for size in self.costs_s if self.book.ran(size))
        item_s = self.book.merged(nearest).seconds / nearest
        steps = self.config.prove_steps + 1
        return target if item_s <= 0 else min(target, max(0, int(left_s / steps / item_s)))


def _first_line(failure: BaseException) -> str:
    return str(failure).strip().split("\n")[0] or type(failure).__name__


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.0f} MB"
