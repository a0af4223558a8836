"""The same verbs in a terminal: `brim doctor`, `brim demo`, `brim rf generate | …`, `brim segment tune | …`.

Results go to standard output, progress and logs to standard error. Importing this imports no torch: commands
import what they need when they run.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from brim import __version__
from brim.cli.datasets import datasets
from brim.cli.jobs import jobs
from brim.cli.locate import end_training, print_evaluated, print_trained, run_evaluate, run_train
from brim.cli.models import models
from brim.cli.options import Json, check_positive, whole
from brim.cli.rf import end_generation, print_made, rf, run_generate
from brim.cli.segment import segment
from brim.cli.sequence import sequence
from brim.cli.serve import serve
from brim.cli.terminal import Stop, logs, print_json, quote, say, show
from brim.errors import BrimError

# A half-watt hand-held transmitter: weak enough that the gates have something to refuse.
DEMO = {"tx_power_dbm": 27.0, "min_snr_db": 10.0, "max_gdop": 5.0, "min_receivers": 4}
DEMO_SAMPLES_CPU = 300  # less than a minute on two cores, all told
DEMO_EPOCHS = 10
DEMO_SAMPLES_GPU = 20_000  # seconds on a large GPU, enough for smooth histograms

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
    message = failure.format_message() if hasattr(failure, "format_message") else str(failure)
    context = getattr(failure, "ctx", None)
    if type(failure).__name__ == "NoArgsIsHelpError":
        say(message)
        return
    say(f"error: {message[:1].lower()}{message[1:]}")
    if context is not None:
        say(f'run "{context.command_path} --help" for the options')


app = typer.Typer(
    name="brim",
    no_args_is_help=True,
    add_completion=False,
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


@app.command(epilog="Example: brim doctor --json")
def doctor(as_json: Json = False) -> None:
    """Show what is here: device, memory, versions, what brim will use, and what is wrong."""
    from brim.doctor import collect, render

    facts = collect()
    if as_json:
        print_json(facts)
    else:
        from rich.console import Console

        console = Console()
        with console.capture() as table:
            console.print(render(facts))
        show(table.get().rstrip())


@app.command(epilog="Example: brim demo --out demo-output --samples 100")
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the datasets, the run and the reports.")
    ] = Path("demo-output"),
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole,
            help=f"Accepted samples to make. [default: {DEMO_SAMPLES_CPU}, on a GPU {DEMO_SAMPLES_GPU}]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate a small dataset, train a locator on it and evaluate that on other samples, with HTML reports."""
    check_positive("--samples", samples)
    with Stop() as stop:
        from brim.engine.device import resolve_device
        from brim.rf import from_mapping
        from brim.rf.report import write_report
        from brim.rf.train import LocatorTraining

        on_gpu = resolve_device("auto").type == "cuda"
        samples = samples or (DEMO_SAMPLES_GPU if on_gpu else DEMO_SAMPLES_CPU)
        dataset, held, run = out / "dataset", out / "held-out", out / f"run-{samples}"
        page, result = out / "report.html", out / "evaluation.html"
        sizes = {dataset: max(2, samples), held: max(2, samples // 5)}  # one to train on and one to choose by
        made = {}
        for seed, (path, size) in enumerate(sizes.items()):
            made[path] = run_generate(from_mapping({**DEMO, "seed": seed}), path, size, stop)
            if made[path].stopped:
                end_generation(made[path], size, stop, resume=True, as_json=as_json)  # it always resumes
        write_report(dataset, page)
        config = LocatorTraining(epochs=DEMO_EPOCHS, batch_size=256 if on_gpu else 32)
        trained = run_train([dataset], run, config, stop)
    if trained.stopped:
        end_training(trained, config.epochs, stop, resume=True, as_json=as_json)
    evaluated = run_evaluate(run, held, result)
    if as_json:
        found = {"train": trained.as_dict(), "evaluate": evaluated.as_dict()}
        print_json({**made[dataset].as_dict(), "report": str(page), **found, "evaluation_report": str(result)})
        return
    print_made(made[dataset])
    print_trained(trained)
    print_evaluated(evaluated)
    show(f"dataset: {dataset}, held out: {held}\nrun:     {run}")
    show(f"reports: {page} and {result} (open them in a browser)")
    show(f'next:    brim rf inspect {quote(dataset)}, or "brim rf generate --help" for your own data')
