"""Requests for classes: what `evaluate` predicts, whatever else is in the batch."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.engine.batching.servable import Answer, Payload
from brim.errors import DatasetError, UnsupportedType
from brim.sequences.batches import SequenceBatches
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus import open_sequences
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.synthetic import make_sequences
from brim.sequences.evaluation.encode import encode
from brim.sequences.evaluation.runs import load_run
from brim.sequences.evaluation.serving import ClassifyServable, padded
from brim.sequences.training.run import train

torch.set_num_threads(1)  # small batches: a second thread only competes

CPU = torch.device("cpu")
TINY = {"channels": 16, "hidden": 8, "attention": 8, "embedding": 16, "convolutions": 1}
SUPERVISED = SequenceTraining(
    mode="supervised", classifier_epochs=2, batch_size=16, model=TINY, learning_rate=5e-3, num_workers=0
)
CONFIGS = {
    "supervised": SUPERVISED,
    "self": replace(SUPERVISED, mode="self", iterations=1, encoder_epochs=1, classifier_epochs=1),
    "committee": replace(SUPERVISED, members=2, classifier_epochs=1),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    make_sequences(path / "npy", 60, dim=8, classes=3, mean_length=30)
    pack(path / "npy", path / "corpus", dtype="float32")
    for name, config in CONFIGS.items():
        train(path / "corpus", path / name, config, device="cpu")
    return path


@pytest.fixture(scope="module")
def servable(made: Path) -> ClassifyServable:
    return ClassifyServable(made / "supervised", CPU)


def npy(array: np.ndarray, **options: bool) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def run(servable: ClassifyServable, payloads: list[Payload], size: int = 32) -> list[Answer]:
    """Answers of requests that share batches wherever they may."""
    items = [servable.decode(payload) for payload in payloads]
    outputs: dict[int, object] = {}
    for key in dict.fromkeys(item.key for item in items):
        waiting = [item for item in items if item.key == key]
        while waiting:
            batch, waiting = waiting[:size], waiting[size:]
            found = servable.collect(servable.forward([item.parts[0] for item in batch]))
            outputs |= {id(item): output for item, output in zip(batch, found, strict=True)}
    return [servable.finish(item, [outputs[id(item)]]) for item in items]


def payloads_of(made: Path) -> list[Payload]:
    """The corpus's own files, in its order."""
    data = open_sequences(made / "corpus")
    return [Payload(memoryview((made / "npy" / name).read_bytes()), name) for name in data.ids]


# What is answered


@pytest.mark.parametrize("name", list(CONFIGS))
def test_an_answer_is_what_evaluation_predicts(made, name):
    servable = ClassifyServable(made / name, CPU)
    data, loaded = open_sequences(made / "corpus"), load_run(made / name)
    with SequenceBatches(data, SUPERVISED, CPU) as batches:
        source = batches.view(torch.arange(len(data.ids)), shuffle=False)
        expected = encode(loaded.module, source, CPU).prediction.tolist()

    found = [json.loads(one.body) for one in run(servable, payloads_of(made))]

    names = loaded.about["classes"] if loaded.about["mode"] == "supervised" else [str(n) for n in range(3)]
    assert [one["class"] for one in found] == [names[number] for number in expected]
    for one in found:
        assert list(one) == ["class", "confidence", "probabilities"]
        assert list(one["probabilities"]) == list(names)
        assert one["confidence"] == max(one["probabilities"].values())
        assert sum(one["probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_a_batch_answers_as_each_alone(made, servable):
    payloads = payloads_of(made)[:30]

    together = run(servable, payloads)

    assert len({servable.inspect(payload).key for payload in payloads}) > 2
    for payload, found in zip(payloads, together, strict=True):
        alone = json.loads(run(servable, [payload])[0].body)["probabilities"]
        assert json.loads(found.body)["probabilities"] == pytest.approx(alone, abs=5e-6)


def test_memory_of_a_payload_may_be_used_again(servable):
    data = bytearray(npy(np.random.default_rng(0).random((20, 8), np.float32)))
    item = servable.decode(Payload(memoryview(data), "a"))
    expected = item.parts[0].frames.clone()
    data[:] = bytes(len(data))

    assert torch.equal(item.parts[0].frames, expected)


# What is refused


REFUSED = [
    (npy(np.zeros((5, 9), np.float32)), "9 features.*trained on 8"),
    (npy(np.array([[{}] * 8]), allow_pickle=True), "Python objects"),
    (npy(np.zeros((5, 8), np.float32))[:-1], "truncated"),
]


@pytest.mark.parametrize(("data", "fault"), REFUSED)
def test_a_header_that_cannot_be_used_is_refused_at_once(servable, data, fault):
    for step in (servable.inspect, servable.decode):
        with pytest.raises(DatasetError, match=rf"^a\.npy .*{fault}"):
            step(Payload(data, "a.npy"))


def test_values_that_are_or_become_no_numbers_and_other_files_are_refused(servable):
    values = np.zeros((5, 8), np.float32)
    values[3, 2] = np.nan
    large = servable.decode(Payload(npy(np.full((5, 8), 1e38, np.float32)), "a.npy"))

    with pytest.raises(UnsupportedType, match=r"^a\.txt is not an \.npy file"):
        servable.inspect(Payload(b"\x89PNG\r\n\x1a\n", "a.txt"))
    with pytest.raises(DatasetError, match=r"a\.npy frame 3 holds nan"):
        servable.decode(Payload(npy(values), "a.npy"))
    with pytest.raises(DatasetError, match=r"a\.npy is not finite"):
        servable.finish(large, [torch.full((3,), torch.nan)])


# Shapes


@pytest.mark.parametrize("length", [1, 17, 1000])
def test_the_header_tells_what_decoding_finds(servable, length):
    payload = Payload(npy(np.zeros((length, 8), np.float32)), "a")

    shape, item = servable.inspect(payload), servable.decode(payload)

    assert (shape.key, shape.parts) == (item.key, len(item.parts))
    assert item.parts[0].frames.shape == (padded(length), 8)


def test_lengths_are_few_and_not_far_above():
    assert [padded(length) for length in (1, 16, 17, 24, 25, 33, 49, 1000)] == [16, 16, 24, 24, 32, 48, 64, 1024]


def test_long_sequences_run_in_smaller_batches(servable, monkeypatch):
    monkeypatch.setattr("brim.sequences.evaluation.serving.MAX_VALUES", 8 * 16 * 8)

    short, long = (servable.inspect(Payload(npy(np.zeros((n, 8), np.float32)), "a")) for n in (16, 1000))

    assert short.sizes[-1] == 8
    assert list(long.sizes) == [1]


# Loading
