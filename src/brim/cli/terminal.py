"""Results on standard output, progress and logs on standard error, and what Ctrl-C does."""

import itertools
import json
import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer

from brim.engine.meter import current_account
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


class _Loading:
    """Says what is being imported until the command prints something itself.

    On a terminal a spinner from the first moment that takes long, otherwise one line.
    """

    FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    WAIT_S, FRAME_S = 0.05, 0.1
    LINE_S = 0.3  # a command that ends sooner prints no line

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._over.set()
            thread.join()

    def _show(self) -> None:
        on_terminal = _on_terminal()
        if self._over.wait(self.WAIT_S if on_terminal else self.LINE_S):
            return
        if not on_terminal:
            os.write(2, b"loading libraries\n")
            return
        for frame in itertools.cycle(self.FRAMES):
            os.write(2, f"\r\x1b[K{frame} loading {'torch' if 'torch' in sys.modules else 'libraries'}".encode())
            if self._over.wait(self.FRAME_S):
                break
        os.write(2, b"\r\x1b[K")


_loading = _Loading()


@contextmanager
def loading(args: Sequence[str]) -> Iterator[None]:
    """While a command loads its libraries, say so; it ends with the command's first words."""
    is_command = bool(args) and not args[0].startswith("-") and "_BRIM_COMPLETE" not in os.environ
    is_heavy = is_command and args[0] not in ("serve", "jobs", "tokens", "help") and not {"--help", "-h"} & set(args)
    if is_heavy and "torch" not in sys.modules and not is_silent():
        _loading.start()
    try:
        yield
    finally:
        _loading.end()


class Display:
    """Progress on standard error: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, stop: Stop | None = None, *, preparing: tuple[str, str] | None = None) -> None:
        """preparing  what a training does before its first step, and in what it counts

        What a trainer logs at level INFO is printed too: the tier and why, where a run continues, its speed at the end.
        """
        from rich.progress import BarColumn, Progress, TextColumn

        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}")]
        self._bar = Progress(*columns, console=_console()) if _on_terminal() and not is_silent() else None
        self._task = self._bar.add_task("starting", total=None, text="") if self._bar else None
        self._stop, self._preparing = stop, preparing
        self._logger = logging.getLogger("brim")
        self._level = self._logger.level
        self._stop_confirmed = False
        self._line_s = time.monotonic()  # a command that ends at once prints no progress

    def __enter__(self) -> Self:
        if (account := current_account()) is not None:
            account.begin()
        if self._bar is not None:
            _loading.end()
            self._bar.start()
        if self._preparing is not None:
            self._logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
        if self._bar is not None:
            self._bar.stop()

    def generating(self, progress: "GenerateProgress") -> None:
        done, tried = progress.done, progress.attempted
        accepted = f"{done / tried:.0%} accepted" if tried > 0 else ""
        parts = [f"{done}/{progress.total} samples", _rate(progress.rate), accepted, _time_left(progress.eta_s)]
        self.update(progress.message, done, progress.total, *parts)

    def training(self, progress: "TrainProgress") -> None:
        message, things = f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}", "steps"
        if progress.phase == "prepare" and self._preparing is not None:
            message, things = self._preparing
        if progress.phase == "pack":
            message, things = "packing", "MB"
        if progress.phase.startswith("fold "):
            message = f"{progress.phase}, {message}"
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}"
        speed = f"{progress.samples_per_s:.0f} samples/s" if progress.samples_per_s > 0 else ""
        parts = [f"{progress.step}/{progress.steps} {things}", loss, speed, _time_left(progress.eta_s)]
        self.update(message, progress.step, progress.steps, *parts)

    def predicting(self, progress: "PredictProgress") -> None:
        done, total, rate = progress.done, progress.total or 0, progress.rate
        failed = f"{progress.failed} failed" if progress.failed else ""
        left_s = (total - done) / rate if total and rate > 0 else math.inf
        count = f"{done}/{total} images" if total else f"{done} images"
        failed += f"{', ' * bool(failed)}{progress.share:.0%} of a large image" if progress.share else ""
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
    _loading.end()
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
    _loading.end()
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as failure:
        raise StorageError(f"standard output: cannot write, {failure.strerror}") from failure


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on one line."""
    show(json.dumps(values, ensure_ascii=False))


def print_report(values: dict[str, Any], as_json: bool = True, text: str = "") -> None:
    """A report with the seconds of the whole command: as JSON, or as text whose last line they are."""
    if as_json:
        account = current_account()
        print_json(values if account is None else values | account.spent().as_dict())
        return
    if text:
        show(text)
    else:
        print_facts(values)
    show_spent()


def show_spent() -> None:
    """The last line of a command that works for a while: its seconds, and the largest cause of overhead."""
    if (account := current_account()) is not None:
        show(account.spent().line())


def print_result(values: dict[str, Any], as_json: bool, text: str | None = None) -> None:
    """A command's result as JSON or as text; without a text as names and values."""
    if as_json:
        print_json(values)
    elif text is None:
        print_facts(values)
    else:
        show(text)


def print_page(
    listed: dict[str, Any], as_json: bool, things: str, head: Sequence[str], cells: Callable[[Any], Sequence[str]]
) -> None:
    """A page of a list, as the API answers it: a table whose cells are given for each row."""
    if as_json:
        print_json(listed)
        return
    if listed[things]:
        print_table(head, [cells(row) for row in listed[things]])
    if listed["pages"] > 1:
        say(f"page {listed['page']} of {listed['pages']}, {listed['total']} {things}")
    elif not listed[things]:
        say(f"no {things}")


def print_facts(facts: dict[str, Any]) -> None:
    """Print names and values, a line each; a nested table takes a line for each of its rows."""
    lines: dict[str, Any] = {}
    for name, value in facts.items():
        nested = isinstance(value, dict) and any(isinstance(item, dict) for item in value.values())
        lines.update({f"{name} {key}": item for key, item in value.items()} if nested else {name: value})
    width = max(map(len, lines), default=0)
    for name, value in lines.items():
        show(f"{name.replace('_', ' '):{width}}  {_words(value, name)}")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
    """Print rows below their heads; with numbers, all but the first column are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            f"{cell:{'>' if numbers and at else '<'}{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        show("  ".join(cells).rstrip())


def figure(value: float) -> str:
    """Four digits of a number without an exponent: 32 790, 0.0341; smaller ones than 0.0001 keep it."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 9999.5:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.4g}"


def metres(value: float | None) -> str:
    """346 m, 32.8 km."""
    if value is None:
        return "unknown"
    return f"{figure(float(f'{value / 1000:.3g}'))} km" if abs(value) >= 999.5 else f"{value:.3g} m"


def _words(value: Any, name: str = "") -> str:
    match value:
        case None:
            return "unknown"
        case bool():
            return "yes" if value else "no"
        case float() if name.endswith("error_m") or name.endswith(("bound_m", "crlb_m")):
            return metres(value)
        case float():
            return figure(value)
        case int() if name.endswith("bytes"):
            return f"{figure(value / 1e6)} MB"
        case dict():
            return ", ".join(f"{key} {_words(item, key)}" for key, item in value.items())
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
