"""How close does training run to the static-batch ceiling, and how does it compare with a DataLoader?

One process trains the locator (the hybrid, as `brim rf train` does) and measures, in rounds that take every way once:
1. `engine.train` with the data in VRAM, in RAM, and in a window of a quarter, against the same step on a fixed batch;
2. an eager loop on a DataLoader over host tensors: tuned, and in the strongest ways there are;
3. an eager loop on a dataset cached on the device that hands out one item at a time;
then loading from shards with a warm page cache, and one bulk read of a SQL table against one query per batch.

A sample is one transmitter heard by up to ten receivers, 3.5 kB once the solver has run. On a CPU few are made, and
repeated: speed does not depend on what is in them.
"""

import argparse
import json
import math
import os
import random
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data import Dataset as TorchDataset

from brim.engine.config import Tier, TrainConfig
from brim.engine.device import format_size, resolve_device, worker_count
from brim.engine.rows import DatasetSource, Resident, SqlSource
from brim.engine.storage import Dataset, ShardWriter
from brim.engine.training import resolve_precision, train
from brim.rf import generate, preset
from brim.rf.location.model import Locator, LocatorConfig, flip, loss, prepare
from page import Json, facts_of, installed, machine, markdown, number, ranged, spread, table, tell

BATCH, LARGE_BATCH = 256, 2048
WINDOW_SHARE = 0.25
WORKERS, PREFETCH = 8, 6  # of the tuned DataLoader
LEARNING_RATE = 1e-4  # low: no run may diverge, however many epochs it takes to fill the seconds
ONE_BY_ONE_S = 5.0  # of the slowest way, which is run once
WARM_BATCHES = {"cuda": 20, "cpu": 4}  # of a DataLoader; its workers start, and libraries set themselves up
PER_SHARD = 8192
SQL_COLUMNS = 32
SQL_BATCHES = 40  # of one query each
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# The bars: what is measured, at least how much, and how it is written.
BARS: dict[str, dict[str, tuple[float, str]]] = {
    "cuda": {
        f"vram {BATCH}": (0.97, "share"),
        f"vram {LARGE_BATCH}": (0.99, "share"),
        f"ram {BATCH}": (0.95, "share"),
        f"window {BATCH}": (0.80, "share"),
        "dataloader": (4.0, "times"),
        "one by one": (20.0, "times"),
        "load": (1e9, "rate"),
    },
    "cpu": {"dataloader": (1.0, "times")},
}

Batch = dict[str, Tensor]
Trial = Callable[[], Json]


def main() -> None:
    """Measure, print tables and one JSON line; what was measured is told even when a part fails."""
    options = parse_options()
    device = resolve_device(options.device)
    on_gpu = device.type == "cuda"
    samples = options.samples or (100_000 if on_gpu else 4_096)
    seconds = options.seconds or (3.0 if on_gpu else 1.5)
    limit_s = options.limit or (150.0 if on_gpu else 95.0)
    results: Json = {
        "question": "training against the static-batch ceiling and a DataLoader",
        "device_type": device.type,
        "machine": machine(device, options.commit) | {"threads": torch.get_num_threads()},
        "command": f"python benchmarks/bench_train.py --device {device} --samples {samples} "
        f"--repeats {options.repeats} --seconds {seconds:g}",
        "failed": {},
    }
    try:
        with tempfile.TemporaryDirectory(prefix="brim-bench-") as folder:
            bench = Bench(device, Path(folder), samples, seconds, options.repeats, limit_s)
            bench.measure(results)
    finally:
        line = json.dumps(results)
        print(render(results), line, sep="\n")
        if options.json_out:
            options.json_out.write_text(line + "\n", encoding="utf-8")
        if options.markdown:
            options.markdown.write_text(page(results, line), encoding="utf-8")
    sys.exit(1 if results["failed"] else 0)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--samples", type=int, default=0, help="in the dataset; 100000 on a GPU, 4096 on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each of all ways")
    parser.add_argument("--seconds", type=float, default=0.0, help="of a trial, at least; 3 on a GPU, 1.5 on a CPU")
    parser.add_argument(
        "--limit", type=float, default=0.0, help="seconds in which all rounds end; 150 on a GPU, 95 on a CPU"
    )
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--json-out", type=Path, help="file for the JSON line")
    parser.add_argument("--markdown", type=Path, help="file for the page of results")
    options = parser.parse_args()
    if options.samples < 0 or options.repeats < 1 or min(options.seconds, options.limit) < 0:
        parser.error("--samples, --repeats, --seconds and --limit must be positive")
    return options


