"""Predictions under attack: whatever bad requests do, every innocent one gets its right answer."""

import http.client
import io
import json
import os
import random
import select
import signal
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from fault_service import Serve, brim
from predict_storm import Ask, Told, bomb, form, geometries, resident_bytes, storm

from brim.segmentation import ModelLoader
from brim.segmentation.networks import create_model, normalise, save_weights
from brim.segmentation.objects import geojson
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry
from brim.sequences.config import SequenceTraining
from brim.sequences.corpus.packing import pack
from brim.sequences.corpus.synthetic import make_sequences
from brim.sequences.training.run import train
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.long

TILE, SIDE = 96, 64  # pixels: of the service's windows, of the images
MIB = 2**20
MARKS = {"raise": (250, 1, 2), "memory": (250, 1, 3), "kill": (250, 1, 4), "hang": (250, 1, 5)}  # of hooks/
KINDS = 12  # different innocent images
STORM = 1000  # connections


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
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of short sequences of two features."""
    folder = tmp_path_factory.mktemp("sequences")
    make_sequences(folder / "npy", 20, dim=2, classes=2, mean_length=30)
    pack(folder / "npy", folder / "corpus", dtype="float32")
    sizes = {"channels": 16, "hidden": 8, "attention": 8, "embedding": 16, "convolutions": 1}
    config = SequenceTraining(mode="supervised", classifier_epochs=1, batch_size=16, model=sizes, num_workers=0)
    train(folder / "corpus", folder / "run", config, device="cpu")
    return folder / "run"


@pytest.fixture(scope="module")
def serve(weights: Path, classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One service with the model registered; it runs batches of up to four."""
    data = tmp_path_factory.mktemp("predict") / "data"
    data.mkdir()
    cpu = torch.device("cpu")
    entry = BatchSizeEntry(
        optimal_batch_size=4, max_safe_batch_size=8, expected_throughput=100.0, p50_latency_ms=40.0,
        p95_latency_ms=50.0, memory_limit_mb=1000.0, image_size=1024, precision="fp32", layout="contiguous",
        compiled=False,
    )  # fmt: skip
    made = Serve(
        data,
        BRIM_TEST_POISON="1",
        BRIM_TEST_TILE=str(TILE),
        BRIM_PREDICT_HANG_S="5",
        BRIM_MAX_PREDICT_DEADLINE_MS=f"{1000 * PATIENCE_S:.0f}",
        BRIM_MAX_PREDICT_PART_S="1",
    )
    save_entry(data / "batch_sizes.json", device_key(cpu), device_info(cpu), "unet_tiny", entry, [])
    added = brim("models", "add", "cells", weights, "--network", "unet_tiny", "--data", data)
    assert added.returncode == 0, added.stderr
    added = brim("models", "add", "steps", classifier, "--data", data)
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


def kinds_of(told: list[Told], tag: str) -> set[int]:
    return {one.status for one in told if one.tag == tag}


@pytest.mark.smoke
def test_the_answers_are_those_of_predict(serve, expected):
    assert any(len(geometries(body)[0]) > 3 for body in expected.values())
    assert check_innocents(storm(serve, innocents(KINDS), together=1), expected) == KINDS


def test_hundreds_of_connections_with_poison_and_disconnects_among_them(serve, expected):
    """1 in 20 is poison of some kind, 1 in 10 hangs up; memory returns to what it was."""
    picked = random.Random(1)
    storm(serve, innocents(100))
    before = {name: resident_bytes(serve.children()[name]) for name in ("api", "predict")}
    asks = innocents(STORM)
    poison = [
        Ask(image(2, "raise"), "raise"),
        Ask(image(1, "memory"), "memory"),
        Ask(image(4)[:-40], "corrupt"),
        Ask(b"no image", "alien"),
        Ask(bomb(9000), "bomb"),
    ]
    for number in range(0, STORM, 20):
        asks[number] = poison[number // 20 % len(poison)]
    for number in range(5, STORM, 10):
        asks[number] = Ask(asks[number].image, "gone", leave_after_s=picked.random() / 2)
    for number in range(7, STORM, 100):
        asks[number] = Ask(asks[number].image, asks[number].tag, pieces=40)

    told = storm(serve, asks)

    assert check_innocents(told, expected) == STORM - STORM // 20 - STORM // 10 + STORM // 100
    assert kinds_of(told, "raise") == {500}
    assert kinds_of(told, "corrupt") == {422}
    assert kinds_of(told, "alien") == {415}
    assert kinds_of(told, "bomb") == {413}
    assert mean_batch(serve) > 1  # of four at most, fewer where clients are slow: the poison had neighbours
    counts = {stage: metrics(serve)[f'brim_predict_seconds_count{{stage="{stage}"}}'] for stage in ("finish", "total")}
    assert counts["finish"] - 100 <= counts["total"] <= counts["finish"]  # clients may go while theirs is sent
    until(lambda: not leftovers(serve, before), lambda: f"memory stays: {leftovers(serve, before)}")
    check_innocents(storm(serve, innocents(KINDS)), expected)


def mean_batch(serve: Serve) -> float:
    """Images to a batch so far, as the metrics have it."""
    found = metrics(serve)
    return found["brim_predict_batch_size_sum"] / found["brim_predict_batch_size_count"]


def metrics(serve: Serve) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in serve.get("/metrics").splitlines() if line.startswith("brim_predict_")]
    return {name: float(value) for name, _, value in lines}


