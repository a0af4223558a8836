"""How does `brim rf generate` scale over workers, and what does each range cost the head?

    python benchmarks/bench_scale.py [--samples 256] [--markdown PAGE]

Three parts. Whole runs with 1, 2 and 4 workers of one thread each, by processes and by Ray: samples a second, and the
share of what the cores used allow (on a machine of two cores four workers share two). The way to a worker: what a task
of 1 and of 64 ranges costs the head's process when the worker answers at once. The head alone: what handing out and
listing costs with workers that are not there. From the last two follow the costs that simulate_cluster.py takes.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from brim.cluster.processes import ProcessPool
from brim.engine.storage import COMMIT_S, LocalPlace, ShardEntry, place_of, shard_name
from brim.rf import generate
from brim.rf.config import GenerateConfig
from brim.rf.generation.attempts import LAST_BLOCK, Block, ShardRange, gate_block
from brim.rf.generation.dataset import open_writer
from brim.rf.generation.pool import Pool, TaskDone, WorkerReady
from brim.rf.generation.worker import MakeShards
from page import Json, facts_of, installed, machine, markdown, number, ranged, spread, table, tell
from scale_work import EchoWork, PaperPool, answer

WORKERS = (1, 2, 4)
POOLS = ("processes", "ray")
SHARD_ITEMS = 8  # of the whole runs: many ranges although a CPU is slow
RANGES = (1, 64)  # of a task, on the way to a worker
TASKS = 200
ENTRIES = 20_000


def main() -> None:
    """Measure, print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=256, help="of a whole run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--commit", default="")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--part", nargs=2, metavar=("NAME", "VALUE"), help=argparse.SUPPRESS)  # a process of its own
    options = parser.parse_args()
    if options.part:
        print(json.dumps(part(*options.part, samples=options.samples)))
        return
    results = measure(options)
    tables = "\n".join(tables_of(results))
    print(tables)
    line = json.dumps(results)
    print(line)
    if options.markdown:
        facts = facts_of(results, {"ray": installed("ray")})
        options.markdown.write_text(markdown(__doc__ or "", ABOUT, facts, tables, line), encoding="utf-8")


ABOUT = (
    "A range is a shard of accepted attempts, the unit that workers make. Workers have one thread each; a single one "
    "shares one core with the head. Simulated nodes of Ray stand for machines."
)


def measure(options: argparse.Namespace) -> Json:
    """All parts."""
    results: Json = {
        "question": "scaling of brim rf generate over workers",
        "machine": machine(torch.device("cpu"), options.commit),
        "command": "python benchmarks/bench_scale.py " + " ".join(sys.argv[1:]),
        "samples": options.samples,
        "shard_items": SHARD_ITEMS,
        "whole": {"no workers": repeated("none:1", options)},
    }
    for pool in options.pools:
        for workers in WORKERS:
            results["whole"][f"{pool} {workers}"] = repeated(f"{pool}:{workers}", options)
    results["way"] = {pool: apart("way", pool, options) for pool in options.pools}
    results["head"] = apart("head", "1", options)
    results["costs"] = costs_of(results)
    results["load_average_end"] = os.getloadavg()[0]
    return results


def repeated(value: str, options: argparse.Namespace) -> Json:
    """Whole runs of one kind."""
    runs = [apart("whole", value, options) for _ in range(options.repeats)]
    rates = spread([run["samples_per_s"] for run in runs])
    return {**runs[-1], "samples_per_s": rates, "seconds": spread([run["seconds"] for run in runs])}


def apart(name: str, value: str, options: argparse.Namespace) -> Json:
    """A part in a process of its own: what Ray or a core's affinity leaves behind does not reach the next."""
    tell(f"{name} {value}")
    command = [sys.executable, __file__, "--part", name, value, "--samples", str(options.samples)]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{name} {value} failed: {done.stderr[-3000:]}")
    found: Json = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def part(name: str, value: str, *, samples: int) -> Json:
    """What `apart` runs."""
    if name == "whole":
        pool, _, workers = value.partition(":")
        return whole(pool, int(workers), samples)
    return way(value) if name == "way" else head()


# Whole runs