@dataclass
class Bench:
    """The data, and one trial of every way to train on it."""

    device: torch.device
    folder: Path
    samples: int
    seconds: float
    repeats: int
    limit_s: float
    began_s: float = field(default_factory=time.perf_counter)
    epochs: dict[str, int] = field(default_factory=dict)  # way → epochs that fill the seconds
    rows: Batch = field(default_factory=dict)  # on the host
    weights: dict[str, Tensor] = field(default_factory=dict)  # every trial begins with them

    def measure(self, results: Json) -> None:
        """Fill in the results part by part; one that fails is named and the others go on."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        results["data"] = self.make_data()
        results["seconds"] = self.seconds
        results["precision"] = resolve_precision("auto", self.device)
        ways = self.ways()
        trials: dict[str, list[Json]] = {name: [] for name in ways}
        results["ways"] = {}
        for turn in range(self.repeats):
            turn_s = time.perf_counter()
            for name, trial in list(ways.items()):
                tell(f"{name}, round {turn + 1} of {self.repeats}")
                try:
                    trials[name].append(trial())
                except Exception as failure:  # broad on purpose: the other ways have their say
                    results["failed"][name] = f"{type(failure).__name__}: {failure}"
                    tell(f"{name} failed: {results['failed'][name]}")
                    del ways[name]
            results["ways"] = summaries(trials)
            now_s = time.perf_counter()
            if now_s - self.began_s + now_s - turn_s > self.limit_s:
                break
        parts = {"one by one": self.one_by_one, "load": self.load, "sql": self.sql}
        for name, part in parts.items():
            tell(name)
            try:
                results[name] = part()
            except Exception as failure:  # broad on purpose, as above
                results["failed"][name] = f"{type(failure).__name__}: {failure}"
        judge(results)
        results["load_average_end"] = os.getloadavg()[0]
        results["wall_s"] = time.perf_counter() - self.began_s

    # The data

    def make_data(self) -> Json:
        """Generate, run the solver, write what a locator reads as shards of its own."""
        on_gpu = self.device.type == "cuda"
        config = preset("production") if on_gpu else replace(preset("production"), duration_s=0.2)
        made = self.samples if on_gpu else min(150, self.samples)
        tell(f"generating {made} samples")
        began_s = time.perf_counter()
        generate(config, self.folder / "generated", made, device=self.device)
        generate_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        names = ("features", "present", "receivers", "reference", "transmitter")
        found = {
            name: tensor.to(self.device) for name, tensor in Dataset(self.folder / "generated").load(names).items()
        }
        prepared = prepare(found, config)
        prepared |= {name: found[name] for name in ("features", "present")}
        every = torch.arange(self.samples) % made
        self.rows = {name: tensor.cpu()[every] for name, tensor in prepared.items()}
        prepare_s = time.perf_counter() - began_s
        with ShardWriter(self.folder / "prepared", {"kind": "rf"}, items_per_shard=PER_SHARD) as writer:
            writer.append(self.rows, {"index": torch.arange(1, self.samples + 1)})
            writer.finish()
        torch.manual_seed(0)
        model = Locator(LocatorConfig())
        model.set_statistics(self.rows["features"][:20_000], self.rows["present"][:20_000])
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        num_bytes = sum(tensor.nbytes for tensor in self.rows.values())
        return {
            "samples": self.samples,
            "different": made,
            "bytes": num_bytes,
            "bytes_per_sample": num_bytes / self.samples,
            "parameters": sum(p.numel() for p in model.parameters()),
            "generate_s": generate_s,
            "prepare_s": prepare_s,
        }

    def model(self) -> Locator:
        """A locator on the device, always the same."""
        model = Locator(LocatorConfig())
        model.load_state_dict(self.weights)
        return model.to(self.device)

    # The ways

    def ways(self) -> dict[str, Trial]:
        """Every way that is run in all rounds, by name; the tier `auto` takes comes right before the DataLoaders."""
        workers = min(WORKERS, worker_count())
        loaders = {
            "no workers, whole batches": lambda: self.batches_loader(0),
            f"{workers} workers, whole batches": lambda: self.batches_loader(workers),
            f"{workers} workers, item by item": lambda: self.items_loader(workers),
        }
        ways: dict[str, Trial] = {f"vram {LARGE_BATCH}": lambda: self.tier_trial("vram", LARGE_BATCH)}
        for tier in ("window", "ram", "vram") if self.device.type == "cuda" else ("window", "vram", "ram"):
            ways[f"{tier} {BATCH}"] = lambda tier=tier: self.tier_trial(tier, BATCH)  # type: ignore[misc]
        for name, make in loaders.items():
            ways[f"dataloader, {name}"] = lambda make=make: self.loader_trial(make(), self.seconds)  # type: ignore[misc]
        return ways

    def tier_trial(self, tier: Tier, batch: int) -> Json:
        """One run of the trainer on one tier, of at least the wanted seconds; the first is preceded by a warm-up."""
        shuffle: Literal["blocks", True] = "blocks" if tier == "window" else True
        source = DatasetSource(self.folder / "prepared")
        with Resident(
            source,
            batch_size=batch,
            device=self.device,
            tier=tier,
            shuffle=shuffle,
            window_share=WINDOW_SHARE,
        ) as resident:
            about = resident.describe()
            name = f"{tier} {batch}"
            if name not in self.epochs:
                first = self.run_trainer(resident, 3 if self.device.type == "cuda" else 1)
                self.epochs[name] = self.epochs_for(first["samples_per_s"])
            found = self.run_trainer(resident, self.epochs[name])
        self.epochs[name] = max(self.epochs[name], self.epochs_for(found["samples_per_s"]))
        return found | {"held_share": int(str(about["held_items"])) / self.samples, "pinned": about["pinned"]}

    def epochs_for(self, rate: float) -> int:
        """Epochs that take the wanted seconds, and a little more."""
        return max(1, math.ceil(1.1 * self.seconds * rate / self.samples))

    def run_trainer(self, resident: Resident, epochs: int) -> Json:
        """The report of one run; the recipe is the default one, logging included."""
        config = TrainConfig(epochs=epochs, learning_rate=LEARNING_RATE)
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            report = train(
                self.model(), loss, resident, config=config, out=out, transform=flip, device=self.device, resume=False
            )
        trained_s = report.epochs * report.epoch_seconds
        share = report.ceiling_share
        return {
            "samples_per_s": report.samples_per_s,
            "seconds": trained_s,
            "epochs": report.epochs,
            "steps": report.steps,
            "ceiling_share": share,
            "ceiling_samples_per_s": report.samples_per_s / share if share else None,
            "busy_share": report.busy_share,
            "waiting": {cause: lost_s / trained_s for cause, lost_s in report.waiting.items()},  # shares of the time
            "peak_bytes": report.peak_bytes,
            "joules_per_sample": report.joules_per_sample,
            "step_kind": report.step_kind,
            "diagnosis": list(report.diagnosis),
        }

    def items_loader(self, workers: int) -> "DataLoader[Batch]":
        """The usual DataLoader, tuned: items are indexed one by one and collated by workers."""
        return DataLoader(Items(self.rows), BATCH, shuffle=True, num_workers=workers, **self.loader_options(workers))

    def batches_loader(self, workers: int) -> "DataLoader[Batch]":
        """A DataLoader that indexes a whole batch at once."""
        items = Items(self.rows)
        sampler = BatchSampler(RandomSampler(items), BATCH, drop_last=False)
        return DataLoader(
            items, batch_size=None, sampler=sampler, num_workers=workers, **self.loader_options(workers)
        )  # fmt: skip

    def loader_options(self, workers: int) -> dict[str, Any]:
        """What makes a DataLoader fast, as far as shared memory allows."""
        options: dict[str, Any] = {"pin_memory": self.device.type == "cuda"}
        if workers:
            batch_bytes = BATCH * sum(tensor.nbytes for tensor in self.rows.values()) // self.samples
            fit = int(0.9 * shared_bytes() / batch_bytes / workers) - 1  # one more is in the making
            prefetch = max(1, min(PREFETCH, fit))
            if prefetch < PREFETCH:
                tell(f"shared memory holds {prefetch} batches per worker, not {PREFETCH}")
            options |= {"prefetch_factor": prefetch, "persistent_workers": True, "timeout": 60}
        return options

    def loader_trial(self, loader: "DataLoader[Batch]", seconds: float) -> Json:
        """Train eagerly from a DataLoader; the same model, loss, optimiser and precision, nothing read back."""
        step = EagerStep(self.model(), self.device)
        batches = endless(loader)
        num_samples, num_steps = 0, 0
        with closing(batches):
            for _ in range(WARM_BATCHES[self.device.type]):
                step(next(batches))
            self.wait()
            began_s = time.perf_counter()
            while time.perf_counter() - began_s < seconds:
                batch = next(batches)
                step(batch)
                num_samples += len(batch["target"])
                num_steps += 1
            self.wait()
            taken_s = time.perf_counter() - began_s
        if not math.isfinite(float(step.total)):
            raise ArithmeticError("the loss is not finite")
        return {"samples_per_s": num_samples / taken_s, "seconds": taken_s, "steps": num_steps}

    def one_by_one(self) -> Json:
        """The dataset cached on the device, an item at a time, collated by default, eager."""
        cached = {name: tensor.to(self.device) for name, tensor in self.rows.items()}
        loader = DataLoader(Items(cached), BATCH, shuffle=True)
        return self.loader_trial(loader, min(ONE_BY_ONE_S, 2 * self.seconds))

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # Loading, and SQL

    def load(self) -> Json:
        """Bytes per second from shards to the device, all fields, the page cache warm."""
        found = {}
        for name in ("generated", "prepared"):
            source = DatasetSource(self.folder / name)
            if source.num_items < self.samples:
                continue  # few were made, and repeated
            rates = []
            for _ in range(self.repeats + 1):
                self.wait()
                began_s = time.perf_counter()
                with Resident(source, batch_size=BATCH, device=self.device, tier="vram") as resident:
                    self.wait()
                    rates.append(resident.bytes / (time.perf_counter() - began_s))
            found[name] = {"samples": source.num_items, "bytes": resident.bytes, "bytes_per_s": spread(rates[1:])}
        return found

    def sql(self) -> Json:
        """One epoch of shuffled batches from SQLite: one bulk read and batches from memory, or one query per batch."""
        try:
            import adbc_driver_sqlite.dbapi as driver
            import pyarrow  # noqa: F401
        except ImportError as failure:
            return {"skipped": f"{failure.name} does not import: pip install 'brim[sql]'"}
        file, columns = self.folder / "samples.db", [f"c{k}" for k in range(SQL_COLUMNS)]
        self.write_sqlite(file, columns)
        SqlSource(f"sqlite:///{file}", "SELECT c0 FROM samples LIMIT 1")  # the driver loads its library
        began_s = time.perf_counter()
        source = SqlSource(f"sqlite:///{file}", f"SELECT {', '.join(columns)} FROM samples")
        read_s = time.perf_counter() - began_s
        with Resident(source, batch_size=BATCH, device=self.device, tier="vram") as resident:
            num = sum(len(batch["c0"]) for batch in resident.epoch(0))
            self.wait()
            bulk_s, later_s = time.perf_counter() - began_s, time.perf_counter()
            num_later = sum(len(batch["c0"]) for batch in resident.epoch(1))
            self.wait()
            later_s = time.perf_counter() - later_s
        order = random.Random(0).sample(range(self.samples), self.samples)
        batches = [order[at : at + BATCH] for at in range(0, self.samples, BATCH)][:SQL_BATCHES]
        with driver.connect(str(file)) as connection, connection.cursor() as cursor:
            began_s = time.perf_counter()
            for ids in batches:
                cursor.execute(f"SELECT {', '.join(columns)} FROM samples WHERE id IN ({','.join(map(str, ids))})")
                rows = cursor.fetch_arrow_table()
                {name: torch.from_numpy(rows[name].to_numpy().copy()).to(self.device) for name in columns}
            self.wait()
            queries_s = time.perf_counter() - began_s
        rates = num / bulk_s, sum(map(len, batches)) / queries_s
        return {
            "rows": num,
            "columns": SQL_COLUMNS,
            "bulk_read_s": read_s,
            "bulk_rows_per_s": rates[0],
            "later_rows_per_s": num_later / later_s,
            "query_rows_per_s": rates[1],
            "ratio": rates[0] / rates[1],
        }

    def write_sqlite(self, file: Path, columns: list[str]) -> None:
        """A table of numbers, one row per sample."""
        values = self.rows["features"].flatten(1)[:, :SQL_COLUMNS].nan_to_num().tolist()
        with closing(sqlite3.connect(file)) as database:
            kinds = ", ".join(f"{name} REAL" for name in columns)
            database.execute(f"CREATE TABLE samples (id INTEGER PRIMARY KEY, {kinds})")
            marks = ", ".join("?" * (len(columns) + 1))
            rows = ((number, *row) for number, row in enumerate(values))
            database.executemany(f"INSERT INTO samples VALUES ({marks})", rows)
            database.commit()


class Items(TorchDataset[Batch]):
    """Tensors as a map-style dataset; an item, or the rows of a list of numbers at once."""

    def __init__(self, rows: Batch) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows["target"])

    def __getitem__(self, index: int | list[int]) -> Batch:
        return {name: tensor[index] for name, tensor in self.rows.items()}


class EagerStep:
    """The step as one writes it by hand, with what makes it fast: a fused optimiser, no gradients kept, no sync."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model.train(), device
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01, fused=True)
        self.dtype = DTYPES[resolve_precision("auto", device)]
        self.rng = torch.Generator(device).manual_seed(0)
        self.total = torch.zeros((), device=device)

    def __call__(self, batch: Batch) -> None:
        """Train on a batch of the host or the device."""
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            found = loss(self.model, flip(batch, self.rng))
        found.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.total += found.detach()