def leftovers(serve: Serve, before: dict[str, int]) -> dict[str, str]:
    """Processes that hold much more than before."""
    now = {name: resident_bytes(serve.children()[name]) for name in before}
    return {
        name: f"{now[name] // MIB} MiB, was {before[name] // MIB}"
        for name in before
        if now[name] > before[name] + 64 * MIB
    }


def test_aborted_bodies_leave_no_memory_behind(serve):
    """Two hundred of up to 4 MiB, cut off somewhere; benchmarks/bench_aborts.py sends ten thousand."""
    picked = random.Random(2)

    def abort(count: int) -> None:
        for _ in range(count):
            body = form(serve, bytes(picked.randrange(2**12, 2**22)))
            with socket.create_connection(("127.0.0.1", serve.port)) as connection:
                connection.sendall(body[: picked.randrange(len(body))])

    abort(100)
    children = serve.children()
    before = {name: resident_bytes(children[name]) for name in ("api", "predict")}
    abort(200)
    assert serve.children() == children
    until(lambda: all(resident_bytes(children[name]) < 1.05 * before[name] + 2 * MIB for name in before))


def test_clients_that_send_nothing_hold_nobody_up(serve, expected):
    """Half a body each, on many connections, while others ask."""
    half = form(serve, image(0))[:-200]
    silent = [socket.create_connection(("127.0.0.1", serve.port)) for _ in range(200)]
    try:
        for one in silent:
            one.sendall(half)
        assert check_innocents(storm(serve, innocents(24)), expected) == 24
        assert select.select(silent, [], [], 0)[0] == []  # still waited for: no body arrived, no deadline passed
    finally:
        for one in silent:
            one.close()


@pytest.mark.parametrize("kind", ["bomb", "overlap", "truncated", "markers"])
def test_a_bad_file_costs_good_requests_nothing(serve, expected, kind):
    """Two clients send nothing but bad files, while others send good ones."""
    ending, refused = threading.Event(), []

    def attack() -> None:
        while not ending.is_set():
            refused.extend(storm(serve, [Ask(bad_file(kind), "bad")]))

    senders = [threading.Thread(target=attack) for _ in range(2)]
    for sender in senders:
        sender.start()
    try:
        told = storm(serve, innocents(40), together=4)
        until(lambda: len(refused) >= 4)
    finally:
        ending.set()
        for sender in senders:
            sender.join()

    assert check_innocents(told, expected) == 40
    assert kinds_of(refused, "bad") <= {413, 422}


@cache
def bad_file(kind: str) -> bytes:
    """Some 200 kB that take long to read, as far as nobody limits it."""
    if kind == "markers":  # a JPEG of nothing but empty segments
        return b"\xff\xd8" + b"\xff\xe0\0\2" * 50_000
    if kind == "truncated":
        return bomb(1500)[:-800]
    side, block = 512, b"\0\0\0\xff\xff"
    stream = zlib.compress(bytes(200 * MIB), 9) if kind == "bomb" else b"\x78\x9c" + block * 30_000
    starts, lengths = (np.full(side, value, "<u4").tobytes() for value in (8, len(stream)))
    at = 8 + len(stream)
    entries = [
        (256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (273, 4, side, at),
        (277, 3, 1, 1), (278, 4, 1, 1), (279, 4, side, at + len(starts)),
    ]  # fmt: skip
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", at + 2 * len(starts)) + stream + starts + lengths + directory + bytes(4)


def test_a_sequence_that_would_take_too_long_is_rejected_before_the_device_runs_it(serve):
    """1.8 MB of a sequence: the device would run nothing else for seconds."""
    for steps, expected_status, batches in ((40, 200, 1), (225_000, 413, 0)):
        data, before = io.BytesIO(), batches_run(serve)
        np.save(data, np.zeros((steps, 2), np.float32))
        status, said = post(serve, "/api/classify", data.getvalue())
        assert status == expected_status, said
        assert batches_run(serve) - before == batches


def batches_run(serve: Serve) -> float:
    return metrics(serve)["brim_predict_batch_size_count"]


def post(serve: Serve, path: str, data: bytes) -> tuple[int, Any]:
    head, _, body = form(serve, data).partition(b"\r\n\r\n")
    connection = http.client.HTTPConnection("127.0.0.1", serve.port, timeout=PATIENCE_S)
    kept = (line.split(": ", 1) for line in head.decode().split("\r\n")[2:])
    connection.request("POST", path, body, dict(kept))
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    return answer.status, said


@pytest.mark.smoke
def test_a_predictor_killed_in_the_middle_of_a_batch_loses_nothing(serve, expected):
    predictor = serve.children()["predict"]
    killer = threading.Timer(0.15, os.kill, (predictor, signal.SIGKILL))
    killer.start()

    told = storm(serve, innocents(150))

    killer.join()
    assert check_innocents(told, expected) == 150
    until(lambda: serve.children().get("predict", predictor) != predictor, serve.said)


@pytest.mark.parametrize("mark", ["kill", "hang"])
def test_an_image_that_ends_or_hangs_the_process_fails_alone(serve, expected, mark):
    """The others are run again; the one in the running batch at both deaths is given up, in words."""
    asks = innocents(40)
    asks[8] = Ask(image(1, mark), mark)

    told = storm(serve, asks)

    assert check_innocents(told, expected) == 39
    (culprit,) = [one for one in told if one.tag == mark]
    assert culprit.status == 503
    assert "died twice while it worked on this request" in culprit.detail
    assert check_innocents(storm(serve, innocents(KINDS)), expected) == KINDS
