"""Watches a command, then measures what would help it: each remedy in a short run of its own, within a given time."""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.diagnosis.answer import Diagnosis, Tried, diagnose, loss_changed, measured, window
from brim.diagnosis.config import WhyConfig
from brim.diagnosis.hook.brim_probe.changes import HELD_BATCHES
from brim.diagnosis.processes import Run, run
from brim.errors import ConfigError, printable

WATCH, CEILING = 0.2, 0.1  # shares of the time
WATCH_S, CEILING_S = 8.0, 4.0  # at most
TRY_S = (1.0, 4.0)  # to watch a remedy: at least, at most
START_S = 30.0  # and twice the time of the answer: how long a script may take to its first step
FEW_STEPS = 2
RESIDENT_STEPS = 2 * HELD_BATCHES  # whose losses are compared: later steps see the same rows again and again
LINES = 12  # of the script's output that are repeated


# Remedies


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to the script, as its probe knows it and as a reader does."""

    change: str
    value: Any
    words: str
    compares_loss: bool = True
    impossible: str = ""  # why it is not tried


def remedies(answer: Diagnosis, result: Mapping[str, Any], tries: Sequence[str] | None) -> list[Remedy]:
    """The changes to measure, the most promising first."""
    on_gpu = (result.get("device") or {}).get("type") == "cuda"
    groups = {
        "data": _data(answer, result, on_gpu),
        "batch": [_batch(answer, factor) for factor in (2, 4)],
        "precision": [Remedy("bf16", None, "bf16"), Remedy("channels_last", None, "channels_last")],
        "compile": [Remedy("compile", "reduce-overhead" if on_gpu else None, "torch.compile")],
    }
    if tries is not None:
        return [remedy for name in tries for remedy in groups[name]]
    chosen = {
        "data": ["data"],
        "copy": ["data"],
        "launch": ["batch", "compile"],
        "compute": ["precision", "compile"],
    }
    return [remedy for name in chosen.get(answer.limit or "", []) for remedy in groups[name] if not remedy.impossible]


def _data(answer: Diagnosis, result: Mapping[str, Any], on_gpu: bool) -> list[Remedy]:
    loader, cores = answer.loader, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    why = "" if loader else "the script has no DataLoader"
    num = max(2, cores or 1)
    workers = Remedy("workers", num, f"num_workers={num}", impossible=why)
    if loader and loader["iterable"]:
        workers = Remedy("workers", num, workers.words, impossible="workers of an IterableDataset may repeat its rows")
    elif loader and loader["num_workers"] >= num:
        workers = Remedy("prefetch", 8, "prefetch_factor=8, persistent_workers=True")
    changes = [workers, Remedy("resident", None, _resident_words(answer, result, on_gpu), impossible=why)]
    if on_gpu and loader and not loader["pin_memory"]:
        changes.insert(1, Remedy("pinned", True, "pin_memory=True"))
    return changes


def _resident_words(answer: Diagnosis, result: Mapping[str, Any], on_gpu: bool) -> str:
    """With the size of the whole dataset, where its length is known."""
    loader, place = answer.loader or {}, "VRAM" if on_gpu else "memory"
    if not loader.get("rows") or not loader.get("row_bytes"):
        return f"data in {place} (brim.Resident)"
    total = (result.get("device") or {}).get("memory")
    of = f" of {total / 1e9:.3g}" if total else ""
    return f"data in {place} with brim.Resident ({loader['rows'] * loader['row_bytes'] / 1e9:.3g}{of} GB)"


def _batch(answer: Diagnosis, factor: int) -> Remedy:
    loader = answer.loader
    size = f" ({loader['largest'] * factor})" if loader else ""
    why = "" if loader else "the script has no DataLoader"
    return Remedy("batch", factor, f"batch size × {factor}{size}", compares_loss=False, impossible=why)


# Runs


@dataclass(slots=True)
class Examination:
    """One diagnosis of a command line."""

    command: Sequence[str]
    config: WhyConfig
    directory: Path
    is_stopped: Callable[[], bool] = lambda: False
    progress: Callable[[str], None] = lambda text: None
    deadline: float = 0.0
    overhead_s: float = 0.0  # of a run, besides watching
    losses: list[float | None] = field(default_factory=list)

    def examine(self) -> Diagnosis:
        """Watch, measure the ceiling, try remedies; an answer without numbers says why in its message."""
        seconds = self.config.seconds
        plan = {"watch_s": min(WATCH * seconds, WATCH_S), "ceiling_s": min(CEILING * seconds, CEILING_S)}
        first = self._run("watching the script", plan)
        if not first.trainers or measured(first.trainers[0])["num_steps"] < FEW_STEPS:
            return _no_answer(first, self.command, self._start_limit_s)
        startup_s = first.startup_s or 0.0
        self.deadline, self.overhead_s = first.began_s + startup_s + seconds, 1.1 * startup_s
        self._measure_short_script(first)
        answer = diagnose(first.results)
        answer.command = list(self.command)
        if answer.gpu is not None and first.powers_w:
            answer.gpu["power"] = statistics.fmean(first.powers_w)
        self.losses = first.trainers[0]["losses"]
        _say_how_it_ended(answer, first)
        if first.exit_code in (None, 0):
            self._try_all(answer, first)
        return answer

    @property
    def _start_limit_s(self) -> float:
        return START_S + 2 * self.config.seconds

    def _run(self, what: str, plan: dict[str, Any]) -> Run:
        def report(phase: str) -> None:
            self.progress({"start": f"{what}: starting", "ceiling": f"{what}: one fixed batch"}.get(phase, what))

        return run(
            self.command, plan, self.directory, start_limit_s=self._start_limit_s, limit_s=self.config.seconds,
            is_stopped=self.is_stopped, progress=report,
        )  # fmt: skip

    def _measure_short_script(self, first: Run) -> None:
        """A script that ended before its ceiling was measured runs again, with the fixed batch from early on."""
        trainer = first.trainers[0]
        if trainer["tallies"]["ceiling"]["num_steps"] >= FEW_STEPS or first.exit_code != 0 or not self._has_time(1.0):
            return
        num, step_s, _, _ = window(measured(trainer))
        again = {"warm_s": min(0.5, num * step_s / 4), "watch_s": 0.0, "ceiling_s": min(2.0, num * step_s / 2)}
        second = self._run("one fixed batch", again)
        for one, other in zip(first.trainers, second.trainers, strict=False):
            one["tallies"]["ceiling"] = other["tallies"]["ceiling"]
            one["operations"] = other.get("operations")

    def _has_time(self, watch_s: float) -> bool:
        return time.time() + self.overhead_s + watch_s < self.deadline and not self.is_stopped()

    def _try_all(self, answer: Diagnosis, first: Run) -> None:
        waiting = remedies(answer, first.trainers[0], self.config.tries)
        for number, remedy in enumerate(waiting):
            if remedy.impossible:
                answer.tried.append(Tried(remedy.words, None, "skipped", None, remedy.impossible))
            elif not self._has_time(TRY_S[0]):
                note = "no time left; give more seconds"
                answer.tried.append(Tried(remedy.words, None, "skipped", None, note))
            else:
                answer.tried.append(self._try(remedy, len(waiting) - number))

    def _try(self, remedy: Remedy, num_left: int) -> Tried:
        each_s = (self.deadline - time.time()) / num_left - self.overhead_s
        plan = {
            "watch_s": min(max(each_s, TRY_S[0]), TRY_S[1]), "ceiling_s": 0.0, "change": remedy.change,
            "value": remedy.value,
        }  # fmt: skip
        left_s = max(1.0, self.deadline - time.time())
        outcome = run(
            self.command, plan, self.directory, start_limit_s=left_s, limit_s=left_s,
            is_stopped=self.is_stopped, progress=lambda phase: self.progress(f"trying {remedy.words}"),
        )  # fmt: skip
        trainers = outcome.trainers
        self.overhead_s = (self.overhead_s + outcome.elapsed_s - plan["watch_s"]) / 2
        if not trainers or measured(trainers[0])["num_steps"] < FEW_STEPS:
            why = _last_line(outcome.output) if outcome.exit_code else "no steps in time"
            return Tried(remedy.words, None, "failed", None, why)
        if trainers[0].get("tried") != "used":
            return Tried(remedy.words, None, "skipped", None, "the script offers no place for it")
        if outcome.exit_code:
            return Tried(remedy.words, None, "failed", None, _last_line(outcome.output))
        rate = 0.0
        for trainer in trainers if (trainers[0]["world"] or 1) > 1 else trainers[:1]:
            num, step_s, samples, _ = window(measured(trainer))
            rate += samples / num / step_s
        steps = RESIDENT_STEPS if remedy.change == "resident" else None
        changed = loss_changed(self.losses[:steps], trainers[0]["losses"]) if remedy.compares_loss else None
        return Tried(remedy.words, rate, "measured", changed)


def examine(command: Sequence[str], config: WhyConfig, directory: Path | None = None, **more: Any) -> Diagnosis:
    """What a command line that trains waits for."""
    if not command:
        raise ConfigError("no command to watch", field="command", code="missing", hint="end with: -- python train.py")
    directory = directory or Path.cwd()
    if shutil.which(command[0]) is None and not (directory / command[0]).is_file():
        raise ConfigError(
            f"{command[0]}: no such program",
            field="command",
            code="unknown",
            hint="write the command as in a shell, such as python train.py",
        )
    return Examination(command, config, directory, **more).examine()


# Scripts without an answer


def _no_answer(outcome: Run, command: Sequence[str], limit_s: float) -> Diagnosis:
    answer = Diagnosis(command=list(command), exit_code=outcome.exit_code or 0)
    if outcome.exit_code:
        answer.message = f"the script ended with exit code {outcome.exit_code} before it could be measured"
        if "EOFError" in outcome.output or "stdin" in outcome.output:
            answer.message += "; standard input is empty here, because the script runs more than once"
    elif outcome.exit_code == 0:
        steps = sum(measured(trainer)["num_steps"] for trainer in outcome.trainers)
        seen = "without a training step or forward pass" if not steps else f"after {steps} step"
        answer.message = f"the script ended after {outcome.elapsed_s:.1f} s {seen}: there is nothing to measure"
        if outcome.left_behind:
            answer.message += ", unless in a process that it left in the background: run it in the foreground"
        elif not outcome.results:
            answer.message += "; it did not import torch in a Python that reads PYTHONPATH"
    else:
        answer.exit_code = 1
        answer.message = (
            f"the script made no step within {limit_s:.0f} s and was ended"
            if not outcome.trainers
            else "the script's steps take too long for this time; give more seconds"
        )
    answer.notes += [f"the probe failed: {result['problem']}" for result in outcome.results if result.get("problem")]
    _add_left_behind(answer, outcome)
    if tail := outcome.output.splitlines()[-LINES:]:
        answer.notes.append("the end of its output:\n" + "\n".join(printable(line) for line in tail))
    return answer


def _say_how_it_ended(answer: Diagnosis, outcome: Run) -> None:
    if outcome.exit_code:
        answer.exit_code = outcome.exit_code
        answer.message = f"the script failed with exit code {outcome.exit_code}: {_last_line(outcome.output)}"
    elif outcome.exit_code == 0:
        answer.notes.append(f"the script ended by itself after {outcome.elapsed_s:.1f} s")
    if answer.steps < 10:
        answer.notes.append(f"only {answer.steps} steps were seen: the numbers are rough")
    _add_left_behind(answer, outcome)


def _add_left_behind(answer: Diagnosis, outcome: Run) -> None:
    if outcome.left_behind:
        some = "a process" if outcome.left_behind == 1 else f"{outcome.left_behind} processes"
        answer.notes.append(f"{some} of the script outlived it and {'was' if some[0] == 'a' else 'were'} ended")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return printable(lines[-1], 200) if lines else "no output"
