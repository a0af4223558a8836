"""`brim rf generate | inspect | export | train | evaluate | locate | export-onnx`: radio data and locators."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from brim.cli.options import (
    AsJson,
    ClusterAddress,
    DeviceName,
    HtmlReport,
    NewRun,
    Resume,
    count,
    directories,
    from_settings,
    offer,
    one_of,
    place,
)
from brim.cli.terminal import Display, Stop, end_stopped, print_facts, print_json, quote, remarks, show
from brim.errors import ConfigError
from brim.rf.config import PRESETS, GenerateConfig, LocatorTraining, from_mapping, read_stations, read_toml

if TYPE_CHECKING:
    from brim.engine.training import TrainReport
    from brim.rf import GenerateReport
    from brim.rf.generation import Pool
    from brim.rf.location import LocatorEvaluation

rf = typer.Typer(no_args_is_help=True, epilog="Example: brim rf generate --out data --samples 1000")

DatasetPlace = Annotated[
    str,
    typer.Argument(metavar="DIR|URL", parser=place, help="Directory or URL of a dataset.", autocompletion=directories),
]
LocatorDir = Annotated[Path, typer.Argument(metavar="RUN", help='Directory of a run made by "brim rf train".')]


# Datasets


@rf.command(epilog="Example: brim rf generate --out data --samples 10000 --preset quality --seed 7")
@from_settings(
    GenerateConfig,
    *("frequency_mhz", "tx_power_dbm", "min_snr_db", "max_gdop", "min_receivers", "use_random_receivers"),
    *("waveform", "loss", "dataset_type", "seed"),
    only_given=True,
)
def generate(
    *,
    out: Annotated[
        str,
        typer.Option(
            metavar="DIR|URL",
            parser=place,
            help="Directory of the dataset, or a URL such as s3://bucket/data; new or empty without --resume.",
            autocompletion=directories,
        ),
    ],
    samples: Annotated[int, typer.Option(metavar="N", parser=count, help="Accepted samples to generate.")] = 1000,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"{' or '.join(PRESETS)}: random receivers and matching gates.", **one_of(*PRESETS)
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Settings; they override the preset, and options override them."),
    ] = None,
    stations: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Your receivers instead of the built-in ones; header name,lat,lon,alt."),
    ] = None,
    settings: dict[str, Any],
    device: DeviceName = "auto",
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Several devices of this machine, one process each: all, 0,1 or cpu,cpu.",
            autocompletion=offer("all"),
        ),
    ] = None,
    cluster: ClusterAddress = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Use devices of several types, whose last bits differ.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=count,
            help="Samples per batch; no effect on the data.",
            show_default="as many as fit",
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory to use at most, such as 2GiB or 500MB.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the dataset in --out, made with the same options.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate a dataset of N accepted samples: receivers, features and truth in checksummed shards.

    An option that is left out keeps the value of the config file, else of the preset, else the default.
    """
    resolved = _resolve(preset, config, stations, settings)
    _check_devices(device, devices, cluster, allow_mixed)
    with Stop() as stop:
        from brim.engine.device import parse_size

        budget = None if memory is None else parse_size(memory)
        with _pool(devices, cluster) as pool:
            report = run_generate(
                resolved,
                out,
                samples,
                stop,
                device=device,
                pool=pool,
                allow_mixed=allow_mixed,
                batch_size=batch_size,
                memory=budget,
                resume=resume,
            )
    if as_json:
        print_json(report.as_dict())
    if report.stopped:
        text = f"at {report.accepted} of {samples} samples; {report.dataset} is usable as it is"
        end_stopped(text, stop, resume=resume)
    if not as_json:
        print_generated(report)
        show(f"dataset: {out}\nnext:    brim rf inspect {quote(out)} --report report.html")


