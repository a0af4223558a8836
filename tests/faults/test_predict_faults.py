"""Predictions under attack: whatever bad requests do, every innocent one gets its right answer."""

import asyncio
import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from fault_service import Serve, brim

from brim.segmentation import ModelLoader
from brim.segmentation.networks import create_model, normalise, save_weights
from brim.segmentation.objects import geojson
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.long

TILE, SIDE = 96, 64  # pixels: of the service's windows, of the images
MARKS = {"raise": (250, 1, 2), "memory": (250, 1, 3), "kill": (250, 1, 4), "hang": (250, 1, 5)}  # of hooks/
KINDS = 12  # different innocent images
STORM = 1000  # connections
EDGE = "edge-of-the-form"


@dataclass(frozen=True)
class Ask:
    """One request, and how its client behaves."""

    image: bytes
    tag: str  # what is expected of it
    leave_after_s: float | None = None  # hangs up without a word


@dataclass(frozen=True)
class Told:
    """What came back; status 0 where the client left."""

    tag: str
    status: int
    body: bytes


def storm(serve: Serve, asks: Sequence[Ask]) -> list[Told]:
    """All of them at once, on a connection each; in their order."""

    async def run() -> list[Told]:
        return list(await asyncio.gather(*(asyncio.wait_for(send(serve, ask), PATIENCE_S) for ask in asks)))

    return asyncio.run(run())


async def send(serve: Serve, ask: Ask) -> Told:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", serve.port)
    try:
        writer.write(form(serve, ask.image))
        await writer.drain()
        if ask.leave_after_s is not None:
            await asyncio.sleep(ask.leave_after_s)
            return Told(ask.tag, 0, b"")
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        return Told(ask.tag, int(lines[0].split()[1]), await reader.readexactly(length))
    finally:
        writer.transport.abort()


