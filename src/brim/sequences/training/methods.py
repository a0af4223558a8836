"""Training with labels by the chosen method: rocket, the network, both, or whichever does best on the training part.

Rocket is fitted in closed form and compared by predictions of sequences that were left out. The network is trained on
the training part and compared on the validation part, where rocket's left-out predictions are known too. The average of
both is weighted by how likely they make the true labels there.

Axes: n sequences, m of the validation part, K classes.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brim.engine.meter import within
from brim.engine.meter.spent import WORK
from brim.engine.networks import title_of
from brim.engine.training import TrainProgress
from brim.errors import ConfigError
from brim.sequences.config import Augmentation, EncoderShape, Method, SequenceTraining
from brim.sequences.corpus import Sequences, SequenceSplit, number_groups
from brim.sequences.evaluation import ScoresByName, encode
from brim.sequences.model import Classifier, Committee, Network
from brim.sequences.rocket import RocketBlend, RocketFit, fit_rocket, mixture
from brim.sequences.training.phases import InitialEncoder, PhaseReport, PhaseStopped, SequenceRun, train_supervised

log = logging.getLogger("brim")

BUDGET_S = {"auto": 8.0, "ensemble": 35.0, "cnn_lstm": 35.0}  # of the last if the network is small
SMALL = EncoderShape(
    channels=64, kernel=9, convolutions=3, hidden=64, layers=1, attention=32, embedding=64, dropout=0.1,
    front="residual",
)  # fmt: skip
_SMALL_UP_TO = 5_000  # sequences; more are worth the full network
_SMALL_RATE = 3e-3
_STEPS_SEEN, _SMALL_STEPS_SEEN = 250, 100  # by the LSTM, of all but the longest sequences
_MEMBERS = 3  # networks of an ensemble
_VALIDATION = 0.25  # share of the training part on which methods are compared
_LEAST_VALIDATION = 20  # sequences that choose the weights of a small network; fewer would do so by chance
_LEAST_S = 2.0  # below, a network cannot be trained
_LEAST_COMPARED = 8  # validation sequences; fewer say too little
_GAIN_ERRORS = 2.0  # standard errors by which the network must improve the likelihood of the validation part
_PERFECT = 0.995
_READ_AGAIN = 1 << 28  # values of a corpus; more are not read once more only to compare rocket with statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A row of the comparison."""

    model: str
    score: float  # accuracy, or R², on sequences that it was not trained on
    loss: float | None  # cross entropy, or mean squared error relative to the variance
    weight: float  # in the model that is kept
    measured_on: str  # which sequences, or how
    held_out: dict[str, float] | None = None  # without labels: scores of the clusters on the held-out part


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a method leaves."""

    module: Network
    model: str  # what was kept, in words
    comparison: list[Candidate] = field(default_factory=list)


class SequenceRows(Sequence[Tensor]):
    """Some sequences of a corpus, each read when it is asked for."""

    def __init__(self, data: Sequences, rows: Tensor, stop: Callable[[], bool] | None = None) -> None:
        self.data, self.rows, self.stop = data, rows.tolist(), stop

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """(T, D) float32; a slice is a list of these."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if self.stop is not None and self.stop():
            raise PhaseStopped
        frames = torch.empty(int(self.data.lengths[self.rows[index]]), self.data.dim)
        self.data.read_item(self.rows[index], frames)
        return frames


def prepare(config: SequenceTraining, data: Sequences, num_train: int) -> SequenceTraining:
    """The settings that training uses: the method, and what the settings leave to the data."""
    method = config.resolved_method
    if config.mode == "self":
        return replace(config, method=method, model=replace(config.model, stride=config.model.stride or 1))
    changes: dict[str, Any] = {"method": method}
    if _is_small(config) and num_train <= _SMALL_UP_TO:
        changes["model"] = SMALL
        if config.augmentation == Augmentation():
            changes["augmentation"] = None  # underfitted with it: see results/networks_2cores_2026-11-16.md
        if config.learning_rate == SequenceTraining().learning_rate:
            changes["learning_rate"] = _SMALL_RATE
        if method == "cnn_lstm" and config.classifier_epochs is None:
            changes["budget"] = config.budget or BUDGET_S[method]
    if method in ("auto", "ensemble"):
        changes["members"] = _MEMBERS if method == "ensemble" else 1
    if config.classifier_epochs is None and config.max_frames is None and config.batch_size == 64:
        changes["batch_size"] = min(64, max(16, 2 ** int(math.log2(max(1, num_train / 8)))))
    shape = changes.get("model", config.model)
    if shape.stride == 0:
        usual = float(data.lengths.double().quantile(0.95))
        stride = max(1, math.ceil(usual / (_SMALL_STEPS_SEEN if shape == SMALL else _STEPS_SEEN)))
        stride = 1 if config.encoder else stride
        changes["model"] = replace(shape, stride=stride)
    return replace(config, **changes)


