"""`brim rf generate | inspect | export | measure | train | evaluate | locate | export-onnx`: data and locators."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
    argument,
    count,
    directories,
    from_settings,
    offer,
    one_of,
    option,
    place,
    power,
)
from brim.cli.terminal import (
    Display,
    Stop,
    end_stopped,
    figure,
    metres,
    print_facts,
    print_json,
    print_report,
    print_result,
    print_table,
    quote,
    show,
    show_spent,
)
from brim.config import nearest
from brim.engine.meter import within
from brim.engine.meter.spent import WORK
from brim.errors import ConfigError
from brim.rf.config import PRESETS, GenerateConfig, LocatorTraining, from_mapping, read_stations, read_toml
from brim.rf.measurement.config import MeasureConfig

if TYPE_CHECKING:
    from brim.engine.training import TrainReport
    from brim.rf import GenerateReport
    from brim.rf.generation import Pool
    from brim.rf.location import Streamed
    from brim.rf.measurement import Observation

PREPARING = ("solving", "samples")
STREAM_SEED = 2**62  # from here on are the seeds of samples made to train on

rf = typer.Typer(no_args_is_help=True, epilog="Example: brim rf generate --out data --samples 1000")


def _dataset(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, parser=place, help=text, autocompletion=directories)


DatasetPlace = Annotated[str, _dataset("DIR|URL", "Directory or URL of a dataset.")]
LocatorDir = Annotated[Path, argument("RUN", 'Directory of a run made by "brim rf train".')]


# Datasets


@rf.command(epilog="Example: brim rf generate --out data --samples 10000 --preset quality --seed 7")
@from_settings(
    GenerateConfig,
    *("frequency_mhz", "tx_power_dbm", "min_snr_db", "max_gdop", "min_receivers", "use_random_receivers"),
    *("waveform", "loss", "clock", "terrain", "paths", "bound", "dataset_type", "seed"),
    only_given=True,
)
def generate(
    *,
    out: Annotated[
        str,
        option(
            "DIR|URL",
            "Directory of the dataset, or a URL such as s3://bucket/data; new or empty without --resume.",
            parser=place,
            autocompletion=directories,
        ),
    ],
    samples: Annotated[int, option("N", "Accepted samples to generate.", parser=count)] = 1000,
    preset: Annotated[
        str | None, option("NAME", f"Settings to start with: {', '.join(PRESETS)}.", **one_of(*PRESETS))
    ] = None,
    config: Annotated[
        Path | None, option("FILE.toml", "Settings; they override the preset, and options override them.")
    ] = None,
    stations: Annotated[
        Path | None, option("FILE.csv", "Your receivers instead of the built-in ones; header name,lat,lon,alt.")
    ] = None,
    settings: dict[str, Any],
    device: DeviceName = "auto",
    devices: Annotated[
        str | None,
        option(
            "LIST",
            "Several devices of this machine, one process each: all, 0,1 or cpu,cpu.",
            autocompletion=offer("all"),
        ),
    ] = None,
    cluster: ClusterAddress = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Use devices of several types, whose last bits differ.")
    ] = False,
    batch_size: Annotated[
        int | None,
        option("N", "Samples per batch; no effect on the data.", parser=count, show_default="as many as fit"),
    ] = None,
    memory: Annotated[str | None, option("SIZE", "Memory to use at most, such as 2GiB or 500MB.")] = None,
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
        workers: AbstractContextManager[Pool | None] = nullcontext()  # None: this process does the work
        if devices is not None or cluster is not None:
            from brim.cluster import open_pool

            workers = open_pool(devices=devices, cluster=cluster)
        with workers as pool:
            report = run_generate(
                resolved, out, samples, stop, device=device, pool=pool, allow_mixed=allow_mixed,
                batch_size=batch_size, memory=budget, resume=resume,
            )  # fmt: skip
    if as_json:
        print_report(report.as_dict())
    if report.stopped:
        text = f"at {report.accepted} of {samples} samples; {report.dataset} is usable as it is"
        end_stopped(text, stop, resume=resume)
    if not as_json:
        print_generated(report)
        show(f"dataset: {out}\nnext:    brim rf inspect {quote(out)} --report report.html")
        show_spent()


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
        str, option("NAME", "sigmf (for iq_raw), parquet or hdf5.", **one_of("sigmf", "parquet", "hdf5"))
    ],
    out: Annotated[Path, option("DIR", "Directory to write to; new or empty.")],
    as_json: AsJson = False,
) -> None:
    """Write a dataset in a format that other tools read."""
    from brim.rf.datasets import export as export_dataset

    with Display() as display, within(WORK):
        written = export_dataset(dataset, out, format, progress=display.counting("exporting", "shards"))
    print_report(written, as_json)


# Recordings


@rf.command(epilog="Example: brim rf measure *.wav --stations stations.csv --out observations.json")
@from_settings(
    MeasureConfig,
    *("frequency_mhz", "bandwidth_khz", "start", "seconds", "beacon"),
    frequency_mhz="F",
    bandwidth_khz="B",
    start="T",
    seconds="S",
    beacon="NAME=LAT,LON@MHZ",
)
def measure(
    *,
    recordings: Annotated[
        list[Path],
        argument("RECORDING…", "SigMF, KiwiSDR or two-channel WAV, raw IQ, or a CSV that lists them."),
    ],
    out: Annotated[Path, option("FILE.json", "Observations to write.")],
    stations: Annotated[
        Path | None,
        option("FILE.csv", "Positions of the receivers; header name,lat,lon,alt, and gains and delays if known."),
    ] = None,
    settings: dict[str, Any],
    device: DeviceName = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure a transmission in recordings of several receivers: strengths and arrival differences.

    The strongest transmission that most receivers hear is measured, or the one at --frequency-mhz. A recording that
    cannot be used is left out, with the reason in the output.
    """
    config = MeasureConfig(**settings)
    from brim.engine.device import resolve_device
    from brim.report.page import write_whole
    from brim.rf.measurement import measure as measure_recordings
    from brim.rf.recordings import read_sites

    sites = () if stations is None else read_sites(stations)
    with Display() as display:
        progress = display.counting("measuring", "windows")
        measured = measure_recordings(recordings, sites, config, device=resolve_device(device), progress=progress)
    document = measured.observation.as_dict()
    write_whole(out, f"{json.dumps(document, ensure_ascii=False, indent=1)}\n".encode(), "out")
    if as_json:
        print_json(document)
        return
    print_measured(measured.observation)
    show(f"observations: {out}\nnext:         brim rf locate {quote(out)}")