def endless(loader: "DataLoader[Batch]") -> Generator[Batch]:
    """Epoch after epoch; the workers end with the iterator."""
    while True:
        yield from loader


def shared_bytes() -> int:
    """Free bytes of the shared memory through which workers hand over batches."""
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        return found.f_bavail * found.f_frsize
    return 2**62


# Judging


def summaries(trials: dict[str, list[Json]]) -> dict[str, Json]:
    """Medians and spread over the rounds; tiers are set against the ceiling of VRAM in the same round."""
    ceilings = {
        batch: [trial["ceiling_samples_per_s"] for trial in trials[f"vram {batch}"]] for batch in (BATCH, LARGE_BATCH)
    }
    out: dict[str, Json] = {}
    for name, runs in trials.items():
        if not runs:
            continue
        rates = [run["samples_per_s"] for run in runs]
        found = runs[-1] | {"runs": len(runs), "rates": rates, "samples_per_s": spread(rates)}
        if "ceiling_share" in found:
            ceiling = ceilings[int(name.split()[1])]
            shares = [run["samples_per_s"] / top for run, top in zip(runs, ceiling, strict=False) if top]
            found["own_ceiling_share"] = found.pop("ceiling_share")
            found["ceiling_share"] = spread(shares) if shares else None
            found["ceiling_samples_per_s"] = statistics.median(ceiling) if all(ceiling) and ceiling else None
            found["busy_share"] = statistics.median(run["busy_share"] for run in runs)
            found["peak_bytes"] = max(run["peak_bytes"] for run in runs)
        out[name] = found
    return out


