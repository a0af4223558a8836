"""The network without a server: `predict` on one image, `predict_batch` on many; in a process of its own, on its cores.

python benchmarks/serve_direct.py SETTING.json      prints one JSON line
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
DIRECT_CALLS = 40
OFFLINE_S = 3.0  # of each of the repeated runs


def main(file: str) -> None:
    """Tune where nothing is known, then measure."""
    setting: Json = json.loads(Path(file).read_text())
    if setting["cores"]:
        os.sched_setaffinity(0, setting["cores"])
    from brim.segmentation import ModelLoader  # only now: torch counts its cores when it is imported
    from brim.segmentation.objects import geojson

    images = [path.read_bytes() for path in sorted(Path(setting["images"]).iterdir())]
    loader = ModelLoader(
        {setting["network"]: setting["weights"]},
        setting["device"],
        batch_sizes=setting["batch_sizes"],
        tune_seconds=setting["tune_seconds"],
    )
    batch = loader.get_optimal_batch_size(setting["network"])
    network = loader.load(setting["network"])
    direct = timed(lambda number: loader.predict(images[number % len(images)], setting["network"]), DIRECT_CALLS)
    found: Json = {"setting": str(network.setting), "batch_size": batch, "direct_ms": spread_ms(direct)}
    found["forward_ms"] = forward_ms(network, setting["size"], batch)
    found["offline_per_s"] = [offline(loader, setting["network"], images, batch) for _ in range(setting["repeats"] + 1)]
    found["offline_per_s"] = found["offline_per_s"][1:]  # the first one captures
    predictions = [loader.predict(image, setting["network"]) for image in images]
    found["polygons"] = [len(prediction.polygons) for prediction in predictions]
    found["answer_bytes"] = statistics.mean(len(geojson(prediction.polygons)) for prediction in predictions)
    found["image_bytes"] = statistics.mean(map(len, images))
    print(json.dumps(found), flush=True)


def timed(call: Callable[[int], object], count: int) -> list[float]:
    """Seconds of every call, after a quarter of them to warm up."""
    seconds = []
    for number in range(count + count // 4):
        began_s = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - began_s)
    return seconds[count // 4 :]


def offline(loader: Any, name: str, images: list[bytes], batch: int) -> float:
    """Images per second of predict_batch, from bytes to polygons."""
    count = max(4 * batch, 2 * len(images))
    while True:
        began_s = time.perf_counter()
        loader.predict_batch([images[number % len(images)] for number in range(count)], name, batch)
        took_s = time.perf_counter() - began_s
        if took_s >= 0.7 * OFFLINE_S:
            return count / took_s
        count = max(count + 1, round(count * min(8.0, OFFLINE_S / took_s)))


def forward_ms(network: Any, size: int, largest: int) -> dict[str, float]:
    """Milliseconds of a forward by batch size: powers of two, and the tuned one."""
    import torch

    found = {}
    sizes = sorted({1, largest} | {2**k for k in range(1, 10) if 2**k < largest})
    for batch in sizes:
        pixels = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=network.device)

        def once(_: int, pixels: torch.Tensor = pixels) -> None:
            network(pixels).amax().item()  # waits for the device

        found[str(batch)] = 1000 * statistics.median(timed(once, 8))
    return found


def spread_ms(seconds: list[float]) -> dict[str, float]:
    """Median and range, in milliseconds."""
    return {"median": 1000 * statistics.median(seconds), "min": 1000 * min(seconds), "max": 1000 * max(seconds)}


if __name__ == "__main__":
    main(sys.argv[1])
