"""Runs to look at over HTTP: what real evaluations left, and what is said where there is none."""

import base64
import json
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from live_api import Api, picture

from brim.jobs.kinds import KINDS, Inputs, Task, read_body
from brim.jobs.store import JobRow, Output
from brim.rf.config import GenerateConfig
from brim.rf.location.model import Estimate
from brim.rf.location.page import error_points
from brim.rf.location.solver import TX_HEIGHT_M
from brim.rf.physics.geometry import enu

TINY = {"channels": 16, "hidden": 8, "attention": 8, "embedding": 16, "convolutions": 1}


def do(api: Api, kind: str, config: dict[str, Any], datasets: Sequence[str] = (), run: str | None = None) -> JobRow:
    """Submit a job and run it here, to its end."""
    ids: dict[str, Any] = {"dataset_ids": list(datasets)} if datasets else {}
    ids |= {} if run is None else {"run_id": run}
    spec = read_body({"kind": kind, "name": f"a {kind}", "config": ids | config})
    jobs, data = api.catalogue.jobs, api.settings.data
    row, _ = jobs.submit(spec, makes=KINDS[kind].makes, inputs=ids)
    inputs = Inputs(
        datasets=tuple(data / "datasets" / id for id in datasets), run=None if run is None else data / "runs" / run
    )
    task = Task(
        spec=spec, inputs=inputs, out=data / row.out, device="cpu", batch_sizes=data / "batch_sizes.json",
        tell=lambda _: None, stop=lambda: False,
    )  # fmt: skip
    jobs.move(row.id, "running", of=["pending"])
    result = KINDS[kind].run(task)
    jobs.move(row.id, "completed", of=["running"], result=result, output=Output(items=1))
    found = jobs.get(row.id)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def located(shared: Api) -> dict[str, Any]:
    small = {"num_samples": 60, "duration_s": 0.2, "samples_per_shard": 32, "seed": 5}
    dataset = do(shared, "rf.generate", small).output_id
    run = do(shared, "rf.train", {"epochs": 5, "batch_size": 16}, [dataset]).output_id
    none = shared.get(f"/api/runs/{run}/errors")
    first = do(shared, "rf.evaluate", {}, [dataset], run)
    (shared.settings.data / first.out / "errors.json").write_text("{}")
    job = do(shared, "rf.evaluate", {}, [dataset], run)
    return {"dataset": dataset, "run": run, "none": none, "job": job}


def around_m(point: dict[str, Any]) -> tuple[float, float]:
    """East and north from the estimate to the truth."""
    here, there = point["estimate"], point["truth"]
    east, north, _ = enu(*map(np.array, (*there, TX_HEIGHT_M)), *map(np.array, (*here, TX_HEIGHT_M)))
    return float(east), float(north)


def test_errors_are_those_of_the_newest_evaluation_and_points_lie_as_far_apart_as_they_say(shared, located):
    answer = shared.get(f"/api/runs/{located['run']}/errors")

    found = answer.json
    assert answer.status == 200, found
    assert (found["job_id"], found["dataset_id"]) == (located["job"].id, located["dataset"])
    assert (found["samples"], found["level"], len(found["points"])) == (60, 0.95, 60)
    assert found["metrics"] == located["job"].result["metrics"]
    errors = [point["error_m"] for point in found["points"]]
    assert np.median(errors) == pytest.approx(found["metrics"]["median_error_m"], abs=0.02)
    assert np.mean(errors) == pytest.approx(found["metrics"]["mean_error_m"], abs=0.02)
    for point in found["points"]:
        assert math.hypot(*around_m(point)) == pytest.approx(point["error_m"], rel=2e-3, abs=1)
        assert point["bound_m"] > 0
    assert located["none"].status == 404
    assert "evaluate it first, with a job of kind rf.evaluate" in located["none"].json["detail"]


