"""The file batch_sizes.json: what it keeps, what it refuses, and that no writer loses another's work."""

import copy
import json
import multiprocessing
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from entries import entry_of

from brim.errors import ConfigError, StorageError
from brim.segmentation.tuning import BatchSizes, batch_sizes, device_key, save_entry, sizes_file
from waiting import PATIENCE_S

CPU = torch.device("cpu")
KEY = "NVIDIA H200 140 GiB"
ENTRY = entry_of(optimal_batch_size=8, max_safe_batch_size=96, p50_latency_ms=19.4, p95_latency_ms=19.9, compiled=True)
TRIALS = [{"batch": 8, "throughput": 412.5, "status": "ok"}]


def document():
    device = {
        "device_info": {"name": "NVIDIA H200"},
        "batch_configurations": {"hrnet": asdict(ENTRY)},
        "detailed_results": {"hrnet": copy.deepcopy(TRIALS)},
    }
    return {"format_version": 1, "created": "2026-01-31T12:00:00Z", "devices": {KEY: device}}


def save(path, content):
    path.write_text(json.dumps(content))
    return path


# What it keeps


def test_the_file_has_exactly_the_promised_keys(tmp_path):
    file = tmp_path / "batch_sizes.json"
    save_entry(file, KEY, {"name": "NVIDIA H200"}, "hrnet", ENTRY, TRIALS)
    content, found = json.loads(file.read_text()), BatchSizes.read(file)

    assert (found.entry(KEY, "hrnet"), found.devices, found.models(KEY)) == (ENTRY, (KEY,), ("hrnet",))
    assert list(content) == ["format_version", "created", "devices"]
    assert content["format_version"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", content["created"])
    assert content["devices"] == {
        KEY: {
            "device_info": {"name": "NVIDIA H200"},
            "batch_configurations": {"hrnet": asdict(ENTRY)},
            "detailed_results": {"hrnet": TRIALS},
        }
    }


def test_rewriting_keeps_the_time_of_creation_and_unknown_keys(tmp_path):
    content = document()
    content["created"] = "2020-02-03T04:05:06+00:00"
    content["note"] = {"by": ["hand"]}
    content["devices"][KEY]["rack"] = 7
    content["devices"][KEY]["device_info"]["driver"] = "600.1"
    content["devices"][KEY]["batch_configurations"]["hrnet"]["comment"] = "fast"
    file = save(tmp_path / "sizes.json", content)
    changed = replace(ENTRY, optimal_batch_size=9)

    save_entry(file, KEY, {"name": "NVIDIA H200"}, "hrnet", changed, TRIALS)

    content["devices"][KEY]["batch_configurations"]["hrnet"]["optimal_batch_size"] = 9
    assert json.loads(file.read_text()) == content


# Two writers


def test_a_stale_copy_does_not_undo_what_another_tuned_again(tmp_path):
    file = save(tmp_path / "sizes.json", document())
    stale = BatchSizes.read(file)
    newer = replace(ENTRY, optimal_batch_size=12)
    save_entry(file, KEY, {}, "hrnet", newer, [])

    stale.write(file)

    assert BatchSizes.read(file).entry(KEY, "hrnet") == newer


def _write_models(file: str, prefix: str, count: int, gate) -> None:
    gate.wait(PATIENCE_S)
    for number in range(count):
        save_entry(file, KEY, {}, f"{prefix}{number}", ENTRY, TRIALS)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # has threads; the others only write a file
def test_processes_that_write_at_once_lose_nothing(tmp_path):
    file, count = tmp_path / "sizes.json", 10
    context = multiprocessing.get_context("fork")  # nothing is imported again
    gate = context.Barrier(2)
    workers = [context.Process(target=_write_models, args=(str(file), name, count, gate)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)

    assert [worker.exitcode for worker in workers] == [0, 0]
    assert set(BatchSizes.read(file).models(KEY)) == {f"{name}{number}" for name in "ab" for number in range(count)}
    assert [found.name for found in tmp_path.iterdir()] == ["sizes.json"]  # no lock, no temporary file


# What it refuses


def _at(content, path, value):
    *above, last = path
    for step in above:
        content = content[step]
    content[last] = value


HRNET = ("devices", KEY, "batch_configurations", "hrnet")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format_version",), 2, "format_version=2 must be 1"),
        (("created",), "2026-01-01T00:00:00", 'created="2026-01-01T00:00:00" must be a time like'),
        (("devices", KEY), 3, f'devices."{KEY}"=3 must be an object'),
        ((*HRNET, "optimal_batch_size"), 0, 'hrnet".optimal_batch_size=0 must be between 1 and'),
        ((*HRNET, "optimal_batch_size"), 97, "optimal_batch_size=97 must be at most max_safe_batch_size, 96"),
        (("devices", KEY, "detailed_results", "hrnet"), {}, 'detailed_results."hrnet"={} must be a list'),
    ],
)
def test_a_wrong_value_is_named_with_its_place(tmp_path, path, value, message):
    content = document()
    _at(content, path, value)
    file = save(tmp_path / "sizes.json", content)

    with pytest.raises(ConfigError, match=message) as failure:
        BatchSizes.read(file)

    assert str(failure.value).startswith(f"{file}: ")
    assert "delete the file and tune again" in str(failure.value)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(document()).encode()[:-40],
        b"\xff\xfe\x00",
        b'{"format_version": 1, "format_version": 1}',
        b"[" * 100_000,
        json.dumps({**document(), "extra": {"deep": [1.0, float("nan")]}}).encode(),
    ],
    ids=["cut", "bytes", "twice", "deep", "nan"],
)
def test_what_is_not_json_is_refused(tmp_path, content):
    file = tmp_path / "sizes.json"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"sizes\.json is not valid JSON: .+delete the file and tune again"):
        BatchSizes.read(file)


