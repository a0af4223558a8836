"""The same verbs in a terminal: `brim doctor`, `brim demo`, `brim rf generate | …`, `brim segment tune | …`.

Results go to standard output, progress and logs to standard error. Importing this imports no torch: commands
import what they need when they run.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from brim import __version__
from brim.cli.datasets import datasets
from brim.cli.demo import demo
from brim.cli.jobs import jobs
from brim.cli.models import models
from brim.cli.options import Json
from brim.cli.rf import rf
from brim.cli.segment import segment
from brim.cli.sequence import sequence
from brim.cli.serve import serve
from brim.cli.terminal import logs, print_json, say, show
from brim.cli.words import usage
from brim.errors import BrimError, ConfigError

# typer brings its own copy of click in some versions and imports it in others: this is UsageError in both
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 2 for what the user can put right, 128 + n after signal n."""
    # OpenMP's threads spin while they wait, and so against whoever else uses the machine: a training step on two
    # threads took 4.5 s beside another process, and 0.18 s with threads that soon sleep; alone 0.070 and 0.073 s.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # torch reads it at its import
    with logs():
        try:
            args = sys.argv[1:] if argv is None else list(argv)
            code = typer.main.get_command(app).main(args, prog_name="brim", standalone_mode=False)
        except BrimError as failure:
            say(f"error: {failure}")
            return 2
        except _UsageError as failure:
            _say_usage(failure)
            return 2
    return code if isinstance(code, int) else 0


def _say_usage(failure: Exception) -> None:
    context = getattr(failure, "ctx", None)
    if type(failure).__name__ == "NoArgsIsHelpError":
        say(str(failure.format_message() if hasattr(failure, "format_message") else failure))
        return
    say(f"error: {usage(failure)}")
    if context is not None:
        say(f'run "{context.command_path} --help" for the options')


app = typer.Typer(
    name="brim",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: brim demo",
)
app.add_typer(rf, name="rf", help="Radio: synthetic transmitter-localisation data by the batch.")
app.add_typer(segment, name="segment", help="Segmentation: the right batch size, images to polygons, training.")
app.add_typer(sequence, name="sequence", help="Sequences: pack, train with or without labels, what is worth what.")
app.add_typer(jobs, name="jobs", help="Jobs of a running service: submit, watch, cancel, resume.")
app.add_typer(datasets, name="datasets", help="Datasets that the jobs of a service may read: add, list, remove.")
app.add_typer(models, name="models", help="Models that requests to a service may name: add, list, remove.")
app.command(epilog="Example: brim serve --data brim-data --port 8000")(serve)


def _show_version(asked: bool) -> None:
    if asked:
        show(f"brim {__version__}")
        raise typer.Exit


@app.callback(help="Fill a GPU to the brim: synthetic data by the batch.")
def _brim(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command(epilog="Example: brim doctor --cluster ray://10.0.0.1:10001")
def doctor(
    address: Annotated[
        str | None,
        typer.Argument(metavar="[ADDRESS]", show_default=False, help="With --cluster: auto or ray://HOST:PORT."),
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Look at a Ray cluster too: its nodes, and who could reach its ports.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what is here: device, memory, versions, what brim will use, and what is wrong."""
    from brim.doctor import collect, render

    if address is not None and not cluster:
        raise ConfigError(f'"{address}" is of no use without --cluster; write brim doctor --cluster {address}')
    facts = collect(address or "auto" if cluster else None)
    if as_json:
        print_json(facts)
    else:
        from rich.console import Console

        console = Console()
        with console.capture() as table:
            console.print(render(facts))
        show(table.get().rstrip())


app.command(epilog="Example: brim demo --out demo-output --samples 100")(demo)
