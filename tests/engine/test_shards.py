import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.engine.storage import shard_file
from brim.engine.storage import writer as shard_writer
from brim.engine.storage.dataset import Dataset
from brim.engine.storage.writer import ShardWriter
from brim.errors import DatasetError, ShardCorrupt, StorageError

HEADER = {"config": {"snr_db": [0, 20], "name": "µ"}, "seed": 7}


def rows_of(start, stop):
    """Rows that depend on their index alone, one field for each dtype that must survive."""
    index = torch.arange(start, stop)
    return {
        "iq": torch.complex(index.float(), -index.float())[:, None].repeat(1, 3),
        "x": index.float()[:, None, None] / torch.ones(1, 2, 2),
        "precise": index.double() / 3,
        "index": index,
        "even": index % 2 == 0,
    }


def totals_of(start, stop):
    return {"tried": torch.arange(start, stop) * 2 + 2}


def writer(path, per_shard=10, **options):
    options = {"header": HEADER, "identity": ("config", "seed"), **options}
    return ShardWriter(path, items_per_shard=per_shard, **options)


def fill(path, stop, step=7, finish=True, **options):
    """Write rows up to stop, from wherever the dataset is."""
    with writer(path, **options) as out:
        for start in range(out.items, stop, step):
            end = min(stop, start + step)
            out.append(rows_of(start, end), totals_of(start, end))
        if finish:
            out.finish(report="done")
    return path


def files_of(path):
    """Every file's bytes, with the manifest's time left out."""
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    manifest = json.loads(files["manifest.json"])
    del manifest["created"]
    return files | {"manifest.json": json.dumps(manifest)}


def edit_manifest(path, change):
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


@pytest.fixture
def made(tmp_path):
    return fill(tmp_path / "made", 25)


# Writing and reading


def test_manifest_says_what_is_there(made):
    manifest = json.loads((made / "manifest.json").read_text())
    assert list(manifest) == [
        *("format_version", "created", "config", "seed", "report"),
        *("items", "items_per_shard", "totals", "complete", "shards"),
    ]
    assert (manifest["items"], manifest["totals"], manifest["complete"]) == (25, {"tried": 50}, True)
    assert [entry.totals["tried"] for entry in Dataset(made).shards] == [20, 40, 50]
    for entry in manifest["shards"]:
        assert hashlib.sha256((made / "shards" / entry["name"]).read_bytes()).hexdigest() == entry["sha256"]


def test_shard_bytes_are_those_of_the_safetensors_library(tmp_path):
    rows = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in shard_file.DTYPES}
    rows |= {"none": torch.empty(3, 0), "é": torch.zeros(3), "a": torch.zeros(3, dtype=torch.bool)}
    with writer(tmp_path / "out", per_shard=5) as out:
        out.append(rows, {})
    assert (tmp_path / "out/shards/000000.safetensors").read_bytes() == safetensors.torch.save(rows)


def test_the_header_of_a_shard_is_padded_as_in_the_library(tmp_path):
    for length in range(1, 9):
        tensors = {"x" * length: torch.arange(3.0), "µ": torch.arange(5, dtype=torch.int8)}
        size, sha256 = shard_file.write_safetensors(tmp_path / "a.safetensors", tensors)

        data = (tmp_path / "a.safetensors").read_bytes()
        assert data == safetensors.torch.save(tensors)
        assert (size, sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_reading_by_shard_by_field_and_by_range(made):
    dataset = Dataset(made)
    assert [len(dataset.shard(number)["x"]) for number in range(3)] == [10, 10, 5]
    assert dataset.fields["iq"] == (torch.complex64, (3,))
    assert dataset.shard(1, ["index"], verify=True)["index"].tolist() == [*range(10, 20)]
    assert dataset.rows(8, 22, ["index"])["index"].tolist() == [*range(8, 22)]
    assert dataset.rows(30, 40)["x"].shape == (0, 2, 2)
    with pytest.raises(DatasetError, match='no field "y"; it has even, index'):
        dataset.load(["y"])


def test_rows_by_their_numbers_come_in_the_order_of_the_list(made):
    dataset, numbers = Dataset(made), [24, 3, 11, 3, -25, 10, 9]
    wanted = [24, 3, 11, 3, 0, 10, 9]

    for listed in (numbers, tuple(numbers), torch.tensor(numbers), np.array(numbers)):
        assert dataset[listed]["index"].tolist() == wanted
    assert [row["index"].item() for row in dataset.__getitems__(numbers)] == wanted
    assert dataset[21:2:-7]["index"].tolist() == [21, 14, 7]
    for outside in (25, -26):
        with pytest.raises(IndexError, match="rows 0 to 24"):
            dataset[outside]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 12))
def test_bytes_do_not_depend_on_the_size_of_appends(tmp_path_factory, sizes, per_shard):
    total, place = sum(sizes), tmp_path_factory.mktemp("appends")
    with writer(place / "pieces", per_shard) as out:
        for index, size in enumerate(sizes):
            start = sum(sizes[:index])
            out.append(rows_of(start, start + size), totals_of(start, start + size))
        out.finish(report="done")
    fill(place / "whole", total, step=1000, per_shard=per_shard)
    assert files_of(place / "pieces") == files_of(place / "whole")


