"""Trained runs: scores on what they have not seen, embeddings in a file, answers to requests; and statistics."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import brim
from brim.engine.batching import Payload
from brim.engine.device.memory import inject_oom
from brim.errors import CheckpointError, ConfigError, DatasetError, StorageError, UnsupportedType
from brim.sequences import Corpus, SequenceTraining, embed, evaluate, load_run, make_sequences, pack, train
from brim.sequences.batches import SequenceBatches
from brim.sequences.corpus import open_sequences
from brim.sequences.evaluation.encode import encode, measure
from brim.sequences.evaluation.scores import probe_accuracy
from brim.sequences.evaluation.scoring import project
from brim.sequences.evaluation.serving import ClassifyServable, padded

torch.set_num_threads(1)  # small batches: a second thread only competes

CPU = torch.device("cpu")
TINY = {"channels": 16, "hidden": 8, "attention": 8, "embedding": 16, "convolutions": 1}
SUPERVISED = SequenceTraining(
    mode="supervised", classifier_epochs=10, batch_size=16, model=TINY, learning_rate=1e-2, num_workers=0
)
CONFIGS = {
    "supervised": SUPERVISED,
    "self": replace(SUPERVISED, mode="self", iterations=1, encoder_epochs=1, classifier_epochs=1),
    "committee": replace(SUPERVISED, members=2, classifier_epochs=1),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, its corpus, another corpus of other sequences, and runs on the first."""
    path = tmp_path_factory.mktemp("made")
    make_sequences(path / "npy", 60, dim=8, classes=3, mean_length=12)
    make_sequences(path / "npy-other", 30, dim=8, classes=3, mean_length=12, seed=1)
    for name in ("npy", "npy-other"):
        pack(path / name, path / name.replace("npy", "corpus"))
    for name, config in CONFIGS.items():
        report = train(path / "corpus", path / name, config, device="cpu")
        (path / f"{name}.json").write_text(json.dumps(report.scores))
    return path


def relabelled(made: Path, out: Path, names: dict[str, str]) -> Path:
    """The other corpus with other names of its classes."""
    files = sorted((made / "npy-other").rglob("*.npy"))
    lines = [f"{file.parent.name}/{file.name},{names[file.parent.name]}" for file in files]
    (out / "labels.csv").write_text("\n".join(["file,label", *lines]))
    pack(made / "npy-other", out / "corpus", labels=out / "labels.csv")
    return out / "corpus"


# Scores


