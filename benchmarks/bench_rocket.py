"""How long do rocket features take: 10 000 sequences of 250 frames and 64 channels, on a GPU and on the CPU's cores?

The sequences are on the device when the clock starts. After a warm-up, the median of several passes is reported for
MiniRocket's features of the sequences (`seconds`), for Hydra's (`hydra_s`), and for all that a head may use (`all_s`):
both, MiniRocket's of the steps, and summary statistics. Beside it, the share of sequences whose features equal those of
the CPU to the bit, and a fit of ridge heads on 2 000 of them.

    python benchmarks/bench_rocket.py --json
    python benchmarks/bench_rocket.py --device cpu --sequences 200
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import resolve_device
from brim.sequences.rocket import RocketFeatures, fit_rocket
from brim.sequences.rocket.fit import NUM_FEATURES
from page import machine, table, tell

BAR_S = 1.0
COMPARED = 32  # sequences computed on the CPU too
FITTED = 2_000


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(features: Callable[[Tensor, Tensor], Tensor], frames: Tensor, lengths: Tensor, repeats: int) -> list[float]:
    """Seconds of each pass, after one over a tenth of the sequences."""
    features(frames[: -(-len(frames) // 10)], lengths[: -(-len(frames) // 10)])
    seconds = []
    for number in range(repeats):
        wait(frames.device)
        began_s = time.perf_counter()
        features(frames, lengths)
        wait(frames.device)
        seconds.append(time.perf_counter() - began_s)
        tell(f"pass {number + 1}: {seconds[-1]:.3f} s")
    return seconds


def measure(device: torch.device, sequences: int, length: int, dim: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    host = np.cumsum(rng.standard_normal((sequences, length, dim), dtype=np.float32), 1)
    tell("choosing kernels")
    mean, scale = torch.from_numpy(host.mean((0, 1))), torch.from_numpy(1 / host.std((0, 1)))
    every = RocketFeatures.fit(list(host[:500]), mean, scale, NUM_FEATURES)
    rocket, hydra = every.kernels["frames"], every.hydra
    assert hydra is not None
    frames, lengths = torch.from_numpy(host).to(device), torch.full((sequences,), length, device=device)
    few = frames[:COMPARED], lengths[:COMPARED]
    sides = [
        torch.cat([rocket.features_on(x, num), hydra.features_on(x, num)], 1).cpu()
        for x, num in (few, (few[0].cpu(), few[1].cpu()))
    ]
    same = (sides[0] == sides[1]).all(1).double().mean()
    del sides
    seconds = clock(rocket.features_on, frames, lengths, repeats)
    hydra_s = clock(hydra.features_on, frames, lengths, repeats)
    all_s = clock(every.of_batch, frames, lengths, repeats)
    labels = torch.arange(min(FITTED, sequences)) % 10
    began_s = time.perf_counter()
    fit_rocket(list(host[: len(labels)]), labels, device=device)
    fit_s = time.perf_counter() - began_s
    return {
        "seconds": statistics.median(seconds), "fastest_s": min(seconds), "slowest_s": max(seconds),
        "hydra_s": statistics.median(hydra_s), "all_s": statistics.median(all_s),
        "features": rocket.num_features, "all_features": sum(every.widths.values()),
        "sequences_per_s": sequences / statistics.median(seconds),
        "equal_to_cpu": float(same), "fit_s": fit_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=250)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    given = parser.parse_args()
    device = resolve_device(given.device)
    found = measure(device, given.sequences, given.length, given.dim, given.repeats)
    result = {"machine": machine(device, given.commit), **vars(given), **found, "bar_s": BAR_S}
    if not given.json:
        print(table("Rocket features", ("figure", "value"), [(name, f"{value:,.4g}") for name, value in found.items()]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
