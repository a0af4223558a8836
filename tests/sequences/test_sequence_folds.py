"""Labels in several columns, groups and folds: no group on both sides, measures against their definitions."""

import csv
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from brim.errors import BrimError, CheckpointError
from brim.sequences import Corpus, EncoderShape, SequenceTraining, embed, evaluate, make_sequences, pack, train
from brim.sequences.corpus import plan_folds, split_sequences
from brim.sequences.corpus.splits import grouped
from brim.sequences.evaluation import FoldPrediction, cross_validate, load_run
from brim.sequences.evaluation.measures import class_measures, confusion, number_measures, per_class, sums

SMALL = EncoderShape(channels=8, hidden=8, attention=8, embedding=8, layers=1)
CONFIG = SequenceTraining(mode="supervised", classifier_epochs=2, batch_size=8, model=SMALL, groups="speaker", folds=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """36 sequences of 3 classes by 6 speakers, with numbers and a fold column."""
    path = tmp_path_factory.mktemp("folds")
    folder = make_sequences(path / "npy", 36, 3, 3, mean_length=8)
    lines = ["file,label,speaker,fold,score,mood"]
    for row, file in enumerate(sorted(folder.rglob("*.npy"))):
        speaker = (row // 2) % 6
        name = file.relative_to(folder).as_posix()
        lines.append(f"{name},{file.parent.name},s{speaker},{speaker % 3},{row / 7:.3f},{'low' if row % 2 else 'high'}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    pack(folder, path / "corpus")
    return path / "corpus"


def groups_of(data, rows):
    return {data.columns["speaker"][row] for row in rows.tolist()}


@pytest.mark.parametrize("folds", [2, 3, 6, "leave-one-group-out", "fold"])
def test_no_group_is_in_two_parts_and_every_sequence_is_held_out_once(corpus, folds):
    data, config = Corpus.open(corpus), replace(CONFIG, folds=folds)

    plan = plan_folds(data, config)

    assert torch.cat([fold.rows for fold in plan.folds]).sort().values.tolist() == list(range(len(data)))
    assert len(plan.folds) == (folds if isinstance(folds, int) else {"fold": 3}.get(folds, 6))
    for fold in plan.folds:
        parts = split_sequences(plan.split(data, fold), replace(config, folds=None))
        train_groups, validation, held = (groups_of(data, rows) for rows in parts)
        assert not train_groups & validation
        assert not held & (train_groups | validation)
        assert torch.equal(parts.held_out, fold.rows)


def test_grouped_folds_have_classes_in_similar_proportions():
    rng = np.random.default_rng(0)
    groups = torch.from_numpy(rng.integers(0, 40, 2000))
    labels = torch.from_numpy((rng.random(2000) < 0.2).astype(np.int64))
    data = fake(labels, groups)

    plan = plan_folds(data, replace(CONFIG, folds=5))

    shares = [float(labels[fold.rows].double().mean()) for fold in plan.folds]
    sizes = [len(fold.rows) for fold in plan.folds]
    assert max(shares) - min(shares) < 0.03
    assert max(sizes) < 1.1 * min(sizes)


def test_a_share_of_groups_leaves_every_class_and_no_half_group():
    groups = torch.arange(60) // 6
    labels = torch.arange(60) % 3

    chosen = grouped(labels, groups, 0.2, 0, "test")

    assert 6 <= len(chosen) <= 18
    for number in groups[chosen].unique().tolist():
        assert int((groups[chosen] == number).sum()) == 6


def fake(labels, groups):
    from brim.sequences.corpus import Sequences

    class Fake(Sequences):
        @property
        def identity(self):
            return {}

        def read_item(self, index, out):
            raise NotImplementedError

        def verify(self, progress=None):
            pass

    data = Fake()
    data.path, data.ids = "fake", tuple(map(str, range(len(labels))))
    data.labels, data.classes, data.split = labels, ("a", "b", "c")[: int(labels.max()) + 1], ("",) * len(labels)
    data.columns = {"speaker": tuple(f"s{number}" for number in groups.tolist())}
    return data


# Measures


def test_measures_of_classes_are_those_of_their_definitions():
    truth = torch.tensor([0, 0, 0, 0, 1, 1])
    predicted = torch.tensor([0, 0, 0, 1, 1, 2])

    table = confusion(predicted, truth, 3)
    measures = class_measures(table)

    assert table.tolist() == [[3, 1, 0], [0, 1, 1], [0, 0, 0]]
    assert float(measures["accuracy"]) == pytest.approx(4 / 6)
    assert float(measures["uar"]) == pytest.approx((3 / 4 + 1 / 2) / 2)  # the third class never occurs
    assert float(measures["macro_f1"]) == pytest.approx((6 / 7 + 2 / 4 + 0) / 3)
    assert per_class(table)["precision"] == [1.0, 0.5, 0.0]
    assert per_class(table)["recall"][2] is None


def test_measures_of_numbers_are_those_of_their_definitions():
    rng = np.random.default_rng(1)
    truth = rng.normal(size=50)
    predicted = 0.7 * truth + 0.1 * rng.normal(size=50) + 0.2

    measures = number_measures(sums(torch.tensor(predicted), torch.tensor(truth)).sum(0))

    covariance = np.cov(truth, predicted, bias=True)[0, 1]
    expected = 2 * covariance / (truth.var() + predicted.var() + (truth.mean() - predicted.mean()) ** 2)
    assert float(measures["ccc"]) == pytest.approx(expected)
    assert float(measures["rmse"]) == pytest.approx(np.sqrt(np.mean((truth - predicted) ** 2)))
    assert float(measures["r2"]) == pytest.approx(1 - np.mean((truth - predicted) ** 2) / truth.var())


def coin(data, share, seed):
    """A model that is right with this probability, the same for all sequences of a speaker's fold."""
    rng = np.random.default_rng(seed)

    def train_one(fold, path, config, words):
        rows = torch.tensor([row for row, part in enumerate(fold.split) if part == "test"])
        right = torch.from_numpy(rng.random(len(rows)) < share)
        number = torch.where(right, data.labels[rows], (data.labels[rows] + 1) % len(data.classes))
        output = torch.nn.functional.one_hot(number, len(data.classes)).float()
        return FoldPrediction(rows, output, torch.empty(len(rows), 0))

    return train_one


def test_the_interval_covers_the_true_accuracy_about_as_often_as_it_says(tmp_path):
    labels, groups = torch.arange(200) % 2, torch.arange(200) // 5
    data, config = fake(labels, groups), replace(CONFIG, folds=4)

    covered = 0
    for number in range(30):
        report = cross_validate(data, tmp_path / str(number), config, coin(data, 0.8, number)).report
        covered += report.scores["accuracy"].low <= 0.8 <= report.scores["accuracy"].high

    assert covered >= 24  # 28 or 29 expected; fewer than 24 once in a thousand


def test_a_report_is_of_all_folds_and_seeds(tmp_path):
    labels, groups = torch.arange(60) % 3, torch.arange(60) // 5
    data, config = fake(labels, groups), replace(CONFIG, seeds=2)

    report = cross_validate(data, tmp_path, config, coin(data, 0.5, 0)).report

    score = report.scores["accuracy"]
    assert len(score.values) == 6
    assert score.mean == pytest.approx(np.mean(score.values))
    assert score.std == pytest.approx(np.std(score.values, ddof=1))
    assert sum(map(sum, report.confusion)) == 120
    assert sum(report.per_class["sequences"]) == 120
    again = cross_validate(data, tmp_path, config, lambda *_: pytest.fail("trained again")).report
    assert again == report


# Training


def test_folds_are_trained_and_continued(tmp_path, corpus, monkeypatch):
    again = []  # folds whose run must be opened for its predictions
    monkeypatch.setattr("brim.sequences.training.run.predict", lambda path, *_, **__: again.append(path))
    stops = iter([False] * 12 + [True] * 1000)

    stopped = train(corpus, tmp_path / "run", CONFIG, stop=lambda: next(stops))
    report = train(corpus, tmp_path / "run", CONFIG, resume=True)

    assert stopped.stopped
    assert not again
    assert report.cross_validation["folds"] == ["1", "2", "3"]
    assert report.scores["uar"] == report.cross_validation["scores"]["uar"]["mean"]
    assert report.model == "cnn_lstm"
    assert {row.model for row in report.comparison} == {"majority class", "statistics"}
    assert report.scores == train(corpus, tmp_path / "whole", CONFIG).scores
    with pytest.raises(CheckpointError, match="is a cross-validation"):
        load_run(tmp_path / "run")
    assert load_run(tmp_path / "run" / "folds" / "1-seed-0").about["split"]["held_out"] == 12
    rows = list(csv.DictReader((tmp_path / "run" / "predictions.csv").read_text().splitlines()))
    right = sum(row["truth"] == row["predicted"] for row in rows)
    confusion = report.cross_validation["confusion"]
    assert right == sum(confusion[number][number] for number in range(3))
    table = {row["measure"]: row for row in csv.DictReader((tmp_path / "run" / "table.csv").read_text().splitlines())}
    assert float(table["uar"]["mean"]) == report.scores["uar"]
    assert f"{report.scores['accuracy']:.3f}" in (tmp_path / "run" / "table.tex").read_text()
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'id="embedding"' in page
    assert 'id="confusion"' in page


def test_another_column_is_learned_without_packing_again(tmp_path, corpus):
    config = replace(CONFIG, folds=None, label="Mood")

    train(corpus, tmp_path / "run", config)

    assert load_run(tmp_path / "run").about["classes"] == ["high", "low"]


def test_numbers_are_recognised_and_digits_are_classes(corpus):
    data = Corpus.open(corpus)

    assert data.with_labels("score").targets is not None
    assert data.with_labels("fold").targets is None
    assert data.with_labels("fold").classes == ("0", "1", "2")
    assert data.with_labels("fold", "regression").targets.tolist()[:3] == [0.0, 0.0, 1.0]
    back = data.with_labels("mood").with_labels("label")
    assert (back.classes, back.labels.tolist()) == (data.classes, data.labels.tolist())


def test_numbers_are_predicted_in_their_unit(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["file,level,speaker"]
    for number in range(60):
        level = rng.uniform(100, 200)
        np.save(tmp_path / f"{number:02d}.npy", level / 50 + rng.normal(size=(20, 2)))
        lines.append(f"{number:02d}.npy,{level:.4f},s{number % 3}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    pack(tmp_path, tmp_path / "corpus", label="level")

    config = SequenceTraining(mode="supervised", method="rocket", groups="speaker")
    single = train(tmp_path / "corpus", tmp_path / "one", config)
    folds = train(tmp_path / "corpus", tmp_path / "folds", replace(config, folds="leave-one-group-out"))

    assert set(single.scores) == {"ccc", "rmse", "r2"}
    assert folds.scores["r2"] > 0.8
    assert folds.scores["rmse"] < 15
    assert folds.cross_validation["task"] == "regression"
    scored = evaluate(tmp_path / "one", tmp_path / "corpus")
    assert scored.r2 == pytest.approx(single.scores["r2"])
    embed(tmp_path / "one", tmp_path / "corpus", tmp_path / "e.safetensors")
    tensors = load_file(tmp_path / "e.safetensors")
    assert float((tensors["prediction"] - tensors["label"]).abs().mean()) < 15


def test_the_weights_of_layers_are_learned(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(60):
        layers = rng.normal(size=(3, 12, 4))
        layers[1] += 2 * (number % 2)
        (tmp_path / str(number % 2)).mkdir(exist_ok=True)
        np.save(tmp_path / str(number % 2) / f"{number}.npy", layers)
    pack(tmp_path, tmp_path / "corpus")

    config = SequenceTraining(
        mode="supervised", method="cnn_lstm", classifier_epochs=15, batch_size=8, learning_rate=0.01, model=SMALL
    )
    report = train(tmp_path / "corpus", tmp_path / "run", config)

    weights = load_run(tmp_path / "run").module.encoder.layer_weights
    assert int(weights.argmax()) == 1
    assert report.scores["accuracy"] > 0.9


def test_constant_features_are_said(tmp_path, caplog):
    for number in range(20):
        frames = np.ones((5, 3)) * [1, number % 2, number]
        (tmp_path / str(number % 2)).mkdir(exist_ok=True)
        np.save(tmp_path / str(number % 2) / f"{number}.npy", frames)

    train(pack(tmp_path, tmp_path / "corpus").path, tmp_path / "run", replace(CONFIG, folds=None, groups=None))

    assert "1 of 3 features are constant" in caplog.text


BAD = [
    ({"folds": 7}, "7 folds are more than the 6 groups"),
    (
        {"folds": "leave-one-group-out", "groups": "mooood"},
        "no column 'mooood'; its columns: fold, mood, score, speaker",
    ),
    ({"folds": "fold", "groups": "mood"}, "is in 3 folds, such as 0 and 1"),
    ({"folds": 37, "groups": None}, "37 folds are more than the 36 labelled sequences"),
    ({"label": "mood", "task": "regression"}, "has the label 'high', regression needs a number"),
]


@pytest.mark.parametrize(("settings", "words"), BAD)
def test_settings_that_do_not_fit_the_labels_are_refused_before_anything_is_written(tmp_path, corpus, settings, words):
    with pytest.raises(BrimError) as failure:
        train(corpus, tmp_path / "run", replace(CONFIG, **settings))
    assert words in str(failure.value)
    assert not (tmp_path / "run").exists()


def test_folds_are_not_trained_by_several_processes(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(BrimError, match="needs a single process, there are 2"):
        train(corpus, tmp_path / "run", CONFIG)


CSV = {
    "one class": (["a"] * 6, "", "fewer than two among the sequences to train on"),
    "one sequence per class": (list("abcdef"), "", "each of the 6 classes has one sequence"),
    "only in the test part": (
        list("aabbac"),
        "train train train train train test",
        "the class 'c' is only in the held-out",
    ),
}


@pytest.mark.parametrize("case", CSV)
def test_labels_that_cannot_be_learned_are_refused(tmp_path, case):
    labels, split, words = CSV[case]
    for number in range(6):
        np.save(tmp_path / f"{number}.npy", np.random.default_rng(number).normal(size=(4, 2)))
    parts = split.split() or [""] * 6
    lines = [f"{number}.npy,{label},{part}" for number, (label, part) in enumerate(zip(labels, parts, strict=True))]
    (tmp_path / "labels.csv").write_text("file,label,split\n" + "\n".join(lines))

    with pytest.raises(BrimError, match=words):
        train(tmp_path, tmp_path / "run", replace(CONFIG, folds=None, groups=None))


def test_a_class_of_a_single_group_is_refused(tmp_path):
    labels, groups = torch.tensor([0, 1] * 6 + [2]), torch.tensor([number // 4 for number in range(12)] + [2])

    with pytest.raises(BrimError, match="the class 'c' is in fold"):
        plan_folds(fake(labels, groups), CONFIG)


def test_folds_in_turn_differ_by_one_sequence_at_most():
    labels = torch.tensor([0] * 17 + [1] * 12 + [2] * 5)

    plan = plan_folds(fake(labels, labels), replace(CONFIG, folds=4, groups=None))

    sizes = sorted(len(fold.rows) for fold in plan.folds)
    assert all(second - first <= 1 for first, second in pairwise(sizes))
