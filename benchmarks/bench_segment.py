"""How many images a second do the networks segment at the batch the tuner chose, and is that the right batch?

One process trains each network for a while on generated cells, then measures:
1. forward: the tuned setting and batch against the same network in fp32 eager at batch 1 and at its best batch, and
   how far its masks are from fp32's;
2. end to end: PNG bytes to polygons, against the forward alone;
3. the tuner against an exhaustive sweep of every size up to twice its optimum;
4. the largest safe batch: 200 steps of it while another process holds a fifth of the memory;
5. an image alone and in a batch: how far its probabilities move.
"""

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from brim.engine.config import SweepConfig
from brim.engine.device import format_size, resolve_device, total_bytes
from brim.engine.tuning import ProbeConfig, Prober, budget_bytes, sweep
from brim.segmentation import ModelLoader, SegmentTrainConfig, create_model, train
from brim.segmentation.config import TuneConfig
from brim.segmentation.networks import CAPTURE_AFTER, InferenceNetwork, default_setting, load_weights, normalise
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.prediction import PredictReport
from brim.segmentation.scenes import make_cells, write_cells
from brim.segmentation.tuning import FILE_NAME, Tuned, device_info, device_key, save_entry, tune_model
from page import Json, facts_of, machine, markdown, number, table, tell

BARS = {"hrnet": (250, 400), "resunet_small": (180, 270), "resunet_advanced": (65, 100)}  # images/s: bar, aim
PARTS = ("forward", "end", "exhaustive", "safe", "alone")
BASELINE_BATCHES = (1, 2, 4, 8)
SAFE_STEPS = 200
HELD_SHARE = 0.2
EXHAUSTIVE_S = 1.0  # measured for each size, after its first calls

HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda").fill_(1)
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Measure, print tables and one JSON line; what was measured is told even when a later part fails."""
    options = parse_options()
    device = resolve_device(options.device)
    results: Json = {
        "question": "images per second of the segmentation networks",
        "machine": machine(device, options.commit),
        "command": "python benchmarks/bench_segment.py " + " ".join(options.shown),
        "size": options.size,
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(results, device, options, Path(folder))
    finally:
        line = json.dumps(results)
        print(render(results), line, sep="\n")
        if options.markdown:
            options.markdown.write_text(page(results, line), encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", default=",".join(TuneConfig().models))
    parser.add_argument("--size", type=int, default=1024, help="side of the images in pixels")
    parser.add_argument("--sweep-size", type=int, default=512, help="side for the exhaustive sweep")
    parser.add_argument("--sweep-model", default="", help="network of the exhaustive sweep; the second of --models")
    parser.add_argument("--safe-model", default="", help="network of the largest safe batch; the first of --models")
    parser.add_argument("--train-epochs", type=int, default=6, help="0: random weights")
    parser.add_argument("--train-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=30, help="of tuning per model")
    parser.add_argument("--images", type=int, default=1024, help="images of the end-to-end run")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    options.models, options.only = options.models.split(","), options.only.split(",")
    options.sweep_model = options.sweep_model or options.models[min(1, len(options.models) - 1)]
    options.safe_model = options.safe_model or options.models[0]
    options.shown = [text for text in sys.argv[1:] if "/" not in text or text.startswith("--only")]
    return options


def measure(results: Json, device: torch.device, options: argparse.Namespace, folder: Path) -> None:
    """Run the parts asked for."""
    modules = {name: trained(results, name, device, options, folder) for name in options.models}
    tuned: dict[str, Tuned] = {}
    for name, module in modules.items():
        tell(f"tuning {name}")
        tuned[name] = tune_model(name, module, device, TuneConfig(size=options.size, seconds=options.seconds))
        results.setdefault("tuned", {})[name] = tuned_json(tuned[name])
        save_entry(
            folder / FILE_NAME, device_key(device), device_info(device), name, tuned[name].entry, tuned[name].trials
        )
    if "forward" in options.only:
        results["forward"] = {name: forward(modules[name], tuned[name], device, options.size) for name in modules}
    if "alone" in options.only:
        results["alone"] = {name: alone(modules[name], tuned[name], device, options.size) for name in modules}
    if "end" in options.only:
        results["end"] = {name: end_to_end(name, tuned[name], device, options, folder) for name in options.models[:1]}
    if "exhaustive" in options.only:
        name = options.sweep_model
        results["exhaustive"] = {"model": name, **exhaustive(modules[name], device, options.sweep_size)}
    if "safe" in options.only:
        name = options.safe_model
        results["safe"] = {"model": name, **safe(name, modules[name], device, options)}


# Trained networks


def trained(results: Json, name: str, device: torch.device, options: argparse.Namespace, folder: Path) -> nn.Module:
    """A network that finds cells, and how well it does so on images it has not seen."""
    module = create_model(name)
    if not options.train_epochs:
        return module
    tell(f"training {name}")
    images, masks, run = folder / "images", folder / "masks", folder / name
    if not images.exists():
        write_cells(images, masks, 96, 1, 2 * options.train_size, 2 * options.train_size)
    config = SegmentTrainConfig(
        model=name, size=options.train_size, epochs=options.train_epochs, batch_size=8, learning_rate=3e-4
    )
    began_s = time.perf_counter()
    report = train(images, masks, config, run, device=str(device))
    found = {**report.to_json(), "seconds": time.perf_counter() - began_s}
    results.setdefault("trained", {})[name] = {key: found[key] for key in found if key not in ("run", "weights")}
    load_weights(module, run)
    return module


def cells(count: int, size: int, device: torch.device) -> Tensor:
    """Generated images (count, 3, size, size) uint8 on the device, a few different ones repeated."""
    made = [make_cells(9, index, size, size)[0] for index in range(min(count, 8))]
    images = np.stack([made[index % len(made)] for index in range(count)])
    return torch.from_numpy(images).to(device).permute(0, 3, 1, 2)


# Parts


def forward(module: nn.Module, tuned: Tuned, device: torch.device, size: int) -> Json:
    """Images/s of the tuned network and of plain fp32 eager, and the distance of their masks."""
    batch = tuned.entry.optimal_batch_size
    images = cells(min(8, max(2, batch)), size, device)
    network = InferenceNetwork(module, device, tuned.setting)
    with released(device):
        fast = step_rate(lambda: network(images_of(images, batch)), batch, device)
        found = torch.sigmoid(network(images[:4]))
        network.release()
    with released(device):
        wanted = torch.sigmoid(
            torch.cat([InferenceNetwork(module, device, ComputeConfig())(image[None]) for image in images[:4]])
        )
    baseline = {str(b): eager_rate(module, images_of(images, b), device) for b in BASELINE_BATCHES}
    return {
        "batch": batch,
        "images_per_s": fast,
        "fp32_eager": baseline,
        "mask_difference": ((found > 0.5) != (wanted > 0.5)).float().mean().item(),
        "probability_difference": (found - wanted).abs().max().item(),
        "foreground": (wanted > 0.5).float().mean().item(),
    }


def eager_rate(module: nn.Module, images: Tensor, device: torch.device) -> float | None:
    """Images/s of the module as torch runs it: fp32, torch's own choice of TF32, no folding, no graph."""
    with released(device):
        plain = copied(module, device)
        try:
            with torch.inference_mode():
                return step_rate(lambda: plain(normalise(images)), len(images), device, seconds=1.0)["median"]
        except torch.OutOfMemoryError:
            return None


