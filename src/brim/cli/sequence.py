"""`brim sequence pack | train | evaluate | embed | ablate`: options in, one call of `brim.sequences`, a result out."""

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from brim.cli.options import PRECISIONS, TIERS, Device, Json, check_choice, check_positive, number, one_of, whole
from brim.cli.terminal import Display, Stop, end_stopped, print_facts, print_json, quote, remarks, say, show

if TYPE_CHECKING:
    from brim.sequences.ablation.run import AblationProgress
    from brim.sequences.corpus.pack_report import PackProgress, PackReport
    from brim.sequences.training.run import SequenceReport

MODES = ("self", "supervised")
DTYPES = ("float16", "float32")

sequence = typer.Typer(no_args_is_help=True, epilog="Example: brim sequence pack features --out corpus")

Corpus = Annotated[Path, typer.Argument(metavar="CORPUS", help='Made by "brim sequence pack".')]
Unpacked = Annotated[
    Path,
    typer.Argument(metavar="CORPUS", help='Made by "brim sequence pack"; a folder of .npy files works too, slower.'),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help='Made by "brim sequence train".')]


@sequence.command(epilog="Example: brim sequence pack features --out corpus --labels labels.csv")
def pack(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of .npy files, each (frames, features); sub-folders too.")
    ],
    out: Annotated[Path, typer.Option(metavar="CORPUS", help="The corpus's directory; new without --resume.")],
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Header file,label,split or file,label; else labels.csv in DIR, else sub-folders are classes.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="float16 or float32, as stored.", autocompletion=one_of(*DTYPES))
    ] = "float16",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="List files that cannot be used and go on.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a corpus that was stopped or killed.")] = False,
    as_json: Json = False,
) -> None:
    """Pack a folder of variable-length sequences into a corpus that trains at full speed."""
    check_choice("--dtype", dtype, DTYPES)
    with Stop() as stop:
        from brim.sequences.corpus.packing import pack as run_pack

        with SequenceDisplay(stop) as display:
            report = run_pack(
                folder, out, labels=labels, dtype=dtype, skip_bad=skip_bad, resume=resume, progress=display.packing,  # type: ignore[arg-type]  # checked above
                stop=stop,
            )  # fmt: skip
    for skipped in report.skipped:
        say(f"skipped: {skipped.file} {skipped.fault}")
    if as_json:
        print_json(report.as_dict())
    elif report.complete:
        _print_packed(report, out)
    if not report.complete:
        end_stopped(f"after {report.items} sequences; nothing of them is lost", stop, resume=resume)