def test_a_run_is_loaded_by_its_directory_alone(made):
    loaded = brim.load_run(made / "supervised", device="cpu")
    evaluation = evaluate(made / "supervised", made / "corpus", device="cpu")
    file = next((made / "npy").rglob("*.npy"))

    found = loaded.predict(np.load(file))
    assert found == loaded.predict([file])[0]
    assert sum(found["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    assert loaded.metrics["accuracy"] == evaluation.accuracy
    assert loaded.config["mode"] == "supervised"
    table = evaluation.to_pandas()
    assert list(table.index) == evaluation.classes
    assert table["sequences"].sum() == evaluation.items
    with pytest.raises(ConfigError, match=r"nowhere\.npy cannot be read"):
        loaded.predict("nowhere.npy")


def test_on_its_own_corpus_a_run_is_scored_on_what_was_held_out(made):
    found = evaluate(made / "supervised", made / "corpus", device="cpu").as_dict()

    assert found["items"] == 12
    assert found["accuracy"] == json.loads((made / "supervised.json").read_text())["accuracy"]
    assert found["ari"] is found["nmi"] is found["matched_accuracy"] is None


def test_clusters_have_no_accuracy_but_scores_of_their_own(made):
    found = evaluate(made / "self", made / "corpus", device="cpu").as_dict()

    trained = json.loads((made / "self.json").read_text())
    assert {name: value for name, value in found.items() if value is not None} == {"items": 12} | {
        name: trained[name] for name in ("ari", "nmi", "matched_accuracy")
    }


def test_the_same_sequences_packed_otherwise_are_still_the_same(made, tmp_path):
    pack(made / "npy", tmp_path / "wide", dtype="float32")

    assert evaluate(made / "supervised", tmp_path / "wide", device="cpu").items == 12
    assert evaluate(made / "supervised", made / "npy", device="cpu").items == 12  # not packed at all


def test_classes_are_known_by_their_names_not_their_numbers_and_scores_are_of_their_confusion(made, tmp_path):
    names = {"class_0": "class_2", "class_1": "class_1", "class_2": "class_2"}  # numbered 0 and 1 there
    loaded, data = load_run(made / "supervised"), open_sequences(made / "corpus-other")
    told = []
    for row in range(30):
        frames = data.sequence(row).float()[None]
        told.append(int(loaded.module(frames, torch.tensor([frames.shape[1]])).argmax()))
    table = np.zeros((3, 3), int)
    np.add.at(table, ([int(names[data.classes[label]][-1]) for label in data.labels.tolist()], told), 1)

    found = evaluate(made / "supervised", relabelled(made, tmp_path, names), device="cpu")

    recall, both = table.diagonal()[1:] / table.sum(1)[1:], table.sum(1) + table.sum(0)
    assert (found.items, found.confusion, found.classes) == (30, table.tolist(), ["class_0", "class_1", "class_2"])
    assert found.accuracy == pytest.approx(table.trace() / 30)
    assert found.uar == pytest.approx(recall.mean())
    assert found.macro_f1 == pytest.approx((2 * table.diagonal() / both).mean())
    assert found.per_class["recall"] == [None, *map(pytest.approx, recall)]
    assert found.per_class["sequences"] == table.sum(1).tolist()


def test_longer_sequences_than_a_run_was_trained_on_can_be_scored(made, tmp_path):
    longest = int(Corpus.open(made / "corpus").lengths.max())
    make_sequences(tmp_path / "npy", 12, dim=8, classes=3, mean_length=2 * longest, seed=3)
    config = replace(SUPERVISED, classifier_epochs=1, max_frames=longest + 8)
    train(made / "corpus", tmp_path / "run", config, device="cpu")

    assert evaluate(tmp_path / "run", tmp_path / "npy", device="cpu").items == 12


def test_what_cannot_be_scored_is_refused(made, tmp_path):
    np.save(tmp_path / "one.npy", np.zeros((4, 8), np.float32))
    pack(tmp_path, tmp_path / "unlabelled")
    make_sequences(tmp_path / "wide", 8, dim=9, classes=2, mean_length=6)
    pack(tmp_path / "wide", tmp_path / "wide-corpus")
    (tmp_path / "new").mkdir()
    strange = relabelled(made, tmp_path / "new", {"class_0": "class_0", "class_1": "class_1", "class_2": "cat"})

    for corpus, match in (
        (tmp_path / "unlabelled", "no labels to score against"),
        (tmp_path / "wide-corpus", "has 9 features, .* was trained on 8"),
        (strange, "has the class 'cat'"),
        (tmp_path / "nothing", "is not a directory"),
    ):
        with pytest.raises(DatasetError, match=match):
            evaluate(made / "supervised", corpus, device="cpu")


def test_a_run_that_cannot_be_used_is_refused_with_its_reason(made, tmp_path, caplog):
    train(made / "corpus", tmp_path / "stopped", SUPERVISED, device="cpu", stop=lambda: True)
    train(made / "corpus", tmp_path / "all", replace(SUPERVISED, holdout=0.0, classifier_epochs=1), device="cpu")
    assert "no labelled sequence is held out, so there are no scores" in caplog.text
    for name in ("altered", "damaged"):
        shutil.copytree(made / "supervised", tmp_path / name)
    file = tmp_path / "altered/run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"held_out": [["a"]]}))
    file = tmp_path / "damaged/weights.safetensors"
    file.write_bytes(file.read_bytes()[:100])

    for run, match in (
        (tmp_path / "stopped", "not trained to its end"), (tmp_path / "all", "trained on all of it"),
        (tmp_path / "altered", "held_out is .*restore it"), (tmp_path / "damaged", "is damaged"),
        (made / "corpus", r"has no run\.json"),
    ):  # fmt: skip
        with pytest.raises((CheckpointError, DatasetError), match=match):
            evaluate(run, made / "corpus", device="cpu")


def test_a_batch_that_does_not_fit_is_halved_and_nothing_is_dropped(made):
    module, data = load_run(made / "supervised").module, open_sequences(made / "corpus-other")
    with SequenceBatches(data, SUPERVISED, CPU) as batches:
        source = batches.view(torch.arange(30), shuffle=False)
        plain = encode(module, source, CPU)
        with inject_oom(8):
            halved = encode(module, source, CPU)
        again = encode(module.train(), source, CPU)

    assert torch.equal(plain.row, torch.arange(30))
    assert torch.equal(plain.prediction, halved.prediction)
    assert torch.equal(plain.embedding, again.embedding)  # dropout is off
    assert module.training
    torch.testing.assert_close(plain.output.sum(1), torch.ones(30))  # probabilities


# Embeddings


def test_embeddings_are_in_the_order_of_the_corpus(made, tmp_path):
    found = embed(made / "supervised", made / "corpus", tmp_path / "all.safetensors", device="cpu")

    tensors, corpus = load_file(tmp_path / "all.safetensors"), Corpus.open(made / "corpus")
    with safe_open(tmp_path / "all.safetensors", "pt") as opened:
        texts = {name: json.loads(value) for name, value in opened.metadata().items()}
    assert found["items"] == 60
    assert texts["ids"] == list(corpus.ids)
    assert texts["predicted_classes"] == list(corpus.classes)
    assert torch.equal(tensors["label"], corpus.labels)
    module, row = load_run(made / "supervised").module, 17
    frames = corpus.sequence(row).float()[None]
    alone = module.encoder(frames, torch.tensor([frames.shape[1]])).embedding[0]
    torch.testing.assert_close(tensors["embedding"][row], alone, atol=1e-5, rtol=1e-4)
    assert int(module.head(alone).argmax()) == int(tensors["prediction"][row])


def test_an_embedding_that_cannot_be_written_is_refused_at_once(made, tmp_path):
    for file, kind in (
        (tmp_path, ConfigError),
        (tmp_path / "all.npy", ConfigError),
        (tmp_path / "no/all.safetensors", StorageError),
    ):
        with pytest.raises(kind, match=r"all|directory"):
            embed(made / "self", made / "corpus", file, device="cpu")

    assert not list(tmp_path.iterdir())


def test_a_plane_shows_what_is_scored_along_the_two_principal_axes(made, tmp_path):
    embed(made / "supervised", made / "corpus", tmp_path / "all.safetensors", device="cpu")
    stored, corpus = load_file(tmp_path / "all.safetensors"), Corpus.open(made / "corpus")
    held = json.loads((made / "supervised/run.json").read_text())["held_out"]
    rows = [corpus.ids.index(name) for name in held]
    centred = stored["embedding"][rows].double().numpy()
    centred -= centred.mean(0)
    sides, spread, _ = np.linalg.svd(centred, full_matrices=False)

    found = project(made / "supervised", made / "corpus", device="cpu")

    assert found.labels == [name.split("/")[0] for name in held]
    assert found.predicted == [f"class_{number}" for number in stored["prediction"][rows].tolist()]
    assert found.explained == pytest.approx(spread[:2] ** 2 / (spread**2).sum(), rel=1e-3)
    np.testing.assert_allclose(found.points.abs(), np.abs(sides * spread)[:, :2], atol=1e-3 * spread[0])
    assert len(project(made / "supervised", made / "corpus", device="cpu", limit=5).labels) == 4  # every third of 12


# Parts


def test_statistics_are_those_of_the_frames_far_from_zero_and_constant_ones_too(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "npy").mkdir()
    frames = [rng.normal((1000, 0, 3), (0.5, 2, 0), (length, 3)).astype(np.float32) for length in (9, 3, 17, 40, 5)]
    for index, one in enumerate(frames):
        np.save(tmp_path / f"npy/{index}.npy", one)
    pack(tmp_path / "npy", tmp_path / "corpus", dtype="float32")
    config = SequenceTraining(batch_size=2)

    with SequenceBatches(open_sequences(tmp_path / "corpus"), config, CPU) as batches:
        mean, std = measure(batches.view(torch.arange(5), shuffle=False), CPU)

    whole = np.concatenate(frames).astype(np.float64)
    np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(std, whole.std(0), rtol=1e-4)
    assert std[2] == 0


def test_a_probe_tells_what_a_line_can_part_and_nothing_else():
    rng = torch.Generator().manual_seed(0)
    points = torch.randn(200, 6, generator=rng)
    apart, mixed = (points[:, 0] > 0).long(), torch.randint(0, 2, (200,), generator=rng)

    assert probe_accuracy(points[:150], apart[:150], points[150:], apart[150:]) >= 0.94
    assert probe_accuracy(points[:150], mixed[:150], points[150:], mixed[150:]) < 0.7


# Requests


@pytest.fixture(scope="module")
def servable(made: Path) -> ClassifyServable:
    return ClassifyServable(made / "supervised", CPU)


def npy(array: np.ndarray, **options: bool) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def answers(servable: ClassifyServable, payloads: list[Payload]) -> list[dict[str, Any]]:
    """What requests are answered that share batches wherever they may."""
    items, outputs = [servable.decode(payload) for payload in payloads], {}
    for key in {item.key for item in items}:
        batch = [item for item in items if item.key == key]
        found = servable.collect(servable.forward([item.parts[0] for item in batch]))
        outputs |= {id(item): output for item, output in zip(batch, found, strict=True)}
    return [json.loads(servable.finish(item, [outputs[id(item)]]).body) for item in items]


def payloads_of(made: Path) -> list[Payload]:
    """The corpus's own files, in its order."""
    ids = open_sequences(made / "corpus").ids
    return [Payload(memoryview((made / "npy" / name).read_bytes()), name) for name in ids]


@pytest.mark.parametrize("name", ["supervised", "self", "committee"])
def test_an_answer_is_what_evaluation_predicts(made, tmp_path, name):
    embed(made / name, made / "corpus", tmp_path / "all.safetensors", device="cpu")
    expected = load_file(tmp_path / "all.safetensors")["prediction"].tolist()

    found = answers(ClassifyServable(made / name, CPU), payloads_of(made))

    payload = payloads_of(made)[0]
    frames = torch.from_numpy(np.load(io.BytesIO(payload.data)))[None]
    alone = load_run(made / name).module(frames, torch.tensor([frames.shape[1]])).softmax(-1)[0]
    assert list(found[0]["probabilities"].values()) == pytest.approx(alone.tolist(), abs=1e-4)
    names = ["0", "1", "2"] if name == "self" else ["class_0", "class_1", "class_2"]
    assert [one["class"] for one in found] == [names[number] for number in expected]
    for one in found:
        assert list(one) == ["class", "confidence", "probabilities"]
        assert list(one["probabilities"]) == names
        assert one["confidence"] == max(one["probabilities"].values()) == one["probabilities"][one["class"]]
        assert sum(one["probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_a_batch_answers_as_each_alone(made, servable):
    payloads = payloads_of(made)[:30]

    together = answers(servable, payloads)

    assert len({servable.inspect(payload).key for payload in payloads}) > 2
    for payload, found in zip(payloads, together, strict=True):
        (alone,) = answers(servable, [payload])
        assert found["probabilities"] == pytest.approx(alone["probabilities"], abs=5e-6)


def test_memory_of_a_payload_may_be_used_again(servable):
    data = bytearray(npy(np.random.default_rng(0).random((20, 8), np.float32)))
    item = servable.decode(Payload(memoryview(data), "a"))
    expected = item.parts[0].frames.clone()
    data[:] = bytes(len(data))

    assert torch.equal(item.parts[0].frames, expected)


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
