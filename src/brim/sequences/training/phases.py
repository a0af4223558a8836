"""The phases of a run, each one call of the trainer; one that is done already gives its weights and its report.

Without labels, in each iteration K the encoder learns from augmented views, its embeddings are clustered, and a
classifier learns the clusters:

RUN/encoder-K     contrastive loss between two augmented views, and masked frames are predicted
RUN/pseudo-K      k-means on the embeddings of the training items
RUN/classifier-K  the clusters as labels, with the encoder or on top of it

With labels, RUN/supervised or RUN/supervised-K is a classifier that starts from new weights or from the encoder of
another run. Its weights and its normalisation are used together, because it was trained on frames normalised that way;
sequences that are held out here must not have been trained on there.
"""

import hashlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.engine.device import stream
from brim.engine.meter import within
from brim.engine.networks import find_source
from brim.engine.rows import HOST
from brim.engine.training import (
    Batch,
    BatchSource,
    Evaluate,
    LossFn,
    Ranks,
    TrainProgress,
    Transform,
    load_weights,
    read_json,
    resolve_precision,
    write_json,
)
from brim.engine.training import train as run_trainer
from brim.errors import CheckpointError
from brim.sequences.batches import SequenceBatches, augment, make_variants, two_views
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import Sequences, SequenceSplit
from brim.sequences.evaluation import (
    REPORT,
    FeatureStatistics,
    accuracy,
    as_one,
    encode,
    load_network,
    read_tensors,
    write_tensors,
)
from brim.sequences.model import BroughtClassifier, Classifier, Committee, Encoder, Network, make_classifier
from brim.sequences.training.kmeans import kmeans
from brim.sequences.training.objectives import (
    SelfSupervised,
    class_weights,
    classification_loss,
    regression_loss,
    self_supervised_loss,
)

log = logging.getLogger("brim")

# dropout and the LSTM's reverse direction may differ: no weight depends on them
_SHAPE = (
    "dim",
    "stride",
    "channels",
    "kernel",
    "convolutions",
    "hidden",
    "layers",
    "attention",
    "embedding",
    "normalise",
    "front",
)
STEPS = 1500  # of training with labels, unless the settings say
_LEAST_EPOCHS, _MOST_EPOCHS = 15, 1000
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PhaseStopped(Exception):
    """A phase stopped on request before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRun:
    """What all phases of a run share."""

    out: Path
    data: Sequences
    split: SequenceSplit
    config: SequenceTraining
    batches: SequenceBatches
    statistics: FeatureStatistics  # on the device
    ranks: Ranks
    progress: Callable[[TrainProgress], None] | None = None
    stop: Callable[[], bool] | None = None
    reports: "list[PhaseReport]" = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def seed(self, *name: str | int) -> int:
        return stream(self.config.seed, *name, device=HOST).initial_seed() % 2**31

    def view(self, rows: Tensor, phase: str, label: Tensor | None = None) -> BatchSource:
        return self.batches.view(rows, label=label, seed=self.seed(phase, "order"))

    def new(self, make: Callable[[], nn.Module], *name: str | int) -> Any:
        """A module on the device whose initial weights depend only on the seed and the name."""
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed(*name, "weights"))
            return make().to(self.device)

    def new_encoder(self, *name: str | int) -> Encoder:
        """An encoder that normalises by the statistics of the training items."""
        encoder: Encoder = self.new(lambda: Encoder(self.config.shape(self.data.dim, self.data.layers)), *name)
        encoder.set_statistics(*self.statistics)
        return encoder

    def augmented(self) -> Transform | None:
        """Augments a batch in place; None if the settings ask for no augmentation."""
        config, (mean, std) = self.config.augmentation, self.statistics
        if config is None:
            return None

        def change(batch: Batch, rng: torch.Generator) -> Batch:
            length = augment(batch["frames"], batch["length"], rng, config, mean=mean, std=std)
            return {**batch, "length": length}

        return change


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    phase: str
    epochs: int
    samples: int  # trained on
    seconds: float  # of training alone
    tier: str
    padding_share: float
    ceiling_share: float | None
    busy_share: float
    peak_bytes: int
    val_loss: float | None
    stopped: bool = False
    ceiling_spread: float | None = None  # standard deviation of ceiling_share between measurements


def run_phase(
    run: SequenceRun,
    name: str,
    module: nn.Module,
    loss_fn: LossFn,
    source: BatchSource,
    *,
    epochs: int,
    patience: int | None = None,
    transform: Transform | None = None,
    evaluate: Evaluate | None = None,
) -> None:
    """Train the module in place; it ends with the best weights if it was evaluated, else with the last.

    Training ends early after `patience` epochs without a better validation loss.
    Its report is added to the run's; PhaseStopped is raised if it stopped before its end.
    """
    file = run.out / name / REPORT
    phase = run.ranks.from_main(lambda: _read_report(file) if file.is_file() else None)
    if phase is None:
        log.info("%s: %d sequences, %d epochs", name, source.num_items, epochs)
        with cudnn_autotune(run.config.autotune):
            recipe = replace(run.config.recipe(epochs), early_stopping_patience=patience)
            report = run_trainer(
                module, loss_fn, source, config=recipe, out=run.out, phase=name, device=run.device,
                transform=transform, evaluate=evaluate, progress=run.progress, stop=run.stop, ranks=run.ranks,
            )  # fmt: skip
        samples = round(report.steps * source.num_items / source.num_batches)
        phase = PhaseReport(
            phase=name, epochs=report.epochs, samples=samples, tier=report.tier, padding_share=source.padding_share,
            seconds=samples / report.samples_per_s if report.samples_per_s > 0 else 0.0,
            ceiling_share=report.ceiling_share, busy_share=report.busy_share, peak_bytes=report.peak_bytes,
            ceiling_spread=report.ceiling_spread,
            val_loss=report.best_val_loss, stopped=report.stopped,
        )  # fmt: skip
    run.reports.append(phase)
    if phase.stopped:
        raise PhaseStopped
    which: Literal["best", "last"] = "last" if evaluate is None else "best"
    if run.ranks.main:
        load_weights(module, run.out, name, which)
    if not run.ranks.alone:  # rank 0 has read them for all
        weights = run.ranks.from_main(lambda: {key: value.cpu() for key, value in module.state_dict().items()})
        module.load_state_dict(weights)
    if run.ranks.main and not file.is_file():
        write_json(file, asdict(phase))


def _read_report(file: Path) -> PhaseReport:
    values = read_json(file)
    try:
        return PhaseReport(**values)
    except TypeError as failure:
        raise CheckpointError(
            f"{file} was altered ({failure})", hint="restore it, or choose another {out}"
        ) from failure


@contextmanager
def cudnn_autotune(enabled: bool) -> Iterator[None]:
    """Let cuDNN benchmark its algorithms for every new shape, or not; the previous setting is restored."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# Without labels


