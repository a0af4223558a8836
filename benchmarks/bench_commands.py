"""How long do whole commands take, from Enter to the result?

    python benchmarks/bench_commands.py --device cuda                       a large GPU
    python benchmarks/bench_commands.py --scale 0.0003 --side 128           two cores, some minutes
    python benchmarks/bench_commands.py --rows segment "rf train"           rows whose names begin so

Every command runs as a user types it, in a new process, first with empty caches and then with those the first run left.
Wall time is that of the process, seen from outside, and CPU time what its threads used, which other work on the machine
changes less; work and overhead are what the report of the command says. The bar is the time of importing torch and
touching the device, plus 1.1 times the work, plus 2 s (8 s with empty caches). --scale multiplies sizes and epochs.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import torch

from page import facts_of, machine, markdown, table, tell
from serve_clients import Target, form_bytes, one_by_one
from service_client import serving

PICTURES = 16  # different ones; drawing and compressing noise takes longer than what is measured
ANSWER_S = 120.0  # for a model to load and answer
SLACK_S = {"cold": 8.0, "warm": 2.0}
KEYS = ("process_s", "cpu_s", "wall_s", "startup_s", "work_s", "overhead")
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclass(frozen=True)
class Row:
    """A command with what it needs; `out` is a name that is new for each run."""

    name: str
    args: Callable[[str], str]
    needs: tuple[str, ...] = ()
    served: bool = False  # asked of a service once the command is done


class Bench:
    """Prepares data in a folder and runs commands there."""

    def __init__(self, folder: Path, device: str, scale: float, side: int) -> None:
        self.folder, self.device, self.scale, self.side = folder, device, scale, side
        self._ready: set[str] = set()

    def count(self, full: int, least: int) -> int:
        return max(least, round(full * self.scale))

    def rows(self) -> list[Row]:
        samples, sequences = self.count(200_000, 60), {n: self.count(n, 100) for n in (5_000, 6_000)}
        seconds = max(1.0, min(10.0, 10 * self.scale**0.25))
        epochs, training, photos = self.count(15, 2), self.count(24, 6), self.count(1536, 6)
        supervised = f"sequence train corpus-5000 --mode supervised --model cnn_lstm --classifier-epochs {epochs}"
        short = "" if self.scale >= 1 else f" --iterations 1 --encoder-epochs {epochs} --classifier-epochs {epochs}"
        return [
            Row(
                f"rf generate, {samples} samples",
                lambda out: f"rf generate --preset production --out {out} --samples {samples}",
            ),
            Row(
                f"rf train, {samples} samples, 8 epochs, batch 256",
                lambda out: f"rf train dataset --out {out} --epochs 8 --batch-size 256",
                ("dataset",),
            ),
            Row(
                f"sequence train, {sequences[5000]} sequences, {epochs} epochs, batch 64",
                lambda out: f"{supervised} --batch-size 64 --out {out}",
                ("corpus-5000",),
            ),
            Row(
                f"sequence train, {sequences[5000]} sequences, {epochs} epochs, batch 1024",
                lambda out: f"{supervised} --batch-size 1024 --out {out}",
                ("corpus-5000",),
            ),
            Row(
                f"sequence train --mode self{short}, {sequences[6000]} sequences",
                lambda out: f"sequence train corpus-6000 --mode self{short} --out {out}",
                ("corpus-6000",),
            ),
            Row(
                f"segment predict, {photos} PNGs of {self.side}², hrnet, to GeoJSON files",
                lambda out: f"segment predict photos --weights hrnet --out {out}",
                ("photos", "hrnet"),
            ),
            Row(
                f"segment predict, {photos} PNGs of {self.side}², default model, to GeoJSON files",
                lambda out: f"segment predict photos --out {out}",
                ("photos",),
            ),
            Row(
                f"segment tune --models hrnet --size {self.side} --seconds {seconds:.2g}",
                lambda out: f"segment tune --models hrnet --size {self.side} --seconds {seconds:.2g} --out {out}.json",
            ),
            Row(
                f"segment train, hrnet, {training} images, 4 epochs",
                lambda out: f"{self.training} --out {out}",
                ("pictures",),
            ),
            Row(
                "models add hrnet, to the first answer of a service",
                lambda out: f"models add {out} hrnet",
                ("photos", "hrnet"),
                served=True,
            ),
        ]

    @property
    def training(self) -> str:
        size = 128 if self.scale >= 1 else 64
        return f"segment train --images pictures/images --masks pictures/masks --model hrnet --epochs 4 --size {size}"

    # Data

    def prepare(self, name: str) -> None:
        if name in self._ready:
            return
        self._ready.add(name)
        tell(f"preparing {name}")
        if name == "dataset":
            self.run(f"rf generate --preset production --out dataset --samples {self.count(200_000, 60)}", {})
        elif name.startswith("corpus"):
            self._write_sequences(name, self.count(int(name.partition("-")[2]), 100))
        elif name == "photos":
            _draw(self.folder / "photos", None, self.count(1536, 6), self.side)
        elif name == "hrnet":  # random weights would find thousands of specks
            self.prepare("pictures")
            self.run(f"{self.training} --out hrnet", {})
        else:
            _draw(self.folder / "pictures/images", self.folder / "pictures/masks", self.count(24, 6), 256)

    def _write_sequences(self, name: str, num: int) -> None:
        rng = np.random.default_rng(0)
        for number in range(num):
            place = self.folder / f"{name}-files" / "ab"[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            frames = rng.normal(number % 2, 2, (int(rng.integers(50, 300)), 24))
            np.save(place / f"{number}.npy", frames.astype(np.float32))
        self.run(f"sequence pack {name}-files --out {name}", {}, on_device=False)

    # Commands

    def run(self, line: str, env: dict[str, str], *, on_device: bool = True) -> dict[str, Any]:
        """The report of a command, with its wall time seen from outside."""
        device = ["--device", self.device] if on_device else []
        argv = [sys.executable, "-m", "brim", *line.split(), *device, "--json"]
        done, wall_s, cpu_s = timed(argv, cwd=self.folder, env=os.environ | env)
        if done.returncode:
            raise RuntimeError(f"brim {line}: exit code {done.returncode}\n{done.stderr}")
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report | {"process_s": wall_s, "cpu_s": cpu_s}

    def serve(self, line: str, env: dict[str, str]) -> dict[str, Any]:
        """From a command that registers a model to the first answer of a service that was running before."""
        data = self.folder / f"data-{time.monotonic_ns()}"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if self.device == "cuda" else ""
        settings: Any = {**env, "CUDA_VISIBLE_DEVICES": visible}
        with serving(data, **settings) as service:
            began_s = time.perf_counter()
            report = self.run(f"{line} --data {data}", env, on_device=False)
            picture = next((self.folder / "photos").iterdir()).read_bytes()
            headers = {"Authorization": f"Bearer {service.token}", "Brim-Deadline-Ms": f"{ANSWER_S * 1e3:.0f}"}
            asked = Target(
                service.port, [form_bytes("/api/segment", "file", picture, {"model": line.split()[2]}, headers)]
            )
            while True:
                ((first_s, status, body),) = one_by_one(asked, 1, ANSWER_S)
                wall_s = time.perf_counter() - began_s
                if status == HTTPStatus.OK:
                    break
                if wall_s > ANSWER_S:
                    raise RuntimeError(f"no answer after {wall_s:.0f} s: {status} {body[:300]!r}")
            work_s = min(seconds for seconds, _, _ in one_by_one(asked, 5, ANSWER_S))
        overhead = {"models add": report["process_s"], "first answer": first_s - work_s}
        rest = {"wall_s": wall_s, "startup_s": 0.0, "work_s": work_s, "overhead": overhead}
        return {"process_s": wall_s, "cpu_s": None} | rest

    def torch_alone(self) -> tuple[float, float]:
        """Median wall and CPU seconds of importing torch and touching the device."""
        code = f"import torch; torch.zeros(1, device={self.device!r})"
        runs = [timed([sys.executable, "-c", code], cwd=self.folder, env=dict(os.environ))[1:] for _ in range(3)]
        return sorted(wall_s for wall_s, _ in runs)[1], sorted(cpu_s for _, cpu_s in runs)[1]


def timed(
    argv: list[str], *, cwd: Path, env: dict[str, str]
) -> tuple["subprocess.CompletedProcess[str]", float, float]:
    """A process that has ended, and the seconds of wall and of CPU that it took."""
    began_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _draw(images: Path, masks: Path | None, num: int, side: int) -> None:
    """Bright discs on noise; after the first few, copies of those."""
    import cv2

    rng = np.random.default_rng(1)
    for folder in filter(None, (images, masks)):
        folder.mkdir(parents=True)
    drawn: list[tuple[bytes, bytes]] = []
    for number in range(num):
        if number < (PICTURES if masks is None else num):
            mask = np.zeros((side, side), np.uint8)
            for _ in range(side // 16):
                cv2.circle(mask, tuple(int(at) for at in rng.integers(8, side - 8, 2)), 10, 255, -1)
            image = np.clip(rng.normal(60, 9, (side, side, 3)) + mask[..., None] / 2, 0, 255).astype(np.uint8)
            drawn.append((bytes(cv2.imencode(".png", image)[1]), bytes(cv2.imencode(".png", mask)[1])))
        image_file, mask_file = drawn[number % len(drawn)]
        (images / f"{number:04}.png").write_bytes(image_file)
        if masks is not None:
            (masks / f"{number:04}.png").write_bytes(mask_file)


def measure(bench: Bench, row: Row, number: int) -> Iterator[dict[str, Any]]:
    """A row twice: with empty caches, then with what the first run left there."""
    for name in row.needs:
        bench.prepare(name)
    caches = bench.folder / f"caches-{number}"
    env = {name: str(caches / name) for name in CACHES}
    for state in ("cold", "warm"):
        run = bench.serve if row.served else bench.run
        report = run(row.args(f"{state}-{number}"), env)
        tell(f"{row.name}, {state}: {report['process_s']:.1f} s, work {report['work_s']:.1f} s")
        yield {"command": row.name, "cache": state} | {key: report[key] for key in KEYS}


def tables(results: list[dict[str, Any]], alone_s: float, alone_cpu_s: float) -> str:
    lines = []
    for one in results:
        bar_s = alone_s + 1.1 * one["work_s"] + SLACK_S[one["cache"]]
        causes = ", ".join(f"{cause} {s:.1f}" for cause, s in list(one["overhead"].items())[:4])
        verdict = "yes" if one["process_s"] <= bar_s else "no"
        lines.append(
            [
                one["command"],
                one["cache"],
                f"{one['process_s']:.1f}",
                "–" if one["cpu_s"] is None else f"{one['cpu_s']:.1f}",
                f"{one['work_s']:.1f}",
                causes,
                f"{bar_s:.1f}",
                verdict,
            ]
        )
    header = ["command", "caches", "wall s", "CPU s", "work s", "overhead by cause, s", "bar s", "met"]
    alone = f"importing torch and touching the device alone takes {alone_s:.1f} s, {alone_cpu_s:.1f} of CPU"
    return table(f"Whole commands; {alone}", header, lines)


def main() -> None:
    """Run, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--side", type=int, default=1024, help="of the images to predict, in pixels")
    parser.add_argument("--rows", nargs="*", default=[], help="how the names of the rows begin that are to be run")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    here = machine(torch.device(options.device), options.commit)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="brim-commands-") as folder:
        bench = Bench(Path(folder), options.device, options.scale, options.side)
        alone_s, alone_cpu_s = bench.torch_alone()
        for number, row in enumerate(bench.rows()):
            if options.rows and not any(row.name.startswith(word) for word in options.rows):
                continue
            try:
                rows.extend(measure(bench, row, number))
            except (RuntimeError, KeyboardInterrupt) as failure:  # the rows before it count
                failures.append(f"{row.name}: {failure or 'interrupted'}")
                tell(failures[-1])
                if isinstance(failure, KeyboardInterrupt):
                    break
    command = f"python benchmarks/bench_commands.py {' '.join(sys.argv[1:])}".strip()
    results = {
        "machine": here, "command": command, "load_average_end": os.getloadavg()[0], "torch_alone_s": alone_s,
        "torch_alone_cpu_s": alone_cpu_s, "rows": rows, "failures": failures,
    }  # fmt: skip
    text, line = tables(rows, alone_s, alone_cpu_s), json.dumps(results)
    if not options.json:
        print(text)
    print(line)
    if options.markdown is not None:
        about = "Each command in a new process, with empty caches and then with those that the first run left."
        options.markdown.write_text(markdown(__doc__ or "", about, facts_of(results, {}), text, line))
    if failures:
        raise SystemExit(f"{len(failures)} rows failed")


if __name__ == "__main__":
    main()
