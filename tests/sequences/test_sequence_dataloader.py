import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from brim.engine.config import BucketConfig
from brim.errors import ConfigError, DatasetError
from brim.sequences import Augmentation, Corpus, make_sequences, pack
from brim.sequences.batches import dataloader
from brim.sequences.batches.dataloader import SequenceLoader
from brim.sequences.config import LoaderConfig
from brim.sequences.corpus import SequenceFolder

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return make_sequences(tmp_path / "in", 20, 6, 2, mean_length=12)


def loader(sequences, *, batch_size=8, num_workers=0, **options):
    settings = {
        name: options.pop(name) for name in ("persistent_workers", "augmentation", "buckets") if name in options
    }
    config = LoaderConfig(batch_size=batch_size, num_workers=num_workers, prefetch_factor=2, **settings)
    return SequenceLoader(sequences, config, device=CPU, **options)


def same(first, second):
    pairs = list(zip(first, second, strict=True))
    return bool(pairs) and all(
        list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )


# Batches


def test_batches_hold_the_files_padded_with_zeros_to_the_longest(folder):
    sequences = SequenceFolder(folder)
    with loader(sequences) as source:
        batches = list(source.epoch(0))
    assert [len(batch["length"]) for batch in batches] == [8, 8, 4]
    for batch in batches:
        assert batch["frames"].shape[1] == batch["length"].max()
        for frames, length, item, label in zip(*(batch[k] for k in ("frames", "length", "item", "label")), strict=True):
            wanted = torch.from_numpy(np.load(folder / sequences.ids[item]))
            assert torch.equal(frames[:length], wanted)
            assert not frames[length:].any()
            assert sequences.classes[label] == sequences.ids[item].split("/")[0]


def test_every_item_comes_once_in_an_order_fixed_by_seed_and_epoch(folder):
    sequences = SequenceFolder(folder)

    def order(seed, epoch):
        with loader(sequences, seed=seed) as source:
            return torch.cat([batch["item"] for batch in source.epoch(epoch)]).tolist()

    assert sorted(order(0, 0)) == list(range(20))
    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(*pair)) for pair in ((0, 0), (0, 1), (1, 0))}) == 3


def test_an_epoch_goes_on_from_any_batch(folder):
    with loader(SequenceFolder(folder), augmentation=Augmentation()) as source:
        whole = list(source.epoch(3))
        assert same(whole[1:], source.epoch(3, start_batch=1))
        assert len(list(source.epoch(3, start_batch=3))) == 0
        with pytest.raises(ConfigError, match="start_batch=4 must be from 0 to 3"):
            source.epoch(3, start_batch=4)


def test_rows_fields_and_a_fixed_order_can_be_chosen(folder):
    rows, fields = [3, 9, 4, 0, 17, 8, 1, 12], {"target": torch.arange(20) * 10}
    with loader(SequenceFolder(folder), rows=rows, fields=fields, shuffle=False, augmentation=Augmentation()) as source:
        (batch,), (other,) = list(source.epoch(5)), list(source.epoch(6))
    assert (source.num_items, source.num_batches, source.batch_size) == (8, 1, 8)
    assert batch["item"].tolist() == rows
    assert batch["target"].tolist() == [10 * row for row in rows]
    assert "label" not in batch
    assert not torch.equal(batch["length"], other["length"])  # each epoch is augmented anew


def test_buckets_give_batches_of_similar_lengths_and_padding_is_counted(folder):
    sequences = SequenceFolder(folder)
    with loader(sequences) as plain, loader(sequences, buckets=BucketConfig(batch_size=4, multiple=8)) as source:
        batches = list(source.epoch(0))
        assert source.padding_share < plain.padding_share
        frames = sum(batch["frames"][..., 0].numel() for batch in plain.epoch(0))
        assert plain.padding_share == pytest.approx(1 - int(sequences.lengths.sum()) / frames)
    assert sorted(torch.cat([batch["item"] for batch in batches]).tolist()) == list(range(20))
    assert {batch["frames"].shape[1] % 8 for batch in batches} == {0}


# Workers


def test_workers_give_the_same_batches_and_end_with_the_block(folder, tmp_path):
    pack(folder, tmp_path / "out", dtype="float32")
    for sequences in (SequenceFolder(folder), Corpus.open(tmp_path / "out")):
        options = {"augmentation": Augmentation(), "seed": 7}
        with loader(sequences, **options) as alone, loader(sequences, num_workers=1, **options) as source:
            for number in (0, 1):
                assert same(alone.epoch(number), source.epoch(number))
            assert len(multiprocessing.active_children()) == 1
            next(source.epoch(2))
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_file_is_named_whoever_reads_it(folder, num_workers):
    sequences = SequenceFolder(folder)
    file = folder / sequences.ids[5]
    frames = np.load(file)
    frames[1, 2] = np.nan
    np.save(file, frames)
    with loader(sequences, num_workers=num_workers) as source:
        with pytest.raises(DatasetError, match=rf"^{file}: frame 1 holds NaN"):
            list(source.epoch(0))
        file.unlink()
        with pytest.raises(DatasetError, match=rf"^{file} cannot be read: No such file"):
            list(source.epoch(0))
        np.save(file, frames[:1])
        with pytest.raises(DatasetError, match=rf"^{file} has shape \[1, 6\], it had"):
            list(source.epoch(0))


def test_a_killed_worker_is_an_error_not_a_short_epoch(folder):
    with loader(SequenceFolder(folder), batch_size=1, num_workers=1) as source:
        epoch = source.epoch(0)
        next(epoch)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(DatasetError, match=r"\.npy and 0 more were not read, a DataLoader worker ended"):
            list(epoch)
        assert len(list(source.epoch(0))) == 20  # with a new worker
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("free_batches", "workers", "prefetch"), [(100, 4, 6), (16, 4, 3), (8, 4, 1), (4, 2, 1), (1, 0, 6)]
)
def test_batches_on_their_way_fit_shared_memory(free_batches, workers, prefetch):
    config = LoaderConfig(num_workers=4, prefetch_factor=6)
    free = int(1000 * free_batches / dataloader._SHARED_SHARE) + 1
    fitted = dataloader._fit_shared(config, 1000, free)
    assert (fitted.num_workers, fitted.prefetch_factor) == (workers, prefetch)
    assert fitted.num_workers * (fitted.prefetch_factor + 1) <= free_batches
