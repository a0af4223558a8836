"""`brim rf train | evaluate | locate | export-onnx`: options in, one call of `brim.rf.location.train`, a result out."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from brim.cli.options import (
    PRECISIONS,
    TIERS,
    Device,
    Json,
    check_choice,
    check_positive,
    directories,
    number,
    one_of,
    place,
    whole,
)
from brim.cli.rf import rf
from brim.cli.terminal import Display, Stop, end_stopped, print_facts, print_json, quote, remarks, show

if TYPE_CHECKING:
    from brim.engine.training import TrainReport
    from brim.rf.config import LocatorTraining
    from brim.rf.location.run import Evaluation

Counted = Callable[[int, int], None]  # how many are done, of how many
Run = Annotated[Path, typer.Argument(metavar="RUN", help='Directory of a run made by "brim rf train".')]


@rf.command(epilog="Example: brim rf train data --out run --epochs 30")
def train(
    datasets: Annotated[
        list[str],
        typer.Argument(
            metavar="DATASET",
            parser=place,
            help="Directories or URLs of datasets with equal settings.",
            autocompletion=directories,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run's directory; new or empty without --resume.")],
    epochs: Annotated[int, typer.Option(metavar="E", parser=whole, help="Times to go through the samples.")] = 30,
    batch_size: Annotated[int, typer.Option(metavar="B", parser=whole, help="Samples per step.")] = 256,
    learning_rate: Annotated[
        float, typer.Option(metavar="R", parser=number, help="After the warm-up; then a cosine to 0.")
    ] = 0.001,
    tier: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where the data is held: auto, vram, ram or window.",
            autocompletion=one_of(*TIERS),
        ),
    ] = "auto",
    device: Device = "auto",
    precision: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, fp32, bf16 or fp16; positions are fp32 in all of them.",
            autocompletion=one_of(*PRECISIONS),
        ),
    ] = "auto",
    seed: Annotated[
        int, typer.Option(metavar="K", parser=whole, help="Of the split, the first weights and the order.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, begun with the same options.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a network that says where a transmitter is and how sure that is.

    A tenth of the samples is held out to choose the best weights. Ctrl-C ends at the next batch; --resume goes on.
    """
    check_choice("--tier", tier, TIERS)
    check_choice("--precision", precision, PRECISIONS)
    check_positive("--epochs", epochs)
    check_positive("--batch-size", batch_size)
    with Stop() as stop:
        from brim.rf.config import LocatorTraining

        config = LocatorTraining(
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            tier=tier,  # type: ignore[arg-type]  # checked above
            precision=precision,  # type: ignore[arg-type]
            seed=seed,
        )
        report = run_train(datasets, out, config, stop, device=device, resume=resume)
    if report.stopped:
        end_training(report, epochs, stop, resume=resume, as_json=as_json)
    if as_json:
        print_json(report.as_dict())
        return
    show(f"run:  {out}\nnext: brim rf evaluate {quote(out)} HELD_OUT_DATASET --report evaluation.html")
    print_trained(report)


@rf.command(epilog="Example: brim rf evaluate run held-out --report evaluation.html")
def evaluate(
    run: Run,
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            parser=place,
            help="A dataset of another seed than those trained on; a directory or a URL.",
            autocompletion=directories,
        ),
    ],
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a self-contained page with plots here.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure a run on held-out data, beside classical solvers and the bound."""
    found = run_evaluate(run, dataset, report, device=device)
    if as_json:
        print_json(found.as_dict())
        return
    print_evaluated(found)
    if report is not None:
        show(f"report: {report} (open it in a browser)")


@rf.command(epilog="Example: brim rf locate run observations.json > positions.geojson")
def locate(
    run: Run,
    observations: Annotated[
        Path, typer.Argument(metavar="OBSERVATIONS.json", help="What stations measured of one or more transmissions.")
    ],
    as_json: Json = False,
) -> None:
    """Say where transmitters are: points and 50, 90 and 95 % ellipses as GeoJSON."""
    from brim.rf.location.train import locate as find

    found = find(run, observations)
    if as_json:
        print_json(found)
    else:
        show(json.dumps(found, ensure_ascii=False, indent=1))


@rf.command("export-onnx", epilog="Example: brim rf export-onnx run --out locator.onnx")
def export_onnx(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    as_json: Json = False,
) -> None:
    """Write a run's network as ONNX, checked against torch with onnxruntime."""
    from brim.rf.location.train import export_onnx as write

    written = write(run, out)
    if as_json:
        print_json(written)
    else:
        print_facts(written)


# Running


def run_train(
    datasets: Sequence[Path | str],
    out: Path,
    config: "LocatorTraining",
    stop: Stop,
    *,
    device: str = "auto",
    resume: bool = True,
) -> "TrainReport":
    """Train with progress on the terminal, until done or stopped."""
    from brim.rf.location.train import train

    with remarks(), Display(stop, preparing=("solving", "samples")) as display:
        return train(datasets, out, config, device=device, progress=display.training, stop=stop, resume=resume)


def run_evaluate(
    run: Path,
    dataset: Path | str,
    report: Path | None,
    *,
    device: str = "auto",
    watched: Callable[[Counted], Counted] = lambda tell: tell,
) -> "Evaluation":
    """Evaluate with progress on the terminal, and write the page if one is asked for.

    watched  what is put around the progress callback, to leave from there
    """
    from brim.rf.location.page import write_evaluation
    from brim.rf.location.train import evaluate_run

    with Display() as display:
        found = evaluate_run(run, dataset, device=device, progress=watched(display.samples("locating")))
    if report is not None:
        write_evaluation(str(run), str(dataset), *found, report)
    return found


def end_training(report: "TrainReport", epochs: int, stop: Stop, *, resume: bool, as_json: bool) -> NoReturn:
    """The end of a training that was stopped."""
    if as_json:
        print_json(report.as_dict())
    said = f"after {report.epochs} of {epochs} epochs, {report.steps} steps; nothing of them is lost"
    end_stopped(said, stop, resume=resume)


def print_trained(report: "TrainReport") -> None:
    """What a finished run came to, and as its last line how fast it was and what it waited for."""
    from brim.engine.training import summary_line

    best = "not measured" if report.best_val_loss is None else f"{report.best_val_loss:.3f}"
    early = ", stopped early" if report.stopped_early else ""
    show(f"{report.epochs} epochs{early}, best val_loss {best}; data in tier {report.tier}")
    show(summary_line(report))


def print_evaluated(found: "Evaluation") -> None:
    """The figures for a person, the classical ones below."""
    facts: dict[str, Any] = {name: value for name, value in found.metrics.items() if _is_figure(name)}
    facts["baselines"] = {
        name: {key: one[key] for key in ("median_error_m", "p95_error_m", "crlb_ratio")}
        for name, one in found.metrics["baselines"].items()
    }
    print_facts(facts)


def _is_figure(name: str) -> bool:
    return name in ("samples", "coverage") or name.endswith("error_m") or name.startswith("crlb")
