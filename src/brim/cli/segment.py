"""`brim segment tune | predict | train`: options in, one call of `brim.segmentation`, a result out."""

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from brim.cli.options import PRECISIONS, Device, Json, check_choice, check_positive, number, one_of, whole
from brim.cli.terminal import Display, Stop, end_stopped, print_json, quote, remarks, say, show
from brim.errors import ConfigError

if TYPE_CHECKING:
    from brim.segmentation.prediction.files import FilesReport
    from brim.segmentation.training.run import SegmentTrainReport
    from brim.segmentation.tuning.tune import Tuned

SEARCHES = ("precision", "layout", "compile")
NETWORKS = ("hrnet", "resunet_small", "resunet_advanced", "unet_tiny")  # built in; what the shell offers, without torch

segment = typer.Typer(no_args_is_help=True, epilog="Example: brim segment tune --models hrnet --size 512")

Precision = Annotated[
    str, typer.Option(metavar="NAME", help="auto, fp32, bf16 or fp16.", autocompletion=one_of(*PRECISIONS))
]


@segment.command(epilog="Example: brim segment tune --models hrnet,resunet_small --size 1024 --plot tuning.png")
def tune(
    models: Annotated[
        str, typer.Option(metavar="NAMES", help="Networks, separated by commas.")
    ] = "hrnet,resunet_small,resunet_advanced",
    size: Annotated[int, typer.Option(metavar="PX", parser=whole, help="Side of the images, in pixels.")] = 1024,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File of batch sizes; other devices and models in it stay.")
    ] = Path("batch_sizes.json"),
    device: Device = "auto",
    seconds: Annotated[
        float, typer.Option(metavar="S", parser=number, help="Time for each model, compilation apart.")
    ] = 60.0,
    p95_ms: Annotated[
        float | None, typer.Option(metavar="L", parser=number, help="Longest step allowed, 95th percentile, in ms.")
    ] = None,
    search: Annotated[
        str,
        typer.Option(metavar="WHAT", help=f"Also find the fastest of these, by commas: {', '.join(SEARCHES)}."),
    ] = "",
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE|RUN", help="Weights of the one model tuned: masks are then compared in earnest."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw what was measured here.")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest safe batch size of networks on this device, and save it."""
    names, wanted = _names("--models", models), _names("--search", search) if search else []
    for name in wanted:
        check_choice("--search", name, SEARCHES)
    if weights is not None and len(names) > 1:
        raise ConfigError(f"--weights {weights} fit one network, --models names {len(names)}; tune one at a time")
    with Stop() as stop:  # an import must not be left halfway
        from brim.engine.device import resolve_device
        from brim.report.plot_file import check_plot
        from brim.segmentation.config import TuneConfig
        from brim.segmentation.tuning.batch_sizes import device_key
        from brim.segmentation.tuning.plot import plot as draw
        from brim.segmentation.tuning.tune import tune as run_tune
    if stop():
        raise typer.Exit(128 + stop.number)
    for name in names:
        _check_network("--models", name)
    if plot is not None:
        check_plot(plot)
    config = TuneConfig(models=tuple(names), size=size, seconds=seconds, p95_ms=p95_ms, search=tuple(wanted))
    where = resolve_device(device)
    try:
        with Display() as display:
            found = run_tune(config, where, out=out, make=lambda name: _module(name, weights), progress=display.message)
    except KeyboardInterrupt:
        say(f"stopped; models tuned before are in {out}")
        raise typer.Exit(128 + signal.SIGINT) from None
    if plot is not None:
        draw(plot, found, device=device_key(where))
    if as_json:
        print_json({name: {**asdict(tuned.entry), "trials": tuned.trials} for name, tuned in found.items()})
        return
    _print_tuned(found, out)
    if plot is not None:
        show(f"plot:  {plot}")


@segment.command(epilog="Example: brim segment predict images --model hrnet --weights run --out polygons")
def predict(
    images: Annotated[
        list[str],  # Path would eat a slash of s3://bucket/images
        typer.Argument(metavar="IMAGE_OR_DIR", help="Image files, and folders or s3:// URLs searched for them."),
    ],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Network the weights are of.", autocompletion=one_of(*NETWORKS))
    ],
    weights: Annotated[
        Path, typer.Option(metavar="FILE|RUN", help='A file of weights, or a run made by "brim segment train".')
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Directory for the results, or an s3:// URL.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="geojson, coco, roi, mask or overlay.",
            autocompletion=one_of("geojson", "coco", "roi", "mask", "overlay"),
        ),
    ] = "geojson",
    tile: Annotated[
        int, typer.Option(metavar="PX", parser=whole, help="Larger images are cut into windows of this side.")
    ] = 1024,
    resize: Annotated[
        int | None,
        typer.Option(metavar="PX", parser=whole, help="Show the network every image at this side instead of tiling."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="B", parser=whole, help="Images per step. [default: the tuned optimum]")
    ] = None,
    batch_sizes: Annotated[
        Path, typer.Option(metavar="FILE", help="File of tuned batch sizes; what is missing is tuned and added.")
    ] = Path("batch_sizes.json"),
    threshold: Annotated[
        float, typer.Option(metavar="P", parser=number, help="A pixel above this probability is inside.")
    ] = 0.5,
    holes: Annotated[bool, typer.Option("--holes/--no-holes", help="Leave holes open, or fill them.")] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="Run every image alone: its bits depend on nothing else.")
    ] = False,
    device: Device = "auto",
    precision: Precision = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep results that are there, and predict only what has none.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Predict on a Ray cluster: auto, local or ray://HOST:PORT. What is finished is not made again.",
            autocompletion=one_of("auto", "local"),
        ),
    ] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Take a cluster's GPUs of several types, whose last bits differ.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn images into polygons.

    Images that cannot be read are listed and the exit code is 2; all others are written.
    """
    check_positive("--batch-size", batch_size)
    check_choice("--precision", precision, PRECISIONS)
    if allow_mixed and cluster is None:
        raise ConfigError("--allow-mixed is for --cluster; leave it out for one device")
    with Stop() as stop:
        from brim.segmentation.config import FORMATS, FilesConfig
        from brim.segmentation.prediction.files import predict_files
        from brim.segmentation.prediction.loader import ModelLoader

        check_choice("--format", format, FORMATS)
        _check_network("--model", model)
        config = FilesConfig(
            model=model, format=cast(Any, format), batch_size=batch_size, threshold=threshold, detect_holes=holes,
            strict=strict, tile=tile, resize=resize, precision=cast(Any, precision),
        )  # fmt: skip
        with _plain_warnings(), Display(stop) as display:
            tell = display.images("predicting")
            if cluster is None:
                loader = ModelLoader({model: weights}, device, batch_sizes, precision, tile, resize)
                found = predict_files(images, loader, out, config, progress=tell, stop=stop, resume=resume)
            else:
                from brim.cluster.predict import predict_many
                from brim.segmentation.prediction.bulk import Recipe

                recipe = Recipe(files=config, device=device)
                found = predict_many(
                    images, out, recipe, weights, cluster, batch_sizes=batch_sizes, allow_mixed=allow_mixed,
                    progress=tell, stop=stop,
                )  # fmt: skip
    for name, reason in found.failures.items():
        say(f"error: {reason if name in reason else f'{name}: {reason}'}")
    if found.stopped:
        say(f"stopped; {_count(found.written, 'result')} written to {out}")
        raise typer.Exit(128 + stop.number)
    if as_json:
        print_json(found.as_dict())
    else:
        _print_predicted(found, out)
    if found.failures:
        raise typer.Exit(2)


