"""`brim sequence pack | train | evaluate | embed | ablate`: sequences of feature vectors."""

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from brim.cli.options import AsJson, DeviceName, NewRun, PlotFile, Resume, count, from_settings, one_of
from brim.cli.terminal import Display, Stop, end_stopped, print_facts, print_json, quote, remarks, say, show
from brim.sequences.config import SequenceTraining

if TYPE_CHECKING:
    from brim.sequences.corpus.packing import PackReport
    from brim.sequences.training.run import SequenceReport

PREPARING = ("checking the corpus", "parts")
_SELF_ONLY = ("iterations", "encoder_epochs", "clusters")

sequence = typer.Typer(no_args_is_help=True, epilog="Example: brim sequence pack features --out corpus")

CorpusDir = Annotated[Path, typer.Argument(metavar="CORPUS", help='Made by "brim sequence pack".')]
CorpusOrFolder = Annotated[
    Path,
    typer.Argument(metavar="CORPUS", help='Made by "brim sequence pack"; a folder of .npy files works too, slower.'),
]
SequenceDir = Annotated[Path, typer.Argument(metavar="RUN", help='Made by "brim sequence train".')]


@sequence.command(epilog="Example: brim sequence pack features --out corpus --labels labels.csv")
def pack(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of .npy files, each (frames, features); sub-folders too.")
    ],
    out: Annotated[Path, typer.Option(metavar="CORPUS", help="Directory of the corpus; new without --resume.")],
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Header file,label,split or file,label; else labels.csv in DIR, else sub-folders are classes.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Stored as float16 or float32.", **one_of("float16", "float32"))
    ] = "float16",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="List files that cannot be used and continue.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a corpus that was stopped or killed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pack a folder of variable-length sequences into a corpus that trains at full speed."""
    with Stop() as stop:
        from brim.sequences.corpus.packing import pack as pack_folder

        with Display(stop) as display:
            report = pack_folder(
                folder,
                out,
                labels=labels,
                dtype=dtype,  # type: ignore[arg-type]  # checked as it was read
                skip_bad=skip_bad,
                resume=resume,
                progress=display.packing,
                stop=stop,
            )
    for skipped in report.skipped:
        say(f"skipped: {skipped.file} {skipped.fault}")
    if as_json:
        print_json(report.as_dict())
    elif report.complete:
        _print_packed(report, out)
    if not report.complete:
        end_stopped(f"after {report.items} sequences; nothing of them is lost", stop, resume=resume)


@sequence.command(epilog="Example: brim sequence train corpus --out run --mode supervised")
@from_settings(
    SequenceTraining,
    *("mode", "iterations", "encoder_epochs", "classifier_epochs", "batch_size", "clusters", "encoder", "members"),
    *("learning_rate", "tier", "precision", "num_workers", "prefetch_factor", "seed"),
    encoder="RUN",
)
def train(
    *,
    corpus: CorpusOrFolder,
    out: NewRun,
    settings: dict[str, Any],
    device: DeviceName = "auto",
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a network on sequences, with or without labels.

    Labelled sequences are held out for evaluation: those with split "test", else a fifth of each class. Ctrl-C stops at
    the next batch; --resume continues.
    """
    if settings["mode"] == "supervised":  # ignores the options of the other mode, whatever their values
        settings = {name: value for name, value in settings.items() if name not in _SELF_ONLY}
    config = SequenceTraining(**settings)
    with Stop() as stop:
        from brim.sequences.training.run import train as train_sequences

        with remarks(), Display(stop, preparing=PREPARING) as display:
            report = train_sequences(
                corpus, out, config, device=device, resume=resume, progress=display.training, stop=stop
            )
    if as_json:
        print_json(report.as_dict())
    elif not report.stopped:
        _print_trained(report, corpus, out)
    if report.stopped:
        end_stopped("before the end; nothing that was trained is lost", stop, resume=resume)


@sequence.command(epilog="Example: brim sequence evaluate run corpus --json")
def evaluate(run: SequenceDir, corpus: CorpusOrFolder, device: DeviceName = "auto", as_json: AsJson = False) -> None:
    """Score a run against true labels it was not trained on.

    On the corpus it was trained on these are the held-out sequences, on another one all labelled sequences.
    """
    from brim.sequences.evaluation.scoring import evaluate as evaluate_run

    with Display() as display:
        scores = evaluate_run(run, corpus, device=device, progress=display.counting("evaluating", "samples")).as_dict()
    if as_json:
        print_json(scores)
    else:
        print_facts({name: value for name, value in scores.items() if value is not None})


@sequence.command(epilog="Example: brim sequence embed run corpus --out embeddings.safetensors")
def embed(
    run: SequenceDir,
    corpus: CorpusOrFolder,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.safetensors", help="Embeddings, predictions and labels, in the corpus's order."),
    ],
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Write the embedding and the prediction of every sequence to a file."""
    from brim.sequences.evaluation.scoring import embed as embed_corpus

    with Display() as display:
        written = embed_corpus(run, corpus, out, device=device, progress=display.counting("embedding", "samples"))
    if as_json:
        print_json(written)
    else:
        show(f"file: {out}\n{written['items']} sequences, {written['embedding']} numbers each")


@sequence.command(epilog="Example: brim sequence ablate corpus --plot ablation.png")
def ablate(
    corpus: CorpusDir,
    steps: Annotated[int, typer.Option(metavar="N", parser=count, help="Training steps timed for each.")] = 200,
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
    handler = signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: the unpacked files must be removed
    try:
        with Display() as display:
            ablation = run_ablation(corpus, steps=steps, device=device, progress=display.ablating)
    except KeyboardInterrupt as interrupt:
        say("stopped; nothing was written")
        raise typer.Exit(128 + (interrupt.args or (signal.SIGINT,))[0]) from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    if plot is not None:
        draw(plot, ablation)
    if as_json:
        print_json(ablation.as_dict())
        return
    show(ablation.table())
    if plot is not None:
        show(f"plot: {plot}")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)


def _print_packed(report: "PackReport", out: Path) -> None:
    labels = f"{report.labelled} labelled, {len(report.classes)} classes" if report.labelled else "no labels"
    show(f"corpus: {out}\nnext:   brim sequence train {quote(out)} --out run")
    show(
        f"{report.items} sequences, {report.frames} frames of {report.dim} features, {labels}; "
        f"{report.bytes_per_s / 1e6:.0f} MB/s"
    )


def _print_trained(report: "SequenceReport", corpus: Path, out: Path) -> None:
    show(f"run:  {out}\nnext: brim sequence evaluate {quote(out)} {quote(corpus)}")
    if report.scores is None:
        show("no labelled sequences were held out: no scores")
    else:
        known = {name: value for name, value in report.scores.items() if value is not None}
        show("held out: " + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in known.items()))
    share = "ceiling not measured" if report.ceiling_share is None else f"{report.ceiling_share:.1%} of the ceiling"
    show(
        f"{report.samples_per_s:,.0f} samples/s, {report.padding_share or 0:.1%} padding, busy "
        f"{report.busy_share or 0:.1%}, {share}, tier {report.tier}"
    )
