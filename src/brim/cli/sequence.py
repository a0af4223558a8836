"""`brim sequence sample | pack | train | evaluate | embed | export-onnx | ablate`: sequences of feature vectors."""

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from brim.cli.options import (
    AsJson,
    DeviceName,
    NewRun,
    PlotFile,
    Resume,
    argument,
    count,
    from_settings,
    is_typed,
    one_of,
    option,
)
from brim.cli.terminal import (
    Display,
    Stop,
    end_stopped,
    print_facts,
    print_report,
    print_result,
    quote,
    say,
    show,
    show_spent,
)
from brim.config import plain
from brim.engine.meter import within
from brim.engine.meter.spent import WORK
from brim.engine.networks.source import find_source
from brim.sequences.config import SequenceSample, SequenceTraining, SourceConfig

if TYPE_CHECKING:
    from brim.sequences.corpus.packing import PackReport
    from brim.sequences.training.run import SequenceReport

PREPARING = ("checking the corpus", "parts")
_SELF_ONLY = ("iterations", "encoder_epochs", "clusters")

sequence = typer.Typer(no_args_is_help=True, epilog="Example: brim sequence pack features --out corpus")

CorpusDir = Annotated[Path, argument("CORPUS", 'Made by "brim sequence pack".')]
CorpusOrFolder = Annotated[
    Path, argument("CORPUS", 'Made by "brim sequence pack"; a folder or file that it takes works too.')
]
EmbeddingPlot = Annotated[
    Path | None, option("FILE.png", "Draw the embeddings along their two principal axes to FILE.", "--plot")
]
SequenceDir = Annotated[Path, argument("RUN", 'Made by "brim sequence train".')]


@sequence.command(epilog="Example: brim sequence sample --out features --sequences 90")
@from_settings(SequenceSample, "sequences", "features", "classes", "mean_length", "seed")
def sample(
    *,
    settings: dict[str, Any],
    out: Annotated[Path, option("DIR", "Folder for the .npy files, one sub-folder for each class; new or empty.")],
    as_json: AsJson = False,
) -> None:
    """Write sequences whose class can be learned, as a folder of .npy files to try the other commands on."""
    config = SequenceSample(**settings)
    from brim.sequences import make_sequences

    make_sequences(out, config.sequences, config.features, config.classes, config.seed, config.mean_length)
    text = f"folder: {out}\nnext:   brim sequence pack {quote(out)} --out corpus"
    text += f"\n{config.sequences} sequences of {config.features} features, {config.classes} classes"
    print_result({"folder": str(out), **plain(config)}, as_json, text)


