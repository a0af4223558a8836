"""The same verbs in a terminal: `brim doctor`, `brim demo`, `brim rf generate | inspect | export`.

Results go to standard output, progress and logs to standard error. Importing this imports no torch: commands
import what they need when they run.
"""

import difflib
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from brim import __version__
from brim.errors import BrimError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from brim.rf import GenerateConfig, Progress, Report

DEMO_SAMPLES_CPU = 300  # half a minute on two cores
DEMO_SAMPLES_GPU = 20_000  # seconds on a large GPU, enough for smooth histograms
LINE_S = 3.0  # between progress lines where there is no terminal to draw a bar on
AGAIN_S = 0.5  # wrappers such as `uv run` pass on the Ctrl-C that the terminal sent us too: two at once are one

# typer brings its own copy of click in some versions and imports it in others: this is UsageError in both
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 2 for what the user can put right, 128 + n after signal n."""
    with _logging():
        try:
            code = _run(sys.argv[1:] if argv is None else list(argv))
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:  # as in `brim rf inspect DIR | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's flush fails too
            return 128 + signal.SIGPIPE
    return code


def _run(argv: list[str]) -> int:
    try:
        code = typer.main.get_command(app).main(argv, prog_name="brim", standalone_mode=False)
    except BrimError as failure:
        _say(f"error: {failure}")
        return 2
    except _UsageError as failure:
        _say_usage(failure)
        return 2
    return code if isinstance(code, int) else 0


def _say_usage(failure: Exception) -> None:
    message = failure.format_message() if hasattr(failure, "format_message") else str(failure)
    context = getattr(failure, "ctx", None)
    if type(failure).__name__ == "NoArgsIsHelpError":
        _say(message)
        return
    _say(f"error: {message[:1].lower()}{message[1:]}")
    if context is not None:
        _say(f'run "{context.command_path} --help" for the options')


app = typer.Typer(
    name="brim",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: brim demo",
)
rf = typer.Typer(no_args_is_help=True, epilog="Example: brim rf generate --out data --samples 1000")
app.add_typer(rf, name="rf", help="Radio: synthetic transmitter-localisation data by the batch.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"brim {__version__}")
        raise typer.Exit


@app.callback(help="Fill a GPU to the brim: synthetic data by the batch.")
def _brim(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command(epilog="Example: brim doctor --json")
def doctor(as_json: Json = False) -> None:
    """Show what is here: device, memory, versions, what brim will use, and what is wrong."""
    from brim.doctor import collect, render

    facts = collect()
    if as_json:
        _print_json(facts)
    else:
        from rich.console import Console

        Console().print(render(facts))


@app.command(epilog="Example: brim demo --out demo-output --samples 100")
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the dataset and the report.")] = Path("demo-output"),
    samples: Annotated[
        int | None,
        typer.Option(
            help=f"Accepted samples to make. [default: {DEMO_SAMPLES_CPU}, on a GPU {DEMO_SAMPLES_GPU}]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate a small dataset on whatever device there is and write an HTML report about it."""
    _check_positive("--samples", samples)
    with _Stop() as stop:
        from brim.engine.device import resolve_device
        from brim.rf import GenerateConfig
        from brim.rf.report import write_report

        if samples is None:
            samples = DEMO_SAMPLES_GPU if resolve_device("auto").type == "cuda" else DEMO_SAMPLES_CPU
        dataset, page = out / "dataset", out / "report.html"
        report = _generate(GenerateConfig(), dataset, samples, stop=stop, resume=True)
    if report.stopped:
        _end_stopped(report, samples, stop, again=_this_command(), as_json=as_json)
    write_report(dataset, page)
    if as_json:
        _print_json({**report.as_dict(), "report": str(page)})
        return
    _print_made(report)
    typer.echo(f"dataset: {dataset}\nreport:  {page} (open it in a browser)")
    typer.echo(f'next:    brim rf inspect {_quote(dataset)}, or "brim rf generate --help" for your own data')


