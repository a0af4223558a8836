"""Which model is trained, what it is compared with, and what a run says that learned nothing."""

import csv
import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.engine.batching import Payload
from brim.errors import CheckpointError
from brim.sequences import SequenceTraining, evaluate, load_run, pack, train
from brim.sequences.evaluation.serving import ClassifyServable
from brim.sequences.rocket import Rocket, RocketBlend
from brim.sequences.training.methods import _compare_numbers, prepare

torch.set_num_threads(1)

TINY = {"channels": 8, "hidden": 8, "layers": 1, "attention": 8, "embedding": 8, "convolutions": 1}


def write(
    folder: Path, count: int, *, classes: int = 3, learnable: bool = True, lengths=(20, 40), column="label"
) -> Path:
    """Noisy waves as .npy files; the frequency is the label, or has nothing to do with it."""
    rng = np.random.default_rng(5)
    folder.mkdir()
    with (folder / "labels.csv").open("w", newline="") as opened:
        lines = csv.writer(opened)
        lines.writerow(("file", column))
        for number in range(count):
            label = number % classes
            speed = label if learnable else rng.integers(classes)
            time = np.arange(rng.integers(20, 40))[:, None]
            wave = np.sin((0.3 + 0.4 * speed) * time + rng.uniform(0, 6, 2)) + 0.2 * rng.standard_normal((len(time), 2))
            np.save(folder / f"{number:03d}.npy", wave.astype(np.float32))
            lines.writerow((f"{number:03d}.npy", f"class {label}" if column == "label" else f"{label + 0.25:.2f}"))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    made = tmp_path_factory.mktemp("waves")
    pack(write(made / "npy", 60), made / "corpus")
    return made / "corpus"


@pytest.fixture(scope="module")
def rocket_run(corpus):
    run = corpus.parent / "rocket"
    return run, train(corpus, run, SequenceTraining(mode="supervised", method="rocket"), device="cpu")


def test_rocket_is_trained_scored_and_read_back(rocket_run, corpus):
    run, report = rocket_run

    assert report.model == "rocket"
    assert report.scores["accuracy"] >= 0.9
    assert evaluate(run, corpus, device="cpu").accuracy == report.scores["accuracy"]
    assert isinstance(load_run(run).module, Rocket)
    names = [row.model for row in report.comparison]
    assert {"rocket", "statistics", "majority class"} <= set(names)
    defaults = SequenceTraining(mode="supervised", batch_size=8)
    assert (defaults.resolved_method, replace(defaults, batch_size=64).resolved_method) == ("cnn_lstm", "auto")
    assert report.as_dict()["comparison"][0]["model"] == "rocket"
    again = train(corpus, run, SequenceTraining(mode="supervised", method="rocket"), resume=True)
    assert replace(again, spent=None) == replace(report, spent=None)


def test_an_encoder_is_not_taken_from_rocket(rocket_run, corpus, tmp_path):
    config = SequenceTraining(mode="supervised", encoder=str(rocket_run[0]))

    with pytest.raises(CheckpointError, match="has no encoder"):
        train(corpus, tmp_path / "run", config, device="cpu")


def test_an_ensemble_averages_rocket_and_networks(corpus, tmp_path):
    config = SequenceTraining(mode="supervised", method="ensemble", budget=3.0)

    report = train(corpus, tmp_path / "run", config, device="cpu")

    assert report.model == "rocket + cnn_lstm"
    module = load_run(tmp_path / "run").module
    assert isinstance(module, RocketBlend)
    assert sum(row.weight for row in report.comparison) == pytest.approx(1)
    assert report.scores["accuracy"] >= 0.9
    assert evaluate(tmp_path / "run", corpus, device="cpu").accuracy == report.scores["accuracy"]


