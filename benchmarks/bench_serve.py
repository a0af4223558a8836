"""How many answers a second come in time when clients ask `brim serve` for polygons, up to three times what it can do?

    python benchmarks/bench_serve.py [--device cuda --network hrnet --size 1024] [--others FOLDER] [--markdown FILE]
    python benchmarks/bench_serve.py --others FOLDER --loads 1.2,2,3 --seconds 8 --tune-seconds 5    two cores

Real HTTP on loopback, open-loop Poisson arrivals from several processes. Capacity is the rate of `predict_batch` on the
same files. Goodput counts answers 200 within the limit, three direct calls, of the moment a request was meant to be
sent. The same network answers behind LitServe, mosec and (on a CPU) Ray Serve, one after the other in the same run,
with as many processes that take requests; FOLDER is where their packages are (`pip install --target FOLDER litserve
mosec "ray[serve]"`). A star: tuned. What they begin can still be of use, and of several numbers of requests that they
hold at most, the one with the most answers in time at twice the capacity was chosen; `--peers given` leaves that out.

On a CPU the model's processes have one core; servers and clients have the other, and the direct call and
`predict_batch` are measured on the model's core too.
"""

import argparse
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import torch

from brim.cli.serve import default_api_processes
from brim.engine.device import resolve_device
from brim.segmentation import SegmentTrainConfig, create_model, train
from brim.segmentation.networks import save_weights
from brim.segmentation.scenes import make_cells, write_cells
from brim.segmentation.tuning import FILE_NAME
from page import Json, facts_of, installed, machine, markdown, tell
from serve_clients import Clients, Target, clients, form_bytes, one_by_one, request_bytes
from serve_page import OTHERS, in_words, render
from service_client import Service, pin, serving

HERE = Path(__file__).parent
LOADS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
LIMIT_CALLS = 3  # direct calls that an answer may take
MODEL = "bench"  # its name in the service
PROBE_LOAD, PROBE_S = 2.0, 4.0  # of a limit that is tried for a peer
HELD = (0.7, 1.0, 1.4)  # requests a tuned peer may hold, as shares of what can be answered within the limit
IDLE_REQUESTS = 30
START_S, SETTLE_S = 120.0, 20.0


