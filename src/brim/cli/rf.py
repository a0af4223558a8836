"""`brim rf generate | inspect | export`: options in, one call of `brim.rf`, a result out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer

from brim.cli.options import (
    Cluster,
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
from brim.cli.terminal import Display, Stop, end_stopped, print_facts, print_json, quote, show
from brim.errors import ConfigError

if TYPE_CHECKING:
    from brim.rf import GenerateConfig, GenerateReport
    from brim.rf.generation import Pool

Dataset = Annotated[
    str,
    typer.Argument(metavar="DIR|URL", parser=place, help="Directory or URL of a dataset.", autocompletion=directories),
]

rf = typer.Typer(no_args_is_help=True, epilog="Example: brim rf generate --out data --samples 1000")


@rf.command(epilog="Example: brim rf generate --out data --samples 10000 --preset quality --seed 7")
def generate(
    out: Annotated[
        str,
        typer.Option(
            metavar="DIR|URL",
            parser=place,
            help="The dataset's directory, or a URL such as s3://bucket/data; new or empty without --resume.",
            autocompletion=directories,
        ),
    ],
    samples: Annotated[int, typer.Option(metavar="N", parser=whole, help="Accepted samples to make.")] = 1000,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="production or quality: random receivers and gates to go with them.",
            autocompletion=one_of("production", "quality"),
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Fields of GenerateConfig; over a preset, under flags.")
    ] = None,
    stations: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Your receivers, header name,lat,lon,alt, for the built-in ones."),
    ] = None,
    frequency_mhz: Annotated[
        float | None, typer.Option(metavar="F", parser=number, help="Carrier, 30 to 3000 MHz.")
    ] = None,
    tx_power_dbm: Annotated[
        float | None, typer.Option(metavar="P", parser=number, help="Transmit power, 0 to 50 dBm.")
    ] = None,
    min_snr_db: Annotated[
        float | None,
        typer.Option(metavar="S", parser=number, help="Link SNR in 12.5 kHz from which a receiver hears."),
    ] = None,
    max_gdop: Annotated[
        float | None, typer.Option(metavar="G", parser=number, help="Refuse samples of worse geometry than this.")
    ] = None,
    min_receivers: Annotated[
        int | None,
        typer.Option(metavar="M", parser=whole, help="Refuse samples that fewer receivers hear; at least 3."),
    ] = None,
    random_receivers: Annotated[
        bool, typer.Option("--random-receivers", help="5 to 10 random receivers per sample, no stations.")
    ] = False,
    waveform: Annotated[
        str | None,
        typer.Option(metavar="W", help="nbfm, am, cw or fsk.", autocompletion=one_of("nbfm", "am", "cw", "fsk")),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="free_space, log_distance or hata.",
            autocompletion=one_of("free_space", "log_distance", "hata"),
        ),
    ] = None,
    dataset_type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="feature_based, or iq_raw to keep the IQ records too.",
            autocompletion=one_of("feature_based", "iq_raw"),
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="K", parser=whole, help="The same seed and options give the same data."),
    ] = None,
    device: Device = "auto",
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Several devices of this machine, a process each: all, 0,1 or cpu,cpu.",
            autocompletion=one_of("all"),
        ),
    ] = None,
    cluster: Cluster = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Take devices of several types, whose last bits differ.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="B", parser=whole, help="Samples per batch, else what fits; changes no data."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most memory to use, such as 2GiB or 500MB.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the dataset in --out, made with the same options.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a dataset of N accepted samples: receivers, features and truth in checksummed shards.

    Options left out keep the value of the config file, else of the preset, else the default.
    """
    check_positive("--samples", samples)
    check_positive("--batch-size", batch_size)
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
    with Stop() as stop:
        from brim.engine.device import parse_size

        resolved = _resolve(preset, config, stations, {k: v for k, v in flags.items() if v is not None})
        budget = None if memory is None else parse_size(memory)
        _check_where(device, devices, cluster, allow_mixed)
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
    if report.stopped:
        end_generation(report, samples, stop, resume=resume, as_json=as_json)
    if as_json:
        print_json(report.as_dict())
        return
    print_made(report)
    show(f"dataset: {out}\nnext:    brim rf inspect {quote(out)} --report report.html")