@rf.command(epilog="Example: brim rf inspect data --report report.html")
def inspect(dataset: DatasetPlace, report: HtmlReport = None, as_json: AsJson = False) -> None:
    """Verify a dataset and summarise its contents."""
    from brim.rf.datasets import inspect as inspect_dataset
    from brim.rf.datasets import write_report

    with Display() as display:
        facts = inspect_dataset(dataset, progress=display.counting("verifying", "shards")).as_dict()
    if report is not None:
        write_report(dataset, report)
    if as_json:
        print_json(facts)
        return
    speed = facts.pop("throughput") or {}
    print_facts({**facts, "samples_per_s": speed.get("samples_per_s"), "iq_per_s": speed.get("iq_per_s")})
    if report is not None:
        show(f"report: {report} (open it in a browser)")


@rf.command(epilog="Example: brim rf export data --format parquet --out data-parquet")
def export(
    dataset: DatasetPlace,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="sigmf (for iq_raw), parquet or hdf5.",
            **one_of("sigmf", "parquet", "hdf5"),
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write to; new or empty.")],
    as_json: AsJson = False,
) -> None:
    """Write a dataset in a format that other tools read."""
    from brim.rf.datasets import export as export_dataset

    with Display() as display:
        written = export_dataset(dataset, out, format, progress=display.counting("exporting", "shards"))
    (print_json if as_json else print_facts)(written)


# Locators


@rf.command(epilog="Example: brim rf train data --out run --epochs 30")
@from_settings(LocatorTraining, "epochs", "batch_size", "learning_rate", "tier", "precision", "seed")
def train(
    *,
    datasets: Annotated[
        list[str],
        typer.Argument(
            metavar="DATASET",
            parser=place,
            help="Directories or URLs of datasets with equal settings.",
            autocompletion=directories,
        ),
    ],
    out: NewRun,
    settings: dict[str, Any],
    device: DeviceName = "auto",
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a network that locates transmitters and estimates its own uncertainty.

    A tenth of the samples is held out to select the best weights. Ctrl-C stops at the next batch; --resume continues.
    """
    config = LocatorTraining(**settings)
    with Stop() as stop:
        report = run_train(datasets, out, config, stop, device=device, resume=resume)
    if as_json:
        print_json(report.as_dict())
    if report.stopped:
        text = f"after {report.epochs} of {config.epochs} epochs, {report.steps} steps; nothing of them is lost"
        end_stopped(text, stop, resume=resume)
    if not as_json:
        show(f"run:  {out}\nnext: brim rf evaluate {quote(out)} HELD_OUT_DATASET --report evaluation.html")
        print_trained(report)


@rf.command(epilog="Example: brim rf evaluate run held-out --report evaluation.html")
def evaluate(
    run: LocatorDir,
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            parser=place,
            help="Directory or URL of a dataset with another seed than those trained on.",
            autocompletion=directories,
        ),
    ],
    report: HtmlReport = None,
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Evaluate a run on held-out data, beside classical solvers and the Cramér-Rao bound."""
    with Display() as display:
        evaluation = run_evaluate(run, dataset, report, display.counting("locating", "samples"), device=device)
    if as_json:
        print_json(evaluation.as_dict())
        return
    metrics = evaluation.metrics
    shown = {name: value for name, value in metrics.items() if name in ("samples", "coverage") or _is_error(name)}
    baselines = {
        name: {key: one[key] for key in ("median_error_m", "p95_error_m", "crlb_ratio")}
        for name, one in metrics["baselines"].items()
    }
    print_facts({**shown, "baselines": baselines})
    if report is not None:
        show(f"report: {report} (open it in a browser)")


def _is_error(name: str) -> bool:
    return name.endswith("error_m") or name.startswith("crlb")


@rf.command(epilog="Example: brim rf locate run observations.json > positions.geojson")
def locate(
    run: LocatorDir,
    observations: Annotated[
        Path, typer.Argument(metavar="OBSERVATIONS.json", help="Measurements of one or more transmissions by stations.")
    ],
    as_json: AsJson = False,
) -> None:
    """Locate transmitters: points and 50, 90 and 95 % ellipses as GeoJSON."""
    from brim.rf.location import locate as locate_observations

    positions = locate_observations(run, observations)
    if as_json:
        print_json(positions)
    else:
        show(json.dumps(positions, ensure_ascii=False, indent=1))


@rf.command("export-onnx", epilog="Example: brim rf export-onnx run --out locator.onnx")
def export_onnx(
    run: LocatorDir,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    as_json: AsJson = False,
) -> None:
    """Write the network of a run as ONNX, checked against torch with onnxruntime."""
    from brim.rf.location import export_onnx as export_run

    written = export_run(run, out)
    (print_json if as_json else print_facts)(written)


# Options


def _resolve(preset: str | None, file: Path | None, stations: Path | None, given: dict[str, Any]) -> GenerateConfig:
    """Options over the config file, over the preset, over the defaults."""
    values = read_toml(file) if file is not None else {}
    if stations is not None:
        if given.get("use_random_receivers"):
            raise ConfigError("--stations and --random-receivers exclude each other; give one of them")
        # the stations replace the random receivers of a preset: reading and then ignoring them helps nobody
        given = {**given, "stations": read_stations(stations), "use_random_receivers": False}
    try:
        return from_mapping({**values, **given}, preset=preset)
    except ConfigError as failure:
        if failure.field in values and failure.field not in given:
            raise ConfigError(f"config file {file}: {failure}", code=failure.code) from failure
        raise


def _check_devices(device: str, devices: str | None, cluster: str | None, allow_mixed: bool) -> None:
    given = {"--device": device != "auto", "--devices": devices is not None, "--cluster": cluster is not None}
    flags = [flag for flag, is_given in given.items() if is_given]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} exclude each other; give one of them")
    if allow_mixed and devices is None and cluster is None:
        raise ConfigError("--allow-mixed is for --devices and --cluster; leave it out for one device")


