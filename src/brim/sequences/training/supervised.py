"""Training with labels, from new weights or from the encoder of another run.

The weights and the normalisation of another run's encoder are used together, because it was trained on frames
normalised that way. Sequences that are held out here must not have been trained on there.
"""

import hashlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from brim.engine.training import BatchSource, Evaluate, resolve_precision
from brim.errors import CheckpointError
from brim.sequences.batches import make_variants
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import Sequences, SequenceSplit
from brim.sequences.evaluation import WEIGHTS, as_one, load_run
from brim.sequences.model import Classifier, Encoder, Network
from brim.sequences.training.objectives import classification_loss
from brim.sequences.training.phases import PhaseReport, SequenceRun, run_phase

# dropout and the LSTM's reverse direction may differ: no weight depends on them
_SHAPE = ("dim", "channels", "kernel", "convolutions", "hidden", "layers", "attention", "embedding", "normalise")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class InitialEncoder(NamedTuple):
    encoder: Encoder  # on the host
    identity: dict[str, str]  # for run.json


def load_initial_encoder(config: SequenceTraining, data: Sequences, parts: SequenceSplit) -> InitialEncoder | None:
    """The encoder that the config names; one with another shape, or trained on items held out here, is rejected."""
    if config.encoder is None:
        return None
    run = load_run(config.encoder)
    theirs, ours = run.module.encoder.config.as_dict(), config.shape(data.dim).as_dict()
    for name in _SHAPE:
        if theirs[name] != ours[name]:
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
    with (run.path / WEIGHTS).open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return InitialEncoder(run.module.encoder, {"name": Path(config.encoder).resolve().name, "sha256": digest})


def train_supervised(run: SequenceRun, initial: InitialEncoder | None) -> tuple[Network, list[PhaseReport]]:
    """Train the members one after another; if the last report says stopped, the run is not done."""
    members: list[Classifier] = []
    phases: list[PhaseReport] = []
    for number in range(1, run.config.members + 1):
        encoder = run.new_encoder("encoder", *([number] if number > 1 else []))
        if initial is not None:
            encoder.load_state_dict(initial.encoder.state_dict())
        name = "supervised" if run.config.members == 1 else f"supervised-{number}"
        module: Classifier = run.new(partial(Classifier, encoder, len(run.data.classes)), name)
        members.append(module)
        phases.append(_train_member(run, module, name))
        if phases[-1].stopped:
            break
    return as_one(members), phases


def _train_member(run: SequenceRun, module: Classifier, name: str) -> PhaseReport:
    config, rows, transform = run.config, run.split.train, run.augmented()
    with ExitStack() as stack:
        source: BatchSource = run.view(rows, name)
        if config.variants and transform is not None:
            seeds = [run.seed("variants", number, "order") for number in range(config.variants)]
            source = stack.enter_context(make_variants(run.batches, rows, run.data.labels, transform, seeds))
            transform = None
        return run_phase(
            run, name, module, partial(classification_loss, smoothing=config.label_smoothing), source,
            epochs=config.classifier_epochs, transform=transform,
            evaluate=_validation(run) if len(run.split.validation) else None,
        )  # fmt: skip


def _validation(run: SequenceRun) -> Evaluate:
    """Loss and accuracy on the validation items."""
    source = run.batches.plain(run.split.validation)
    dtype = _DTYPES[resolve_precision(run.config.precision, run.device)]

    def evaluate(module: nn.Module) -> dict[str, float]:
        losses: list[Tensor] = []
        correct: list[Tensor] = []
        for batch in source.epoch(0) if source is not None else ():
            with torch.autocast(run.device.type, dtype, enabled=dtype != torch.float32):
                logits = module(batch["frames"], batch["length"]).float()
            losses.append(nn.functional.cross_entropy(logits, batch["label"], reduction="none"))
            correct.append(logits.argmax(-1) == batch["label"])
        if not run.ranks.alone:
            of_ranks = run.ranks.all_of([(loss.cpu(), hit.cpu()) for loss, hit in zip(losses, correct, strict=True)])
            losses, correct = ([pair[side] for part in of_ranks for pair in part] for side in (0, 1))
        return {"val_loss": float(torch.cat(losses).mean()), "val_accuracy": float(torch.cat(correct).float().mean())}

    return evaluate
