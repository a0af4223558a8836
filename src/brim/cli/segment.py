"""`brim segment tune | predict | train`: networks that turn images into polygons; `brim weights import`."""

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli.options import (
    AsJson,
    DeviceName,
    NewRun,
    PlotFile,
    Resume,
    argument,
    from_settings,
    is_typed,
    offer,
    option,
)
from brim.cli.terminal import (
    Display,
    Stop,
    end_stopped,
    figure,
    print_json,
    print_report,
    print_result,
    quote,
    say,
    show,
    show_spent,
)
from brim.engine.meter import within
from brim.engine.meter.spent import WORK
from brim.engine.networks.source import PROGRAMS
from brim.errors import ConfigError
from brim.segmentation.config import (
    DEFAULT_NETWORK,
    DEFAULT_WEIGHTS,
    FINE_TUNING,
    NETWORKS,
    SCENE_TRAINING,
    FilesConfig,
    SampleConfig,
    SegmentTrainConfig,
    TuneConfig,
    bring,
    source_named,
)

if TYPE_CHECKING:
    from brim.segmentation.prediction import FilesReport
    from brim.segmentation.training import SegmentTrainReport
    from brim.segmentation.tuning import Tuned

NetworkOption = Annotated[
    str | None,
    option(
        "FILE.py:FACTORY|FILE.pt2|NAME",
        "A network of your own: a function in a Python file, a traced program, or one that a package declares.",
    ),
]
FILE_NAME = "batch_sizes.json"
STORED = f"{FILE_NAME} here if it exists, else in the user's cache directory"

segment = typer.Typer(no_args_is_help=True, epilog="Example: brim segment tune --models hrnet --size 512")


