"""`brim demo`: every workload once, small, with the functions that the other commands call.

    generate → train → evaluate → tune → segment → sequences → one page about all of it, and a catalogue for a service

Every stage continues what exists: killed at any point, the same command ends with the same results.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote as quote_url

from brim.cli.catalogue import open_catalogue
from brim.cli.options import AsJson, count, option
from brim.cli.rf import PREPARING as SOLVING
from brim.cli.rf import print_generated, print_trained, run_generate
from brim.cli.sequence import PREPARING
from brim.cli.terminal import Display, Stop, end_stopped, print_json, quote, say, show
from brim.errors import ConfigError, Conflict
from brim.jobs.status import jsonable
from brim.rf.config import LocatorTraining, from_mapping
from brim.segmentation.config import FilesConfig, SegmentTrainConfig, TuneConfig

if TYPE_CHECKING:
    from brim.jobs.store import Catalogue, DatasetKind

# A half-watt hand-held transmitter: weak enough that the gates reject some samples.
RADIO: Final = {"tx_power_dbm": 27.0, "min_snr_db": 10.0, "max_gdop": 5.0, "min_receivers": 4}
SAMPLES_CPU: Final = 300  # half a minute on two cores
SAMPLES_GPU: Final = 20_000  # seconds on a large GPU, enough for smooth histograms
LOCATOR: Final[dict[str, Any]] = {"epochs": 10, "checkpoint_every_s": 5.0}
CELLS: Final = {"count": 16, "seed": 1, "height": 128, "width": 128}  # to train on; a tenth is held out
NEW_CELLS: Final = {**CELLS, "count": 4, "seed": 2}  # to predict
NETWORK: Final = "unet_tiny"
SEGMENTING: Final[dict[str, Any]] = {
    "model": NETWORK, "size": 64, "epochs": 8, "learning_rate": 0.004, "checkpoint_every_s": 5.0
}  # fmt: skip
TUNE_S: Final = 4.0
SEQUENCES: Final = {"count": 120, "dim": 8, "classes": 3, "seed": 1, "mean_length": 20}
CLASSIFYING: Final[dict[str, Any]] = {
    "mode": "supervised", "classifier_epochs": 8, "batch_size": 16, "learning_rate": 0.005, "seed": 1,
    "checkpoint_every_s": 5.0,
    "model": {"channels": 32, "hidden": 24, "attention": 24, "embedding": 24},  # the defaults suit a GPU
}  # fmt: skip
PICTURES: Final = 4  # on the page


def demo(
    out: Annotated[Path, option("DIR", "Directory for datasets, runs, results and reports.")] = Path("demo-output"),
    samples: Annotated[
        int | None,
        option(
            "N",
            "Accepted radio samples to generate.",
            parser=count,
            show_default=f"{SAMPLES_CPU}, on a GPU {SAMPLES_GPU}",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try every workload on small data: generate, train, evaluate, tune, segment, classify; and write a page about it.

    Ctrl-C stops cleanly; the same command continues where it stopped.
    """
    began_s = time.perf_counter()
    with Stop() as stop:
        from brim.engine.device import resolve_device

        on_gpu = resolve_device("auto").type == "cuda"
        state = Demo(out, samples or (SAMPLES_GPU if on_gpu else SAMPLES_CPU), on_gpu, stop, quiet=as_json)
        try:
            for number, (name, stage) in enumerate(STAGES.items(), 1):
                state.check_stop()
                say(f"{number}/{len(STAGES)} {name}")
                stage(state)
            state.check_stop()
            _finish(state)
        except KeyboardInterrupt:
            if as_json:
                print_json(state.results)
            end_stopped(f"in the stage {name}; nothing that was made is lost", stop, resume=True)
    if as_json:
        print_json({**state.results, "total_seconds": time.perf_counter() - began_s})
    else:
        _print_end(state)


