"""Requests on a GPU: what `predict` finds, graphs for every size, memory back when a model goes."""

import gc
import json
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from brim.engine.batching.runner import BatchRunner
from brim.engine.batching.servable import Answer, Payload
from brim.engine.batching.warm_up import ladder
from brim.segmentation.networks import create_model, save_weights
from brim.segmentation.objects import Polygon, fill
from brim.segmentation.prediction import ModelLoader, SegmentServable
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry
from brim.service.prediction.process.models import Models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

GPU = torch.device("cuda:0")
TOP = 8


@pytest.fixture
def made(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    save_weights(create_model("unet_tiny"), tmp_path / "1.safetensors", {})
    entry = BatchSizeEntry(
        optimal_batch_size=TOP, max_safe_batch_size=32, expected_throughput=100.0, p50_latency_ms=40.0,
        p95_latency_ms=50.0, memory_limit_mb=1000.0, image_size=1024, precision="fp16", layout="channels_last",
        compiled=False,
    )  # fmt: skip
    save_entry(tmp_path / "sizes.json", device_key(GPU), device_info(GPU), "unet_tiny", entry, [])
    return tmp_path


@pytest.fixture
def models(made: Path) -> Any:
    found = Models("cuda", share=0.2, batch_sizes=made / "sizes.json")
    path = str(made / "1.safetensors")
    found.see({"name": "cells", "kind": "segment", "network": "unet_tiny", "path": path, "version": "1"})
    yield found
    found.close()


def png(height: int, width: int, seed: int) -> bytes:
    noise = np.random.default_rng(seed).random((height, width, 3)).astype(np.float32)
    smooth = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 4), None, 0, 250, cv2.NORM_MINMAX)
    return bytes(cv2.imencode(".png", smooth.astype(np.uint8))[1])


def mask_of(answer: Answer) -> np.ndarray:
    rings = [feature["geometry"]["coordinates"] for feature in json.loads(answer.body)["features"]]
    points = [[np.array(ring[:-1], np.int32) for ring in each] for each in rings]
    return fill([Polygon(each[0], tuple(each[1:]), 0, 0) for each in points], *size_of(answer))


def size_of(answer: Answer) -> tuple[int, int]:
    return answer.facts["height"], answer.facts["width"]


def test_answers_under_load_are_those_of_predict(made: Path, models: Models) -> None:
    models.find("cells")
    sizes = [(1024, 1024), (500, 700), (256, 256), (1500, 1100)]
    payloads = [Payload(png(*sizes[n % 4], n), f"{n}.png") for n in range(48)]
    with BatchRunner(models.find, decoders=4, finishers=4) as runner:
        replies = [runner.submit("cells", payload, time.monotonic() + 120) for payload in payloads]
        answers = [reply.result(120) for reply in replies]
        assert max(map(int, runner.snapshot()["batch_sizes"])) > 1
    loader = ModelLoader({"unet_tiny": made / "1.safetensors"}, "cuda", made / "sizes.json")
    for payload, answer in zip(payloads, answers, strict=True):
        expected = loader.predict(bytes(payload.data), "unet_tiny")
        assert expected.mask is not None
        assert float((mask_of(answer) != (expected.mask > 0)).mean()) < 0.01  # within the rounding of the threshold


def test_every_size_is_captured_before_a_request_waits_for_it(made: Path) -> None:
    models = Models("cuda", share=0.2, batch_sizes=made / "sizes.json")
    path = str(made / "1.safetensors")
    models.see({"name": "cells", "kind": "segment", "network": "unet_tiny", "path": path, "version": "1"})

    servable = models.find("cells")

    assert isinstance(servable, SegmentServable)
    assert tuple(servable.sizes) == ladder(TOP)
    assert {shape[0] for shape in servable._network._graphs} == set(ladder(TOP))
    assert all(0 < servable.expected_s[size] < 1 for size in ladder(TOP))
    assert models.describe()[0]["memory_bytes"] < 0.2 * torch.cuda.get_device_properties(GPU).total_memory
    del servable
    models.close()


def test_memory_returns_when_a_model_goes(models: Models) -> None:
    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(GPU))

    torch.zeros(1, device=GPU)
    before = held()
    models.find("cells")
    assert held() > before

    models.forget("cells")

    assert held() <= before + (4 << 20)  # cuBLAS and cuDNN keep a workspace of their own