def judge(results: Json) -> None:
    """Ratios to the other ways, and every figure that has a bar against it."""
    ways, kind = results["ways"], results["device_type"]
    results["reference"] = reference = f"{'vram' if kind == 'cuda' else 'ram'} {BATCH}"  # what tier=auto takes
    figures: dict[str, float] = {}
    for name, way in ways.items():
        if way.get("ceiling_share"):
            figures[name] = way["ceiling_share"]["median"]
    ratios: dict[str, float] = {}
    if reference in ways:
        mine, rate = ways[reference]["rates"], ways[reference]["samples_per_s"]["median"]
        for name, way in ways.items():
            if name.startswith("dataloader"):  # round by round: what else the machine does changes slowly
                way["ratio"] = spread([own / other for own, other in zip(mine, way["rates"], strict=False)])
                ratios[name] = way["ratio"]["median"]
        if ratios:
            results["best_dataloader"] = min(ratios, key=lambda name: ratios[name])
            figures["dataloader"] = min(ratios.values())
        if "one by one" in results:
            figures["one by one"] = rate / results["one by one"]["samples_per_s"]
    if results.get("load"):
        figures["load"] = min(found["bytes_per_s"]["median"] for found in results["load"].values())
    results["bars"] = {
        name: {"bar": bar, "unit": unit, "found": figures.get(name), "met": figures.get(name, 0.0) >= bar}
        for name, (bar, unit) in BARS[kind].items()
    }


