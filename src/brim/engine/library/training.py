"""brim.train: any module, any loss, any rows or loader, with everything the engine's trainer has."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brim import loggers as logging_to
from brim.engine.config import Precision, Tier, TrainConfig
from brim.engine.device import guard, named_device
from brim.engine.library.loader import LoaderSource
from brim.engine.rows import Resident
from brim.engine.training import (
    BatchSource,
    MakeOptimizer,
    MakeScheduler,
    Ranks,
    RunFile,
    TrainProgress,
    TrainReport,
    Transform,
    has_checkpoint,
    joined,
    write_hub,
)
from brim.engine.training import train as run_trainer
from brim.errors import ConfigError, StorageError, with_article

RUN = RunFile(name="run.json", kind="module", command="train")
PHASE = "train"

Loss = Callable[[nn.Module, Any], Tensor]


def train(
    model: nn.Module,
    loss_fn: Loss,
    data: Any,
    *,
    out: Path | str,
    epochs: int | None = None,
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
    scheduler: MakeScheduler | Any = None,
    evaluate: Callable[[nn.Module], Mapping[str, float] | float] | Any = None,
    loggers: Sequence[logging_to.LogsValues] = (),
    batch_size: int = 256,
    device: torch.device | str | None = None,
    tier: Tier | Literal["auto"] = "auto",
    seed: int = 0,
    learning_rate: float | None = None,
    precision: Precision | None = None,
    transform: Transform | None = None,
    resume: bool = True,
    config: TrainConfig | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[TrainProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> TrainReport:
    """Train the model in place and keep the run in `out`; called again with the same arguments, it resumes exactly.

    loss_fn    loss_fn(model, batch): the mean over the batch; a batch is a dict, or a tuple if tuples went in
    data       a Resident, anything that a Resident accepts, or a DataLoader
    optimizer  a function of the parameters; by default AdamW with warm-up and cosine. With one, gradients are not
               clipped unless config says so
    scheduler  a function of the optimiser; it advances after every epoch, OneCycleLR and CyclicLR after every step
    evaluate   a function of the model that returns val_loss, or a dict of scores; or rows held out
    loggers    from brim.loggers, or anything with log(values, step) and artifact(path)
    device     by default that of the data, else the first GPU, else the CPU; the model is moved there
    batch_size, tier, seed  of rows that are not a Resident yet
    config     the rest of the recipe: brim.engine.config.TrainConfig

    Under torchrun all ranks call this and train as one.
    """
    _check(model, loss_fn)
    if not isinstance(out, str | Path):
        raise ConfigError(f"out is {with_article(out)}", hint="give a directory for the run")
    for name, function in (("transform", transform), ("progress", progress), ("stop", stop)):
        if function is not None and not callable(function):
            raise ConfigError(f"{name} is {with_article(function)}, not a function")
    logging_to.check(loggers)
    recipe = _recipe(config, optimizer, epochs, learning_rate, precision, seed)
    wanted = data.asked_device if device is None and isinstance(data, Resident) else device
    with joined(_name(wanted)) as ranks:
        source = _source(data, ranks, batch_size=batch_size, tier=tier, seed=seed)
        held_out = _evaluation(evaluate, loss_fn, source, ranks)
        model = model.to(ranks.device)
        call = _loss(loss_fn, source)
        description = _describe(model, source, recipe, optimizer, about)
        with _begun(Path(out), description, ranks, resume or ranks.restarted):
            report = run_trainer(
                model, call, source, config=recipe, out=out, evaluate=held_out, transform=transform, phase=PHASE,
                device=ranks.device, progress=progress, stop=stop, ranks=ranks, optimizer=optimizer,
                scheduler=scheduler, loggers=loggers,
            )  # fmt: skip
            if ranks.main and not report.stopped:
                _share(Path(out), report)
            return report


def _share(out: Path, report: TrainReport) -> None:
    """The run as a folder that others can use alone."""
    best = out / PHASE / ("best" if has_checkpoint(out / PHASE / "best") else "last") / "model.safetensors"
    about = RUN.read(out)
    metrics = {"val_loss": report.best_val_loss, "epochs": report.epochs, "parameters": about.get("parameters")}
    write_hub(out, best, title=f"{about['model']}, trained with brim", metrics=metrics, about=about)


def _name(device: torch.device | str | int | None) -> str:
    """A device as the ranks resolve it: without a number, the ranks of a machine take its GPUs in turn."""
    if device is None or device in ("auto", "cuda", torch.device("cuda")):
        return "auto" if device in (None, "auto") else "cuda"
    return str(named_device(device))


def _check(model: Any, loss_fn: Any) -> None:
    if isinstance(model, type):
        raise ConfigError(f"{model.__name__} is a class, not a module", hint=f"make one: {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {with_article(model)}", hint="give a torch.nn.Module")
    if any(isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer) for value in _tensors_of(model)):
        raise ConfigError(
            f"{type(model).__name__} has parameters without a shape",
            hint="call it once on a batch, which gives them one",
        )
    if isinstance(loss_fn, type) or not callable(loss_fn):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise ConfigError(
            f"loss_fn is {name}, not a function", hint="give loss_fn(model, batch), which returns a scalar"
        )


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _recipe(
    config: TrainConfig | None,
    optimizer: Any,
    epochs: int | None,
    learning_rate: float | None,
    precision: Precision | None,
    seed: int,
) -> TrainConfig:
    if config is not None and not isinstance(config, TrainConfig):
        raise ConfigError(f"config is {with_article(config)}", hint="give a brim.engine.config.TrainConfig")
    base = config or TrainConfig(tensorboard=False, seed=seed, clip_norm=1.0 if optimizer is None else None)
    given = {"epochs": epochs, "learning_rate": learning_rate, "precision": precision}
    return replace(base, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _source(data: Any, ranks: Ranks, **options: Any) -> BatchSource:
    if isinstance(data, Resident):
        if ranks.alone and data.device == ranks.device:
            return data
        return data.divided(ranks)
    if isinstance(data, BatchSource):
        return data
    is_loader = isinstance(data, torch.utils.data.DataLoader) or (
        hasattr(data, "__iter__") and hasattr(data, "__len__") and not hasattr(data, "__getitem__")
    )
    if is_loader and not isinstance(data, Mapping):
        return LoaderSource(data, ranks.device, options["seed"])
    return Resident(data, device=ranks.device, ranks=ranks, **options)


# The loss


def _loss(loss_fn: Loss, source: BatchSource) -> Loss:
    """The loss, with an error of its code as a sentence that says how it is called."""
    if isinstance(loss_fn, nn.Module) or getattr(loss_fn, "__module__", None) == "torch.nn.functional":
        loss_fn = _of_pairs(loss_fn)

    def call(model: nn.Module, batch: Any) -> Tensor:
        try:
            with guard():
                return loss_fn(model, batch)
        except (AttributeError, TypeError, LookupError, ValueError, RuntimeError) as failure:
            raise ConfigError(
                f"loss_fn fails on a batch of {_say_batch(batch)} ({type(failure).__name__}: {_first_line(failure)})",
                hint="it is called as loss_fn(model, batch) and returns the mean over the batch",
            ) from failure

    return call


def _of_pairs(criterion: Callable[..., Tensor]) -> Loss:
    """A criterion of torch, as the loss of batches (x, y)."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise ConfigError(
                f"{getattr(criterion, '__name__', type(criterion).__name__)} compares an output with a target, but a "
                f"batch is {_say_batch(batch)}",
                hint="give rows as (X, y), or a function loss_fn(model, batch)",
            )
        return criterion(model(batch[0]), batch[1])

    return loss