@rf.command(epilog="Example: brim rf inspect data --report report.html")
def inspect(
    dataset: Dataset,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a self-contained page with plots here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a dataset and say what is in it."""
    from brim.rf.datasets.inspect import inspect as look
    from brim.rf.datasets.page import write_report

    with Display() as display:
        facts = look(dataset, progress=display.shards("verifying")).as_dict()
    if report is not None:
        write_report(dataset, report)
    if as_json:
        print_json(facts)
        return
    made = facts.pop("throughput") or {}
    print_facts({**facts, "samples_per_s": made.get("samples_per_s"), "iq_per_s": made.get("iq_per_s")})
    if report is not None:
        show(f"report: {report} (open it in a browser)")


@rf.command(epilog="Example: brim rf export data --format parquet --out data-parquet")
def export(
    dataset: Dataset,
    fmt: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="F",
            help="sigmf (for iq_raw), parquet or hdf5.",
            autocompletion=one_of("sigmf", "parquet", "hdf5"),
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write to; new or empty.")],
    as_json: Json = False,
) -> None:
    """Write a dataset in a format that other tools read."""
    from brim.rf.datasets.export import FORMATS
    from brim.rf.datasets.export import export as write

    check_choice("--format", fmt, FORMATS)
    with Display() as display:
        written = write(dataset, out, fmt, progress=display.shards("exporting"))
    if as_json:
        print_json(written)
    else:
        print_facts(written)


# Options


def _resolve(preset: str | None, file: Path | None, stations: Path | None, flags: dict[str, Any]) -> "GenerateConfig":
    """The configuration: defaults, under the preset, under the file, under the flags."""
    from brim.rf import PRESETS, from_mapping, read_stations, read_toml
    from brim.rf.config import DatasetType, PathLoss, Waveform

    check_choice("--preset", preset, PRESETS)
    for name, choices in {"waveform": Waveform, "loss": PathLoss, "dataset_type": DatasetType}.items():
        check_choice(f"--{name.replace('_', '-')}", flags.get(name), get_args(choices))
    values = read_toml(file) if file is not None else {}
    if stations is not None:
        if flags.get("use_random_receivers"):
            raise ConfigError("--stations and --random-receivers exclude each other; give one of them")
        # a preset's random receivers give way: stations that are read and then ignored help nobody
        flags = {**flags, "stations": read_stations(stations), "use_random_receivers": False}
    return from_mapping({**values, **flags}, preset=preset)


def _check_where(device: str, devices: str | None, cluster: str | None, allow_mixed: bool) -> None:
    given = {"--device": device != "auto", "--devices": devices is not None, "--cluster": cluster is not None}
    named = [flag for flag, is_given in given.items() if is_given]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} exclude each other; give one of them")
    if allow_mixed and devices is None and cluster is None:
        raise ConfigError("--allow-mixed is for --devices and --cluster; leave it out for one device")


@contextmanager
def _pool(devices: str | None, cluster: str | None) -> "Iterator[Pool | None]":
    """The workers that are asked for; None: this process does the work itself."""
    if devices is None and cluster is None:
        yield None
        return
    from brim.cluster import open_pool

    with open_pool(devices=devices, cluster=cluster) as pool:
        yield pool


# Running


def run_generate(
    config: "GenerateConfig",
    out: Path | str,
    samples: int,
    stop: Stop,
    *,
    device: str = "auto",
    pool: "Pool | None" = None,
    allow_mixed: bool = False,
    batch_size: int | None = None,
    memory: int | None = None,
    resume: bool = True,
) -> "GenerateReport":
    """Generate with progress on the terminal, until done or stopped; with all workers of a pool where there is one."""
    from brim.engine.storage import is_url
    from brim.rf import generate

    with Display(stop) as display:
        return generate(
            config,
            out,
            samples,
            device=device,
            pool=pool,
            allow_mixed=allow_mixed,
            batch_size=batch_size,
            memory=memory,
            resume=resume,
            verify="sizes" if is_url(out) else "all",  # a store checks its own bytes, and all of them would travel
            progress=display,
            stop=stop,
        )


def end_generation(report: "GenerateReport", samples: int, stop: Stop, *, resume: bool, as_json: bool) -> NoReturn:
    """The end of a generation that was stopped."""
    if as_json:
        print_json(report.as_dict())
    end_stopped(f"at {report.accepted} of {samples} samples; {report.dataset} is usable as it is", stop, resume=resume)


def print_made(report: "GenerateReport") -> None:
    """One line on what a finished run made."""
    share = report.accepted / max(1, report.attempted)
    line = f"{report.accepted} samples accepted of {report.attempted} tried ({share:.1%})"
    if report.samples_per_s > 0:
        line += f"; {report.samples_per_s:.1f} samples/s on {report.device}"
        line += "" if report.ceiling_share is None else f", {report.ceiling_share:.0%} of the ceiling"
    show(line)