def test_an_ellipse_has_the_axes_of_its_covariance():
    degrees = torch.tensor([0.0, 30.0, 90.0, 135.0, 179.0], dtype=torch.float64)
    rad = torch.deg2rad(degrees)
    long, short = torch.stack([rad.sin(), rad.cos()], -1), torch.stack([rad.cos(), -rad.sin()], -1)  # east, north
    covariance = 300.0**2 * long[:, :, None] * long[:, None] + 20.0**2 * short[:, :, None] * short[:, None]

    origin = torch.tensor([[45.0, 8.0, 100.0]], dtype=torch.float64).expand(5, 3)
    estimate = Estimate(torch.zeros(5, 2), covariance, origin, *[None] * (len(Estimate._fields) - 3))
    rows = {"transmitter": origin, "crlb_m": torch.ones(5)}
    points = error_points(SimpleNamespace(estimate=estimate, rows=rows), GenerateConfig())

    scale = math.sqrt(5.991464547107979)  # of χ² with two degrees of freedom at 0.95
    for point, azimuth_deg in zip(points, degrees.tolist(), strict=True):
        shape = point["ellipse"]
        assert (shape["semi_major_m"], shape["semi_minor_m"]) == pytest.approx((300 * scale, 20 * scale), abs=0.01)
        assert (shape["azimuth_deg"] - azimuth_deg + 90) % 180 - 90 == pytest.approx(0, abs=1e-3)
        assert 0 <= shape["azimuth_deg"] < 180


# Images


def test_the_worst_crops_of_a_segmentation_are_shown(shared, located):
    run = shared.catalogue.runs.add(name="cells", kind="segment.train", path="runs/cells", config={}, summary={}).id
    none = shared.get(f"/api/runs/{run}/worst")
    pictures = [{"caption": "cell.png: 3 true, 2 predicted", "picture": base64.b64encode(picture()).decode()}]
    (shared.settings.data / "runs" / "cells").mkdir(parents=True)
    worst = {"note": "with the best weights", "pictures": pictures}
    (shared.settings.data / "runs" / "cells" / "worst.json").write_text(json.dumps(worst))

    assert (none.status, "made at its evaluations" in none.json["detail"]) == (404, True)
    assert shared.get(f"/api/runs/{run}/worst").json == worst
    assert shared.get(f"/api/runs/{located['run']}/worst").status == 409


# Sequences


def test_embeddings_are_shown_in_the_plane_with_what_was_predicted(shared, located):
    from brim.jobs.registry import datasets as sources
    from brim.sequences.corpus.synthetic import make_sequences

    folder = make_sequences(shared.settings.data.parent / "steps", 60, dim=8, classes=3, mean_length=12)
    dataset = sources.add(shared.catalogue, shared.settings.data, name="steps", path=folder, kind="sequences")
    assert dataset is not None
    recipe = {"mode": "supervised", "iterations": 1, "encoder_epochs": 2, "classifier_epochs": 20, "batch_size": 8}
    run = do(shared, "sequence.train", {**recipe, "model": TINY}, [dataset.id]).output_id
    none = shared.get(f"/api/runs/{run}/embedding")
    job = do(shared, "sequence.evaluate", {}, [dataset.id], run)
    answer = shared.get(f"/api/runs/{run}/embedding")

    found = answer.json
    assert answer.status == 200, found
    assert (none.status, "sequence.evaluate" in none.json["detail"]) == (404, True)
    assert (found["job_id"], found["dataset_id"]) == (job.id, dataset.id)
    assert found["scores"] == job.result["metrics"]
    assert len(found["points"]) == found["scores"]["items"] == 12
    right = sum(point["predicted"] == point["label"] for point in found["points"])
    assert right / 12 == pytest.approx(found["scores"]["accuracy"])
    places = np.array([[point["x"], point["y"]] for point in found["points"]])
    np.testing.assert_allclose(places.mean(0), 0, atol=1e-4)
    first, second = places.var(0)
    assert first >= second
    assert 0 < found["explained"][1] <= found["explained"][0] <= 1
    assert second / first == pytest.approx(found["explained"][1] / found["explained"][0], rel=1e-3)
    for id, view in ((located["run"], "embedding"), (run, "errors")):
        other = shared.get(f"/api/runs/{id}/{view}")
        assert (other.status, "was made by" in other.json["detail"]) == (409, True)