def _say_batch(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return ", ".join(f'"{name}" {list(value.shape)}' for name, value in batch.items())
    if isinstance(batch, tuple):
        return f"({', '.join(str(list(value.shape)) for value in batch)})"
    return str(list(batch.shape)) if isinstance(batch, Tensor) else type(batch).__name__


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0][:300]


# Evaluation


def _evaluation(
    evaluate: Any, loss_fn: Loss, source: BatchSource, ranks: Ranks
) -> Callable[[nn.Module], Mapping[str, float]] | None:
    """A function that gives the same scores on every rank; rank 0 computes them."""
    if evaluate is None:
        return None
    score = evaluate
    if not callable(evaluate):
        size = max(1, source.batch_size)
        held = evaluate if isinstance(evaluate, Resident) else Resident(
            evaluate, batch_size=size, device=ranks.device, shuffle=False
        )  # fmt: skip
        score = _mean_loss(_loss(loss_fn, source), held)
    return lambda model: ranks.from_main(lambda: _scores(score(model)))


def _mean_loss(loss_fn: Loss, held: Resident) -> Callable[[nn.Module], float]:
    def score(model: nn.Module) -> float:
        total, done = torch.zeros((), dtype=torch.float64, device=held.device), 0
        for batch in held.epoch_into(0, 0, lambda name, shape: None):
            num = len(next(iter(batch.values())))
            total += loss_fn(model, held.as_given(batch)).detach().double() * num
            done += num
        return float(total) / done

    return score


def _scores(value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        values = dict(value)
    elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        values = {"val_loss": value}
    else:
        raise ConfigError(f"evaluate returned {with_article(value)}", hint="return val_loss, or a dict of numbers")
    try:
        return {str(name): float(score) for name, score in values.items()}
    except (TypeError, ValueError) as failure:
        raise ConfigError(f"evaluate returned what is no number ({failure})", hint="return numbers only") from failure


# The run's directory


def _describe(
    model: nn.Module,
    source: BatchSource,
    recipe: TrainConfig,
    optimizer: Any,
    about: Mapping[str, Any] | None,
) -> dict[str, Any]:
    fields = source.fields if isinstance(source, Resident) else {}
    columns = {name: [str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in fields.items()}
    rows = source.source.description if isinstance(source, Resident) else type(source).__name__
    return RUN.describe(
        model=type(model).__name__,
        parameters=sum(param.numel() for param in model.parameters()),
        columns=columns,
        data=rows,
        training={**asdict(recipe), "batch_size": source.batch_size},
        optimizer=None if optimizer is None else getattr(optimizer, "__name__", type(optimizer).__name__),
        **(about or {}),
    )


@contextmanager
def _begun(out: Path, about: Mapping[str, Any], ranks: Ranks, resume: bool) -> Iterator[None]:
    """Begin or continue the run; one that fails before its first checkpoint leaves nothing behind."""
    was_there = out.exists()
    known = ranks.from_main(lambda: RUN.read_begun(out, resume))
    if known is None and ranks.main:
        try:
            RUN.write(out, about)
        except OSError as failure:
            raise StorageError(
                f"{out}: cannot write, {failure.strerror or failure}", hint="choose another {out}"
            ) from failure
    try:
        yield
    except BaseException:
        if known is None and ranks.main and not has_checkpoint(out / PHASE / "last"):
            _undo(out, was_there)
        raise


def _undo(out: Path, was_there: bool) -> None:
    shutil.rmtree(out / PHASE, ignore_errors=True)
    (out / RUN.name).unlink(missing_ok=True)
    if not was_there:
        with suppress(OSError):  # something else is in it by now
            out.rmdir()
