"""Cross-validation: measures and intervals against their definitions, reports, labels in several columns."""

import csv
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from labelled import labelled
from safetensors.torch import load_file
from scipy.stats import binom

from brim.errors import BrimError, CheckpointError
from brim.sequences import (
    Corpus,
    EncoderShape,
    SequenceTraining,
    embed,
    evaluate,
    load_run,
    make_sequences,
    pack,
    train,
)
from brim.sequences.corpus import Fold, FoldPlan, plan_folds
from brim.sequences.evaluation import FoldPrediction, cross_validate, fold_lines, write_tables
from brim.sequences.evaluation.folds import summarise
from brim.sequences.evaluation.measures import class_measures, confusion, number_measures, per_class, sums

SMALL = EncoderShape(channels=8, hidden=8, attention=8, embedding=8, layers=1)
CONFIG = SequenceTraining(
    mode="supervised", classifier_epochs=2, batch_size=8, learning_rate=0.03, model=SMALL, groups="speaker", folds=3
)


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


def one_hot(numbers):
    return torch.nn.functional.one_hot(numbers).float()


def lines_of(file):
    return list(csv.reader(file.read_text().splitlines()))


def test_the_interval_is_that_of_groups_drawn_with_replacement():
    """Where a group is right or wrong as a whole, its ends are quantiles of a binomial distribution."""
    labels, groups = torch.arange(200) % 2, torch.arange(200) // 5
    data, plan = labelled(labels, groups), plan_folds(labelled(labels, groups), replace(CONFIG, folds=4))
    ends = []
    for right in range(41):
        output = one_hot(torch.where(groups < right, labels, 1 - labels))[None]
        score = summarise(data, replace(CONFIG, folds=4), plan, output).scores["accuracy"]
        assert (score.low, score.high) == pytest.approx(binom.ppf([0.025, 0.975], 40, right / 40) / 40, abs=0.026)
        ends.append((score.low, score.high))

    covered = sum(binom.pmf(right, 40, 0.8) for right, (low, high) in enumerate(ends) if low <= 0.8 <= high)
    assert 0.9 < covered < 0.97  # of sequences instead of groups it would be 0.6


def test_the_interval_of_numbers_spans_the_draws_of_three_groups():
    """Each of the 27 draws has a probability of 3.7 %, more than the 2.5 % beyond an end: the ends are the extremes."""
    truth, groups = torch.arange(9).double(), torch.arange(9) // 3
    data = labelled(torch.zeros(9).long(), groups)
    data.targets = truth + 1000
    output = (data.targets + torch.tensor([0.0, 1.0, 3.0]).double()[groups]).float()[:, None]
    plan = FoldPlan((Fold("1", torch.arange(4)), Fold("2", torch.arange(4, 9))), groups)

    report = summarise(data, replace(CONFIG, folds=2), plan, output[None])

    rmse, r2 = report.scores["rmse"], report.scores["r2"]
    assert (rmse.low, rmse.high) == pytest.approx((0, 3), abs=1e-4)
    assert rmse.values == pytest.approx([0.5, (29 / 5) ** 0.5], abs=1e-4)
    assert r2.high == pytest.approx(1)
    assert r2.low == pytest.approx(1 - 9 / np.var([6, 7, 8]), abs=1e-4)
    assert (report.task, report.confusion, report.per_class) == ("regression", [], {})


def test_a_report_is_of_labelled_sequences_and_leaves_out_what_is_not_defined():
    data = labelled(torch.tensor([0, 0, 0, 0, -1]), torch.arange(5))
    data.targets = torch.tensor([5, 5, 1, 3, np.nan]).double()
    plan = FoldPlan((Fold("1", torch.tensor([0, 1])), Fold("2", torch.tensor([2, 3]))), None)

    report = summarise(data, replace(CONFIG, groups=None, seed=3), plan, torch.tensor([[[5.0], [6], [1], [2], [0]]]))

    r2 = report.scores["r2"]
    assert (r2.values, r2.mean, r2.std) == ([None, pytest.approx(0.5)], pytest.approx(0.5), None)
    assert (report.sequences, report.seeds, "over sequences of" in report.interval) == (4, [3], True)


def confused(data):
    """Trains nothing, and takes every fifth sequence for the next class, another fifth with each seed."""

    def train_one(fold, path, config, words):
        rows = torch.tensor([row for row, part in enumerate(fold.split) if part == "test"])
        number = (data.labels[rows] + ((rows % 5 == config.seed) & (rows < 40))) % len(data.classes)
        return FoldPrediction(rows, one_hot(torch.cat([number, torch.tensor([2])]))[:-1], torch.rand(len(rows), 3))

    return train_one


