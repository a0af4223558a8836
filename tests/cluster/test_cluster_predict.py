"""Bulk prediction on Ray: a simulated node that dies, a killed command, a store that fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
from cluster_nodes import PATIENT, Nodes

from brim.cluster.predict import predict_many
from brim.segmentation.config import FilesConfig
from brim.segmentation.networks import create_model, save_weights
from brim.segmentation.prediction import ModelLoader, Recipe, predict_files
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry
from s3_store import FailingProxy, serve_s3
from waiting import until

pytest.importorskip("ray")

pytestmark = pytest.mark.long
BUCKET = "cells"
NUM = 40
torch.set_num_threads(1)


class World:
    """A cluster whose nodes know a store, with images there and here, and what one process makes of them."""

    def __init__(self, nodes: Nodes, store, proxy: FailingProxy, path: Path) -> None:
        self.nodes, self.store, self.proxy, self.path = nodes, store, proxy, path
        self.images, self.weights, self.one = path / "images", path / "weights.safetensors", path / "one"
        self.sizes = path / "batch_sizes.json"  # known: tuning takes ten seconds each time

    def command(self, *arguments) -> list[str]:
        fixed = ["--model", "unet_tiny", "--weights", str(self.weights), "--strict", "--json"]
        fixed += ["--batch-sizes", str(self.sizes)]
        return ["segment", "predict", *map(str, arguments), *fixed]

    def results(self, out: str) -> dict[str, bytes]:
        """In the store, without records."""
        return {name: data for name, data in self.store.files(BUCKET, out).items() if not name.startswith(".brim")}

    def puts(self) -> list[str]:
        """Results that were written, each by its key, as often as it was."""
        lines = [request.split()[1] for request in self.proxy.requests if request.startswith("PUT")]
        return [line.partition("?")[0] for line in lines if ".geojson" in line]


def files(out: Path) -> dict[str, bytes]:
    found = (path for path in out.rglob("*") if path.is_file() and ".brim" not in path.parts)
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    path = tmp_path_factory.mktemp("bulk")
    (path / "images").mkdir()
    torch.manual_seed(3)
    save_weights(create_model("unet_tiny"), path / "weights.safetensors", {})
    cpu = torch.device("cpu")
    entry = BatchSizeEntry(
        optimal_batch_size=4, max_safe_batch_size=8, expected_throughput=100.0, p50_latency_ms=40.0,
        p95_latency_ms=50.0, memory_limit_mb=1000.0, image_size=1024, precision="fp32", layout="contiguous",
        compiled=False,
    )  # fmt: skip
    save_entry(path / "batch_sizes.json", device_key(cpu), device_info(cpu), "unet_tiny", entry, [])
    with serve_s3() as store, FailingProxy(store.port) as proxy:
        store.s3.create_bucket(Bucket=BUCKET)
        for index in range(NUM):
            file = path / f"images/{index:02}.png"
            cv2.imwrite(str(file), make_cells(5, index, 96, 128)[0])
            if index == 7:
                file.write_bytes(file.read_bytes()[:300])
            store.s3.put_object(Bucket=BUCKET, Key=f"images/{file.name}", Body=file.read_bytes())
        env = {**store.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        before = {name: os.environ.get(name) for name in (*env, "RAY_ADDRESS")}
        os.environ.update(env)
        nodes = Nodes()
        os.environ["RAY_ADDRESS"] = nodes.address
        try:
            loader = ModelLoader({"unet_tiny": path / "weights.safetensors"}, "cpu", path / "batch_sizes.json")
            predict_files([path / "images"], loader, path / "one", FilesConfig(model="unet_tiny", strict=True))
            yield World(nodes, store, proxy, path)
        finally:
            nodes.close()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def test_a_killed_command_goes_on_where_it_was(world, tmp_path):
    """Over Ray's client connection, from store to store; the store fails five times in the second run."""
    out = f"s3://{BUCKET}/killed"
    address = f"ray://127.0.0.1:{world.nodes.client_port}"
    argv = world.command(f"s3://{BUCKET}/images", "--out", out, "--cluster", address)
    command, env = [sys.executable, "-m", "brim", *argv], {**os.environ, **PATIENT}
    world.proxy.requests.clear()
    world.proxy.hang_after(f"PUT /{BUCKET}/killed/.brim")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    until(lambda: process.poll() is not None or world.store.files(BUCKET, "killed/.brim"))
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    world.proxy.hang_after("")
    lines = b"".join(world.store.files(BUCKET, "killed/.brim").values()).splitlines()
    recorded = {json.loads(line)["name"] for line in lines}
    assert recorded

    first = len(world.puts())
    world.proxy.fail("reset", times=5, after=20)
    done = subprocess.run(command, capture_output=True, text=True, env=env)

    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout).items() >= {"images": NUM, "failed": 1}.items()
    assert done.stderr.count("07.png") == 1
    assert world.results("killed") == files(world.one)
    again = {f"s3://{line.lstrip('/').replace('.geojson', '.png')}" for line in world.puts()[first:]}
    assert not again & {name.replace("/images/", "/killed/") for name in recorded}


# Last: the client server of Ray cannot start beside the zombie that a simulated node leaves


def test_a_node_dies_and_every_result_is_there_once(world, tmp_path):
    extra, killed = world.nodes.add(), []

    def watch(where):
        if where.done and not killed:
            world.nodes.kill(extra)
            killed.append(where.done)

    recipe = Recipe(files=FilesConfig(model="unet_tiny", strict=True))
    found = predict_many(
        [world.images], tmp_path, recipe, world.weights, "auto", batch_sizes=world.sizes, progress=watch
    )

    broken = str(world.images / "07.png")
    assert killed[0] < NUM
    assert (found.written, found.kept, list(found.failures), found.stopped) == (NUM - 1, 0, [broken], False)
    assert "truncated" in found.failures[broken]
    assert files(tmp_path) == files(world.one)
    report = found.as_dict()
    assert report.items() >= {"images": NUM, "failed": 1, "batch_size": 1}.items()
    assert set(report["stages"]) == {"read", "score", "write", "workers"}
