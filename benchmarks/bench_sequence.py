"""How many sequences a second does training take, and how does it compare with a DataLoader over .npy files?

One process makes sequences of log-normal length, packed and as single files, and measures:
1. `engine.train` with the corpus in VRAM at several batch sizes and budgets of padded frames, against the same steps on
   batches that are on the device already, one for each shape, for as many seconds;
2. the best DataLoader (8 workers, pinned, prefetch 6, whole batches read into place) over .npy files and a
   `pack_padded_sequence` loop, same network, same precision, at several batch sizes;
3. ways to run the reverse direction, precisions, and tiers, at the best of 1;
4. packing float32 files on two cores from a warm page cache.

Training is supervised and without augmentation. A rate is the median over epochs, after the first two; every epoch has
the same items.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from brim.engine.config import BucketConfig, Precision, TrainConfig
from brim.engine.device import format_size, resolve_device, worker_count
from brim.engine.rows import RaggedResident, RaggedView
from brim.engine.storage import ShardWriter
from brim.engine.training import Stepper, resolve_precision, train
from brim.sequences.ablation.loop import FedBatch, HandStep, LoopSetup, make_module
from brim.sequences.batches.dataloader import SequenceLoader
from brim.sequences.config import LoaderConfig, SequenceConfig
from brim.sequences.corpus.folder import SequenceFolder
from brim.sequences.corpus.packed import FRAMES, KIND, Corpus, write_items
from brim.sequences.model.network import Classifier, Encoder
from brim.sequences.training import classification_loss, cudnn_autotune
from page import Json, facts_of, machine, markdown, number, ranged, spread, table, tell

PARTS = ("sizes", "loader", "reverse", "precision", "tiers", "packing")
CLASSES = 10
SPREAD = 0.5  # standard deviation of the logarithm of the length
WORKERS, PREFETCH = 8, 6
SMALL = 64  # the batch both sides are compared at
IN_FLIGHT_BYTES = 16 << 30  # of batches a DataLoader makes ahead: at batch 1024 one has a gigabyte
SHARD_BYTES = 64 << 20
LEARNING_RATE = 1e-4  # low: no run may diverge, however many epochs it takes to fill the seconds
SKIPPED_EPOCHS = 2  # of each run: shapes are seen, then captured
BARS = {"samples_per_s": 15_000.0, "ceiling_share": 0.95, "small_ratio": 2.0, "best_ratio": 4.0, "packing": 300e6}

PACK = """
import json, os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from brim.sequences.corpus.packing import pack
report = pack(sys.argv[1], sys.argv[2])
print(json.dumps({"bytes": report.source_bytes, "seconds": report.seconds, "bytes_per_s": report.bytes_per_s}))
"""


def main() -> None:
    """Measure, print tables and one JSON line; what was measured is told even when a later part fails."""
    options = parse_options()
    device = resolve_device(options.device)
    results: Json = {
        "question": "sequences per second of training",
        "machine": machine(device, options.commit),
        "command": "python benchmarks/bench_sequence.py " + " ".join(options.shown),
        "failed": {},
    }
    try:
        with tempfile.TemporaryDirectory(prefix="brim-bench-") as folder:
            Bench(device, options, Path(folder), results).measure()
    finally:
        line = json.dumps(results)
        print(render(results), line, sep="\n")
        if options.markdown:
            options.markdown.write_text(page(results, line), encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--mean-length", type=float, default=250)
    parser.add_argument("--max-length", type=int, default=500)
    parser.add_argument("--batches", default="64,256,1024", help="batch sizes, of both sides")
    parser.add_argument("--budgets", default="65536,262144,524288", help="padded frames of a batch")
    parser.add_argument("--files", type=int, default=2000, help="sequences that are written as .npy too, and repeated")
    parser.add_argument("--seconds", type=float, default=3, help="of each run")
    parser.add_argument("--limit", type=float, default=320, help="seconds after which no further run begins")
    parser.add_argument("--channels", type=int, default=384, help="of the network; less for a quick look on a CPU")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--commit", default="")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    options.batches, options.budgets = (
        [int(n) for n in text.split(",") if n] for text in (options.batches, options.budgets)
    )
    options.only = options.only.split(",")
    options.shown = [text for text in sys.argv[1:] if "/" not in text and text != "--markdown"]
    return options


@dataclass
class Bench:
    """What the parts share."""

    device: torch.device
    options: argparse.Namespace
    folder: Path
    results: Json
    began_s: float = field(default_factory=time.perf_counter)

    def measure(self) -> None:
        """Run the parts asked for, the most telling first."""
        self.results["data"] = self.make_data()
        self.precision: Literal["fp32", "bf16", "fp16"] = resolve_precision("auto", self.device)
        self.results["precision"] = self.precision
        parts: dict[str, Callable[[], None]] = {
            "sizes": self.sizes,
            "loader": self.loaders,
            "reverse": self.reverses,
            "precision": self.precisions,
            "tiers": self.tiers,
            "packing": self.packing,
        }
        for name in self.options.only:
            self.trial(name, parts[name])
        judge(self.results, self.device)
        self.results["wall_s"] = time.perf_counter() - self.began_s

    def trial(self, name: str, work: Callable[[], Any]) -> Any:
        """What a run found, or None where it failed or there is no time left; the others have their say."""
        if time.perf_counter() - self.began_s > self.options.limit:
            self.results["failed"][name] = "no time left"
            return None
        tell(f"{time.perf_counter() - self.began_s:5.0f} s  {name}")
        try:
            return work()
        except Exception as failure:  # broad on purpose, as above
            self.results["failed"][name] = f"{type(failure).__name__}: {failure}".splitlines()[0]
            tell(f"{name} failed: {self.results['failed'][name]}")
            return None
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    # Data

    def make_data(self) -> Json:
        """A packed corpus in float16, and some of its sequences as .npy files of the same numbers."""
        options, began_s = self.options, time.perf_counter()
        lengths = log_normal(options.sequences, options.mean_length, options.max_length)
        tell(f"making {int(lengths.sum())} frames")
        write_corpus(self.folder / "corpus", lengths, options.dim, self.device)
        self.corpus = Corpus.open(self.folder / "corpus")
        made_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        files = self.folder / "files"
        files.mkdir()
        self.num_files = min(options.files, options.sequences)
        for row in range(self.num_files):
            np.save(files / f"{row:06d}.npy", self.corpus.sequence(row).numpy())
        self.config = SequenceConfig(dim=options.dim, channels=options.channels)
        return {
            "sequences": options.sequences,
            "frames": int(lengths.sum()),
            "dim": options.dim,
            "mean_length": float(lengths.double().mean()),
            "max_length": int(lengths.max()),
            "bytes": self.corpus.num_frames * options.dim * 2,
            "make_s": made_s,
            "files": self.num_files,
            "files_s": time.perf_counter() - began_s,
            "parameters": sum(p.numel() for p in Classifier(Encoder(self.config), CLASSES).parameters()),
        }

    @contextmanager
    def resident(self, tier: Literal["vram", "ram", "window"] = "vram") -> Iterator[RaggedResident]:
        """The corpus in a tier; batches come from its views."""
        buckets = BucketConfig(batch_size=SMALL)
        with RaggedResident(self.corpus, buckets=buckets, device=self.device, tier=tier) as resident:
            yield resident

    # Runs

    def run(self, view: RaggedView, *, precision: Precision = "auto", **model: Any) -> Json:
        """Train for the wanted seconds; a window of the log is one epoch, so that all have the same items."""
        config = TrainConfig(
            epochs=10_000, learning_rate=LEARNING_RATE, precision=precision, log_every=view.num_batches,
            checkpoint_every_s=None, tensorboard=False, measure_ceiling=False,
        )  # fmt: skip
        stop = after_epochs(view.num_batches, self.options.seconds)
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            report = train(
                self.module(**model), classification_loss, view,
                config=config, out=out, device=self.device, resume=False, stop=stop,
            )  # fmt: skip
            lines = (Path(out) / "train" / "metrics.jsonl").read_text().splitlines()
        rates = [line["samples_per_s"] for line in map(json.loads, lines)][SKIPPED_EPOCHS:]
        return {
            "samples_per_s": spread(rates),
            "whole_run_samples_per_s": report.samples_per_s,  # with the steps before shapes were captured
            "epochs": len(rates),
            "batches": view.num_batches,
            "shapes": len(view.buckets.shapes),
            "padding_share": view.padding_share,
            "waiting": dict(report.waiting),
            "peak_bytes": report.peak_bytes,
            "joules_per_sample": report.joules_per_sample,
            "step_kind": report.step_kind,
            "tier": report.tier,
        }

    def module(self, **model: Any) -> Classifier:
        """The classifier on the device, always with the same weights."""
        torch.manual_seed(0)
        config = SequenceConfig(**self.config.as_dict() | model)
        return Classifier(Encoder(config), CLASSES).to(self.device).train()

    def ceiling(self, view: RaggedView) -> float:
        """Items/s of the steps of whole epochs when each finds its batch where it is.

        They last as long as a run that is fed: a device at its power limit does not keep up what a short burst reaches.
        """
        config = TrainConfig(learning_rate=LEARNING_RATE, max_graphs=max(32, len(view.buckets.shapes)))
        stepper = Stepper(self.module(), classification_loss, config=config, device=self.device)
        inputs: dict[tuple[int, int], dict[str, Tensor]] = {}
        for batch in view.epoch(0):
            shape = (batch["frames"].shape[0], batch["frames"].shape[1])
            if shape not in inputs:
                inputs[shape] = self.static(stepper, batch)
        order = [(len(batch.items), batch.length) for batch in view.buckets.epoch(1)]
        rates: list[float] = []
        ends_s = time.perf_counter() + self.options.seconds
        while len(rates) < 1 + SKIPPED_EPOCHS or time.perf_counter() < ends_s:
            began_s = time.perf_counter()
            for shape in order:
                stepper.step(inputs[shape], 0, LEARNING_RATE)
            self.wait()
            rates.append(view.num_items / (time.perf_counter() - began_s))
        return spread(rates[SKIPPED_EPOCHS:])["median"]

    def static(self, stepper: Stepper, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a step on this batch reads without a copy: a captured one its own inputs."""
        for _ in range(2):  # a shape after the first one has to be seen before it is captured
            if stepper.needs_preparation(batch):
                stepper.prepare(batch)
            stepper.step(batch, 0, LEARNING_RATE)
        graphs = list(stepper._graphs.values())
        return graphs[-1].inputs if graphs else batch

    # Parts

    def sizes(self) -> None:
        """Batch sizes and budgets of frames with the corpus in VRAM, and the ceilings of the telling ones."""
        found: Json = self.results.setdefault("sizes", {})
        choices = {f"{n} sequences": BucketConfig(batch_size=n) for n in self.options.batches}
        choices |= {f"{number(n)} frames": BucketConfig(batch_size=None, max_frames=n) for n in self.options.budgets}
        with self.resident() as resident:
            self.results["load"] = {key: resident.describe()[key] for key in ("bytes", "load_s", "tier")}
            for name, buckets in choices.items():
                run = self.trial(name, lambda buckets=buckets: self.run(resident.view(buckets=buckets)))  # type: ignore[misc]
                if run is not None:
                    found[name] = run | {"batch_size": buckets.batch_size, "max_frames": buckets.max_frames}
            for name in {f"{SMALL} sequences": 1, best_of(found): 1}:
                if name in found:
                    view = resident.view(buckets=choices[name])
                    rate = self.trial(f"ceiling of {name}", lambda view=view: self.ceiling(view))  # type: ignore[misc]
                    if rate is not None:
                        share = found[name]["samples_per_s"]["median"] / rate
                        found[name] |= {"ceiling_samples_per_s": rate, "ceiling_share": share}

    def best_buckets(self) -> BucketConfig:
        """The fastest of the sizes measured."""
        found = self.results.get("sizes", {})
        if not found:
            return BucketConfig(batch_size=SMALL)
        best = found[best_of(found)]
        return BucketConfig(batch_size=best["batch_size"], max_frames=best["max_frames"])

    def loaders(self) -> None:
        """The DataLoader and pack_padded loop at every batch size; at the small one with the autotuner too."""
        found: Json = self.results.setdefault("loader", {})
        trials = [(n, False) for n in self.options.batches] + [(self.options.batches[0], True)]
        for batch, tuned in trials:
            name = f"{batch} sequences{', cuDNN autotuner' if tuned else ''}"
            run = self.trial(f"DataLoader, {name}", lambda batch=batch, tuned=tuned: self.loader_run(batch, tuned))  # type: ignore[misc]
            if run is not None:
                found[name] = run

    def loader_run(self, batch_size: int, tuned: bool) -> Json:
        """One run of the hand-written loop; workers read ahead while it is warmed up, and while it runs."""
        sequences = SequenceFolder(self.folder / "files")
        batch_bytes = batch_size * int(sequences.lengths.max()) * sequences.dim * sequences.dtype.itemsize
        workers = min(WORKERS, worker_count())
        prefetch = max(1, min(PREFETCH, IN_FLIGHT_BYTES // (workers * batch_bytes) - 1))
        config = LoaderConfig(batch_size=batch_size, num_workers=workers, prefetch_factor=prefetch)
        setup = LoopSetup(batch_size=batch_size, precision=self.precision, set_to_none=True, autotuner=tuned)
        step = HandStep(make_module(self.config, CLASSES, setup, self.device), setup, self.device, 0)
        fields = {"label": self.corpus.labels[: self.num_files]}
        rows = torch.arange(self.options.sequences) % self.num_files
        with (
            cudnn_autotune(tuned),
            SequenceLoader(sequences, config, device=self.device, rows=rows, fields=fields) as loader,
        ):
            num_workers, prefetch = loader.config.num_workers, loader.config.prefetch_factor
            rates = self.loop(loader, step)
        return {"samples_per_s": spread(rates), "num_workers": num_workers, "prefetch_factor": prefetch}

    def loop(self, loader: SequenceLoader, step: HandStep) -> list[float]:
        """Items/s of blocks of half a second and more, after a warm-up of the workers and of the device."""
        rates: list[float] = []
        with closing(endless(loader)) as batches:
            for _ in range(10 if self.device.type == "cuda" else 2):
                step(next(batches))
            self.wait()
            ends_s = time.perf_counter() + self.options.seconds
            while len(rates) < 2 or time.perf_counter() < ends_s:
                began_s, num = time.perf_counter(), 0
                while not num or time.perf_counter() - began_s < 0.5:
                    fed = next(batches)
                    step(fed)
                    num += len(fed.batch["length"])
                self.wait()
                rates.append(num / (time.perf_counter() - began_s))
        return rates

    def reverses(self) -> None:
        """Ways to find each sequence's own end, at the small batch and at the best one."""
        found: Json = self.results.setdefault("reverse", {})
        ways: dict[str, Json] = {
            "gate": {"reverse": "gate"},
            "gather": {"reverse": "gather"},
            "gather, two streams": {"reverse": "gather", "concurrent": True},
        }
        with self.resident() as resident:
            for size, buckets in {"small": BucketConfig(batch_size=SMALL), "best": self.best_buckets()}.items():
                for name, model in ways.items():
                    view = resident.view(buckets=buckets)
                    run = self.trial(f"{name}, {size}", lambda view=view, model=model: self.run(view, **model))  # type: ignore[misc]
                    if run is not None:
                        found.setdefault(name, {})[size] = run["samples_per_s"]

    def precisions(self) -> None:
        """Precisions of the forward pass, at the best batch."""
        found: Json = self.results.setdefault("precisions", {})
        choices: tuple[Precision, ...] = ("fp16", "bf16", "fp32") if self.device.type == "cuda" else ("bf16", "fp32")
        with self.resident() as resident:
            for name in choices:
                view = resident.view(buckets=self.best_buckets())
                run = self.trial(name, lambda view=view, name=name: self.run(view, precision=name))  # type: ignore[misc]
                if run is not None:
                    found[name] = run["samples_per_s"] | {"peak_bytes": run["peak_bytes"]}

    def tiers(self) -> None:
        """The same batches from RAM and from the mapped corpus."""
        found: Json = self.results.setdefault("tiers", {})
        tiers: tuple[Literal["ram", "window"], ...] = ("ram", "window")
        for tier in tiers:

            def work(tier: Literal["ram", "window"] = tier) -> Json:
                with self.resident(tier) as resident:
                    return self.run(resident.view(buckets=self.best_buckets()))

            run = self.trial(tier, work)
            if run is not None:
                found[tier] = run["samples_per_s"] | {"waiting": run["waiting"], "epochs": run["epochs"]}

    def packing(self) -> None:
        """Bytes per second of float32 files into a corpus, in a process of its own on two cores."""
        folder = self.folder / "float32"
        folder.mkdir()
        for row in range(min(512, self.num_files)):
            np.save(folder / f"{row:06d}.npy", self.corpus.sequence(row).numpy().astype(np.float32))
        runs: list[Json] = []
        for turn in range(3):
            command = [sys.executable, "-c", PACK, str(folder), str(self.folder / f"packed-{turn}")]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout))
        rates = spread([run["bytes_per_s"] for run in runs])
        self.results["packing"] = {"files": min(512, self.num_files), "bytes": runs[0]["bytes"], "bytes_per_s": rates}

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# Data


