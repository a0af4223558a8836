"""Real sequences: speakers told apart by two vowels, from the data files of aeon, which is not imported."""

import sys
from pathlib import Path

import pytest
import torch

from brim.sequences import Augmentation, SequenceTraining, evaluate, pack, train

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench_sequence_real import find_data, standard_parts, write_folder

torch.set_num_threads(1)
DATA = find_data()


@pytest.mark.skipif(DATA is None, reason="needs the data of aeon: pip install --no-deps aeon==1.6.0")
def test_speakers_are_told_apart_on_the_standard_split(tmp_path):
    pack(write_folder(tmp_path / "npy", standard_parts(DATA, "JapaneseVowels")), tmp_path / "corpus", dtype="float32")
    model = {"channels": 64, "hidden": 64, "embedding": 64, "attention": 32, "layers": 1, "dropout": 0.3}
    config = SequenceTraining(
        mode="supervised", classifier_epochs=20, batch_size=16, learning_rate=3e-3, val_fraction=0.0, model=model,
        augmentation=Augmentation(),
    )  # fmt: skip

    report = train(tmp_path / "corpus", tmp_path / "run", config, device="cpu")
    found = evaluate(tmp_path / "run", tmp_path / "corpus", device="cpu").as_dict()

    assert found["items"] == 370
    assert found["accuracy"] >= 0.93
    assert found["accuracy"] == report.scores["accuracy"]
