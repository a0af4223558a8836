import itertools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.engine.config import TIERS
from brim.engine.device.memory import inject_oom
from brim.engine.rows import resident as module
from brim.engine.rows import tiers
from brim.engine.rows.files import DatasetSource
from brim.engine.rows.order import choose_tier, epoch_order
from brim.engine.rows.resident import Resident, as_dataloader
from brim.engine.rows.source import TensorSource
from brim.engine.storage.writer import ShardWriter
from brim.errors import ConfigError, StorageError

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)  # for the policy, which runs anywhere
GIB = 2**30


def rows_of(num):
    index = torch.arange(num)
    return {
        "index": index,
        "x": index.float()[:, None] + torch.arange(3) / 10,  # 12 bytes a row: carried as int32
        "even": index % 2 == 0,
        "iq": torch.complex(index.float(), -index.float())[:, None].repeat(1, 2),
        "half": index.bfloat16()[:, None].repeat(1, 3),
        "wide": torch.complex(index.double(), index.double()),
    }


def source_of(num):
    return TensorSource(rows_of(num))


def make(num=100, batch_size=7, **options):
    options = {"device": CPU, "tier": "ram", "seed": 3, **options}
    return Resident(source_of(num), batch_size=batch_size, **options)


def indices(batches):
    return [batch["index"].tolist() for batch in batches]


def assert_rows(batch, expected):
    """Every field belongs to the row that the index names."""
    rows = rows_of(expected)
    for name, tensor in batch.items():
        assert tensor.dtype == rows[name].dtype
        assert torch.equal(tensor, rows[name][batch["index"]]), name


class Slow(TensorSource):
    """A source that fails, or whose reads can be held back."""

    fail_from = None

    def read(self, start, stop, out):
        if self.fail_from is not None and stop > self.fail_from:
            raise StorageError("the disk is gone")
        super().read(start, stop, out)


# Order


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_tier_gives_the_same_batches(data):
    num = data.draw(st.integers(1, 200))
    batch_size = data.draw(st.integers(1, 220))
    block_items = data.draw(st.none() | st.integers(1, 210))
    shuffle = data.draw(st.sampled_from([False, "blocks"]))
    drop_last = data.draw(st.booleans())
    epoch = data.draw(st.integers(0, 3))
    where = data.draw(st.sampled_from([0, 0.4, 1]))
    window_bytes = data.draw(st.integers(1, 8000))
    split = data.draw(st.none() | st.lists(st.integers(0, num - 1), min_size=1, unique=True))
    found = []
    for tier in TIERS:
        options = {"shuffle": shuffle, "drop_last": drop_last, "block_items": block_items, "rows": split}
        with make(num, batch_size, tier=tier, window_bytes=window_bytes, **options) as resident:
            start = int(where * resident.num_batches)
            batches = list(resident.epoch(epoch, start))
            assert len(batches) == resident.num_batches - start
            for batch in batches:
                assert_rows(batch, num)
            found.append(indices(batches))
            expected = resident.order(epoch).split(resident.batch_size)[start : resident.num_batches]
            assert found[-1] == [part.tolist() for part in expected]
    assert found[0] == found[1] == found[2]


def test_the_order_depends_on_seed_and_epoch_alone():
    orders = {
        (seed, epoch, shuffle): tuple(
            epoch_order(100, seed=seed, epoch=epoch, shuffle=shuffle, block_items=10).tolist()
        )
        for seed, epoch, shuffle in itertools.product((0, 1), (0, 1), (True, "blocks"))
    }

    assert len(set(orders.values())) == 8
    with make(100, 7, seed=1) as one, make(100, 30, seed=1, tier="vram") as other:
        assert one.order(1).tolist() == other.order(1).tolist() == list(orders[1, 1, True])


