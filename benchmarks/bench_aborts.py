"""How much memory do the processes of a service keep after requests whose clients hang up?

    python benchmarks/bench_aborts.py [--requests 10000] [--markdown FILE]

Four clients send requests with bodies of 1 KiB to 16 MiB, evenly on a logarithmic scale, to predictions, uploads and
jobs in turn, and hang up somewhere within them. The resident memory of every process is noted every 250 requests.
Growth is that of a straight line from a tenth of the requests on, when everything is loaded, to the last. The bar is
5 %.
"""

import argparse
import json
import math
import random
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from brim.segmentation.networks import create_model, save_weights
from page import facts_of, installed, machine, markdown, table, tell
from service_client import Service, serving

BAR_PERCENT = 5.0
EVERY = 250
CLIENTS = 4
SIZES = (2**10, 2**24)  # bytes of a body
EDGE = "edge-of-the-form"
ABOUT = "All processes of the service and the clients share the machine."


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    memory = measure(options.requests)
    results = {
        "machine": machine(torch.device("cpu"), options.commit),
        "command": f"python benchmarks/bench_aborts.py --requests {options.requests}",
        "processes": memory,
        "bar_percent": BAR_PERCENT,
    }
    rows = [
        [name, *(f"{one[key]:.1f}" for key in ("first_mib", "last_mib", "max_mib")), f"{one['growth_percent']:+.1f}"]
        for name, one in memory.items()
    ]
    title = f"Resident memory over {options.requests} aborted requests; the bar for growth is {BAR_PERCENT:g} %"
    text = table(title, ["process", "first MiB", "last MiB", "most MiB", "growth %"], rows)
    print(text)
    print(json.dumps(results))
    if options.markdown is not None:
        facts = facts_of(results, {"uvicorn": installed("uvicorn")})
        options.markdown.write_text(markdown(__doc__ or "", ABOUT, facts, text, json.dumps(results)))


def measure(requests: int) -> dict[str, dict[str, float]]:
    """Memory of each process: at a tenth of the requests, at the end, at most, and its growth."""
    notes: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, serving(add_model(Path(folder))) as service:
        for begun in range(0, requests, EVERY):
            number = min(EVERY, requests - begun)
            parts = [range(begun + client, begun + number, CLIENTS) for client in range(CLIENTS)]
            threads = [threading.Thread(target=send_all, args=[service, part]) for part in parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for name, pid in {"supervisor": service.process.pid, **service.children()}.items():
                notes.setdefault(name, []).append(resident_mib(pid))
            if begun % (10 * EVERY) == 0:
                tell(f"{begun + number} requests: {', '.join(f'{name} {mib[-1]:.0f}' for name, mib in notes.items())}")
    return {name: summary(mib) for name, mib in notes.items()}


def add_model(folder: Path) -> Path:
    """A data directory with a model, so that predictions are admitted."""
    save_weights(create_model("unet_tiny"), folder / "tiny.safetensors", {})
    words = ["models", "add", "cells", str(folder / "tiny.safetensors"), "--network", "unet_tiny"]
    command = [sys.executable, "-m", "brim", *words, "--data", str(folder / "data")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "data"


def send_all(service: Service, numbers: Sequence[int]) -> None:
    for number in numbers:
        with suppress(OSError):  # it may be the service that hangs up
            send(service, number)


def send(service: Service, number: int) -> None:
    """One request, whose client leaves after a part of its body."""
    rng = random.Random(number)
    size = int(math.exp(rng.uniform(*map(math.log, SIZES))))
    path = ("/api/segment", "/api/datasets", "/api/training/jobs")[number % 3]
    kind = "application/json" if "jobs" in path else f"multipart/form-data; boundary={EDGE}"
    field = "images" if "datasets" in path else "file"
    texts = f'--{EDGE}\r\nContent-Disposition: form-data; name="name"\r\n\r\na\r\n' if field == "images" else ""
    body = f'{texts}--{EDGE}\r\nContent-Disposition: form-data; name="{field}"; filename="a.png"\r\n\r\n'.encode()
    body = (b'{"kind": "' if "jobs" in path else body) + rng.randbytes(1024) * (size // 1024)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {service.token}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(head.encode() + body[: int(rng.random() * len(body))])


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def summary(mib: Sequence[float]) -> dict[str, float]:
    settled = np.array(mib[len(mib) // 10 :])
    slope, start = np.polyfit(np.arange(len(settled)), settled, 1)
    growth = 100 * slope * (len(settled) - 1) / start
    return {"first_mib": settled[0], "last_mib": settled[-1], "max_mib": max(mib), "growth_percent": float(growth)}


if __name__ == "__main__":
    main()
