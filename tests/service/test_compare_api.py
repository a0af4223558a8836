"""What pages compare and show: runs by quality, tags and notes; images; evaluations on data not trained on."""

import asyncio
import io
import json
import os
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
from live_api import JOBS
from PIL import Image

from brim.service.api.routes.datasets import CachedImages
from brim.service.reader import functions

ASKED = SimpleNamespace(kind="rf.evaluate", name="an evaluation", config={})


def add_run(api: Any, name: str, kind: str, summary: dict[str, Any], **config: Any) -> str:
    row = api.catalogue.runs.add(name=name, kind=kind, path=f"runs/{name}", config=config, summary=summary)
    return str(row.id)


def finish(api: Any, asked: Any, result: dict[str, Any], **inputs: Any) -> str:
    job, _ = api.catalogue.jobs.submit(asked, inputs=inputs, makes="result")
    api.start(job.id)
    api.finish(job.id, items=0, result=result)
    return str(job.id)


def test_runs_are_listed_by_one_figure_of_their_kind_and_found_by_kind_and_name(api):
    locator = add_run(api, "the locator", "rf.train", {"best_val_loss": 1.0})
    add_run(api, "cells", "segment.train", {"dice": 0.9, "scores": {"ap50": 0.8}})
    add_run(api, "words", "sequence.train", {"scores": {"accuracy": 0.75, "ccc": 0.5}})
    add_run(api, "broken", "segment.train", {"dice": float("nan")})
    before = api.get("/api/runs").json["runs"]
    finish(api, ASKED, {"metrics": {"median_error_m": 345.6}}, run_id=locator)

    after = {one["name"]: one["quality"] for one in api.get("/api/runs?brief=true").json["runs"]}

    assert {one["name"]: one["quality"] and one["quality"]["name"] for one in before} == {
        "the locator": None, "cells": "ap50", "words": "accuracy", "broken": None,
    }  # fmt: skip
    assert after["the locator"] == {"name": "median_error_m", "value": 345.6, "smaller_is_better": True}
    assert after["cells"] == {"name": "ap50", "value": 0.8, "smaller_is_better": False}
    assert [one["name"] for one in api.get("/api/runs?kind=segment.train").json["runs"]] == ["broken", "cells"]
    assert [one["name"] for one in api.get("/api/runs?name=LOCAT").json["runs"]] == ["the locator"]


def test_tags_and_notes_of_a_run_stay_until_they_are_replaced(api):
    run = add_run(api, "cells", "segment.train", {})

    first = api.ask("PATCH", f"/api/runs/{run}", {"tags": ["night", "v2"], "notes": "more epochs"})
    second = api.ask("PATCH", f"/api/runs/{run[:6]}", {"tags": ["v3"]})
    wrong = api.ask("PATCH", f"/api/runs/{run}", {"tags": "night"})

    assert (first.status, first.json["tags"], first.json["notes"]) == (200, ["night", "v2"], "more epochs")
    assert (second.json["tags"], second.json["notes"]) == (["v3"], "more epochs")
    assert (wrong.status, wrong.json["field"]) == (422, "tags")
    assert api.get(f"/api/runs/{run}").json["tags"] == ["v3"]


def test_an_evaluation_on_what_a_run_was_trained_on_is_refused_unless_asked_for(api):
    seen, other = api.add_dataset(path="datasets/a").id, api.add_dataset(name="other", path="datasets/b").id
    run = add_run(api, "a locator", "rf.train", {}, dataset_ids=[seen])

    def ask(dataset: str, **more: Any) -> Any:
        config = {"run_id": run, "dataset_ids": [dataset], **more}
        return api.post(JOBS, {"kind": "rf.evaluate", "name": "e", "config": config})

    refused, allowed, held_out = ask(seen), ask(seen, allow_training_data=True), ask(other)

    assert (refused.status, refused.json["field"]) == (409, "config.dataset_ids[0]")
    assert "was trained on" in refused.json["detail"]
    assert "allow_training_data" in refused.json["detail"]
    for answer in (allowed, held_out):  # both are refused later: their files do not exist here
        assert "was trained on" not in answer.json["detail"]


