"""What limits 8 GPUs, 64 nodes and a hundred million samples: a model of `brim rf generate --cluster`, and its check.

No device and no clock: the head of brim.rf.generation.head runs on paper, event by event, with its own rules (tasks of
about a second, two in a worker's hands, gates by the head and then by workers, copies of stragglers, a manifest that is
written again and again). Beside each simulated time stands what a closed formula says of the same; where both agree,
the formula says why. What a device, a head and a store take is measured or given: see Machine.
"""

import argparse
import heapq
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# As in brim.rf.generation.head and brim.rf.generation.attempts
TASK_S = 1.0
TASKS_EACH = 2
MAX_RANGES = 64
COPIES = 2
FIRST_BLOCK, LAST_BLOCK = 1024, 32_768
COMMIT_S = 1.0
COMMIT_SHARE = 20  # at most a twentieth of the time is for the manifest
WRITERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the parts of a cluster take; those with a page are measured, the others given."""

    worker_rate: float = 41_564.0  # samples/s of one H200: results/generate_h200_2026-11-15.md
    sample_bytes: float = 3_032.0  # of a shard, for a sample: the same page, 303 MB for 100 000
    start_s: float = 10.0  # until a worker is ready: imports, kernels, the first batch
    gate_rate: float = 258_000.0  # attempts/s of one core: results/scale_cpu_2026-11-16.md
    acceptance: float = 0.9997
    head_task_s: float = 520e-6  # of the head's time, for a task: the same page, over Ray
    head_range_s: float = 68e-6  # and for each of its ranges
    range_bytes: float = 173.0  # through the head, for a range: its entry and what is around it
    index_bytes: float = 8.0  # and for each of its samples
    entry_s: float = 1e-6  # for each shard whenever the manifest is written again, beside its bytes
    entry_bytes: float = 245.0  # of a shard in the manifest
    put_s: float = 0.06  # a store's answer to one shard; an object store's usual latency
    put_rate: float = 3500.0  # shards/s that a store takes under one prefix: S3's stated limit
    node_bytes_s: float = 3e9  # to the store, of one node: 25 Gb/s
    head_bytes_s: float = 1.2e9  # of the head's network: 10 Gb/s
    jitter: float = 0.03  # standard deviation of the logarithm of a task's time
    mtbf_s: float = math.inf  # of one worker
    restart_s: float = 30.0  # until another stands in for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A dataset and those who make it."""

    samples: int
    workers: int
    shard_items: int = 512
    nodes: int = 1

    @property
    def ranges(self) -> int:
        """Shards."""
        return math.ceil(self.samples / self.shard_items)


# The model


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the formula says."""

    seconds: float
    limits: dict[str, float]  # samples/s that each part allows

    @property
    def limit(self) -> str:
        """The part that allows least."""
        return min(self.limits, key=lambda name: self.limits[name])

    @property
    def rate(self) -> float:
        """Samples/s in the long run."""
        return self.limits[self.limit]


def forecast(plan: Plan, machine: Machine) -> Forecast:
    """The long run is as fast as its slowest part; before it workers start, after it the last task ends.

    A part that is busy for a seconds of each range allows shard_items / a samples a second.
    """
    items, workers = plan.shard_items, plan.workers
    per_task = min(MAX_RANGES, max(1, round(machine.worker_rate / items * TASK_S)))
    per_task = max(1, min(per_task, math.ceil(plan.ranges / workers / TASKS_EACH)))
    head_s = machine.head_range_s + machine.head_task_s / per_task
    commit_s = plan.ranges * again_s(machine)  # of the last one
    commit_share = 1 / (1 + COMMIT_SHARE) if commit_s * COMMIT_SHARE > COMMIT_S else 0.0
    through_head = machine.index_bytes * items + machine.range_bytes + items / machine.acceptance
    limits = {
        "devices": workers * machine.worker_rate / (1 + machine.restart_s / machine.mtbf_s),
        "head": items / head_s * (1 - commit_share),
        "head's network": machine.head_bytes_s / through_head * items,
        "gates": machine.gate_rate * machine.acceptance * (1 + workers),
        "store's requests": machine.put_rate * items,
        "writers": workers * WRITERS / machine.put_s * items,
        "nodes' network": plan.nodes * machine.node_bytes_s / machine.sample_bytes,
    }
    rate = min(limits.values())
    ramp_s = FIRST_BLOCK / machine.gate_rate + items / machine.worker_rate + machine.put_s
    slowest = machine.jitter * math.sqrt(2 * math.log(max(2, workers)))  # of the workers' last tasks, in their lengths
    tail_s = machine.put_s + min(TASK_S, plan.samples / rate) * slowest
    seconds = machine.start_s + ramp_s + plan.samples / rate + tail_s + commit_s
    return Forecast(seconds=seconds, limits=limits)


def again_s(machine: Machine) -> float:
    """For each shard whenever the manifest is written."""
    return machine.entry_s + machine.entry_bytes / machine.head_bytes_s


# The simulation


@dataclass(slots=True)
class _Task:
    ranges: list[int]
    given_s: float


@dataclass(slots=True)
class _Worker:
    number: int
    queue: deque[_Task] = field(default_factory=deque)  # in its hands, the first is being made
    busy_s: float = 0.0
    device_free_s: float = 0.0
    writer_free_s: float = 0.0
    ended_s: float = 0.0
    rate: float = 0.0
    gating: bool = False
    life: int = 0  # counts deaths: what an earlier life promised does not come
    alive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a simulated run."""

    seconds: float
    efficiency: float  # samples over what all devices could have made meanwhile
    busy: dict[str, float]  # share of the time that each part was busy, from the first range on
    head_bytes: float
    tasks: int
    copies: int  # ranges made twice at the end
    deaths: int