# Telling


def render(results: Json) -> str:
    """All tables there is something for."""
    parts: dict[str, Callable[[Json], str]] = {
        "bars": bars_table,
        "ways": tiers_table,
        "reference": others_table,
        "load": load_table,
        "sql": sql_table,
    }
    told = [tell_part(results) for name, tell_part in parts.items() if results.get(name)]
    if results["failed"]:
        told.append(table("Failed", ["what", "why"], [[name, why] for name, why in results["failed"].items()]))
    return "\n".join(told)


def bars_table(results: Json) -> str:
    """Figures beside their bars."""
    told = {
        f"vram {BATCH}": f"VRAM tier, batch {BATCH}: share of the ceiling",
        f"vram {LARGE_BATCH}": f"VRAM tier, batch {LARGE_BATCH}: share of the ceiling",
        f"ram {BATCH}": f"RAM tier, batch {BATCH}: share of the same ceiling",
        f"window {BATCH}": f"window tier, a quarter resident, batch {BATCH}: share of the same ceiling",
        "dataloader": f"{results['reference']} against the best DataLoader",
        "one by one": f"{results['reference']} against one cached item at a time",
        "load": "loading shards, page cache warm",
    }
    rows = []
    for name, bar in results["bars"].items():
        found = "not measured" if bar["found"] is None else amount(bar["found"], bar["unit"])
        rows.append([told[name], found, f"≥ {amount(bar['bar'], bar['unit'])}", "met" if bar["met"] else "NOT MET"])
    return table("Bars", ["figure", "found", "bar", ""], rows)