@dataclass
class Demo:
    """What the stages share: where they work, what may stop them, and their results by name."""

    out: Path
    samples: int
    on_gpu: bool
    stop: Stop
    quiet: bool = False  # nothing on standard output before the end
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """Directory of the locator's run."""
        return self.out / f"run-{self.samples}"

    @property
    def locator(self) -> dict[str, Any]:
        """Settings of the locator's training."""
        return {**LOCATOR, "batch_size": 256 if self.on_gpu else 32}

    @property
    def batch_sizes(self) -> Path:
        return self.out / "batch_sizes.json"

    def check_stop(self) -> None:
        if self.stop():
            raise KeyboardInterrupt

    def watched(self, progress: Callable[..., None]) -> Callable[..., None]:
        """A progress callback for functions without a `stop` of their own: it leaves them after a signal."""

        def call(*values: Any) -> None:
            progress(*values)
            self.check_stop()

        return call

    def show(self, text: str) -> None:
        if not self.quiet:
            show(text)


# Radio


def _generate(demo: Demo) -> None:
    from brim.rf.datasets import write_report

    dataset, held_out = demo.out / "dataset", demo.out / "held-out"
    report = run_generate(from_mapping({**RADIO, "seed": 0}), dataset, max(2, demo.samples), demo.stop)
    demo.results |= report.as_dict()
    demo.results |= {"generate": report.as_dict(), "report": str(demo.out / "report.html")}
    demo.check_stop()
    run_generate(from_mapping({**RADIO, "seed": 1}), held_out, max(2, demo.samples // 5), demo.stop)
    demo.check_stop()
    write_report(dataset, demo.out / "dataset.html")
    demo.results["dataset_report"] = str(demo.out / "dataset.html")
    if not demo.quiet:
        print_generated(report)


def _train(demo: Demo) -> None:
    from brim.rf.location import train

    config = LocatorTraining(**demo.locator)
    with Display(demo.stop, preparing=SOLVING) as display:
        report = train([demo.out / "dataset"], demo.run, config, progress=display.training, stop=demo.stop, resume=True)
    demo.results["train"] = report.as_dict()
    demo.check_stop()
    if not demo.quiet:
        print_trained(report)


def _evaluate(demo: Demo) -> None:
    from brim.rf.location import evaluate_run, write_evaluation

    held_out, page = demo.out / "held-out", demo.out / "evaluation.html"
    with Display() as display:
        evaluation = evaluate_run(demo.run, held_out, progress=demo.watched(display.counting("locating", "samples")))
    write_evaluation(str(demo.run), str(held_out), *evaluation, page)
    demo.results |= {"evaluate": evaluation.as_dict(), "evaluation_report": str(page)}
    metrics = evaluation.metrics
    demo.show(
        f"median error {metrics['median_error_m']:.0f} m on {metrics['samples']} other samples, "
        f"{metrics['crlb_ratio']:.2f} times the bound; {metrics['coverage']['90']:.0%} lie in their 90 % ellipses"
    )


# Segmentation


def _tune(demo: Demo) -> None:
    from brim.engine.device import resolve_device
    from brim.segmentation.tuning import BatchSizes, device_key, tune

    device, size = resolve_device("auto"), CELLS["height"]
    entry = BatchSizes.read(demo.batch_sizes).entry(device_key(device), NETWORK)
    if entry is None or entry.image_size < size:
        with Display(demo.stop) as display:
            config = TuneConfig(models=(NETWORK,), size=size, seconds=TUNE_S)
            tuned = tune(config, device, out=demo.batch_sizes, progress=demo.watched(display.update))
        entry = tuned[NETWORK].entry
    demo.results["tune"] = {NETWORK: asdict(entry), "batch_sizes": str(demo.batch_sizes)}
    demo.show(
        f"{NETWORK}: batch {entry.optimal_batch_size} is the fastest, {entry.expected_throughput:.4g} images/s; "
        f"up to {entry.max_safe_batch_size} is safe"
    )


def _segment(demo: Demo) -> None:
    from brim.segmentation.prediction import ModelLoader, predict_files
    from brim.segmentation.scenes import write_cells
    from brim.segmentation.training import train

    _once(demo.out / "cells", lambda folder: write_cells(folder / "images", folder / "masks", **CELLS))
    _once(demo.out / "new-cells", lambda folder: write_cells(folder / "images", folder / "masks", **NEW_CELLS))
    images, masks, run = demo.out / "cells" / "images", demo.out / "cells" / "masks", demo.out / "cells-run"
    config = SegmentTrainConfig(**SEGMENTING)
    with Display(demo.stop, preparing=("cutting crops", "images")) as display:
        report = train(images, masks, config, run, progress=display.training, stop=demo.stop)
    demo.results["segment"] = {"train": report.to_json()}
    demo.check_stop()
    loader = ModelLoader({NETWORK: run}, "auto", demo.batch_sizes, tile=CELLS["height"])

    def predict(config: FilesConfig, out: Path) -> dict[str, Any]:
        folders = [demo.out / "new-cells" / "images"]
        with Display(demo.stop) as display:
            done = predict_files(folders, loader, out, config, progress=display.predicting, stop=demo.stop, resume=True)
        demo.check_stop()
        return done.as_dict()

    predicted = predict(FilesConfig(model=NETWORK), demo.out / "polygons")
    predict(FilesConfig(model=NETWORK, format="overlay"), demo.out / "overlays")
    demo.results["segment"]["predict"] = {**predicted, "polygons_in": str(demo.out / "polygons")}
    demo.show(
        f"Dice {report.dice:.3f} on held-out cells; {predicted['polygons']} polygons in {predicted['images']} new "
        f"images, as GeoJSON in {demo.out / 'polygons'}"
    )


# Sequences


def _sequences(demo: Demo) -> None:
    from brim.sequences import SequenceTraining, evaluate, make_sequences, pack, train

    folder, corpus, run = (demo.out / name for name in ("features", "corpus", "sequences-run"))
    _once(folder, lambda path: make_sequences(path, **SEQUENCES))
    results = demo.results["sequences"] = {}
    with Display(demo.stop, preparing=PREPARING) as display:
        packed = pack(folder, corpus, resume=True, progress=display.packing, stop=demo.stop)
        results["pack"] = packed.as_dict()
        demo.check_stop()
        config = SequenceTraining(**CLASSIFYING)
        trained = train(corpus, run, config, resume=True, progress=display.training, stop=demo.stop)
        results["train"] = trained.as_dict()
        demo.check_stop()
    with Display(demo.stop) as display:
        scores = evaluate(run, corpus, progress=demo.watched(display.counting("evaluating", "samples")))
    results["evaluate"] = scores.as_dict()
    demo.show(
        f"accuracy {scores.accuracy:.3f} on {scores.items} held-out sequences of {packed.items}; "
        f"trained at {trained.samples_per_s:,.0f} samples/s"
    )


STAGES: Final[dict[str, Callable[[Demo], None]]] = {
    stage.__name__[1:]: stage for stage in (_generate, _train, _evaluate, _tune, _segment, _sequences)
}


def _once(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder completely or not at all; what a killed process left unfinished is made again."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    make(unfinished)
    unfinished.rename(folder)


# Afterwards: a page, and the catalogue of a service


def _finish(demo: Demo) -> None:
    data = demo.out / "service"
    demo.results["dashboard"] = {"data": str(data), "command": f"brim serve --data {quote(data)}", "listed": False}
    try:
        if os.environ.get("BRIM_DATABASE"):
            raise ConfigError("BRIM_DATABASE names the catalogue of another service; unset it")
        with open_catalogue(data, None, make=True) as (catalogue, _):
            _list_results(demo, catalogue, data)
        demo.results["dashboard"]["listed"] = True
    except ConfigError as failure:  # the extra `service` is not installed: everything else works without it
        demo.results["dashboard"]["reason"] = str(failure)
    _write_page(demo)


def _print_end(demo: Demo) -> None:
    dashboard = demo.results["dashboard"]
    show(f"dataset:   {demo.out / 'dataset'}, held out: {demo.out / 'held-out'}")
    show(f"report:    {demo.results['report']} (open it in a browser)")
    if dashboard["listed"]:
        show(f"dashboard: {dashboard['command']} (then open the address it prints)")
    else:
        show(f"dashboard: {dashboard['reason']}; then run this again")
    show(f'next:      brim rf inspect {quote(demo.out / "dataset")}, or "brim --help" for your own data')


def _list_results(demo: Demo, catalogue: "Catalogue", data: Path) -> None:
    """List datasets, runs, models and batch sizes once each; all stay where they are."""
    from brim.jobs.registry import models
    from brim.segmentation.tuning import BatchSizes

    BatchSizes.read(demo.batch_sizes).write(data / "batch_sizes.json")
    radio = _list_dataset(catalogue, data, "demo radio", demo.out / "dataset", "rf")
    held_out = _list_dataset(catalogue, data, "demo radio, held out", demo.out / "held-out", "rf")
    cells = _list_dataset(catalogue, data, "demo cells", demo.out / "cells", "images")
    _list_dataset(catalogue, data, "demo cells, new", demo.out / "new-cells", "images")
    corpus = _list_dataset(catalogue, data, "demo sequences", demo.out / "corpus", "sequences")
    results, scores = demo.results, {"accuracy": demo.results["sequences"]["evaluate"]["accuracy"]}
    trained: tuple[tuple[str, Path, str, str, dict[str, Any], dict[str, Any]], ...] = (
        ("locator", demo.run, "rf.train", radio, demo.locator, {}),
        (
            "cells",
            demo.out / "cells-run",
            "segment.train",
            cells,
            SEGMENTING,
            {name: results["segment"]["train"].get(name) for name in ("dice", "ap50")},
        ),
        ("classes", demo.out / "sequences-run", "sequence.train", corpus, CLASSIFYING, {"scores": scores}),
    )
    runs: dict[str, str] = {}
    for name, path, kind, dataset, config, scored in trained:
        config = {"dataset_ids": [dataset], **config}
        run = models.add_run(catalogue, name=f"demo {name}", path=path, kind=kind, config=config, scores=scored)
        runs[name] = run.id
        known = catalogue.models.get(name)
        if known is None or known.path != str(path.resolve()):
            models.add(catalogue, name=name, path=path, stop=demo.stop)
        demo.check_stop()
    _list_evaluations(demo, catalogue, data, runs, {"locator": held_out, "classes": corpus})


def _list_evaluations(
    demo: Demo, catalogue: "Catalogue", data: Path, runs: dict[str, str], datasets: dict[str, str]
) -> None:
    """List the evaluations as completed jobs, whose pages and points are those of this demo."""
    from brim.jobs.registry.outputs import EMBEDDING, ERRORS
    from brim.rf.location import LEVEL, error_points, evaluate_run, load_run
    from brim.sequences.evaluation import evaluate, project

    def locate() -> tuple[dict[str, Any], dict[str, Any]]:
        loaded = load_run(demo.run)
        located = evaluate_run(loaded, demo.out / "held-out")
        metrics = located.as_dict()
        points = {"level": LEVEL, "points": error_points(located, loaded.generation)}
        return {"metrics": metrics, "samples": located.metrics["samples"]}, points

    def classify() -> tuple[dict[str, Any], dict[str, Any]]:
        run, corpus = demo.out / "sequences-run", demo.out / "corpus"
        return {"metrics": evaluate(run, corpus).as_dict()}, project(run, corpus).as_dict()

    for name, kind, make, file in (
        ("locator", "rf.evaluate", locate, ERRORS),
        ("classes", "sequence.evaluate", classify, EMBEDDING),
    ):
        _list_evaluation(catalogue, data, f"demo {name}, held out", kind, runs[name], datasets[name], make, file)
        demo.check_stop()


def _list_evaluation(
    catalogue: "Catalogue",
    data: Path,
    name: str,
    kind: str,
    run: str,
    dataset: str,
    make: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
    file: str,
) -> None:
    """List one of them, unless it is: make gives its result, and the points for the file."""
    from brim.jobs.kinds import KINDS, Spec
    from brim.jobs.registry.outputs import write_json

    key = hashlib.sha256(f"demo {run} {dataset}".encode()).hexdigest()
    if catalogue.jobs.of_key(key) is not None:
        return
    result, points = make()
    spec = Spec(kind=kind, name=name, config=KINDS[kind].resolve({"run_id": run, "dataset_ids": [dataset]}))
    inputs = {"dataset_ids": [dataset], "run_id": run}
    reads, reads_run = KINDS[kind].reads, KINDS[kind].reads_run
    job, _ = catalogue.jobs.submit(spec, key_hash=key, inputs=inputs, makes="result", reads=reads, reads_run=reads_run)
    write_json(data / job.out / file, points)
    result = jsonable({**result, "files": [file]})
    catalogue.jobs.move(job.id, "completed", of=["pending"], result=result, finished_at=time.time())


def _list_dataset(catalogue: "Catalogue", data: Path, name: str, path: Path, kind: "DatasetKind") -> str:
    """The id of a dataset; one that has grown since it was listed is listed again."""
    from brim.jobs.registry import datasets

    known = next((row for row in catalogue.datasets.named(name) if row.path == str(path.resolve())), None)
    if known is not None:
        try:
            if known.items == datasets.look(path, kind).items:
                return known.id
            datasets.remove(catalogue, data, known.id)
        except Conflict:  # a job reads it
            return known.id
    added = datasets.add(catalogue, data, name=name, path=path, kind=kind)
    assert added is not None, "only packing can be stopped, and nothing is packed here"
    return added.id


def _write_page(demo: Demo) -> None:
    """Write OUT/report.html; its links are relative, so that the folder may move."""
    from brim.report.page import card, document, metres, number, percent, table, tiles, write_page

    results = demo.results
    generated, located, segmented = results["generate"], results["evaluate"], results["segment"]
    packed, trained, scores = (results["sequences"][name] for name in ("pack", "train", "evaluate"))
    accepted = percent(generated["accepted"] / max(1, generated["attempted"]))
    headline = tiles(
        [
            ("radio samples", number(generated["accepted"]), f"{accepted} of those tried"),
            ("median error", metres(located["median_error_m"]), f"{number(located['crlb_ratio'])} times the bound"),
            ("Dice", number(segmented["train"]["dice"]), "on held-out cells"),
            ("polygons", number(segmented["predict"]["polygons"]), "in new images"),
            ("accuracy", percent(scores["accuracy"]), f"on {number(scores['items'])} held-out sequences"),
        ]
    )

    pages = {"dataset.html": "the dataset", "evaluation.html": "the locator on held-out samples"}
    links = "".join(f'<li><a href="{file}">{text}</a></li>' for file, text in pages.items())
    images = sorted((demo.out / "overlays").glob("*.png"))[:PICTURES]
    tags = [f'<img src="overlays/{quote_url(file.name)}" alt="outlined cells" width="160"> ' for file in images]
    entry, iou = results["tune"][NETWORK], percent(segmented["train"]["iou"])
    side = entry["image_size"]
    sizes = [NETWORK, entry["optimal_batch_size"], f"{entry['expected_throughput']:.4g}", entry["max_safe_batch_size"]]
    sequences = [
        ["sequences", packed["items"]],
        ["frames", packed["frames"]],
        ["classes", len(packed["classes"])],
        ["padding", percent(trained["padding_share"])],
        ["samples/s in training", number(trained["samples_per_s"])],
    ]
    cards = [
        card(
            "radio", "Radio: generate, train, evaluate",
            f"A transmitter is located from what receivers hear of it; the network is in {demo.run.name}.",
            f"<ul>{links}</ul>",
        ),
        card(
            "segment", "Segmentation: images to polygons",
            f"Outlines predicted in new images; IoU {iou} on held-out ones. GeoJSON is in polygons.", "".join(tags),
        ),
        card(
            "tune", "Tuning: the fastest safe batch size",
            f"Measured on this device for images of {side} × {side} pixels; saved in batch_sizes.json.",
            table([sizes], ["network", "fastest batch", "images/s", "largest safe batch"]),
        ),
        card(
            "sequences", "Sequences: pack, train, evaluate", "A CNN→LSTM on sequences of different lengths.",
            table(sequences),
        ),
        card(
            "service", "The same as a service",
            "Lists these datasets, runs and models in a browser, and makes more of them as durable jobs.",
            f"<pre>{escape(results['dashboard']['command'])}</pre>",
        ),
    ]  # fmt: skip
    head = "<header><h1>brim demo</h1><p>Every workload once, small, on this machine.</p></header>"
    body = f'{head}\n{headline}\n<div class="cards">\n{"".join(cards)}\n</div>'
    write_page(demo.out / "report.html", document("brim demo", body))
