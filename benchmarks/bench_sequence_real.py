"""How well does training on sequences do on real ones, beside published figures and MiniRocket?

JapaneseVowels (9 speakers, 12 channels, 7 to 29 frames) and PickupGestureWiimoteZ (10 people, 1 channel, 29 to 361
frames) come with aeon, of which only the data files are read: aeon itself needs a NumPy older than ours.

    pip install --no-deps aeon==1.6.0
    python benchmarks/bench_sequence_real.py tune     # cross-validation on the training part alone
    python benchmarks/bench_sequence_real.py score    # what was chosen, on the standard test part

`tune` sees only files of the training part: the others are not even read. Folds are stratified and the same for all
candidates. The best mean accuracy wins, then the smallest cross entropy. `score` trains once for each seed on the whole
training part and scores the last weights, so nothing is chosen by the test part. --aeon-python names an interpreter
that has aeon with all it needs; then MiniRocket runs beside it.
"""

import argparse
import csv
import importlib.util
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brim.sequences import (
    Augmentation,
    Corpus,
    EncoderShape,
    SequenceReport,
    SequenceTraining,
    evaluate,
    load_run,
    pack,
    train,
)
from page import machine, table, tell

FOLDS = 5
NEAR = 0.015  # accuracy that may be missing to the best published
Array = np.ndarray[Any, np.dtype[np.float32]]
Json = dict[str, Any]


# Data


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One sequence: frames (T, D) and the name of its class."""

    frames: Array
    label: str


def find_data() -> Path | None:
    """The folder of data files of aeon, which is not imported; None where it is not installed."""
    spec = importlib.util.find_spec("aeon")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "datasets/data"
    return folder if folder.is_dir() else None


def read_ts(file: Path) -> list[Series]:
    """The sequences of a .ts file: channels apart by colons, then the class; lines with # or @ come first."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    found = []
    for line in lines:
        if line and line[0] not in "#@":
            *channels, label = line.split(":")
            values = [np.array(channel.split(","), np.float32) for channel in channels]
            found.append(Series(frames=np.stack(values, 1), label=label))
    return found