@rf.command(epilog="Example: brim rf generate --out data --samples 10000 --preset quality --seed 7")
def generate(
    out: Annotated[Path, typer.Option(help="Directory of the dataset; new or empty without --resume.")],
    samples: Annotated[int, typer.Option(help="Accepted samples to make.")] = 1000,
    preset: Annotated[
        str | None, typer.Option(help="production or quality; random receivers and the gates that go with them.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Fields of GenerateConfig; over a preset, under flags.")
    ] = None,
    stations: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Your receivers, header name,lat,lon,alt; instead of the built-in ones."),
    ] = None,
    frequency_mhz: Annotated[float | None, typer.Option(help="Carrier, 30 to 3000 MHz.")] = None,
    tx_power_dbm: Annotated[float | None, typer.Option(help="Transmit power, 0 to 50 dBm.")] = None,
    min_snr_db: Annotated[
        float | None, typer.Option(help="Link SNR in 12.5 kHz from which a receiver hears the transmitter.")
    ] = None,
    max_gdop: Annotated[float | None, typer.Option(help="Refuse samples with a worse geometry than this.")] = None,
    min_receivers: Annotated[
        int | None, typer.Option(help="Refuse samples heard by fewer receivers; at least 3.")
    ] = None,
    random_receivers: Annotated[
        bool, typer.Option("--random-receivers", help="5 to 10 random receivers per sample instead of stations.")
    ] = False,
    waveform: Annotated[str | None, typer.Option(help="nbfm, am, cw or fsk.")] = None,
    loss: Annotated[str | None, typer.Option(help="free_space, log_distance or hata.")] = None,
    dataset_type: Annotated[
        str | None, typer.Option(help="feature_based, or iq_raw to keep the IQ records too.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed and options give the same data.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per batch; by default what fits the memory. Changes no data.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Most memory to use, such as 2GiB or 500MB.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the dataset in --out; the other options must be the same.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a dataset of N accepted samples: receivers, features and truth in checksummed shards.

    Options left out keep the value of the config file, else of the preset, else the default.
    """
    _check_positive("--samples", samples)
    _check_positive("--batch-size", batch_size)
    flags = {
        "frequency_mhz": frequency_mhz,
        "tx_power_dbm": tx_power_dbm,
        "min_snr_db": min_snr_db,
        "max_gdop": max_gdop,
        "min_receivers": min_receivers,
        "use_random_receivers": random_receivers or None,
        "waveform": waveform,
        "loss": loss,
        "dataset_type": dataset_type,
        "seed": seed,
    }
    with _Stop() as stop:
        from brim.engine.memory import parse_size

        resolved = _resolve(preset, config, stations, {k: v for k, v in flags.items() if v is not None})
        report = _generate(
            resolved,
            out,
            samples,
            stop=stop,
            resume=resume,
            device=device,
            batch_size=batch_size,
            memory=None if memory is None else parse_size(memory),
        )
    if report.stopped:
        again = _this_command() + ("" if resume else " --resume")
        _end_stopped(report, samples, stop, again=again, as_json=as_json)
    if as_json:
        _print_json(report.as_dict())
        return
    _print_made(report)
    typer.echo(f"dataset: {out}\nnext:    brim rf inspect {_quote(out)} --report report.html")


@rf.command(epilog="Example: brim rf inspect data --report report.html")
def inspect(
    dataset: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a dataset.")],
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a self-contained page with plots here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a dataset and say what is in it."""
    from brim.rf.inspect import inspect as look
    from brim.rf.report import write_report

    summary = look(dataset)
    if report is not None:
        write_report(dataset, report)
    if as_json:
        _print_json(summary.as_dict())
        return
    _print_facts(summary.as_dict())
    if report is not None:
        typer.echo(f"report: {report}")


@rf.command(epilog="Example: brim rf export data --format sigmf --out data-sigmf")
def export(
    dataset: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a dataset.")],
    out: Annotated[Path, typer.Option(help="Directory to write to; new or empty.")],
    fmt: Annotated[str, typer.Option("--format", help="sigmf, parquet or hdf5.")],
    as_json: Json = False,
) -> None:
    """Write a dataset in a format other tools read."""
    from brim.rf.export import export as write

    written = write(dataset, out, fmt)
    if as_json:
        _print_json(written)
    else:
        _print_facts(written)


# Options


def _resolve(
    preset: str | None, file: Path | None, stations: Path | None, flags: dict[str, Any]
) -> "GenerateConfig":
    """The configuration: defaults, under the preset, under the file, under the flags."""
    from brim.rf import PRESETS, from_mapping, read_stations, read_toml
    from brim.rf.config import DatasetType, Loss, Waveform

    _check_choice("--preset", preset, PRESETS)
    for name, choices in {"waveform": Waveform, "loss": Loss, "dataset_type": DatasetType}.items():
        _check_choice(f"--{name.replace('_', '-')}", flags.get(name), get_args(choices))
    values = read_toml(file) if file is not None else {}
    if file is not None and preset is not None:
        own = tomllib.loads(file.read_text(encoding="utf-8")).get("preset", preset)
        if own != preset:
            raise ConfigError(f"--preset {preset}: {file} has preset = {own!r}; keep one of them")
    if stations is not None:
        if flags.get("use_random_receivers"):
            raise ConfigError("--stations and --random-receivers exclude each other; give one of them")
        # a preset's random receivers give way: stations that are read and then ignored help nobody
        flags = {**flags, "stations": read_stations(stations), "use_random_receivers": False}
    return from_mapping({**values, **flags}, preset=preset, source=f"config file {file}")


def _check_choice(flag: str, value: str | None, choices: Iterable[str]) -> None:
    if value is None or value in choices:
        return
    near = difflib.get_close_matches(value, choices, 1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{flag} {value} is unknown; choose one of {', '.join(choices)}{hint}")


def _check_positive(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{flag} {value} must be at least 1")


# Running


def _generate(config: "GenerateConfig", out: Path, samples: int, *, stop: "_Stop", **options: Any) -> "Report":
    from brim.rf import generate

    with _Display(stop) as display:
        return generate(config, out, samples, progress=display, stop=stop, **options)


class _Stop:
    """Ctrl-C or SIGTERM ends the run at the next batch boundary; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that came, 0 before
        self._came_s = 0.0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.number != 0

    def __enter__(self) -> Self:
        self._before = {n: signal.signal(n, self._receive) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._came_s = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._came_s > AGAIN_S:
            # No clean-up to wait for: a dataset survives even SIGKILL. The bar may have hidden the cursor.
            cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
            os.write(2, cursor + b"\naborted; what was complete stays usable\n")
            os._exit(128 + number)


class _Display:
    """Progress on standard error: a bar on a terminal, else a line every few seconds."""

    def __init__(self, stop: _Stop) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._stop = stop
        self._said_stop = False
        self._line_s = 0.0
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}")]
        self._bar = Bar(*columns, console=_console()) if sys.stderr.isatty() else None
        self._task = self._bar.add_task("starting", total=None, text="") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: "Progress") -> None:
        if self._stop() and not self._said_stop:
            self._said_stop = True
            _say("stopping at the end of this batch; Ctrl-C again stops at once")
        text = _progress_text(progress)
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                description=progress.message,
                total=progress.total,
                completed=progress.done,
                text=text,
            )
        elif time.monotonic() - self._line_s >= LINE_S:
            self._line_s = time.monotonic()
            _say(f"{progress.message}: {text}")


def _progress_text(progress: "Progress") -> str:
    parts = [f"{progress.done}/{progress.total} samples"]
    if progress.rate > 0:
        parts.append(f"{progress.rate:.1f}/s")
    if progress.attempted > 0:
        parts.append(f"{progress.done / progress.attempted:.0%} accepted")
    if math.isfinite(progress.eta_s):
        minutes, seconds = divmod(math.ceil(progress.eta_s), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
    return ", ".join(parts)


def _end_stopped(report: "Report", samples: int, stop: _Stop, *, again: str, as_json: bool) -> NoReturn:
    if as_json:
        _print_json(report.as_dict())
    _say(f"stopped at {report.accepted} of {samples} samples; {report.dataset} is usable as it is")
    _say(f"continue with: {again}")
    raise typer.Exit(128 + stop.number)


def _this_command() -> str:
    return shlex.join(["brim", *sys.argv[1:]])


# Standard output: results


def _print_json(values: dict[str, Any]) -> None:
    typer.echo(json.dumps(values, ensure_ascii=False))


def _print_made(report: "Report") -> None:
    typer.echo(
        f"{report.accepted} samples accepted of {report.attempted} tried "
        f"({report.accepted / max(1, report.attempted):.1%}), "
        f"{report.samples_per_s:.1f} samples/s on {report.device}, {report.ceiling_share:.0%} of the ceiling"
    )


def _print_facts(facts: dict[str, Any]) -> None:
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        typer.echo(f"{name:{width}}  {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")


# Standard error: progress and logs


@cache
def _console() -> "Console":
    from rich.console import Console

    return Console(stderr=True)


def _say(text: str) -> None:
    """A line on standard error, above the bar where there is one."""
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


class _LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _say(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def _logging() -> Iterator[None]:
    handler = _LogHandler()
    logger = logging.getLogger("brim")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
