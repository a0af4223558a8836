"""What a person sees: results on standard output, progress and logs on standard error, and what Ctrl-C does."""

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
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer

from brim.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console

    from brim.engine.training import TrainProgress
    from brim.rf import GenerateProgress
    from brim.segmentation.prediction.stream import PredictProgress

LINE_S = 3.0  # between progress lines where there is no terminal to draw a bar on
AGAIN_S = 0.5  # wrappers such as `uv run` pass on the Ctrl-C that the terminal sent us too: two at once are one


# Signals


class Stop:
    """Ctrl-C or SIGTERM ends a run at the next batch boundary; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.number = 0  # of the signal that came
        self._came_s = 0.0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.number != 0

    def __enter__(self) -> Self:
        """Take over the signals."""
        self._before = {n: signal.signal(n, self._receive) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._came_s = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._came_s > AGAIN_S:
            # No clean-up to wait for: a dataset survives even SIGKILL. The bar may have hidden the cursor.
            os.write(2, (b"\x1b[?25h" if _on_terminal() else b"") + b"\naborted; what was written stays usable\n")
            os._exit(128 + number)


# Standard error: progress and logs


class Display:
    """Progress on standard error: a bar on a terminal, else a line every few seconds."""

    def __init__(self, stop: Stop | None = None, *, preparing: tuple[str, str] = ("preparing", "items")) -> None:
        """Take what may stop the run, to say that it was heard, and what a training prepares before it begins."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}")]
        self._bar = Bar(*columns, console=_console()) if _on_terminal() and not is_silent() else None
        self._task = self._bar.add_task("starting", total=None, text="") if self._bar else None
        self._stop, self._preparing = stop, preparing
        self._said_stop = False
        self._line_s = time.monotonic()  # a command that ends at once says nothing

    def __enter__(self) -> Self:
        """Draw."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: "GenerateProgress") -> None:
        """Show where a generation is."""
        self._say_stop()
        self._show(progress.message, progress.done, progress.total, _progress_text(progress))

    def training(self, progress: "TrainProgress") -> None:
        """Show where a training is."""
        self._say_stop()
        message, things = f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}", "steps"
        if progress.phase == "prepare":
            message, things = self._preparing
        self._show(message, progress.step, progress.steps, _training_text(progress, things))

    def shards(self, message: str) -> Callable[[int, int], None]:
        """A callback that shows how many shards are done."""
        return self._counted(message, "shards")

    def samples(self, message: str) -> Callable[[int, int], None]:
        """A callback that shows how many samples are done."""
        return self._counted(message, "samples")

    def images(self, message: str) -> "Callable[[PredictProgress], None]":
        """A callback that shows how many images are done."""

        def tell(progress: "PredictProgress") -> None:
            self._say_stop()
            total = progress.total or 0
            parts = [f"{progress.done}{f'/{total}' if total else ''} images"]
            parts += [f"{progress.failed} failed"] * bool(progress.failed)
            parts += [f"{progress.rate:.1f}/s"] * (progress.rate > 0)
            left = (total - progress.done) / progress.rate if total and progress.rate > 0 else math.inf
            self._show(message, progress.done, total, ", ".join(parts + _time_left(left)))

        return tell

    def job(self, title: str, progress: Mapping[str, Any]) -> None:
        """Show where a service's job is, by the names of its API."""
        current, total = progress["current"], progress["total"]
        parts = [progress["message"]] * bool(progress["message"]) + [f"{current}/{total}"] * bool(total)
        parts += [f"{progress['rate']:.1f}/s"] * bool(progress["rate"])
        left = progress["eta_s"]
        self._show(title, current, total, ", ".join(parts + _time_left(math.inf if left is None else left)))

    def message(self, text: str) -> None:
        """Show what is being done where nobody knows how much is left."""
        self._show(text, 0, 0, "")

    def _counted(self, message: str, things: str) -> Callable[[int, int], None]:
        return lambda done, total: self._show(message, done, total, f"{done}/{total} {things}")

    def _say_stop(self) -> None:
        if self._stop is not None and self._stop() and not self._said_stop:
            self._said_stop = True
            say("stopping at the end of this batch; Ctrl-C again stops at once")

    def _show(self, message: str, done: int, total: int, text: str) -> None:
        if is_silent():
            return
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=message, total=total or None, completed=done, text=text)
        elif time.monotonic() - self._line_s >= LINE_S:
            self._line_s = time.monotonic()
            say(f"{message}: {text}" if text else message)


def _progress_text(progress: "GenerateProgress") -> str:
    parts = [f"{progress.done}/{progress.total} samples"]
    if progress.rate > 0:
        parts.append(f"{progress.rate:.1f}/s")
    if progress.attempted > 0:
        parts.append(f"{progress.done / progress.attempted:.0%} accepted")
    return ", ".join(parts + _time_left(progress.eta_s))


def _training_text(progress: "TrainProgress", things: str) -> str:
    parts = [f"{progress.step}/{progress.steps} {things}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.samples_per_s > 0:
        parts.append(f"{progress.samples_per_s:.0f} samples/s")
    return ", ".join(parts + _time_left(progress.eta_s))


def _time_left(eta_s: float) -> list[str]:
    if not math.isfinite(eta_s):
        return []
    minutes, seconds = divmod(math.ceil(eta_s), 60)
    return [f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"]


def is_silent() -> bool:
    """Whether this is one of several ranks that torchrun started, and another one speaks for all."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") and os.environ.get("RANK", "0") != "0"


def say(text: str) -> None:
    """A line on standard error, above the bar where there is one."""
    if not is_silent():
        _print(text)


def _print(text: str) -> None:
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


def end_stopped(said: str, stop: Stop, *, resume: bool) -> NoReturn:
    """Say what a stopped run left and how to go on, and exit as the signal would have; resume: it was given already."""
    say(f"stopped {said}")
    say(f"continue with: {this_command()}{'' if resume else ' --resume'}")
    raise typer.Exit(128 + stop.number)


@contextmanager
def logs() -> Iterator[None]:
    """Show what brim logs, as "warning: …" on standard error; remarks stand for themselves."""
    handler, logger = _LogHandler(), logging.getLogger("brim")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def remarks() -> Iterator[None]:
    """Show what a trainer remarks too: the tier and why, where a run goes on, the line on its speed at the end."""
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
    """A line on standard output; a closed pipe is typer's business, a full disk is an error like any other."""
    if is_silent():
        return
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as failure:
        raise StorageError(f"standard output: cannot write, {failure.strerror}; send it elsewhere") from failure


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on one line."""
    show(json.dumps(values, ensure_ascii=False))


def print_facts(facts: dict[str, Any]) -> None:
    """Names and values for a person, a line each; tables within take a line for each of theirs."""
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
    """A path as it must be typed in a shell."""
    return shlex.quote(str(path))


def this_command() -> str:
    """The command line as it can be typed again."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    if ranks and "TORCHELASTIC_RUN_ID" in os.environ:
        return shlex.join(["torchrun", "--nproc-per-node", ranks, "-m", "brim", *sys.argv[1:]])
    return shlex.join(["brim", *sys.argv[1:]])
