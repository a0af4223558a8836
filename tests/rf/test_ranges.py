"""Ranges of accepted attempts: the same whoever gates them in which order, and rows that make the same shards."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from brim.engine.storage import Dataset
from brim.rf.generation import attempts as module
from brim.rf.generation.attempts import Block, RangeBook, accepted_batches, gate_block
from brim.rf.generation.dataset import generate
from brim.rf.generation.stages import Stages
from brim.rf.generation.worker import make_ranges


def drain(book, config, rng=None, ahead=4):
    """All ranges, with several blocks under way that end in any order; some are lost on the way."""
    rng, under_way, out = rng or random.Random(0), [], []
    while book.remaining:
        while len(under_way) < 3 and (block := book.next_block(ahead)) is not None:
            under_way.append(block)
        if under_way:
            block = under_way.pop(rng.randrange(len(under_way)))
            if rng.random() < 0.2:
                book.put_back(block)
            else:
                book.add(block, gate_block(config, block))
        out += book.take(rng.randrange(4))
    return out


def expected(config, samples, start=None):
    """One device's samples, a shard's worth each."""
    return list(accepted_batches(config, samples, start or {}, lambda: config.shard_items))


@pytest.mark.parametrize("seed", range(5))
def test_ranges_do_not_depend_on_who_gates_in_which_order(gated_config, monkeypatch, seed):
    monkeypatch.setattr(module, "FIRST_BLOCK", 7)
    monkeypatch.setattr(module, "LAST_BLOCK", 30)

    found = drain(RangeBook(gated_config, 100, start={}), gated_config, random.Random(seed))

    wanted = expected(gated_config, 100)
    assert [one.number for one in found] == list(range(13))
    assert [len(one) for one in found] == [8] * 12 + [4]
    for one, batch in zip(found, wanted, strict=True):
        assert np.array_equal(one.index, batch.scenes.index)
        assert one.totals == {name: int(values[-1]) for name, values in batch.totals.items()}


@pytest.mark.parametrize("threads", [2, 5])
def test_samples_do_not_depend_on_the_threads_that_draw_their_scenes(gated_config, monkeypatch, threads):
    monkeypatch.setattr(module, "THREAD_BLOCK", 11)
    sizes = iter([3, 1, 20, 7, 30] * 9)

    drawn = list(accepted_batches(gated_config, 100, {}, lambda: next(sizes), threads))

    (wanted,) = accepted_batches(gated_config, 100, {}, lambda: 100)
    assert np.array_equal(np.concatenate([batch.scenes.index for batch in drawn]), wanted.scenes.index)
    for name, values in wanted.totals.items():
        assert np.array_equal(np.concatenate([batch.totals[name] for batch in drawn]), values)


def test_ranges_go_on_where_a_dataset_ends(gated_config):
    whole = drain(RangeBook(gated_config, 40, start={}), gated_config)

    rest = drain(RangeBook(gated_config, 24, number=2, start=whole[1].totals), gated_config)

    assert [one.number for one in rest] == [2, 3, 4]
    for one, other in zip(rest, whole[2:], strict=True):
        assert np.array_equal(one.index, other.index)
        assert one.totals == other.totals


def test_no_more_is_gated_than_what_is_wanted_ahead(gated_config):
    config = replace(gated_config, samples_per_shard=64)
    book = RangeBook(config, 10**9, start={})
    while (block := book.next_block(10)) is not None:
        book.add(block, gate_block(config, block))

    assert book.ready >= 10
    assert book.ready * 64 <= 10 * 64 + 2 * module.LAST_BLOCK


def test_a_block_that_comes_twice_counts_once(gated_config):
    book = RangeBook(gated_config, 20, start={})
    block = book.next_block(3)
    book.put_back(block)
    assert book.next_block(3) == block
    outcome = gate_block(gated_config, block)
    for _ in range(2):
        book.add(block, outcome)
    book.add(Block(first=0, stop=1), outcome[:1])

    assert [one.number for one in drain(book, gated_config)] == [0, 1, 2]


def test_rows_of_ranges_are_those_of_the_shards_of_one_device(gated_config, tmp_path):
    generate(gated_config, tmp_path / "data", 28, device="cpu")
    dataset = Dataset(tmp_path / "data")
    shards = [dataset.shard(number) for number in range(len(dataset.shards))]
    found = drain(RangeBook(gated_config, 28, start={}), gated_config)

    with Stages(gated_config, torch.device("cpu"), threads=1) as stages:
        stages.halving.size = 3
        made = list(make_ranges(stages, [found[2:], found[:1], found[1:2]]))

    assert [one.number for one, _ in made] == [2, 3, 0, 1]
    for one, rows in made:
        for name, values in shards[one.number].items():
            assert torch.equal(rows[name], values), name