def whole(kind: str, workers: int, samples: int) -> Json:
    """One dataset; a single worker has one core to itself, head and all."""
    if workers == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = GenerateConfig(samples_per_shard=SHARD_ITEMS)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "data"
        if kind == "none":
            return figures(generate(config, out, samples, device="cpu").as_dict())
        with pool_of(kind, workers) as pool:
            return figures(generate(config, out, samples, pool=pool).as_dict())


def figures(report: Json) -> Json:
    """Those that are compared."""
    names = ("samples_per_s", "seconds", "accepted", "ceiling_share", "batch_size")
    return {name: report[name] for name in names}


@contextmanager
def pool_of(kind: str, workers: int) -> Iterator[Pool]:
    """So many workers of one thread."""
    if kind == "processes":
        yield ProcessPool(("cpu",) * workers)
        return
    from ray.cluster_utils import Cluster

    from brim.cluster.ray_connect import connect
    from brim.cluster.ray_pool import RayPool

    small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        for _ in range(workers - 1):
            nodes.add_node(**small)
        os.environ["RAY_ADDRESS"] = nodes.address
        with connect("auto") as cluster:
            yield RayPool(cluster)
    finally:
        nodes.shutdown()


# The way to a worker


def way(kind: str) -> Json:
    """CPU time of this process, and bytes, for a task of so many ranges and its answer."""
    found: Json = {}
    with pool_of(kind, 1) as pool:
        try:
            pool.start(EchoWork())
            worker = ready(pool)
            for count in RANGES:
                found[str(count)] = echo(pool, worker, task_of(count))
        finally:
            pool.close()
    return found


def ready(pool: Pool) -> int:
    """The first worker."""
    while True:
        for event in pool.wait(0.2):
            if isinstance(event, WorkerReady):
                return event.worker
            raise SystemExit(f"no worker: {event}")


def echo(pool: Pool, worker: int, task: MakeShards) -> Json:
    """Tasks one after the other: their round trip, and what the head's process computes meanwhile."""
    trips = []
    for turn in range(TASKS + 20):
        if turn == 20:  # warm
            cpu_s, began_s = time.process_time(), time.perf_counter()
        sent_s = time.perf_counter()
        pool.submit(worker, task)
        while not any(isinstance(event, TaskDone) for event in pool.wait(1.0)):
            pass
        trips.append(time.perf_counter() - sent_s)
    return {
        "cpu_s": (time.process_time() - cpu_s) / TASKS,
        "trip_s": spread(trips[20:]),
        "tasks_per_s": TASKS / (time.perf_counter() - began_s),
        "bytes": len(pickle.dumps(task)) + len(pickle.dumps(answer(task))),
    }


def task_of(count: int, items: int = 512) -> MakeShards:
    """As the head hands out."""
    totals = {"attempted": 10**6, "receivers": 0, "gdop": 300}
    ranges = tuple(
        ShardRange(number=k, index=np.arange(k * items, (k + 1) * items), totals=totals) for k in range(count)
    )  # fmt: skip
    return MakeShards(ranges=ranges, place=LocalPlace(Path("/data/night-run")), token="shards/.999999.00000000.tmp")


# The head alone


def head() -> Json:
    """CPU time of the head's thread when workers take none; and what gates and the manifest take."""
    config = GenerateConfig(samples_per_shard=512)
    few, many = paper(config, workers=4, ranges=2048), paper(config, workers=1024, ranges=2048)
    return {"large tasks": few, "small tasks": many, "gate_rate": gate_rate(config), "entry_s": entry_s(config)}


def paper(config: GenerateConfig, *, workers: int, ranges: int) -> Json:
    """Hand out so many ranges to workers that are not there."""
    pool = PaperPool(workers, config)
    began_s, cpu_s = time.perf_counter(), time.thread_time()
    generate(config, f"memory://bench/{workers}", ranges * config.shard_items, pool=pool)
    spent_s = time.thread_time() - cpu_s - pool.own_s
    return {"tasks": pool.tasks, "ranges": pool.ranges, "cpu_s": spent_s, "seconds": time.perf_counter() - began_s}


def gate_rate(config: GenerateConfig) -> float:
    """Attempts a second of one core."""
    gate_block(config, Block(first=0, stop=LAST_BLOCK))
    began_s = time.process_time()
    for turn in range(5):
        gate_block(config, Block(first=turn * LAST_BLOCK, stop=(turn + 1) * LAST_BLOCK))
    return 5 * LAST_BLOCK / (time.process_time() - began_s)