def log_normal(count: int, mean: float, longest: int) -> Tensor:
    """Lengths whose mean, once none is longer than the longest, is the one asked for."""
    draws = np.exp(SPREAD * np.random.default_rng(0).standard_normal(count))
    low, high = 0.0, 10 * mean
    for _ in range(50):
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * draws, 2, longest).mean() < mean else (low, scale)
    return torch.from_numpy(np.clip(scale * draws, 2, longest).round().astype(np.int64))


def write_corpus(path: Path, lengths: Tensor, dim: int, device: torch.device) -> None:
    """Noise around a mean of each class, made on the device, straight into shards."""
    rng = torch.Generator(device).manual_seed(0)
    labels = torch.arange(len(lengths)) % CLASSES
    noise = torch.randn(2 * int(lengths.max()) + 1, dim, device=device, generator=rng)
    means = torch.randn(CLASSES, dim, device=device, generator=rng) / 4
    identity = {"kind": KIND, "dim": dim, "dtype": "float16", "skip_bad": False, "source": {}}
    per_shard = max(1, SHARD_BYTES // (2 * dim))
    with ShardWriter(path, {**identity, "skipped": []}, items_per_shard=per_shard) as writer:
        for rows in torch.arange(len(lengths)).split(64):  # type: ignore[no-untyped-call]
            parts = [
                noise[row % len(noise) // 2 :][:length] + means[label]
                for row, length, label in zip(rows.tolist(), lengths[rows].tolist(), labels[rows].tolist(), strict=True)
            ]
            writer.append({FRAMES: torch.cat(parts).half().cpu()}, {})
        table_entry = write_items(path, columns(lengths, labels))
        writer.finish(sequences=len(lengths), table=table_entry)


def columns(lengths: Tensor, labels: Tensor) -> Json:
    """The table of the corpus."""
    return {
        "ids": [f"{row:06d}.npy" for row in range(len(lengths))],
        "starts": (lengths.cumsum(0) - lengths).tolist(),
        "lengths": lengths.tolist(),
        "labels": labels.tolist(),
        "split": [""] * len(lengths),
        "classes": [f"class {number}" for number in range(CLASSES)],
    }


def endless(loader: SequenceLoader) -> Generator[FedBatch]:
    """Epoch after epoch; lengths stay on the host too, where packing wants them."""
    epoch = 0
    while True:
        for batch in loader.host_epoch(epoch):
            yield FedBatch(loader.to_device(batch), batch["length"])
        epoch += 1


def after_epochs(num_batches: int, seconds: float) -> Callable[[], bool]:
    """Asked after each batch: stops at the end of an epoch, so many seconds after those that are not counted."""
    asked, began_s = 0, math.inf

    def stop() -> bool:
        nonlocal asked, began_s
        asked += 1
        epochs, rest = divmod(asked, num_batches)
        if rest or epochs < SKIPPED_EPOCHS:
            return False
        began_s = min(began_s, time.perf_counter())
        return epochs > SKIPPED_EPOCHS and time.perf_counter() - began_s >= seconds

    return stop


# Judging


def best_of(found: Json) -> str:
    """The name of the fastest."""
    return max(found, key=lambda name: found[name]["samples_per_s"]["median"], default="")


def judge(results: Json, device: torch.device) -> None:
    """What was wanted beside what was found; the bars hold for one H200 and the whole size."""
    sizes, loader = results.get("sizes", {}), results.get("loader", {})
    verdicts: Json = {}
    if sizes:
        best = sizes[best_of(sizes)]
        verdicts["samples_per_s"] = best["samples_per_s"]["median"]
        verdicts["ceiling_share"] = best.get("ceiling_share")
    if sizes and loader:
        ours = sizes.get(f"{SMALL} sequences", {}).get("samples_per_s", {}).get("median")
        theirs = [run["samples_per_s"]["median"] for name, run in loader.items() if name.startswith(f"{SMALL} ")]
        verdicts["small_ratio"] = ours / max(theirs) if ours and theirs else None
        verdicts["best_ratio"] = verdicts["samples_per_s"] / loader[best_of(loader)]["samples_per_s"]["median"]
    if "packing" in results:
        verdicts["packing"] = results["packing"]["bytes_per_s"]["median"]
    results["bars"] = {
        name: {"wanted": BARS[name] if device.type == "cuda" or name == "packing" else None, "found": value}
        for name, value in verdicts.items()
        if value is not None
    }


# What is printed


def render(results: Json) -> str:
    """Tables of what was measured."""
    parts: dict[str, Callable[[Json], str]] = {
        "data": data_table,
        "sizes": sizes_table,
        "loader": loader_table,
        "reverse": reverse_table,
        "precisions": precisions_table,
        "tiers": tiers_table,
        "bars": bars_table,
        "failed": failed_table,
    }
    return "\n".join(make(results) for name, make in parts.items() if results.get(name))


def data_table(results: Json) -> str:
    """What was trained on."""
    data = results["data"]
    cells = {
        "sequences": number(data["sequences"]),
        "mean length": f"{data['mean_length']:.0f} (≤ {data['max_length']})",
        "features": number(data["dim"]),
        "packed": format_size(data["bytes"]),
        "as .npy": number(data["files"]),
        "parameters": f"{data['parameters'] / 1e6:.2f} M",
        "precision": results.get("precision", "–"),
    }
    return table("Data", list(cells), [list(cells.values())])


def sizes_table(results: Json) -> str:
    """The trainer at its batch sizes."""
    rows = [
        [
            name, ranged(run["samples_per_s"]), number(run["whole_run_samples_per_s"]), f"{run['padding_share']:.1%}",
            str(run["shapes"]), share_of(run.get("ceiling_share")), format_size(run["peak_bytes"]), run["step_kind"],
        ]
        for name, run in results["sizes"].items()
    ]  # fmt: skip
    heads = ["batch", "samples/s", "with first epochs", "padding", "shapes", "of the ceiling", "peak", "step"]
    return table("Corpus in VRAM", heads, rows)


def loader_table(results: Json) -> str:
    """The DataLoader at its batch sizes."""
    rows = [
        [name, ranged(run["samples_per_s"]), str(run["num_workers"]), str(run["prefetch_factor"])]
        for name, run in results["loader"].items()
    ]
    return table(
        "DataLoader over .npy files and pack_padded_sequence", ["batch", "samples/s", "workers", "prefetch"], rows
    )


def reverse_table(results: Json) -> str:
    """Ways to run the reverse direction."""
    rows = [
        [name, *(ranged(run[size]) if size in run else "–" for size in ("small", "best"))]
        for name, run in results["reverse"].items()
    ]
    return table("The reverse direction", ["way", f"samples/s, batch {SMALL}", "at the best batch"], rows)


def precisions_table(results: Json) -> str:
    """Precisions."""
    rows = [[name, ranged(run), format_size(run["peak_bytes"])] for name, run in results["precisions"].items()]
    return table("Precision, at the best batch", ["precision", "samples/s", "peak"], rows)


def tiers_table(results: Json) -> str:
    """Tiers."""
    rows = [[name, ranged(run)] for name, run in results["tiers"].items()]
    return table("Tiers, at the best batch", ["tier", "samples/s"], rows)


def bars_table(results: Json) -> str:
    """What was wanted and what was found."""
    says: dict[str, tuple[str, Callable[[float], str]]] = {
        "samples_per_s": ("samples/s at the best batch", number),
        "ceiling_share": ("share of the static-batch ceiling there", "{:.1%}".format),
        "small_ratio": (f"times the DataLoader at batch {SMALL}", "{:.2f}".format),
        "best_ratio": ("times the DataLoader, each at its best batch", "{:.2f}".format),
        "packing": ("packing on two cores, MB/s", lambda value: number(value / 1e6)),
    }
    rows = []
    for name, bar in results["bars"].items():
        text, say = says[name]
        rows.append([text, "–" if bar["wanted"] is None else say(bar["wanted"]), say(bar["found"])])
    return table("Bars", ["", "wanted", "found"], rows)


def failed_table(results: Json) -> str:
    """What was not measured."""
    return table("Not measured", ["run", "why"], [[name, why] for name, why in results["failed"].items()])


def share_of(share: float | None) -> str:
    """A share, where it was measured."""
    return "–" if share is None else f"{share:.1%}"


def page(results: Json, line: str) -> str:
    """The results as a page of Markdown."""
    about = (
        "Supervised training, no augmentation. Rates are medians over epochs (DataLoader: over blocks), least and most "
        "beside. The ceiling is the same steps on batches that are on the device already. The DataLoader reads float16 "
        "files, half the bytes of the usual float32, from a warm page cache."
    )
    return markdown(__doc__ or "", about, facts_of(results, {}), render(results), line)


if __name__ == "__main__":
    main()