def _is_small(config: SequenceTraining) -> bool:
    """Whether the data chooses the size of the network: the method is named, and no setting of the network is."""
    named = config.method != "auto" or config.resolved_method == "auto"
    return named and config.model == EncoderShape() and config.encoder is None


def for_comparison(config: SequenceTraining, data: Sequences) -> SequenceTraining:
    """Settings of the split: methods are compared on a larger validation part, a network alone may need none."""
    if config.mode != "supervised" or config.val_fraction != SequenceTraining().val_fraction:
        return config
    if config.resolved_method in ("auto", "ensemble"):
        return replace(config, val_fraction=_VALIDATION)
    num_labelled = int((data.labels[torch.tensor([part != "test" for part in data.split])] >= 0).sum())
    few = config.val_fraction * num_labelled < _LEAST_VALIDATION
    return replace(config, val_fraction=0.0) if few and config.method == "cnn_lstm" and _is_small(config) else config


# Methods


def train_by_method(run: SequenceRun, initial: InitialEncoder | None, began_s: float) -> Outcome:
    """Train by the method of the run's settings; began_s is when the time of the budget began."""
    method: Method = run.config.method
    if method == "cnn_lstm" or not run.ranks.alone:
        if method in ("rocket", "ensemble"):
            raise ConfigError(f"needs a single process, there are {run.ranks.size}", field="method", value=method)
        module = train_supervised(run, initial, run.config.budget, choose=_choose(run))
        name = "cnn_lstm" if run.config.network is None else title_of(run.config.network)
        return Outcome(module=module, model=name, comparison=[guessing(run.data, run.split)])
    fit = fit_run(run)
    table = [*_rows(fit), guessing(run.data, run.split)]
    if method == "rocket":
        return Outcome(module=fit.module, model="rocket", comparison=table)
    budget_s = (run.config.budget or BUDGET_S[method]) - (time.perf_counter() - began_s)
    reason = _why_no_network(run, fit, method, budget_s)
    if reason:
        log.info("cnn_lstm was not tried: %s", reason)
        return Outcome(module=fit.module, model="rocket", comparison=table)
    network = train_supervised(run, None, max(budget_s, _LEAST_S), choose=_choose(run))
    assert isinstance(network, Classifier | Committee), "no other network is averaged"
    return _average(run, fit, network, table, method)


def _choose(run: SequenceRun) -> bool:
    """Whether the validation part chooses the weights: a few sequences would do so by chance."""
    small = replace(run.config.model, stride=0) == SMALL
    return not small or len(run.split.validation) >= _LEAST_VALIDATION


def fit_run(run: SequenceRun, heads: Sequence[str] | None = None) -> RocketFit:
    """Fit rocket to the training and the validation part."""
    rows, data = torch.cat([run.split.train, run.split.validation]).sort().values, run.data
    began_s = time.perf_counter()

    def tell(done: int, total: int) -> None:
        if heads is not None:
            return
        if run.stop is not None and run.stop():
            raise PhaseStopped
        if run.progress is not None:
            rate = done / max(time.perf_counter() - began_s, 1e-9)
            run.progress(
                TrainProgress(
                    phase="rocket", epoch=0, epochs=1, step=done, steps=total, loss=None, samples_per_s=rate,
                    eta_s=(total - done) / rate, seconds=time.perf_counter() - began_s,
                )
            )  # fmt: skip

    groups = None if run.config.groups is None else number_groups(data, run.config.groups)[rows]
    more: dict[str, Any] = {} if heads is None else {"heads": heads}
    if len(run.split.validation):  # on which the network is compared with rocket
        more["aside"] = torch.isin(rows, run.split.validation)
    try:
        with within(WORK):
            fit = fit_rocket(
                SequenceRows(data, rows, run.stop if heads is None else None),
                data.labels[rows] if data.targets is None else data.targets[rows],
                task="classification" if data.targets is None else "regression",
                num_classes=len(data.classes) if data.targets is None else None,
                groups=groups, seed=run.config.seed % 2**31, device=run.device, progress=tell, **more,
            )  # fmt: skip
    except PhaseStopped:
        run.reports.append(rocket_phase(0, time.perf_counter() - began_s, None, stopped=True))
        raise
    loss = sum(head.weight * head.loss for head in fit.heads)
    if heads is None:
        run.reports.append(rocket_phase(len(rows), time.perf_counter() - began_s, loss))
    return replace_rows(fit, rows)


