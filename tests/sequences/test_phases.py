"""What training takes from its data: labels, lengths, statistics and settings, of the training part alone."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from labelled import labelled

from brim.engine.device import stream
from brim.engine.training import joined
from brim.errors import CheckpointError
from brim.sequences import Augmentation, SequenceTraining
from brim.sequences.batches import SequenceBatches, make_variants
from brim.sequences.corpus import SequenceFolder, SequenceSplit
from brim.sequences.evaluation.encode import Encodings, FeatureStatistics, _Moments, measure
from brim.sequences.evaluation.scoring import score
from brim.sequences.training.kmeans import kmeans
from brim.sequences.training.methods import (
    SMALL,
    Candidate,
    _average,
    _choose,
    _compare_classes,
    _majority_score,
    _why_no_network,
    check_learned,
    fit_run,
    guessing,
    prepare,
)  # fmt: skip
from brim.sequences.training.phases import (
    PhaseStopped,
    SequenceRun,
    _length,
    _pseudo_labels,
    _step_seconds,
    _supervision,
    _validation,
    run_phase,
    train_self_supervised,
)
from brim.sequences.training.run import SequenceReport, _merge
from brim.sequences.training.unlabelled import _cluster_features, _quality, _row, _stability

CPU = torch.device("cpu")
SUPERVISED = SequenceTraining(mode="supervised")


def run_of(labels, train, validation=(), held_out=(), **more):
    parts = SequenceSplit(*(torch.tensor(part, dtype=torch.int64) for part in (train, validation, held_out)))
    data = labelled(torch.tensor(labels), torch.zeros(len(labels)))
    return SimpleNamespace(
        data=data, split=parts, config=SUPERVISED, device=CPU, ranks=SimpleNamespace(alone=True, device=CPU), **more
    )


def test_numbers_are_learned_relative_to_those_of_the_training_part():
    run = run_of([0] * 5, train=[0, 1], validation=[2], held_out=[3, 4])
    run.data.targets = torch.tensor([1.0, 5.0, 100.0, -100.0, 3.0]).double()

    labels, mean, std, _ = _supervision(run)

    assert (mean, std) == (3.0, 2.0)
    assert labels.tolist() == [-1.0, 1.0, 48.5, -51.5, 0.0]


def test_classes_are_weighed_by_how_often_the_training_part_has_them():
    run = run_of([0, 1, 1, 1, 1, 0, 0, 0, 0], train=[0, 1, 2, 3, 4], held_out=[5, 6, 7, 8])

    loss = _supervision(run).loss

    assert loss.keywords["weight"].tolist() == pytest.approx([5 / 3, 5 / 6])


def test_masked_places_become_the_features_means_and_noise_is_in_their_deviations():
    run = run_of([0], train=[0])
    run.statistics = FeatureStatistics(torch.tensor([3.0, -4.0]), torch.tensor([1e-3, 10.0]))
    batch = {"frames": torch.full((64, 50, 2), 7.0), "length": torch.full((64,), 50), "label": torch.zeros(64)}
    settings = Augmentation(crop=0, noise=0.5, time_masks=1, time_width=0.5, feature_masks=0)
    run.config = replace(SUPERVISED, augmentation=settings)

    frames = SequenceRun.augmented(run)(batch, stream(0, "x", device=CPU))["frames"]

    masked = frames[..., 1] == -4
    assert torch.equal(masked, frames[..., 0] == 3)
    assert 0.1 < float(masked.float().mean()) < 0.4
    assert float(frames[~masked][:, 0].std()) < 0.01
    assert 1 < float(frames[~masked][:, 1].std()) < 5


def test_views_are_augmented_in_the_features_units(monkeypatch):
    def stop(*_, transform, **__):
        raise PhaseStopped(transform)

    run, mean = run_of([0, 1], train=[0, 1], statistics=(torch.tensor([3.0, -4.0]), torch.ones(2))), [3.0, -4.0]
    run.config, run.view = SequenceTraining(augmentation=Augmentation(feature_masks=0)), (lambda *_: None)
    run.new = run.new_encoder = lambda *_: torch.nn.Identity()
    monkeypatch.setattr("brim.sequences.training.phases.run_phase", stop)

    with pytest.raises(PhaseStopped) as stopped:
        train_self_supervised(run)
    batch = {"frames": torch.full((8, 50, 2), 7.0), "length": torch.full((8,), 50)}
    made = stopped.value.args[0](batch, stream(0, "x", device=CPU))

    assert made["view"][:, 0][made["hidden"]].unique(dim=0).tolist() == [mean]


def test_the_validation_loss_is_the_mean_over_sequences_not_over_batches():
    logits = torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 0.0]])
    batches = [{"frames": logits[:2], "length": None, "label": torch.tensor([0, 0])},
               {"frames": logits[2:], "length": None, "label": torch.tensor([1])}]  # fmt: skip
    source = SimpleNamespace(epoch=lambda number: batches)
    run = run_of([0, 0, 1], train=[0], validation=[1, 2])
    run.batches = SimpleNamespace(plain=lambda rows, labels: source)

    measured = _validation(run, run.data.labels)(lambda frames, length: frames)

    assert measured["val_accuracy"] == pytest.approx(1 / 3)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 0, 1]))
    assert measured["val_loss"] == pytest.approx(float(expected))


def test_a_phase_ends_with_the_weights_of_the_least_validation_loss_else_with_the_last(tmp_path):
    for row in range(4):
        np.save(tmp_path / f"{row}.npy", np.ones((2, 1), np.float32))
    config = replace(SUPERVISED, learning_rate=0.1)
    with joined("cpu") as ranks, SequenceBatches(SequenceFolder(tmp_path), config, CPU) as batches:
        run = SimpleNamespace(
            out=tmp_path / "run", config=config, ranks=ranks, device=CPU, progress=None, stop=None, reports=[]
        )

        def train(name, losses=(), **more):
            module, seen = torch.nn.Linear(1, 1), []

            def evaluate(module):
                seen.append(float(module.weight.detach()))
                return {"val_loss": losses[len(seen) - 1]}

            def loss(module, batch):
                return module(batch["frames"]).mean()

            source = batches.view(torch.arange(4))
            run_phase(run, name, module, loss, source, evaluate=evaluate if losses else None, **more)
            return float(module.weight.detach()), seen

        best, seen = train("one", [3.0, 1.0, 2.0], epochs=3)
        _, patient = train("two", [3.0, 1.0, 2.0, 2.5, 0.0], epochs=5, patience=2)
        last, _ = train("three", epochs=3)

    assert best == seen[1] != seen[2]
    assert len(patient) == 4
    assert [(report.epochs, report.samples, report.val_loss) for report in run.reports] == [
        (3, 12, 1.0),
        (4, 16, 1.0),
        (3, 12, None),
    ]
    assert last != best


@pytest.mark.parametrize(("batches", "epochs", "patience"), [(10, 150, 37), (1, 1000, 250), (700, 15, 5)])
def test_epochs_are_those_of_1500_steps_and_patience_a_quarter_of_them(batches, epochs, patience):
    run, source = run_of([0], train=[0]), SimpleNamespace(num_batches=batches)

    assert _length(run, "supervised", None, None, source, None) == (epochs, patience)


def test_members_share_a_budget_whose_epochs_are_kept(tmp_path, monkeypatch):
    run, module = run_of([0] * 6, train=range(4), out=tmp_path), torch.nn.BatchNorm1d(1)
    source = SimpleNamespace(num_batches=10, epoch=lambda number: (one for one in 1 + torch.rand(3, 5, 1)))
    run.config = replace(SUPERVISED, members=2)

    _step_seconds(run, module, lambda module, batch: module(batch).sum(), source)

    assert not module.running_mean.any()  # measuring changes nothing
    for seconds in (0.1, 7.0):
        monkeypatch.setattr("brim.sequences.training.phases._step_seconds", lambda *_, seconds=seconds: seconds)
        assert _length(run, "one", module, None, source, 30.0) == (15, 5)  # 150 steps of each


@pytest.mark.parametrize(("count", "batch_size"), [(20, 16), (130, 16), (260, 32), (520, 64), (5001, 64)])
def test_small_data_is_trained_in_small_batches_with_a_small_network(count, batch_size):
    data = SimpleNamespace(targets=None, lengths=torch.full((10,), 30))

    used = prepare(replace(SUPERVISED, method="cnn_lstm"), data, count)

    small = count <= 5000
    assert (used.batch_size, used.model.channels) == (batch_size, 64 if small else 384)
    assert (used.budget, used.augmentation is None) == (35.0 if small else None, small)
    assert prepare(replace(SUPERVISED, method="ensemble"), data, count).members == 3
    assert prepare(SUPERVISED, data, count).members == 1


def test_guessing_answers_with_the_most_frequent_class_of_the_training_part():
    run = run_of([0, 0, 0, 1, 1, 1, 1, 1], train=[0, 1, 3], validation=[2], held_out=[4, 5, 6, 7])
    run.data.labels[7] = 0

    assert guessing(run.data, run.split).score == 0.75
    guess, least, _ = _majority_score(run, run.split.held_out)
    assert (guess, least) == pytest.approx((0.25, 0.25 + (0.25 * 0.75 / 4) ** 0.5))


def test_a_score_within_a_standard_error_of_guessing_is_said():
    run = run_of([0] * 10 + [0] * 13 + [1] * 12, train=range(10), held_out=range(10, 35))
    run.ranks.alone, run.data.lengths, run.data.dim = False, torch.ones(35), 1  # of 25, 52 ± 10 %

    said = [check_learned(run, SimpleNamespace(model="cnn_lstm"), {"accuracy": one}) for one in (0.52, 0.61, 0.63)]

    assert "against 0.52 for the majority class; " in said[0][0]
    assert "class, within chance on 25 sequences" in said[1][0]
    assert said[2] == []


def test_a_network_is_weighed_by_how_likely_it_makes_the_truth():
    ours = torch.tensor([[0.5, 0.5]] * 4).double()
    theirs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.2, 0.8]]).double()

    share, gain, score, loss = _compare_classes(ours, theirs, torch.tensor([0, 0, 0, 0]))

    # with an item that each alone explains: s (1 - s) (0.5 + 0.3 s)³ (0.5 - 0.3 s) is largest at s = 5 / 9
    assert share == pytest.approx(5 / 9, abs=1e-4)
    assert gain.exp().tolist() == pytest.approx([4 / 3, 4 / 3, 4 / 3, 2 / 3], abs=1e-3)
    assert (score, loss) == (0.75, pytest.approx(-(3 * torch.tensor(0.8).log() + torch.tensor(0.2).log()) / 4))


def test_a_network_is_not_tried_where_rocket_is_perfect_or_too_few_compare():
    run = run_of([0, 1] * 10, train=list(range(10)), validation=list(range(10, 20)))
    fit = SimpleNamespace(rows=torch.arange(20), left_out=torch.eye(2).repeat(10, 1))

    assert "right on 100.0%" in _why_no_network(run, fit, "auto", 5.0)
    assert _why_no_network(run, fit, "ensemble", 5.0) == ""
    fit.left_out = fit.left_out.flip(1)
    assert _why_no_network(run, fit, "auto", 5.0) == ""
    assert "the time of the budget" in _why_no_network(run, fit, "auto", 1.9)
    few = run_of([0, 1] * 10, train=list(range(13)), validation=list(range(13, 20)))
    assert _why_no_network(few, fit, "ensemble", 5.0) == "7 sequences to compare on are too few"


def test_rocket_is_fitted_to_training_and_validation_with_their_groups(monkeypatch):
    rng = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(24, 1, 40, generator=rng), torch.randperm(24, generator=rng) % 2
    validation = [12, 13, 14, *range(63, 72)]
    run = run_of(labels.repeat_interleave(3).tolist(), list(range(15, 63)), validation, list(range(12)))
    run.data.lengths, run.data.dim, run.stop, run.progress, run.reports = torch.full((72,), 5), 40, None, None, []
    frames = centres.repeat_interleave(3, 0) + 0.01 * torch.randn(72, 5, 40, generator=rng)
    run.data.read_item = lambda row, out: out.copy_(frames[row])
    run.data.columns["speaker"] = tuple(str(row // 3) for row in range(72))

    alone = fit_run(run, ("statistics",))
    run.config = replace(SUPERVISED, groups="speaker")
    apart = fit_run(run, ("statistics",))

    kernels = fit_run(run, ("rocket",)).left_out
    run.config = replace(run.config, seed=1)

    assert not torch.equal(fit_run(run, ("rocket",)).left_out, kernels)
    assert alone.rows.tolist() == apart.rows.tolist() == list(range(12, 72))
    monkeypatch.setattr("brim.sequences.rocket.fit.MAX_DUAL", 30)
    assert fit_run(run, ("statistics",)).rows.tolist() == validation  # they choose the penalty, and compare
    assert alone.heads[0].score > 0.95  # copies of a sequence tell its label
    assert apart.heads[0].score < 0.8


@pytest.mark.parametrize(
    ("right", "method", "kept"),
    [(12, "auto", "rocket"), (12, "ensemble", "rocket + cnn_lstm"), (20, "auto", "rocket + cnn_lstm")],
)
def test_a_network_that_is_better_by_chance_is_not_kept(monkeypatch, right, method, kept):
    run = run_of([0] * 30, train=list(range(10)), validation=list(range(10, 30)))
    run.batches = SimpleNamespace(plain=lambda rows: None)
    theirs = torch.tensor([[0.7, 0.3]] * right + [[0.3, 0.7]] * (20 - right))
    monkeypatch.setattr("brim.sequences.training.methods.encode", lambda *_: SimpleNamespace(output=theirs))
    fit = SimpleNamespace(
        rows=torch.arange(30), left_out=torch.full((30, 2), 0.5).double(), module=SimpleNamespace(is_regression=False)
    )
    table = [Candidate(model="rocket", score=0.5, loss=0.7, weight=1.0, measured_on="left out")]

    outcome = _average(run, fit, torch.nn.Identity(), table, method)

    rocket, network = outcome.comparison
    assert (outcome.model, network.score) == (kept, right / 20)
    assert rocket.weight + network.weight == pytest.approx(1)
    assert (network.weight > 0) == (kept != "rocket")
    if kept != "rocket":
        assert outcome.module.share == network.weight


def test_clusters_are_of_directions_and_computed_once(monkeypatch, tmp_path):
    embedding = torch.tensor([[1.0, 0], [50, 1], [0, 1], [1, 60]])
    run = run_of([0] * 5, train=[0, 1, 2, 4], held_out=[3], out=tmp_path, seed=lambda *name: 0)
    run.ranks.from_main, run.batches = (lambda call: call()), SimpleNamespace(plain=lambda rows: None)
    encoded = (run.split.train, embedding, None, None)
    monkeypatch.setattr("brim.sequences.training.phases.encode", lambda *_, **__: encoded)

    labels = _pseudo_labels(run, None, 2, 1)
    monkeypatch.setattr("brim.sequences.training.phases.encode", lambda *_, **__: pytest.fail("computed again"))

    assert (labels[0] == labels[1] != labels[2], labels[2] == labels[4], int(labels[3])) == (True, True, -1)
    assert torch.equal(_pseudo_labels(run, None, 2, 1), labels)
    run.split = run.split._replace(train=torch.tensor([0, 1, 2, 3]))
    with pytest.raises(CheckpointError, match="belongs to other items"):
        _pseudo_labels(run, None, 2, 1)


def test_clusters_are_judged_by_the_labels_of_the_training_part():
    run = run_of([1, 1, 1, 0, 0, 1, 1, -1], train=[3, 4, 5, 6, 7], held_out=[0, 1, 2])
    encoded = SimpleNamespace(row=torch.arange(3, 8), prediction=torch.tensor([0, 0, 1, 2, 7]))

    assert _quality(run, SimpleNamespace(encoded=encoded)) == (pytest.approx(4 / 7), "training labels (ARI)")


def test_a_sequence_is_in_the_cluster_of_the_nearest_centre_and_held_out_ones_are_only_scored(tmp_path):
    """Sequences held out have labels that cross their clusters: of 9 in 3 x 3 cells the adjusted Rand index is -1/3."""
    rng = np.random.default_rng(0)
    for row in range(30):
        np.save(tmp_path / f"{row:02d}.npy", rng.normal((-30, 0, 30)[row % 3], 1, (6, 4)).astype(np.float32))
    data, config = SequenceFolder(tmp_path), SequenceTraining(clusters=3)
    data.labels = torch.tensor([row % 3 if row < 21 else row // 3 % 3 for row in range(30)])
    statistics, read, parts = FeatureStatistics(torch.zeros(4), torch.ones(4)), [], torch.arange(30).split([15, 6, 9])
    read_item = data.read_item
    data.read_item = lambda row, out: (read.append(row), read_item(row, out))
    with joined("cpu") as ranks, SequenceBatches(data, config, CPU) as batches:
        run = SequenceRun(
            out=tmp_path, data=data, split=SequenceSplit(*parts), config=config, batches=batches,
            statistics=statistics, ranks=ranks,
        )  # fmt: skip
        clustering = _cluster_features(run, "statistics clusters")
        found, known = clustering.encoded, set(read)
        row = _row(run, clustering, 0.9, "stability", kept=True)
        best = kmeans(found.embedding, 3, restarts=config.restarts, seed=run.seed("statistics clusters"))

    assert torch.equal(found.prediction, best.labels)
    assert known == set(range(15))
    assert row.held_out["ari"] == pytest.approx(-1 / 3)


def test_clusters_that_are_not_there_are_unstable():
    points = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    run = run_of([0] * 200, train=range(200), seed=lambda _, repeat, half: 2 * repeat + half)
    run.config = SequenceTraining(clusters=5)

    def stability(points):
        return _stability(run, SimpleNamespace(name="rocket clusters", encoded=SimpleNamespace(embedding=points)))

    assert stability(points) < 0.75
    assert stability(points + 20 * (torch.arange(200) % 5)[:, None]) == 1


def test_the_comparison_of_folds_is_their_mean():
    def candidate(model, score, loss, weight):
        return Candidate(model=model, score=score, loss=loss, weight=weight, measured_on="x")

    alike = {"mode": "supervised", "padding_share": 0.5, "tier": "ram", "busy_share": 1.0, "scores": None}
    reports = [
        SequenceReport(
            run=f"x/{number}", samples_per_s=2.0 * number, peak_bytes=10 - number, comparison=row, warnings=("poor",),
            ceiling_share=None if number == 1 else 0.25, **alike,
        )
        for number, row in ((1, (candidate("a", 0.5, 2.0, 1.0), candidate("b", 0.2, None, 0.0))),
                            (2, (candidate("a", 1.0, 1.0, 0.5),)))
    ]  # fmt: skip

    whole = _merge(reports, Path("x"), SUPERVISED, {})

    one, two = whole.comparison
    assert (whole.samples_per_s, whole.peak_bytes, whole.ceiling_share, whole.stopped) == (3.0, 9, 0.25, False)
    assert whole.warnings == ("1: poor", "2: poor")
    assert (one.score, one.loss, one.weight) == (0.75, 1.5, 0.75)
    assert (two.score, two.loss, two.weight) == (0.2, None, 0.0)


def test_statistics_of_several_ranks_are_those_of_all_their_frames():
    values = torch.tensor([[1.0], [2.0], [3.0], [10.0], [20.0]]).double()
    parts = [_Moments(part.mean(0), part.var(0, correction=0), torch.tensor(len(part))) for part in values.split(3)]

    mean, std = measure(None, CPU, SimpleNamespace(all_of=lambda mine: parts))

    assert float(mean) == pytest.approx(7.2)
    assert float(std) == pytest.approx(float(values.std(correction=0)))


def test_augmented_copies_are_made_once_and_used_in_turn(tmp_path):
    for row, length in enumerate((3, 5, 4, 6)):
        np.save(tmp_path / f"{row}.npy", np.full((length, 2), row, np.float32))
    calls = []

    def shift(batch, rng):
        calls.append(float(torch.rand((), generator=rng)))
        valid = batch["frames"][..., 0].new_tensor(range(batch["frames"].shape[1])) < batch["length"][:, None] - 1
        return {
            **batch,
            "frames": (batch["frames"] + 100 * len(calls)) * valid[..., None],
            "length": batch["length"] - 1,
        }

    config = replace(SUPERVISED, batch_size=2, variants=2)
    with (
        SequenceBatches(SequenceFolder(tmp_path), config, CPU) as batches,
        make_variants(batches, torch.tensor([3, 1]), torch.tensor([7, 8, 9, 6]), shift, [0, 1]) as variants,
    ):
        epochs = [next(iter(variants.epoch(number))) for number in (0, 1, 2)]

    assert len(calls) == len(set(calls)) == 2
    for copy, batch in zip((100, 200, 100), epochs, strict=True):
        rows = sorted(
            zip(batch["length"].tolist(), batch["frames"][:, 0, 0].tolist(), batch["label"].tolist(), strict=True)
        )
        assert rows == [(4, copy + 1, 8), (5, copy + 3, 6)]


def test_weights_and_order_depend_on_the_seed_and_the_phase():
    found, batches = {}, SimpleNamespace(view=lambda rows, label, seed: seed)
    for seed in (0, 1, 0):
        run = SequenceRun(
            out=None, data=None, split=None, config=replace(SUPERVISED, seed=seed), batches=batches, statistics=None,
            ranks=SimpleNamespace(device=CPU),
        )  # fmt: skip
        for name in ("supervised-1", "supervised-2"):
            weight = run.new(lambda: torch.nn.Linear(1, 4), name).weight.flatten().tolist()
            assert found.setdefault((seed, name), (*weight, run.view(None, name))) == (*weight, run.view(None, name))

    assert [len(set(values)) for values in zip(*found.values(), strict=True)] == [4] * 5


def test_a_validation_part_of_twenty_chooses_the_weights_of_a_small_network():
    run = run_of([0] * 40, train=range(10), validation=range(10, 29))
    assert _choose(run)  # not small
    run.config = replace(SUPERVISED, model=replace(SMALL, stride=7))
    assert not _choose(run)
    run.split = run.split._replace(validation=torch.arange(10, 30))
    assert _choose(run)


def test_a_probe_is_fitted_to_the_training_part(monkeypatch):
    """There a coordinate is the label, on the sequences held out the opposite."""
    run = run_of([0, 1] * 20, train=range(20), held_out=range(20, 40))

    def encoded(module, rows, *_, **__):
        value = torch.where(rows < 20, run.data.labels[rows], 1 - run.data.labels[rows]).float()[:, None]
        return Encodings(rows, value, run.data.labels[rows], value)

    monkeypatch.setattr("brim.sequences.evaluation.scoring.encode", encoded)
    batches = SimpleNamespace(config=SequenceTraining(), device=CPU, plain=lambda rows: rows)

    scores, _ = score(None, batches, run.data, run.split)

    assert (scores["probe_accuracy"], scores["ari"]) == (0, 1)
