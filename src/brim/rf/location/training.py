"""Training a locator: split, calibrate, solve once, train.

The solver runs once over all rows before the first epoch. Its columns are kept in the user's cache as a dataset beside
the one trained on: the tiers read both, so that a window holds more than the host's memory, and later runs and those
that are continued do not solve again. With several ranks, each solves and holds its own rows in memory, and rank 0
those held out.

Rows come from datasets, or are made in memory and never written (`stream`). Every evaluation is compared with the best
answer that needs no training.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from brim import __version__
from brim.engine.config import recipe_of
from brim.engine.device import describe
from brim.engine.device import stream as random_stream
from brim.engine.meter import accounting, within
from brim.engine.rows import DatasetSource, Resident, SideBySide, Source, TensorSource, read_rows
from brim.engine.storage import MANIFEST, Dataset, ShardWriter, allocate, cache_folder
from brim.engine.training import Ranks, TrainProgress, TrainReport, check_enough, check_same, joined, write_hub
from brim.engine.training import train as run_trainer
from brim.errors import ConfigError, DatasetError, StorageError
from brim.report.page import metres
from brim.rf.config import GenerateConfig, LocatorTraining
from brim.rf.datasets.summary import named_columns, open_dataset
from brim.rf.features import FEATURES
from brim.rf.location import model, solver
from brim.rf.location.evaluate import PLAIN_NAMES, SAME, baselines, fitted_stretch
from brim.rf.location.fingerprints import FINGERPRINT_FILE, Fingerprints
from brim.rf.location.fingerprints import MOST as FINGERPRINTS
from brim.rf.location.model import (
    Estimate,
    Locator,
    LocatorConfig,
    flip,
    gaussian_nll,
    loss,
    mixture_nll,
    prepare,
    turned,
)
from brim.rf.location.run import MEASURED, RUN, check_features, differences, load_run, read_generation
from brim.rf.location.solver import NoiseModel, SampleRows, calibrate, target
from brim.rf.location.streaming import Streamed

log = logging.getLogger("brim")

RECORDINGS = "recordings"  # source of datasets that were not generated
# what a network without the solver reads
_PURE = ("features", "present", "stations", "home", "station", "origin", "target", "weight")
_TIMES = ("arrival_difference_us", "arrival_sigma_us")  # mean nothing without a common clock
_CALIBRATED = 20_000  # samples; more would not change the third digit
_CHUNK = {"cpu": 256, "cuda": 8192}  # rows solved between two reports of progress
_COMPARED = {"cpu": 256, "cuda": 5_000}  # held-out samples that baselines are measured on
_PATIENCE, _PATIENT_SHARE = 5, 0.2  # evaluations without progress, and share of the epochs, after which it is given up
_LEAST_COMPARED = 200  # samples without which nothing is given up
_LEAST_GAIN = 0.002  # of val_loss that is progress
_HELD_CHUNK = 8192  # rows validated at once
_LEAST_STRETCHED, _MOST_STRETCHED = 500, 5_000  # held-out samples that the size of regions is fitted to
_OWN = ("features", "present")  # columns that a network reads from the dataset itself
_KEPT_ROWS = 8192  # per shard of the cache
_FREE = ("epochs", "tier", "preload_to_gpu", "num_workers", "checkpoint_every_s", "early_stopping_patience")


def train(
    datasets: Sequence[Path | str],
    out: Path | str,
    config: LocatorTraining | None = None,
    *,
    stream: Streamed | None = None,
    device: str = "auto",
    progress: Callable[[TrainProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    resume: bool = True,
) -> TrainReport:
    """Train a locator on datasets and save it in `out`, continuing an existing run if resume is set.

    With `stream`, on samples that are made in memory instead. Under torchrun all ranks train one model.
    """
    with accounting(), joined(device) as ranks:
        return _train(
            datasets, stream, Path(out), config or LocatorTraining(), ranks, progress if ranks.main else None, stop,
            resume or ranks.restarted,
        )  # fmt: skip


def _train(
    datasets: Sequence[Path | str],
    streamed: Streamed | None,
    out: Path,
    config: LocatorTraining,
    ranks: Ranks,
    progress: Callable[[TrainProgress], None] | None,
    stop: Callable[[], bool] | None,
    resume: bool,
) -> TrainReport:
    where = ranks.device
    opened = _open(datasets, config) if streamed is None else _make(datasets, streamed, where)
    source, generation, real = opened.source, opened.generation, opened.real
    train_rows, val_rows = split(source.num_items, config)
    check_enough(len(train_rows), ranks, "samples")
    network = _network(config, opened)
    about = _describe(opened, network, config, len(train_rows))
    known = ranks.from_main(lambda: _read_begun(out, about, resume))
    thin = train_rows[:: -(-len(train_rows) // _CALIBRATED)]  # evenly spaced, enough for statistics
    with within("calibrating"):
        noise = ranks.from_main(
            lambda: (
                NoiseModel(**known["noise"])
                if known
                else calibrate(
                    _on(where, _rows(source, thin, source.fields)), generation, power_known=config.power == "known"
                )
            )
        )
    weight = None if real is None else torch.where(real, config.real_weight, 1.0)
    if weight is not None:
        weight = weight / weight[train_rows].mean()
    with within("solving"):
        data = _prepare(source, train_rows, val_rows, generation, noise, weight, config, ranks, progress, stop)
    if ranks.greatest(int(data is None))[0] or data is None:
        return TrainReport(
            run=str(out), phase="train", epochs=0, steps=0, samples_per_s=0.0, epoch_seconds=0.0, tier=config.tier,
            ceiling_share=None, busy_share=0.0, waiting={}, best_val_loss=None, peak_bytes=0, joules_per_sample=None,
            step_kind="eager", micro_batch=None, diagnosis=(), stopped=True, stopped_early=False,
        )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        module = Locator(network)
    module.set_statistics(**_rows(source, thin, ("features", "present")))
    module = module.to(where)
    names = [name for name in data.rows.fields if name in _OWN or name not in source.fields]
    names = [name for name in names if config.hybrid or name in _PURE]
    # what fits no memory when it is trained on is validated from its files, too
    held = partial(_chunks, data, names) if config.tier == "window" else [*_chunks(data, names)].__iter__
    with within("validation"):
        before: float | None = ranks.from_main(lambda: _solver_loss(held())) if config.hybrid else None
        bar = ranks.from_main(lambda: _bar(opened, network, noise, val_rows, where, out, known is None))
    if before is not None and not math.isfinite(before):
        before = None
    if not known and ranks.main:
        RUN.write(out, about | {"noise": asdict(noise), "untrained_val_loss": before})
    watch = _Watch(bar, config)
    resident = Resident(
        data.rows, names=names, batch_size=config.batch_size, device=where, tier=config.tier, seed=config.seed,
        shuffle="blocks" if config.tier == "window" else True, preload_to_gpu=config.preload_to_gpu, rows=data.own,
        reserve_bytes=_model_bytes(module, -(-config.batch_size // ranks.size)), ranks=ranks, total=data.total,
    )  # fmt: skip
    with ExitStack() as stack:
        with within("reading"):
            stack.enter_context(resident)
        report = run_trainer(
            module, loss, resident, config=recipe_of(config, config.epochs), out=out, device=where, progress=progress,
            stop=lambda: watch.hopeless or (stop is not None and stop()),
            evaluate=lambda trained: watch.scored(ranks.from_main(lambda: _validate(trained, held(), where))),
            transform=_augmentation(network), ranks=ranks,
        )  # fmt: skip
    if watch.hopeless and report.stopped:
        report = replace(report, stopped=False, stopped_early=True)
    if ranks.main and not report.stopped:
        with within("validation"):
            _fit_stretch(out, held(), where)
        _share(out, report)
    if before is None or report.best_val_loss is None or report.best_val_loss < before:
        return report
    log.info("no epoch was better than the solver (val_loss %.4f); the run answers as the solver does", before)
    return replace(report, best_val_loss=before)


@torch.no_grad()
def _fit_stretch(out: Path, held: Iterable[SampleRows], device: torch.device) -> None:
    """Fit the size of the regions to the held-out samples and write it into run.json."""
    run = load_run(out)
    module, first = run.module.to(device), next(iter(held))
    if len(first["target"]) < _LEAST_STRETCHED:
        return
    module.stretch = 1.0
    some = {name: value[:_MOST_STRETCHED].to(device) for name, value in first.items()}
    stretch = fitted_stretch(module(some), some["target"])
    log.info("regions are drawn %.2f times as wide, which held-out samples asked for", stretch)
    RUN.write(out, run.about | {"stretch": stretch})


def _share(out: Path, report: TrainReport) -> None:
    """The run as a folder that others can use alone."""
    run = load_run(out)
    metrics = {"val_loss": report.best_val_loss, "epochs": report.epochs}
    write_hub(out, run.module.state_dict(), title="brim locator", metrics=metrics, about=run.about)


def split(num_items: int, config: LocatorTraining) -> tuple[Tensor, Tensor]:
    """SampleRows to train on and rows held out, each sorted; a function of the seed and the number of samples."""
    num_val = max(1, round(config.val_share * num_items))
    if num_val >= num_items:
        raise ConfigError(
            f"of {num_items} samples leaves nothing to train on",
            field="val_share",
            value=config.val_share,
            code="conflict",
            hint="give more samples or lower {val_share}",
        )
    order = torch.randperm(num_items, generator=random_stream(config.seed, "split", device=torch.device("cpu")))
    return order[num_val:].sort().values, order[:num_val].sort().values


class _Opened(NamedTuple):
    """What there is to train on."""

    source: DatasetSource | TensorSource
    generation: GenerateConfig  # of those generated
    real: Tensor | None  # which rows are of recordings, if any are
    features: tuple[str, ...]  # that are measured
    fixed: bool  # whether stations can be distinguished by what they hear from a position
    datasets: list[dict[str, Any]]  # as run.json lists them


def _make(datasets: Sequence[Path | str], streamed: Streamed, device: torch.device) -> _Opened:
    """Samples made in memory."""
    if datasets:
        raise ConfigError(
            f"excludes datasets, such as {datasets[0]}", field="stream", code="conflict",
            hint="give datasets or settings of {stream}",
        )  # fmt: skip
    config = streamed.generation
    if config.dataset_type != "feature_based":
        raise ConfigError("must be feature_based to train on", field="dataset_type", value=config.dataset_type)
    with within("generating"):
        rows = streamed.rows(device)
    source = TensorSource({name: rows[name] for name in (*MEASURED, "transmitter")})
    about = {"name": "stream", "seed": config.seed, "samples": source.num_items, "drawn": streamed.drawn}
    return _Opened(source, config, None, streamed.features, config.is_fixed_environment, [about])


def _open(paths: Sequence[Path | str], training: LocatorTraining) -> _Opened:
    """The rows of all datasets."""
    configs = [read_generation(open_dataset(path).manifest, path) for path in paths]
    source = DatasetSource(paths, (*MEASURED, "transmitter"))
    recorded = [dataset.manifest.get("source") == RECORDINGS for dataset in source.datasets]
    first = recorded.index(False) if False in recorded else 0
    for path, dataset, config, is_real in zip(paths, source.datasets, configs, recorded, strict=True):
        check_features([name for name, _ in named_columns(dataset.manifest, "features")], str(path), DatasetError)
        if is_real and training.power == "known" and not all(recorded):
            raise DatasetError(
                f"{path} is made of recordings, whose power is not that of {paths[first]}",
                code="conflict",
                hint="set {power} to unknown",
            )
        for name, (ours, theirs) in differences(config, configs[first], training.power == "known").items():
            if is_real:  # what was transmitted is not what a configuration says
                continue
            raise DatasetError(
                f"{path} and {paths[first]} differ: {name} is {ours} and {theirs}, but the solver needs one value",
                code="conflict",
                hint="train on them separately, or generate them again with equal settings",
            )
    real = None
    if any(recorded):
        counts = torch.tensor([len(dataset) for dataset in source.datasets])
        real = torch.repeat_interleave(torch.tensor(recorded), counts)
    listed = [
        {"name": data.place.name, "seed": data.manifest.get("seed"), "samples": len(data)} for data in source.datasets
    ]
    places = {(one.stations, one.place_seed) for one, is_real in zip(configs, recorded, strict=True) if not is_real}
    fixed = configs[first].is_fixed_environment and len(places) == 1 and real is None
    return _Opened(source, configs[first], real, tuple(name for name, _ in FEATURES), fixed, listed)


def _network(config: LocatorTraining, opened: _Opened) -> LocatorConfig:
    """Stations are distinguished where what they hear from a position stays the same."""
    return LocatorConfig(
        hybrid=config.hybrid,
        power_known=config.power == "known",
        width=config.width,
        layers=config.layers,
        features=tuple(name for name in opened.features if opened.generation.clock != "none" or name not in _TIMES),
        components=config.components,
        stations=len(opened.generation.stations) if opened.fixed else 0,
    )


def _augmentation(network: LocatorConfig) -> Any:
    """Samples are turned and mirrored, unless their network of stations stands where it stands."""
    if network.stations == 0:
        return turned
    return flip if network.hybrid else None


def _describe(opened: _Opened, network: LocatorConfig, config: LocatorTraining, num_train: int) -> dict[str, Any]:
    return RUN.describe(
        model=network.as_dict(),
        features=[name for name, _ in FEATURES],
        generation=opened.generation.as_dict(),
        training=asdict(config),
        datasets=opened.datasets,
        split={"train": num_train, "validation": opened.source.num_items - num_train},
    )


def _read_begun(out: Path, about: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """run.json of the run in `out`; None if there is none yet, an error if it is another run."""
    known = RUN.read_begun(out, resume)
    if known is not None:
        parts = ("model", "datasets", "split")
        check_same(out, *({name: side.get(name) for name in parts} for side in (known, about)))
        check_same(out, known["training"], about["training"], _FREE)
    return known


def _rows(source: DatasetSource | TensorSource, rows: Tensor, names: Iterable[str]) -> SampleRows:
    out = allocate({name: source.fields[name] for name in names}, len(rows))
    read_rows(source, rows, out)
    return out


def _on(device: torch.device, rows: SampleRows) -> SampleRows:
    return {name: tensor.to(device) for name, tensor in rows.items()}


class _Data(NamedTuple):
    """The data of a rank."""

    rows: Source  # of all samples or of this rank's own
    own: Tensor | None  # of them those to train on; None: all
    total: int | None  # samples that all ranks train on together; None: those here are all
    held_rows: Source
    held: Tensor  # of those the samples held out; none on ranks that do not evaluate


def _prepare(
    source: DatasetSource | TensorSource,
    train_rows: Tensor,
    val_rows: Tensor,
    config: GenerateConfig,
    noise: NoiseModel,
    weight: Tensor | None,
    training: LocatorTraining,
    ranks: Ranks,
    progress: Callable[[TrainProgress], None] | None,
    stop: Callable[[], bool] | None,
) -> _Data | None:
    """This rank's rows with the solver's columns, solved on its device; None if stopped."""
    solving = _Solver(source, config, noise, training.power == "known", ranks.device, progress, stop)
    if ranks.alone:
        solved = solving.kept()
        if solved is None:
            return None
        weights = [] if weight is None else [TensorSource({"weight": weight})]
        rows = SideBySide([source, solved, *weights])
        return _Data(rows, train_rows, None, rows, val_rows)
    own = train_rows[ranks.rank :: ranks.size]
    wanted = torch.cat([own, val_rows]) if ranks.main else own
    columns = solving.columns(wanted)
    if columns is None:
        return None
    columns |= _rows(source, wanted, _OWN)
    if weight is not None:
        columns["weight"] = weight[wanted]
    every = TensorSource(columns)
    mine = TensorSource({name: tensor[: len(own)] for name, tensor in columns.items()})
    return _Data(mine, None, len(train_rows), every, torch.arange(len(own), len(wanted)))


class _Solver:
    """The solver's columns of rows of a source."""

    def __init__(
        self,
        source: DatasetSource | TensorSource,
        config: GenerateConfig,
        noise: NoiseModel,
        power_known: bool,
        device: torch.device,
        progress: Callable[[TrainProgress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.source, self.config, self.noise, self.power_known = source, config, noise, power_known
        self.device, self.progress, self.stop = device, progress, stop
        self._is_stopped = self._is_reading = False

    def columns(self, wanted: Tensor) -> SampleRows | None:
        """Of these rows, on the host; None if stopped."""
        columns: SampleRows = {}
        for start, solved in self._solve(wanted, 0):
            if not columns:
                fields = {name: (value.dtype, tuple(value.shape[1:])) for name, value in solved.items()}
                columns = allocate(fields, len(wanted))
            for name, value in solved.items():
                columns[name][start : start + len(value)] = value
        return None if self._is_stopped else columns

    def kept(self) -> Source | None:
        """Of all rows, from the user's cache, or solved and kept there; None if stopped.

        A cache that cannot be read or written costs a line in the log, and the columns are held in memory.
        """
        every, folder = torch.arange(self.source.num_items), cache_folder("solved")
        if folder is not None and isinstance(self.source, DatasetSource):
            place = folder / self._key(self.source)
            for _ in range(2):
                try:
                    return self._keep(place, every)
                except (DatasetError, StorageError) as failure:
                    if self._is_reading:
                        raise  # the dataset's own fault
                    log.warning("solved rows in the cache are not used (%s)", failure.message)
                    shutil.rmtree(place, ignore_errors=True)
                    if isinstance(failure, StorageError) or place.exists():
                        break  # a damaged cache is made anew; a full or read-only one stays so
        columns = self.columns(every)
        return None if columns is None else TensorSource(columns)

    def _keep(self, place: Path, every: Tensor) -> Source | None:
        if not (place / MANIFEST).exists() or not Dataset(place).manifest["complete"]:
            header = {"kind": "solved", "brim": __version__}
            with ShardWriter(place, header, items_per_shard=_KEPT_ROWS, identity=("kind",), resume=True) as writer:
                for _, solved in self._solve(every, writer.items):
                    writer.append(solved, {})
                if self._is_stopped:
                    return None
                writer.finish()
        dataset = Dataset(place)
        dataset.verify(again=False)
        if len(dataset) != len(every):
            raise DatasetError(f"holds {len(dataset)} rows, expected {len(every)}", code="damaged")
        with suppress(OSError):
            os.utime(place)
        return DatasetSource(place)

    def _solve(self, wanted: Tensor, first: int) -> Iterator[tuple[int, SampleRows]]:
        """Chunks of columns on the host with the place of their first row, from one on; ends early if stopped."""
        total, step, began_s = len(wanted), _CHUNK[self.device.type], time.perf_counter()
        for start in range(first, total, step):
            self._is_stopped = self.stop is not None and self.stop()
            if self._is_stopped:
                return
            end = min(start + step, total)
            self._is_reading = True
            rows = _on(self.device, _rows(self.source, wanted[start:end], self.source.fields))
            self._is_reading = False
            solved = prepare(rows, self.config, self.noise, power_known=self.power_known)
            yield start, {name: value.cpu() for name, value in solved.items()}
            if self.progress is not None:
                rate = (end - first) / (time.perf_counter() - began_s)
                self.progress(
                    TrainProgress(
                        phase="prepare", epoch=0, epochs=0, step=end, steps=total, loss=None, samples_per_s=rate,
                        eta_s=(total - end) / rate,
                    )
                )  # fmt: skip

    def _key(self, source: DatasetSource) -> str:
        """Of what the columns follow from: content of the shards, settings, code, versions and device."""
        shards = [[(entry.sha256, entry.items) for entry in data.shards] for data in source.datasets]
        code = [hashlib.sha256(Path(str(part.__file__)).read_bytes()).hexdigest() for part in (solver, model)]
        device = describe(self.device)["name"]
        facts = [shards, self.config.as_dict(), asdict(self.noise), self.power_known, code]
        text = json.dumps([*facts, __version__, torch.__version__, device], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _chunks(data: _Data, names: Sequence[str]) -> Iterator[SampleRows]:
    """The samples held out, on the host."""
    for first in range(0, len(data.held), _HELD_CHUNK):
        rows = data.held[first : first + _HELD_CHUNK]
        chunk = allocate({name: data.held_rows.fields[name] for name in names}, len(rows))
        read_rows(data.held_rows, rows, chunk)
        yield chunk


@torch.no_grad()
def _validate(module: torch.nn.Module, held: Iterable[SampleRows], device: torch.device) -> dict[str, float]:
    """Loss and median error over the held-out rows; the module is in eval mode."""
    losses, errors = [], []
    for rows in held:
        batch = _on(device, rows)
        estimate: Estimate = module(batch)
        each = mixture_nll(estimate, batch["target"])
        losses.append(each * batch["weight"] if "weight" in batch else each)
        errors.append((estimate.position_en - batch["target"]).norm(dim=-1))
    error = torch.cat(errors)
    return {"val_loss": float(torch.cat(losses).double().mean()), "val_median_error_m": float(error.median())}


def _solver_loss(held: Iterable[SampleRows]) -> float:
    """The loss of the solver's own answer."""
    losses = []
    for rows in held:
        each = gaussian_nll(rows["solver_position"], rows["axes"], rows["target"])
        losses.append(each * rows["weight"] if "weight" in rows else each)
    return float(torch.cat(losses).double().mean())


class _Bar(NamedTuple):
    """The best answer that needs no training."""

    name: str
    median_error_m: float
    samples: int  # that say so


def _bar(
    opened: _Opened,
    network: LocatorConfig,
    noise: NoiseModel,
    val_rows: Tensor,
    device: torch.device,
    out: Path,
    is_new: bool,
) -> _Bar | None:
    """The baselines on some of the held-out rows; a fixed network's fingerprints are written."""
    config, known = opened.generation, network.power_known
    fingerprints = None
    if network.stations:
        taken = torch.ones(opened.source.num_items, dtype=torch.bool)
        taken[val_rows] = False
        names = ("features", "present", "receivers", "transmitter")
        rows = _rows(opened.source, taken.nonzero()[:, 0][:FINGERPRINTS], names)
        fingerprints = Fingerprints.of(rows, config, known)
        if is_new:
            out.mkdir(parents=True, exist_ok=True)
            save_file(fingerprints.tensors(), out / FINGERPRINT_FILE)
    some = val_rows[: _COMPARED[device.type]]
    rows = _on(device, _rows(opened.source, some, (*MEASURED, "transmitter")))
    answers = baselines(rows, config, noise, power_known=known, fingerprints=fingerprints)
    medians = {}
    for name, one in answers.items():
        error = (one.position_en.double() - target(rows, one.origin, config)).norm(dim=-1)
        medians[name] = float(error.quantile(0.5))
    best = min(medians, key=lambda name: medians[name])
    return _Bar(best, medians[best], len(some)) if math.isfinite(medians[best]) else None


class _Watch:
    """Compares every evaluation with the best baseline, and says when there is nothing to learn."""

    def __init__(self, bar: _Bar | None, config: LocatorTraining) -> None:
        self.bar, self.config = bar, config
        self.hopeless = False
        self._epoch, self._lowest, self._stale = 0, math.inf, 0
        self._said_at = 0.0

    def scored(self, scores: dict[str, float]) -> dict[str, float]:
        """The scores with the share of the bar's median error."""
        if self.bar is None:
            return scores
        share = scores["val_median_error_m"] / max(self.bar.median_error_m, 1e-9)
        self._epoch += 1
        improved = scores["val_loss"] < self._lowest - _LEAST_GAIN
        self._lowest, self._stale = min(self._lowest, scores["val_loss"]), 0 if improved else self._stale + 1
        name, error = PLAIN_NAMES[self.bar.name], metres(self.bar.median_error_m).replace("\u00a0", " ")
        now_s = time.perf_counter()
        if now_s - self._said_at >= 1.0 or self._epoch == self.config.epochs:
            self._said_at = now_s
            log.info("median error %.2f times that of %s (%s)", share, name, error)
        patience = max(_PATIENCE, round(self.config.epochs * _PATIENT_SHARE))
        enough = self.bar.samples >= _LEAST_COMPARED
        if enough and share > 1 - SAME and self._stale >= patience and self.config.early_stopping_patience is None:
            self.hopeless = True
            log.info("nothing to learn here: no better than %s (%s), and val_loss stands still; stopped", name, error)
        return scores | {"val_share_of_best_baseline": share}


def _model_bytes(module: Locator, num_items: int) -> int:
    """Upper estimate of weights, gradients, moments and the activations kept for the backward pass."""
    weights = sum(param.numel() for param in module.parameters())
    shape = module.config
    return 4 * (4 * weights + num_items * 32 * shape.width * shape.layers * 16)
