"""Loaders: the time of a batch and of its parts, and the batch that is served again while the ceiling is measured."""

import functools
from collections.abc import Callable
from typing import Any

from .clock import StepClock, perf


def install(clock: StepClock) -> None:
    from torch.utils.data import DataLoader, dataloader
    from torch.utils.data._utils import fetch

    clock.facts["loaders"] = {}  # id of a dataset → facts
    clock.facts["fetch"] = {"batches": 0, "fetch_s": 0.0, "collate_s": 0.0}
    base: Any = dataloader._BaseDataLoaderIter
    base.__next__ = _next(clock, base.__next__)
    DataLoader.__iter__ = _iter(clock, DataLoader.__iter__)  # type: ignore[method-assign]
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        kind.fetch = _fetch(clock, kind.fetch)  # type: ignore[method-assign]
    init = fetch._BaseDatasetFetcher.__init__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.collate_fn = _collate(clock, self.collate_fn)

    fetch._BaseDatasetFetcher.__init__ = begin  # type: ignore[method-assign]
    clock.on_phase.append(functools.partial(_hold, clock))


def batch_size(batch: Any) -> int:
    """Samples of a batch of any shape: the length of its first tensor."""
    for tensor in tensors(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    return len(batch) if isinstance(batch, (list, tuple)) else 0


def tensors(batch: Any) -> list[Any]:
    import torch

    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict) or hasattr(batch, "values"):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return [tensor for part in batch for tensor in tensors(part)]
    return []


def with_tensors(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same batch with each tensor replaced."""
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)({key: with_tensors(value, change) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(with_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(with_tensors(value, change) for value in batch)
    return batch


# Watching


def _next(clock: StepClock, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def call(self: Any) -> Any:
        if not clock.here():
            return original(self)
        served = clock.facts.get("serve")
        if served is not None and (batch := served(self)) is not None:
            clock.samples = batch_size(batch)
            clock.batches += 1
            clock.part("feed")
            return batch
        clock.enter("data")
        try:
            batch = original(self)
        finally:
            clock.leave()
        _note(clock, self, batch)
        clock.part("feed")
        return batch

    return call


def _note(clock: StepClock, iterator: Any, batch: Any) -> None:
    size, facts = batch_size(batch), _facts(clock, iterator)
    facts["batches"] += 1
    facts["largest"] = max(facts["largest"], size)
    if size == facts["largest"]:
        facts["_batch"] = batch
        if "row_bytes" not in facts and size:
            facts["row_bytes"] = sum(t.numel() * t.element_size() for t in tensors(batch)) / size
    clock.facts["last_dataset"] = id(iterator._dataset)
    clock.batches += 1
    evaluated = clock.evaluations and "backward" not in clock.parts  # what came so far was not trained on
    clock.samples = size if clock.batches == 1 or evaluated else clock.samples + size


def _facts(clock: StepClock, iterator: Any) -> dict[str, Any]:
    dataset, loaders = iterator._dataset, clock.facts["loaders"]
    facts: dict[str, Any] | None = loaders.get(id(dataset))
    if facts is None:
        facts = loaders[id(dataset)] = {
            "dataset": type(dataset).__name__,
            "num_workers": iterator._num_workers,
            "pin_memory": bool(iterator._pin_memory),
            "iterable": not hasattr(dataset, "__getitem__"),
            "batches": 0,
            "largest": 0,
            "rows": _length(dataset),
            "_dataset": dataset,  # keeps its id
        }
    return facts


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a dataset's own __len__ may raise anything
        return None


def _iter(clock: StepClock, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def call(self: Any) -> Any:
        if not clock.here():
            return original(self)
        if clock.facts["loaders"].get(id(self.dataset), {}).get("trains"):
            clock.tally.epochs.append(clock.tally.num_steps)
        clock.enter("data")
        try:
            return original(self)
        finally:
            clock.leave()

    return call


def _fetch(clock: StepClock, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any) -> Any:
        began, facts = perf(), clock.facts["fetch"]
        try:
            return original(self, *args)
        finally:
            facts["batches"] += 1
            facts["fetch_s"] += perf() - began

    return call


def _collate(clock: StepClock, original: Callable[..., Any]) -> Callable[..., Any]:
    def collate(rows: Any) -> Any:
        began = perf()
        try:
            return original(rows)
        finally:
            clock.facts["fetch"]["collate_s"] += perf() - began

    return collate


def mark_training(clock: StepClock) -> None:
    """The loader that gave the last batch feeds the training."""
    if (facts := clock.facts["loaders"].get(clock.facts.get("last_dataset"))) is not None:
        facts["trains"] = True


# The ceiling


def _hold(clock: StepClock, phase: str) -> None:
    """From the ceiling on, the training loader's largest batch is served again; each tensor is moved only once."""
    if phase != "ceiling" or clock.facts.get("serve"):
        return
    training = {
        key: facts for key, facts in clock.facts["loaders"].items() if facts.get("trains") and "_batch" in facts
    }
    if not training:
        return
    held: dict[Any, Any] = {"moved": {}}
    for facts in training.values():
        held.update({id(tensor): tensor for tensor in tensors(facts["_batch"])})
    versions = {key: tensor._version for key, tensor in held.items() if key != "moved"}
    clock.facts["held"] = held

    def serve(iterator: Any) -> Any:
        facts = training.get(id(iterator._dataset))
        if facts is None:
            return None
        if any(held[key]._version != version for key, version in versions.items()):  # the script writes into it
            clock.facts.pop("held", None)
            return with_tensors(facts["_batch"], lambda tensor: tensor.clone())
        return facts["_batch"]

    clock.facts["serve"] = serve
