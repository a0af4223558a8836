"""`brim demo`: every workload once, small, with the functions the other commands call.

    generate → train → evaluate → tune → segment → sequences → a page about all of it, and what a service shows of it

Every stage continues what is there: killed at any point, the same command ends with the same results.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from brim.cli.catalogue import open_catalogue
from brim.cli.locate import print_trained, run_evaluate, run_train
from brim.cli.options import Json, check_positive, whole
from brim.cli.rf import print_made, run_generate
from brim.cli.sequence import SequenceDisplay
from brim.cli.terminal import Display, Stop, end_stopped, print_json, quote, remarks, say, show
from brim.errors import ConfigError

if TYPE_CHECKING:
    from brim.segmentation.prediction.loader import ModelLoader

# A half-watt hand-held transmitter: weak enough that the gates have something to refuse.
RADIO: Final = {"tx_power_dbm": 27.0, "min_snr_db": 10.0, "max_gdop": 5.0, "min_receivers": 4}
SAMPLES_CPU: Final = 300  # half a minute on two cores
SAMPLES_GPU: Final = 20_000  # seconds on a large GPU, enough for smooth histograms
LOCATOR: Final[dict[str, Any]] = {"epochs": 10, "checkpoint_every_s": 5.0}
CELLS: Final = {"count": 16, "seed": 1, "height": 128, "width": 128}  # trained on, and a tenth held out
NEW_CELLS: Final = {**CELLS, "count": 4, "seed": 2}  # predicted
NETWORK: Final = "unet_tiny"
SEGMENTING: Final[dict[str, Any]] = {
    "model": NETWORK,
    "size": 64,
    "epochs": 8,
    "learning_rate": 0.004,
    "checkpoint_every_s": 5.0,
}
TUNE_S: Final = 4.0
SEQUENCES: Final = {"count": 120, "dim": 8, "classes": 3, "seed": 1, "mean_length": 20}
CLASSIFYING: Final[dict[str, Any]] = {
    "mode": "supervised",
    "classifier_epochs": 8,
    "batch_size": 16,
    "learning_rate": 0.005,
    "model": {"channels": 32, "hidden": 24, "attention": 24, "embedding": 24},  # the defaults suit a GPU
    "seed": 1,
    "checkpoint_every_s": 5.0,
}


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for datasets, runs, results and reports.")] = Path(
        "demo-output"
    ),
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole,
            help=f"Accepted radio samples to make. [default: {SAMPLES_CPU}, on a GPU {SAMPLES_GPU}]",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try every workload, small: generate, train, evaluate; tune, segment; sequences; with a page about all of it.

    Ctrl-C stops cleanly; the same command goes on where it was.
    """
    check_positive("--samples", samples)
    began_s = time.perf_counter()
    with Stop() as stop:
        from brim.engine.device import resolve_device

        on_gpu = resolve_device("auto").type == "cuda"
        done = Demo(out, samples or (SAMPLES_GPU if on_gpu else SAMPLES_CPU), on_gpu, stop, quiet=as_json)
        try:
            for number, (name, stage) in enumerate(STAGES.items(), 1):
                done.go_on()
                say(f"{number}/{len(STAGES)} {name}")
                stage(done)
            done.go_on()
            _finish(done)
        except KeyboardInterrupt:
            if as_json:
                print_json(done.found)
            end_stopped(f"in the stage {name}; nothing that was made is lost", stop, resume=True)
    if as_json:
        print_json({**done.found, "total_seconds": time.perf_counter() - began_s})
    else:
        _print_end(done)


@dataclass
class Demo:
    """What the stages share: where they work, what may stop them, and what they found, by name."""

    out: Path
    samples: int
    on_gpu: bool
    stop: Stop
    quiet: bool = False  # nothing on standard output before the end
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """The locator's."""
        return self.out / f"run-{self.samples}"

    @property
    def locator(self) -> dict[str, Any]:
        """How it is trained."""
        return {**LOCATOR, "batch_size": 256 if self.on_gpu else 32}

    @property
    def batch_sizes(self) -> Path:
        """The file of tuned batch sizes."""
        return self.out / "batch_sizes.json"

    def go_on(self) -> None:
        """Leave, where a signal has come, from what knows no `stop` of its own."""
        if self.stop():
            raise KeyboardInterrupt

    def watched(self, tell: Callable[..., None]) -> Callable[..., None]:
        """A progress callback that also leaves where a signal has come."""

        def told(*progress: Any) -> None:
            tell(*progress)
            self.go_on()

        return told

    def tell(self, text: str) -> None:
        """A line for a person."""
        if not self.quiet:
            show(text)