def test_blocks_stay_together():
    order = epoch_order(100, seed=0, epoch=0, shuffle="blocks", block_items=10).view(10, 10)

    blocks = (order[:, 0] // 10).tolist()
    assert sorted(blocks) == list(range(10)) != blocks
    for block, rows in zip(blocks, order.tolist(), strict=True):
        assert sorted(rows) == list(range(10 * block, 10 * block + 10)) != rows


@pytest.mark.parametrize("tier", TIERS)
def test_drop_last_drops_the_short_batch(tier):
    with make(20, 8, tier=tier, shuffle=False, drop_last=True) as resident:
        assert (resident.num_batches, [len(batch) for batch in indices(resident.epoch(0))]) == (2, [8, 8])


# Splits


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(10, 20), range(10, 20)),
        (slice(None, None, 3), range(0, 50, 3)),
        (torch.tensor([4, 2, 40]), [4, 2, 40]),
        (torch.arange(50) > 44, range(45, 50)),
    ],
)
@pytest.mark.parametrize("tier", TIERS)
def test_a_split_holds_its_rows_alone(rows, expected, tier):
    with make(50, 4, rows=rows, tier=tier, shuffle=False) as resident:
        assert list(itertools.chain(*indices(resident.epoch(0)))) == list(expected)
        assert resident.bytes == len(expected) * (8 + 12 + 1 + 16 + 6 + 16)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (slice(0, 0), "the split is empty"),
        ([50], "rows=50 is not in the source"),
        ([-1], "rows=-1 is not"),
    ],
)
def test_a_bad_split_is_refused(rows, message):
    with pytest.raises(ConfigError, match=message):
        make(50, rows=rows)


# Sources on disk


@pytest.mark.parametrize("tier", TIERS)
def test_shards_are_loaded_and_some_fields_of_them(tmp_path, tier, monkeypatch):
    monkeypatch.setattr(tiers, "_PIECE_BYTES", 500)  # several pieces, that do not end where shards do
    with ShardWriter(tmp_path / "d", {}, items_per_shard=30) as out:
        out.append({name: tensor for name, tensor in rows_of(200).items() if name != "wide"}, {"t": torch.arange(200)})
        out.finish()

    options = {"tier": tier, "names": ["x", "index"], "shuffle": "blocks", "device": CPU}
    with Resident(DatasetSource(tmp_path / "d"), batch_size=16, rows=torch.randperm(200)[:150], **options) as resident:
        for batch in resident.epoch(0):
            assert list(batch) == ["x", "index"]
            assert_rows(batch, 200)


# Static inputs of a captured graph


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
def test_batches_can_be_written_into_given_tensors(tier, chunk_bytes, monkeypatch):
    monkeypatch.setitem(module._CHUNK_BYTES, "cpu", chunk_bytes)
    with make(100, 16, tier=tier, shuffle="blocks") as resident:
        expected = indices(resident.epoch(1))
        out = resident.static_batch()
        places = {name: tensor.data_ptr() for name, tensor in out.items()}
        for number, batch in enumerate(resident.epoch(1, out=out)):
            assert batch["index"].tolist() == expected[number]
            assert {name: tensor.data_ptr() for name, tensor in batch.items()} == places
            assert_rows(batch, 100)
        assert len(batch["index"]) == 4