def amount(value: float, unit: str) -> str:
    """A value in its unit."""
    return {"share": f"{value:.1%}", "times": f"{value:.2f} ×", "rate": f"{value / 1e9:.2f} GB/s"}[unit]


def tiers_table(results: Json) -> str:
    """The trainer on every tier."""
    rows = []
    for name, way in results["ways"].items():
        if "own_ceiling_share" not in way:
            continue
        share, joules = way["ceiling_share"], way["joules_per_sample"]
        waiting = ", ".join(f"{cause} {part:.1%}" for cause, part in way["waiting"].items() if part >= 5e-4)
        rows.append(
            [
                name,
                ranged(way["samples_per_s"]),
                "-" if share is None else f"{share['median']:.1%} ({share['min']:.1%}–{share['max']:.1%})",
                number(way["ceiling_samples_per_s"]) if way["ceiling_samples_per_s"] else "-",
                f"{way['busy_share']:.1%}",
                waiting or "-",
                f"{way['held_share']:.0%}",
                format_size(way["peak_bytes"]),
                "-" if joules is None else f"{joules:.3g}",
                way["step_kind"],
                f"{way['seconds']:.1f}",
            ]
        )
    header = ["tier, batch", "samples/s", "of ceiling", "ceiling samples/s", "busy", "waiting", "resident", "peak"]
    title = f"Tiers, {results['precision']}: median (least–most) of {rounds(results)} rounds"
    return table(title, [*header, "J/sample", "step", "seconds"], rows)