@rf.command("dataset-from", epilog="Example: brim rf dataset-from recordings.csv --out real")
def dataset_from(
    recordings: Annotated[Path, argument("RECORDINGS.csv", "Recordings with the positions of their transmitters.")],
    out: Annotated[Path, option("DIR", "Directory of the dataset; new or empty.")],
    stations: Annotated[Path | None, option("FILE.csv", "Positions of the receivers.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a dataset of recordings whose transmitters are known, a sample for each transmission."""
    from brim.rf.measurement import dataset_from as make_dataset
    from brim.rf.recordings import read_sites

    sites = () if stations is None else read_sites(stations)
    with Display() as display, within(WORK):
        report = make_dataset(recordings, out, sites, progress=display.counting("measuring", "transmissions"))
    print_report(report, as_json)


@rf.command(epilog="Example: brim rf calibrate recordings.csv --out stations.csv")
def calibrate(
    recordings: Annotated[Path, argument("RECORDINGS.csv", "Recordings with the positions of their transmitters.")],
    out: Annotated[Path, option("FILE.csv", "Stations file to write, with delays and gains.")],
    stations: Annotated[Path | None, option("FILE.csv", "Positions of the receivers.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate gain, clock offset and delay of each station from transmitters at known positions."""
    from brim.report.page import write_whole
    from brim.rf.measurement import calibrate as calibrate_stations
    from brim.rf.recordings import read_sites, sites_text

    sites = () if stations is None else read_sites(stations)
    with Display() as display, within(WORK):
        found, report = calibrate_stations(recordings, sites, progress=display.counting("measuring", "transmissions"))
    write_whole(out, sites_text(found).encode(), "out")
    print_report({**report, "out": str(out)}, as_json)


# Locators


@rf.command(epilog="Example: brim rf train data --out run --epochs 30")
@from_settings(
    LocatorTraining, "epochs", "batch_size", "learning_rate", "tier", "precision", "seed", "power", "components",
    "early_stopping_patience",
)  # fmt: skip
def train(
    *,
    datasets: Annotated[
        list[str] | None, _dataset("[DATASET…]", "Directories or URLs of datasets with equal settings.")
    ] = None,
    out: NewRun,
    network: Annotated[
        str, option("NAME", "hybrid starts from the solver's answer, pure does without.", **one_of("hybrid", "pure"))
    ] = "hybrid",
    stream: Annotated[
        str | None,
        option(
            "PRESET|FILE.toml",
            "Make the samples in memory instead of reading datasets: the name of a preset, or a settings file.",
            autocompletion=offer(*PRESETS),
        ),
    ] = None,
    samples: Annotated[int, option("N", "Samples that --stream makes.", parser=count)] = 50_000,
    feature_level: Annotated[
        bool,
        typer.Option(
            "--feature-level", help="--stream computes features from the propagation paths, without IQ: far faster."
        ),
    ] = False,
    settings: dict[str, Any],
    device: DeviceName = "auto",
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a network that locates transmitters and estimates its own uncertainty.

    A tenth of the samples is held out to select the best weights, and to compare the network with solvers that need no
    training. Ctrl-C stops at the next batch; --resume continues.
    """
    config = LocatorTraining(**settings, hybrid=network == "hybrid")
    if (stream is None) == (not datasets):
        raise ConfigError("give datasets to train on, or --stream, and not both")
    if feature_level and stream is None:
        raise ConfigError("--feature-level is for --stream; leave it out for datasets")
    made = None if stream is None else _streamed(stream, samples, feature_level, config.seed)
    with Stop() as stop:
        from brim.rf.location import train as train_locator

        with Display(stop, preparing=PREPARING) as display:
            report = train_locator(
                datasets or [], out, config, stream=made, device=device, progress=display.training, stop=stop,
                resume=resume,
            )  # fmt: skip
    if as_json:
        print_report(report.as_dict())
    if report.stopped:
        text = f"after {report.epochs} of {config.epochs} epochs, {report.steps} steps; nothing of them is lost"
        end_stopped(text, stop, resume=resume)
    if not as_json:
        show(f"run:  {out}\nnext: brim rf evaluate {quote(out)} HELD_OUT_DATASET --report evaluation.html")
        print_trained(report)
        show_spent()


@rf.command(epilog="Example: brim rf evaluate run held-out --report evaluation.html")
def evaluate(
    run: LocatorDir,
    dataset: Annotated[
        str, _dataset("DATASET", "Directory or URL of a dataset with another seed than those trained on.")
    ],
    report: HtmlReport = None,
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Evaluate a run on held-out data, beside classical solvers and the Cramér-Rao bound."""
    from brim.rf.location import evaluate_run, write_evaluation

    with Display() as display, within(WORK):
        evaluation = evaluate_run(run, dataset, device=device, progress=display.counting("locating", "samples"))
    if report is not None:
        write_evaluation(str(run), dataset, *evaluation, report)
    if as_json:
        print_report(evaluation.as_dict())
        return
    _print_evaluated(evaluation.metrics)
    if report is not None:
        show(f"report: {report} (open it in a browser)")
    show_spent()


@rf.command(epilog="Example: brim rf locate observations.json --map map.html > positions.geojson")
def locate(
    inputs: Annotated[
        list[Path],
        argument(
            "[RUN] INPUT…",
            'Observations as JSON, or recordings of one transmission; a run made by "brim rf train" may come first.',
        ),
    ],
    stations: Annotated[
        Path | None,
        option(
            "FILE.csv", "Positions of stations by name; header name,lat,lon,alt, and gains and delays if calibrated."
        ),
    ] = None,
    power_dbm: Annotated[
        str, option("P|unknown", "Power of the transmitter, if it is known.", parser=power, show_default="unknown")
    ] = "unknown",
    map_file: Annotated[
        Path | None, option("FILE.html", "Draw the regions: a page, or only the picture if FILE ends in .png.", "--map")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Locate transmitters: points with 50, 90 and 95 % regions as GeoJSON.

    Without RUN the solver answers. Recordings are measured first, as by "brim rf measure".
    """
    known = None if power_dbm == "unknown" else float(power_dbm)
    from brim.rf.location import collection, locate_inputs, write_map

    with Display() as display:
        located = locate_inputs(inputs, stations, known, progress=display.counting("measuring", "windows"))
    if map_file is not None:
        write_map(located, map_file)
    positions = collection(located)
    print_result(positions, as_json, json.dumps(positions, ensure_ascii=False, indent=1))


@rf.command("export-onnx", epilog="Example: brim rf export-onnx run --out locator.onnx")
def export_onnx(
    run: LocatorDir,
    out: Annotated[Path, option("FILE", "File to write.")],
    as_json: AsJson = False,
) -> None:
    """Write the network of a run as ONNX, checked against torch with onnxruntime."""
    from brim.rf.location import export_onnx as export_run

    print_result(export_run(run, out), as_json)


def _print_evaluated(metrics: dict[str, Any]) -> None:
    """The run beside simpler methods, then how its ellipses fit, then a verdict."""
    from brim.rf.location import PLAIN_NAMES

    rows = []
    for name, one in {"this run": metrics, **metrics["baselines"]}.items():
        errors = [metres(one[key]) for key in ("median_error_m", "mean_error_m", "p95_error_m")]
        plain = PLAIN_NAMES.get(name, name).removeprefix("the ")
        rows.append([plain, *errors, figure(one["crlb_ratio"])])
    print_table(("METHOD", "MEDIAN", "MEAN", "95 % BELOW", "× BOUND"), rows, numbers=True)
    inside = ", ".join(f"{100 * share:.1f} % in the {level} % regions" for level, share in metrics["coverage"].items())
    show(f"{metrics['samples']} samples: {inside}")
    show(metrics["verdict"])


# Options


def _resolve(preset: str | None, file: Path | None, stations: Path | None, given: dict[str, Any]) -> GenerateConfig:
    """Options over the config file, over the preset, over the defaults."""
    values = read_toml(file) if file is not None else {}
    if stations is not None:
        if given.get("use_random_receivers"):
            raise ConfigError("--stations and --random-receivers exclude each other; give one of them")
        # the stations replace the random receivers of a preset: reading and then ignoring them helps nobody
        given = {**given, "stations": read_stations(stations), "use_random_receivers": False}
    elif source := given.get("paths", values.get("paths")):
        if given.get("use_random_receivers"):
            raise ConfigError("--paths and --random-receivers exclude each other; give one of them")
        from brim.rf.physics.paths import read_paths

        given = {**given, "stations": read_paths(source).stations, "use_random_receivers": False}
    try:
        return from_mapping({**values, **given}, preset=preset)
    except ConfigError as failure:
        if failure.field in values and failure.field not in given:
            raise ConfigError(f"config file {file}: {failure}", code=failure.code) from failure
        raise


def _streamed(name: str, samples: int, feature_level: bool, seed: int) -> "Streamed":
    """Samples to make: their seed is none that a dataset usually has, their environment that of the settings."""
    from brim.rf.location import Streamed

    config = from_mapping({}, preset=name) if name in PRESETS else None
    if config is None and not name.endswith(".toml"):
        raise ConfigError(f"--stream {name} is neither a preset nor a .toml file; {nearest(name, PRESETS)}")
    if config is None:
        config = _resolve(None, Path(name), None, {})
    config = replace(config, seed=STREAM_SEED + seed % STREAM_SEED, environment_seed=config.place_seed)
    return Streamed(generation=config, samples=samples, drawn=feature_level)


def _check_devices(device: str, devices: str | None, cluster: str | None, allow_mixed: bool) -> None:
    given = {"--device": device != "auto", "--devices": devices is not None, "--cluster": cluster is not None}
    flags = [flag for flag, is_given in given.items() if is_given]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} exclude each other; give one of them")
    if allow_mixed and devices is None and cluster is None:
        raise ConfigError("--allow-mixed is for --devices and --cluster; leave it out for one device")


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


def print_generated(report: "GenerateReport") -> None:
    share = report.accepted / max(1, report.attempted)
    line = f"{report.accepted} samples accepted of {report.attempted} tried ({share:.1%})"
    if report.samples_per_s > 0:
        line += f"; {report.samples_per_s:.1f} samples/s on {report.device}"
        line += f", {report.ceiling_words}"
    show(line)


def print_measured(observation: "Observation") -> None:
    """Stations, pairs and what was left out, a line each."""
    megahertz, kilohertz = (observation.frequency_hz or 0) / 1e6, (observation.bandwidth_hz or 0) / 1e3
    show(f"{megahertz:.6f} MHz, {kilohertz:.3f} kHz wide, {observation.seconds:.1f} s from {observation.start}")
    for one in observation.stations:
        notes = f"; {'; '.join(one.problems)}" if one.problems else ""
        unit = "dBm" if one.strength_absolute else "dB"
        show(f"{one.name}: {one.strength_db:.1f} {unit}, SNR {one.snr_db:.1f} dB, clock {one.time.model}{notes}")
    for pair in observation.pairs:
        show(f"{pair.station} − {pair.reference}: {pair.difference_us:.2f} ± {pair.sigma_us:.2f} µs ({pair.kind})")
    for dropped in observation.left_out:
        show(f"left out: {dropped.name}: {dropped.reason}")


def print_trained(report: "TrainReport") -> None:
    from brim.engine.training import summary_line

    best = "not measured" if report.best_val_loss is None else f"{report.best_val_loss:.3f}"
    early = ", stopped early" if report.stopped_early else ""
    show(f"{report.epochs} epochs{early}, best val_loss {best}; data in tier {report.tier}")
    show(summary_line(report))