@segment.command(epilog="Example: brim segment train --images images --masks masks --model hrnet --out run")
def train(
    images: Annotated[Path, typer.Option(metavar="DIR", help="Folder of images.")],
    masks: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of masks with the images' file stems; not 0 is inside.")
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="Network to train.", autocompletion=one_of(*NETWORKS))],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run's directory; new or empty without --resume.")],
    epochs: Annotated[int, typer.Option(metavar="E", parser=whole, help="Times to go through the images.")] = 30,
    size: Annotated[int, typer.Option(metavar="PX", parser=whole, help="Side of the crops trained on.")] = 512,
    batch_size: Annotated[int, typer.Option(metavar="B", parser=whole, help="Crops per step.")] = 8,
    learning_rate: Annotated[
        float, typer.Option(metavar="R", parser=number, help="After the warm-up; then a cosine to 0.")
    ] = 0.001,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE|RUN", help="Fine-tune from these weights. [default: random]")
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    seed: Annotated[
        int, typer.Option(metavar="K", parser=whole, help="Of the split, the first weights and the order.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, begun with the same options.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a network on images and masks, or fine-tune one.

    A tenth of the images is held out to choose the best weights and score them. Ctrl-C ends at the next batch;
    --resume goes on.
    """
    check_choice("--precision", precision, PRECISIONS)
    check_positive("--epochs", epochs)
    check_positive("--batch-size", batch_size)
    with Stop() as stop:
        from brim.segmentation.config import SegmentTrainConfig
        from brim.segmentation.training.run import train as run_train

        _check_network("--model", model)
        config = SegmentTrainConfig(
            model=model,
            size=size,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            seed=seed,
            precision=precision,  # type: ignore[arg-type]  # checked above
        )
        with remarks(), Display(stop, preparing=("cutting crops", "images")) as display:
            report = run_train(
                images, masks, config, out, device=device, weights=weights, resume=resume, progress=display.training,
                stop=stop,
            )  # fmt: skip
    if as_json:
        print_json(report.to_json())
    elif not report.stopped:
        _print_trained(report, model, out)
    if report.stopped:
        end_stopped(f"after {report.epochs} of {epochs} epochs; nothing of them is lost", stop, resume=resume)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show brim's own warnings as lines for a person, without a place in the code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning, module=r"brim\.")
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        yield


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f'{flag} "{text}" has an empty name; separate names by single commas')
    return list(dict.fromkeys(names))


def _check_network(flag: str, name: str) -> None:
    from brim.segmentation.networks.registry import model_names

    check_choice(flag, name, model_names())


def _module(name: str, weights: Path | None) -> Any:
    from brim.segmentation.networks.registry import create_model
    from brim.segmentation.networks.weights import load_weights

    module = create_model(name)
    if weights is not None:
        load_weights(module, weights)
    return module


def _print_tuned(found: "dict[str, Tuned]", out: Path) -> None:
    for name, tuned in found.items():
        entry = tuned.entry
        for message in tuned.messages:
            show(f"{name}: {message}")
        show(
            f"{name}: batch {entry.optimal_batch_size}, up to {entry.max_safe_batch_size} is safe; "
            f"{entry.expected_throughput:.4g} images/s, {entry.p50_latency_ms:.4g} ms a step "
            f"(95 % within {entry.p95_latency_ms:.4g}), {tuned.setting}"
        )
    show(f"saved: {out}")


def _print_predicted(found: "FilesReport", out: str) -> None:
    report = found.report
    assert report is not None
    kept = f", {found.kept} kept" if found.kept else ""
    failed = f", {report.failed} failed" if report.failed else ""
    show(f"results: {out}")
    share = "" if report.ceiling_share is None else f", {report.ceiling_share:.0%} of the ceiling"
    rate = f"{report.images_per_s:{'.3g' if report.images_per_s < 100 else '.0f'}}"  # a large image takes minutes
    show(
        f"{_count(report.images, 'image')}{failed}{kept}, {_count(report.polygons, 'polygon')}; "
        f"{rate} images/s at batch {report.batch_size}{share}"
    )


def _print_trained(report: "SegmentTrainReport", model: str, out: Path) -> None:
    from brim.engine.training import summary_line

    assert report.training is not None
    show(f"run:  {out}\nnext: brim segment predict IMAGES --model {model} --weights {quote(out)} --out polygons")
    show(f"{report.epochs} epochs, held-out images: Dice {report.dice:.3f}, IoU {report.iou:.3f}")
    show(summary_line(report.training))
