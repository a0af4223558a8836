"""Results on standard output, progress and logs on standard error, and what Ctrl-C does."""

import json
import logging
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer

from brim.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console

    from brim.engine.training import TrainProgress
    from brim.rf import GenerateProgress
    from brim.segmentation.prediction import PredictProgress
    from brim.sequences.ablation import AblationProgress
    from brim.sequences.corpus.packing import PackProgress

LINE_S = 3.0  # between progress lines when there is no terminal to draw a bar on
AGAIN_S = 0.5  # wrappers such as `uv run` forward a Ctrl-C that the terminal also sent to us: two at once are one


# Signals


class Stop:
    """Ctrl-C or SIGTERM ends a run at the next batch boundary; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.number = 0  # of the signal received
        self._received_s = 0.0
        self._handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.number != 0

    def __enter__(self) -> Self:
        self._handlers = {n: signal.signal(n, self._receive) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def exit(self) -> NoReturn:
        """End the command with the exit code of the signal."""
        raise typer.Exit(128 + self.number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._received_s = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._received_s > AGAIN_S:
            # Nothing to clean up: a dataset survives even SIGKILL. The bar may have hidden the cursor.
            os.write(2, (b"\x1b[?25h" if _on_terminal() else b"") + b"\naborted; what was written stays usable\n")
            os._exit(128 + number)


# Standard error: progress and logs


class Display:
    """Progress on standard error: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, stop: Stop | None = None, *, preparing: tuple[str, str] = ("preparing", "items")) -> None:
        """preparing  what a training does before its first step, and in what it counts"""
        from rich.progress import BarColumn, Progress, TextColumn

        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}")]
        self._bar = Progress(*columns, console=_console()) if _on_terminal() and not is_silent() else None
        self._task = self._bar.add_task("starting", total=None, text="") if self._bar else None
        self._stop, self._preparing = stop, preparing
        self._stop_confirmed = False
        self._line_s = time.monotonic()  # a command that ends at once prints no progress

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def generating(self, progress: "GenerateProgress") -> None:
        done, tried = progress.done, progress.attempted
        accepted = f"{done / tried:.0%} accepted" if tried > 0 else ""
        parts = [f"{done}/{progress.total} samples", _rate(progress.rate), accepted, _time_left(progress.eta_s)]
        self.update(progress.message, done, progress.total, *parts)

    def training(self, progress: "TrainProgress") -> None:
        message, things = f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}", "steps"
        if progress.phase == "prepare":
            message, things = self._preparing
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}"
        speed = f"{progress.samples_per_s:.0f} samples/s" if progress.samples_per_s > 0 else ""
        parts = [f"{progress.step}/{progress.steps} {things}", loss, speed, _time_left(progress.eta_s)]
        self.update(message, progress.step, progress.steps, *parts)

    def predicting(self, progress: "PredictProgress") -> None:
        done, total, rate = progress.done, progress.total or 0, progress.rate
        failed = f"{progress.failed} failed" if progress.failed else ""
        left_s = (total - done) / rate if total and rate > 0 else math.inf
        count = f"{done}/{total} images" if total else f"{done} images"
        self.update("predicting", done, total, count, failed, _rate(rate), _time_left(left_s))

    def packing(self, progress: "PackProgress") -> None:
        done, total = progress.done_bytes, progress.total_bytes
        text = f"{done / 1e6:.0f}/{total / 1e6:.0f} MB, {progress.bytes_per_s / 1e6:.0f} MB/s" if total else ""
        self.update(progress.message, done, total, text)

    def ablating(self, progress: "AblationProgress") -> None:
        percent = round(100 * (progress.step + progress.share))
        self.update(progress.name, percent, 100 * progress.steps, f"{progress.step + 1}/{progress.steps}")

    def job(self, title: str, progress: Mapping[str, Any]) -> None:
        """Show the progress of a service's job, as its API reports it."""
        done, total = progress["current"], progress["total"]
        left_s = math.inf if progress["eta_s"] is None else progress["eta_s"]
        count = f"{done}/{total}" if total else ""
        self.update(title, done, total, progress["message"], count, _rate(progress["rate"] or 0), _time_left(left_s))

    def counting(self, message: str, things: str) -> Callable[[int, int], None]:
        """A callback that shows how many of the things are done."""
        return lambda done, total: self.update(message, done, total, f"{done}/{total} {things}")

    def update(self, message: str, done: int = 0, total: int = 0, *parts: str) -> None:
        if self._stop is not None and self._stop() and not self._stop_confirmed:
            self._stop_confirmed = True
            say("stopping at the end of this batch; Ctrl-C again stops at once")
        text = ", ".join(filter(None, parts))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=message, total=total or None, completed=done, text=text)
        elif time.monotonic() - self._line_s >= LINE_S:
            self._line_s = time.monotonic()
            say(f"{message}: {text}" if text else message)


