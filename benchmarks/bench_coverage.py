"""Do the regions of a position hold what they say?

Draws networks, transmitters and measurement errors, locates each without a run and counts how often the true place is
inside the 50, 90 and 95 % regions, in cases that ellipses of least squares get wrong: unknown power, one wrong clock,
three stations, bandwidths from 300 Hz to 150 kHz, strength alone. Prints a table, then one JSON line.

    .venv/bin/python benchmarks/bench_coverage.py --draws 1000
"""

import argparse
import json
import math
import time
from typing import Any

import numpy as np

from brim.rf.location.answers import settled
from brim.rf.location.posterior import LEVELS
from brim.rf.location.regions import inside_level, modes_of
from brim.rf.location.sightings import prepare_sightings
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef, geodesic_m

SOUTH, NORTH, WEST, EAST = 44.0, 46.0, 7.0, 10.0
SHADOWING_DB, SNR_DB, SECONDS = 6.0, 15.0, 1.0
CASES: dict[str, dict[str, Any]] = {
    "seven stations": {"num": 7},
    "four stations": {"num": 4},
    "three stations": {"num": 3},
    "one wrong clock of seven": {"num": 7, "wrong": True},
    "one wrong clock of five": {"num": 5, "wrong": True},
    "one wrong clock of four": {"num": 4, "wrong": True},
    "300 Hz": {"num": 5, "bandwidth_hz": 300.0},
    "3 kHz": {"num": 5, "bandwidth_hz": 3e3},
    "30 kHz": {"num": 5, "bandwidth_hz": 30e3},
    "150 kHz": {"num": 5, "bandwidth_hz": 150e3},
    "300 Hz, three stations": {"num": 3, "bandwidth_hz": 300.0},
    "150 kHz, three stations": {"num": 3, "bandwidth_hz": 150e3},
    "strength alone": {"num": 7, "timed": False},
}


def draw(
    rng: np.random.Generator, *, num: int, bandwidth_hz: float = 5e3, wrong: bool = False, timed: bool = True
) -> tuple[dict[str, Any], tuple[float, float], str | None]:
    """A document of observations, the true place, and the name of the station with the wrong clock."""
    lat, lon = rng.uniform(SOUTH, NORTH, num), rng.uniform(WEST, EAST, num)
    alt = rng.uniform(0, 600, num)
    edge = 0.0 if rng.random() < 0.7 else 0.5
    place = rng.uniform(lat.min() - edge, lat.max() + edge), rng.uniform(lon.min() - edge, lon.max() + edge)
    antennas = np.stack(ecef(lat, lon, alt + 30), -1)
    there = np.array(ecef(*(np.array(v) for v in (*place, rng.uniform(0, 600) + 2))))
    distance = np.linalg.norm(antennas - there, axis=-1)
    power = rng.uniform(10, 60)  # dBm, not told
    strength = power - 75.7 - 30 * np.log10(distance / 1e3) + rng.normal(0, SHADOWING_DB, num)
    rms_hz, snr = bandwidth_hz / math.sqrt(12), 10 ** (SNR_DB / 10)
    noise_us = 1e6 / (2 * math.pi * rms_hz * math.sqrt(2 * bandwidth_hz * SECONDS * snr))
    sigma = np.hypot(noise_us * rng.uniform(0.7, 2.0, num), 0.5)  # of each station; clocks included
    arrival = distance / SPEED_OF_LIGHT * 1e6 + rng.normal(0, sigma)
    bad = int(rng.integers(num)) if wrong else None
    if bad is not None:
        arrival[bad] += rng.choice([-1, 1]) * 10 ** rng.uniform(1.3, 2.5)  # 20 to 300 µs
    names = [f"S{n}" for n in range(num)]
    stations = [
        {"name": name, "lat": lat[n], "lon": lon[n], "alt": alt[n], "strength_db": strength[n], "snr_db": SNR_DB,
         "strength_absolute": True}
        for n, name in enumerate(names)
    ]  # fmt: skip
    pairs = [
        {"reference": names[a], "station": names[b], "difference_us": arrival[b] - arrival[a],
         "sigma_us": math.hypot(sigma[a], sigma[b])}
        for a in range(num) for b in range(a + 1, num)
    ]  # fmt: skip
    document = {"stations": stations, "pairs": pairs if timed else []}
    return document, place, None if bad is None else names[bad]


def measure(case: dict[str, Any], draws: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    inside, errors, areas, named, false, seconds = [], [], [], 0, 0, 0.0
    for _ in range(draws):
        document, place, bad = draw(rng, **case)
        start = time.perf_counter()
        (prepared,) = prepare_sightings(document)
        _, posterior, gone = settled(prepared)
        seconds += time.perf_counter() - start
        inside.append([inside_level(posterior, *place)[level] for level in LEVELS])
        best = modes_of(posterior)[0]
        errors.append(float(geodesic_m(*(np.array(v) for v in (best.lat, best.lon, *place)))))
        areas.append(posterior.region_m2["95"] / 1e6)
        left_out = [entry["name"] for entry in prepared.left_out] + [name for name, *_ in gone]
        named += bad is not None and left_out[:1] == [bad]
        false += any(name != bad for name in left_out)
    shares = np.mean(inside, 0)
    return {
        **{level: float(share) for level, share in zip(LEVELS, shares, strict=True)},
        "median_error_km": float(np.median(errors)) / 1e3,
        "median_region_km2": float(np.median(areas)),
        "named": named / draws if case.get("wrong") else None,
        "wrongly_named": false / draws,
        "ms": 1e3 * seconds / draws,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", action="append")
    options = parser.parse_args()
    results = {}
    print(
        "| case | in 50 % | in 90 % | in 95 % | error, km | 95 % region, km² | wrong clock named | others named | ms |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.case or CASES:
        one = results[name] = measure(CASES[name], options.draws, options.seed)
        shares = " | ".join(f"{100 * one[level]:.1f}" for level in LEVELS)
        named = "" if one["named"] is None else f"{100 * one['named']:.0f} %"
        print(
            f"| {name} | {shares} | {one['median_error_km']:.3g} | {one['median_region_km2']:.3g} | {named} "
            f"| {100 * one['wrongly_named']:.1f} % | {one['ms']:.0f} |",
            flush=True,
        )
    print(json.dumps({"draws": options.draws, "seed": options.seed, "cases": results}))


if __name__ == "__main__":
    main()
