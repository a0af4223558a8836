"""Loaded models behind the runner: every innocent request gets the answer that `predict` would give it."""

import gc
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brim.engine.batching.runner import BatchRunner
from brim.engine.batching.servable import Answer, Payload
from brim.engine.device import total_bytes
from brim.engine.device.memory import inject_oom
from brim.errors import ImageError
from brim.segmentation.config import REGISTERED
from brim.segmentation.networks import save_weights
from brim.segmentation.prediction import ModelLoader, SegmentServable
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry
from brim.service.prediction.process.models import Models, Registered
from waiting import PATIENCE_S

CPU = torch.device("cpu")
THRESHOLDS = (0.5, 0.6)
TILE = 64


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.last(torch.relu(self.first(x))) * 8
        return torch.where(x.amin((1, 2, 3), keepdim=True) > 2.0, torch.nan, found)  # white images lead to NaN


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(REGISTERED, "tiny", Tiny)
    for version in ("1", "2"):
        torch.manual_seed(int(version))
        save_weights(Tiny(), tmp_path / f"{version}.safetensors", {})
    entry = BatchSizeEntry(
        optimal_batch_size=4, max_safe_batch_size=9, expected_throughput=100.0, p50_latency_ms=40.0,
        p95_latency_ms=50.0, memory_limit_mb=1000.0, image_size=1024, precision="fp32", layout="contiguous",
        compiled=False,
    )  # fmt: skip
    save_entry(tmp_path / "sizes.json", device_key(CPU), device_info(CPU), "tiny", entry, [])
    return tmp_path


def registered(made: Path, version: str = "1", name: str = "cells") -> dict[str, Any]:
    path = str(made / f"{version}.safetensors")
    return {"name": name, "kind": "segment", "network": "tiny", "path": path, "version": version}


@pytest.fixture
def models(made: Path) -> Iterator[Models]:
    def make(wanted: Registered, device: torch.device, lock: Any) -> SegmentServable:
        return SegmentServable(
            wanted.network, wanted.path, device, lock=lock, batch_sizes=made / "sizes.json", tile=TILE
        )  # fmt: skip

    found = Models("cpu", share=0.5, make=make)
    found.see(registered(made))
    found.find("cells")
    yield found
    found.close()


def png(height: int, width: int, seed: int) -> bytes:
    noise = np.random.default_rng(seed).random((height, width, 3)).astype(np.float32)
    smooth = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 2), None, 0, 250, cv2.NORM_MINMAX)
    return bytes(cv2.imencode(".png", smooth.astype(np.uint8))[1])


def outlines(body: bytes) -> list[Any]:
    return [feature["geometry"]["coordinates"] for feature in json.loads(body)["features"]]


class Expected:
    """What predict finds, each once."""

    def __init__(self, made: Path) -> None:
        self._loaders = {
            version: ModelLoader({"tiny": made / f"{version}.safetensors"}, "cpu", made / "sizes.json", tile=TILE)
            for version in ("1", "2")
        }  # fmt: skip

    def outlines(self, payload: Payload, version: str) -> list[Any]:
        from brim.segmentation.objects import geojson

        threshold = payload.options.get("threshold", 0.5)
        return outlines(geojson(self._loaders[version].predict(bytes(payload.data), "tiny", threshold).polygons))


def payload(number: int, threshold: float = 0.5) -> Payload:
    sizes = ((64, 64), (60, 50), (30, 64), (150, 70))  # the last in windows
    return Payload(png(*sizes[number % 4], number), f"{number}.png", {"threshold": threshold})


def poison(number: int) -> Payload:
    white = bytes(cv2.imencode(".png", np.full((64, 64, 3), 255, np.uint8))[1])
    return Payload([png(64, 64, 0)[:-40], white][number % 2], f"poison-{number}.png", {})


def test_innocent_requests_are_answered_among_poison_disconnects_and_oom(made, models):
    before = threading.active_count()
    with BatchRunner(models.find) as runner, inject_oom(above=3):
        asked: list[tuple[Payload, Future[Answer]]] = []
        for number in range(60):
            one = poison(number) if number % 10 == 3 else payload(number, THRESHOLDS[number % 2])
            asked.append((one, runner.submit("cells", one, time.monotonic() + PATIENCE_S)))
            if number % 10 == 7:
                runner.cancel(asked[-1][1])
        expected = Expected(made)
        for number, (one, reply) in enumerate(asked):
            if number % 10 == 3:
                with pytest.raises(ImageError, match=r"^poison-"):
                    reply.result(PATIENCE_S)
            elif number % 10 != 7:
                assert outlines(reply.result(PATIENCE_S).body) == expected.outlines(one, "1")
                assert reply.result().facts["seconds"]["total"] > 0
        sizes = runner.snapshot()["batch_sizes"]
        assert max(map(int, sizes)) > 1
    assert threading.active_count() == before
    del asked, reply, expected
    models.close()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Tiny]


def test_a_registered_network_is_loaded_by_its_kind_within_its_share_of_the_memory(made):
    models = Models("cpu", share=0.25, batch_sizes=made / "sizes.json", decoders=1)
    models.see(registered(made))
    image = payload(0)

    servable = models.find("cells")
    item = servable.decode(image)
    answer = servable.finish(item, servable.collect(servable.forward(item.parts)))

    assert outlines(answer.body) == Expected(made).outlines(image, "1")
    assert servable.inspect(image).expected_s
    assert models._budget() == total_bytes(CPU) // 4
    models.close()