def replace_rows(fit: RocketFit, rows: Tensor) -> RocketFit:
    """The fit with rows of the corpus instead of places among the training sequences."""
    return replace(fit, rows=rows[fit.rows])


def rocket_phase(samples: int, seconds: float, loss: float | None, *, stopped: bool = False) -> PhaseReport:
    return PhaseReport(
        phase="rocket", epochs=0 if stopped else 1, samples=samples, seconds=seconds, tier="ram", padding_share=0.0,
        ceiling_share=None, busy_share=1.0, peak_bytes=0, val_loss=loss, stopped=stopped,
    )  # fmt: skip


def _rows(fit: RocketFit) -> list[Candidate]:
    return [
        Candidate(model=head.name, score=head.score, loss=head.loss, weight=head.weight, measured_on="left out")
        for head in fit.heads
    ]


def guessing(data: Sequences, parts: SequenceSplit) -> Candidate:
    """What always answering the most frequent class, or the mean number, of the training part scores there."""
    rows = torch.cat([parts.train, parts.validation])
    if data.targets is not None:
        return Candidate(model="mean", score=0.0, loss=1.0, weight=0.0, measured_on="training part")
    share = float(torch.bincount(data.labels[rows]).max() / len(rows))
    return Candidate(model="majority class", score=share, loss=None, weight=0.0, measured_on="training part")


def _why_no_network(run: SequenceRun, fit: RocketFit, method: Method, budget_s: float) -> str:
    known = torch.isin(fit.rows, run.split.validation)
    if int(known.sum()) < _LEAST_COMPARED:
        return f"{int(known.sum())} sequences to compare on are too few"
    if method == "auto" and budget_s < _LEAST_S:
        return "rocket took the time of the budget"
    if run.data.targets is None:
        accuracy = _accuracy(fit.left_out, run.data.labels[fit.rows])
        if method == "auto" and accuracy >= _PERFECT:
            return f"rocket is right on {accuracy:.1%} of the sequences left out"
    return ""


def _accuracy(probability: Tensor, truth: Tensor) -> float:
    return float((probability.argmax(1) == truth).double().mean())


def _average(run: SequenceRun, fit: RocketFit, network: Any, table: list[Candidate], method: Method) -> Outcome:
    """Weigh rocket and the network by what they predict for the validation part."""
    known = torch.isin(fit.rows, run.split.validation)
    rows, ours = fit.rows[known], fit.left_out[known]
    theirs = encode(network, run.batches.plain(rows), run.device).output.double()
    share, gain, score, loss = (
        _compare_classes(ours, theirs, run.data.labels[rows])
        if run.data.targets is None
        else _compare_numbers(ours[:, 0], theirs[:, 0], run.data.targets[rows])
    )
    if method == "auto" and float(gain.mean()) <= _GAIN_ERRORS * float(gain.std()) / math.sqrt(len(gain)):
        share = 0.0  # not better by more than chance
    table = [replace(row, weight=row.weight * (1 - share)) for row in table]
    table.append(Candidate(model="cnn_lstm", score=score, loss=loss, weight=share, measured_on="validation part"))
    if share == 0:
        return Outcome(module=fit.module, model="rocket", comparison=table)
    module = RocketBlend(fit.module, network.cpu(), share)
    return Outcome(module=module, model="rocket + cnn_lstm", comparison=table)


