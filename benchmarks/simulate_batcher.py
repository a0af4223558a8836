"""What share of a device's capacity does the batch policy serve in time, from half to three times that load?

No device and no clock: the policy that serves runs in a simulation (batch_simulation.py), beside two that
most servers do: let everything in and run what waits, and the same with a window in which a batch fills. The limit is
three times the latency of a single request; goodput counts the answers within it; refusals do not count.
"""

import argparse
import json

from batch_simulation import CPU, H200, Bench, Greedy, Outcome, Policy, brim_policy, simulate

BENCHES = {"h200": H200, "cpu": CPU}
LOADS = (0.05, 0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0)


def main() -> None:
    """Print a table for each device and policy, then one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=BENCHES, help="only this one")
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated time of each point")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=3.0, help="times the single latency")
    parser.add_argument("--policy", help="only this one")
    options = parser.parse_args()
    results = []
    for name, bench in BENCHES.items():
        if options.device in (None, name):
            results += curve(name, bench, options)
    print(json.dumps(results))


def curve(name: str, bench: Bench, options: argparse.Namespace) -> list[dict[str, float | str]]:
    """All policies at all loads on one device."""
    limit_s = options.limit * bench.single_s
    print(f"{name}: capacity {bench.capacity():.1f}/s, limit {limit_s * 1e3:.1f} ms")
    rows = []
    for policy in ("brim", "everything in", "window 5 ms"):
        if options.policy not in (None, policy):
            continue
        print(f"{policy:>14}  load  goodput  of cap    p50    p99  worst  refused  late  expired  busy  batch")
        for load in LOADS:
            rate = load * bench.capacity()
            done = simulate(
                bench,
                make(policy, bench),
                rate=rate,
                seconds=options.seconds,
                limit_s=limit_s,
                seed=options.seed,
            )
            rows.append(row(name, policy, load, bench, done))
    return rows


def make(policy: str, bench: Bench) -> Policy:
    """A policy by its name in the table."""
    if policy == "brim":
        return brim_policy(bench)
    return Greedy(max(bench.seconds), 0.005 if policy.startswith("window") else 0.0)


def row(name: str, policy: str, load: float, bench: Bench, done: Outcome) -> dict[str, float | str]:
    """One point of a curve, printed."""
    share = done.goodput / bench.capacity()
    batch = sum(size * count for size, count in done.batches.items()) / max(1, sum(done.batches.values()))
    p50, p99 = done.percentile_s(0.5) * 1e3, done.percentile_s(0.99) * 1e3
    print(
        f"{'':14} {load:5.2f} {done.goodput:8.1f} {share:7.1%} {p50:6.1f} {p99:6.1f} {done.worst:6.2f} "
        f"{done.refused:8d} {done.late:5d} {done.expired:8d} {done.busy_s / done.seconds:5.2f} {batch:6.2f}"
    )
    return {
        "device": name,
        "policy": policy,
        "load": load,
        "goodput": round(done.goodput, 2),
        "share_of_capacity": round(share, 4),
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "worst_of_limit": round(done.worst, 3),
        "refused": done.refused,
        "late": done.late,
        "expired": done.expired,
    }


if __name__ == "__main__":
    main()
