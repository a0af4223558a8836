"""`brim why -- python train.py`: what a training waits for, and what would help it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brim.cli.options import AsJson, argument, duration, option, words
from brim.cli.terminal import Display, Stop, print_json, say, show
from brim.config import nearest
from brim.errors import ConfigError

if TYPE_CHECKING:
    from brim.diagnosis.answer import Diagnosis

NOTEBOOK = """\
import brim
with brim.why() as w: ...  # your training loop, a few hundred steps of it
w.report()"""


def why(
    command: Annotated[
        list[str] | None, argument("-- COMMAND…", "The script as it is run: python train.py …, torchrun … train.py.")
    ] = None,
    seconds: Annotated[
        float, option("TIME", "Time for the whole answer, besides the script's own start-up.", parser=duration)
    ] = 60.0,
    tries: Annotated[
        str | None,  # a tuple, once it is parsed
        option(
            "NAMES",
            "Remedies to measure: data, batch, precision, compile.",
            "--try",
            parser=words,
            show_default="those that fit the finding",
        ),
    ] = None,
    report: Annotated[Path | None, option("FILE.html", "Write a page with the step as a timeline to FILE.")] = None,
    attach_notebook: Annotated[
        bool, typer.Option("--attach-notebook", help="Print the lines that watch a training in a notebook, and end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what a training script waits for: it runs unchanged, then on one fixed batch, then with remedies.

    Exits with the script's own code if it fails, and with 1 if it makes no step in time.
    """
    if attach_notebook:
        show(NOTEBOOK)
        return
    from brim.diagnosis.config import REMEDIES, WhyConfig

    for name in tries or ():
        if name not in REMEDIES:
            raise ConfigError(f"{name!r} is unknown; {nearest(name, REMEDIES)}", field="tries", code="unknown")
    config = WhyConfig(seconds=seconds, tries=tries)  # type: ignore[arg-type]
    if not command:
        raise ConfigError("no command to watch; write it after two dashes: brim why -- python train.py", code="missing")
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise ConfigError("is not a file in an existing directory", field="report", value=str(report))
    from brim.diagnosis.runs import examine
    from brim.diagnosis.scratch import scratch

    with scratch(Path.cwd()) as place:
        say(place.sentence)
    began_s = time.monotonic()
    with Stop() as stop, Display(stop) as display:

        def progress(text: str) -> None:
            display.update(text, 0, 0, f"{time.monotonic() - began_s:.0f} s")

        answer = examine(command, config, is_stopped=stop, progress=progress)
    if stop():
        stop.exit()
    _print(answer, report, as_json)
    raise typer.Exit(answer.exit_code)


def _print(answer: "Diagnosis", report: Path | None, as_json: bool) -> None:
    from brim.diagnosis.words import lines

    if as_json:
        print_json(answer.as_dict())
    text = lines(answer)
    if answer.samples_per_s is None:
        say(f"error: {text[0]}" if answer.exit_code else text[0])
        for line in text[1:]:
            say(line)
        return
    if not as_json:
        show("\n".join(text))
    elif answer.message:
        say(answer.message)
    if report is not None:
        from brim.diagnosis.page import page
        from brim.report.page import write_page

        write_page(report, page(answer))
        say(f"report: {report}")
