"""A run's metrics over HTTP: all of them as one series, read on from a number, thinned for a chart."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from live_api import Api

from brim.jobs.store import Output


@pytest.fixture
def run(api: Api) -> tuple[str, Path]:
    """A run that is training, and its directory."""
    dataset = api.add_dataset(items=100)
    spec = _Spec({"dataset_ids": [dataset.id]})
    job, _ = api.catalogue.jobs.submit(
        spec, inputs={"dataset_ids": [dataset.id]}, makes="run", reads="rf", reads_run=None
    )
    assert api.catalogue.jobs.move(job.id, "running", of=["pending"], worker="w0")
    folder = api.settings.data / job.out
    folder.mkdir(parents=True)
    return job.output_id, folder


class _Spec:
    kind, name = "rf.train", "a run"

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config


def write(folder: Path, phase: str, lines: list[dict[str, Any]], at_s: float = 1e9) -> Path:
    file = folder / phase / "metrics.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(file, (at_s, at_s))
    return file


def steps(answer: Any) -> list[int]:
    return [line["step"] for line in answer.json["lines"]]


def test_a_run_without_metrics_has_no_lines(api, run):
    assert api.get(f"/api/runs/{run[0]}/metrics").json == {"lines": [], "next": 0}
    assert api.get(f"/api/runs/{run[0]}/metrics?points=5").json == {"lines": [], "next": 0}
    assert api.get(f"/api/runs/{'0' * 32}/metrics").status == 404


def test_lines_are_read_on_from_where_the_last_answer_ended(api, run):
    id, folder = run
    file = write(folder, "train", [{"step": step, "epoch": 0, "loss": 1 / step} for step in range(1, 8)])

    first = api.get(f"/api/runs/{id}/metrics?limit=3")
    second = api.get(f"/api/runs/{id}/metrics?after={first.json['next']}")

    assert (steps(first), first.json["next"]) == ([1, 2, 3], 3)
    assert (steps(second), second.json["next"]) == ([4, 5, 6, 7], 7)
    assert first.json["lines"][1] == {"phase": "train", "step": 2, "epoch": 0, "loss": 0.5}
    with file.open("a") as opened:
        opened.write('{"step": 8, "epoch": 0}\n{"step": 9, "ep')  # the last is being written
    third = api.get(f"/api/runs/{id}/metrics?after={second.json['next']}")
    assert (steps(third), third.json["next"]) == ([8], 8)


def test_the_phases_follow_one_another_in_the_order_they_were_written(api, run):
    id, folder = run
    write(folder, "encoder-1", [{"step": 1}, {"step": 2}], at_s=100)
    write(folder, "classifier-1", [{"step": 1}, {"step": 2}], at_s=200)
    write(folder, "encoder-2", [{"step": 1}], at_s=300)

    every = api.get(f"/api/runs/{id}/metrics").json
    part = api.get(f"/api/runs/{id}/metrics?after=1&limit=2").json

    phases = ["encoder-1", "encoder-1", "classifier-1", "classifier-1", "encoder-2"]
    assert [line["phase"] for line in every["lines"]] == phases
    assert part["lines"] == every["lines"][1:3]
    assert part["next"] == 3


def test_a_run_that_went_back_to_a_checkpoint_says_where_it_is(api, run):
    id, folder = run
    write(folder, "train", [{"step": 1}])

    assert api.get(f"/api/runs/{id}/metrics?after=500").json == {"lines": [], "next": 1}


def test_what_is_no_number_in_json_is_null_and_what_is_no_json_is_left_out(api, run):
    id, folder = run
    file = write(folder, "train", [{"step": 1}])
    file.write_text('{"step": 1, "loss": NaN}\nnonsense\n[1]\n{"step": 2, "loss": 0.5}\n')

    answer = api.get(f"/api/runs/{id}/metrics").json

    assert answer["lines"] == [
        {"phase": "train", "step": 1, "loss": None},
        {"phase": "train", "step": 2, "loss": 0.5},
    ]
    assert answer["next"] == 4


def test_a_thinned_series_keeps_its_ends_and_its_rare_evaluations(api, run):
    id, folder = run
    lines = []
    for step in range(1, 10_001):
        lines.append({"step": step, "epoch": step // 1000, "loss": 1.0, "lr": 1e-3})
        if step % 1000 == 0:
            lines.append({"step": step, "epoch": step // 1000, "val_loss": 2.0})
    write(folder, "train", lines)

    thin = api.get(f"/api/runs/{id}/metrics?points=101").json
    train = [line["step"] for line in thin["lines"] if "loss" in line]
    rare = [line["step"] for line in thin["lines"] if "val_loss" in line]

    assert len(train) == 101
    assert (train[0], train[-1]) == (1, 10_000)
    assert {later - earlier for earlier, later in pairwise(train)} <= {99, 100, 101}
    assert rare == list(range(1000, 10_001, 1000)), "none of few is lost"
    assert [line["step"] for line in thin["lines"]] == sorted(line["step"] for line in thin["lines"])
    assert thin["next"] == len(lines), "from where one reads on"
    assert steps(api.get(f"/api/runs/{id}/metrics?points=1")) == [10_000, 10_000]


@pytest.mark.parametrize("query", ["after=-1", "limit=0", "limit=10001", "points=0", "points=x", "after="])
def test_numbers_that_are_none_are_refused(api, run, query):
    answer = api.get(f"/api/runs/{run[0]}/metrics?{query}")

    assert answer.status == 422
    assert answer.json["field"] == query.partition("=")[0]


def test_a_finished_run_still_has_its_metrics(api, run):
    id, folder = run
    write(folder, "train", [{"step": 1}])
    job_id = api.get(f"/api/runs/{id}").json["job_id"]
    assert api.catalogue.jobs.move(job_id, "completed", of=["running"], output=Output(items=1))

    assert steps(api.get(f"/api/runs/{id}/metrics")) == [1]
