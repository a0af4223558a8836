"""From a folder of .npy sequences to a scored classifier and an embedding for each sequence.

python examples/sequence_classify.py [DIR]     about ten seconds on one CPU core; a second run does not train again
"""

import csv
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from brim.sequences import EncoderShape, SequenceTraining, embed, evaluate, make_sequences, pack, train

SMALL = EncoderShape(channels=64, hidden=32, attention=32, embedding=32)  # the defaults suit a GPU


def main(out: Path) -> None:
    """Work in `out`: pack, train on the labels, score the held-out sequences, compare nearest neighbours."""
    folder, corpus, run = out / "features", out / "corpus", out / "run"
    if not folder.exists():
        write_features(folder)

    packed = pack(folder, corpus, resume=True)  # continues an existing corpus
    print(f"{packed.items} sequences, {packed.frames} frames of {packed.dim} features, labels from labels.csv")

    config = SequenceTraining(
        mode="supervised", classifier_epochs=8, batch_size=16, learning_rate=0.005, model=SMALL, seed=1
    )
    report = train(corpus, run, config, resume=True)
    print(f"trained at {report.samples_per_s:.0f} samples/s, {report.padding_share or 0:.0%} of the frames padding")

    scored = evaluate(run, corpus)
    print(f"accuracy {scored.accuracy:.3f} on {scored.items} held-out sequences")

    embed(run, corpus, out / "vectors.safetensors")
    print(f"nearest neighbours have the right label for {neighbours(out / 'vectors.safetensors', run):.0%} of them")


def write_features(folder: Path) -> None:
    """Write example features, (T, 12) each with varying T, and a labels.csv that marks every fifth file as test."""
    make_sequences(folder, count=150, dim=12, classes=3, seed=3, mean_length=30)
    files = sorted(folder.rglob("*.npy"))
    rows = [(str(file.relative_to(folder)), file.parent.name, "test" if k % 5 == 0 else "train")
            for k, file in enumerate(files)]  # fmt: skip
    with (folder / "labels.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([("file", "label", "split"), *rows])


def neighbours(vectors: Path, run: Path) -> float:
    """Share of the held-out sequences whose nearest training sequence has the same label."""
    with safe_open(vectors, "pt") as file:
        embedding, label = file.get_tensor("embedding"), file.get_tensor("label")
        ids = json.loads(file.metadata()["ids"])
    held = set(json.loads((run / "run.json").read_text())["held_out"])
    test = torch.tensor([name in held for name in ids])
    nearest = torch.cdist(embedding[test], embedding[~test]).argmin(1)
    return float((label[~test][nearest] == label[test]).double().mean())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sequence-example"))