@segment.command(epilog="Example: brim segment tune --models hrnet,resunet_small --size 1024 --plot tuning.png")
@from_settings(TuneConfig, "models", "size", "seconds", "p95_ms", "search")
def tune(
    *,
    context: typer.Context,
    settings: dict[str, Any],
    out: Annotated[
        Path | None,
        option("FILE", "File of batch sizes; entries of other devices and networks stay.", show_default=STORED),
    ] = None,
    device: DeviceName = "auto",
    weights: Annotated[
        Path | None, option("FILE|RUN", "Weights of the one network tuned: their masks are compared too.")
    ] = None,
    network: NetworkOption = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest safe batch size of networks on this device, and save it."""
    if network is not None:
        settings["models"] = (brought(network),)
        weights = weights or (Path(network) if Path(network).suffix in PROGRAMS else None)
    elif weights is not None and not is_typed(context, "models"):
        from brim.segmentation.networks import network_of

        settings |= {"models": (named,)} if (named := network_of(weights)) is not None else {}
    config = TuneConfig(**settings)
    if weights is not None and len(config.models) > 1:
        raise ConfigError(f"--weights {weights} fit one network, --models names {len(config.models)}; give one")
    with Stop() as stop:  # an import must not be interrupted halfway
        from brim.engine.device import resolve_device
        from brim.report.plot_file import check_plot
        from brim.segmentation.networks import create_model, load_model
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
        return create_model(name) if weights is None else load_model(name, weights)

    try:
        with Display() as display, within(WORK):
            tuned = tune_networks(config, torch_device, out=out, make=make, progress=display.update)
    except KeyboardInterrupt:
        say(f"stopped; networks tuned before are in {out}")
        raise typer.Exit(128 + signal.SIGINT) from None
    if plot is not None:
        draw(plot, tuned, device=device_key(torch_device))
    if as_json:
        print_report({name: {**asdict(one.entry), "trials": one.trials} for name, one in tuned.items()})
        return
    _print_tuned(tuned, out)
    if plot is not None:
        show(f"plot:  {plot}")
    show_spent()


@segment.command(epilog="Example: brim segment predict images --out polygons")
@from_settings(
    FilesConfig,
    *("model", "format", "tile", "resize", "batch_size", "threshold", "min_area", "diameter", "detect_holes"),
    *("strict", "precision", "channels", "z", "t"),
)
def predict(
    *,
    images: Annotated[
        list[str],  # Path would drop a slash of s3://bucket/images
        argument("IMAGE_OR_DIR", "Image files, and folders or s3:// URLs searched for them."),
    ],
    out: Annotated[str, option("DIR", "Directory for the results, or an s3:// URL.")],
    settings: dict[str, Any],
    weights: Annotated[
        Path | None,
        option(
            "FILE|RUN",
            'A file of weights, or a run made by "brim segment train".',
            show_default="the model that comes with brim, which outlines cells",
        ),
    ] = None,
    network: NetworkOption = None,
    batch_sizes: Annotated[
        Path | None, option("FILE", "File of tuned batch sizes; a missing one is tuned and added.", show_default=STORED)
    ] = None,
    device: DeviceName = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep existing results, and predict only the missing ones.")
    ] = False,
    cluster: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Predict on a Ray cluster: auto, local or ray://HOST:PORT. Finished results are kept.",
            autocompletion=offer("auto", "local"),
        ),
    ] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Use a cluster's GPUs of several types, whose last bits differ.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Turn images into polygons: without --weights, one for each cell.

    Images that cannot be read are listed and the exit code is 2; all others are written.
    """
    if network is not None and settings["model"] is not None:
        raise ConfigError("--network and --model both name a network; give one")
    if network is not None and cluster is not None:
        raise ConfigError(f"--network {network} is a file of this machine; leave out --cluster")
    if network is not None:
        settings["model"] = brought(network)
        weights = weights or (Path(network) if Path(network).suffix in PROGRAMS else None)
    config = FilesConfig(**settings)
    if allow_mixed and cluster is None:
        raise ConfigError("--allow-mixed is for --cluster; leave it out for one device")
    with Stop() as stop:  # before the display begins: what is imported belongs to the start
        from brim.segmentation.prediction import ModelLoader, Recipe, predict_files
        from brim.segmentation.tuning import sizes_file

        if cluster is not None:
            from brim.cluster import predict_many
    if stop():
        stop.exit()
    with stop, _plain_warnings(), Display(stop) as display:
        batch_sizes = batch_sizes or sizes_file()
        config, weights = _with_model(config, weights, device)
        assert config.model is not None
        if cluster is None:
            loader = ModelLoader(
                {config.model: weights}, device, batch_sizes, config.precision, config.tile, config.resize,
                planes=config,
            )  # fmt: skip
            report = predict_files(images, loader, out, config, progress=display.predicting, stop=stop, resume=resume)
        else:
            report = predict_many(
                images, out, Recipe(files=config, device=device), weights, cluster, batch_sizes=batch_sizes,
                allow_mixed=allow_mixed, progress=display.predicting, stop=stop,
            )  # fmt: skip
    for name, reason in report.failures.items():
        say(f"error: {reason if name in reason else f'{name}: {reason}'}")
    if report.stopped:
        say(f"stopped; {_plural(report.written, 'result')} written to {out}")
        stop.exit()
    if as_json:
        print_report(report.as_dict() | _source_json(config.model))
    else:
        _print_predicted(report, out)
        show_spent()
    if report.failures:
        raise typer.Exit(2)


@segment.command(epilog="Example: brim segment train --images images --masks masks --model hrnet --out run")
@from_settings(
    SegmentTrainConfig,
    *("task", "scenes", "scenes_per_epoch", "epochs", "size", "batch_size", "learning_rate", "precision", "seed"),
    *("channels", "z", "t"),
    only_given=True,
)
def train(
    *,
    images: Annotated[Path | None, option("DIR", "Folder of images.")] = None,
    masks: Annotated[
        Path | None, option("DIR", "Folder of masks or label images with the images' file stems; 0 is background.")
    ] = None,
    classes: Annotated[
        Path | None,
        option(
            "FILE.csv",
            "Kinds of object to tell apart: a table image,label,class of the numbers in the label images.",
            show_default="one kind",
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "NAME",
            f"Network to train; one of {', '.join(NETWORKS)}, or a declared one.",
            show_default="that of --from, cells for --scenes",
            autocompletion=offer(*NETWORKS),
        ),
    ] = None,
    network: NetworkOption = None,
    settings: dict[str, Any],
    out: NewRun,
    weights: Annotated[
        str | None,
        option(
            "default|FILE|RUN",
            "Start from the model that comes with brim, or from these weights.",
            *("--from", "--weights"),
            show_default="random",
        ),
    ] = None,
    device: DeviceName = "auto",
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a network on images and masks, or fine-tune one.

    A tenth of the images is held out to select the best weights and score them; of a single image, a quarter. Ctrl-C
    stops at the next batch; --resume continues.
    """
    if network is not None and model is not None:
        raise ConfigError("--network and --model both name a network; give one")
    if network is not None:
        model = brought(network)
    start = DEFAULT_WEIGHTS if weights == "default" else weights
    config = SegmentTrainConfig(
        model=model or _network_to_train(out if resume and start is None else start, settings),
        **(FINE_TUNING if weights == "default" else SCENE_TRAINING if settings.get("scenes") else {}) | settings,
    )
    with Stop() as stop:
        from brim.segmentation.training import train as train_network

        with Display(stop, preparing=("cutting crops", "images")) as display:
            report = train_network(
                images, masks, config, out, device=device, weights=start, resume=resume,
                progress=display.training, stop=stop, classes=classes,
            )  # fmt: skip
    if as_json:
        print_report(report.to_json() | _source_json(config.model))
    elif not report.stopped:
        _print_trained(report, config, out)
        show_spent()
    if report.stopped:
        end_stopped(f"after {report.epochs} of {config.epochs} epochs; nothing of them is lost", stop, resume=resume)


@segment.command(epilog="Example: brim segment sample --kind nuclei --images 100 --out scenes")
@from_settings(SampleConfig, "kind", "images", "size", "seed")
def sample(
    *,
    settings: dict[str, Any],
    out: Annotated[Path, option("DIR", "Directory for images/, masks/ and index.html; new or empty.")],
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Draw images of cells with their label masks, and a page to look at them."""
    config = SampleConfig(**settings)
    with Stop() as stop:
        from brim.engine.device import resolve_device
        from brim.segmentation.scenes.files import write_scenes
    if stop():
        stop.exit()
    with stop, Display(stop) as display:

        def tell(done: int, total: int) -> None:
            display.update("drawing", done, total, f"{done}/{total} images")

        with within(WORK):
            report = write_scenes(config, out, resolve_device(device), progress=tell, stop=stop)
    text = (
        f"images: {out / 'images'}\nmasks:  {out / 'masks'}\npage:   {out / 'index.html'}\n"
        f"{_plural(report['images'], 'image')}, {_plural(report['objects'], 'object')}"
    )
    print_report(report, as_json, text)
    if stop():
        stop.exit()


@segment.command("export-onnx", epilog="Example: brim segment export-onnx run --out cells.onnx")
def export_onnx(
    *,
    weights: Annotated[Path, argument("RUN|FILE", 'A run made by "brim segment train", or a file of weights.')],
    out: Annotated[Path, option("FILE.onnx", "File to write.")],
    network: NetworkOption = None,
    as_json: AsJson = False,
) -> None:
    """Write a network as ONNX, for any number of images and sides of multiples of 32, checked with onnxruntime."""
    model = None if network is None else brought(network)
    with Stop():
        from brim.segmentation.networks.onnx_file import export_onnx as export_network

        values = export_network(weights, out, model)
    print_result(values, as_json)


def brought(text: str) -> str:
    """The name under which the network of --network is known here; its file is shown."""
    name = bring(text)
    show_source(name)
    return name


def show_source(name: str) -> None:
    """Say which file a network comes from, before its code runs."""
    if (source := source_named(name)) is not None:
        say(f"network: {source.reference}, sha256 {source.sha256}")


def _source_json(name: str | None) -> dict[str, Any]:
    source = None if name is None or name in NETWORKS else source_named(name)
    return {} if source is None else {"network": source.as_dict()}


def _network_to_train(start: Path | str | None, settings: dict[str, Any]) -> str:
    """The network where none was named: that of the weights it starts from, or the default one for drawn scenes."""
    if start == DEFAULT_WEIGHTS or (start is None and settings.get("scenes")):
        return DEFAULT_NETWORK
    if start is not None:
        from brim.segmentation.networks import recall

        if (network := recall(start)) is not None:
            return network
    raise ConfigError("--model is missing; name the network to train, or fine-tune the default: --from default")


def _with_model(config: FilesConfig, weights: Path | None, device: str) -> tuple[FilesConfig, Path]:
    """The config with the network of the weights; without weights, those of the default model."""
    from brim.engine.device import resolve_device
    from brim.segmentation.networks import default_weights, recall

    if weights is None:
        if config.model not in (None, DEFAULT_NETWORK):
            raise ConfigError(
                f"--model {config.model} has no weights; add --weights, or leave out --model for the default"
            )
        batch_size = config.batch_size
        if batch_size is None and resolve_device(device).type == "cpu":
            batch_size = 1  # a CPU is as fast with one image at a time: nothing to tune
        return replace(config, model=DEFAULT_NETWORK, batch_size=batch_size), default_weights()
    model = config.model or recall(weights)
    if config.model is None and model is not None:
        show_source(model)
    if model is None:
        raise ConfigError(f"--model is missing, and {weights} does not say what network it is of; name it")
    return replace(config, model=model), weights


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
            f"{figure(entry.expected_throughput)} images/s, {figure(entry.p50_latency_ms)} ms per step "
            f"(95 % within {figure(entry.p95_latency_ms)}), {one.setting}"
        )
    show(f"saved: {out}")


def _print_predicted(files: "FilesReport", out: str) -> None:
    report = files.report
    assert report is not None
    kept = f", {files.kept} kept" if files.kept else ""
    failed = f", {report.failed} failed" if report.failed else ""
    rate = f"{report.images_per_s:{'.3g' if report.images_per_s < 100 else '.0f'}}"  # a large image takes minutes
    show(f"results: {out}")
    show(
        f"{_plural(report.images, 'image')}{failed}{kept}, {_plural(report.polygons, 'polygon')}; "
        f"{rate} images/s at batch {report.batch_size}, {report.ceiling_words}"
    )


def _print_trained(report: "SegmentTrainReport", config: SegmentTrainConfig, out: Path) -> None:
    from brim.engine.training import summary_line

    assert report.training is not None
    planes = f" --channels {quote(','.join(config.channels))}" if config.channels else ""
    planes += "".join(f" --{name} {value}" for name, value in (("z", config.z), ("t", config.t)) if value is not None)
    show(f"run:  {out}\nnext: brim segment predict IMAGES --weights {quote(out)}{planes} --out polygons")
    objects = ""
    if report.task == "instances":
        objects = f", AP50 {report.scores['ap50']:.3f}, AP75 {report.scores['ap75']:.3f}"
        kinds = [name for name in report.scores if name.startswith("ap50 ")]
        objects += "".join(f", of {name[5:]} {report.scores[name]:.3f}" for name in kinds)
    show(f"{report.epochs} epochs, held-out images: Dice {report.dice:.3f}, IoU {report.iou:.3f}{objects}")
    show(summary_line(report.training))


weights = typer.Typer(no_args_is_help=True, epilog="Example: brim weights import hrnet_w48.safetensors --as hrnet")


@weights.callback()
def _weights() -> None: ...


@weights.command("import", epilog="Example: brim weights import unet.pth --as unet_resnet34 --out unet.safetensors")
def import_file(
    file: Annotated[
        Path, argument("FILE", "A .safetensors file, or a .pt or .pth checkpoint that holds tensors alone.")
    ],
    network: Annotated[
        str,
        option("NAME|FILE.py:FACTORY", f"Network to import for: {', '.join(NETWORKS)}, or one of your own.", "--as"),
    ],
    out: Annotated[
        Path | None, option("FILE.safetensors", "Where to write.", show_default="FILE.NAME.safetensors here")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert weights of timm, torchvision, segmentation_models_pytorch or HRNet's authors to a network of brim.

    Every tensor is listed: mapped, missing or left over. Missing ones keep random values, to be trained.
    """
    name = brought(network)
    with Stop():
        from brim.segmentation.networks.imports import import_weights

        title = network.rpartition(":")[2] if ":" in network else Path(network).stem
        report = import_weights(file, name, out or Path(f"{file.stem}.{title}.safetensors"))
    if as_json:
        print_json(report.as_dict())
        return
    for each in report.mapped:
        show(f"mapped     {each['from']} → {each['to']} {each['shape']}")
    for tensor in report.missing:
        show(f"missing    {tensor}")
    for each in report.left_over:
        show(f"left over  {each['name']} {each['shape']}: {each['reason']}")
    show(
        f"{report.out}: {len(report.mapped)} tensors mapped, {len(report.missing)} missing, "
        f"{len(report.left_over)} left over"
    )
    if report.untrained:
        say(f"next: brim segment train --from {quote(report.out)} --images DIR --masks DIR --out run")
    else:
        say(f"next: brim segment predict IMAGES --weights {quote(report.out)} --out polygons")