def train_self_supervised(run: SequenceRun) -> Classifier:
    config, augmentation, (mean, std) = run.config, run.config.augmentation, run.statistics
    assert augmentation is not None, "checked by SequenceTraining"
    encoder = run.new_encoder("encoder")
    clusters, rows = config.num_clusters(len(run.data.classes)), run.split.train
    epochs = config.classifier_epochs
    assert epochs is not None, "set by SequenceTraining"

    def views(batch: Batch, rng: torch.Generator) -> Batch:
        return two_views(batch, rng, augmentation, mean=mean, std=std)

    for number in range(1, config.iterations + 1):
        classifier: Classifier = run.new(partial(Classifier, encoder, clusters), f"classifier-{number}")
        name = f"encoder-{number}"
        module = run.new(lambda: SelfSupervised(encoder, config.objective), name)
        encoder.requires_grad_(True)
        source = run.view(rows, name)
        run_phase(run, name, module, self_supervised_loss, source, epochs=config.encoder_epochs, transform=views)

        with within("clustering"):
            labels = _pseudo_labels(run, classifier, clusters, number)
        name = f"classifier-{number}"
        classifier.frozen = not config.fine_tune
        encoder.requires_grad_(config.fine_tune)
        source = run.view(rows, name, labels)
        loss = partial(classification_loss, smoothing=config.label_smoothing)
        run_phase(
            run,
            name,
            classifier,
            loss,
            source,
            epochs=epochs,
            transform=run.augmented(),
        )
        row, _, predicted, _ = encode(classifier, run.batches.plain(rows), run.device, ranks=run.ranks)
        agreement = 100 * accuracy(predicted, labels[row])  # a sign that it has learned, not a score
        log.info("iteration %d: classifier and clusters agree on %.1f %%", number, agreement)
    return classifier