def main() -> None:
    """Measure, print tables and one JSON line; what was measured is told even when a later part fails."""
    options = parse_options()
    results: Json = {
        "machine": machine(torch.device(options.device), options.commit),
        "command": "python benchmarks/bench_serve.py " + " ".join(options.shown),
        "network": options.network,
        "size": options.size,
        "images": options.images,
        "seconds": options.seconds,
        "servers": {},
        "failures": {},
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(results, options, Path(folder))
    finally:
        results["load_average_end"] = os.getloadavg()[0]
        text, line = render(results), json.dumps(results)
        print(text, line, sep="\n")
        if options.markdown:
            facts = facts_of(results, {name: version_of(name, options) for name in ("fastapi", *OTHERS)})
            about = "\n\n".join((__doc__ or "").split("\n\n")[2:]).strip() + "\n\n" + in_words(results)
            options.markdown.write_text(markdown(__doc__ or "", about, facts, text, line), encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--network", default="", help="hrnet on a GPU, unet_tiny on a CPU")
    parser.add_argument("--size", type=int, default=0, help="side of the images in pixels; 1024 on a GPU, 224 on a CPU")
    parser.add_argument("--images", choices=("jpeg", "png"), default="jpeg")
    parser.add_argument("--weights", type=Path, default=None, help="a file; else some are trained")
    parser.add_argument("--train-epochs", type=int, default=None, help="6, or 1 on a CPU; 0: random weights")
    parser.add_argument("--tune-seconds", type=float, default=10)
    parser.add_argument("--only", default="brim,litserve,mosec,ray", help="servers, by commas")
    parser.add_argument(
        "--peers",
        choices=("tuned", "given", "both"),
        default="tuned",
        help="limits of the others: tried, none, or both",
    )
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="shares of capacity, by commas")
    parser.add_argument("--seconds", type=float, default=10, help="of each load")
    parser.add_argument("--repeats", type=int, default=2, help="of the offline rate")
    parser.add_argument("--clients", type=int, default=0, help="processes; 4, or 2 on a CPU")
    parser.add_argument("--wait-ms", type=float, default=1, help="the others' longest wait for a batch")
    parser.add_argument("--others", type=Path, default=None, help="folder of the others' packages")
    parser.add_argument("--predict-memory", type=int, default=20)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    options.device = str(resolve_device(options.device))
    options.on_gpu = options.device.startswith("cuda")
    options.network = options.network or ("hrnet" if options.on_gpu else "unet_tiny")
    options.size = options.size or (1024 if options.on_gpu else 224)
    options.clients = options.clients or (4 if options.on_gpu else 2)
    if options.train_epochs is None:
        options.train_epochs = 6 if options.on_gpu else 1
    options.only, options.loads = options.only.split(","), [float(load) for load in options.loads.split(",")]
    if unknown := set(options.only) - set(START):
        parser.error(f"--only {', '.join(sorted(unknown))}: unknown; choose from {', '.join(START)}")
    options.shown = [text for text in sys.argv[1:] if "/" not in text]
    options.model_cores, options.other_cores = split_cores(options.on_gpu)
    return options


def split_cores(on_gpu: bool) -> tuple[list[int], list[int]]:
    """Cores of the model and of everything else; on a GPU's machine nothing is pinned."""
    cores = sorted(os.sched_getaffinity(0))
    return ([], []) if on_gpu or len(cores) < 2 else (cores[:1], cores[1:2])


def measure(results: Json, options: argparse.Namespace, folder: Path) -> None:
    """The network without a server, then each server."""
    setting = prepare(results, options, folder)
    results["direct"] = direct = without_server(folder)
    results["capacity_per_s"] = statistics.median(direct["offline_per_s"])
    results["limit_s"] = LIMIT_CALLS * direct["direct_ms"]["median"] / 1000
    tell(f"direct {direct['direct_ms']['median']:.1f} ms, offline {results['capacity_per_s']:.1f} images/s")
    if options.other_cores:
        os.sched_setaffinity(0, options.other_cores)  # and all that is started from here on
    with clients(options.clients, folder / "requests") as group:
        for name in wanted(options):
            try:
                if name.endswith("*"):
                    tune_peer(name, results, options, setting, folder, group)
                with START[name.removesuffix("*")](name, results, options, setting, folder) as target:
                    results["servers"][name] = {}
                    measure_server(results, name, target, group, options)
            except Exception as failure:  # broad on purpose: the others are measured all the same
                tell(f"{name}: {type(failure).__name__}: {failure}")
                results["failures"][name] = f"{type(failure).__name__}: {failure}"
    if not options.on_gpu:
        results["direct_end"] = without_server(folder)  # whether the machine was the same all the time


def without_server(folder: Path) -> Json:
    """The direct call and predict_batch, in a process on the model's cores."""
    tell("direct calls and predict_batch")
    command = [sys.executable, str(HERE / "serve_direct.py"), str(folder / "setting.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def wanted(options: argparse.Namespace) -> list[str]:
    """Names of servers; with a star their limits are tuned."""
    names = [name for name in options.only if name != "ray" or not options.on_gpu]
    given = [name for name in names if name == "brim" or options.peers != "tuned"]
    return given + [f"{name}*" for name in names if name != "brim" and options.peers != "given"]


def tune_peer(
    name: str, results: Json, options: argparse.Namespace, setting: Json, folder: Path, group: Clients
) -> None:
    """Choose how many requests it may hold: the number with which most answers come in time."""
    useful = results["capacity_per_s"] * results["limit_s"]
    tried: dict[int, float] = {}
    for held in sorted({max(1, round(share * useful)) for share in HELD}):
        results.setdefault("tuned", {})[name] = {"capacity": held}
        with start_other(name, results, options, setting, folder) as target:
            one_by_one(target, max(8, len(target.requests)))
            run = group.run(target, PROBE_LOAD * results["capacity_per_s"], PROBE_S, results["limit_s"], 99)
        tried[held] = run["goodput_per_s"]
        tell(f"{name}, {held} held at most: {tried[held]:.1f}/s in time at {PROBE_LOAD:g} ×")
    results["tuned"][name] = {"capacity": max(tried, key=lambda held: tried[held]), "tried": tried}


def measure_server(results: Json, name: str, target: Target, group: Clients, options: argparse.Namespace) -> None:
    """Idle latency, then the whole curve."""
    found, direct = results["servers"][name], results["direct"]
    one_by_one(target, len(target.requests))
    asked = one_by_one(target, max(IDLE_REQUESTS, 2 * len(target.requests)))
    answers = {number: body for number, (_, status, body) in enumerate(asked) if status == 200}
    if not answers:
        raise ValueError(f"it is idle and refuses: {asked[0][1]} {asked[0][2][:300]!r}")
    found["idle_ms"] = 1000 * statistics.median(asked[number][0] for number in answers)
    found["idle_refused"] = len(asked) - len(answers)
    polygons = {number: len(json.loads(body)["features"]) for number, body in answers.items()}
    found["same_answers"] = all(
        direct["polygons"][number % len(target.requests)] == count for number, count in polygons.items()
    )
    words = f"{'equal' if found['same_answers'] else 'DIFFER'}, {found['idle_refused']} of {len(asked)} refused"
    tell(f"{name}: idle {found['idle_ms']:.1f} ms, answers {words}")
    found["loads"] = {}
    for seed, load in enumerate(options.loads):
        settle(target, found["idle_ms"] / 1000)
        run = group.run(target, load * results["capacity_per_s"], options.seconds, results["limit_s"], seed)
        found["loads"][str(load)] = run
        tell(f"{name} at {load} ×: {run['goodput_per_s']:.1f}/s of {run['offered_per_s']:.1f}/s, {run['errors'] or ''}")


def settle(target: Target, idle_s: float) -> None:
    """Wait until what was left of the last load is done."""
    end_s, quick = time.monotonic() + SETTLE_S, 0
    while quick < 3 and time.monotonic() < end_s:
        ((seconds, status, _),) = one_by_one(target, 1)
        quick = quick + 1 if status == 200 and seconds < 1.5 * idle_s + 0.01 else 0


# What is served


def prepare(results: Json, options: argparse.Namespace, folder: Path) -> Json:
    """Weights, images and the setting that all processes read."""
    images = folder / "images"
    images.mkdir()
    for index in range(16 if options.on_gpu else 8):
        pixels, _ = make_cells(11, index, options.size, options.size)
        suffix, quality = (".jpg", [cv2.IMWRITE_JPEG_QUALITY, 95]) if options.images == "jpeg" else (".png", [])
        (images / f"{index:02d}{suffix}").write_bytes(bytes(cv2.imencode(suffix, pixels[..., ::-1], quality)[1]))
    setting = {
        "network": options.network,
        "weights": str(options.weights or trained(results, options, folder)),
        "device": options.device,
        "batch_sizes": str(folder / FILE_NAME),
        "size": options.size,
        "images": str(images),
        "cores": options.model_cores,
        "tune_seconds": options.tune_seconds,
        "repeats": options.repeats,
    }
    (folder / "setting.json").write_text(json.dumps(setting))
    return setting


def trained(results: Json, options: argparse.Namespace, folder: Path) -> Path:
    """A file of weights that find cells: random ones would find thousands of specks."""
    file = folder / "weights.safetensors"
    if not options.train_epochs:
        save_weights(create_model(options.network), file, {})
        return file
    tell(f"training {options.network}")
    side, rate = (256, 3e-4) if options.on_gpu else (128, 3e-3)
    write_cells(folder / "train", folder / "masks", 96, 1, 2 * side, 2 * side)
    config = SegmentTrainConfig(
        model=options.network, size=side, epochs=options.train_epochs, batch_size=8, learning_rate=rate
    )
    began_s = time.perf_counter()
    report = train(folder / "train", folder / "masks", config, folder / "run", device=options.device).to_json()
    results["trained"] = {"iou": report["iou"], "seconds": time.perf_counter() - began_s}
    if options.on_gpu:
        torch.cuda.empty_cache()
    return Path(report["weights"])


def image_files(setting: Json) -> list[bytes]:
    """The files that are sent."""
    return [path.read_bytes() for path in sorted(Path(setting["images"]).iterdir())]


# Servers

Start = Callable[[str, Json, argparse.Namespace, Json, Path], Iterator[Target]]


@contextmanager
def start_brim(name: str, results: Json, options: argparse.Namespace, setting: Json, folder: Path) -> Iterator[Target]:
    """`brim serve` as people start it, with the network registered."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (data / FILE_NAME).write_bytes(Path(setting["batch_sizes"]).read_bytes())
    add = [sys.executable, "-m", "brim", "models", "add", MODEL, setting["weights"], "--data", str(data)]
    subprocess.run([*add, "--network", options.network], check=True, stdout=subprocess.DEVNULL)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if options.on_gpu else ""
    words = ["--predict-memory", str(options.predict_memory)]
    with serving(data, arguments=words, CUDA_VISIBLE_DEVICES=visible) as service:
        patient = brim_target(service, setting, 1000 * START_S)
        await_warm(service, patient)
        if options.model_cores:
            pin(service.children()["predict"], set(options.model_cores))
        one_by_one(patient, max(8, len(patient.requests)))  # what this shape takes on these cores is learned
        before = service.metrics("brim_predict_")
        yield brim_target(service, setting, 1000 * results["limit_s"])
        counted = service.metrics("brim_predict_")
        results["servers"][name]["counted"] = {
            metric: round(value - before.get(metric, 0.0), 4)
            for metric, value in counted.items()
            if value != before.get(metric, 0.0) and ("_bucket" not in metric or "batch_size" in metric)
        }


def brim_target(service: Service, setting: Json, deadline_ms: float) -> Target:
    """Requests with a deadline."""
    headers = {"Authorization": f"Bearer {service.token}", "Brim-Deadline-Ms": str(math.floor(deadline_ms))}
    made = [form_bytes("/api/segment", "file", file, {"model": MODEL}, headers) for file in image_files(setting)]
    return Target(service.port, made)


def await_warm(service: Service, target: Target) -> None:
    """A model loads with its first request; every size of batch is tried before it counts as warm."""
    end_s = time.monotonic() + START_S
    while True:
        ((_, status, body),) = one_by_one(Target(target.port, target.requests[:1]), 1, START_S)
        models = service.ask("GET", "/api/models")["models"]
        if status == 200 and models[0]["state"] == "warm":
            return
        if time.monotonic() > end_s:
            raise TimeoutError(f"not warm after {START_S:.0f} s: {models}, {status} {body[:300]!r}")
        time.sleep(0.5)


@contextmanager
def start_other(name: str, results: Json, options: argparse.Namespace, setting: Json, folder: Path) -> Iterator[Target]:
    """One of the others, in a process group of its own that is ended with the block."""
    server = name.removesuffix("*")
    limits = other_limits(results, name, options)
    results.setdefault("others", {})[name] = limits
    file = folder / f"{server}.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file.write_text(json.dumps(setting | limits | {"port": port}))
    env = {**os.environ, "BRIM_BENCH_SETTING": str(file), "OMP_NUM_THREADS": "1" if options.model_cores else ""}
    paths = [os.environ.get("PYTHONPATH"), str(HERE), str(options.others) if options.others else None]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env = {key: value for key, value in env.items() if value}
    command = [sys.executable, str(HERE / f"serve_{server}.py")]
    with (folder / f"{server}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, process_group=0)
    target = other_target(server, port, image_files(setting))
    try:
        await_answer(process, target, folder / f"{server}.log")
        yield target
    finally:
        end_group(process)
        for left in Path("/dev/shm").glob("brim-bench-*"):
            left.unlink(missing_ok=True)


def other_limits(results: Json, name: str, options: argparse.Namespace) -> Json:
    """What the others are told: the largest batch that a request can wait for twice, and the limit itself.

    With a star, the time after which they give up leaves room for the answer: then what they begin is of use.
    """
    direct, limit_ms = results["direct"], 1000 * results["limit_s"]
    rest_ms = direct["direct_ms"]["median"] - direct["forward_ms"]["1"]
    fitting = [int(size) for size, ms in direct["forward_ms"].items() if 2 * ms + rest_ms <= limit_ms]
    batch = max(fitting, default=1)
    room_ms = 1.2 * (direct["forward_ms"][str(batch)] + rest_ms) if name.endswith("*") else 0.0
    threads = max(1, (os.cpu_count() or 1) * 3 // 8) if options.on_gpu else 1
    capacity = results["tuned"][name]["capacity"] if name.endswith("*") else 1024
    return {
        "batch_size": batch,
        "wait_ms": options.wait_ms,
        "timeout_s": (limit_ms - room_ms) / 1000,
        "capacity": capacity,
        "threads": threads,
        "api_servers": default_api_processes() if options.on_gpu else 1,
    }


def other_target(server: str, port: int, files: list[bytes]) -> Target:
    """Requests in the form each of them takes."""
    if server == "litserve":
        return Target(port, [form_bytes("/predict", "request", file, {}, {}) for file in files])
    path = "/inference" if server == "mosec" else "/"
    kind = {"Content-Type": "application/octet-stream"}
    return Target(port, [request_bytes(path, file, kind) for file in files])


def await_answer(process: "subprocess.Popen[bytes]", target: Target, log: Path) -> None:
    """Wait for the first good answers."""
    end_s, status = time.monotonic() + START_S, 0
    while status != 200:
        try:
            ((_, status, _),) = one_by_one(target, 1)
        except (OSError, TimeoutError, ValueError):
            time.sleep(0.3)
        if process.poll() is not None or time.monotonic() > end_s:
            raise TimeoutError(f"it did not start: {log.read_text(errors='replace')[-1500:]}")


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process with all it started."""
    for word in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, word)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


START = {"brim": start_brim, "litserve": start_other, "mosec": start_other, "ray": start_other}


def version_of(name: str, options: argparse.Namespace) -> str | None:
    """The version of a package, here or in the others' folder."""
    found = sorted(options.others.glob(f"{name}-*.dist-info")) if options.others else []
    return found[-1].name.removesuffix(".dist-info").partition("-")[2] if found else installed(name)


if __name__ == "__main__":
    main()
