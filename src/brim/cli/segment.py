"""`brim segment tune | predict | train`: networks that turn images into polygons."""

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli.options import AsJson, DeviceName, NewRun, PlotFile, Resume, from_settings, offer
from brim.cli.terminal import Display, Stop, end_stopped, print_json, quote, remarks, say, show
from brim.errors import ConfigError
from brim.segmentation.config import FilesConfig, SegmentTrainConfig, TuneConfig

if TYPE_CHECKING:
    from brim.segmentation.prediction import FilesReport
    from brim.segmentation.training import SegmentTrainReport
    from brim.segmentation.tuning import Tuned

FILE_NAME = "batch_sizes.json"
STORED = f"{FILE_NAME} here if it exists, else in the user's cache directory"

segment = typer.Typer(no_args_is_help=True, epilog="Example: brim segment tune --models hrnet --size 512")


@segment.command(epilog="Example: brim segment tune --models hrnet,resunet_small --size 1024 --plot tuning.png")
@from_settings(TuneConfig, "models", "size", "seconds", "p95_ms", "search")
def tune(
    *,
    settings: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of batch sizes; entries of other devices and networks stay.", show_default=STORED
        ),
    ] = None,
    device: DeviceName = "auto",
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE|RUN", help="Weights of the one network tuned: their masks are compared too."),
    ] = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest safe batch size of networks on this device, and save it."""
    config = TuneConfig(**settings)
    if weights is not None and len(config.models) > 1:
        raise ConfigError(f"--weights {weights} fit one network, --models names {len(config.models)}; give one")
    with Stop() as stop:  # an import must not be interrupted halfway
        from brim.engine.device import resolve_device
        from brim.report.plot_file import check_plot
        from brim.segmentation.networks import create_model, load_weights
        from brim.segmentation.tuning import device_key, sizes_file
        from brim.segmentation.tuning import tune as tune_networks
        from brim.segmentation.tuning.plot import plot as draw
    if stop():
        stop.exit()
    if plot is not None:
        check_plot(plot)
    out = out or sizes_file()
    torch_device = resolve_device(device)

    def make(name: str) -> Any:
        module = create_model(name)
        if weights is not None:
            load_weights(module, weights)
        return module

    try:
        with Display() as display:
            tuned = tune_networks(config, torch_device, out=out, make=make, progress=display.update)
    except KeyboardInterrupt:
        say(f"stopped; networks tuned before are in {out}")
        raise typer.Exit(128 + signal.SIGINT) from None
    if plot is not None:
        draw(plot, tuned, device=device_key(torch_device))
    if as_json:
        print_json({name: {**asdict(one.entry), "trials": one.trials} for name, one in tuned.items()})
        return
    _print_tuned(tuned, out)
    if plot is not None:
        show(f"plot:  {plot}")


@segment.command(epilog="Example: brim segment predict images --model hrnet --weights run --out polygons")
@from_settings(
    FilesConfig,
    *("model", "format", "tile", "resize", "batch_size", "threshold", "detect_holes", "strict", "precision"),
    required=("model",),
)
def predict(
    *,
    images: Annotated[
        list[str],  # Path would drop a slash of s3://bucket/images
        typer.Argument(metavar="IMAGE_OR_DIR", help="Image files, and folders or s3:// URLs searched for them."),
    ],
    weights: Annotated[
        Path, typer.Option(metavar="FILE|RUN", help='A file of weights, or a run made by "brim segment train".')
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Directory for the results, or an s3:// URL.")],
    settings: dict[str, Any],
    batch_sizes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of tuned batch sizes; a missing one is tuned and added.", show_default=STORED
        ),
    ] = None,
    device: DeviceName = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep existing results, and predict only the missing ones.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Predict on a Ray cluster: auto, local or ray://HOST:PORT. Finished results are kept.",
            autocompletion=offer("auto", "local"),
        ),
    ] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Use a cluster's GPUs of several types, whose last bits differ.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Turn images into polygons.

    Images that cannot be read are listed and the exit code is 2; all others are written.
    """
    config = FilesConfig(**settings)
    if allow_mixed and cluster is None:
        raise ConfigError("--allow-mixed is for --cluster; leave it out for one device")
    with Stop() as stop, _plain_warnings(), Display(stop) as display:
        from brim.segmentation.tuning import sizes_file

        batch_sizes = batch_sizes or sizes_file()
        if cluster is None:
            from brim.segmentation.prediction import ModelLoader, predict_files

            model, precision = settings["model"], config.precision
            loader = ModelLoader({model: weights}, device, batch_sizes, precision, config.tile, config.resize)
            report = predict_files(images, loader, out, config, progress=display.predicting, stop=stop, resume=resume)
        else:
            from brim.cluster import predict_many
            from brim.segmentation.prediction import Recipe

            report = predict_many(
                images,
                out,
                Recipe(files=config, device=device),
                weights,
                cluster,
                batch_sizes=batch_sizes,
                allow_mixed=allow_mixed,
                progress=display.predicting,
                stop=stop,
            )
    for name, reason in report.failures.items():
        say(f"error: {reason if name in reason else f'{name}: {reason}'}")
    if report.stopped:
        say(f"stopped; {_plural(report.written, 'result')} written to {out}")
        stop.exit()
    if as_json:
        print_json(report.as_dict())
    else:
        _print_predicted(report, out)
    if report.failures:
        raise typer.Exit(2)


