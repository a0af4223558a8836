"""The verbs that can be stopped and resumed, tiny: what each reads, how it is typed, and what it makes."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cli_commands import brim

from brim.engine.training import trainer
from brim.segmentation.prediction import stream
from brim.segmentation.scenes import write_cells
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.synthetic import make_sequences

CPU = ["--device", "cpu"]
SHORT_RECORDS = "duration_s = 0.2\nsamples_per_shard = 8\nmax_gdop = 2.5\ntx_power_dbm = 20.0\nmin_receivers = 4\n"


@dataclass(frozen=True)
class Verb:
    """One verb; the words of a command may name folders of the inputs in braces."""

    typed: str  # without --out
    makes: tuple[str, ...]  # the files whose bytes are promised
    another: str = ""  # an option that makes it another run
    named: str = ""  # what is said of it then
    job: dict[str, Any] = field(default_factory=dict)  # its settings as a job
    reads: tuple[str, ...] = ()  # inputs of the job

    def command(self, inputs: Path, out: Path, *more: str | Path) -> list[str]:
        words = [word.format(**{path.name: path for path in inputs.iterdir()}) for word in self.typed.split()]
        return [*words, *CPU, "--out", str(out), *map(str, more)]

    def made(self, out: Path) -> dict[str, str]:
        """Checksums of what it made, by their place."""
        files = sorted(file for pattern in self.makes for file in out.glob(pattern))
        return {file.relative_to(out).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


VERBS = {
    "rf generate": Verb(
        "rf generate --samples 20 --seed 31 --batch-size 4 --config {quick}",
        ("shards/*",),
        "--max-gdop 3",
        "max_gdop",
        {
            **{"num_samples": 20, "seed": 31, "batch_size": 4, "duration_s": 0.2, "samples_per_shard": 8},
            **{"max_gdop": 2.5, "tx_power_dbm": 20.0, "min_receivers": 4},
        },
    ),
    "rf train": Verb(
        "rf train {radio} --epochs 4 --batch-size 8",
        ("train/last/*.safetensors", "train/best/*.safetensors"),
        "--seed 3",
        "seed",
        {"epochs": 4, "batch_size": 8},
        ("radio",),
    ),
    "segment train": Verb(
        "segment train --images {cells}/images --masks {cells}/masks --model unet_tiny --task mask --size 32 "
        "--epochs 2 --batch-size 4 --seed 0",
        ("train/last/*.safetensors", "train/best/*.safetensors"),
        "--seed 5",
        "seed",
        {"model": "unet_tiny", "task": "mask", "size": 32, "epochs": 2, "batch_size": 4, "seed": 0},
        ("cells",),
    ),
    "segment predict": Verb(
        "segment predict {cells}/images --weights {network} --strict --batch-size 1",
        ("*.geojson",),
        job={"strict": True, "batch_size": 1},
        reads=("cells", "network"),
    ),
    "sequence train": Verb(
        "sequence train {corpus} --mode supervised --classifier-epochs 2 --batch-size 16",
        ("weights.safetensors",),
        "--seed 3",
        "seed",
        {"mode": "supervised", "classifier_epochs": 2, "batch_size": 16},
        ("corpus",),
    ),
}


def make_inputs(folder: Path) -> Path:
    """What the verbs read: a dataset, images with masks, a network trained on them, and a corpus."""
    (folder / "quick").write_text(SHORT_RECORDS)
    (folder / "plain").write_text("duration_s = 0.2\nsamples_per_shard = 16\n")
    write_cells(folder / "cells/images", folder / "cells/masks", 6, seed=3, height=64, width=64)
    make_sequences(folder / "sequences", 60, dim=8, classes=3, mean_length=12)
    pack(folder / "sequences", folder / "corpus")
    radio = ["rf", "generate", "--samples", "40", "--seed", "1", "--config", folder / "plain", "--out"]
    with quickly():
        network = VERBS["segment train"].command(
            folder, folder / "network", "--epochs", "8", "--learning-rate", "0.003"
        )
        for words in ([*radio, folder / "radio", *CPU], network):
            ended = brim(*words)
            assert ended.code == 0, ended.err
    return folder


@contextmanager
def quickly() -> Iterator[None]:
    """Every step is told, and no time is spent on measuring the ceiling."""
    slow = trainer.time_step
    with (
        patch.object(trainer, "PROGRESS_S", 0.0),
        patch.object(trainer, "time_step", lambda *a, **k: slow(*a, **{**k, "budget_s": 0.01})),
        patch.object(stream, "CEILING_S", 0.02),
    ):
        yield
