import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from brim.engine.config import TIERS, BucketConfig
from brim.engine.rows import ragged_tiers as stores
from brim.engine.rows import tiers
from brim.engine.rows.ragged import RaggedResident
from brim.engine.rows.ragged_tiers import RaggedTensors
from brim.errors import ConfigError, DatasetError, StorageError

CPU = torch.device("cpu")


def sequences(num: int, *, longest: int = 40, dim: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """No two frames alike: (item, frame, 0.5, …), in part no whole numbers."""
    lengths = np.random.default_rng(num).integers(1, longest + 1, num).tolist()
    found = [torch.full((length, dim), 0.5) for length in lengths]
    for item, frames in enumerate(found):
        frames[:, 0], frames[:, 1] = item + 1, torch.arange(len(frames)) / 16
    return [frames.to(dtype) for frames in found]


def source_of(num: int = 100, **options: Any) -> RaggedTensors:
    fields = {"label": torch.arange(num) % 5, "even": torch.arange(num) % 2 == 0, "pair": torch.rand(num, 2)}
    return RaggedTensors(sequences(num, **options), fields)


class Scattered:
    """A source whose items lie in any order, with frames of nobody between them; reads can fail or be counted."""

    def __init__(self, num: int = 100, dtype: torch.dtype = torch.float16) -> None:
        items = sequences(num, dtype=dtype)
        rng = np.random.default_rng(0)
        self.num_items, self.dim, self.dtype, self.description = num, 3, dtype, "scattered"
        self.lengths = torch.tensor([len(frames) for frames in items])
        self.starts = torch.zeros(num, dtype=torch.int64)
        parts, at = [], 0
        for item in rng.permutation(num).tolist():
            if rng.random() < 0.5:
                parts.append(torch.full((int(rng.integers(1, 5)), 3), torch.nan, dtype=dtype))
                at += len(parts[-1])
            self.starts[item] = at
            parts.append(items[item])
            at += len(items[item])
        self.frames, self.num_frames = torch.cat(parts), at
        self.fields = {"label": torch.arange(num) % 5}
        self.fails, self.num_reads, self.wait_s = False, 0, 0.0

    def read(self, start: int, stop: int, out: Tensor) -> None:
        self.num_reads += 1
        time.sleep(self.wait_s)
        if self.fails:
            raise StorageError("the disk is gone")
        assert out.shape == (stop - start, 3)
        assert out.dtype == self.dtype
        assert out.is_contiguous()
        out.copy_(self.frames[start:stop])


def make(source: Any = None, batch_size: int = 7, **options: Any) -> RaggedResident:
    options = {"device": CPU, "tier": "ram", "seed": 3, "buckets": BucketConfig(batch_size=batch_size), **options}
    return RaggedResident(source_of() if source is None else source, **options)


def items_of(batches: Any) -> list[list[int]]:
    return [batch["item"].tolist() for batch in batches]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return list(ours) == list(theirs) and all(
        ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor) for name, tensor in theirs.items()
    )


def assert_padded(batch: dict[str, Tensor], source: Any) -> None:
    """Every row is the item it names, with zeros behind its end."""
    for frames, length, item in zip(batch["frames"], batch["length"].tolist(), batch["item"].tolist(), strict=True):
        start = int(source.starts[item])
        assert length == int(source.lengths[item])
        assert torch.equal(frames[:length], source.frames[start : start + length].to(frames.dtype))
        assert not frames[length:].count_nonzero()
    for name, column in source.fields.items():
        assert torch.equal(batch[name], column[batch["item"]]), name
        assert batch[name].dtype == column.dtype


# Batches