# Radio


def _generate(demo: Demo) -> None:
    from brim.rf import from_mapping
    from brim.rf.datasets.page import write_report

    sizes = {
        "dataset": max(2, demo.samples),
        "held-out": max(2, demo.samples // 5),
    }  # one to train on, one to choose by
    for seed, (name, size) in enumerate(sizes.items()):
        made = run_generate(from_mapping({**RADIO, "seed": seed}), demo.out / name, size, demo.stop)
        if name == "dataset":
            report, page = made, demo.out / "dataset.html"
            demo.found |= {**made.as_dict(), "generate": made.as_dict(), "report": str(demo.out / "report.html")}
        demo.go_on()
    write_report(demo.out / "dataset", page)
    demo.found["dataset_report"] = str(page)
    if not demo.quiet:
        print_made(report)


def _train(demo: Demo) -> None:
    from brim.rf.config import LocatorTraining

    trained = run_train([demo.out / "dataset"], demo.run, LocatorTraining(**demo.locator), demo.stop)
    demo.found["train"] = trained.as_dict()
    if trained.stopped:
        raise KeyboardInterrupt
    if not demo.quiet:
        print_trained(trained)


def _evaluate(demo: Demo) -> None:
    page = demo.out / "evaluation.html"
    evaluated = run_evaluate(demo.run, demo.out / "held-out", page, watched=demo.watched)
    demo.found |= {"evaluate": evaluated.as_dict(), "evaluation_report": str(page)}
    metrics = evaluated.metrics
    demo.tell(
        f"median error {metrics['median_error_m']:.0f} m on {metrics['samples']} other samples, "
        f"{metrics['crlb_ratio']:.2f} times the bound; {metrics['coverage']['90']:.0%} lie in their 90 % ellipses"
    )


# Segmentation


def _tune(demo: Demo) -> None:
    from brim.engine.device import resolve_device
    from brim.segmentation.config import TuneConfig
    from brim.segmentation.tuning.batch_sizes import BatchSizes, device_key
    from brim.segmentation.tuning.tune import tune

    device, size = resolve_device("auto"), CELLS["height"]
    known = BatchSizes.read(demo.batch_sizes).entry(device_key(device), NETWORK)
    if known is None or known.image_size < size:
        with Display(demo.stop) as display:
            tell = demo.watched(display.message)
            tuned = tune(
                TuneConfig(models=(NETWORK,), size=size, seconds=TUNE_S), device, out=demo.batch_sizes, progress=tell
            )
        known = tuned[NETWORK].entry
    demo.found["tune"] = {NETWORK: asdict(known), "batch_sizes": str(demo.batch_sizes)}
    demo.tell(
        f"{NETWORK}: batch {known.optimal_batch_size} is the fastest, {known.expected_throughput:.4g} images/s; "
        f"up to {known.max_safe_batch_size} is safe"
    )


def _segment(demo: Demo) -> None:
    from brim.segmentation.config import SegmentTrainConfig
    from brim.segmentation.prediction.loader import ModelLoader
    from brim.segmentation.training.run import train

    for name, made in (("cells", CELLS), ("new-cells", NEW_CELLS)):
        _once(demo.out / name, partial(_cells, made))
    images, masks, run = demo.out / "cells" / "images", demo.out / "cells" / "masks", demo.out / "cells-run"
    config = SegmentTrainConfig(**SEGMENTING)
    with remarks(), Display(demo.stop, preparing=("cutting crops", "images")) as display:
        report = train(images, masks, config, run, progress=display.training, stop=demo.stop)
    demo.found["segment"] = {"train": report.to_json()}
    if report.stopped:
        raise KeyboardInterrupt
    loader = ModelLoader({NETWORK: run}, "auto", demo.batch_sizes, tile=CELLS["height"])
    found = {form: _predict(demo, loader, form) for form in ("geojson", "overlay")}["geojson"]
    demo.found["segment"]["predict"] = {**found, "polygons_in": str(demo.out / "polygons")}
    demo.tell(
        f"Dice {report.dice:.3f} on cells held out; {found['polygons']} polygons in {found['images']} new images, "
        f"as GeoJSON in {demo.out / 'polygons'}"
    )


def _cells(made: dict[str, int], folder: Path) -> None:
    from brim.segmentation.scenes.cells import write_cells

    write_cells(folder / "images", folder / "masks", **made)


def _predict(demo: Demo, loader: "ModelLoader", form: str) -> dict[str, Any]:
    from brim.config import read
    from brim.segmentation.config import FilesConfig
    from brim.segmentation.prediction.files import predict_files

    place = demo.out / ("polygons" if form == "geojson" else "overlays")
    with Display(demo.stop) as display:
        found = predict_files(
            [demo.out / "new-cells" / "images"], loader, place, read(FilesConfig, {"model": NETWORK, "format": form}),
            progress=display.images("predicting"), stop=demo.stop, resume=True,
        )  # fmt: skip
    if found.stopped:
        raise KeyboardInterrupt
    return found.as_dict()


# Sequences


def _sequences(demo: Demo) -> None:
    from brim.sequences import SequenceTraining, evaluate, make_sequences, pack, train

    folder, corpus, run = (demo.out / name for name in ("features", "corpus", "sequences-run"))
    _once(folder, lambda place: make_sequences(place, **SEQUENCES))
    config = SequenceTraining(**CLASSIFYING)
    found = demo.found["sequences"] = {}
    with remarks(), SequenceDisplay(demo.stop) as display:
        packed = pack(folder, corpus, resume=True, progress=display.packing, stop=demo.stop)
        found["pack"] = packed.as_dict()
        if not packed.complete:
            raise KeyboardInterrupt
        trained = train(corpus, run, config, resume=True, progress=display.training, stop=demo.stop)
        found["train"] = trained.as_dict()
        if trained.stopped:
            raise KeyboardInterrupt
    with Display(demo.stop) as display:
        scored = evaluate(run, corpus, progress=demo.watched(display.samples("evaluating")))
    found["evaluate"] = scored.as_dict()
    demo.tell(
        f"accuracy {scored.accuracy:.3f} on {scored.items} sequences held out of {packed.items}; "
        f"trained at {trained.samples_per_s:,.0f} samples/s"
    )


STAGES: Final[dict[str, Callable[[Demo], None]]] = {
    "generate": _generate,
    "train": _train,
    "evaluate": _evaluate,
    "tune": _tune,
    "segment": _segment,
    "sequences": _sequences,
}


def _once(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder whole or not at all: what a killed process left half made is made anew."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    make(unfinished)
    unfinished.rename(folder)


# What a person sees afterwards


def _finish(demo: Demo) -> None:
    """One page about all of it, and a service's data directory in which it is listed."""
    from brim.cli.demo_catalogue import list_made
    from brim.cli.demo_page import write_overview

    data = demo.out / "service"
    demo.found["dashboard"] = {"data": str(data), "command": f"brim serve --data {quote(data)}", "listed": False}
    try:
        if os.environ.get("BRIM_DATABASE"):
            raise ConfigError("BRIM_DATABASE names the catalogue of another service; unset it")
        with open_catalogue(data, None, make=True, first="run brim demo") as (catalogue, _):
            list_made(demo, catalogue, data)
        demo.found["dashboard"]["listed"] = True
    except ConfigError as failure:  # the service's extra is not installed: all else works without
        demo.found["dashboard"]["reason"] = str(failure)
    write_overview(demo.out, demo.found, demo.run.name)


def _print_end(demo: Demo) -> None:
    dashboard = demo.found["dashboard"]
    show(f"dataset:   {demo.out / 'dataset'}, held out: {demo.out / 'held-out'}")
    show(f"report:    {demo.found['report']} (open it in a browser)")
    if dashboard["listed"]:
        show(f"dashboard: {dashboard['command']} (then open the address it prints)")
    else:
        show(f"dashboard: {dashboard['reason']}; then run this again")
    show(f'next:      brim rf inspect {quote(demo.out / "dataset")}, or "brim --help" for your own data')
