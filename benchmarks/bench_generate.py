"""How many accepted samples a second does `brim rf generate` make, and how close is that to what the device can do?

One process measures, in this order:
1. the whole command (scenes, signals, features, shards on disk), repeated, with a preset, a memory limit and raw IQ;
2. its compute stage alone; on a GPU kernel by kernel, against the bytes that must move and the measured bandwidth;
3. the naive way: the same code one record at a time, copied back to the host each time;
4. on a CPU, what one would use instead: Sionna's tapped-delay-line channel with noise (`pip install 'brim[bench]'`).

A record is one receiver's second of IQ, 200 000 complex samples; a sample has one record per present receiver.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from brim.engine.device import format_size, parse_size, resolve_device, worker_count
from brim.rf import GenerateConfig, generate, preset
from brim.rf.config import CHANNEL_HZ, NUM_CHUNKS, SAMPLE_RATE_HZ
from brim.rf.features import FeatureGrid
from brim.rf.generation.backend import Backend, Transmissions, make_transmissions, open_backend
from brim.rf.physics.channel import fading_points
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.receiver import floor_samples
from brim.rf.physics.scene import (
    COHERENCE_TIME_S,
    DOPPLER_TIMES_COHERENCE,
    ECHO_DELAY_S,
    NUM_PATHS,
    make_scenes,
    max_baseline_m,
)
from brim.rf.physics.waveform import channel_points, table_points
from page import Json, facts_of, installed, machine, markdown, number, ranged, spread, table, tell

MEMORY = "1GiB"  # the limit of the run that must keep to it
CALLS = 5  # of the compute stage per trial, back to back
COPY_BYTES = 1 << 30  # of the copy that measures the bandwidth
SIONNA_PROFILE = "D30"  # the profile with the fewest taps, ten: the kindest choice
SIONNA_BATCHES = (1, 2)
SIONNA_SNR_DB = 20.0


def main() -> None:
    """Measure, print a table and one JSON line; what was measured is told even when a later part fails."""
    options = parse_options()
    device = resolve_device(options.device)
    samples = options.samples or (100_000 if device.type == "cuda" else 64)
    results: Json = {
        "question": "samples per second of brim rf generate",
        "machine": machine(device, options.commit),
        "command": f"python benchmarks/bench_generate.py --device {device} --samples {samples} "
        f"--repeats {options.repeats}",
    }
    try:
        measure(results, device, samples, options.repeats)
    finally:
        line = json.dumps(results)
        print(render(results), line, sep="\n")
        if options.json_out:
            options.json_out.write_text(line + "\n", encoding="utf-8")
        if options.markdown:
            options.markdown.write_text(page(results, line), encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--samples", type=int, default=0, help="accepted samples per run; 100000 on a GPU, 64 on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each measurement")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--json-out", type=Path, help="file for the JSON line")
    parser.add_argument("--markdown", type=Path, help="file for the page of results")
    options = parser.parse_args()
    if options.samples < 0 or options.repeats < 1:
        parser.error(f"--samples {options.samples} and --repeats {options.repeats} must be positive")
    return options


def measure(results: Json, device: torch.device, samples: int, repeats: int) -> None:
    """Fill in the results part by part."""
    config, on_gpu = GenerateConfig(), device.type == "cuda"
    tell("warm-up")
    run_command(config, 4_096 if on_gpu else 4, device)
    results["whole"] = whole_command(config, samples, device, repeats)
    results["compute"] = compute_alone(config, results["whole"]["batch_size"], device, repeats)
    rate = results["whole"]["iq_per_s"]["median"]
    results["naive"] = one_at_a_time(config, 128 if on_gpu else 24, device, repeats, iq=False)
    results["naive"]["ratio"] = rate / results["naive"]["iq_per_s"]["median"]
    if on_gpu:
        results["kernels"] = kernels(config, results["compute"], device)
        results["naive_iq"] = one_at_a_time(config, 128, device, repeats, iq=True)
        results["naive_iq"]["ratio"] = rate / results["naive_iq"]["iq_per_s"]["median"]
    results["cases"] = cases(config, samples, device)
    if not on_gpu:
        results["sionna"] = sionna(config, repeats)
        if "iq_per_s" in results["sionna"]:
            results["sionna"]["ratio"] = rate / results["sionna"]["iq_per_s"]["median"]


class Clock:
    """Wall time of a block, and how many cores it got: fewer than it has threads where others load the machine."""

    def __enter__(self) -> Self:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._began[0]
        self.cores_used = (time.process_time() - self._began[1]) / self.wall_s


# The whole command


def whole_command(config: GenerateConfig, samples: int, device: torch.device, repeats: int) -> Json:
    """The command repeated: medians and spread of its rates, and the last run's accounts."""
    runs = []
    for turn in range(repeats):
        tell(f"whole command, {samples} samples, run {turn + 1} of {repeats}")
        runs.append(run_command(config, samples, device))
    names = ("samples_per_s", "iq_per_s", "ceiling_share", "wall_s")
    spreads = {name: spread([run[name] for run in runs]) for name in names}
    cores_used = statistics.median(run["cores_used"] for run in runs)
    peak_bytes = max(run["peak_bytes"] for run in runs)
    return runs[-1] | spreads | {"peak_bytes": peak_bytes, "cores_used": cores_used, "runs": repeats}


