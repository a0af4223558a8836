"""Real sequences: speakers told apart by two vowels, from the data files of aeon, which is not imported."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.sequences import Augmentation, Corpus, SequenceTraining, evaluate, pack, train

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench_sequence_real import Prepared, Series, find_data, fold_parts, read_ts, standard_parts, write_folder

DATA = find_data()
needs_data = pytest.mark.skipif(DATA is None, reason="needs the data of aeon: pip install --no-deps aeon==1.6.0")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_ts_file_is_read_channel_by_channel(tmp_path):
    (tmp_path / "a.ts").write_text("# about\n@problemName a\n@data\n1,2,3:4,5,6:one\n\n7:8:two\n")

    first, second = read_ts(tmp_path / "a.ts")

    np.testing.assert_array_equal(first.frames, [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(second.frames, [[7, 8]])
    assert (first.label, second.label) == ("one", "two")


def test_folds_cover_the_training_part_once_and_every_class_each_time():
    series = [Series(frames=np.full((1, 1), number, np.float32), label=str(number % 3)) for number in range(15)]

    folds = [fold_parts(series, fold) for fold in range(5)]

    assert sorted(float(one.frames[0, 0]) for fold in folds for one in fold["test"]) == list(range(15))
    assert all({one.label for one in fold["test"]} == {"0", "1", "2"} for fold in folds)
    assert all(len(fold["train"]) == 12 for fold in folds)


def test_repeated_folds_differ_and_still_cover_the_training_part_once():
    series = [Series(frames=np.full((1, 1), number, np.float32), label=str(number % 3)) for number in range(15)]

    def tested(repeat: int) -> list[list[float]]:
        return [
            [float(one.frames[0, 0]) for one in fold_parts(series, fold, repeat=repeat)["test"]] for fold in range(5)
        ]

    assert sorted(number for fold in tested(1) for number in fold) == list(range(15))
    assert tested(1) == tested(1) != tested(0)


def test_resampled_frames_keep_their_ends_and_tell_the_length():
    prepared = Prepared(samples=9, stack=3, length=True)

    frames = prepared.frames(np.array([[0.0], [2.0], [4.0]], np.float32))

    np.testing.assert_allclose(frames[:, :3].flatten(), np.linspace(0, 4, 9))
    np.testing.assert_allclose(frames[:, 3], np.log(3))


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
