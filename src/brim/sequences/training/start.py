"""Where training on labels starts from: the encoder of another run, if one is given.

Its weights and its normalisation are taken over together: it has learned on frames normalised so. Sequences that are
held out here must not have been trained on there.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from brim.errors import CheckpointError
from brim.sequences.config import SequenceTraining
from brim.sequences.evaluation.load import WEIGHTS, Run, load_run
from brim.sequences.model.network import Encoder
from brim.sequences.training.data import SequenceData
from brim.sequences.training.splits import Split

# dropout and the way the LSTM finds its ends may differ: no weight depends on them
_SHAPE = ("dim", "channels", "kernel", "convolutions", "hidden", "layers", "attention", "embedding", "normalise")


class Start(NamedTuple):
    """An encoder to start from."""

    encoder: Encoder  # on the host
    identity: dict[str, str]  # for run.json, to know it again by


def find_start(config: SequenceTraining, data: SequenceData, found: Split) -> Start | None:
    """The encoder that the config names; one of another shape, or that knows what is held out, is refused."""
    if config.encoder is None:
        return None
    run = load_run(config.encoder)
    _check_shape(run, config.shape(data.dim).as_dict())
    _check_unseen(run, data, found)
    with (run.path / WEIGHTS).open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return Start(run.module.encoder, {"name": Path(config.encoder).resolve().name, "sha256": digest})


def _check_shape(run: Run, wanted: dict[str, Any]) -> None:
    there = run.module.encoder.config.as_dict()
    for name in _SHAPE:
        if there[name] != wanted[name]:
            raise CheckpointError(
                f"encoder={run.path} has {name}={there[name]}, this training has {name}={wanted[name]}; "
                "give a run of the same shape on frames of as many features"
            )


def _check_unseen(run: Run, data: SequenceData, found: Split) -> None:
    if not data.is_of(run.about.get("corpus")):
        return
    kept = set(run.about.get("held_out") or ())
    seen = [data.ids[row] for row in found.held_out.tolist() if data.ids[row] not in kept]
    if seen:
        raise CheckpointError(
            f"encoder={run.path} was trained on {len(seen)} sequences that are held out here, {seen[0]} among them; "
            "train both with the same seed, or with a split in labels.csv"
        )
