"""Training a locator: split, calibrate, solve once, train.

The solver runs once over all rows before the first epoch; its results are kept in host memory, from where the tiers
load them. With several ranks, each solves and holds its own rows, and rank 0 those held out.
"""

import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import brim
from brim.engine.config import recipe_of
from brim.engine.device import stream
from brim.engine.rows import DatasetSource, Resident, TensorSource, read_rows
from brim.engine.storage import allocate
from brim.engine.training import Ranks, TrainProgress, TrainReport, check_enough, joined
from brim.engine.training import train as run_trainer
from brim.errors import CheckpointError, ConfigError, DatasetError
from brim.rf.config import GenerateConfig, LocatorTraining
from brim.rf.datasets.summary import named_columns, open_dataset
from brim.rf.features import FEATURES
from brim.rf.location.model import Estimate, Locator, LocatorConfig, flip, gaussian_nll, loss, prepare
from brim.rf.location.run import (
    FORMAT_VERSION,
    KIND,
    MEASURED,
    UNFINISHED,
    check_features,
    differences,
    read_about,
    read_generation,
    write_about,
)
from brim.rf.location.solver import NoiseModel, SampleRows, calibrate

log = logging.getLogger("brim")

_PURE = ("features", "present", "stations", "origin", "target")  # what a network without the solver reads
_CALIBRATED = 20_000  # samples; more would not change the third digit
_CHUNK = {"cpu": 256, "cuda": 8192}  # rows solved between two reports of progress
_FREE = ("epochs", "tier", "preload_to_gpu", "num_workers", "checkpoint_every_s", "early_stopping_patience")


