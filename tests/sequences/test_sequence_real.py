"""Real sequences: speakers told apart by two vowels, from the data files of aeon, which is not imported."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.sequences import Augmentation, Corpus, SequenceTraining, evaluate, pack, train

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench_sequence_real import find_data, standard_parts, write_folder

DATA = find_data()
needs_data = pytest.mark.skipif(DATA is None, reason="needs the data of aeon: pip install --no-deps aeon==1.6.0")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_data
@pytest.mark.parametrize(
    ("name", "counts", "lengths", "dim", "classes"),
    [("JapaneseVowels", (270, 370), (7, 29), 12, 9), ("PickupGestureWiimoteZ", (50, 50), (29, 361), 1, 10)],
)
def test_real_sequences_are_packed_as_they_are(tmp_path, name, counts, lengths, dim, classes):
    parts = standard_parts(DATA, name)
    pack(write_folder(tmp_path / "npy", parts), tmp_path / "corpus", dtype="float32")

    corpus = Corpus.open(tmp_path / "corpus")

    assert (corpus.split.count("train"), corpus.split.count("test")) == counts
    assert (int(corpus.lengths.min()), int(corpus.lengths.max())) == lengths
    assert (corpus.dim, len(corpus.classes)) == (dim, classes)
    for row, file in enumerate(corpus.ids):
        part, index = Path(file).stem.split("_")
        expected = parts[part][int(index)]
        assert corpus.classes[corpus.labels[row]] == expected.label
        np.testing.assert_array_equal(corpus.sequence(row).numpy(), expected.frames)


@needs_data
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