def test_rows_of_another_shape_or_length_are_refused(tmp_path):
    with writer(tmp_path / "out") as out:
        out.append({"x": torch.zeros(2, 3)}, {})
        with pytest.raises(DatasetError, match="rows are"):
            out.append({"x": torch.zeros(2, 4)}, {})
        with pytest.raises(DatasetError, match="one length"):
            out.append({"x": torch.zeros(2, 3)}, {"tried": torch.zeros(3)})
        with pytest.raises(DatasetError, match="rows are"):
            out.append({"y": torch.zeros(2, 3)}, {})


# Stopping


def fail_after(failure, out, start, stop):
    with pytest.raises(failure), out:  # noqa: PT012
        out.append(rows_of(start, stop), totals_of(start, stop))
        raise failure


def test_what_was_made_before_a_failure_is_usable_and_goes_on(tmp_path):
    fail_after(KeyboardInterrupt, writer(tmp_path / "out"), 0, 23)
    dataset = Dataset(tmp_path / "out")
    dataset.verify()
    assert dataset.load(["index"])["index"].tolist() == [*range(23)]
    assert dataset.manifest["complete"] is False
    assert dataset.manifest["totals"] == {"tried": 46}
    with writer(tmp_path / "out", resume=True) as out:
        assert (out.items, out.totals) == (20, {"tried": 40})
    fill(tmp_path / "out", 38, resume=True)
    assert files_of(tmp_path / "out") == files_of(fill(tmp_path / "clean", 38))


def test_derived_keys_are_those_of_what_is_listed_also_after_a_failure(tmp_path):
    def derived(items, totals):
        return {"share": items / totals["tried"] if totals else None}

    fail_after(KeyboardInterrupt, writer(tmp_path / "out", derived=derived), 0, 23)
    assert Dataset(tmp_path / "out").manifest["share"] == 23 / 46


def test_an_interrupt_while_a_shard_is_renamed_loses_nothing(tmp_path, monkeypatch):
    replace = Path.replace

    def interrupted(self, target):
        replace(self, target)
        if target.name == "000001.safetensors":
            monkeypatch.setattr(Path, "replace", replace)
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "out", 25)
    monkeypatch.undo()
    Dataset(tmp_path / "out").verify()
    assert files_of(fill(tmp_path / "out", 25, resume=True)) == files_of(fill(tmp_path / "clean", 25))


def test_a_failure_before_the_first_row_leaves_nothing(tmp_path):
    with pytest.raises(ValueError), writer(tmp_path / "a/out"):
        raise ValueError
    assert not list(tmp_path.iterdir())


def test_every_shard_is_synced_before_the_manifest_lists_it(tmp_path, monkeypatch):
    fsync, replace, synced = os.fsync, Path.replace, set()

    def watched_sync(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def watched_replace(self, target):
        if target.name == "manifest.json":
            listed = json.loads(self.read_text())["shards"]
            files = [self, *(tmp_path / "out/shards" / entry["name"] for entry in listed)]
            assert {file.stat().st_ino for file in files} <= synced
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    fill(tmp_path / "out", 45)


# Resuming


def test_finishing_with_fewer_items_drops_the_longer_partial_shard(made, tmp_path):
    fill(made, 22, resume=True)
    assert files_of(made) == files_of(fill(tmp_path / "clean", 22))
    fill(made, 20, resume=True)
    assert files_of(made) == files_of(fill(tmp_path / "clean20", 20))


def test_the_manifest_never_lists_a_partial_shard_whose_bytes_are_gone(made, monkeypatch):
    replace = Path.replace

    def watched(self, target):
        if target.suffix == ".safetensors":
            assert target.name not in [entry.name for entry in Dataset(made).shards]
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    fill(made, 60, resume=True)


def test_resume_clears_leftovers_but_no_foreign_files(made):
    for name in ("shards/.000002.tmp", "shards/000007.safetensors", ".manifest.json.tmp", "shards/notes.txt"):
        (made / name).write_text("left over")
    with writer(made, resume=True):
        pass
    left = {file.name for file in made.rglob("*") if file.is_file()}
    assert left == {"manifest.json", "notes.txt", *(f"{number:06d}.safetensors" for number in range(3))}


def test_a_directory_in_use_is_not_overwritten(made, tmp_path):
    with pytest.raises(DatasetError, match="is not empty"):
        fill(made, 5)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("mine")
    with pytest.raises(DatasetError, match=r"has no manifest\.json"):
        fill(tmp_path / "notes", 5, resume=True)
    with pytest.raises(DatasetError, match="is a file"):
        fill(tmp_path / "notes/a.txt", 5)


def test_a_second_writer_is_kept_out(tmp_path):
    with writer(tmp_path / "out") as out:
        out.append(rows_of(0, 3), totals_of(0, 3))
        with pytest.raises(DatasetError, match="another process"), writer(tmp_path / "out", resume=True):
            pass
    assert len(Dataset(fill(tmp_path / "out", 12, resume=True))) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": {**HEADER, "seed": 8}}, "seed is 7 in the dataset and 8 now; use the same options"),
        ({"header": {**HEADER, "config": {"snr_db": [0, 30], "name": "µ"}}}, r"config.snr_db\[1\] is 20 in"),
        ({"per_shard": 5}, "items_per_shard is 10 in the dataset and 5 now"),
    ],
)
def test_resuming_with_other_options_names_the_first_difference(made, change, message):
    before = files_of(made)
    with pytest.raises(DatasetError, match=message):
        fill(made, 40, resume=True, **change)
    assert files_of(made) == before