def _pseudo_labels(run: SequenceRun, classifier: Classifier, clusters: int, number: int) -> Tensor:
    """(n,) int64: the cluster of each training item, -1 elsewhere; computed once in a run, then read."""
    file, rows = run.out / f"pseudo-{number}.safetensors", run.split.train
    labels = torch.full((len(run.data),), -1)
    clusters_of_rows = run.ranks.from_main(lambda: _read_clusters(file, rows))
    if clusters_of_rows is None:
        row, embedding, *_ = encode(classifier, run.batches.plain(rows), run.device, ranks=run.ranks)

        def find() -> Tensor:
            # directions: the views were compared by them, and norms depend on the number of frames
            points = functional.normalize(embedding, dim=1).to(run.device)
            seed = run.seed("clusters", number)
            labels[row] = kmeans(points, clusters, restarts=run.config.restarts, seed=seed).labels.cpu()
            write_tensors(file, {"row": rows, "label": labels[rows]})
            return labels[rows]

        clusters_of_rows = run.ranks.from_main(find)
    labels[rows] = clusters_of_rows
    return labels


def _read_clusters(file: Path, rows: Tensor) -> Tensor | None:
    if not file.is_file():
        return None
    tensors = read_tensors(file)
    if set(tensors) != {"row", "label"} or not torch.equal(tensors["row"], rows):
        raise CheckpointError(f"{file} belongs to other items", hint="restore it, or choose another {out}")
    return tensors["label"]


# With labels


class InitialEncoder(NamedTuple):
    encoder: Encoder  # on the host
    identity: dict[str, str]  # for run.json


def load_initial_encoder(config: SequenceTraining, data: Sequences, parts: SequenceSplit) -> InitialEncoder | None:
    """The encoder that the config names; one with another shape, or trained on items held out here, is rejected."""
    if config.encoder is None:
        return None
    run, file = load_network(config.encoder)
    if not isinstance(run.module, Classifier | Committee):
        raise CheckpointError(
            f"{run.path} is a rocket model, which has no encoder", field="encoder", code="wrong_kind",
            hint="give a run that was trained with the network",
        )  # fmt: skip
    theirs, ours = run.module.encoder.config.as_dict(), config.shape(data.dim, data.layers).as_dict()
    for name in _SHAPE:
        if (theirs[name] or 1) != (ours[name] or 1):
            raise CheckpointError(
                f"{run.path} has {name}={theirs[name]}, this training has {name}={ours[name]}",
                field="encoder", code="conflict", hint="give a run with the same {model} and as many features",
            )  # fmt: skip
    if data.is_same_data(run.about.get("corpus")):
        kept = set(run.about.get("held_out") or ())
        seen = [data.ids[row] for row in parts.held_out.tolist() if data.ids[row] not in kept]
        if seen:
            raise CheckpointError(
                f"{run.path} was trained on {len(seen)} sequences that are held out here, such as {seen[0]}",
                field="encoder", code="conflict", hint="train both with the same {seed}, or a split in labels.csv",
            )  # fmt: skip
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return InitialEncoder(run.module.encoder, {"name": Path(config.encoder).resolve().name, "sha256": digest})


def train_supervised(
    run: SequenceRun, initial: InitialEncoder | None, budget_s: float | None = None, *, choose: bool = True
) -> Network:
    """Train the members one after another, or the network that somebody brings; budget_s is the time for all.

    choose says whether the validation part, if there is one, ends training and chooses the weights; else the last are
    kept.
    """
    config, rows, members = run.config, run.split.train, []
    labels, mean, std, loss = _supervision(run)
    for number in range(1, config.members + 1):
        name = "supervised" if config.members == 1 else f"supervised-{number}"
        module = _new_module(run, initial, number, name)
        members.append(module)
        source, transform = run.view(rows, name, labels), run.augmented()
        with ExitStack() as stack:
            if config.variants and transform is not None:
                seeds = [run.seed("variants", number, "order") for number in range(config.variants)]
                source = stack.enter_context(make_variants(run.batches, rows, labels, transform, seeds))
                transform = None
            evaluate = _validation(run, labels) if choose and len(run.split.validation) else None
            epochs, patience = _length(run, name, module, loss, source, budget_s)
            run_phase(
                run, name, module, loss, source, epochs=epochs, patience=patience if evaluate else None,
                transform=transform, evaluate=evaluate,
            )  # fmt: skip
        if isinstance(module, Classifier) and module.is_regression:
            module.rescale(mean, std)
    return members[0] if len(members) == 1 else as_one([one for one in members if isinstance(one, Classifier)])