def entry_s(config: GenerateConfig) -> float:
    """Seconds for each shard of writing the manifest of many again; what writing it first takes is in the range's."""
    with open_writer(config, place_of("memory://bench/entries"), "cpu", resume=True, verify="sizes") as writer:
        writer.vacate()
        for number in range(ENTRIES):
            if number == ENTRIES - 1:
                time.sleep(1.1 * COMMIT_S)  # so that the last one has them all written
            totals = {"attempted": number * 512, "receivers": 0, "gdop": number}
            name = shard_name(number)
            writer.adopt(
                number, ShardEntry(name=name, items=512, bytes=1_551_234, sha256=f"{number:064x}", totals=totals)
            )
        began_s = time.perf_counter()
        writer.finish(report={})
        return (time.perf_counter() - began_s) / ENTRIES


# What follows


def costs_of(results: Json) -> Json:
    """What a task and a range cost the head, by two equations each: large and small tasks."""
    few, many = results["head"]["large tasks"], results["head"]["small tasks"]
    task_s, range_s = solve(
        (few["tasks"], few["ranges"], few["cpu_s"]), (many["tasks"], many["ranges"], many["cpu_s"])
    )  # fmt: skip
    way = results["way"].get("ray") or next(iter(results["way"].values()))
    small, large = way["1"], way["64"]
    way_range_s = max(0.0, (large["cpu_s"] - small["cpu_s"]) / 63)
    return {
        "head_task_s": max(0.0, task_s) + max(0.0, small["cpu_s"] - way_range_s),
        "head_range_s": max(0.0, range_s) + way_range_s,
        "range_bytes": (large["bytes"] - small["bytes"]) / 63 - 8 * 512,
        "gate_rate": results["head"]["gate_rate"],
        "entry_s": results["head"]["entry_s"],
    }


def solve(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float]:
    """x and y of a x + b y = c, twice."""
    (a, b, c), (d, e, f) = one, other
    scale = a * e - b * d
    return (c * e - b * f) / scale, (a * f - c * d) / scale


def tables_of(results: Json) -> list[str]:
    """For people."""
    cores = results["machine"]["cores"]
    rows = []
    for name, found in results["whole"].items():
        kind, _, workers = name.rpartition(" ")
        base = results["whole"].get(f"{kind} 1", found)["samples_per_s"]["median"]
        used = min(cores, int(workers)) if workers.isdigit() else 1
        share = found["samples_per_s"]["median"] / (base * used)
        rows.append([name, ranged(found["samples_per_s"]), str(used), f"{share:.1%}", ranged(found["seconds"])])
    header = ["workers", "samples/s", "cores", "of those cores", "seconds"]
    found = [table("Whole runs", header, rows)]
    rows = [
        [f"{pool}, {count} ranges", micro(said["cpu_s"]), micro(said["trip_s"]["median"]), number(said["bytes"])]
        for pool, counts in results["way"].items()
        for count, said in counts.items()
    ]
    found.append(
        table("The way to a worker: a task", ["task", "CPU of the head, µs", "there and back, µs", "bytes"], rows)
    )
    few, many = results["head"]["large tasks"], results["head"]["small tasks"]
    rows = [
        [name, str(one["tasks"]), str(one["ranges"]), micro(one["cpu_s"] / one["ranges"])]
        for name, one in (("4 workers", few), ("1024 workers", many))
    ]
    found.append(table("The head alone", ["workers on paper", "tasks", "ranges", "CPU for a range, µs"], rows))
    costs = results["costs"]
    rows = [
        ["a task", f"{micro(costs['head_task_s'])} µs of the head"],
        ["a range", f"{micro(costs['head_range_s'])} µs of the head"],
        ["a range, through the head", f"{number(costs['range_bytes'])} bytes and 8 for each sample"],
        ["gates", f"{number(costs['gate_rate'])} attempts/s of one core"],
        ["a shard in the manifest", f"{micro(costs['entry_s'])} µs, each time it is written again"],
    ]
    found.append(table("Costs for the model", ["of", "cost"], rows))
    return found


def micro(seconds: float) -> str:
    """In µs."""
    return number(seconds * 1e6)


if __name__ == "__main__":
    main()