def train(
    datasets: Sequence[Path | str],
    out: Path | str,
    config: LocatorTraining | None = None,
    *,
    device: str = "auto",
    progress: Callable[[TrainProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    resume: bool = True,
) -> TrainReport:
    """Train a locator on datasets and save it in `out`, continuing an existing run if resume is set.

    Under torchrun all ranks train one model.
    """
    with joined(device) as ranks:
        return _train(
            datasets, Path(out), config or LocatorTraining(), ranks, progress if ranks.main else None, stop,
            resume or ranks.restarted,
        )  # fmt: skip


def _train(
    datasets: Sequence[Path | str],
    out: Path,
    config: LocatorTraining,
    ranks: Ranks,
    progress: Callable[[TrainProgress], None] | None,
    stop: Callable[[], bool] | None,
    resume: bool,
) -> TrainReport:
    where = ranks.device
    source, generation = _open(datasets)
    train_rows, val_rows = split(source.num_items, config)
    check_enough(len(train_rows), ranks, "samples")
    about = _describe(source, generation, config, len(train_rows))
    known = ranks.from_main(lambda: _occupied(out, about, resume))
    noise = ranks.from_main(
        lambda: NoiseModel(**known["noise"]) if known else _calibrate(source, train_rows, generation, where)
    )
    data = _prepare(source, train_rows, val_rows, generation, noise, ranks, progress, stop)
    if ranks.greatest(int(data is None))[0] or data is None:
        return _nothing_done(out, config)
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        module = Locator(LocatorConfig(hybrid=config.hybrid))
    module.set_statistics(*_measured(source, _thin(train_rows)))
    module = module.to(where)
    columns, held = data.columns, data.held
    if not config.hybrid:
        columns, held = ({name: part[name] for name in _PURE if name in part} for part in (columns, held))
    before = ranks.from_main(lambda: _before(module.eval(), held, config, where))
    if not known and ranks.main:
        write_about(out, about | {"noise": asdict(noise), "untrained_val_loss": before})
    resident = Resident(
        TensorSource(columns), batch_size=config.batch_size, device=where, tier=config.tier, seed=config.seed,
        shuffle="blocks" if config.tier == "window" else True, preload_to_gpu=config.preload_to_gpu, rows=data.rows,
        reserve_bytes=_model_bytes(module, -(-config.batch_size // ranks.size)), ranks=ranks, total=data.total,
    )  # fmt: skip
    with resident:
        report = run_trainer(
            module, loss, resident, config=recipe_of(config, config.epochs), out=out, device=where, progress=progress,
            stop=stop, evaluate=lambda trained: ranks.from_main(lambda: _validate(trained, held, where)),
            transform=flip if config.hybrid else None, ranks=ranks,
        )  # fmt: skip
    return _with_untrained(report, before)


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
    order = torch.randperm(num_items, generator=stream(config.seed, "split", device=torch.device("cpu")))
    return order[num_val:].sort().values, order[:num_val].sort().values


def _open(paths: Sequence[Path | str]) -> tuple[DatasetSource, GenerateConfig]:
    configs = [read_generation(open_dataset(path).manifest, path) for path in paths]
    source = DatasetSource(paths, (*MEASURED, "transmitter"))
    for path, dataset, config in zip(paths, source.datasets, configs, strict=True):
        check_features([name for name, _ in named_columns(dataset.manifest, "features")], str(path), DatasetError)
        for name, (ours, theirs) in differences(config, configs[0]).items():
            raise DatasetError(
                f"{path} and {paths[0]} differ: {name} is {ours} and {theirs}, but the solver needs one value",
                code="conflict",
                hint="train on them separately, or generate them again with equal settings",
            )
    return source, configs[0]


def _describe(
    source: DatasetSource, generation: GenerateConfig, config: LocatorTraining, num_train: int
) -> dict[str, Any]:
    """run.json before anything is computed."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "model": LocatorConfig(hybrid=config.hybrid).as_dict(),
        "features": [name for name, _ in FEATURES],
        "generation": generation.as_dict(),
        "training": asdict(config),
        "datasets": [
            {"name": data.place.name, "seed": data.manifest.get("seed"), "samples": len(data)}
            for data in source.datasets
        ],
        "split": {"train": num_train, "validation": source.num_items - num_train},
        "versions": {"brim": brim.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _occupied(out: Path, about: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """run.json of the run in `out`; None if there is none yet, an error if it is another run."""
    if out.is_file():
        raise CheckpointError(f"{out} is a file", field="out", code="occupied", hint="choose another {out}")
    if not out.is_dir() or all(file.name == UNFINISHED for file in out.iterdir()):
        return None
    if not resume:
        raise CheckpointError(
            f"{out} is not empty",
            field="out",
            code="occupied",
            hint="add {resume} to continue it or choose another {out}",
        )
    known = read_about(out)
    for part in ("model", "datasets", "split", "training"):
        old, new = known.get(part), about[part]
        if part == "training" and isinstance(old, dict):
            old, new = ({name: v for name, v in side.items() if name not in _FREE} for side in (old, new))
        if old != new:
            raise CheckpointError(
                f"{out}: {part} was {old} and is {new} now",
                field="out",
                code="conflict",
                hint="resume with the same settings, or choose another {out}",
            )
    return known


def _thin(rows: Tensor) -> Tensor:
    """Evenly spaced rows, enough for statistics."""
    return rows[:: -(-len(rows) // _CALIBRATED)]


def _measured(source: DatasetSource, rows: Tensor) -> tuple[Tensor, Tensor]:
    out = allocate({name: source.fields[name] for name in ("features", "present")}, len(rows))
    read_rows(source, rows, out)
    return out["features"], out["present"]


def _before(module: Locator, held: SampleRows, config: LocatorTraining, device: torch.device) -> float | None:
    """Validation loss of the solver's own answer, which an untrained hybrid repeats."""
    untrained = _validate(module, held, device)["val_loss"]
    return untrained if config.hybrid and math.isfinite(untrained) else None


def _calibrate(source: DatasetSource, rows: Tensor, config: GenerateConfig, device: torch.device) -> NoiseModel:
    rows = _thin(rows)
    out = allocate(source.fields, len(rows))
    read_rows(source, rows, out)
    return calibrate({name: tensor.to(device) for name, tensor in out.items()}, config)


class _Data(NamedTuple):
    """The data of a rank."""

    columns: SampleRows  # on the host, of all samples or of this rank's own
    rows: Tensor | None  # of them those to train on; None: all
    total: int | None  # samples that all ranks train on together; None: those here are all
    held: SampleRows  # columns of the samples held out; none on ranks that do not evaluate


def _prepare(
    source: DatasetSource,
    train_rows: Tensor,
    val_rows: Tensor,
    config: GenerateConfig,
    noise: NoiseModel,
    ranks: Ranks,
    progress: Callable[[TrainProgress], None] | None,
    stop: Callable[[], bool] | None,
) -> _Data | None:
    """Columns of this rank's rows, solved on its device; None if stopped."""
    wanted = torch.arange(source.num_items)
    if not ranks.alone:
        own = train_rows[ranks.rank :: ranks.size]
        wanted = torch.cat([own, val_rows]) if ranks.main else own
    columns = _solve(source, wanted, config, noise, ranks.device, progress, stop)
    if columns is None:
        return None
    if ranks.alone:
        return _Data(columns, train_rows, None, {name: tensor[val_rows] for name, tensor in columns.items()})
    held = {name: tensor[len(own) :] for name, tensor in columns.items()}
    return _Data({name: tensor[: len(own)] for name, tensor in columns.items()}, None, len(train_rows), held)


def _solve(
    source: DatasetSource,
    wanted: Tensor,
    config: GenerateConfig,
    noise: NoiseModel,
    device: torch.device,
    progress: Callable[[TrainProgress], None] | None,
    stop: Callable[[], bool] | None,
) -> SampleRows | None:
    """Columns of these rows on the host, solved on the device; None if stopped."""
    total, step, began_s = len(wanted), _CHUNK[device.type], time.perf_counter()
    columns: SampleRows = {}
    for start in range(0, total, step):
        if stop is not None and stop():
            return None
        end = min(start + step, total)
        rows = allocate(source.fields, end - start)
        read_rows(source, wanted[start:end], rows)
        on_device = {name: tensor.to(device) for name, tensor in rows.items()}
        solved = {name: rows[name] for name in ("features", "present")} | prepare(on_device, config, noise)
        if not columns:
            columns = allocate({name: (value.dtype, tuple(value.shape[1:])) for name, value in solved.items()}, total)
        for name, value in solved.items():
            columns[name][start:end] = value.cpu()
        if progress is not None:
            rate = end / (time.perf_counter() - began_s)
            progress(
                TrainProgress(
                    phase="prepare", epoch=0, epochs=0, step=end, steps=total, loss=None, samples_per_s=rate,
                    eta_s=(total - end) / rate,
                )
            )  # fmt: skip
    return columns


@torch.no_grad()
def _validate(module: torch.nn.Module, held: SampleRows, device: torch.device) -> dict[str, float]:
    """Loss and median error over the held-out rows; the module is in eval mode."""
    losses, errors = [], []
    for start in range(0, len(held["target"]), _CHUNK["cuda"]):
        batch = {name: tensor[start : start + _CHUNK["cuda"]].to(device) for name, tensor in held.items()}
        estimate: Estimate = module(batch)
        losses.append(gaussian_nll(estimate.position_en, estimate.root, batch["target"]))
        errors.append((estimate.position_en - batch["target"]).norm(dim=-1))
    error = torch.cat(errors)
    return {"val_loss": float(torch.cat(losses).double().mean()), "val_median_error_m": float(error.median())}


def _model_bytes(module: Locator, num_items: int) -> int:
    """Upper estimate of weights, gradients, moments and the activations kept for the backward pass."""
    weights = sum(param.numel() for param in module.parameters())
    shape = module.config
    return 4 * (4 * weights + num_items * 32 * shape.width * shape.layers * 16)


def _with_untrained(report: TrainReport, before: float | None) -> TrainReport:
    if before is None or report.best_val_loss is None or report.best_val_loss < before:
        return report
    log.info("no epoch was better than the solver (val_loss %.4f); the run answers as the solver does", before)
    return replace(report, best_val_loss=before)


def _nothing_done(out: Path, config: LocatorTraining) -> TrainReport:
    return TrainReport(
        run=str(out), phase="train", epochs=0, steps=0, samples_per_s=0.0, epoch_seconds=0.0, tier=config.tier,
        ceiling_share=None, busy_share=0.0, waiting={}, best_val_loss=None, peak_bytes=0, joules_per_sample=None,
        step_kind="eager", micro_batch=None, diagnosis=(), stopped=True, stopped_early=False,
    )  # fmt: skip