def alone(module: nn.Module, tuned: Tuned, device: torch.device, size: int) -> Json:
    """How far an image's probabilities move with its company."""
    moved: Json = {}
    settings = {"fp32": ComputeConfig()} | {str(tuned.setting): tuned.setting}
    for label, setting in settings.items():
        images = cells(8 if device.type == "cuda" and label != "fp32" else 2, size, device)
        with released(device):
            network = InferenceNetwork(module, device, setting)
            together = torch.sigmoid(network(images))
            single = torch.cat([torch.sigmoid(network(image[None])) for image in images])
            moved[label] = (together - single).abs().max().item()
            network.release()
    return moved


def end_to_end(name: str, tuned: Tuned, device: torch.device, options: argparse.Namespace, folder: Path) -> Json:
    """PNG bytes to polygons, repeated; the forward alone is the ceiling."""
    files = [encoded(make_cells(11, index, options.size, options.size)[0]) for index in range(min(options.images, 8))]
    images = [files[index % len(files)] for index in range(options.images)]
    weights = {name: folder / name} if options.train_epochs else None
    loader = ModelLoader(weights, str(device), batch_sizes=folder / FILE_NAME, tune_seconds=options.seconds)
    reports: list[PredictReport] = []
    for _ in range(3):  # the first one captures
        for _prediction in loader.predict_stream(
            images, name, tuned.entry.optimal_batch_size, on_report=reports.append
        ):
            pass
    rates = [report.images_per_s for report in reports[1:]]
    last = reports[-1].as_dict()
    return {
        "images": options.images,
        "png_bytes": statistics.mean(map(len, files)),
        "polygons_per_image": last["polygons"] / last["images"],
        "images_per_s": rates,
        "ceiling_shares": [report.ceiling_share for report in reports[1:]],
        "batch_size": last["batch_size"],
        "stages": last["stages"],
    }


