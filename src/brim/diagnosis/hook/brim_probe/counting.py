"""Operations, arithmetic, bytes and device time of a step, and the roofs of the device they are compared with."""

import functools
from typing import Any

from .clock import PASSES, StepClock, perf

ROOF_S = 0.15  # to measure each roof
PROFILED = 3  # steps of the ceiling that are profiled on a GPU


def install(clock: StepClock) -> None:
    clock.on_phase.append(functools.partial(_on_phase, clock))


def _on_phase(clock: StepClock, phase: str) -> None:
    if phase == "watch":
        clock.facts["device"] = _device()
        _synchronize(clock)
        clock.facts["queued"] = _queued_s()
    elif phase == "ceiling":
        _synchronize(clock)
        if (queued_s := clock.facts.pop("queued", None)) is not None:
            watch = clock.tallies["watch"]
            clock.facts["starved"] = (_queued_s() - queued_s) / max(1e-9, perf() - watch.began)
    elif phase == "count":
        _synchronize(clock)
        clock.tallies["ceiling"].ended = perf()
        clock.facts["memory"] = _memory(clock)
        _Counting(clock).begin()
    elif phase == "done" and (counting := clock.facts.get("counting")) is not None:
        counting.end()


def _queued_s() -> float:
    """Seconds for which this thread was ready to run but had no core; 0 where the system does not say."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _device() -> dict[str, Any]:
    """The device that the script has used so far."""
    import torch

    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", "")) or None
        return {"type": "cuda", "name": f"cuda:{index}", "uuid": uuid, "memory": properties.total_memory}
    return {"type": "cpu", "name": "cpu", "threads": torch.get_num_threads()}


def _is_cuda(clock: StepClock) -> bool:
    return bool(clock.facts.get("device", {}).get("type") == "cuda")


def _synchronize(clock: StepClock) -> None:
    if _is_cuda(clock):
        import torch

        torch.cuda.synchronize()


def _memory(clock: StepClock) -> int | None:
    import torch

    return int(torch.cuda.max_memory_reserved()) if _is_cuda(clock) else None


class _Counting:
    """Counts the operations of the steps from `begin` to `end`; on a GPU it also profiles them."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.mode: Any = None
        self.profiler: Any = None
        clock.facts["counting"] = self

    def begin(self) -> None:
        import torch

        if _is_cuda(self.clock):
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.__enter__()
        if self.clock.plan.get("change") is None:
            self.mode = _mode(self.clock)
            self.mode.__enter__()

    def end(self) -> None:
        steps = max(1, self.clock.tally.num_steps)
        operations: dict[str, Any] = {}
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            operations = {
                "num": self.mode.num / steps,
                "num_between": self.mode.num_between / steps,
                "flops": self.mode.flops / steps,
                "bytes": self.mode.bytes / steps,
                "overhead_s": _overhead_s(self.clock),
                **_roofs(self.clock.facts["device"]["name"]),
            }
        if self.profiler is not None:
            _synchronize(self.clock)
            self.profiler.__exit__(None, None, None)
            operations["device_s"] = _kernel_s(self.profiler) / steps
        self.clock.facts["operations"] = operations


def _mode(clock: StepClock | None = None) -> Any:
    """Counts operations; with a clock, in the passes and between them, not those of copies, `.item()` or evaluation."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        num, num_between, flops, bytes = 0, 0, 0.0, 0.0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answer = function(*args, **(kwargs or {}))
            cause = clock.cause if clock is not None else PASSES[0]
            if function.is_view or "detach" in str(function) or cause not in PASSES:
                return answer
            self.num += 1
            self.num_between += cause == "compute"
            self.bytes += _bytes(args) + _bytes(answer)
            count = flop_registry.get(function._overloadpacket)
            if count is not None:
                self.flops += count(*args, **(kwargs or {}), out_val=answer)
            return answer

    return Counter()  # type: ignore[no-untyped-call]


def _bytes(values: Any) -> int:
    if isinstance(values, (list, tuple)):
        return sum(_bytes(value) for value in values)
    size = getattr(values, "numel", None)
    return size() * values.element_size() if size is not None and hasattr(values, "element_size") else 0


def _overhead_s(clock: StepClock) -> float:
    """Seconds that an operation takes besides its arithmetic: of the steps of a network with next to none."""
    import torch

    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(4, 4), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers)
    optimizer, x, counter = torch.optim.SGD(net.parameters(), lr=0.0), torch.ones(1, 4), _mode()

    def step() -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    thread, clock.thread = clock.thread, None  # not part of the script's time
    try:
        with torch.random.fork_rng([]), torch.enable_grad():
            step()
            with counter:
                step()
            began, num = perf(), 0
            while perf() - began < ROOF_S:
                step()
                num += 1
            return float((perf() - began) / num / counter.num)
    finally:
        clock.thread = thread


def _roofs(device: str) -> dict[str, float]:
    """Arithmetic and bandwidth that the device reaches on a large product and a large copy."""
    import torch

    size = 4096 if device.startswith("cuda") else 768
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    source = torch.zeros((256 if device.startswith("cuda") else 32) << 20, dtype=torch.uint8, device=device)
    with torch.no_grad():
        product_s = _best_s(lambda: a @ b, device)
        copy_s = _best_s(lambda: source.clone(), device)
    return {"roof_flops": 2 * size**3 / product_s, "roof_bytes": 2 * source.numel() / copy_s}


def _best_s(call: Any, device: str) -> float:
    import torch

    best, began = 1e9, perf()
    while perf() - began < ROOF_S:
        start = perf()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, perf() - start)
    return best


def _kernel_s(profiler: Any) -> float:
    """Seconds in which at least one kernel ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    )
    busy, end = 0.0, 0.0
    for a, b in spans:
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    return busy / 1e6
