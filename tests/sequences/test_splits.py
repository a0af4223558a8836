"""Which sequences are trained on, select the weights, and are held out; no group is on two sides."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from labelled import labelled

from brim.errors import BrimError, DatasetError
from brim.sequences import SequenceTraining
from brim.sequences.corpus import plan_folds, split, split_sequences
from brim.sequences.corpus.splits import grouped, stratified
from brim.sequences.training.methods import for_comparison

SUPERVISED = SequenceTraining(mode="supervised", classifier_epochs=2)


def rows_of(parts):
    return [part.tolist() for part in parts]


# One split


def test_the_corpus_s_own_three_parts_are_used_as_they_are():
    own = ["train", "validation", "test", "train", "test", "validation", "train"]
    labels = torch.tensor([0, 1, 0, 1, 1, 0, -1])

    assert rows_of(split(labels, own, SUPERVISED)) == [[0, 3], [1, 5], [2, 4]]
    assert rows_of(split(labels, own, SequenceTraining())) == [[0, 3, 6], [1, 5], [2, 4]]  # labels are not needed


def test_a_fifth_is_held_out_and_a_tenth_of_the_rest_selects_the_weights():
    labels = torch.arange(100) % 2
    labels[90:] = -1

    parts = split(labels, [""] * 100, SUPERVISED)
    without = split(labels, [""] * 100, SequenceTraining())

    assert [len(part) for part in parts] == [65, 7, 18]  # of the 90 with a label
    assert [len(part) for part in without] == [82, 0, 18]
    assert sorted(torch.cat(parts).tolist()) == list(range(90))
    assert torch.bincount(labels[parts.held_out]).tolist() == [9, 9]
    assert sorted(torch.bincount(labels[parts.validation]).tolist()) == [3, 4]
    other = split(labels, [""] * 100, replace(SUPERVISED, seed=1))
    assert not torch.equal(parts.held_out, other.held_out)


def test_every_sequence_is_as_likely_as_any_other_to_be_held_out():
    labels = torch.tensor([0] * 30 + [1] * 10)

    times = sum(torch.bincount(stratified(labels, 0.2, seed, "x"), minlength=40) for seed in range(2000))

    assert int(times.sum()) == 2000 * 8
    assert int(times.min()) > 330  # 400 expected of each, standard deviation 18
    assert int(times.max()) < 470


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((20, 20, 20), 0.2, [4, 4, 4]),
        ((10, 7, 3), 0.2, [2, 1, 1]),
        ((1, 1), 0.5, [0, 0]),
        ((3, 1), 0.01, [1, 0]),
        ((2, 9), 0.85, [1, 8]),
    ],
)
def test_a_stratified_part_has_its_share_of_each_class_and_leaves_one(counts, share, expected):
    labels = torch.tensor([number for number, count in enumerate(counts) for _ in range(count)])

    found = stratified(labels, share, 0, "test")

    assert torch.bincount(labels[found], minlength=len(counts)).tolist() == expected
    assert torch.equal(found, stratified(labels, share, 0, "test"))


def test_a_share_of_groups_leaves_every_class_and_no_half_group():
    groups, labels = torch.arange(60) // 6, torch.arange(60) % 3

    chosen = grouped(labels, groups, 0.2, 0, "test")

    assert len(chosen) == 12
    assert len(groups[chosen].unique()) == 2
    alone = grouped(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), 0.5, 0, "test")
    assert len(alone) == 0  # each class has one group, which has to be learned


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("train test", "1 groups are in both the training and the test part"),
        ("validation test", "1 groups are in both the validation and the test part"),
        ("train validation", "1 groups are in both the training and the validation part, such as that of sequence 1"),
    ],
)
def test_a_group_in_two_parts_of_the_corpus_s_own_split_is_refused(own, words):
    labels, groups = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([7, 7, 1, 2, 3, 4])
    parts = [*own.split(), "train", "train", "test", "validation"]

    with pytest.raises(DatasetError, match=words):
        split(labels, parts, SUPERVISED, groups=groups)

    assert len(split(labels, parts, SUPERVISED).train) >= 2  # without groups it is a good split


def test_no_group_is_in_two_parts_whatever_the_seed():
    groups, labels = torch.arange(80) // 4, torch.arange(80) % 2

    for seed in range(30):
        parts = split(labels, [""] * 80, replace(SUPERVISED, seed=seed), groups=groups)
        sides = [set(groups[part].tolist()) for part in parts]
        assert all(sides)
        assert not sides[0] & sides[1]
        assert not sides[2] & (sides[0] | sides[1])


def test_a_sequence_without_a_group_is_refused():
    data = labelled(torch.arange(4) % 2, torch.arange(4))
    data.columns = {"speaker": ("s0", "s1", "", "s1")}

    with pytest.raises(DatasetError, match="fake: 2 has no speaker"):
        split_sequences(data, replace(SUPERVISED, groups="speaker"))


def test_methods_are_compared_on_a_quarter_and_a_few_sequences_all_train_the_network():
    def share(config, count):
        data = SimpleNamespace(labels=torch.zeros(count).long(), split=("train",) * count)
        return for_comparison(config, data).val_fraction

    auto, network = SequenceTraining(mode="supervised"), SequenceTraining(mode="supervised", method="cnn_lstm")

    assert [share(auto, 100), share(network, 199), share(network, 200)] == [0.25, 0.0, 0.1]
    assert share(replace(auto, val_fraction=0.3), 100) == 0.3


# Folds


FOLDS = replace(SUPERVISED, groups="speaker", folds=3)


@pytest.mark.parametrize("folds", [2, 3, 6, "leave-one-group-out", "fold"])
def test_no_group_is_in_two_parts_and_every_sequence_is_held_out_once(folds):
    groups = torch.arange(36) // 2 % 6
    data, config = labelled(torch.arange(36) % 3, groups), replace(FOLDS, folds=folds)
    data.columns["fold"] = tuple(str(group % 3) for group in groups.tolist())

    plan = plan_folds(data, config)

    assert torch.cat([fold.rows for fold in plan.folds]).sort().values.tolist() == list(range(36))
    assert len(plan.folds) == (folds if isinstance(folds, int) else {"fold": 3}.get(folds, 6))
    for fold in plan.folds:
        parts = split_sequences(plan.split(data, fold), replace(config, folds=None))
        train, validation, held = (set(groups[part].tolist()) for part in parts)
        assert torch.equal(parts.held_out, fold.rows)
        assert not train & validation
        assert not held & (train | validation)


def test_named_folds_hold_the_sequences_of_their_group_or_value_in_natural_order():
    data = labelled(torch.tensor([0, 1, 0, 1, 0, -1]), torch.tensor([10, 9, 9, 10, 2, 9]))
    data.split = ("test", "train", "validation", "test", "test", "train")
    data.columns["part"] = ("b", "b", "a", "a", "b", "c")

    by_group = plan_folds(data, replace(FOLDS, folds="leave-one-group-out")).folds
    by_column = plan_folds(data, replace(FOLDS, folds="part", groups=None)).folds

    assert [(fold.name, fold.rows.tolist()) for fold in by_group] == [("s2", [4]), ("s9", [1, 2]), ("s10", [0, 3])]
    assert [(fold.name, fold.rows.tolist()) for fold in by_column] == [("a", [2, 3]), ("b", [0, 1, 4])]
    plan = plan_folds(data, replace(FOLDS, folds="part", groups=None))
    assert plan.groups is None
    assert plan.split(data, by_column[0]).split == ("train", "train", "test", "test", "train", "train")


def test_grouped_folds_have_classes_in_similar_proportions():
    rng = np.random.default_rng(0)
    groups = torch.from_numpy(rng.integers(0, 40, 2000))
    labels = torch.from_numpy((rng.random(2000) < 0.2).astype(np.int64))

    plan = plan_folds(labelled(labels, groups), replace(FOLDS, folds=5))

    shares = [float(labels[fold.rows].double().mean()) for fold in plan.folds]
    sizes = [len(fold.rows) for fold in plan.folds]
    assert max(shares) - min(shares) < 0.03
    assert max(sizes) < 1.1 * min(sizes)


def test_folds_in_turn_differ_by_one_sequence_at_most_in_all_and_in_each_class():
    labels = torch.tensor([0] * 17 + [1] * 12 + [2] * 5)

    plans = [plan_folds(labelled(labels, labels), replace(FOLDS, folds=4, groups=None, seed=seed)) for seed in (0, 1)]

    table = torch.stack([torch.bincount(labels[fold.rows], minlength=3) for fold in plans[0].folds])
    for counts in (*table.T.tolist(), table.sum(1).tolist()):
        assert all(second - first <= 1 for first, second in pairwise(sorted(counts)))
    assert not torch.equal(plans[0].folds[0].rows, plans[1].folds[0].rows)


def test_a_class_of_a_single_group_is_refused():
    labels, groups = torch.tensor([0, 1] * 6 + [2]), torch.tensor([number // 4 for number in range(12)] + [2])

    with pytest.raises(BrimError, match="the class 'c' is in fold"):
        plan_folds(labelled(labels, groups), FOLDS)


def test_groups_and_the_seed_count_in_folds_and_parts_that_the_user_gives():
    data = labelled(torch.arange(40) % 2, torch.arange(40) // 2)
    data.columns["part"], data.split = tuple("abb" + "a" * 37), ("train",) * 31 + ("test",) * 9

    with pytest.raises(DatasetError, match="the group of 0 is in 2 folds, such as a and b"):
        plan_folds(data, replace(FOLDS, folds="part"))
    with pytest.raises(DatasetError, match=r"1 groups are in both the .* and the test part"):
        split_sequences(data, replace(SUPERVISED, groups="speaker"))
    data.columns["part"], data.split = ("a", "", *"b" * 38), ("train",) * 30 + ("test",) * 10
    with pytest.raises(DatasetError, match="fake: 1 has no part"):
        plan_folds(data, replace(FOLDS, folds="part", groups=None))
    chosen = [split_sequences(data, replace(SUPERVISED, val_fraction=0.3, seed=seed)).validation for seed in (0, 1)]
    assert not torch.equal(*chosen)