def exhaustive(module: nn.Module, device: torch.device, size: int) -> Json:
    """The tuner's search beside every size up to twice its optimum, each measured at length."""
    network = InferenceNetwork(module, device, default_setting(device))
    config = SweepConfig(limit=512, budget_bytes=budget_bytes(device))
    prober = Prober(lambda batch: Step(network, batch, size), device, ProbeConfig())
    tell(f"tuner at {size} px")
    found = sweep(prober, config, prove=prober.prove)
    rates: dict[int, float] = {}
    began_s = time.perf_counter()
    for batch in range(1, 2 * found.batch + 1):
        rates[batch] = step_rate(Step(network, batch, size), batch, device, seconds=EXHAUSTIVE_S)["median"]
        network.release()
        tell(f"exhaustive: batch {batch}, {rates[batch]:.0f} images/s")
    seconds = time.perf_counter() - began_s
    best = max(rates, key=lambda batch: rates[batch])
    return {
        "size": size,
        "optimum": found.batch,
        "best": best,
        "share_of_best": rates[found.batch] / rates[best],
        "tuner_seconds": found.seconds - found.proof_s - found.warmup_s,
        "first_call_seconds": found.warmup_s,
        "proof_seconds": found.proof_s,
        "exhaustive_seconds": seconds,
        "time_share": (found.seconds - found.proof_s - found.warmup_s) / seconds,
        "rates": rates,
        "trials": [(trial.batch, trial.status, round(trial.throughput, 1)) for trial in found.trials],
    }


def safe(name: str, module: nn.Module, device: torch.device, options: argparse.Namespace) -> Json:
    """Tune, then run the largest safe batch for many steps, while another process holds memory."""
    if device.type != "cuda":
        return {"skipped": "memory can only be held on a GPU"}
    held = int(HELD_SHARE * total_bytes(device))
    torch.cuda.empty_cache()
    with holder(held):
        tuned = tune_model(name, module, device, TuneConfig(size=options.size, seconds=options.seconds))
        batch, network = tuned.entry.max_safe_batch_size, InferenceNetwork(module, device, tuned.setting)
        step = Step(network, batch, options.size)
        began_s = time.perf_counter()
        for _ in range(SAFE_STEPS):
            step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began_s
    return {"held_bytes": held, "batch": batch, "steps": SAFE_STEPS, "images_per_s": SAFE_STEPS * batch / seconds}


# Timing


class Step:
    """Random pixels on the device to masks there, as the tuner times it."""

    def __init__(self, network: InferenceNetwork, batch: int, size: int) -> None:
        """Allocate the batch."""
        self._images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=network.device)
        self._network, self._is_first = network, True

    def __call__(self) -> Tensor:
        """One step; the first one captures too."""
        for _ in range(CAPTURE_AFTER * self._is_first * self._images.is_cuda):
            self._network(self._images)
        self._is_first = False
        return torch.sigmoid(self._network(self._images)) > 0.5