def test_a_report_its_tables_and_its_page_are_of_all_folds_and_seeds(tmp_path):
    labels = torch.arange(60) % 3
    labels[50:] = 0
    data, config = labelled(labels, torch.arange(60) // 5), replace(CONFIG, seeds=2)

    done = cross_validate(data, tmp_path, config, confused(data))
    again = cross_validate(data, tmp_path, config, lambda *_: pytest.fail("trained again"))
    write_tables(tmp_path, data, done)

    report, score = done.report, done.report.scores["accuracy"]
    wrong = np.stack([(np.arange(60) % 5 == seed) & (np.arange(60) < 40) for seed in (0, 1)])
    table = np.zeros((3, 3), int)
    for row in wrong:
        np.add.at(table, (labels.numpy(), (labels.numpy() + row) % 3), 1)
    assert report.confusion == table.tolist()
    assert report.per_class["recall"] == pytest.approx((table.diagonal() / table.sum(1)).tolist())
    assert report.per_class["precision"] == pytest.approx((table.diagonal() / table.sum(0)).tolist())
    folds = [1 - row[fold.rows.numpy()].mean() for row in wrong for fold in done.plan.folds]
    assert score.values == pytest.approx(folds)
    assert score.std > 0
    assert (score.mean, score.std) == pytest.approx((np.mean(folds), np.std(folds, ddof=1)))
    assert again.report == report
    head, *rows = lines_of(tmp_path / "predictions.csv")
    assert head == ["file", "fold", "seed", "truth", "predicted"]
    assert len(rows) == 120
    for file, fold, seed, truth, predicted in rows:
        assert int(file) in done.plan.folds[int(fold) - 1].rows.tolist()
        assert truth == "abc"[labels[int(file)]]
        assert predicted == "abc"[(int(labels[int(file)]) + int(wrong[int(seed)][int(file)])) % 3]
    counts = [[name, *map(str, row)] for name, row in zip("abc", table, strict=True)]
    assert lines_of(tmp_path / "confusion.csv") == [["true class", *"abc"], *counts]
    values = [score.mean, score.std, score.low, score.high]
    assert lines_of(tmp_path / "table.csv")[1] == ["accuracy", *map(str, values), "3", "2"]
    mean, std, low, high = (f"{value:.3f}" for value in values)
    assert re.match(rf"accuracy +{mean} ± {std} +95 % interval {low} to {high}", fold_lines(report.as_dict())[0])
    columns = ["precision", "recall", "f1", "sequences"]
    head, first, *_ = lines_of(tmp_path / "per_class.csv")
    assert (head, first) == (["class", *columns], ["a", *(str(report.per_class[name][0]) for name in columns)])
    precision, recall, f1 = (f"{report.per_class[name][0]:.3f}" for name in columns[:3])
    assert len({precision, recall, f1}) == 3
    tex = (tmp_path / "table.tex").read_text()
    assert f"accuracy & {mean} & {std} & {low} to {high} " in tex
    assert rf"a & \multicolumn{{3}}{{l}}{{recall {recall}, $F_1$ {f1}}}" in tex
    page = (tmp_path / "report.html").read_text()
    assert 'id="embedding"' in page
    assert 'id="confusion"' in page


def test_stored_predictions_of_other_sequences_are_refused(tmp_path):
    data = labelled(torch.arange(12) % 2, torch.arange(12) // 2)
    config = replace(CONFIG, folds=2)
    cross_validate(data, tmp_path, config, confused(data))
    files = sorted((tmp_path / "folds").glob("*.safetensors"))
    files[1].write_bytes(files[0].read_bytes())

    with pytest.raises(CheckpointError, match=r"2-seed-0.predictions.safetensors belongs to other sequences"):
        cross_validate(data, tmp_path, config, confused(data))


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
    assert lines_of(tmp_path / "run" / "table.csv")[2][:2] == ["uar", str(report.scores["uar"])]
    monkeypatch.undo()
    file = tmp_path / "run/folds/1-seed-0.predictions.safetensors"
    before = load_file(file)
    for lost in (file, tmp_path / "run/report.json"):
        lost.unlink()
    train(corpus, tmp_path / "run", CONFIG, resume=True)
    for name, tensor in load_file(file).items():
        torch.testing.assert_close(tensor, before[name])


def test_another_column_is_learned_without_packing_again(tmp_path, corpus):
    config = replace(CONFIG, folds=None, label="Mood")

    report = train(corpus, tmp_path / "run", config)

    assert load_run(tmp_path / "run").about["classes"] == ["high", "low"]
    assert evaluate(tmp_path / "run", corpus).accuracy == report.scores["accuracy"]


def test_numbers_are_recognised_and_digits_are_classes(corpus):
    data = Corpus.open(corpus)

    assert data.with_labels("score").targets is not None
    assert data.with_labels("fold").targets is None
    assert data.with_labels("fold").classes == ("0", "1", "2")
    assert data.with_labels("fold", "regression").targets.tolist()[:3] == [0.0, 0.0, 1.0]
    for count, numbers in ((9, False), (10, True)):
        data.columns["few"] = tuple(f"{row % count}.5" for row in range(36))
        assert (data.with_labels("few").targets is not None) == numbers
    data.columns["few"] = tuple(str(row) for row in range(36))
    assert data.with_labels("few").targets is None
    data.columns["few"] = ("", *(f"{row}.5" for row in range(35)))
    some = data.with_labels("few", "regression")
    assert (some.labels.tolist()[:2], some.label_names()[:2]) == ([-1, 0], ["", "0.5"])
    assert data.with_labels("mood").column("Mood", "groups")[:2] == ("high", "low")
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
    errors = [float(line[3]) - float(line[4]) for line in lines_of(tmp_path / "folds/predictions.csv")[1:]]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(folds.scores["rmse"], rel=0.1)
    scored = evaluate(tmp_path / "one", tmp_path / "corpus")
    assert scored.r2 == pytest.approx(single.scores["r2"])
    embed(tmp_path / "one", tmp_path / "corpus", tmp_path / "e.safetensors")
    tensors = load_file(tmp_path / "e.safetensors")
    assert float((tensors["prediction"] - tensors["label"]).abs().mean()) < 15


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