def test_an_image_of_a_dataset_is_shown_small_with_its_objects(api):
    folder = api.settings.data / "datasets" / "cells"
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    mask = np.zeros((200, 400), np.uint8)
    mask[20:80, 20:80], mask[120:180, 300:380] = 1, 2
    Image.fromarray(np.full((200, 400), 90, np.uint8)).save(folder / "images" / "a b.png")
    Image.fromarray(mask).save(folder / "masks" / "a b.png")
    dataset = api.add_dataset(kind="images", path="datasets/cells", items=1).id

    outlined = api.get(f"/api/datasets/{dataset}/images/0?side=100")
    plain = api.get(f"/api/datasets/{dataset}/images/0?side=100&outlines=false")
    pixels = np.array(Image.open(io.BytesIO(outlined.body)))

    assert outlined.headers["content-type"] == "image/png"
    assert (outlined.headers["brim-objects"], outlined.headers["brim-size"]) == ("2", "400x200")
    assert pixels.shape == (50, 100, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == 2
    assert len(np.unique(np.array(Image.open(io.BytesIO(plain.body))))) == 1
    assert sum(json.loads(outlined.headers["brim-sizes"])["counts"]) == 2

    # the same with what a job predicted in it
    inputs = {"dataset_ids": [dataset], "run_id": add_run(api, "cells", "segment.train", {})}
    asked = SimpleNamespace(kind="segment.predict", name="predicted", config=inputs)
    job = finish(api, asked, {})
    ring = [[100, 20], [160, 20], [160, 80], [100, 80], [100, 20]]
    feature = {
        "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": {"measurements": {"area_px": 3600}}
    }  # fmt: skip
    (api.settings.data / "results" / job).mkdir(parents=True)
    (api.settings.data / "results" / job / "a b.geojson").write_text(json.dumps({"features": [feature]}))
    inputs = {**inputs, "dataset_ids": [api.add_dataset(kind="images", path="datasets/others").id, dataset]}
    both = finish(api, SimpleNamespace(kind="segment.predict", name="of two", config=inputs), {})
    (api.settings.data / "results" / both / dataset).mkdir(parents=True)
    (api.settings.data / "results" / both / dataset / "a b.geojson").write_text(json.dumps({"features": [feature] * 3}))
    of_two = api.get(f"/api/datasets/{dataset}/images/0?job_id={both}")
    assert of_two.headers["brim-objects"] == "3", "of several datasets each has a folder"
    predicted = api.get(f"/api/datasets/{dataset}/images/0?side=400&outlines=false&job_id={job}")
    pixels = np.array(Image.open(io.BytesIO(predicted.body))).astype(int)
    (rows, columns) = np.nonzero(np.abs(pixels - 90).sum(2))
    assert predicted.headers["brim-objects"] == "1"
    assert (rows.min(), columns.min()) == (20, 100)
    assert abs(rows.max() - 80) <= 1
    assert abs(columns.max() - 160) <= 1
    other = finish(api, SimpleNamespace(kind="rf.generate", name="other", config={"num_samples": 5}), {})
    assert api.get(f"/api/datasets/{dataset}/images/0?job_id={other}").status == 409
    shutil.copytree(folder, folder.with_name("elsewhere"))
    elsewhere = api.add_dataset(kind="images", path="datasets/elsewhere", items=1).id
    assert api.get(f"/api/datasets/{elsewhere}/images/0?job_id={job}").status == 409, "it read another dataset"

    assert api.get(f"/api/datasets/{dataset}/images/1").status == 404
    (folder / "images" / "b.png").write_bytes(b"no image")
    damaged = api.get(f"/api/datasets/{dataset}/images/1")
    assert damaged.status == 409
    assert "b.png" in damaged.json["detail"]
    assert "(path)" not in damaged.json["detail"]
    assert api.get(f"/api/datasets/{api.add_dataset().id}/images/0").status == 409


def test_images_are_listed_again_only_after_a_folder_changed(tmp_path):
    row: Any = SimpleNamespace(id="x", name="cells", state="ready")
    (tmp_path / "images" / "deep").mkdir(parents=True)
    (tmp_path / "masks").mkdir()
    folders = [folder for folder in (tmp_path, *tmp_path.rglob("*")) if folder.is_dir()]
    for name in ("images/a.png", "images/deep/b.png", "masks/a.tif"):
        (tmp_path / name).touch()
    calls = []

    class Lister:
        async def call(self, function: str, **arguments: Any) -> Any:
            calls.append(function)
            return getattr(functions, function)(**arguments)

    async def run() -> Any:
        images = CachedImages(Lister())  # type: ignore[arg-type]
        young = [await images.read(row, tmp_path) for _ in range(2)]
        assert (len(calls), young[0]) == (2, young[1])  # a file could have come within the clock's tick
        for folder in folders:
            os.utime(folder, (1e9, 1e9))
        await asyncio.gather(*(images.read(row, tmp_path) for _ in range(20)))
        assert len(calls) == 3
        (tmp_path / "images" / "deep" / "c.png").touch()
        return young[0], await images.read(row, tmp_path)

    before, after = asyncio.run(run())

    assert before == [("a.png", str(tmp_path / "masks" / "a.tif")), ("deep/b.png", None)]
    assert after == [*before, ("deep/c.png", None)]