@segment.command(epilog="Example: brim segment train --images images --masks masks --model hrnet --out run")
@from_settings(SegmentTrainConfig, "model", "epochs", "size", "batch_size", "learning_rate", "precision", "seed")
def train(
    *,
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of images.")],
    masks: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of masks with the images' file stems; not 0 is foreground.")
    ],
    settings: dict[str, Any],
    out: NewRun,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE|RUN", help="Fine-tune these weights.", show_default="random")
    ] = None,
    device: DeviceName = "auto",
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a network on images and masks, or fine-tune one.

    A tenth of the images is held out to select the best weights and score them. Ctrl-C stops at the next batch;
    --resume continues.
    """
    config = SegmentTrainConfig(**settings)
    with Stop() as stop:
        from brim.segmentation.training import train as train_network

        with remarks(), Display(stop, preparing=("cutting crops", "images")) as display:
            report = train_network(
                images,
                masks,
                config,
                out,
                device=device,
                weights=weights,
                resume=resume,
                progress=display.training,
                stop=stop,
            )
    if as_json:
        print_json(report.to_json())
    elif not report.stopped:
        _print_trained(report, config.model, out)
    if report.stopped:
        end_stopped(f"after {report.epochs} of {config.epochs} epochs; nothing of them is lost", stop, resume=resume)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print brim's own warnings as plain lines, without a position in the code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning, module=r"brim\.")
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        yield


def _plural(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _print_tuned(tuned: "dict[str, Tuned]", out: Path) -> None:
    for name, one in tuned.items():
        entry = one.entry
        for message in one.messages:
            show(f"{name}: {message}")
        show(
            f"{name}: batch {entry.optimal_batch_size}, up to {entry.max_safe_batch_size} is safe; "
            f"{entry.expected_throughput:.4g} images/s, {entry.p50_latency_ms:.4g} ms per step "
            f"(95 % within {entry.p95_latency_ms:.4g}), {one.setting}"
        )
    show(f"saved: {out}")


def _print_predicted(files: "FilesReport", out: str) -> None:
    report = files.report
    assert report is not None
    kept = f", {files.kept} kept" if files.kept else ""
    failed = f", {report.failed} failed" if report.failed else ""
    share = "" if report.ceiling_share is None else f", {report.ceiling_share:.0%} of the ceiling"
    rate = f"{report.images_per_s:{'.3g' if report.images_per_s < 100 else '.0f'}}"  # a large image takes minutes
    show(f"results: {out}")
    show(
        f"{_plural(report.images, 'image')}{failed}{kept}, {_plural(report.polygons, 'polygon')}; "
        f"{rate} images/s at batch {report.batch_size}{share}"
    )


def _print_trained(report: "SegmentTrainReport", model: str, out: Path) -> None:
    from brim.engine.training import summary_line

    assert report.training is not None
    show(f"run:  {out}\nnext: brim segment predict IMAGES --model {model} --weights {quote(out)} --out polygons")
    show(f"{report.epochs} epochs, held-out images: Dice {report.dice:.3f}, IoU {report.iou:.3f}")
    show(summary_line(report.training))
