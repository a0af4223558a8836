import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from brim.engine.config import BucketConfig, TrainConfig
from brim.engine.rows.buckets import Buckets
from brim.errors import ConfigError

COUNT = BucketConfig(batch_size=64)
FRAMES = BucketConfig(batch_size=None, max_frames=64 * 256)


def log_normal(num: int = 10_000, sigma: float = 0.5, seed: int = 0, mean: int = 250) -> Tensor:
    """Lengths with about this mean, at most twice as long."""
    found = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return torch.from_numpy(found.round().clip(1, 2 * mean).astype(np.int64))


def random_case(seed: int) -> tuple[Tensor, BucketConfig]:
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([1, 9, 60, 500, 20_000]))
    lengths = torch.from_numpy(rng.integers(1, longest + 1, int(rng.choice([1, 2, 30, 700]))))
    multiple = int(rng.choice([0, 1, 8, 50])) or None
    size = int(rng.choice([1, 7, 64, 1000]))
    room = int(rng.choice([1, 3, 70])) * -(-longest // (multiple or 1)) * (multiple or 1)
    sizes = {"batch_size": size} if rng.random() < 0.5 else {"batch_size": None, "max_frames": room}
    waste, buckets = float(rng.choice([0, 0.05, 0.4])), int(rng.choice([1, 4, 16]))
    return lengths, BucketConfig(**sizes, multiple=multiple, max_waste=waste, max_buckets=buckets)


def fingerprint(buckets: Buckets, epoch: int) -> str:
    found = [(batch.length, batch.items.tolist()) for batch in buckets.epoch(epoch)]
    return hashlib.sha256(repr(found).encode()).hexdigest()


# Padding


@pytest.mark.parametrize("config", [COUNT, FRAMES])
@pytest.mark.parametrize("sigma", [0.25, 0.6])
def test_a_log_normal_mix_pads_at_most_a_twentieth(config: BucketConfig, sigma: float) -> None:
    for seed in range(3):
        lengths = log_normal(sigma=sigma, seed=seed)
        buckets = Buckets(lengths, config)
        padded = sum(batch.length * len(batch.items) for batch in buckets.epoch(0))
        assert buckets.padding_share == 1 - int(lengths.sum()) / padded
        assert buckets.padding_share <= 0.05
        assert len(buckets.edges) <= config.max_buckets


@pytest.mark.parametrize("mean", [15, 60])
@pytest.mark.parametrize("sizes", [{"batch_size": 64}, {"batch_size": None, "max_frames": 8192}])
def test_sequences_of_any_mean_pad_at_most_a_twentieth_in_shapes_that_can_be_captured(
    sizes: dict[str, Any], mean: int
) -> None:
    for sigma, num in itertools.product((0.3, 0.5), (20_000, 60_000)):
        buckets = Buckets(log_normal(num, sigma, mean=mean), BucketConfig(**sizes))
        assert buckets.padding_share <= 0.05
        assert len(buckets.shapes) <= TrainConfig().max_graphs
        assert all(edge % buckets.multiple == 0 for edge in buckets.edges)


def test_the_multiple_is_the_largest_that_pads_little_enough() -> None:
    for mean, expected in ((15, 2), (30, 2), (60, 4), (250, 8)):
        lengths = log_normal(mean=mean)
        assert Buckets(lengths, COUNT).multiple == expected
        waste = {num: Buckets(lengths, BucketConfig(multiple=num)).padding_share for num in (1, 2, 4, 8)}
        assert max(num for num, share in waste.items() if share <= 0.05) == expected


def test_no_choice_of_buckets_pads_less_than_the_one_found() -> None:
    rng = np.random.default_rng(0)
    for size, num_buckets in itertools.product((1, 3, 5), (1, 2, 3)):
        line = np.sort(rng.integers(1, 60, 24))[::-1]
        least = min(
            sum(int(part.max()) * len(part) for part in np.split(line, places))
            for num in range(num_buckets)
            for places in itertools.combinations(range(size, 24, size), num)
        )
        config = BucketConfig(batch_size=size, multiple=1, max_buckets=num_buckets, max_waste=0)
        buckets = Buckets(torch.from_numpy(line.copy()), config)
        assert sum(batch.length * len(batch.items) for batch in buckets.epoch(0)) == least


@pytest.mark.parametrize("others", [1, 9, 160, 200])
def test_one_enormous_item_does_not_pad_its_neighbours(others: int) -> None:
    lengths = torch.cat([torch.full((others,), 16), torch.tensor([6000])])
    buckets = Buckets(lengths, COUNT)
    assert buckets.shapes[1, 6000] == 1
    assert (buckets.max_batch_frames, buckets.padding_share) == (6000, 0.0)


# Order


@pytest.mark.parametrize("seed", range(30))
def test_every_item_comes_once_in_a_batch_that_holds_it(seed: int) -> None:
    lengths, config = random_case(seed)
    buckets = Buckets(lengths, config, seed=seed)
    for epoch in range(2):
        batches = buckets.epoch(epoch)
        assert len(batches) == len(buckets) == buckets.num_batches
        assert torch.cat([batch.items for batch in batches]).sort().values.tolist() == list(range(len(lengths)))
        shapes = {(len(batch.items), batch.length) for batch in batches}
        assert shapes == set(buckets.shapes)
        assert len(shapes) <= len(buckets.edges) + 1
        assert max(num for num, _ in shapes) == buckets.batch_size
        for batch in batches:
            assert int(lengths[batch.items].max()) <= batch.length
            assert batch.length in buckets.edges
            assert batch.length % buckets.multiple == 0
            assert len(batch.items) <= (config.batch_size or (config.max_frames or 0) // batch.length)


@pytest.mark.parametrize("config", [COUNT, FRAMES])
def test_every_batch_but_one_is_full(config: BucketConfig) -> None:
    buckets = Buckets(log_normal(), config)
    short = [
        batch
        for batch in buckets.epoch(0)
        if len(batch.items) < (config.batch_size or (config.max_frames or 0) // batch.length)
    ]
    assert len(short) <= 1
    if config.batch_size:
        assert buckets.num_batches == -(-10_000 // 64)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = log_normal(1000)
    prints = {fingerprint(Buckets(lengths, COUNT, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert len(prints) == 4
    buckets = Buckets(lengths, COUNT, seed=1)
    before = fingerprint(buckets, 1)
    torch.manual_seed(5)
    assert fingerprint(buckets, 0) != fingerprint(buckets, 1) == before


def test_batches_of_all_buckets_are_mixed() -> None:
    lengths = [batch.length for batch in Buckets(log_normal(), COUNT).epoch(0)]
    changes = sum(one != other for one, other in itertools.pairwise(lengths))
    assert changes > len(lengths) / 2


def test_items_of_a_bucket_meet_others_in_every_epoch() -> None:
    buckets = Buckets(log_normal(), BucketConfig(max_waste=0.2))
    first, second = (
        {frozenset(batch.items.tolist()) for batch in buckets.epoch(epoch) if len(batch.items) == 64}
        for epoch in range(2)
    )
    assert len(first & second) <= 1


def test_without_shuffling_the_order_is_fixed_from_long_to_short() -> None:
    buckets = Buckets(log_normal(500), COUNT, shuffle=False)
    assert fingerprint(buckets, 0) == fingerprint(buckets, 1)
    lengths = [batch.length for batch in buckets.epoch(0)]
    assert lengths == sorted(lengths, reverse=True)


def test_drop_last_leaves_out_the_short_batch() -> None:
    buckets = Buckets(log_normal(1000), COUNT, drop_last=True)
    assert {len(batch.items) for batch in buckets.epoch(0)} == {64}
    assert len(buckets.epoch(0)) == buckets.num_batches == 1000 // 64
    with pytest.raises(ConfigError, match="drop_last"):
        Buckets(log_normal(10), COUNT, drop_last=True)


# Bad input


@pytest.mark.parametrize(("multiple", "needed"), [(None, 100), (8, 104)])
def test_a_budget_below_the_longest_item_says_what_it_needs(multiple: int | None, needed: int) -> None:
    with pytest.raises(ConfigError, match=f"give at least {needed}"):
        Buckets(torch.tensor([5, 100]), BucketConfig(batch_size=None, max_frames=50, multiple=multiple))