@pytest.mark.parametrize("seed", range(12))
def test_every_tier_gives_the_same_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num = int(rng.choice([1, 5, 60, 200]))
    source = Scattered(num) if rng.random() < 0.5 else source_of(num)
    size = {"batch_size": int(rng.choice([1, 8, 64]))}
    sizes = size if rng.random() < 0.5 else {"batch_size": None, "max_frames": int(rng.choice([40, 200, 5000]))}
    rows = [None, torch.from_numpy(rng.permutation(num)[: max(1, num // 2)]), torch.arange(num) % 3 == 0][seed % 3]
    options: dict[str, Any] = {
        "buckets": BucketConfig(**sizes, multiple=int(rng.choice([0, 1, 8])) or None),
        "rows": rows,
        "shuffle": bool(rng.random() < 0.8),
        "dtype": [None, torch.float16, torch.bfloat16][int(rng.integers(3))],
        "seed": seed,
    }
    found = []
    for tier in TIERS:
        with make(source, tier=tier, **options) as resident:
            start = int(rng.integers(0, resident.num_batches + 1)) if tier == "window" else 0
            batches = list(resident.epoch(1, start))
            assert resident.tier == tier
            assert len(batches) == resident.num_batches - start
            for batch in batches:
                assert_padded(batch, source)
            found.append(batches)
            expected = [batch.items.tolist() for batch in resident.order(1)[start:]]
            assert items_of(batches) == expected
    assert all(map(same, found[0], found[1]))
    assert all(map(same, found[0][start:], found[2]))


@pytest.mark.parametrize("tier", TIERS)
def test_an_epoch_resumes_in_the_middle(tier: str) -> None:
    with make(tier=tier) as resident:
        whole = list(resident.epoch(5))
        for start in (0, 1, 9, resident.num_batches):
            assert all(map(same, whole[start:], resident.epoch(5, start)))
            assert len(resident.epoch(5, start)) == len(whole) - start
        with pytest.raises(ConfigError, match="start_batch=16"):
            resident.epoch(5, 16)
        assert items_of(resident.epoch(6)) == [batch.items.tolist() for batch in resident.order(6)]
        assert items_of(resident.epoch(6)) != items_of(whole)


def test_large_batches_are_padded_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "worker_count", lambda: 4)
    monkeypatch.setattr(stores, "_SHARED_BYTES", 1)
    monkeypatch.setattr(tiers, "_PIECE_BYTES", 100)
    source = Scattered(200)
    with make(source, tier="window", batch_size=50) as read, make(source, tier="ram", batch_size=50) as held:
        for ours, theirs in zip(read.epoch(0), held.epoch(0), strict=True):
            assert_padded(ours, source)
            assert same(ours, theirs)


def test_neighbours_are_read_together() -> None:
    source = Scattered(300)
    gaps = int((source.starts.sort().values[1:] != (source.starts + source.lengths).sort().values[:-1]).sum())
    with make(source, tier="ram"):
        assert source.num_reads == gaps + 1


# Views


@pytest.mark.parametrize("tier", TIERS)
def test_a_view_orders_the_same_frames_anew(tier: str) -> None:
    source = Scattered()
    with make(source, tier=tier, rows=torch.arange(99, 19, -1)) as resident:
        source.num_reads = 0
        fields = {"cluster": torch.arange(100) + 7}
        rows = torch.arange(30, 60)
        view = resident.view(rows=rows, fields=fields, shuffle=False, buckets=BucketConfig(batch_size=16))
        batches = list(view.epoch(0))
        assert (view.num_items, view.num_batches, view.tier) == (30, 2, tier)
        assert sorted(itertools.chain(*items_of(batches))) == rows.tolist()
        for batch in batches:
            assert torch.equal(batch["cluster"], batch["item"] + 7)
            assert_padded({**batch, "label": source.fields["label"][batch["item"]]}, source)
        assert tier == "window" or source.num_reads == 0
        with pytest.raises(ConfigError, match="rows=5 is not loaded"):
            resident.view(rows=[40, 5])
    with pytest.raises(RuntimeError, match="with block"):
        view.epoch(0)


# Failures


@pytest.mark.parametrize("share", [True, False])
def test_a_failure_in_a_thread_reaches_the_consumer(share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "worker_count", lambda: 4)
    monkeypatch.setattr(stores, "_SHARED_BYTES", 1 if share else 2**30)
    source = Scattered()
    with make(source, tier="window") as resident:
        epoch = resident.epoch(0)
        next(epoch)
        source.fails = True
        with pytest.raises(StorageError, match="the disk is gone"):
            list(epoch)
        with pytest.raises(RuntimeError, match="batches early"):
            next(epoch)


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(DatasetError, match='field "length"'):
        make(fields={"length": torch.zeros(100)})
    with pytest.raises(DatasetError, match="a row for each of 100"):
        make(fields={"label": torch.zeros(99)})
    source = source_of()
    source.lengths = source.lengths.clone()
    source.lengths[7] = 0
    with pytest.raises(DatasetError, match="item 7 has 0 frames"):
        make(source)
    with pytest.raises(DatasetError, match="equally wide"):
        RaggedTensors([torch.zeros(3, 2), torch.zeros(3, 4)])
