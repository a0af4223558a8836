"""Training a module that a file of the user's makes, on rows from anywhere: what `brim train` does.

def make(columns):                  # my_module.py
    model = nn.Linear(columns["x"].shape[0], 1)
    return model, lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean()
"""

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brim.engine.config import ModuleTraining, recipe_of
from brim.engine.device import resolve_device, stream
from brim.engine.library.training import RUN, train
from brim.engine.rows import Resident, Source, open_path, sql
from brim.engine.training import TrainProgress, TrainReport
from brim.errors import BrimError, ConfigError, with_article

log = logging.getLogger("brim")

_RETURN = "return the module and the loss: model, loss_fn"


class Column(NamedTuple):
    """What a factory learns about a column of the rows."""

    dtype: torch.dtype
    shape: torch.Size  # of one row, without the batch


@dataclass(frozen=True, slots=True)
class ModuleFactory:
    """A function in a file or module, imported, with what identifies its code."""

    reference: str
    make: Callable[[Mapping[str, Column]], Any]
    file: str = ""
    sha256: str = ""


def train_module(
    reference: str,
    data: str,
    out: Path | str,
    config: ModuleTraining | None = None,
    *,
    query: str | None = None,
    device: str = "auto",
    progress: Callable[[TrainProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    resume: bool = True,
) -> TrainReport:
    """Train what "FILE.py:factory" makes of the columns of the data, and keep the run in `out`."""
    config = config or ModuleTraining()
    resolve_device(device)
    RUN.read_begun(Path(out), resume)  # before anything is read: a directory in use is found at once
    factory = load_factory(reference)
    if factory.file:
        log.info("%s of %s, sha256 %s", reference.rpartition(":")[2], factory.file, factory.sha256[:16])
    source = open_data(data, query)
    model, loss_fn, optimizer, scheduler = make_module(factory, source, config.seed)
    train_rows, held_rows = _split(source.num_items, config)
    if config.early_stopping_patience is not None and not len(held_rows):
        raise ConfigError(
            "needs rows held out",
            field="early_stopping_patience",
            value=config.early_stopping_patience,
            code="conflict",
            hint="give {val_share} above 0",
        )
    rows = Resident(
        source, batch_size=config.batch_size, device=device, tier=config.tier, seed=config.seed, rows=train_rows,
        shuffle="blocks" if config.tier == "window" else True,
    )  # fmt: skip
    held = Resident(source, batch_size=config.batch_size, device=device, shuffle=False, rows=held_rows) if len(
        held_rows
    ) else None  # fmt: skip
    recipe = recipe_of(config, config.epochs)
    return train(
        model, loss_fn, rows, out=out, optimizer=optimizer, scheduler=scheduler, evaluate=held, device=device,
        config=replace(recipe, clip_norm=recipe.clip_norm if optimizer is None else None), resume=resume,
        progress=progress, stop=stop,
        about={
            "factory": reference, "file": factory.file, "sha256": factory.sha256, "settings": asdict(config),
            "split": {"train": len(train_rows), "validation": len(held_rows)},
        },
    )  # fmt: skip


def open_data(data: str, query: str | None) -> Source:
    """Rows of a path, or of a query to a database."""
    is_database = data.split("://", 1)[0].lower() in ("postgresql", "postgres", "sqlite") and "://" in data
    if is_database and query is not None:
        return sql(data, query)
    if query is not None:
        raise ConfigError(
            f'"{data}" is no database', field="query", code="conflict", hint="leave {query} out, or give a database URL"
        )
    return open_path(data)


def make_module(factory: ModuleFactory, source: Source, seed: int) -> tuple[nn.Module, Any, Any, Any]:
    """What the factory makes of the columns: module, loss, optimiser and scheduler; the last two may be None."""
    columns = {name: Column(dtype, torch.Size(shape)) for name, (dtype, shape) in source.fields.items()}
    with _said(f"{factory.reference} raised"), torch.random.fork_rng([]):
        torch.manual_seed(seed)
        parts = factory.make(columns)
    if not isinstance(parts, tuple | list) or not 2 <= len(parts) <= 4:
        raise _unusable(f"{factory.reference} returned {_say(parts)}", hint=_RETURN)
    module, loss_fn, *rest = parts
    if isinstance(module, type):
        raise _unusable(f"{factory.reference} returned the class {module.__name__}, not a module", hint="call it")
    if not isinstance(module, nn.Module):
        raise _unusable(f"{factory.reference} returned {_say(module)} as the module", hint=_RETURN)
    if not callable(loss_fn):
        raise _unusable(f"{factory.reference} returned {_say(loss_fn)} as the loss", hint=_RETURN)
    optimizer, scheduler = (*rest, None, None)[:2]
    return module, loss_fn, optimizer, scheduler


def load_factory(reference: str) -> ModuleFactory:
    """The function named "FILE.py:name" or "package.module:name"; the file may import its neighbours."""
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise _unusable(f'"{reference}" names no function', hint="write FILE.py:NAME, as in my_module.py:make")
    file = Path(place)
    if file.suffix == ".py":
        if not file.is_file():
            raise _unusable(f"{file} does not exist", hint="write FILE.py:NAME, as in my_module.py:make")
        code = file.read_bytes()
        module, where, sha256 = _imported_file(file, code), str(file.absolute()), hashlib.sha256(code).hexdigest()
    else:
        with _said(f"{place} cannot be imported:"):
            module, where, sha256 = importlib.import_module(place), "", ""
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        offered = [key for key in own if callable(getattr(module, key)) and not key.startswith("_")]
        raise _unusable(
            f'{place} has no "{name}"', hint=f"it has {', '.join(offered)}" if offered else "it defines no function"
        )
    factory = getattr(module, name)
    if not callable(factory):
        raise _unusable(f"{reference} is {_say(factory)}, not a function", hint="give one that takes the columns")
    return ModuleFactory(reference, factory, where, sha256)


def _imported_file(file: Path, code: bytes) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise _unusable(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(file.stem)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.absolute().parent))
    try:
        with _said(f"{file} cannot be imported:"):
            # not the loader's: it takes cached bytecode of another file of that size and second
            exec(compile(code, file, "exec", dont_inherit=True), module.__dict__)
    finally:
        sys.path.remove(str(file.absolute().parent))
        if before is None:
            del sys.modules[file.stem]
        else:
            sys.modules[file.stem] = before
    return module


def _split(num_items: int, config: ModuleTraining) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows held out, each sorted; a function of the seed and the number of rows."""
    num_held = min(num_items - 1, max(1, round(config.val_share * num_items))) if config.val_share else 0
    order = torch.randperm(num_items, generator=stream(config.seed, "split", device=torch.device("cpu")))
    return order[num_held:].sort().values, order[:num_held].sort().values


@contextmanager
def _said(doing: str) -> Iterator[None]:
    """Errors of the user's code as one sentence, with the line where it happened."""
    try:
        yield
    except BrimError:
        raise
    except (Exception, SystemExit) as failure:
        trace = failure.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        reason = " ".join(str(failure).split())[:200]
        where = "" if trace is None else f" (line {trace.tb_lineno} of {Path(trace.tb_frame.f_code.co_filename).name})"
        raise _unusable(f"{doing} {type(failure).__name__}{f': {reason}' if reason else ''}{where}") from failure


def _unusable(text: str, hint: str = "") -> ConfigError:
    return ConfigError(text, code="unusable", hint=hint)


def _say(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, nn.Module):
        return "a module and no loss"
    return with_article(value) + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