@pytest.mark.parametrize(("num", "drop_last"), [(100, False), (100, True), (98, False), (5, False)])
def test_batches_fetched_by_a_counter_are_those_of_the_epoch(num, drop_last):
    with make(num, tier="vram", drop_last=drop_last, rows=torch.arange(num)) as resident:
        fetcher = resident.fetcher()
        for epoch, start in ((0, 0), (1, 0), (1, resident.num_batches // 2), (2, resident.num_batches - 1)):
            expected = list(resident.epoch(epoch, start))
            batches = fetcher.epoch(epoch, start)
            for number, batch in enumerate(batches):
                turn = next((n for n, inputs in enumerate(fetcher.inputs) if inputs is batch), None)
                if turn is not None:
                    fetcher.fetch(1 - turn)  # what a captured step does beside its own work
                assert all(torch.equal(batch[name], expected[number][name]) for name in batch)
            assert number == len(expected) - 1


@pytest.mark.parametrize("tier", TIERS)
def test_batches_stay_as_they_are_while_they_are_kept(tier):
    with make(300, 8, tier=tier, shuffle="blocks", window_bytes=1) as resident:
        kept = list(resident.epoch(0))
        again = list(resident.epoch(1))
    for batch in kept + again:
        assert_rows(batch, 300)


# Failures


def test_a_failure_in_the_windows_thread_reaches_the_consumer_after_what_came_before():
    source = Slow(rows_of(100))
    with Resident(source, batch_size=10, device=CPU, tier="window", shuffle=False, block_items=10) as resident:
        source.fail_from = 55
        batches = resident.epoch(0)
        came = [next(batches) for _ in range(5)]
        for _ in range(2):
            with pytest.raises((StorageError, RuntimeError), match="the disk is gone"):
                next(batches)
    assert indices(came) == torch.arange(50).view(5, 10).tolist()


def test_an_epoch_that_stops_early_is_an_error():
    with make(100, 10) as resident:
        epoch = module.Epoch((batch for batch in [{}]), 2)
        next(epoch)
        with pytest.raises(RuntimeError, match="1 batches early"):
            next(epoch)
        open_one = resident.epoch(0)
        next(open_one)
    with pytest.raises(RuntimeError, match="9 batches early: its Resident was closed"):
        next(open_one)
    with pytest.raises(RuntimeError, match="inside its with block"):
        resident.epoch(0)


def test_a_second_epoch_on_a_window_ends_the_first_aloud():
    with make(100, 10, tier="window", shuffle="blocks", block_items=5) as resident:
        first = resident.epoch(0)
        next(first)
        assert len(list(resident.epoch(1))) == 10
        with pytest.raises(RuntimeError, match="another epoch was begun"):
            next(first)


# Choosing a tier


def choose(device=CUDA, data=GIB, free=100 * GIB, host=100 * GIB, reserve=0, preload=None):
    return choose_tier(
        device,
        data_bytes=data,
        reserve_bytes=reserve,
        device_free_bytes=free,
        host_free_bytes=host,
        preload_to_gpu=preload,
        device_name="NVIDIA H200",
    )


@pytest.mark.parametrize(
    ("options", "tier"),
    [
        ({}, "vram"),
        ({"data": 95 * GIB, "host": 200 * GIB}, "ram"),
        ({"data": 95 * GIB, "host": 200 * GIB, "preload": True}, "vram"),
        ({"preload": False}, "ram"),
        ({"data": 50 * GIB, "reserve": 45 * GIB}, "ram"),
        ({"data": 95 * GIB, "host": 50 * GIB}, "window"),
        ({"device": CPU}, "ram"),
        ({"device": CPU, "data": 95 * GIB}, "window"),
        ({"device": CPU, "data": 50 * GIB, "reserve": 40 * GIB}, "window"),
    ],
)
def test_the_tier_is_the_fastest_with_room(options, tier):
    assert choose(**options).tier == tier


def test_auto_takes_a_window_and_says_how_it_shuffles(caplog, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda _: 100)
    caplog.set_level(logging.INFO, "brim")
    with make(tier="auto", rows=torch.randperm(100)) as resident:
        assert (resident.tier, resident.shuffle) == ("window", "blocks")
        assert list(itertools.chain(*indices(resident.epoch(0)))) == resident.order(0).tolist()

    assert len(caplog.messages) == 1
    assert f"shuffled by blocks of {resident.block_items}" in caplog.messages[0]


def test_a_tier_that_does_not_fit_falls_to_the_next_with_one_warning(caplog):
    with inject_oom(above=50), make(100, 10, tier="vram") as resident:
        assert resident.tier == "ram"
        assert sorted(itertools.chain(*indices(resident.epoch(0)))) == list(range(100))

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tier vram did not fit" in caplog.messages[0]
    assert "using tier ram" in caplog.messages[0]


def test_the_window_holds_its_share():
    with make(1000, 8, tier="window", shuffle="blocks", window_share=0.25) as resident:
        assert resident.describe()["held_items"] == 224  # 7 whole blocks of 32


# As a DataLoader


def test_every_iteration_of_the_adapter_is_the_next_epoch():
    with make(100, 16) as resident:
        loader = as_dataloader(resident, 4)
        assert [indices(loader), indices(loader)] == [indices(resident.epoch(4)), indices(resident.epoch(5))]
        assert indices(as_dataloader(resident, iter([9]))) == indices(resident.epoch(9))
