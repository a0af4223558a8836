"""Seconds of a training step by cause, from spans that wrapped functions open and close in the training thread.

Time belongs to the innermost span. Outside all spans it belongs to the part of the step:

    after    from the end of the optimiser's step to the next batch of a loader: logging, metrics
    feed     from there to the forward pass: the batch is prepared
    compute  from the forward pass to the end of the optimiser's step

A script goes through phases: warm, watch, ceiling (a loader's last batch is served again and again), count, done.
"""

import threading
import time
from typing import Any

WARM_STEPS, WARM_S, SLOW_S = 3, 0.7, 5.0
SETTLE_STEPS = 3  # of the ceiling, not counted: workers still fill their queues
SLOW_STEP_S = 0.5  # one such step is enough for that
KEPT = 2000  # steps whose durations are kept
DRAWN = 24  # steps whose spans are kept for the picture
PASSES = ("forward", "backward", "optimizer", "compute")
PHASES = ("warm", "watch", "ceiling", "count", "done")

perf = time.perf_counter


class PhaseTally:
    """What happened in one phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps: list[tuple[float, int, dict[str, float]]] = []  # seconds, samples, seconds by cause
        self.epochs: list[int] = []  # steps made when a training loader began again
        self.sites: dict[Any, list[float]] = {}  # (cause, what, file, line, function) → [calls, seconds]
        self.stacks: dict[Any, int] = {}  # (cause, file, line, function, innermost) → samples
        self.num_steps = 0
        self.num_samples = 0
        self.began = perf()
        self.ended = self.began

    def as_dict(self, whole: bool) -> dict[str, Any]:
        """All of it, or only the totals: writing every step now and then would slow the script down."""
        steps = list(self.steps) if whole else []
        return {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "elapsed_s": self.ended - self.began,
            "seconds": dict(self.seconds),
            "steps": [[round(s, 7), n, {c: round(v, 7) for c, v in parts.items()}] for s, n, parts in steps],
            "epochs": self.epochs,
            "sites": [[*key, *value] for key, value in list(self.sites.items())] if whole else [],
            "stacks": [[*key, num] for key, num in list(self.stacks.items())] if whole else [],
        }


class StepClock:
    """The clock of one process: spans, steps and phases."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.thread = threading.main_thread().ident
        self.phase, self.phase_began = "warm", perf()
        self.tallies = {name: PhaseTally() for name in PHASES}
        self.tally = self.tallies["warm"]
        self.trains = False  # there is an optimiser: forward passes before its first step are no steps
        self.kind = ""  # of steps: forward, backward or optimizer
        self.source: Any = None  # the optimiser, or in inference the module, whose steps are counted
        self.cause, self.stack = "after", list[str]()
        self.last, self.step_began = perf(), perf()
        self.parts: dict[str, float] = {}  # of this step
        self.samples = 0  # of this step
        self.batches = 0  # of this step, from loaders
        self.counted: Any = None  # the module whose input gave the samples
        self.accumulates: Any = None  # the same after a backward pass: its next input belongs to the step too
        self.depth = 0  # of module calls
        self.evaluations = 0  # forward passes of this step without gradients
        self.spans: list[tuple[str, float, float]] = []  # of this step
        self.drawn: list[list[tuple[str, float, float]]] = []
        self.losses: list[Any] = []
        self.started_s = time.time()
        self.first_step_s: float | None = None  # since the epoch
        self.facts: dict[str, Any] = {}  # loaders, device, operations
        self.on_phase: list[Any] = []  # called with the name of each phase that begins
        self.settle = 0

    def reset(self) -> None:
        """Begin again, in the calling thread."""
        self.phase, self.kind, self.source = "warm", "", None
        self.tallies = {name: PhaseTally() for name in PHASES}
        self.tally = self.tallies["warm"]
        self.stack, self.parts, self.spans, self.drawn, self.losses = [], {}, [], [], []
        self.cause, self.depth, self.samples, self.batches, self.evaluations = "after", 0, 0, 0, 0
        self.phase_began = self.last = self.step_began = perf()
        self.thread = threading.get_ident()

    # Spans

    def enter(self, cause: str) -> None:
        now = perf()
        self._book(now)
        self.stack.append(self.cause)
        self.cause = cause

    def leave(self) -> float:
        """Close the innermost span; return the time now."""
        now = perf()
        self._book(now)
        if self.stack:
            self.cause = self.stack.pop()
        return now

    def part(self, cause: str) -> None:
        """The part of the step that begins now, where no span is open."""
        if not self.stack and self.cause != cause:
            self._book(perf())
            self.cause = cause

    def _book(self, now: float) -> None:
        spent = now - self.last
        parts = self.parts
        parts[self.cause] = parts.get(self.cause, 0.0) + spent
        if spent > 2e-5 and len(self.spans) < 400:
            self.spans.append((self.cause, self.last, now))
        self.last = now

    def here(self) -> bool:
        return threading.get_ident() == self.thread

    def at(self, key: Any, seconds: float) -> None:
        """Add a call to the site (cause, what, file, line, function)."""
        entry = self.tally.sites.get(key)
        if entry is None:
            self.tally.sites[key] = [1, seconds]
        else:
            entry[0] += 1
            entry[1] += seconds

    # Passes

    def begin_forward(self, training: bool) -> None:
        if training or self.kind in ("", "forward"):
            self.part("compute")
            self.enter("forward")
            return
        self.evaluations += 1
        if self.evaluations >= 2:  # what led to it, batches and copies included, was evaluation too
            for cause in ("after", "feed", "data", "copy", "sync"):
                if moved := self.parts.pop(cause, 0.0):
                    self.parts["evaluation"] = self.parts.get("evaluation", 0.0) + moved
        self.enter("evaluation")

    def end_forward(self) -> None:
        self.leave()

    def step(self, kind: str, source: Any = None) -> None:
        """A step ended, as seen by an optimiser, a backward pass or, in inference, a forward pass."""
        order = ("", "forward", "backward", "optimizer")
        if kind == "forward" and self.trains:
            return
        if order.index(kind) < order.index(self.kind) or (kind == self.kind and source is not self.source):
            return
        if kind != self.kind:  # a better sign of a step: begin again
            self.kind, self.source, self.tally, self.phase = kind, source, PhaseTally(), "warm"
            self.thread = threading.get_ident()
            self.tallies["warm"] = self.tally
            self.phase_began = perf()
            self.stack, self.losses = [], self.losses[-1:]
        now = perf()
        self._book(now)
        if self.first_step_s is None:
            self.first_step_s = time.time()
        self._close_step(now)
        self.cause = "after" if not self.stack else self.cause
        self._next_phase(now)

    def _close_step(self, now: float) -> None:
        tally, parts = self.tally, self.parts
        if self.evaluations == 1 and self.batches < 2:  # a teacher, or a target network: part of the step
            parts["forward"] = parts.get("forward", 0.0) + parts.pop("evaluation", 0.0)
        tally.num_steps += 1
        tally.num_samples += self.samples
        if not self.batches and "after" in parts:  # no loader: what comes before the forward pass makes the batch
            parts["between"] = parts.pop("after")
        for cause, seconds in parts.items():
            tally.seconds[cause] = tally.seconds.get(cause, 0.0) + seconds
        if len(tally.steps) < KEPT:
            tally.steps.append((now - self.step_began, self.samples, parts))
        tally.ended = now
        if self.phase in ("watch", "ceiling") and len(self.drawn) < DRAWN:
            self.drawn.append([(c, a - self.step_began, b - self.step_began) for c, a, b in self.spans])
        self.parts, self.spans, self.samples, self.batches, self.evaluations = {}, [], 0, 0, 0
        self.step_began = now

    # Phases

    def _next_phase(self, now: float) -> None:
        spent = now - self.phase_began
        enough = self.tally.num_steps >= WARM_STEPS and spent >= self.plan.get("warm_s", WARM_S)
        if self.phase == "warm" and (enough or spent >= SLOW_S):
            self.begin("watch")
        elif self.phase == "watch" and spent >= self.plan["watch_s"] and self.tally.num_steps >= 2:
            self.begin("ceiling" if self.plan["ceiling_s"] else "done")
            self.settle = SETTLE_STEPS
        elif self.phase == "ceiling":
            if self.settle:  # begin again until workers rest
                self.settle = 0 if spent > SLOW_STEP_S else self.settle - 1
                self.begin("ceiling")
            elif spent >= self.plan["ceiling_s"] and self.tally.num_steps >= 2:
                self.begin("count")
        elif self.phase == "count" and self.tally.num_steps >= 2:
            self.begin("done")

    def begin(self, phase: str) -> None:
        try:
            for call in self.on_phase:
                call(phase)
        except Exception as failure:  # what the probe cannot do must not end a training
            self.facts["problem"] = repr(failure)
        self.phase = phase  # from here on, the end may be written
        self.tally = self.tallies[phase] = PhaseTally()
        self.phase_began = self.last = self.step_began = perf()
