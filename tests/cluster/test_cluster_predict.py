"""Bulk prediction on Ray, from store to store: a killed command, and a store that fails."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing

import cv2
import pytest
import torch
from cluster_nodes import PATIENT, Nodes

from brim.segmentation.config import FilesConfig
from brim.segmentation.networks import create_model, save_weights
from brim.segmentation.prediction import ModelLoader, predict_files
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry
from s3_store import FailingProxy, serve_s3
from waiting import until

pytest.importorskip("ray")

pytestmark = pytest.mark.long
NUM = 40
torch.set_num_threads(1)


@pytest.fixture
def one(tmp_path):
    """Images, one of them cut off, weights and a known batch size, and what one process makes of them."""
    (tmp_path / "images").mkdir()
    for index in range(NUM):
        cv2.imwrite(str(tmp_path / f"images/{index:02}.png"), make_cells(5, index, 96, 128)[0])
    broken = tmp_path / "images/07.png"
    broken.write_bytes(broken.read_bytes()[:300])
    weights, sizes, cpu = tmp_path / "weights.safetensors", tmp_path / "batch_sizes.json", torch.device("cpu")
    save_weights(create_model("unet_tiny"), weights, {})
    entry = BatchSizeEntry(
        optimal_batch_size=4, max_safe_batch_size=8, expected_throughput=100.0, p50_latency_ms=40.0,
        p95_latency_ms=50.0, memory_limit_mb=1000.0, image_size=1024, precision="fp32", layout="contiguous",
        compiled=False,
    )  # fmt: skip
    save_entry(sizes, device_key(cpu), device_info(cpu), "unet_tiny", entry, [])
    loader = ModelLoader({"unet_tiny": weights}, "cpu", sizes)
    predict_files([tmp_path / "images"], loader, tmp_path / "out", FilesConfig(model="unet_tiny", strict=True))
    return tmp_path


def test_a_killed_command_goes_on_where_it_was(one, monkeypatch):
    """Over Ray's client connection; the store fails five times in the second run."""
    with serve_s3() as store, FailingProxy(store.port) as proxy, ExitStack() as stack:
        store.s3.create_bucket(Bucket="cells")
        for file in (one / "images").iterdir():
            store.s3.put_object(Bucket="cells", Key=f"images/{file.name}", Body=file.read_bytes())
        for name, value in {**store.env, **PATIENT, "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            monkeypatch.setenv(name, value)
        nodes = stack.enter_context(closing(Nodes()))  # they know the store
        address = f"ray://127.0.0.1:{nodes.client_port}"
        command = [sys.executable, "-m", "brim", "segment", "predict", "s3://cells/images", "--out", "s3://cells/out"]
        command += ["--cluster", address, "--model", "unet_tiny", "--weights", str(one / "weights.safetensors")]
        command += ["--strict", "--json", "--batch-sizes", str(one / "batch_sizes.json")]

        proxy.hang_after("PUT /cells/out/.brim")
        begun = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: begun.poll() is not None or store.files("cells", "out/.brim"))
        assert begun.poll() is None
        begun.send_signal(signal.SIGKILL)
        begun.wait()
        recorded = b"".join(store.files("cells", "out/.brim").values()).splitlines()
        before = len(puts(proxy))
        proxy.hang_after("")
        proxy.fail("reset", times=5, after=20)
        done = subprocess.run(command, capture_output=True, text=True)
        made = {name: data for name, data in store.files("cells", "out").items() if not name.startswith(".brim")}

    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout).items() >= {"images": NUM, "failed": 1}.items()
    assert done.stderr.count("07.png") == 1
    assert made == {file.name: file.read_bytes() for file in (one / "out").glob("*.geojson")}
    kept = {os.path.basename(json.loads(line)["name"]) for line in recorded}  # noqa: PTH119
    assert kept
    assert not kept & {name.replace(".geojson", ".png") for name in puts(proxy)[before:]}


def puts(proxy: FailingProxy) -> list[str]:
    """Results that were written, each by its name, as often as it was."""
    paths = [request.split()[1].partition("?")[0] for request in proxy.requests if request.startswith("PUT")]
    return [path.rpartition("/")[2] for path in paths if path.endswith(".geojson")]
