import hashlib
import os

import pytest
import torch

from brim.engine.device import memory
from brim.engine.device.devices import named_device, resolve_device, stream, worker_count
from brim.errors import ConfigError, DeviceError

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_a_device_is_named_by_a_number_a_name_or_itself(gpus):
    gpus(2)
    assert [str(resolve_device(name)) for name in ("auto", "cuda", "cpu")] == ["cuda:0", "cuda:0", "cpu"]
    assert [str(named_device(device)) for device in (1, "cpu", None, torch.device("cuda:1"), CPU)] == [
        "cuda:1", "cpu", "cuda:0", "cuda:1", "cpu",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="use auto, cpu, cuda or cuda:N"):
        named_device(True)
    gpus(0)
    assert resolve_device("auto") == CPU


def test_absent_gpu_is_refused_with_those_that_are_here(gpus):
    gpus(1)
    with pytest.raises(DeviceError, match=r'device="cuda:1" is not available; 1 CUDA device found: .*cuda:0 or cpu'):
        resolve_device("cuda:1")


@pytest.mark.parametrize(("built_with", "message"), [(None, "built without CUDA.*use cpu"), ("13.0", "nvidia-smi")])
def test_a_gpu_that_cannot_be_used_says_why(gpus, monkeypatch, built_with, message):
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", built_with)
    with pytest.raises(DeviceError, match=message):
        resolve_device("cuda")


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cpu:0", "CUDA"])
def test_unknown_device_names_are_refused(name):
    with pytest.raises(ConfigError, match="use auto, cpu, cuda or cuda:N"):
        resolve_device(name)


def test_a_stream_is_seeded_by_its_name_in_any_process():
    """By the first 56 bits of BLAKE2b; Python's own hash differs from process to process."""
    seed = int(hashlib.blake2b(b"(7, ('augment', 3))", digest_size=7).hexdigest(), 16)
    assert stream(7, "augment", 3, device=CPU).initial_seed() == seed


def test_streams_with_different_names_differ():
    paths = [(7, "a", 1), (7, "a", 2), (7, "a", "1"), (7, "b", 1), (8, "a", 1), (7, "a")]
    draws = {torch.rand(1, generator=stream(*path, device=CPU)).item() for path in paths}
    assert len(draws) == len(paths)


def test_workers_stay_within_the_affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert worker_count() == 1


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Stand-ins for /proc and /sys/fs/cgroup on a machine of eight cores."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_workers_stay_within_a_v2_quota_of_an_outer_group(cgroup):
    cgroup({
        "proc/self/cgroup": "0::/pod/box\n",
        "cgroup/cgroup.controllers": "cpu memory",
        "cgroup/pod/cpu.max": "250000 100000\n",
        "cgroup/pod/box/cpu.max": "max 100000\n",
    })  # fmt: skip
    assert worker_count() == 2


def test_workers_stay_within_a_v1_quota(cgroup):
    cgroup({
        "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
        "cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
        "cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "cgroup/cpu/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert worker_count() == 3
