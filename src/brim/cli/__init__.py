"""The command line: `brim doctor`, `brim demo`, `brim serve`, `brim rf generate | …`, `brim segment tune | …`.

Results go to standard output, progress and logs to standard error. Importing this package imports no torch: commands
import what they need when they run.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any

import typer

from brim import __version__
from brim.cli.catalogue import datasets, models, runs
from brim.cli.demo import demo
from brim.cli.jobs import jobs
from brim.cli.options import AsJson, argument
from brim.cli.rf import rf
from brim.cli.segment import segment, weights
from brim.cli.sequence import sequence
from brim.cli.serve import serve, tokens
from brim.cli.terminal import loading, logs, print_json, say, show
from brim.cli.train import train
from brim.cli.why import why
from brim.engine.meter import Account, accounting, of_this_process
from brim.engine.meter.spent import IMPORT
from brim.errors import BrimError, ConfigError

# typer brings its own copy of click in some versions and imports it in others: this is UsageError in both
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_NO_COMMAND = re.compile(r"No such command ['\"](?P<word>.*?)['\"]\.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 2 for errors the user can correct, 128 + n after signal n."""
    # OpenMP threads spin while they wait, which slows down other processes: a training step on two threads took 4.5 s
    # beside another process, and 0.18 s with threads that soon sleep; alone 0.070 and 0.073 s.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # torch reads it when it is imported
    args = sys.argv[1:] if argv is None else list(argv)
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    command = typer.main.get_command(app)
    _bare_flags(command)
    account = of_this_process() if argv is None else Account(IMPORT)
    with logs(), accounting(account), loading(args):
        try:
            code = command.main(args, prog_name="brim", standalone_mode=False)
        except BrimError as failure:
            for one in (failure, *failure.more):
                say(f"error: {one.phrase(_spelling(command, args))}")
            return 2
        except _UsageError as failure:
            _say_usage(failure)
            return 2
    return code if isinstance(code, int) else 0


app = typer.Typer(
    name="brim",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: brim demo",
)
app.add_typer(rf, name="rf", help="Radio: synthetic data, and networks that locate transmitters.")
app.add_typer(segment, name="segment", help="Segmentation: tune batch sizes, turn images into polygons, train.")
app.add_typer(weights, name="weights", help="Weights of other libraries: import.")
app.add_typer(sequence, name="sequence", help="Sequences: pack, train with or without labels, evaluate.")
app.add_typer(jobs, name="jobs", help="Jobs of a running service: submit, watch, cancel, resume.")
app.add_typer(datasets, name="datasets", help="Datasets that the jobs of a service may read: add, list, remove.")
app.add_typer(models, name="models", help="Models that requests to a service may name: add, list, remove.")
app.add_typer(runs, name="runs", help="Runs of a service, which can be served as models: list.")
app.add_typer(tokens, name="tokens", help="Tokens of people who share a service: add, list, revoke, log.")
app.command(epilog="Example: brim train my_module.py:make --data rows.safetensors --out run --epochs 20")(train)
app.command(epilog="Example: brim serve --data brim-data --port 8000")(serve)


def _show_version(wanted: bool) -> None:
    if wanted:
        show(f"brim {__version__}")
        raise typer.Exit


@app.callback(help="Fill a GPU to the brim: synthetic data, training and served predictions.")
def _brim(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command(epilog="Example: brim doctor --cluster ray://10.0.0.1:10001")
def doctor(
    address: Annotated[
        str | None, argument("[ADDRESS]", "With --cluster: auto or ray://HOST:PORT.", show_default=False)
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also check a Ray cluster: its nodes, and who can reach its ports.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show devices, memory, versions, the device brim will use, and problems with their fixes."""
    from brim.doctor import collect, render

    if address is not None and not cluster:
        raise ConfigError(f'"{address}" needs --cluster; write: brim doctor --cluster {address}')
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
app.command(
    epilog="Example: brim why --report why.html -- python train.py --epochs 3",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)(why)


def _bare_flags(command: Any) -> None:
    """Help shows flags without a type: they take no value."""
    context = typer.Context(command, **command.context_settings)
    for param in (*command.params, command.get_help_option(context)):
        if getattr(param, "is_bool_flag", False):
            param.metavar = ""
    for each in getattr(command, "commands", {}).values():
        each.context_settings.setdefault("help_option_names", ["-h", "--help"])
        _bare_flags(each)


# Errors


def _spelling(root: Any, args: Sequence[str]) -> Callable[[str], str]:
    """How this command line writes names in an error: batch_size as --batch-size, "rf generate" as brim rf generate.

    A setting that is not an option of any command, such as one that only a configuration file has, keeps its name.
    """
    command, leaves = root, [leaf for _, leaf in _commands(root, "brim") if not hasattr(leaf, "commands")]
    for word in args:
        command = getattr(command, "commands", {}).get(word, command)
    options = [param for each in (*leaves, command) for param in each.params if param.opts[0].startswith("-")]
    flags = {option.name: option.opts[0] for option in options}  # those of this command last: they count

    def spell(name: str) -> str:
        if flag := flags.get(re.sub(r"\[\d+\]$", "", name)):  # an item of a list: models[1] is typed in --models
            return str(flag)
        return f"brim {name}" if " " in name or name in root.commands else name

    return spell


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command below a group, with its full path."""
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")


def _say_usage(failure: Exception) -> None:
    """Print an error of click's, with the nearest word where a command or an option is unknown."""
    message = str(failure.format_message() if hasattr(failure, "format_message") else failure)
    context = getattr(failure, "ctx", None)
    if type(failure).__name__ == "NoArgsIsHelpError":
        say(message)
        return
    unknown = getattr(failure, "option_name", None) if hasattr(failure, "possibilities") else None
    if context is not None and unknown:
        names = [name for param in context.command.params for name in (*param.opts, *param.secondary_opts)]
        near = _nearest(unknown, [name for name in names if name.startswith("-")])
        message = f"no such option {unknown!r}{_meant([near] if near else [])}"
    elif context is not None and (match := _NO_COMMAND.match(message)):
        message = f"no such command {match['word']!r}{_meant(_commands_like(match['word'], context))}"
    say(f"error: {message[:1].lower()}{message[1:]}")
    if context is not None:
        say(f'run "{context.command_path} --help" for the options')


def _meant(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    either = " or ".join(filter(None, (", ".join(quoted[:-1]), *quoted[-1:])))
    return f"; did you mean {either}?" if quoted else ""


def _nearest(word: str, choices: Collection[str]) -> str | None:
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, 1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def _commands_like(word: str, context: Any) -> list[str]:
    """The nearest command: by its name if it belongs to this group, else the full path of each that has the name."""
    paths = [path for path, _ in _commands(context.find_root().command, "brim")]
    name = _nearest(word, {path.rpartition(" ")[2] for path in paths})
    if name in context.command.commands:
        return [str(name)]
    return [path for path in paths if path.rpartition(" ")[2] == name]
