"""Command-line options: made from settings classes, shared by several commands, or checked as they are typed."""

import inspect
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from brim.config import Setting, nearest, settings
from brim.errors import ConfigError

_T = TypeVar("_T", bound=Callable[..., None])

# Options whose names differ from those of their settings
_FLAGS = {"use_random_receivers": "--random-receivers", "detect_holes": "--holes/--no-holes", "method": "--model"}
_LARGE = 2**31  # a bound beyond this tells a reader nothing


# Options made from other declarations


def expand(name: str, build: Callable[..., Any], options: list[inspect.Parameter] | None = None) -> Callable[[_T], _T]:
    """Replace a command's parameter by several options, from whose values build makes its value.

    The options are the parameters of build, unless they are given.
    """
    options = list(inspect.signature(build).parameters.values()) if options is None else options

    def decorate(command: _T) -> _T:
        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += options if parameter.name == name else [parameter]
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

        @wraps(command)
        def run(**values: Any) -> None:
            value = build(**{option.name: values.pop(option.name) for option in options})
            command(**{name: value}, **values)

        run.__signature__ = own.replace(parameters=keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
        return run  # type: ignore[return-value]

    return decorate


def from_settings(
    config: type, *names: str, required: Collection[str] = (), only_given: bool = False, **metavars: str
) -> Callable[[_T], _T]:
    """Replace a command's parameter `settings: dict[str, Any]` by one option for each of the named fields of config.

    Type, default, range, unit, choices and help come from the declaration of the field. Those in required must be
    typed although they have a default. With only_given, the dictionary holds only what was typed, because a file or a
    preset may set the rest. metavars replace those derived from types.
    """

    def build(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not (only_given and (value is None or value is False))}

    declared = settings(config)
    options = [_option(declared[name], name in required, only_given, metavars.get(name)) for name in names]
    return expand("settings", build, options)


def _option(setting: Setting, required: bool, only_given: bool, metavar: str | None) -> inspect.Parameter:
    kind, parser, letter = _parsing(setting)
    info = typer.Option(
        _FLAGS.get(setting.name, "--" + setting.name.replace("_", "-")),
        metavar=None if kind is bool else metavar or letter,
        parser=parser,
        help=_help(setting),
        show_default=_shown_default(setting) if only_given and kind is not bool else True,
        autocompletion=_offers(setting),
    )
    default = inspect.Parameter.empty if required or setting.required else setting.default
    if isinstance(default, tuple):
        default = ",".join(default)
    if only_given:
        default = False if kind is bool else None
    if default is None:
        kind = kind | None
    annotation = Annotated[kind, info]  # type: ignore[valid-type]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _shown_default(setting: Setting) -> str | bool:
    """The declared default, because that of the option is None; no default where nothing is the default."""
    return False if setting.default in (None, ()) else str(setting.default)


def _parsing(setting: Setting) -> tuple[Any, Callable[[str], Any] | None, str]:
    """Type, parser and metavar of an option."""
    if bool in setting.types:
        return bool, None, ""
    if setting.item is not None and str in setting.item.types:
        return str, words, "NAMES"
    if setting.name == "budget":
        return str, duration, "TIME"
    if float in setting.types:
        return float, number, "X"
    if int in setting.types and setting.choices:  # a number, or a word in its place
        return str, lambda text: text if text in setting.choices else whole(text), "N"
    if int in setting.types and str in setting.types:
        return str, number_or_name, "N|NAME"
    return (int, whole, "N") if int in setting.types else (str, None, "NAME")


def _help(setting: Setting) -> str:
    """The declared sentence, then what values are accepted: "Carrier frequency; between 30 and 3000 MHz."."""
    parts = [setting.doc.rstrip(".")]
    if setting.choices:
        parts.append(f"one of {', '.join(map(str, setting.choices))}")
    elif setting.range is not None and abs(setting.range.high or 0) < _LARGE:
        parts.append(f"{setting.range} {setting.unit}".rstrip())
    return "; ".join(filter(None, parts)) + "."


def _offers(setting: Setting) -> Callable[[str], list[str]] | None:
    """What the shell offers; names that are known only at run time are looked up when it asks."""
    if not setting.choices and setting.names is None:
        return None
    return lambda incomplete: [name for name in map(str, setting.all_choices) if name.startswith(incomplete)]


# Values as they are typed: a wrong one is named with its option, before anything is imported


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number_or_name(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def count(text: str) -> int:
    value = whole(text)
    if value < 1:
        raise typer.BadParameter(f"{value} must be at least 1")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def power(text: str) -> str:
    """A power in dBm, or that it is unknown."""
    if text != "unknown" and not -50 <= number(text) <= 120:  # not a number fails too
        raise typer.BadParameter(f"{text!r} is no power in dBm between -50 and 120; write unknown if it is not known")
    return text


def duration(text: str | float) -> float:
    """Seconds, from 60, 60s, 2m or 1h."""
    units = {"s": 1, "m": 60, "h": 3600}
    digits, factor = (str(text)[:-1], units[str(text)[-1]]) if str(text)[-1:] in units else (text, 1)
    try:
        value = float(digits) * factor
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{text!r} is not a time; write it like 60s, 2m or 1h")
    return value


def words(text: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(names):
        raise typer.BadParameter(f"{text!r} has an empty name; separate names by single commas")
    return tuple(dict.fromkeys(names))


def percent(text: str | float) -> float:
    """A percentage such as 20 or 20%; the setting itself knows its range."""
    try:
        value = float(str(text).strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text!r} is not a percentage; write it like 20 or 20%")
    return value


def place(text: str) -> str:
    """A directory or a URL, normalised; Path would drop a slash of s3://."""
    from brim.engine.storage import place_of

    return str(place_of(text))


def one_of(*choices: str) -> dict[str, Any]:
    """Arguments of typer.Option for an option with these choices: `typer.Option(**one_of("a", "b"))`."""

    def parse(name: str) -> str:
        if name not in choices:
            raise typer.BadParameter(f"{name!r} is unknown; {nearest(name, choices)}")
        return name

    return {"parser": parse, "autocompletion": offer(*choices)}


def offer(*choices: str) -> Callable[[str], list[str]]:
    """What the shell offers for an option that also takes other values."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def directories(incomplete: str) -> list[str]:
    """What the shell offers for a directory; URLs are typed."""
    folder, _, start = incomplete.rpartition("/")
    try:
        entries = Path(folder + "/" if incomplete.startswith("/") else folder or ".").iterdir()
        names = sorted(entry.name for entry in entries if entry.name.startswith(start) and entry.is_dir())
    except OSError:
        return []
    return [f"{folder}/{name}" if folder or incomplete.startswith("/") else name for name in names]


def option(metavar: str, text: str, *flags: str, **more: Any) -> Any:
    """typer.Option with what every option here has."""
    return typer.Option(*flags, metavar=metavar, help=text, **more)


def argument(metavar: str, text: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=text, **more)


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


# Options that several commands share

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]

DeviceName = Annotated[str, option("NAME", "auto, cpu, cuda or cuda:N.", autocompletion=offer("auto", "cpu", "cuda"))]

ClusterAddress = Annotated[
    str | None,
    option("ADDRESS", "Work on a Ray cluster: auto, local or ray://HOST:PORT.", autocompletion=offer("auto", "local")),
]

NewRun = Annotated[Path, option("RUN", "Directory of the run; new or empty without --resume.", "--out")]

Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out, started with the same options.")]

HtmlReport = Annotated[Path | None, option("FILE.html", "Write a self-contained page with plots to FILE.", "--report")]

PlotFile = Annotated[Path | None, option("FILE.png", "Draw the measurements to FILE.", "--plot")]

DataDir = Annotated[
    Path | None, option("DIR", "Data directory of the service.", "--data", show_default="BRIM_DATA, brim-data")
]


@contextmanager
def needing_service(user: str) -> Iterator[None]:
    """Around imports of packages of the extra `service`: without it, an error that says how to install them."""
    try:
        yield
    except ModuleNotFoundError as failure:
        if (failure.name or "").startswith("brim"):
            raise
        raise ConfigError(f"{failure.name} is not installed; {user} needs: pip install 'brim[service]'") from failure