@sequence.command(epilog="Example: brim sequence pack features --out corpus --labels labels.csv")
@from_settings(
    SourceConfig,
    *("layout", "id_column", "time_column", "features", "sample_rate", "window_ms", "hop_ms", "mels", "coefficients"),
    *("speech_model", "speech_layers", "device"),
    id_column="COLUMN",
    time_column="COLUMN",
    speech_model="DIR",
)
def pack(
    *,
    folder: Annotated[
        Path,
        argument(
            "DIR|FILE", "Folder or file of .npy (frames, features), .npz, .csv, .parquet, .ts, .arff, .tsv or audio."
        ),
    ],
    out: Annotated[Path, option("CORPUS", "Directory of the corpus; new without --resume.")],
    labels: Annotated[
        Path | None,
        option(
            "FILE.csv",
            "Columns file, label, and split, speaker or others; else labels.csv in DIR, else sub-folders are classes.",
        ),
    ] = None,
    label: Annotated[str | None, option("COLUMN", "Column of the labels file that is the label.")] = None,
    dtype: Annotated[
        str,
        option(
            "NAME",
            "Stored as float16 or float32; auto: float16 for .npy and audio of more than 2^26 values, else float32.",
            **one_of("auto", "float16", "float32"),
        ),
    ] = "auto",
    settings: dict[str, Any],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="List files that cannot be used and continue.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a corpus that was stopped or killed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pack a folder of variable-length sequences into a corpus that trains at full speed."""
    with Stop() as stop:
        from brim.sequences.corpus.packing import pack as pack_folder

        with Display(stop) as display, within(WORK):
            report = pack_folder(
                folder, out, labels=labels, label=label, dtype=dtype, skip_bad=skip_bad, resume=resume,  # type: ignore[arg-type]
                source=SourceConfig(**settings),
                progress=display.packing, stop=stop,
            )  # fmt: skip
    for note in report.notes:
        say(f"note: {note}")
    for skipped in report.skipped:
        say(f"skipped: {skipped.file} {skipped.fault}")
    if as_json:
        print_report(report.as_dict())
    elif report.complete:
        _print_packed(report, out)
        show_spent()
    if not report.complete:
        end_stopped(f"after {report.items} sequences; nothing of them is lost", stop, resume=resume)


@sequence.command(epilog="Example: brim sequence train corpus --out run --mode supervised")
@from_settings(
    SequenceTraining,
    *(
        "mode",
        "method",
        "budget",
        "iterations",
        "encoder_epochs",
        "classifier_epochs",
        "batch_size",
        "clusters",
        "encoder",
        "members",
        "network",
    ),
    *("label", "task", "groups", "folds", "seeds"),
    *("learning_rate", "tier", "precision", "num_workers", "prefetch_factor", "seed"),
    encoder="RUN",
    network="FILE.py:FACTORY|FILE.pt2|NAME",
    label="COLUMN",
    groups="COLUMN",
    folds="N|COLUMN",
)
def train(
    *,
    context: typer.Context,
    corpus: CorpusOrFolder,
    out: NewRun,
    settings: dict[str, Any],
    device: DeviceName = "auto",
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a network on sequences, with or without labels.

    Labelled sequences are held out for evaluation: those with split "test", else a fifth of each class. With --folds,
    every labelled sequence is held out once. Ctrl-C stops at the next batch; --resume continues.
    """
    if settings["folds"] is not None and not is_typed(context, "mode"):
        settings["mode"] = "supervised"  # the only mode that has folds
    if settings["method"] in ("rocket", "ensemble") and not is_typed(context, "mode"):
        settings["mode"] = "supervised"
    if settings["network"] is not None and not is_typed(context, "mode"):
        settings["mode"] = "supervised"
    if settings["mode"] == "supervised":  # ignores the options of the other mode, whatever their values
        settings = {name: value for name, value in settings.items() if name not in _SELF_ONLY}
    config = SequenceTraining(**settings)
    if config.network is not None:
        source = find_source(config.network)
        say(f"network: {source.reference}, sha256 {source.sha256}")
    with Stop() as stop:
        from brim.sequences.training.run import train as train_sequences

        with Display(stop, preparing=PREPARING) as display:
            report = train_sequences(
                corpus, out, config, device=device, resume=resume, progress=display.training, stop=stop
            )
    if as_json:
        print_report(report.as_dict())
    elif not report.stopped:
        _print_trained(report, corpus, out)
        show_spent()
    if report.stopped:
        end_stopped("before the end; nothing that was trained is lost", stop, resume=resume)


@sequence.command(epilog="Example: brim sequence evaluate run corpus --json")
def evaluate(run: SequenceDir, corpus: CorpusOrFolder, device: DeviceName = "auto", as_json: AsJson = False) -> None:
    """Score a run against true labels it was not trained on.

    On the corpus it was trained on these are the held-out sequences, on another one all labelled sequences.
    """
    from brim.sequences.evaluation.scoring import evaluate as evaluate_run

    with Display() as display:
        with within(WORK):
            evaluation = evaluate_run(run, corpus, device=device, progress=display.counting("evaluating", "samples"))
        scores = evaluation.as_dict()
    if as_json:
        print_report(scores)
        return
    print_facts({name: value for name, value in scores.items() if isinstance(value, int | float)})
    if scores["per_class"] is not None:
        _print_classes(scores["classes"], scores["per_class"])
    show_spent()


@sequence.command(epilog="Example: brim sequence embed run corpus --out embeddings.safetensors")
def embed(
    run: SequenceDir,
    corpus: CorpusOrFolder,
    out: Annotated[Path, option("FILE.safetensors", "Embeddings, predictions and labels, in the corpus's order.")],
    plot: EmbeddingPlot = None,
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Write the embedding and the prediction of every sequence to a file."""
    from brim.report.plot_file import check_plot
    from brim.sequences.evaluation.scoring import embed as embed_corpus

    if plot is not None:
        check_plot(plot)
    with Display() as display, within(WORK):
        written = embed_corpus(run, corpus, out, device=device, progress=display.counting("embedding", "samples"))
    text = f"file: {out}\n{written['items']} sequences, {written['embedding']} numbers each"
    if plot is not None:
        from brim.sequences.evaluation.tables import plot_embeddings

        plot_embeddings(plot, out)
        text += f"\nplot: {plot}"
    print_report(written, as_json, text)


@sequence.command(epilog="Example: brim sequence ablate corpus --plot ablation.png")
def ablate(
    corpus: CorpusDir,
    steps: Annotated[int, option("N", "Training steps timed for each.", parser=count)] = 200,
    plot: PlotFile = None,
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure what each optimisation gains here, switched on one after another, starting from a plain loop."""
    with Stop() as stop:  # an import must not be interrupted halfway
        from brim.report.plot_file import check_plot
        from brim.sequences.ablation.plot import plot as draw
        from brim.sequences.ablation.run import ablate as run_ablation
    if stop():
        stop.exit()
    if plot is not None:
        check_plot(plot)

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(number)

    handler = signal.signal(signal.SIGTERM, end)  # as Ctrl-C: the unpacked files must be removed
    try:
        with Display() as display, within(WORK):
            ablation = run_ablation(corpus, steps=steps, device=device, progress=display.ablating)
    except KeyboardInterrupt as interrupt:
        say("stopped; nothing was written")
        raise typer.Exit(128 + (interrupt.args or (signal.SIGINT,))[0]) from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    if plot is not None:
        draw(plot, ablation)
    table = ablation.table() + (f"\nplot: {plot}" if plot is not None else "")
    print_report(ablation.as_dict(), as_json, table)


def _print_packed(report: "PackReport", out: Path) -> None:
    labels = f"{report.labelled} labelled, {len(report.classes)} classes" if report.labelled else "no labels"
    mode = " --mode supervised" if len(report.classes) > 1 else ""
    show(f"corpus: {out}\nnext:   brim sequence train {quote(out)} --out run{mode}")
    show(
        f"{report.items} sequences, {report.frames} frames of {report.dim} features, {labels}; "
        f"{report.bytes_per_s / 1e6:.0f} MB/s"
    )


@sequence.command("export-onnx", epilog="Example: brim sequence export-onnx run --out model.onnx")
def export_onnx(
    run: SequenceDir,
    out: Annotated[Path, option("FILE.onnx", "File to write.")],
    as_json: AsJson = False,
) -> None:
    """Write a run's model as ONNX, for any number and length of sequences, checked with onnxruntime."""
    with Stop():
        from brim.sequences.evaluation.onnx_file import export_onnx as export_run

        values = export_run(run, out)
    print_result(values, as_json)


def _print_trained(report: "SequenceReport", corpus: Path, out: Path) -> None:
    if report.cross_validation is not None:
        _print_folds(report.cross_validation, out)
        if report.comparison:
            _print_comparison(report, " (mean over folds)")
        return
    show(f"run:  {out}\nnext: brim sequence evaluate {quote(out)} {quote(corpus)}")
    if report.scores is None:
        show("no labelled sequences were held out: no scores")
    else:
        known = {name: value for name, value in report.scores.items() if value is not None}
        show("held out: " + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in known.items()))
    if report.comparison:
        _print_comparison(report)
    if not report.phases or report.phases[-1].phase == "rocket":
        return
    show(
        f"{report.samples_per_s:,.0f} samples/s, {report.padding_share or 0:.1%} padding, busy "
        f"{report.busy_share or 0:.1%}, {report.ceiling_words}, tier {report.tier}"
    )


def _print_comparison(report: "SequenceReport", how: str = "") -> None:
    width = max(len(row.model) for row in report.comparison)
    show(f"{'model':<{width}}  {'score':>6}  {'loss':>6}  {'weight':>6}  measured on{how}")
    for row in report.comparison:
        loss = "–" if row.loss is None else f"{row.loss:.3f}"
        held = "; held out: " + ", ".join(f"{name} {value:.3f}" for name, value in (row.held_out or {}).items())
        show(
            f"{row.model:<{width}}  {row.score:>6.3f}  {loss:>6}  {row.weight:>6.2f}  {row.measured_on}"
            + (held.replace("_", " ") if row.held_out else "")
        )
    show(f"kept: {report.model}")


def _print_classes(classes: list[str], columns: dict[str, list[float | None]]) -> None:
    width = max(len(name) for name in (*classes, "class"))
    show(f"{'class':<{width}}  " + "  ".join(f"{name:>9}" for name in columns))
    for row, name in enumerate(classes):
        values = (column[row] for column in columns.values())
        cells = (
            "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in values
        )
        show(f"{name:<{width}}  " + "  ".join(f"{cell:>9}" for cell in cells))


def _print_folds(result: dict[str, Any], out: Path) -> None:
    from brim.sequences.evaluation import fold_lines

    groups = f", no {result['groups']} in two of them" if result["groups"] else ""
    seeds = f", {len(result['seeds'])} seeds" if len(result["seeds"]) > 1 else ""
    show(f"run:  {out}")
    show(
        f"{result['sequences']} sequences, {len(result['folds'])} folds{groups}{seeds}; mean ± std over folds and seeds"
    )
    for line in fold_lines(result):
        show(line)
    show(f"interval: {result['interval']}")
