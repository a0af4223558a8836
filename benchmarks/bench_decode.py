"""What does it cost to decode images in processes with limits, instead of in the predictor's own threads?

    python benchmarks/bench_decode.py [--images 200]

Two at a time, as a predictor does on two cores: the size from the header, then the pixels. CPU time is that of all
processes, so that other work on the machine hardly matters; images a second need an idle machine.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

from brim.engine.batching import Payload
from brim.segmentation.prediction.serving import ReadHere
from brim.service.prediction.process.decoders import Decoders

MAX_PIXELS = 2**26


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=200)
    num = parser.parse_args().images
    cv2.setNumThreads(1)
    noise = np.random.default_rng(0).integers(0, 255, (1024, 1024, 3), np.uint8)
    picture = cv2.GaussianBlur(noise, (0, 0), 3)
    files = {"PNG 1024": (".png", picture), "JPEG 1024": (".jpg", picture), "PNG 128": (".png", picture[:128, :128])}
    here, decoders = ReadHere(), Decoders(2)
    rows = []
    for name, (kind, pixels) in files.items():
        payload = Payload(bytes(cv2.imencode(kind, pixels)[1]), name)
        for where, reader in (("threads", here), ("processes", decoders)):

            def read(_: int, reader: ReadHere | Decoders = reader, payload: Payload = payload) -> None:
                reader.size(payload)
                reader.read(payload, MAX_PIXELS)

            run(read, 4)
            cpu_s, wall_s = cpu_used_s(), time.perf_counter()
            run(read, num)
            cpu_ms = 1e3 * (cpu_used_s() - cpu_s) / num
            rows.append({"image": name, "in": where, "cpu_ms": cpu_ms, "per_s": num / (time.perf_counter() - wall_s)})
            print(f"{name:10} {where:10} {cpu_ms:7.2f} ms of CPU {rows[-1]['per_s']:7.0f} images/s")
    decoders.close()
    print(json.dumps({"images": num, "load": os.getloadavg()[0], "rows": rows}))


def run(read: Callable[[int], None], num: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(num)))


def cpu_used_s() -> float:
    """Of this process and of all that it started, directly or not."""
    ticks, pids = 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            children = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
        except OSError:
            continue  # it has ended
        pids += [int(child) for row in children for child in row]
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