def form(serve: Serve, image: bytes) -> bytes:
    """POST /api/segment as it goes over the wire."""
    part = f'--{EDGE}\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    body = part.encode() + image + f"\r\n--{EDGE}--\r\n".encode()
    head = [
        "POST /api/segment HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {serve.token}",
        f"Content-Type: multipart/form-data; boundary={EDGE}",
        f"Content-Length: {len(body)}",
        f"Brim-Deadline-Ms: {1000 * PATIENCE_S:.0f}",  # on a busy machine too, nobody is refused
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a network none of whose scores is close to the threshold: a last bit moves no outline."""
    torch.manual_seed(3)
    module = create_model("unet_tiny").eval()
    pixels = torch.stack([torch.from_numpy(make_cells(5, kind, SIDE, SIDE)[0]) for kind in range(KINDS)])
    with torch.no_grad():
        scores = module(normalise(pixels.permute(0, 3, 1, 2))).flatten().sort().values
        tail = scores[int(0.9 * len(scores)) : int(0.99 * len(scores))]
        gap = tail.diff().argmax()
        module.score.bias -= (tail[gap] + tail[gap + 1]) / 2
        for parameter in module.score.parameters():
            parameter *= 40
    file = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_weights(module, file, {})
    return file


@pytest.fixture(scope="module")
def serve(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One service with the model registered; it runs batches of up to four."""
    data = tmp_path_factory.mktemp("predict") / "data"
    data.mkdir()
    cpu = torch.device("cpu")
    entry = BatchSizeEntry(
        optimal_batch_size=4, max_safe_batch_size=8, expected_throughput=100.0, p50_latency_ms=40.0,
        p95_latency_ms=50.0, memory_limit_mb=1000.0, image_size=1024, precision="fp32", layout="contiguous",
        compiled=False,
    )  # fmt: skip
    deadline = {"BRIM_PREDICT_HANG_S": "5", "BRIM_MAX_PREDICT_DEADLINE_MS": f"{1000 * PATIENCE_S:.0f}"}
    made = Serve(data, BRIM_TEST_POISON="1", BRIM_TEST_TILE=str(TILE), **deadline)
    save_entry(data / "batch_sizes.json", device_key(cpu), device_info(cpu), "unet_tiny", entry, [])
    added = brim("models", "add", "cells", weights, "--network", "unet_tiny", "--data", data)
    assert added.returncode == 0, added.stderr
    try:
        made.start()
        until(lambda: storm(made, [Ask(image(0), "innocent")])[0].status == 200, made.said)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected(weights: Path) -> dict[str, bytes]:
    """What predict says of every innocent image."""
    loader = ModelLoader({"unet_tiny": weights}, "cpu", batch_sizes=None, tile=TILE)
    pictures = {str(kind): image(kind) for kind in range(KINDS)} | {"memory": image(1, "memory")}
    return {tag: geojson(loader.predict(picture, "unet_tiny").polygons) for tag, picture in pictures.items()}


def image(kind: int, mark: str | None = None) -> bytes:
    """A PNG of cells, different ones of different sides, with a mark in its corner where it is poison."""
    pixels, _ = make_cells(5, kind, SIDE, SIDE if kind % 6 else SIDE + 40)  # those are cut into windows
    if mark is not None:
        pixels[0, 0] = MARKS[mark]
    return bytes(cv2.imencode(".png", pixels[..., ::-1])[1])


def innocents(count: int) -> list[Ask]:
    pictures = [image(kind) for kind in range(KINDS)]
    return [Ask(pictures[number % KINDS], str(number % KINDS)) for number in range(count)]


def geometries(body: bytes) -> tuple[list[Any], np.ndarray]:
    """Outlines and confidences of an answer."""
    features = json.loads(body)["features"]
    confidences = [one["properties"]["measurements"]["confidence"] for one in features]
    return [one["geometry"] for one in features], np.array(confidences)


def check_innocents(told: list[Told], expected: dict[str, bytes]) -> int:
    """All of them are right; their number."""
    asked = [one for one in told if one.tag in expected]
    wrong = [(one.tag, one.status, one.body[:200]) for one in asked if one.status != 200]
    assert not wrong, f"{len(wrong)} of {len(asked)} innocent requests failed: {wrong[:3]}"
    for one in asked:
        outlines, confidences = geometries(one.body)
        wanted_outlines, wanted = geometries(expected[one.tag])
        assert outlines == wanted_outlines
        np.testing.assert_allclose(confidences, wanted, atol=1e-3)
    return len(asked)


@pytest.mark.smoke
def test_a_predictor_killed_in_the_middle_of_a_batch_loses_nothing(serve, expected):
    assert any(len(geometries(body)[0]) > 3 for body in expected.values())
    predictor = serve.children()["predict"]
    killer = threading.Timer(0.15, os.kill, (predictor, signal.SIGKILL))
    killer.start()

    told = storm(serve, innocents(150))

    killer.join()
    assert check_innocents(told, expected) == 150
    until(lambda: serve.children().get("predict", predictor) != predictor, serve.said)


def test_hundreds_of_connections_with_poison_and_disconnects_among_them(serve, expected):
    """1 in 20 is poison of some kind, 1 in 10 hangs up."""
    picked = random.Random(1)
    asks = innocents(STORM)
    poison = [
        Ask(image(2, "raise"), "raise"),
        Ask(image(1, "memory"), "memory"),
        Ask(image(4)[:-40], "corrupt"),
        Ask(b"no image", "alien"),
    ]
    for number in range(0, STORM, 20):
        asks[number] = poison[number // 20 % len(poison)]
    for number in range(5, STORM, 10):
        asks[number] = Ask(asks[number].image, "gone", leave_after_s=picked.random() / 2)

    told = storm(serve, asks)

    assert check_innocents(told, expected) == STORM - STORM // 20 - STORM // 10 + sum(a.tag == "memory" for a in asks)
    statuses = {tag: {one.status for one in told if one.tag == tag} for tag in ("raise", "corrupt", "alien")}
    assert statuses == {"raise": {500}, "corrupt": {422}, "alien": {415}}
    check_innocents(storm(serve, innocents(KINDS)), expected)


@pytest.mark.parametrize("mark", ["kill", "hang"])
def test_an_image_that_ends_or_hangs_the_process_fails_alone(serve, expected, mark):
    """The others are run again; the one in the running batch at both deaths is given up, in words."""
    asks = innocents(40)
    asks[8] = Ask(image(1, mark), mark)

    told = storm(serve, asks)

    assert check_innocents(told, expected) == 39
    (culprit,) = [one for one in told if one.tag == mark]
    assert culprit.status == 503
    assert b"died twice while it worked on this request" in culprit.body
    assert check_innocents(storm(serve, innocents(KINDS)), expected) == KINDS
