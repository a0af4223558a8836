"""The policy through minutes of load on paper: what the speed goals of prediction ask of it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from batch_simulation import CPU, H200, Bench, Outcome, Policy, brim_policy, simulate

BENCHES = {"h200": H200, "cpu": CPU}
SECONDS = {"h200": 5.0, "cpu": 40.0}
SEEDS = (11, 12)  # the rules were tuned on others


def run(name: str, load: float, seed: int, policy: Policy | None = None, bench: Bench | None = None) -> Outcome:
    bench = bench or BENCHES[name]
    return simulate(
        bench,
        policy or brim_policy(bench),
        rate=load * bench.capacity(),
        seconds=SECONDS[name],
        limit_s=3 * bench.single_s,
        seed=seed,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", BENCHES)
def test_overload_keeps_goodput_near_the_capacity_and_accepted_requests_in_time(name, seed):
    curve = {load: run(name, load, seed) for load in (1.2, 1.5, 2.0, 3.0)}
    peak = max(done.goodput for done in curve.values())

    assert peak >= 0.9 * BENCHES[name].capacity()
    assert curve[3.0].goodput >= 0.9 * peak
    for done in curve.values():
        assert done.worst <= 1.10
        assert done.late <= 0.02 * len(done.latencies_s)


def test_a_device_that_slows_down_by_half_is_learned():
    policy = brim_policy(H200)
    slow = replace(H200, seconds={size: 1.5 * seconds for size, seconds in H200.seconds.items()})
    done = simulate(slow, policy, rate=800.0, seconds=5.0, limit_s=3 * slow.single_s, seed=SEEDS[0], warmup_s=1.0)

    assert done.goodput >= 0.85 * slow.capacity()
    assert done.worst <= 1.10


@pytest.mark.parametrize(
    ("bench", "most"),
    [
        pytest.param(replace(H200, decoders=2), 200, id="decoding"),
        pytest.param(replace(H200, finishers=2, finish_s=0.006), 333, id="finishing"),
    ],
)
def test_pools_that_are_the_limit_are_seen_at_the_door(bench, most):
    policy = brim_policy(bench)
    done = simulate(bench, policy, rate=3.0 * most, seconds=5.0, limit_s=3 * bench.single_s, seed=SEEDS[0])

    assert done.goodput >= 0.9 * most
    assert done.worst <= 1.10
