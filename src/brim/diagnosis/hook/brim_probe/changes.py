"""The remedies: changes that one run of a script is given, each without an edit.

workers, prefetch, pinned, batch   the arguments of the script's DataLoaders
resident                           batches gathered on the device from rows that are there already
bf16, channels_last, compile       the module that the script calls
"""

import functools
from typing import Any

from .clock import StepClock
from .feeding import batch_size, tensors, with_tensors

HELD_BATCHES = 8  # whose rows are kept on the device: a stand-in for the whole dataset


def install(clock: StepClock) -> None:
    change, value = clock.plan.get("change"), clock.plan.get("value")
    if change is None:
        return
    clock.facts["tried"] = "not used"
    if change in ("workers", "prefetch", "pinned", "batch"):
        _change_loaders(clock, change, value)
    elif change == "resident":
        clock.facts["serve"] = _Resident(clock).serve
    elif change == "bf16":
        clock.facts["around_forward"] = functools.partial(_in_bf16, clock)
    elif change == "channels_last":
        clock.facts["before_forward"] = [functools.partial(_channels_last, clock, set())]
    elif change == "compile":
        clock.facts["before_forward"] = [functools.partial(_compiled, clock, set(), value)]


def _change_loaders(clock: StepClock, change: str, value: Any) -> None:
    from torch.utils.data import DataLoader, IterableDataset

    init = DataLoader.__init__

    @functools.wraps(init)
    def begin(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        usual = not args  # further arguments by position are left alone
        if change == "workers" and usual and not isinstance(dataset, IterableDataset):
            if kwargs.get("num_workers", 0) != value:
                kwargs.update(num_workers=value, persistent_workers=True)
                clock.facts["tried"] = "used"
        elif change == "prefetch" and usual and kwargs.get("num_workers", 0):
            kwargs.update(prefetch_factor=value, persistent_workers=True)
            clock.facts["tried"] = "used"
        elif change == "pinned" and usual and not kwargs.get("pin_memory"):
            kwargs["pin_memory"] = True
            clock.facts["tried"] = "used"
        elif change == "batch" and usual and batch_size and kwargs.get("batch_sampler") is None:
            rows = len(dataset) if hasattr(dataset, "__len__") else None
            if rows is None or rows >= 2 * batch_size * value:
                batch_size = batch_size * value
                clock.facts["tried"] = "used"
        init(self, dataset, batch_size, *args, **kwargs)

    DataLoader.__init__ = begin  # type: ignore[method-assign]


class _Resident:
    """Rows of the first batches, on the device; each further batch is a random gather of them there."""

    def __init__(self, clock: StepClock) -> None:
        self.clock, self.rows, self.size = clock, list[Any](), 0
        self.batches: list[Any] = []

    def serve(self, iterator: Any) -> Any:
        facts = self.clock.facts["loaders"].get(id(iterator._dataset))
        if facts is None or not facts.get("trains"):
            return None
        if not self.rows:
            batch = facts.get("_batch")
            if batch is not None and (not self.batches or batch is not self.batches[-1]):
                self.batches.append(batch)
            if len(self.batches) < HELD_BATCHES:
                return None
            self._keep()
        return self._gather()

    def _keep(self) -> None:
        import torch

        device = self.clock.facts.get("device", {}).get("name") or "cpu"
        self.size = batch_size(self.batches[0])
        same = [batch for batch in self.batches if batch_size(batch) == self.size]
        columns = zip(*(tensors(batch) for batch in same))  # noqa: B905 - Python 3.10's own tuples
        self.rows = [torch.cat([t.to(device) for t in column]) if column[0].dim() else column[0] for column in columns]
        self.batches = same[:1]
        self.clock.facts["tried"] = "used"

    def _gather(self) -> Any:
        import torch

        first = next(column for column in self.rows if column.dim())
        chosen = torch.randint(len(first), (self.size,), device=first.device)
        columns = iter(self.rows)

        def gathered(_: Any) -> Any:
            column = next(columns)
            return column[chosen] if column.dim() and len(column) == len(first) else column

        return with_tensors(self.batches[0], gathered)


def _in_bf16(clock: StepClock, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
    import torch

    device = next((tensor.device.type for tensor in tensors([args, kwargs])), "cpu")
    clock.facts["tried"] = "used"
    with torch.autocast(device, dtype=torch.bfloat16):
        answer = original(module, *args, **kwargs)
    return with_tensors(answer, lambda tensor: tensor.float() if tensor.dtype == torch.bfloat16 else tensor)


def _channels_last(clock: StepClock, done: set[int], module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    import torch

    if not any(tensor.dim() == 4 for tensor in tensors(list(args))) or not any(True for _ in module.parameters()):
        return args, kwargs
    if id(module) not in done:
        done.add(id(module))
        module.to(memory_format=torch.channels_last)
        clock.facts["tried"] = "used"
    args = with_tensors(args, lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t)
    return args, kwargs


def _compiled(clock: StepClock, done: set[int], value: Any, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if id(module) not in done:
        done.add(id(module))
        if any(True for _ in module.parameters()) and hasattr(module, "compile"):
            module.compile(mode=value)
            clock.facts["tried"] = "used"
    return args, kwargs