def rounds(results: Json) -> int:
    """Rounds that were run."""
    return max((way["runs"] for way in results["ways"].values()), default=0)


def others_table(results: Json) -> str:
    """Other ways to train the same model, and how many times as fast the trainer is."""
    ways, reference = results["ways"], results["reference"]
    rows = []
    if reference in ways:
        rows.append([f"engine.train, {reference}", ranged(ways[reference]["samples_per_s"]), "1"])
    for name, way in ways.items():
        if name.startswith("dataloader"):
            best = " (best)" if name == results.get("best_dataloader") else ""
            ratio = ranged(way["ratio"]) if "ratio" in way else "-"
            rows.append([f"eager, {name}{best}", ranged(way["samples_per_s"]), ratio])
    if "one by one" in results:
        bar = results["bars"].get("one by one", {}).get("found")
        rate = results["one by one"]["samples_per_s"]
        if bar is None and reference in ways:
            bar = ways[reference]["samples_per_s"]["median"] / rate
        rows.append(["eager, cached on the device, one item at a time", number(rate), f"{bar:.2f}" if bar else "-"])
    title = f"Ways to train at batch {BATCH}, {results['precision']}"
    return table(title, ["way", "samples/s", "brim is × as fast"], rows)


def load_table(results: Json) -> str:
    """Loading from shards."""
    rows = []
    for name, found in results["load"].items():
        speed = found["bytes_per_s"]
        low, middle, high = (f"{speed[key] / 1e9:.2f}" for key in ("min", "median", "max"))
        rows.append([name, number(found["samples"]), format_size(found["bytes"]), f"{middle} ({low}–{high})"])
    return table("Loading shards, page cache warm", ["dataset", "samples", "bytes", "GB/s"], rows)


def sql_table(results: Json) -> str:
    """SQLite in bulk and by batches."""
    found = results["sql"]
    if "skipped" in found:
        return table("SQL", ["way", "rows/s"], [["skipped", found["skipped"]]])
    rate = found["query_rows_per_s"]
    rows = [
        ["one bulk read and the first epoch", number(found["bulk_rows_per_s"]), f"{found['ratio']:.1f}"],
        ["every epoch after it", number(found["later_rows_per_s"]), f"{found['later_rows_per_s'] / rate:.1f}"],
        ["one query per batch, every epoch", number(rate), "1"],
    ]
    title = f"SQLite, {found['rows']} rows of {found['columns']} columns, shuffled batches of {BATCH}"
    return table(title, ["way", "rows/s", "× as fast"], rows)


def page(results: Json, line: str) -> str:
    """The results as a page of Markdown."""
    facts, data = facts_of(results, {"adbc-driver-sqlite": installed("adbc-driver-sqlite")}), results.get("data")
    if data:
        repeated = "" if data["different"] == data["samples"] else f" ({data['different']} different ones, repeated)"
        facts.append(
            f"- data: {data['samples']} samples{repeated} of {data['bytes_per_sample']:.0f} bytes, "
            f"{format_size(data['bytes'])}; model: the hybrid locator, {data['parameters']} parameters"
        )
    about = (
        "The ceiling is the same step, over and over on one fixed batch. All ways run the same model, loss, optimiser, "
        "clipping and precision; the tiers are fed from shards, the DataLoaders from tensors in host memory."
    )
    return markdown(__doc__ or "", about, facts, render(results), line)


if __name__ == "__main__":
    main()