class _Comparison(NamedTuple):
    share: float  # of the network in the best average
    gain: Tensor  # (m,) what the average improves over rocket: log likelihood, or squared error
    score: float  # of the network: accuracy or R²
    loss: float  # of the network: cross entropy, or mean squared error relative to the variance


def _compare_classes(ours: Tensor, theirs: Tensor, truth: Tensor) -> _Comparison:
    """From probabilities, (m, K) each, and classes, (m,)."""
    of_truth = torch.stack([part[torch.arange(len(truth)), truth] for part in (ours, theirs)]).clamp(min=1e-12)
    share = float(mixture(of_truth, torch.ones(2, dtype=torch.float64))[1])
    gain = torch.lerp(of_truth[0], of_truth[1], share).log() - of_truth[0].log()
    return _Comparison(share, gain, _accuracy(theirs, truth), float(-of_truth[1].log().mean()))


def _compare_numbers(ours: Tensor, theirs: Tensor, truth: Tensor) -> _Comparison:
    """From numbers, (m,) each; the share has the least squared error."""
    apart, error = theirs - ours, truth - ours
    share = min(max(float((apart * error).sum() / apart.square().sum().clamp(min=1e-30)), 0.0), 1.0)
    gain = error.square() - (error - share * apart).square()
    loss = float((theirs - truth).square().mean() / truth.var(correction=0).clamp(min=1e-30))
    return _Comparison(share, gain, 1 - loss, loss)


# Did it learn?


def check_learned(run: SequenceRun, outcome: Outcome, scores: ScoresByName | None) -> list[str]:
    """Sentences for a model that does no better than something much simpler, on the sequences held out."""
    rows = run.split.held_out[run.data.labels[run.split.held_out] >= 0]
    if scores is None or not len(rows):
        return []
    numbers, is_network = run.data.targets is not None, outcome.model == "cnn_lstm"
    measure, reached = ("R²", scores["r2"]) if numbers else ("accuracy", scores["accuracy"])
    if reached is None:
        return []
    guess, least, simplest = (0.0, 0.0, "the mean") if numbers else _majority_score(run, rows)
    warnings = []
    if reached <= least:
        known = run.data.labels[torch.cat([run.split.train, run.split.validation])]
        remedy = "compare methods with the model auto"
        if not is_network and numbers:
            remedy = f"check that numbers and files belong together, and add sequences: there are {len(known)}"
        elif not is_network:
            rarest = int(torch.bincount(known)[torch.bincount(known) > 0].min())
            remedy = f"check that labels and files belong together, and add sequences: the rarest class has {rarest}"
        chance = f", within chance on {len(rows)} sequences" if reached > guess else ""
        warnings.append(f"did not learn: {measure} {reached:.2f} against {guess:.2f} for {simplest}{chance}; {remedy}")
    small = int(run.data.lengths.sum()) * run.data.dim <= _READ_AGAIN
    if run.ranks.alone and (is_network or small):
        simple = _statistics_score(run, rows)
        if is_network:
            row = Candidate(model="statistics", score=simple, loss=None, weight=0.0, measured_on="held-out part")
            outcome.comparison.append(row)
        if reached < simple:
            remedy = "use the model auto or rocket, or train longer"
            if not is_network:
                remedy = "the training part did not show it: see with folds whether that holds, or add sequences"
            warnings.append(
                f"{measure} {reached:.3f} is below the {simple:.3f} of a linear model on summary statistics; {remedy}"
            )
    return warnings


def _majority_score(run: SequenceRun, rows: Tensor) -> tuple[float, float, str]:
    """What the majority class of the training part scores on these rows, and that with a standard error."""
    known = run.data.labels[torch.cat([run.split.train, run.split.validation])]
    guess = float((run.data.labels[rows] == torch.bincount(known).argmax()).double().mean())
    return guess, guess + math.sqrt(guess * (1 - guess) / len(rows)), "the majority class"


def _statistics_score(run: SequenceRun, rows: Tensor) -> float:
    plain = fit_run(run, ("statistics",))
    simple = encode(plain.module.to(run.device), run.batches.plain(rows), run.device)
    if run.data.targets is None:
        return float((simple.prediction == run.data.labels[simple.row]).double().mean())
    truth = run.data.targets[simple.row]
    return 1 - float((simple.output[:, 0] - truth).square().mean() / truth.var(correction=0).clamp(min=1e-30))