@sequence.command(epilog="Example: brim sequence train corpus --out run --mode supervised")
def train(
    corpus: Unpacked,
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run's directory; new or empty without --resume.")],
    mode: Annotated[
        str,
        typer.Option(metavar="NAME", help="self: without labels; supervised: on them.", autocompletion=one_of(*MODES)),
    ] = "self",
    iterations: Annotated[
        int, typer.Option(metavar="I", parser=whole, help="self: rounds of encoder, clusters and classifier.")
    ] = 3,
    encoder_epochs: Annotated[int, typer.Option(metavar="E", parser=whole, help="self: of each round.")] = 15,
    classifier_epochs: Annotated[
        int, typer.Option(metavar="E", parser=whole, help="self: of each round; supervised: in all.")
    ] = 15,
    batch_size: Annotated[int, typer.Option(metavar="B", parser=whole, help="Sequences per step.")] = 64,
    clusters: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            parser=whole,
            help="self: kinds looked for; else the number of classes, or 10.",
        ),
    ] = None,
    encoder: Annotated[
        Path | None, typer.Option(metavar="RUN", help="supervised: start from the encoder of this run.")
    ] = None,
    members: Annotated[
        int, typer.Option(metavar="N", parser=whole, help="supervised: networks whose probabilities are averaged.")
    ] = 1,
    learning_rate: Annotated[
        float, typer.Option(metavar="R", parser=number, help="After the warm-up; then a cosine to 0.")
    ] = 0.001,
    tier: Annotated[
        str, typer.Option(metavar="NAME", help="auto, vram, ram or window.", autocompletion=one_of(*TIERS))
    ] = "auto",
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="auto, fp32, bf16 or fp16.", autocompletion=one_of(*PRECISIONS))
    ] = "auto",
    num_workers: Annotated[
        int, typer.Option(metavar="N", parser=whole, help="Processes that read a folder that is not packed.")
    ] = 8,
    prefetch_factor: Annotated[
        int, typer.Option(metavar="N", parser=whole, help="Batches that each of them reads ahead.")
    ] = 6,
    device: Device = "auto",
    seed: Annotated[
        int, typer.Option(metavar="K", parser=whole, help="Of the split, the first weights, the order and the views.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, begun with the same options.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a network on sequences, without labels or on them.

    Labelled sequences are held out to score on: those with split "test", else a fifth of each class. Ctrl-C ends at
    the next batch; --resume goes on.
    """
    check_choice("--mode", mode, MODES)
    check_choice("--tier", tier, TIERS)
    check_choice("--precision", precision, PRECISIONS)
    own = {"iterations": iterations, "encoder_epochs": encoder_epochs, "clusters": clusters} if mode == "self" else {}
    for flag, value in (
        ("--iterations", own.get("iterations")), ("--encoder-epochs", own.get("encoder_epochs")),
        ("--classifier-epochs", classifier_epochs), ("--clusters", own.get("clusters")),
        ("--batch-size", batch_size), ("--prefetch-factor", prefetch_factor),
        ("--members", members),
    ):  # fmt: skip
        check_positive(flag, value)
    with Stop() as stop:
        from brim.sequences.training.run import SequenceTraining
        from brim.sequences.training.run import train as run_train

        config = SequenceTraining(
            mode=mode,  # type: ignore[arg-type]  # checked above, as are tier and precision
            **own,  # type: ignore[arg-type]  # none of them None but clusters; supervised mode ignores them
            classifier_epochs=classifier_epochs,
            batch_size=batch_size,
            encoder=None if encoder is None else str(encoder),
            members=members,
            learning_rate=learning_rate,
            tier=tier,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            seed=seed,
        )
        with remarks(), SequenceDisplay(stop) as display:
            report = run_train(corpus, out, config, device=device, resume=resume, progress=display.training, stop=stop)
    if as_json:
        print_json(report.as_dict())
    elif not report.stopped:
        _print_trained(report, corpus, out)
    if report.stopped:
        end_stopped("before the end; nothing that was trained is lost", stop, resume=resume)


@sequence.command(epilog="Example: brim sequence evaluate run corpus --json")
def evaluate(run: Run, corpus: Unpacked, device: Device = "auto", as_json: Json = False) -> None:
    """Score a run against true labels it was not trained on.

    On the corpus it was trained on these are the sequences held out, on another all that are labelled.
    """
    from brim.sequences.evaluation.run import evaluate as run_evaluate

    with Display() as display:
        found = run_evaluate(run, corpus, device=device, progress=display.samples("evaluating"))
    if as_json:
        print_json(found.as_dict())
        return
    print_facts({name: value for name, value in found.as_dict().items() if value is not None})


@sequence.command(epilog="Example: brim sequence embed run corpus --out embeddings.safetensors")
def embed(
    run: Run,
    corpus: Unpacked,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.safetensors", help="Embeddings, predictions and labels, in the corpus's order."),
    ],
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write what a run makes of every sequence to a file."""
    from brim.sequences.evaluation.run import embed as run_embed

    with Display() as display:
        found = run_embed(run, corpus, out, device=device, progress=display.samples("embedding"))
    if as_json:
        print_json(found)
        return
    show(f"file: {out}\n{found['items']} sequences, {found['embedding']} numbers each")


@sequence.command(epilog="Example: brim sequence ablate corpus --plot ablation.png")
def ablate(
    corpus: Corpus,
    steps: Annotated[int, typer.Option(metavar="N", parser=whole, help="Training steps timed for each.")] = 200,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw what was measured here.")] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure what each optimisation is worth here: switch on one more at a time, from a plain loop to all of them."""
    check_positive("--steps", steps)
    with Stop() as stop:  # an import must not be left halfway
        from brim.report.plot_file import check_plot
        from brim.sequences.ablation.plot import plot as draw
        from brim.sequences.ablation.run import ablate as run_ablate
    if stop():
        raise typer.Exit(128 + stop.number)
    if plot is not None:
        check_plot(plot)
    before = signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: the unpacked files must not stay
    try:
        with SequenceDisplay() as display:
            found = run_ablate(corpus, steps=steps, device=device, progress=display.ablating)
    except KeyboardInterrupt as signalled:
        say("stopped; nothing was written")
        raise typer.Exit(128 + (signalled.args or (signal.SIGINT,))[0]) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if plot is not None:
        draw(plot, found)
    if as_json:
        print_json(found.as_dict())
        return
    show(found.table())
    if plot is not None:
        show(f"plot: {plot}")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)


class SequenceDisplay(Display):
    """Progress of what this workload does."""

    def __init__(self, stop: Stop | None = None) -> None:
        super().__init__(stop, preparing=("checking the corpus", "parts"))

    def packing(self, progress: "PackProgress") -> None:
        """Show how far packing is."""
        self._say_stop()
        done, total = progress.done_bytes / 1e6, progress.total_bytes / 1e6
        text = f"{done:.0f}/{total:.0f} MB, {progress.bytes_per_s / 1e6:.0f} MB/s" if progress.total_bytes else ""
        self._show(progress.message, progress.done_bytes, progress.total_bytes, text)

    def ablating(self, progress: "AblationProgress") -> None:
        """Show which step is measured."""
        text = f"{progress.step + 1}/{progress.steps}"
        self._show(progress.name, round(100 * (progress.step + progress.share)), 100 * progress.steps, text)


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
        show("no labelled sequence was held out: no scores")
    else:
        known = {name: value for name, value in report.scores.items() if value is not None}
        show("held out: " + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in known.items()))
    share = "ceiling not measured" if report.ceiling_share is None else f"{report.ceiling_share:.1%} of the ceiling"
    show(
        f"{report.samples_per_s:,.0f} samples/s, {report.padding_share or 0:.1%} padding, busy "
        f"{report.busy_share or 0:.1%}, {share}, tier {report.tier}"
    )