def cases(config: GenerateConfig, samples: int, device: torch.device) -> dict[str, Json]:
    """The command once in other settings."""
    on_gpu = device.type == "cuda"
    out = {}
    tell("production preset")
    out["production"] = run_command(preset("production"), samples, device)
    tell(f"--memory {MEMORY}")
    limited = run_command(config, max(1, samples // (5 if on_gpu else 2)), device, parse_size(MEMORY))
    out[f"memory {MEMORY}"] = limited | {"kept": limited["peak_bytes"] <= parse_size(MEMORY)}
    tell("iq_raw")
    out["iq_raw"] = run_command(replace(config, dataset_type="iq_raw"), 256 if on_gpu else 16, device)
    return out


def run_command(config: GenerateConfig, samples: int, device: torch.device, memory: int | None = None) -> Json:
    """One run into a directory of its own; wall_s also counts opening, compiling and measuring the ceiling."""
    with tempfile.TemporaryDirectory(prefix="brim-bench-") as folder:
        with Clock() as clock:
            report = generate(config, Path(folder) / "dataset", samples, device=device, memory=memory)
        disk_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    out = report.as_dict()
    del out["dataset"]
    return out | {"wall_s": clock.wall_s, "cores_used": clock.cores_used, "disk_bytes": disk_bytes}


# The compute stage alone


def compute_alone(config: GenerateConfig, batch: int, device: torch.device, repeats: int) -> Json:
    """The compute stage on one batch, over and over: nothing prepared, copied back or written."""
    tell(f"compute stage alone, {batch} samples")
    work = make_batch(config, batch)
    with open_backend(config, device) as backend:
        seconds = [time_calls(lambda: backend.measure(work, iq=False), device) for _ in range(repeats + 1)][1:]
    return {
        "batch_size": len(work),
        "records": len(work.links),
        "samples_per_s": spread([len(work) / s for s in seconds]),
        "iq_per_s": spread([len(work.links) / s for s in seconds]),
    }


def make_batch(config: GenerateConfig, size: int) -> Transmissions:
    """The first accepted samples, as many as there are among twice as many attempts."""
    scenes = make_scenes(config, np.arange(2 * size))
    return make_transmissions(config, scenes[scenes.accepted][:size])


def time_calls(call: Callable[[], object], device: torch.device) -> float:
    """Seconds per call, of several back to back."""
    if device.type != "cuda":
        began_s = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - began_s) / CALLS
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / CALLS


def kernels(config: GenerateConfig, compute: Json, device: torch.device) -> Json:
    """Device time and least traffic of each kernel, per record, against the time of the traffic alone."""
    tell("kernel by kernel")
    work = make_batch(config, compute["batch_size"])
    bandwidth = copy_bandwidth(device)
    moved = traffic(config, len(work.links) / len(work))
    device_us = kernel_times(config, work, device, list(moved))
    rows = {
        name: {
            "us": device_us.get(name, 0.0),
            "bytes": moved.get(name, 0.0),
            "floor_us": moved.get(name, 0.0) / bandwidth * 1e6,
        }
        for name in sorted(device_us | moved, key=lambda n: -device_us.get(n, 0.0))
    }
    record_us = 1e6 / compute["iq_per_s"]["median"]
    floor_us = sum(moved.values()) / bandwidth * 1e6
    return {
        "bandwidth_bytes_per_s": bandwidth,
        "bytes_per_record": sum(moved.values()),
        "record_us": record_us,
        "floor_us": floor_us,
        "floor_samples_per_s": 1e6 / floor_us * len(work) / len(work.links),
        "floor_share": floor_us / record_us,
        "busy_share": sum(device_us.values()) / record_us,
        "by_kernel": rows,
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy within the device, reading and writing counted; the best of several."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(time_calls(lambda: target.copy_(source), device) for _ in range(6))
    return 2 * COPY_BYTES / seconds


def kernel_times(
    config: GenerateConfig, work: Transmissions, device: torch.device, names: list[str]
) -> dict[str, float]:
    """Microseconds of device time per record by kernel; empty where the profiler may not look."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with open_backend(config, device) as backend:
        backend.measure(work, iq=False)
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(CALLS):
                backend.measure(work, iq=False)
            torch.cuda.synchronize(device)
    out: dict[str, float] = {}
    for event in profile.key_averages():
        if event.device_type.name == "CUDA":  # not the host's launches, which repeat the time
            name = kernel_group(event.key, names)
            out[name] = out.get(name, 0.0) + event.self_device_time_total / CALLS / len(work.links)
    return out


def kernel_group(event: str, names: list[str]) -> str:
    """One of our kernels by its name, and the libraries' by what they do."""
    if "Memcpy" in event or "Memset" in event:
        return "copies"
    if "fft" in event.lower():
        return "fft"
    return next((name for name in names if event.startswith(name)), "torch")


def traffic(config: GenerateConfig, records_per_sample: float) -> dict[str, float]:
    """Bytes per record that each kernel must read and write: its inputs and outputs once, shared ones shared."""
    grid = FeatureGrid.of(config, max_baseline_m(config))
    table = table_points(config) * 4 / records_per_sample  # one for all records of a sample
    gain = NUM_PATHS * fading_points(config) * 8
    signal = channel_points(config) * 8  # 50 kHz
    iq = config.num_samples_iq * 8  # 200 kHz
    stream = NUM_CHUNKS * grid.points * 8  # 25 kHz; so are the noiseless signal and either spectrum
    channel = stream * grid.bins // grid.points  # the spectrum's part that is read
    band = NUM_CHUNKS * (grid.timing[1] - grid.timing[0]) * 8
    places = floor_samples(config.num_samples_iq)
    segments = places.numel() * 8  # of the noise floor
    real, half_spectrum = stream // 2, NUM_CHUNKS * (grid.points // 2 + 1) * 8
    return {
        "message_kernel": table,
        "fading_kernel": gain,
        "channel_kernel": table + gain + signal + stream,
        "record_kernel": signal + iq,
        "tune_kernel": iq + stream,
        "segment_kernel": 2 * segments,
        "floor_kernel": segments,
        "align_kernel": real + real / records_per_sample + stream,
        "unpack_kernel": 4 * band,
        "truth_kernel": channel,
        "spectrum_kernel": channel,
        "envelope_kernel": stream + real,
        "arrival_kernel": 3 * band + band / records_per_sample,  # rough, then aligned
        # noiseless, noisy and aligned in and out, demodulated in and out, segments in and out
        "fft": 6 * stream + real + half_spectrum + 2 * segments,
        "torch": 2 * band,  # the timing band cut out; what is per chunk does not count beside it
    }


# The naive way


def one_at_a_time(config: GenerateConfig, num: int, device: torch.device, repeats: int, *, iq: bool) -> Json:
    """The same code, a record per call on one thread, its results on the host before the next begins."""
    tell(f"one record at a time, {num} records")
    works = single_records(config, num)
    clocks = []
    with single_backend(config, device) as backend:
        for _ in range(repeats + 1):
            with Clock() as clock:
                for work in works:
                    backend.measure(work, iq=iq).to("cpu")
            clocks.append(clock)
    return {"records": len(works)} | rates(clocks[1:], len(works))


def rates(clocks: list[Clock], num_records: int) -> Json:
    """Records per second over the trials."""
    return {
        "iq_per_s": spread([num_records / clock.wall_s for clock in clocks]),
        "cores_used": statistics.median(clock.cores_used for clock in clocks),
    }


def single_records(config: GenerateConfig, num: int) -> list[Transmissions]:
    """Works of one sample with one present receiver each."""
    scenes = make_scenes(config, np.arange(num))
    scenes = scenes[scenes.accepted]
    works = []
    for row, receiver in np.argwhere(scenes.present)[:num].tolist():
        present = np.zeros((1, scenes.present.shape[1]), bool)
        present[0, receiver] = True
        works.append(make_transmissions(config, replace(scenes[row : row + 1], present=present)))
    return works


@contextmanager
def single_backend(config: GenerateConfig, device: torch.device) -> Iterator[Backend]:
    """The backend with one thread, or on a GPU with FFTs of one record instead of tiles padded from one."""
    if device.type != "cuda":
        with open_backend(config, device, workers=1) as backend:
            yield backend
        return
    from brim.rf.generation.cuda import CudaBackend  # needs Triton

    class SingleRecords(CudaBackend):
        @property
        def _tile(self) -> int:
            return NUM_CHUNKS

    yield SingleRecords(config, device)


# What one would use instead


def sionna(config: GenerateConfig, repeats: int) -> Json:
    """Records per second of Sionna's TDL channel and noise on all cores, no features; its best batch."""
    tell("sionna's tapped delay line")
    keep_memory()
    torch.set_num_threads(worker_count())
    try:
        found = {batch: sionna_rates(config, batch, repeats) for batch in SIONNA_BATCHES}
    except ImportError as error:
        return {"skipped": f"sionna does not import ({error}): pip install 'brim[bench]'"}
    except (RuntimeError, TypeError, ValueError) as error:
        return {"skipped": f"sionna failed: {type(error).__name__}: {error}"}
    best = max(found, key=lambda batch: float(found[batch]["iq_per_s"]["median"]))
    about = {"version": installed("sionna-no-rt"), "profile": SIONNA_PROFILE, "batch_size": best}
    return about | found[best]


def sionna_rates(config: GenerateConfig, batch: int, repeats: int) -> Json:
    """Records per second with one batch: fading as ours, echoes up to 5 µs, noise over the sampled band."""
    from sionna.phy.channel import TimeChannel
    from sionna.phy.channel.tr38901 import TDL

    num, carrier_hz = config.num_samples_iq, config.frequency_mhz * 1e6
    slow, fast = (DOPPLER_TIMES_COHERENCE / t * SPEED_OF_LIGHT / carrier_hz for t in reversed(COHERENCE_TIME_S))
    paths = TDL(SIONNA_PROFILE, carrier_frequency=carrier_hz, min_speed=slow, max_speed=fast, device="cpu")
    channel = TimeChannel(
        paths,
        bandwidth=float(SAMPLE_RATE_HZ),
        num_time_samples=num,
        maximum_delay_spread=ECHO_DELAY_S[1],
        device="cpu",
    )
    sent = torch.polar(torch.ones(batch, 1, 1, num), torch.randn(batch, 1, 1, num))
    noise = torch.tensor(SAMPLE_RATE_HZ / CHANNEL_HZ / 10 ** (SIONNA_SNR_DB / 10))
    clocks = []
    for _ in range(repeats + 1):
        with torch.no_grad(), Clock() as clock:
            channel(sent, noise)
        clocks.append(clock)
    return rates(clocks[1:], batch)


def keep_memory() -> None:
    """Have glibc keep what is freed, so that Sionna's large temporaries are not faulted in anew at every call."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


# Telling


def render(results: Json) -> str:
    """All tables there is something for."""
    parts = {"whole": commands_table, "compute": compute_table, "kernels": kernels_table}
    told = [tell_part(results) for name, tell_part in parts.items() if name in results]
    if "whole" in results:
        told.insert(1, stages_table(results))
        told.append(ways_table(results))
    return "\n".join(told)


def commands_table(results: Json) -> str:
    """The whole command in each setting."""
    whole = results["whole"]
    rates = (ranged(whole[name]) for name in ("samples_per_s", "iq_per_s"))
    share = f"{whole['ceiling_share']['median']:.1%}"
    rows = [[f"built-in network, {whole['runs']} runs", *rates, share, *command_cells(whole)]]
    for name, run in results.get("cases", {}).items():
        verdict = {True: " (kept)", False: " (EXCEEDED)"}.get(run.get("kept"), "")
        cells = [f"{name}{verdict}", number(run["samples_per_s"]), number(run["iq_per_s"])]
        rows.append([*cells, f"{run['ceiling_share']:.1%}", *command_cells(run)])
    header = ["whole command", "samples/s", "IQ records/s", "of ceiling", "samples", "batch", "peak", "on disk"]
    return table("Whole command: median (least–most)", [*header, "cores used", "GPU busy", "power"], rows)


def command_cells(run: Json) -> list[str]:
    """What every run of the command shows beside its rates."""
    gpu = run["stages"].get("gpu") or {}
    busy, power_w = gpu.get("utilisation_mean"), gpu.get("power_w_mean")
    return [
        number(run["accepted"]),
        str(run["batch_size"]),
        format_size(run["peak_bytes"]),
        format_size(run["disk_bytes"]),
        f"{run['cores_used']:.2f}",
        "-" if busy is None else f"{busy:.0f}%",
        "-" if power_w is None else f"{power_w:.0f} W",
    ]


def stages_table(results: Json) -> str:
    """Where the threads of the last run of the whole command were."""
    stages = {name: s for name, s in results["whole"]["stages"].items() if name != "gpu"}
    columns = ("busy_s", "wait_input_s", "wait_room_s")
    rows = [[name, *(f"{s[c]:.3f}" for c in columns), f"{s['share']:.1%}"] for name, s in stages.items()]
    header = ["stage", "busy s", "waiting for input s", "waiting for room s", "busy share"]
    return table(f"Stages, of {results['whole']['seconds']:.2f} s, all threads of a stage added", header, rows)


def compute_table(results: Json) -> str:
    """The compute stage alone, and the floor under it where it is known."""
    compute, known = results["compute"], results.get("kernels")
    rows = [["compute stage alone", ranged(compute["samples_per_s"]), ranged(compute["iq_per_s"]), "-"]]
    if known:
        floor, share = known["floor_samples_per_s"], f"compute reaches {known['floor_share']:.1%}"
        rows.append(["if only memory traffic took time", number(floor), number(1e6 / known["floor_us"]), share])
    title = f"Compute stage, batches of {compute['batch_size']} samples, {compute['records']} records"
    return table(title, ["what", "samples/s", "IQ records/s", "share"], rows)


def kernels_table(results: Json) -> str:
    """Kernels by their time."""
    known = results["kernels"]
    total_us = sum(k["us"] for k in known["by_kernel"].values())
    rows = []
    for name, k in known["by_kernel"].items():
        share = f"{k['floor_us'] / k['us']:.0%}" if k["us"] else "-"
        part = f"{k['us'] / total_us:.1%}" if total_us else "-"
        rows.append([name, f"{k['us']:.3f}", part, f"{k['bytes'] / 1e3:.0f}", f"{k['floor_us']:.3f}", share])
    moved, us = known["bytes_per_record"] / 1e3, known["record_us"]
    whole = ["whole stage", f"{us:.3f}", f"kernels {known['busy_share']:.1%}", f"{moved:.0f}"]
    rows.append([*whole, f"{known['floor_us']:.3f}", f"{known['floor_share']:.0%}"])
    header = ["kernel", "µs/record", "share of time", "kB/record", "floor µs", "of bandwidth"]
    speed = known["bandwidth_bytes_per_s"] / 1e12
    return table(f"Kernels; a copy within the device moves {speed:.2f} TB/s, read and written", header, rows)


def ways_table(results: Json) -> str:
    """Other ways to the same records, and how many times as many the whole command makes."""
    names = {
        "naive": "one record at a time, features copied back",
        "naive_iq": "one record at a time, IQ copied back too",
        "sionna": "sionna TDL and noise, no features",
    }
    whole = results["whole"]
    rows = [["brim rf generate", ranged(whole["iq_per_s"]), f"{whole['cores_used']:.2f}", "1"]]
    for key, name in names.items():
        found = results.get(key, {})
        if "ratio" in found:
            batch = f", batch {found['batch_size']}" if "batch_size" in found else ""
            rates_told = ranged(found["iq_per_s"]), f"{found['cores_used']:.2f}"
            rows.append([name + batch, *rates_told, f"{found['ratio']:.1f}"])
        elif "skipped" in found:
            rows.append([name, found["skipped"], "-", "-"])
    return table("Other ways", ["way", "IQ records/s", "cores used", "brim makes × as many"], rows)


def page(results: Json, line: str) -> str:
    """The results as a page of Markdown."""
    facts = facts_of(results, {"sionna-no-rt": results.get("sionna", {}).get("version")})
    about = "A record is one receiver's second of IQ (200 000 complex samples); shards are written to disk."
    return markdown(__doc__ or "", about, facts, render(results), line)


if __name__ == "__main__":
    main()
