"""Generation by real workers that are killed and frozen: processes of this machine, and Ray's of three nodes."""

import os
import signal
import threading

import pytest

from brim.cli import main
from brim.cluster.processes import ProcessPool
from brim.errors import OutOfMemory
from brim.rf import generate

pytestmark = pytest.mark.long

SAMPLES = 64  # eight shards
LONG = 240


def shards(path):
    return {file.name: file.read_bytes() for file in sorted((path / "shards").iterdir())}


@pytest.fixture(scope="module")
def reference(config, tmp_path_factory):
    """What one device makes; the longer dataset begins with the shorter one."""
    out = tmp_path_factory.mktemp("one") / "data"
    generate(config, out, LONG, device="cpu")
    return out


def first(reference, samples):
    whole = shards(reference)
    return {name: whole[name] for name in sorted(whole)[: samples // 8]}


class Once:
    """A progress callback that acts one time."""

    def __init__(self, act, when):
        self.act, self.when, self.acted = act, when, False

    def __call__(self, now):
        if not self.acted and self.when(now):
            self.acted = True
            self.act()


# Processes of this machine


@pytest.mark.smoke
def test_processes_make_the_bytes_of_one_device(config, tmp_path):
    generate(config, tmp_path / "one", SAMPLES, device="cpu")

    report = generate(config, tmp_path / "many", SAMPLES, pool=ProcessPool(["cpu", "cpu", "cpu"]))

    assert shards(tmp_path / "many") == shards(tmp_path / "one")
    assert (report.accepted, report.workers, report.device) == (SAMPLES, 3, "3 × cpu")
    assert report.peak_bytes > 0
    assert report.stages["compute"]["items"] > 0


def test_a_killed_and_a_frozen_process_change_nothing(config, reference, tmp_path, caplog):
    pool = ProcessPool(["cpu", "cpu", "cpu"])

    def hurt():
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        os.kill(pool._workers[1].process.pid, signal.SIGSTOP)  # never ends what it has, and does not die

    hurting = Once(hurt, lambda now: now.done >= 16)
    report = generate(config, tmp_path / "many", SAMPLES, pool=pool, progress=hurting)

    assert hurting.acted
    assert shards(tmp_path / "many") == first(reference, SAMPLES)
    assert report.accepted == SAMPLES
    assert "cpu#0 died: its process was killed by SIGKILL" in caplog.text


@pytest.mark.smoke
def test_a_machine_without_the_memory_is_refused_before_anything_is_written(config, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIM_MEMORY_SHARE", "0.00001")

    with pytest.raises(OutOfMemory, match=r"worker cpu.*memory free.*shards"):
        generate(config, tmp_path / "many", SAMPLES, pool=ProcessPool(["cpu", "cpu"]))

    assert not (tmp_path / "many").exists()


# The command line


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cluster", "ray://127.0.0.1:9"], "nobody answers at ray://127.0.0.1:9"),
        (["--devices", "cpu,cpu", "--device", "cpu"], "--device and --devices exclude each other"),
        (["--devices", "cpu", "--cluster", "local"], "--devices and --cluster exclude each other"),
        (["--devices", "77"], "cuda:77"),
        (["--allow-mixed"], "--allow-mixed is for --devices and --cluster"),
    ],
)
def test_wrong_places_to_work_are_refused_before_anything_starts(tmp_path, capsys, monkeypatch, flags, said):
    monkeypatch.setattr("ray.init", None)
    monkeypatch.setattr(ProcessPool, "start", None)

    code = main(["rf", "generate", "--out", str(tmp_path / "many"), *flags])

    assert code == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "many").exists()


# Ray


def test_three_nodes_of_which_one_dies_make_the_bytes_of_one_device(config, reference, tmp_path, ray_cluster, caplog):
    from brim.cluster.ray_connect import connect
    from brim.cluster.ray_pool import RayPool

    ray_cluster.add()
    node = ray_cluster.add()
    killer = threading.Thread(target=ray_cluster.kill, args=(node,))
    with connect("auto") as cluster:
        killing = Once(killer.start, lambda now: now.done >= 24)
        report = generate(config, tmp_path / "many", LONG, pool=RayPool(cluster), progress=killing)
    killer.join()

    assert len(cluster.nodes) == report.workers == 3
    assert shards(tmp_path / "many") == shards(reference)
    assert "died" in caplog.text