@contextmanager
def _pool(devices: str | None, cluster: str | None) -> "Iterator[Pool | None]":
    """The workers of --devices or --cluster; None: this process does the work."""
    if devices is None and cluster is None:
        yield None
        return
    from brim.cluster import open_pool

    with open_pool(devices=devices, cluster=cluster) as pool:
        yield pool


# Shared with `brim demo`


def run_generate(
    config: GenerateConfig, out: Path | str, samples: int, stop: Stop, *, resume: bool = True, **options: Any
) -> "GenerateReport":
    """Generate with progress on the terminal, until done or stopped; options are those of `brim.rf.generate`."""
    from brim.engine.storage import is_url
    from brim.rf import generate

    verify: Literal["sizes", "all"] = "sizes" if is_url(out) else "all"  # a store checks its own bytes
    with Display(stop) as display:
        progress = display.generating
        return generate(config, out, samples, resume=resume, verify=verify, progress=progress, stop=stop, **options)


def run_train(
    datasets: "list[str] | list[Path]",
    out: Path,
    config: LocatorTraining,
    stop: Stop,
    *,
    device: str = "auto",
    resume: bool = True,
) -> "TrainReport":
    """Train with progress on the terminal, until done or stopped."""
    from brim.rf.location import train

    with remarks(), Display(stop, preparing=("solving", "samples")) as display:
        return train(datasets, out, config, device=device, progress=display.training, stop=stop, resume=resume)


def run_evaluate(
    run: Path, dataset: Path | str, page: Path | None, progress: Callable[[int, int], None], *, device: str = "auto"
) -> "LocatorEvaluation":
    """Evaluate, and write a page if one is wanted."""
    from brim.rf.location import evaluate_run, write_evaluation

    evaluation = evaluate_run(run, dataset, device=device, progress=progress)
    if page is not None:
        write_evaluation(str(run), str(dataset), *evaluation, page)
    return evaluation


def print_generated(report: "GenerateReport") -> None:
    share = report.accepted / max(1, report.attempted)
    line = f"{report.accepted} samples accepted of {report.attempted} tried ({share:.1%})"
    if report.samples_per_s > 0:
        line += f"; {report.samples_per_s:.1f} samples/s on {report.device}"
        line += "" if report.ceiling_share is None else f", {report.ceiling_share:.0%} of the ceiling"
    show(line)


def print_trained(report: "TrainReport") -> None:
    from brim.engine.training import summary_line

    best = "not measured" if report.best_val_loss is None else f"{report.best_val_loss:.3f}"
    early = ", stopped early" if report.stopped_early else ""
    show(f"{report.epochs} epochs{early}, best val_loss {best}; data in tier {report.tier}")
    show(summary_line(report))