@pytest.mark.parametrize("verify", ["all", "sizes"])
@pytest.mark.parametrize(("shard", "damage"), [(0, "truncate"), (0, "delete"), (1, "alter")])
def test_resume_refuses_a_damaged_full_shard(made, verify, shard, damage):
    """Sizes alone find what a crash may leave."""
    DAMAGE[damage](made / f"shards/{shard:06d}.safetensors")
    with pytest.raises(ShardCorrupt, match=rf"shard {shard:06d}.safetensors: .*; restore it"):
        fill(made, 40, resume=True, verify=verify)


def test_resume_by_sizes_reads_nothing_but_the_last_shard(made, monkeypatch):
    read = []
    check = shard_writer.check_bytes

    def watched(file, entry, *, checksum):
        read.append((file.name, checksum))
        check(file, entry, checksum=checksum)

    monkeypatch.setattr(shard_writer, "check_bytes", watched)
    fill(made, 60, resume=True, verify="sizes")

    assert [name for name, checksum in read if not checksum] == ["000000.safetensors"]
    Dataset(made).verify()


def test_resume_makes_a_damaged_partial_shard_again(made, tmp_path):
    alter(made / "shards/000002.safetensors")
    fill(made, 25, resume=True)
    assert files_of(made) == files_of(fill(tmp_path / "clean", 25))


# A file system that refuses


def refuse(monkeypatch, code, owner, name, when=lambda *_: True):
    """Make a call of the file system fail."""
    real = getattr(owner, name)

    def call(*arguments, **options):
        if when(*arguments):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def test_a_refused_rename_becomes_a_storage_error(tmp_path, monkeypatch):
    fill(tmp_path / "out", 20, finish=False)
    refuse(monkeypatch, errno.ENOSPC, Path, "replace", lambda self, target: target.suffix == ".safetensors")
    with pytest.raises(StorageError, match=r"000002.safetensors: cannot write, no space is left"):
        fill(tmp_path / "out", 40, resume=True)
    assert len(Dataset(tmp_path / "out")) == 20
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_failed_sync_leaves_the_last_valid_manifest(tmp_path, monkeypatch):
    fill(tmp_path / "out", 20, finish=False)
    before = (tmp_path / "out/manifest.json").read_bytes()
    failures = iter([True])  # a second try would seem to work, though the data is lost
    refuse(monkeypatch, errno.EIO, os, "fsync", lambda handle: next(failures, False))
    with pytest.raises(StorageError, match="the device failed"):
        fill(tmp_path / "out", 40, resume=True)
    assert (tmp_path / "out/manifest.json").read_bytes() == before


# Damage


def truncate(file):
    os.truncate(file, file.stat().st_size - 8)


def alter(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGE = {"truncate": truncate, "alter": alter, "delete": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_names_the_damaged_shard(made, damage):
    DAMAGE[damage](made / "shards/000001.safetensors")
    with pytest.raises(ShardCorrupt, match=r"shard 000001\.safetensors"):
        Dataset(made).verify()
    with pytest.raises(ShardCorrupt):
        Dataset(made).shard(1, verify=True)


def test_a_shard_whose_rows_disagree_with_the_manifest_is_corrupt(made):
    def change(manifest):
        manifest["shards"][0]["items"], manifest["items"] = 11, 26

    edit_manifest(made, change)
    with pytest.raises(ShardCorrupt, match="the manifest says 11 items"):
        Dataset(made).load()


def test_shards_of_different_fields_do_not_load(made):
    rows = rows_of(10, 20) | {"x": torch.zeros(10, 3)}
    file = made / "shards/000001.safetensors"
    safetensors.torch.save_file(rows, file)
    content = file.read_bytes()
    changed = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(made, lambda manifest: manifest["shards"][1].update(changed))
    with pytest.raises(ShardCorrupt, match=r'"x" is torch.float32 \[3\], in the first shard'):
        Dataset(made).load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=9), "format_version is 9, expected 1 or 2"),
        (lambda m: m.update(items=24), "items is 24"),
        (lambda m: m["shards"][0].update(name="../../etc/passwd"), "is '../../etc/passwd', expected 000000"),
        (lambda m: m["shards"][0].update(items=-1), "has -1 items"),
        (lambda m: m.update(config={"x": "\ud800"}), "is not valid JSON"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(made, change, message):
    edit_manifest(made, change)
    with pytest.raises(DatasetError, match=message) as caught:
        Dataset(made)
    assert "manifest.json" in str(caught.value)