def _rate(per_s: float) -> str:
    return f"{per_s:.1f}/s" if per_s > 0 else ""


def _time_left(eta_s: float) -> str:
    if not math.isfinite(eta_s):
        return ""
    minutes, seconds = divmod(math.ceil(eta_s), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"


def is_silent() -> bool:
    """Whether this process is one of several ranks started by torchrun, and not the one that prints."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") and os.environ.get("RANK", "0") != "0"


def say(text: str) -> None:
    """Print a line on standard error, above the bar if there is one."""
    if not is_silent():
        _print(text)


def _print(text: str) -> None:
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


def end_stopped(text: str, stop: Stop, *, resume: bool) -> NoReturn:
    """Report where a run stopped and how to continue it; resume: the command line has --resume, or needs none."""
    say(f"stopped {text}")
    say(f"continue with: {this_command()}{'' if resume else ' --resume'}")
    stop.exit()


@contextmanager
def logs() -> Iterator[None]:
    """Print what brim logs on standard error: "warning: …", and informational messages as they are."""
    handler, logger = _LogHandler(), logging.getLogger("brim")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def remarks() -> Iterator[None]:
    """Also print what a trainer logs at level INFO: the tier and why, where a run continues, its speed at the end."""
    logger = logging.getLogger("brim")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)


class _LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        if record.levelno >= logging.ERROR or not is_silent():
            _print(prefix + record.getMessage())


@cache
def _console() -> "Console":
    from rich.console import Console

    return Console(stderr=True)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


# Standard output: results


def show(text: str) -> None:
    """Print a line on standard output; typer handles a closed pipe, a full disk is an error like any other."""
    if is_silent():
        return
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as failure:
        raise StorageError(f"standard output: cannot write, {failure.strerror}") from failure


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on one line."""
    show(json.dumps(values, ensure_ascii=False))


def print_facts(facts: dict[str, Any]) -> None:
    """Print names and values, a line each; a nested table takes a line for each of its rows."""
    lines: dict[str, Any] = {}
    for name, value in facts.items():
        nested = isinstance(value, dict) and any(isinstance(item, dict) for item in value.values())
        lines.update({f"{name} {key}": item for key, item in value.items()} if nested else {name: value})
    width = max(map(len, lines), default=0)
    for name, value in lines.items():
        show(f"{name.replace('_', ' '):{width}}  {_words(value)}")


def _words(value: Any) -> str:
    match value:
        case None:
            return "unknown"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
        case list():
            return " … ".join(map(_words, value))
        case _:
            return str(value)


def quote(path: Path | str) -> str:
    """A path as it is typed in a shell."""
    return shlex.quote(str(path))


def this_command() -> str:
    """The command line of this process, to be typed again."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    if ranks and "TORCHELASTIC_RUN_ID" in os.environ:
        return shlex.join(["torchrun", "--nproc-per-node", ranks, "-m", "brim", *sys.argv[1:]])
    return shlex.join(["brim", *sys.argv[1:]])
