"""Cancel and pause of each kind that lasts: it stops by itself, and what exists is valid, listed and goes on."""

import json
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from fault_service import QUICK, Serve, brim

from brim.engine.storage.dataset import Dataset
from brim.rf import from_mapping, generate
from brim.segmentation.scenes import make_cells
from brim.sequences.corpus.synthetic import make_sequences

pytestmark = pytest.mark.long

MANY = 100_000
TINY = {"channels": 16, "hidden": 8, "attention": 8, "embedding": 16, "convolutions": 1}


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    made = Serve(tmp_path_factory.mktemp("stop") / "data", BRIM_TEST_PATIENT="1")
    try:
        yield made.start(ready=False)
    finally:
        made.close()


@pytest.fixture(scope="module")
def inputs(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small dataset of each kind, added by the administrator's command; ids by kind."""
    folder = tmp_path_factory.mktemp("inputs")
    generate(from_mapping(QUICK), folder / "rf", 24, device="cpu")
    for index in range(8):
        image, mask = make_cells(3, index, 64, 64)
        for name, pixels in (("images", image[..., ::-1]), ("masks", mask.astype(np.uint8) * 255)):
            (folder / "images" / name).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / "images" / name / f"{index}.png"), pixels)
    sequences = make_sequences(folder / "sequences", 60, dim=8, classes=3, mean_length=12)
    return {kind: add(serve, kind, folder / kind) for kind in ("rf", "images")} | {
        "sequences": add(serve, "sequences", Path(sequences))
    }


def add(serve: Serve, kind: str, path: Path) -> str:
    done = brim("datasets", "add", kind, path, "--kind", kind, "--data", serve.data, "--json")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["id"])


KINDS = {
    "rf.generate": ("", {"num_samples": MANY, **QUICK}),
    "rf.train": ("rf", {"epochs": MANY, "batch_size": 8}),
    "segment.tune": ("", {"models": ["unet_tiny"], "size": 64, "seconds": 60.0}),
    "segment.train": ("images", {"model": "unet_tiny", "size": 32, "epochs": MANY, "batch_size": 4}),
    "sequence.train": ("sequences", {"encoder_epochs": MANY, "batch_size": 8, "model": TINY}),
}
VERBS = ("cancel", "pause")
CASES = [
    pytest.param(kind, verb, marks=pytest.mark.smoke if (kind, verb) == ("rf.train", "pause") else ())
    for kind in KINDS
    for verb in VERBS
]


@pytest.mark.parametrize(("kind", "verb"), CASES)
def test_a_stop_leaves_what_can_go_on(serve, inputs, kind, verb):
    reads, config = KINDS[kind]
    config = {**config, "dataset_ids": [inputs[reads]]} if reads else config
    job = serve.submit({"kind": kind, "name": f"{verb} {kind}", "config": config})["id"]
    serve.wait_progress(job, 1) if reads or kind == "rf.generate" else serve.wait(job, "running")
    worker = serve.children()["w0"]

    serve.act(job, verb)
    stopped = serve.wait(job, "cancelled", "paused")

    assert serve.children()["w0"] == worker, "it was killed"
    assert stopped["status"] == {"cancel": "cancelled", "pause": "paused"}[verb]
    check_left(serve, kind, job)
    if verb == "pause":
        before = stopped["progress"]["current"]
        serve.act(job, "resume")
        after = serve.wait_progress(job, before + 1) if before else serve.wait(job, "running")
        assert after["status"] == "running"
        serve.act(job, "cancel")
        serve.wait(job, "cancelled")


def check_left(serve: Serve, kind: str, job: str) -> None:
    """A partial dataset or run is listed, and whole as far as it goes."""
    if kind == "rf.generate":
        row = next(row for row in serve.get("/api/datasets")["datasets"] if row["job_id"] == job)
        assert row["state"] == "partial"
        dataset = Dataset(serve.data / "datasets" / row["id"])
        dataset.verify()
        assert len(dataset) == row["items"] > 0
    elif kind.endswith(".train"):
        row = next(row for row in serve.get("/api/runs")["runs"] if row["job_id"] == job)
        assert row["state"] == "partial"
        assert list((serve.data / "runs" / row["id"]).rglob("last/state.json"))