def _new_module(run: SequenceRun, initial: InitialEncoder | None, number: int, name: str) -> Network:
    classes = len(run.data.classes)
    if run.config.network is not None:
        source = find_source(run.config.network)
        module: BroughtClassifier = run.new(partial(make_classifier, source, run.data.dim, classes), name)
        module.set_statistics(*run.statistics)
        return module
    encoder = run.new_encoder("encoder", *([number] if number > 1 else []))
    if initial is not None:
        encoder.load_state_dict(initial.encoder.state_dict())
    make = partial(Classifier, encoder, classes, is_regression=run.data.targets is not None)
    classifier: Classifier = run.new(make, name)
    return classifier


class _Supervision(NamedTuple):
    labels: Tensor  # (n,) int64 classes, or float32 numbers of mean 0 and deviation 1 over the training part
    mean: float  # of the numbers
    std: float
    loss: LossFn


def _supervision(run: SequenceRun) -> _Supervision:
    rows, data = run.split.train, run.data
    if data.targets is not None:
        mean, std = float(data.targets[rows].mean()), float(data.targets[rows].std(correction=0)) or 1.0
        return _Supervision(((data.targets - mean) / std).float(), mean, std, regression_loss)
    weight = class_weights(data.labels[rows], len(data.classes), run.config.balance)
    on_device = None if weight is None else weight.to(run.device)
    loss = partial(classification_loss, smoothing=run.config.label_smoothing, weight=on_device)
    return _Supervision(data.labels, 0.0, 1.0, loss)


def _length(
    run: SequenceRun, name: str, module: nn.Module, loss: LossFn, source: BatchSource, budget_s: float | None
) -> tuple[int, int | None]:
    """Epochs, and epochs without progress after which to stop; stored if they depend on the speed of the device."""
    if run.config.classifier_epochs is not None:
        return run.config.classifier_epochs, None
    epochs = min(max(math.ceil(STEPS / source.num_batches), _LEAST_EPOCHS), _MOST_EPOCHS)
    if budget_s is not None:
        file = run.out / name / "length.json"
        stored = read_json(file) if file.is_file() else {}
        if not isinstance(stored.get("epochs"), int):
            steps = budget_s / run.config.members / _step_seconds(run, module, loss, source)
            stored = {"epochs": max(1, min(epochs, int(steps / source.num_batches)))}
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, stored)
        epochs = stored["epochs"]
    return epochs, max(5, epochs // 4)


def _step_seconds(run: SequenceRun, module: nn.Module, loss: LossFn, source: BatchSource) -> float:
    """Time of a step and its share of an epoch's evaluation, measured on a few batches; the module does not change."""
    seconds, forward_s = [], 0.0
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train()
    with closing(source.epoch(0)) as batches:  # type: ignore[type-var]
        for number, batch in enumerate(batches):
            began_s = time.perf_counter()
            with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
                value = loss(module, batch)
                forward_s = time.perf_counter() - began_s
                value.backward()  # type: ignore[no-untyped-call]
            module.zero_grad(set_to_none=True)
            float(value.detach())  # waits for the device
            seconds.append(time.perf_counter() - began_s)
            if number == 3:
                break
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    step_s = statistics.median(seconds)  # the first may wait for memory, and others may use the machine
    share = len(run.split.validation) / max(1, len(run.split.train))
    return 1.3 * step_s + forward_s * share  # the optimiser, logs and checkpoints


def _validation(run: SequenceRun, labels: Tensor) -> Evaluate:
    """Loss on the validation items, and for classes the accuracy."""
    source, numbers = run.batches.plain(run.split.validation, labels), run.data.targets is not None
    dtype = _DTYPES[resolve_precision(run.config.precision, run.device)]

    def evaluate(module: nn.Module) -> dict[str, float]:
        losses: list[Tensor] = []
        correct: list[Tensor] = []
        for batch in source.epoch(0) if source is not None else ():
            with torch.autocast(run.device.type, dtype, enabled=dtype != torch.float32):
                output, label = module(batch["frames"], batch["length"]).float(), batch["label"]
            loss = (output[:, 0] - label).square() if numbers else None
            losses.append(functional.cross_entropy(output, label, reduction="none") if loss is None else loss)
            correct.append(output.argmax(-1) == label)
        if not run.ranks.alone:
            of_ranks = run.ranks.all_of([(loss.cpu(), hit.cpu()) for loss, hit in zip(losses, correct, strict=True)])
            losses, correct = ([pair[side] for part in of_ranks for pair in part] for side in (0, 1))
        measured = {"val_loss": float(torch.cat(losses).mean())}
        return measured if numbers else measured | {"val_accuracy": float(torch.cat(correct).float().mean())}

    return evaluate