def write_folder(out: Path, parts: Mapping[str, Sequence[Series]]) -> Path:
    """Files of sequences and labels.csv with the split; parts are "train" and "test"."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "labels.csv").open("w", newline="", encoding="utf-8") as opened:
        lines = csv.writer(opened)
        lines.writerow(("file", "label", "split"))
        for part, series in parts.items():
            for index, one in enumerate(series):
                name = f"{part}_{index:04d}.npy"
                np.save(out / name, one.frames)
                lines.writerow((name, one.label, part))
    return out


def standard_parts(data: Path, name: str) -> dict[str, list[Series]]:
    """The split everybody scores on."""
    return {part: read_ts(data / name / f"{name}_{part.upper()}.ts") for part in ("train", "test")}


def fold_parts(series: Sequence[Series], fold: int, folds: int = FOLDS, repeat: int = 0) -> dict[str, list[Series]]:
    """A fold of the training part in place of the test part; every class gives each fold its share.

    Every repeat has other folds.
    """
    seen: dict[str, int] = {}
    parts: dict[str, list[Series]] = {"train": [], "test": []}
    order = np.random.default_rng(repeat).permutation(len(series)) if repeat else range(len(series))
    for one in (series[row] for row in order):
        count = seen.get(one.label, 0)
        seen[one.label] = count + 1
        parts["test" if count % folds == fold else "train"].append(one)
    return parts


# Preparing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a frame is."""

    samples: int | None = None  # every sequence resampled to so many, by straight lines; None: as it is
    stack: int = 1  # samples side by side in one frame
    times: bool = False  # add how long ago the sequence began and how long it will last, in hundreds of samples
    length: bool = False  # add the logarithm of the number of samples
    summary: bool = False  # add mean, spread, least and greatest value of the whole sequence

    def frames(self, series: Array) -> Array:
        """(T, D) to fewer and wider frames; the last one repeats the last sample where some are missing."""
        length = len(series)
        if self.samples is not None:
            at = np.linspace(0, length - 1, self.samples)
            series = np.stack([np.interp(at, np.arange(length), channel) for channel in series.T], 1)
        count = -(-len(series) // self.stack)
        whole = np.concatenate([series, np.repeat(series[-1:], count * self.stack - len(series), 0)])
        parts = [whole.reshape(count, -1)]
        if self.times:
            ago = np.arange(count)
            parts.append(np.stack([ago, count - ago], 1) * self.stack / 100)
        if self.length:
            parts.append(np.full((count, 1), np.log(length)))
        if self.summary:
            values = np.concatenate([series.mean(0), series.std(0), series.min(0), series.max(0)])
            parts.append(np.tile(values, (count, 1)))
        return np.concatenate(parts, 1).astype(np.float32)

    def parts(self, parts: Mapping[str, Sequence[Series]]) -> dict[str, list[Series]]:
        """The same for all sequences."""
        return {name: [replace(one, frames=self.frames(one.frames)) for one in each] for name, each in parts.items()}


# Candidates: what cross-validation may choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A recipe for supervised training; fields of SequenceTraining, of its model and of its augmentation."""

    prepared: Prepared = field(default_factory=Prepared)
    epochs: int = 40
    batch_size: int = 16
    learning_rate: float = 3e-3
    label_smoothing: float = 0.0
    width: int = 64  # of convolutions, LSTM directions and embedding
    kernel: int = 5
    dropout: float = 0.3
    augmentation: Mapping[str, Any] | None = None
    members: int = 1  # networks that answer together
    unlabelled_epochs: int = 0  # of an encoder that learns without labels first

    def fit(self, corpus: Path, run: Path, seed: int) -> SequenceReport:
        """Train on the training part of a corpus."""
        if not self.unlabelled_epochs:
            return train(corpus, run, self.training(seed), device="cpu")
        first = replace(self.self_training(seed), iterations=1, encoder_epochs=self.unlabelled_epochs)
        encoder = run.with_name(f"{run.name}-encoder")
        train(corpus, encoder, replace(first, classifier_epochs=1, learning_rate=3e-3), device="cpu")
        return train(corpus, run, replace(self.training(seed), encoder=str(encoder)), device="cpu")

    def training(self, seed: int) -> SequenceTraining:
        """What brim is asked for."""
        return SequenceTraining(
            mode="supervised", classifier_epochs=self.epochs, batch_size=self.batch_size, seed=seed, val_fraction=0.0,
            members=self.members,
            learning_rate=self.learning_rate, label_smoothing=self.label_smoothing, model=self.model(),
            augmentation=None if self.augmentation is None else Augmentation(**{**UNCHANGED, **self.augmentation}),
        )  # fmt: skip

    def self_training(self, seed: int) -> SequenceTraining:
        """The same network without labels; all else as brim does it by default."""
        return SequenceTraining(mode="self", batch_size=64, seed=seed, model=self.model())

    def model(self) -> EncoderShape:
        return EncoderShape(
            channels=self.width, hidden=self.width, embedding=self.width, attention=32, layers=1,
            kernel=self.kernel, dropout=self.dropout,
        )  # fmt: skip


UNCHANGED: Json = {
    "crop": 0.0, "noise": 0.0, "time_masks": 0, "time_width": 0.0, "feature_masks": 0, "feature_width": 0.0,
}  # fmt: skip
USUAL = {
    "crop": 0.2, "noise": 0.1, "time_masks": 2, "time_width": 0.1, "feature_masks": 2, "feature_width": 0.1,
}  # fmt: skip
CROPPED = {"crop": 0.2, "noise": 0.3, "time_masks": 1, "time_width": 0.2}
MASKED = {"noise": 0.3, "time_masks": 2, "time_width": 0.2}
STACKED = Prepared(stack=8, length=True)
VOWELS = Candidate()
GESTURES = Candidate(prepared=STACKED, epochs=80, batch_size=8, width=32, kernel=3, augmentation={"noise": 0.3})
RESAMPLED = replace(GESTURES, prepared=Prepared(samples=128, stack=8, length=True), learning_rate=5e-3)

CANDIDATES: dict[str, dict[str, Candidate]] = {
    "JapaneseVowels": {
        "width 64, lr 3e-3": VOWELS,
        "width 64, lr 3e-3, smoothing 0.1": replace(VOWELS, label_smoothing=0.1),
        "width 64, lr 3e-3, augmented": replace(VOWELS, augmentation=USUAL),
        "width 64, lr 1e-3": replace(VOWELS, learning_rate=1e-3),
        "width 64, lr 1e-3, augmented": replace(VOWELS, learning_rate=1e-3, augmentation=USUAL),
        "width 64, lr 5e-4": replace(VOWELS, learning_rate=5e-4),
        "width 128, lr 1e-3": replace(VOWELS, learning_rate=1e-3, width=128),
        "width 128, lr 5e-4": replace(VOWELS, learning_rate=5e-4, width=128),
    },
    "PickupGestureWiimoteZ": {
        "lr 3e-3": GESTURES,
        "lr 2e-3, 100 epochs": replace(GESTURES, learning_rate=2e-3, epochs=100),
        "lr 5e-3": replace(GESTURES, learning_rate=5e-3),
        "lr 1e-3": replace(GESTURES, learning_rate=1e-3),
        "lr 1e-3, width 64": replace(GESTURES, learning_rate=1e-3, width=64),
        "width 64": replace(GESTURES, width=64),
        "160 epochs": replace(GESTURES, epochs=160),
        "kernel 1": replace(GESTURES, kernel=1),
        "kernel 5": replace(GESTURES, kernel=5),
        "kernel 5, no length": replace(GESTURES, kernel=5, prepared=Prepared(stack=8)),
        "kernel 5, times instead of length": replace(GESTURES, kernel=5, prepared=Prepared(stack=8, times=True)),
        "kernel 5, masked": replace(GESTURES, kernel=5, augmentation=MASKED),
        "kernel 5, smoothing 0.1": replace(GESTURES, kernel=5, label_smoothing=0.1),
        "kernel 5, dropout 0.5": replace(GESTURES, kernel=5, dropout=0.5),
        "dropout 0.1": replace(GESTURES, dropout=0.1),
        "cropped": replace(GESTURES, augmentation=CROPPED),
        "summary": replace(GESTURES, prepared=replace(STACKED, summary=True)),
        "lr 5e-3, 5 members": replace(GESTURES, learning_rate=5e-3, members=5),
        "lr 5e-3, encoder learned without labels": replace(GESTURES, learning_rate=5e-3, unlabelled_epochs=100),
        "resampled, lr 5e-3": RESAMPLED,
        "resampled, lr 5e-3, 5 members": replace(RESAMPLED, members=5),
        "resampled, lr 5e-3, encoder learned without labels": replace(RESAMPLED, unlabelled_epochs=100),
        "resampled, lr 5e-3, encoder learned without labels, 5 members": replace(
            RESAMPLED, unlabelled_epochs=100, members=5
        ),
    },
}
CHOSEN = {"JapaneseVowels": "width 128, lr 1e-3", "PickupGestureWiimoteZ": "lr 5e-3, 5 members"}
PUBLISHED = {
    "JapaneseVowels": (0.986, "best published: signature kernels"),
    "PickupGestureWiimoteZ": (0.84, "best published: MultiRocket"),
}
MINIROCKET = """
import json, sys
from aeon.classification.convolution_based import MiniRocketClassifier
from aeon.datasets import load_from_ts_file

(known, labels), (asked, truth) = map(load_from_ts_file, sys.argv[2:])
models = (MiniRocketClassifier(random_state=seed, n_jobs=1) for seed in range(int(sys.argv[1])))
print(json.dumps([float((model.fit(known, labels).predict(asked) == truth).mean()) for model in models]))
"""


# Training and scores


def make_corpus(work: Path, parts: Mapping[str, Sequence[Series]], prepared: Prepared) -> Path:
    """A packed corpus with the split given."""
    pack(write_folder(work / "npy", prepared.parts(parts)), work / "corpus", dtype="float32")
    return work / "corpus"


def predicted(run: Path, corpus: Path) -> tuple[Any, Any]:
    """Probabilities (n, K) float64 and labels (n,) of the sequences held out, each encoded by itself."""
    opened, module = Corpus.open(corpus), load_run(run).module
    rows = [row for row, part in enumerate(opened.split) if part == "test"]
    with torch.inference_mode():
        logits = [module(frames[None], torch.tensor([len(frames)])) for frames in map(opened.sequence, rows)]
    return torch.cat(logits).double().softmax(1).numpy(), opened.labels[rows].numpy()


def cross_validate(series: Sequence[Series], candidate: Candidate, work: Path, repeats: int) -> Json:
    """Accuracy and cross entropy on each fold of the training part, for every repeat."""
    accuracies, losses = [], []
    for number in range(FOLDS * repeats):
        place, (repeat, fold) = work / str(number), divmod(number, FOLDS)
        corpus = make_corpus(place, fold_parts(series, fold, repeat=repeat), candidate.prepared)
        candidate.fit(corpus, place / "run", number)
        chances, labels = predicted(place / "run", corpus)
        accuracies.append(float((chances.argmax(1) == labels).mean()))
        losses.append(float(-np.log(chances[np.arange(len(labels)), labels] + 1e-12).mean()))
    return {"accuracy": statistics.mean(accuracies), "loss": statistics.mean(losses), "folds": accuracies}


def tune(data: Path, name: str, repeats: int, only: str | None = None) -> Iterator[Json]:
    """Every candidate of a data set, or one of them, by its cross-validated scores."""
    series = read_ts(data / name / f"{name}_TRAIN.ts")
    for title, candidate in CANDIDATES[name].items():
        if only in (None, title):
            with tempfile.TemporaryDirectory() as work:
                yield {"data": name, "candidate": title, **cross_validate(series, candidate, Path(work), repeats)}


def score(data: Path, name: str, seeds: int) -> Json:
    """What was chosen on the standard test part: with labels, all seeds together, and without labels."""
    candidate, found, chances = CANDIDATES[name][CHOSEN[name]], [], []
    unlabelled: list[Json] = []
    with tempfile.TemporaryDirectory() as work:
        corpus = make_corpus(Path(work), standard_parts(data, name), candidate.prepared)
        for seed in range(seeds):
            run, other = Path(work) / f"run-{seed}", Path(work) / f"self-{seed}"
            candidate.fit(corpus, run, seed)
            found.append(evaluate(run, corpus, device="cpu").as_dict()["accuracy"])
            chance, labels = predicted(run, corpus)
            chances.append(chance)
            unlabelled.append(dict(train(corpus, other, candidate.self_training(seed), device="cpu").scores or {}))
            tell(f"{name} seed {seed}: {found[-1]:.4f}, without labels {unlabelled[-1]}")
    together = float((np.mean(chances, 0).argmax(1) == labels).mean())
    return {"data": name, "chosen": CHOSEN[name], "accuracy": found, "together": together, "self": unlabelled}


def minirocket(python: Path, data: Path, name: str, seeds: int) -> list[float]:
    """Accuracies of aeon's, in an environment of its own, on the equal-length files: it takes no others."""
    files = [str(data / name / f"{name}_eq_{part}.ts") for part in ("TRAIN", "TEST")]
    answer = subprocess.run([python, "-c", MINIROCKET, str(seeds), *files], capture_output=True, text=True, check=True)
    found: list[float] = json.loads(answer.stdout.splitlines()[-1])
    return found


# Telling


def told(values: Sequence[float]) -> str:
    """Mean, spread and range."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f} ({min(values):.3f}–{max(values):.3f})"


def render(results: Sequence[Json]) -> str:
    """All tables."""
    rows = [(found["data"], *row) for found in results for row in with_labels(found)]
    apart = [
        (found["data"], name, told([one[name] for one in found["self"]]))
        for found in results
        for name in found["self"][0]
    ]
    header = ("data", "way", "accuracy", "within 1.5 points")
    first = table("Supervised: accuracy on the standard test part", header, rows)
    return f"{first}\n{table('Without labels, on the test part', ('data', 'score', 'mean ± s.d. (range)'), apart)}"


def with_labels(found: Json) -> Iterator[tuple[str, str, str]]:
    """Rows of a data set: way, accuracy, and whether that is near enough to the best published."""
    best, source = PUBLISHED[found["data"]]
    single, together = found["accuracy"], found["together"]
    count = CANDIDATES[found["data"]][found["chosen"]].members
    members = f"{count} members, " if count > 1 else ""
    yield f"brim, {members}{len(single)} seeds", told(single), verdict(statistics.mean(single), best - NEAR)
    yield "brim, all seeds together (mean of probabilities)", f"{together:.3f}", verdict(together, best - NEAR)
    if "minirocket" in found:
        yield f"MiniRocket, {len(found['minirocket'])} seeds", told(found["minirocket"]), ""
    yield source, f"{best:.3f}", ""


def verdict(value: float, bar: float) -> str:
    """Whether a bar is met, and by how much not."""
    return "yes" if value >= bar else f"no, {100 * (bar - value):.1f} points short"


def main() -> None:
    """Run what was asked for and print tables; figures also as JSON."""
    parser = argparse.ArgumentParser(description="Accuracy on real sequences.")
    parser.add_argument("part", choices=("tune", "score"))
    parser.add_argument("--data", type=Path, default=find_data(), help="aeon's datasets/data folder")
    parser.add_argument("--only", choices=tuple(CANDIDATES), help="one data set")
    parser.add_argument("--candidate", help="tune: one of them, by its name")
    parser.add_argument("--repeats", type=int, default=1, help="tune: of the cross-validation, each with other folds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--aeon-python", type=Path, help="an interpreter with aeon, for MiniRocket")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    asked = parser.parse_args()
    if asked.data is None:
        parser.error("aeon's data files are not here; pip install --no-deps aeon==1.6.0, or give --data")
    torch.set_num_threads(1)
    found = []
    for name in [asked.only] if asked.only else CANDIDATES:
        if asked.part == "tune":
            for one in tune(asked.data, name, asked.repeats, asked.candidate):
                tell(json.dumps(one))
                found.append(one)
            continue
        found.append(score(asked.data, name, asked.seeds))
        if asked.aeon_python:
            found[-1]["minirocket"] = minirocket(asked.aeon_python, asked.data, name, asked.seeds)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(torch.device("cpu"), ""), "found": found}, indent=1))
    print(render(found) if asked.part == "score" else rank(found))
    print(json.dumps(found))


def rank(found: Sequence[Json]) -> str:
    """Candidates, the best first."""
    order = sorted(found, key=lambda one: (one["data"], -round(one["accuracy"], 6), one["loss"]))
    rows = [(one["data"], one["candidate"], f"{one['accuracy']:.4f}", f"{one['loss']:.3f}") for one in order]
    return table("Cross-validation on the training part", ("data", "candidate", "accuracy", "cross entropy"), rows)


if __name__ == "__main__":
    main()