@pytest.mark.parametrize(("length", "stride"), [(250, 1), (251, 2), (100_000, 400)])
def test_the_lstm_sees_at_most_250_steps(length, stride):
    class Data:
        targets, lengths = None, torch.full((10,), length)

    used = prepare(SequenceTraining(mode="supervised", method="cnn_lstm"), Data(), 10_000)
    few = prepare(SequenceTraining(mode="supervised", method="cnn_lstm"), Data(), 400)
    own = prepare(SequenceTraining(mode="supervised", classifier_epochs=3), Data(), 400)

    assert (used.model.stride, used.model.channels, used.budget) == (stride, 384, None)
    assert few.model.stride == -(-length // 100)
    assert (own.model.channels, own.learning_rate) == (384, 1e-3)  # its settings are given


def test_a_network_that_did_not_learn_is_said(tmp_path, caplog):
    pack(write(tmp_path / "npy", 40, learnable=False), tmp_path / "corpus")
    config = SequenceTraining(mode="supervised", method="cnn_lstm", classifier_epochs=1, model=TINY, holdout=0.5)

    with caplog.at_level(logging.WARNING, "brim"):
        report = train(tmp_path / "corpus", tmp_path / "run", config, device="cpu")

    said = next(sentence for sentence in report.warnings if "did not learn: accuracy" in sentence)
    reached, guess = (float(number) for number in re.findall(r"\d\.\d\d", said)[:2])
    assert "majority class" in said
    assert ("within chance on 20 sequences" in said) == (reached > guess)
    assert "did not learn" in caplog.text


def test_a_network_below_summary_statistics_is_said(corpus, tmp_path):
    config = SequenceTraining(mode="supervised", classifier_epochs=1, model=TINY, learning_rate=1e-6)

    report = train(corpus, tmp_path / "run", config, device="cpu")

    assert any("summary statistics" in sentence for sentence in report.warnings)
    assert any(row.model == "statistics" for row in report.comparison)


def test_training_ends_at_a_plateau(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("brim.sequences.training.phases.STEPS", 400)
    config = SequenceTraining(mode="supervised", method="cnn_lstm", model=TINY, learning_rate=0.02)

    report = train(corpus, tmp_path / "run", config, device="cpu")

    assert 5 < report.phases[-1].epochs < 100  # of 100
    assert report.scores["accuracy"] >= 0.9


def test_numbers_are_predicted_by_rocket_and_networks(tmp_path):
    pack(write(tmp_path / "npy", 60, column="score"), tmp_path / "corpus", label="score")
    config = SequenceTraining(mode="supervised", task="regression", budget=3.0)

    report = train(tmp_path / "corpus", tmp_path / "run", config, device="cpu")

    assert report.model.startswith("rocket")
    assert report.scores["r2"] > 0.8
    servable = ClassifyServable(tmp_path / "run", torch.device("cpu"))
    item = servable.decode(Payload((tmp_path / "npy/000.npy").read_bytes(), "000.npy"))
    answer = servable.finish(item, servable.collect(servable.forward(item.parts)))
    assert json.loads(answer.body)["value"] == pytest.approx(0.25, abs=0.6)
    tiny = SequenceTraining(
        mode="supervised", task="regression", members=2, classifier_epochs=20, learning_rate=0.02, batch_size=8,
        model=TINY,
    )  # fmt: skip

    network = train(tmp_path / "corpus", tmp_path / "network", tiny, device="cpu")

    assert network.model == "cnn_lstm"
    assert network.scores["r2"] > 0.3
    assert evaluate(tmp_path / "network", tmp_path / "corpus", device="cpu").r2 == pytest.approx(network.scores["r2"])
    share, gain, score, _ = _compare_numbers(
        torch.tensor([0.0, 2.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 3.0])
    )
    assert (share, gain.tolist(), score) == (0.5, [1.0, 0.0], 0.0)  # of the network, half
    module = RocketBlend(load_run(tmp_path / "run").module, load_run(tmp_path / "network").module, 0.25)
    frames = torch.from_numpy(np.load(tmp_path / "npy/000.npy"))[None]
    parts = [one(frames, torch.tensor([frames.shape[1]])) for one in (module, module.rocket, module.network)]
    torch.testing.assert_close(parts[0], 0.75 * parts[1] + 0.25 * parts[2])


def test_numbers_that_cannot_be_predicted_are_said(tmp_path):
    pack(write(tmp_path / "npy", 60, column="score", learnable=False), tmp_path / "corpus", label="score")
    config = SequenceTraining(mode="supervised", task="regression", method="rocket", seed=1)

    report = train(tmp_path / "corpus", tmp_path / "run", config, device="cpu")

    assert report.scores["r2"] <= 0
    assert any("did not learn: R²" in sentence and "the mean" in sentence for sentence in report.warnings)


@pytest.mark.parametrize("labelled", [True, False])
def test_without_labels_the_best_clusters_are_kept(corpus, tmp_path, labelled):
    data = corpus
    if not labelled:
        folder = write(tmp_path / "npy", 60)
        (folder / "labels.csv").unlink()
        pack(folder, tmp_path / "corpus")
        data = tmp_path / "corpus"
    config = SequenceTraining(iterations=1, encoder_epochs=1, classifier_epochs=1, clusters=3)

    report = train(data, tmp_path / "run", config, device="cpu")

    rows = {row.model: row for row in report.comparison}
    assert set(rows) == {"rocket clusters", "statistics clusters", "cnn_lstm"}
    assert report.model == max(report.comparison, key=lambda row: row.score).model
    assert rows[report.model].weight == 1
    if labelled:
        assert report.scores["ari"] == pytest.approx(rows[report.model].held_out["ari"])
        assert evaluate(tmp_path / "run", data, device="cpu").ari == pytest.approx(report.scores["ari"])
    network = replace(SequenceTraining(), mode="supervised", classifier_epochs=1, encoder=str(tmp_path / "run"))
    if labelled:  # its encoder can be used, whichever clusters were kept
        assert train(data, tmp_path / "next", network, device="cpu").model == "cnn_lstm"