def step_rate(step: Callable[[], object], batch: int, device: torch.device, seconds: float = 2.0) -> dict[str, float]:
    """Items/s over blocks of a tenth of the seconds, after a warm-up: median, least and most."""
    for _ in range(CAPTURE_AFTER + 2):
        step()
    synchronise(device)
    began_s = time.perf_counter()
    step()
    synchronise(device)
    per_block = max(1, round(seconds / 10 / (time.perf_counter() - began_s)))
    rates: list[float] = []
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s or len(rates) < 3:
        block_s = time.perf_counter()
        for _ in range(per_block):
            step()
        synchronise(device)
        rates.append(per_block * batch / (time.perf_counter() - block_s))
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def released(device: torch.device) -> Iterator[None]:
    """Give cached memory back before and after."""
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def holder(size_bytes: int) -> Iterator[None]:
    """Another process that holds memory of the GPU."""
    command = [sys.executable, "-c", HOLD, str(size_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()


def images_of(images: Tensor, batch: int) -> Tensor:
    """A batch of that many, repeated."""
    return images.repeat(math.ceil(batch / len(images)), 1, 1, 1)[:batch]


def copied(module: nn.Module, device: torch.device) -> nn.Module:
    """The module in eval mode on the device, itself untouched."""
    return copy.deepcopy(module).eval().to(device)


def encoded(image: np.ndarray) -> bytes:
    """An RGB image as a PNG file."""
    return bytes(cv2.imencode(".png", image[..., ::-1])[1])


def tuned_json(tuned: Tuned) -> Json:
    """What tuning found, without the trials."""
    entry = tuned.entry
    return {
        "optimal_batch_size": entry.optimal_batch_size,
        "max_safe_batch_size": entry.max_safe_batch_size,
        "expected_throughput": entry.expected_throughput,
        "p50_latency_ms": entry.p50_latency_ms,
        "p95_latency_ms": entry.p95_latency_ms,
        "setting": str(tuned.setting),
        "seconds": tuned.seconds,
        "compile_s": tuned.compile_s,
        "messages": tuned.messages,
        "trials": [_short(trial) for trial in tuned.trials],
    }


def _short(trial: Json) -> list[object]:
    return [trial["batch"], trial["status"], round(trial["throughput"], 1), trial["peak_bytes"]]


# What is printed


def render(results: Json) -> str:
    """Tables of what was measured."""
    parts = {
        "trained": trained_table,
        "forward": forward_table,
        "alone": alone_table,
        "end": end_table,
        "exhaustive": exhaustive_table,
        "safe": safe_table,
    }
    return "\n\n".join(make(results) for name, make in parts.items() if name in results)


def trained_table(results: Json) -> str:
    """How good the networks are."""
    rows = [
        [name, f"{found['iou']:.3f}", f"{found['dice']:.3f}", f"{found['images_per_s']:.1f}", f"{found['seconds']:.0f}"]
        for name, found in results["trained"].items()
    ]
    return table("Trained on generated cells", ["network", "IoU", "Dice", "crops/s", "seconds"], rows)


def forward_table(results: Json) -> str:
    """Forward rates against fp32 eager and the bars."""
    rows = []
    for name, found in results["forward"].items():
        plain = [rate for rate in found["fp32_eager"].values() if rate]
        one, best, rate = found["fp32_eager"]["1"], max(plain, default=None), found["images_per_s"]
        bar = BARS.get(name, ("", ""))
        rows.append([
            name, str(found["batch"]), f"{rate['median']:.1f} ({rate['min']:.1f}–{rate['max']:.1f})",
            f"{bar[0]} / {bar[1]}", f"{one:.1f}" if one else "–", f"{rate['median'] / one:.1f}" if one else "–",
            f"{best:.1f}" if best else "–", f"{rate['median'] / best:.1f}" if best else "–",
            f"{found['mask_difference']:.3%}",
        ])  # fmt: skip
    heads = [
        "network",
        "batch",
        "images/s",
        "bar / aim",
        "fp32 eager, batch 1",
        "×",
        "at its best batch",
        "×",
        "masks differ",
    ]
    return table(f"Forward, {results['size']}²", heads, rows)


def alone_table(results: Json) -> str:
    """Probabilities alone and together."""
    rows = [[name, label, f"{moved:.1e}"] for name, found in results["alone"].items() for label, moved in found.items()]
    return table("An image alone and in a batch", ["network", "setting", "largest difference in probability"], rows)


def end_table(results: Json) -> str:
    """PNG bytes to polygons."""
    rows = []
    for name, found in results["end"].items():
        shares = [share for share in found["ceiling_shares"] if share]
        rates = ", ".join(f"{rate:.1f}" for rate in found["images_per_s"])
        rows.append([name, number(found["images"]), rates, ", ".join(f"{share:.1%}" for share in shares)])
    return table("PNG bytes to polygons", ["network", "images", "images/s", "of the forward's rate (bar 80 %)"], rows)


def exhaustive_table(results: Json) -> str:
    """The tuner against every size."""
    found = results["exhaustive"]
    rows = [
        ["optimum", str(found["optimum"])],
        ["best of all sizes", str(found["best"])],
        ["throughput at the optimum over the best (bar 98 %)", f"{found['share_of_best']:.1%}"],
        ["time of the search over the exhaustive one's (bar 10 %)", f"{found['time_share']:.1%}"],
        ["seconds: search, its first calls, proof of the safe size, exhaustive", f"{found['tuner_seconds']:.1f}, "
         f"{found['first_call_seconds']:.1f}, {found['proof_seconds']:.1f}, {found['exhaustive_seconds']:.1f}"],
    ]  # fmt: skip
    return table(f"{found['model']} at {found['size']}²", ["tuner against an exhaustive sweep", ""], rows)


def safe_table(results: Json) -> str:
    """The largest safe batch."""
    found = results["safe"]
    if "skipped" in found:
        return table("The largest safe batch", ["skipped"], [[found["skipped"]]])
    row = [found["model"], format_size(found["held_bytes"]), str(found["batch"]), str(found["steps"]),
           f"{found['images_per_s']:.1f}"]  # fmt: skip
    return table(
        "The largest safe batch, no out-of-memory", ["network", "held by another", "batch", "steps", "images/s"], [row]
    )


def page(results: Json, line: str) -> str:
    """The results as a page of Markdown."""
    about = "fp32 eager is the plain module with torch's defaults. Rates are medians of blocks, least and most beside."
    return markdown(__doc__ or "", about, facts_of(results, {}), render(results), line)


if __name__ == "__main__":
    main()