class Simulation:
    """One run of the head."""

    def __init__(self, plan: Plan, machine: Machine, seed: int = 0) -> None:
        """Take the plan; `run` does the rest."""
        self.plan, self.machine = plan, machine
        self.random = random.Random(seed)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.now_s = 0.0
        self.head_free_s = self.head_busy_s = 0.0
        self.store_free_s = self.store_busy_s = 0.0
        self.node_free_s = [0.0] * plan.nodes
        self.workers = [_Worker(number) for number in range(plan.workers)]
        self.open: dict[int, set[int]] = {}  # handed out and not done → who has it
        self.since: dict[int, float] = {}
        self.again: deque[int] = deque()
        self.ready = 0  # ranges known and not handed out, as a number: they are taken in order
        self.booked = 0.0  # accepted attempts in no range yet
        self.taken = self.done = 0
        self.pending_gates = 0  # attempts
        self.block = FIRST_BLOCK
        self.head_gating = False
        self.committed_s = self.commit_cost_s = 0.0
        self.head_bytes = 0.0
        self.tasks = self.copies = self.deaths = 0

    def run(self) -> Outcome:
        """Until every range is done."""
        for worker in self.workers:
            worker.ended_s = self.machine.start_s
            self._schedule_death(worker)
        self.now_s = self.head_free_s = self.machine.start_s
        self._feed()
        while self.done < self.plan.ranges:
            self.now_s, _, act = heapq.heappop(self.events)
            act()
        return self._outcome()

    # The head: one thing at a time

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (max(time_s, self.now_s), self.count, act))

    def _on_head(self, cost_s: float, act: Callable[[], None]) -> None:
        """Do something when the head comes to it; the head is busy for the cost."""
        begin_s = max(self.now_s, self.head_free_s)
        self.head_free_s = begin_s + cost_s
        self.head_busy_s += cost_s
        self._at(self.head_free_s, act)

    def _feed(self) -> None:
        for worker in self.workers:
            while worker.alive and len(worker.queue) < TASKS_EACH and (ranges := self._next(worker)):
                self._give(worker, ranges)
        self._gate()

    def _next(self, worker: _Worker) -> list[int]:
        if self.again:
            return [self.again.popleft()]
        if self.ready:
            count = min(self._size(worker), self.ready)
            first, self.taken, self.ready = self.taken, self.taken + count, self.ready - count
            return list(range(first, first + count))
        if self.taken < self.plan.ranges or worker.queue:
            return []
        late = [one for one, holders in self.open.items() if len(holders) < COPIES and worker.number not in holders]
        if not late:
            return []
        self.copies += 1
        return [min(late, key=lambda one: self.since[one])]

    def _size(self, worker: _Worker) -> int:
        size = min(MAX_RANGES, max(1, round(worker.rate * TASK_S)))
        left = self.plan.ranges - self.taken
        return max(1, min(size, math.ceil(left / (len(self.workers) * TASKS_EACH))))

    def _give(self, worker: _Worker, ranges: list[int]) -> None:
        task = _Task(ranges, self.now_s)
        for one in ranges:
            self.open.setdefault(one, set()).add(worker.number)
            self.since.setdefault(one, self.now_s)
        worker.queue.append(task)
        self.tasks += 1
        items = len(ranges) * self.plan.shard_items
        sent = self.machine.index_bytes * items + self.machine.range_bytes * len(ranges)
        self.head_bytes += sent
        cost_s = (self.machine.head_task_s + self.machine.head_range_s * len(ranges)) / 2
        cost_s = max(cost_s, sent / self.machine.head_bytes_s)
        life = worker.life
        self._on_head(cost_s, lambda: self._make(worker, task, life))

    # A worker: its device, its writers, its node's network, the store

    def _make(self, worker: _Worker, task: _Task, life: int) -> None:
        if worker.life != life:
            return
        machine, items = self.machine, len(task.ranges) * self.plan.shard_items
        took_s = items / machine.worker_rate * self.random.lognormvariate(0.0, machine.jitter)
        begin_s = max(self.now_s, worker.device_free_s)
        worker.device_free_s = begin_s + took_s
        worker.busy_s += took_s
        self._at(begin_s, lambda: self._write(worker, task, life, begin_s + took_s))

    def _write(self, worker: _Worker, task: _Task, life: int, made_s: float) -> None:
        """Put the shards of a task into the store from now on, as they are made; the last one afterwards."""
        machine, shards, node = self.machine, len(task.ranges), worker.number % self.plan.nodes
        sent_s = shards * self.plan.shard_items * machine.sample_bytes / machine.node_bytes_s
        store_s = shards / machine.put_rate
        worker.writer_free_s = max(worker.writer_free_s, self.now_s) + shards * machine.put_s / WRITERS
        self.node_free_s[node] = max(self.node_free_s[node], self.now_s) + sent_s
        self.store_free_s = max(self.store_free_s, self.now_s) + store_s
        self.store_busy_s += store_s
        written_s = max(made_s + machine.put_s, worker.writer_free_s, self.node_free_s[node], self.store_free_s)
        self._at(written_s, lambda: self._made(worker, task, life))

    def _made(self, worker: _Worker, task: _Task, life: int) -> None:
        if worker.life == life:
            machine = self.machine
            cost_s = (machine.head_task_s + machine.head_range_s * len(task.ranges)) / 2
            self._on_head(cost_s + self._commit(), lambda: self._finish(worker, task, life))

    def _finish(self, worker: _Worker, task: _Task, life: int) -> None:
        if worker.life != life:
            return
        worker.queue.remove(task)
        elapsed_s = max(self.now_s - max(worker.ended_s, task.given_s), 1e-3)
        rate = len(task.ranges) / elapsed_s
        worker.rate = (worker.rate + rate) / 2 if worker.rate else rate
        worker.ended_s = self.now_s
        for one in task.ranges:
            if self.open.pop(one, None) is not None:
                self.done += 1
        self._feed()

    def _commit(self) -> float:
        """Seconds that the head spends on the manifest now."""
        if self.now_s - self.committed_s < max(COMMIT_S, COMMIT_SHARE * self.commit_cost_s):
            return 0.0
        self.commit_cost_s = self.done * again_s(self.machine)
        self.committed_s = self.now_s + self.commit_cost_s
        return self.commit_cost_s

    # Gates

    def _gate(self) -> None:
        ahead = 2 * TASKS_EACH * sum(self._size(worker) for worker in self.workers)
        if not self.head_gating and self._wants(ahead):
            self.head_gating = True
            self._begin(None)
        for worker in self.workers:
            if self.ready >= ahead // 2 or not self._wants(ahead):
                break
            if worker.alive and not worker.gating:
                worker.gating = True
                self._begin(worker)

    def _wants(self, ahead: int) -> bool:
        left = (self.plan.ranges - self.taken - self.ready) * self.plan.shard_items
        wanted = min(left, (ahead - self.ready) * self.plan.shard_items)
        return left > 0 and self.booked + self.pending_gates * self.machine.acceptance < wanted

    def _begin(self, worker: _Worker | None) -> None:
        attempts, self.block = self.block, min(2 * self.block, LAST_BLOCK)
        self.pending_gates += attempts
        took_s = attempts / self.machine.gate_rate
        if worker is None:
            self._at(self.now_s + took_s, lambda: self._gated(None, attempts))
            return
        self.head_bytes += attempts
        cost_s = max(self.machine.head_task_s, attempts / self.machine.head_bytes_s)

        def tell() -> None:
            self._on_head(cost_s, lambda: self._gated(worker, attempts))

        self._at(self.now_s + took_s, tell)

    def _gated(self, worker: _Worker | None, attempts: int) -> None:
        if worker is None:
            self.head_gating = False
        else:
            worker.gating = False
        self.pending_gates -= attempts
        self.booked += attempts * self.machine.acceptance
        items, left = self.plan.shard_items, self.plan.ranges - self.taken - self.ready
        made = min(left, int(self.booked // items))
        if left - made == 1 and self.booked - made * items >= self.plan.samples % items > 0:
            made += 1  # the last shard is shorter
        self.booked -= made * items
        self.ready += made
        self._feed()

    # Deaths

    def _schedule_death(self, worker: _Worker) -> None:
        if math.isfinite(self.machine.mtbf_s):
            life = worker.life
            self._at(self.now_s + self.random.expovariate(1 / self.machine.mtbf_s), lambda: self._die(worker, life))

    def _die(self, worker: _Worker, life: int) -> None:
        if worker.life != life or not worker.alive:
            return
        self.deaths += 1
        worker.life, worker.alive = worker.life + 1, False
        for task in worker.queue:
            for one in task.ranges:
                if one in self.open:
                    self.open[one].discard(worker.number)
                    if not self.open[one]:
                        self.again.append(one)
        worker.queue.clear()
        self._at(self.now_s + self.machine.restart_s, lambda: self._revive(worker))
        self._feed()

    def _revive(self, worker: _Worker) -> None:
        worker.alive, worker.rate = True, 0.0
        worker.ended_s = worker.device_free_s = worker.writer_free_s = self.now_s
        self._schedule_death(worker)
        self._feed()

    def _outcome(self) -> Outcome:
        plan, machine = self.plan, self.machine
        seconds = self.now_s + self.done * again_s(machine)  # the last manifest
        working_s = max(seconds - machine.start_s, 1e-9)
        return Outcome(
            seconds=seconds,
            efficiency=plan.samples / (plan.workers * machine.worker_rate * working_s),
            busy={
                "devices": sum(worker.busy_s for worker in self.workers) / working_s / plan.workers,
                "head": self.head_busy_s / working_s,
                "store's requests": self.store_busy_s / working_s,
            },
            head_bytes=self.head_bytes,
            tasks=self.tasks,
            copies=self.copies,
            deaths=self.deaths,
        )


def simulate(plan: Plan, machine: Machine, seed: int = 0) -> Outcome:
    """One run."""
    return Simulation(plan, machine, seed).run()


# The questions


HUNDRED_MILLION = 100_000_000
# With the records themselves a sample is 11 MB, and an H200 makes 189 a second: its own disk took 54 of them
IQ = Machine(worker_rate=189.0, sample_bytes=2_868_014_562 / 256)  # results/generate_h200_2026-11-15.md
FRAGILE_S = 6 * 3600.0

CASES: tuple[tuple[str, Plan, Machine], ...] = tuple(
    (name, Plan(samples=samples, workers=workers, nodes=nodes, shard_items=items), machine)
    for name, samples, workers, nodes, items, machine in (
        ("1 GPU", HUNDRED_MILLION, 1, 1, 512, Machine()),
        ("8 GPUs, one node", HUNDRED_MILLION, 8, 1, 512, Machine()),
        ("8 GPUs, shards of 4096", HUNDRED_MILLION, 8, 1, 4096, Machine()),
        ("64 nodes of 1 GPU", HUNDRED_MILLION, 64, 64, 512, Machine()),
        ("64 nodes of 1 GPU, shards of 4096", HUNDRED_MILLION, 64, 64, 4096, Machine()),
        ("64 nodes of 8 GPUs", HUNDRED_MILLION, 512, 64, 512, Machine()),
        ("64 nodes of 8 GPUs, shards of 4096", HUNDRED_MILLION, 512, 64, 4096, Machine()),
        ("64 nodes of 8 GPUs, shards of 16384", HUNDRED_MILLION, 512, 64, 16_384, Machine()),
        ("the same, a worker dies every 40 s", HUNDRED_MILLION, 512, 64, 16_384, Machine(mtbf_s=FRAGILE_S)),
        ("a million with IQ, 8 GPUs, one node", 1_000_000, 8, 1, 8, IQ),
        ("a million with IQ, 64 nodes of 8 GPUs", 1_000_000, 512, 64, 8, IQ),
    )
)


def main() -> None:
    """Print a table of the cases, then one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--measured", type=Path, help="page of bench_scale.py: its costs, and a check against its runs")
    options = parser.parse_args()
    measured = read_page(options.measured) if options.measured else {}
    costs = {name: float(measured["costs"][name]) for name in COSTS} if measured else {}
    results = [
        row(name, plan, replace(machine, **costs), options.seeds)
        for name, plan, machine in CASES
        if options.only is None or options.only in name
    ]
    checks = check(measured, replace(Machine(), **costs)) if measured else []
    print(json.dumps({"cases": results, "checks": checks}))


COSTS = ("gate_rate", "head_task_s", "head_range_s", "range_bytes", "entry_s")


def read_page(file: Path) -> Any:
    """The JSON line at the end of a page of results."""
    return json.loads(file.read_text(encoding="utf-8").rpartition("```json\n")[2].partition("\n```")[0])


def check(measured: Any, machine: Machine) -> list[dict[str, object]]:
    """The whole runs of bench_scale.py beside what is simulated of them, from the rate of one worker alone."""
    cores, found = measured["machine"]["cores"], []
    print(f"\n{'measured':38} {'samples/s':>9} {'simulated':>12} {'off':>6}")
    for name, run in measured["whole"].items():
        pool, _, count = name.rpartition(" ")
        if not count.isdigit():
            continue
        alone = measured["whole"][f"{pool} 1"]["samples_per_s"]["median"]
        rate = alone * min(cores, int(count)) / int(count)  # workers beyond the cores share them
        plan = Plan(samples=measured["samples"], workers=int(count), shard_items=measured["shard_items"])
        here = replace(machine, worker_rate=rate, start_s=0.0, put_s=0.005)
        simulated = plan.samples / simulate(plan, here).seconds
        rate = run["samples_per_s"]["median"]
        print(f"{name:38} {rate:9.1f} {simulated:12.1f} {simulated / rate - 1:6.1%}")
        found.append({"run": name, "samples_per_s": rate, "simulated": simulated})
    return found


def row(name: str, plan: Plan, machine: Machine, seeds: int) -> dict[str, object]:
    """A case by both ways, printed."""
    if not _printed:
        heads = f"{'model s':>9} {'simulated s':>12} {'off':>6} {'of devices':>10} {'head':>6} {'GB':>6}  limit"
        print(f"{'case':38} {heads}")
        _printed.append(name)
    said = forecast(plan, machine)
    runs = [simulate(plan, machine, seed) for seed in range(seeds)]
    seconds = mean(one.seconds for one in runs)
    efficiency, head = mean(one.efficiency for one in runs), mean(one.busy["head"] for one in runs)
    off = said.seconds / seconds - 1
    sent = mean(one.head_bytes for one in runs) / 1e9
    print(
        f"{name:38} {said.seconds:9.1f} {seconds:12.1f} {off:6.1%} {efficiency:10.1%} {head:6.1%} {sent:6.2f}  "
        f"{said.limit}"
    )
    return {
        "case": name,
        "plan": asdict(plan),
        "model_s": said.seconds,
        "simulated_s": seconds,
        "limit": said.limit,
        "limits": said.limits,
        "efficiency": efficiency,
        "head_busy": head,
        "head_bytes": runs[0].head_bytes,
        "deaths": mean(one.deaths for one in runs),
        "copies": mean(one.copies for one in runs),
    }


_printed: list[str] = []


def mean(values: Iterable[float]) -> float:
    """Of some."""
    found: Sequence[float] = list(values)
    return sum(found) / len(found)


if __name__ == "__main__":
    main()
