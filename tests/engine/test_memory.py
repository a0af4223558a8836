import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brim.engine.device import memory
from brim.engine.device.memory import (
    Halving,
    PeakMemory,
    batch_for,
    free_bytes,
    guard,
    inject_oom,
    parse_size,
    total_bytes,
)
from brim.errors import ConfigError, OutOfMemory

CPU = torch.device("cpu")
MIB = 1024**2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 1024**3),
        ("500MB", 500_000_000),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("1073741824", 1024**3),
        (" 7 kb ", 7000),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0GiB", "-1GiB", "nan", "1e9", "2G", "0.1B", "٣", "9" * 99])
def test_nonsense_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="write it like 2GiB"):
        parse_size(text)


@example(1000, 10, 900, 50)
@given(st.integers(0, 10**12), st.integers(1, 10**9), st.integers(0, 10**12), st.integers(1, 10**5))
def test_batch_is_the_largest_that_fits(budget, each, fixed, limit):
    batch = batch_for(budget, each, fixed, limit=limit)
    assert 1 <= batch <= limit
    assert batch == 1 or fixed + batch * each <= budget
    assert batch == limit or fixed + (batch + 1) * each > budget


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Stand-ins for /proc and /sys/fs/cgroup with 8000 KiB available."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path / "cgroup")

    def write(files):
        for name, text in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n", **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_free_memory_is_bounded_by_a_v2_group_less_its_idle_cache(machine):
    machine({
        "proc/self/cgroup": "0::/box\n",
        "cgroup/cgroup.controllers": "memory",
        "cgroup/box/memory.max": "1000000\n",
        "cgroup/box/memory.current": "700000\n",
        "cgroup/box/memory.stat": "anon 1\ninactive_file 200000\n",
    })  # fmt: skip
    assert free_bytes(CPU) == 500_000
    assert total_bytes(CPU) == 1_000_000


def test_free_memory_is_bounded_by_a_v1_group_whose_path_is_hidden(machine):
    machine({
        "proc/self/cgroup": "5:devices:/x\n4:memory:/docker/abc\n",
        "cgroup/memory/memory.limit_in_bytes": "1000000\n",
        "cgroup/memory/memory.usage_in_bytes": "400000\n",
    })  # fmt: skip
    assert free_bytes(CPU) == 600_000


def test_memory_cached_by_torch_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_bytes(torch.device("cuda:0")) == 130


def test_a_share_bounds_what_is_free_and_leaves_the_rest_to_others(machine, monkeypatch):
    machine({
        "proc/self/cgroup": "0::/box\n",
        "proc/self/status": "VmRSS: 100 kB\n",
        "cgroup/cgroup.controllers": "memory",
        "cgroup/box/memory.max": "1000000\n",
        "cgroup/box/memory.current": "110000\n",
    })  # fmt: skip
    monkeypatch.setenv("BRIM_MEMORY_SHARE", "0.8")
    assert free_bytes(CPU) == 800_000 - 100 * 1024
    assert total_bytes(CPU) == 1_000_000
    monkeypatch.setenv("BRIM_MEMORY_SHARE", "0.05")
    assert free_bytes(CPU) == 0


@pytest.mark.parametrize(("driver_free", "expected"), [(900, 780), (200, 230)])
def test_a_share_of_a_gpu_counts_what_this_process_has_of_it(monkeypatch, driver_free, expected):
    monkeypatch.setattr(memory, "total_bytes", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (driver_free, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    monkeypatch.setenv("BRIM_MEMORY_SHARE", "0.8")

    assert free_bytes(torch.device("cuda:0")) == expected


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(10**15), lambda: np.empty(10**15), lambda: bytearray(10**15)],
    ids=["torch", "numpy", "python"],
)
def test_a_real_failed_allocation_becomes_out_of_memory(allocate):
    with pytest.raises(OutOfMemory, match="smaller batch") as caught, guard():
        allocate()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("failed in the TorchScript interpreter.\nTraceback\nRuntimeError: CUDA out of memory. Tried"),
    ],
)
def test_other_shapes_of_out_of_memory_are_recognised(failure):
    with pytest.raises(OutOfMemory, match=r"^out of memory: (CUDA|Default)") as caught, guard():
        raise failure
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize("failure", [RuntimeError("shape mismatch"), ValueError("x"), KeyboardInterrupt()])
def test_guard_leaves_other_failures_alone(failure):
    with pytest.raises(type(failure)) as caught, guard():
        raise failure
    assert caught.value is failure


def test_a_size_that_failed_is_not_tried_again():
    tried = []

    def work(items):
        tried.append(len(items))
        if len(items) > 4:
            raise torch.OutOfMemoryError("full")
        return len(items)

    halving = Halving(32, CPU)
    assert halving.run(work, torch.arange(32)) == [4] * 8
    assert tried == [32, 16, 8] + [4] * 8
    halving.run(work, torch.arange(8))
    assert tried[-2:] == [4, 4]


@settings(max_examples=30)  # each collects garbage a few times
@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 120))
def test_halving_loses_and_repeats_nothing(count, above, size):
    with inject_oom(above=above):
        parts = Halving(size, CPU).run(list, range(count))
    assert [item for part in parts for item in part] == [*range(count)]


def spend(mebibytes):
    block = bytearray(mebibytes * MIB)
    block[::4096] = b"x" * len(block[::4096])  # touched, so that it is resident


def test_peak_sees_memory_that_is_gone_again():
    with PeakMemory(CPU) as quiet:
        pass
    with PeakMemory(CPU) as peak:
        spend(64)
        during = peak.bytes
    assert during >= quiet.bytes + 50 * MIB
    assert peak.bytes >= during
    settled = peak.bytes
    spend(128)
    assert peak.bytes == settled


def test_an_inner_block_does_not_erase_the_outer_peak():
    with PeakMemory(CPU) as outer:
        spend(96)
        with PeakMemory(CPU) as inner:
            pass
    assert outer.bytes >= inner.bytes + 80 * MIB