def test_a_malformed_file_is_never_overwritten(tmp_path):
    file = tmp_path / "sizes.json"
    file.write_text("{")

    with pytest.raises(ConfigError, match="not valid JSON"):
        save_entry(file, KEY, {}, "hrnet", ENTRY, [])

    assert [found.name for found in tmp_path.iterdir()] == ["sizes.json"]
    assert file.read_text() == "{"


# Where it cannot be written


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = save(tmp_path / "sizes.json", document())

    def refuse(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_sizes.os, "fsync", refuse)
    with pytest.raises(StorageError, match="No space left"):
        save_entry(file, KEY, {}, "other", ENTRY, [])

    assert [found.name for found in tmp_path.iterdir()] == ["sizes.json"]
    assert json.loads(file.read_text()) == document()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "sizes.json"
    link.symlink_to(Path("real") / "sizes.json")
    save_entry(link, KEY, {}, "hrnet", ENTRY, [])

    assert link.is_symlink()
    assert BatchSizes.read(tmp_path / "real" / "sizes.json").models(KEY) == ("hrnet",)


# Which device


@pytest.mark.parametrize(("gib", "shown"), [(0.4, 1), (7.7, 8), (23.4, 24), (23.6, 24), (62.7, 64), (125.4, 128)])
def test_the_key_of_a_cpu_is_the_same_after_a_reboot(monkeypatch, gib, shown):
    monkeypatch.setattr(batch_sizes, "total_bytes", lambda device: int(gib * 2**30))

    assert device_key(CPU).endswith(f" {shown} GiB")


@pytest.mark.parametrize(("cores", "shown"), [(1, " 1 core "), (2, " 2 cores "), (64, " 64 cores ")])
def test_the_key_of_a_cpu_says_how_many_cores_are_used(monkeypatch, cores, shown):
    monkeypatch.setattr(batch_sizes, "worker_count", lambda: cores)

    assert shown in device_key(CPU)


def test_the_key_of_a_gpu_is_name_and_memory(monkeypatch):
    monkeypatch.setattr(batch_sizes, "describe", lambda device: {"name": "NVIDIA H200"})
    monkeypatch.setattr(batch_sizes, "total_bytes", lambda device: 150_109_880_320)

    assert device_key(torch.device("cuda:0")) == KEY


# Where the file is


def test_the_file_is_in_the_cache_directory_unless_there_is_one_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert sizes_file() == tmp_path / "cache" / "brim" / "batch_sizes.json"
    assert sizes_file("mine.json") == Path("mine.json")

    Path("batch_sizes.json").write_text("{}")
    assert sizes_file() == Path("batch_sizes.json")


def test_a_damaged_file_in_the_cache_directory_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = sizes_file()
    file.parent.mkdir(parents=True)
    file.write_text("{")

    assert BatchSizes.read(file).devices == ()
    assert caplog.text.count("it is not used") == 1
    with pytest.raises(ConfigError):
        BatchSizes.read(file.rename(tmp_path / "mine.json"))
