"""A run's metrics over HTTP: all of them as one series, read on from a number, thinned for a chart."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from live_api import Api

from brim.jobs.kinds import Spec


@pytest.fixture
def run(api: Api) -> tuple[str, Path]:
    """The address of a run that is training, and its directory."""
    job, _ = api.catalogue.jobs.submit(Spec("rf.train", "a run", {"epochs": 3}), makes="run")
    folder = api.settings.data / job.out
    folder.mkdir(parents=True)
    return f"/api/runs/{job.output_id}", folder


def write(folder: Path, phase: str, lines: list[dict[str, Any]], at_s: float = 1e9) -> Path:
    file = folder / phase / "metrics.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(file, (at_s, at_s))
    return file


def steps(answer: Any) -> list[int]:
    return [line["step"] for line in answer.json["lines"]]


def test_a_run_shows_the_end_of_its_metrics(api, run):
    assert api.get(f"{run[0]}/metrics").json == api.get(f"{run[0]}/metrics?points=5").json == {"lines": [], "next": 0}
    file = write(run[1], "train", [{"step": step, "loss": 1.0} for step in range(300)])
    with file.open("a") as opened:
        opened.write('{"step": 300, "lo')

    shown = api.get(run[0]).json

    assert (shown["name"], shown["state"]) == ("a run", "training")
    assert [line["step"] for line in shown["metrics"]] == list(range(101, 300))
    assert shown["metrics"][0]["phase"] == "train"


def test_lines_are_read_on_from_where_the_last_answer_ended(api, run):
    file = write(run[1], "train", [{"step": step, "epoch": 0, "loss": 1 / step} for step in range(1, 8)])

    first = api.get(f"{run[0]}/metrics?limit=3")
    second = api.get(f"{run[0]}/metrics?after={first.json['next']}")

    assert (steps(first), first.json["next"]) == ([1, 2, 3], 3)
    assert (steps(second), second.json["next"]) == ([4, 5, 6, 7], 7)
    assert first.json["lines"][1] == {"phase": "train", "step": 2, "epoch": 0, "loss": 0.5}
    with file.open("a") as opened:
        opened.write('{"step": 8, "loss": NaN}\nnonsense\n[1]\n{"step": 9, "ep')  # the last is being written
    third = api.get(f"{run[0]}/metrics?after={second.json['next']}")
    assert third.json == {"lines": [{"phase": "train", "step": 8, "loss": None}], "next": 10}
    assert api.get(f"{run[0]}/metrics?after=500").json == {"lines": [], "next": 10}, "it went back to a checkpoint"


def test_the_phases_follow_one_another_in_the_order_they_were_written(api, run):
    write(run[1], "encoder-1", [{"step": 1}, {"step": 2}], at_s=100)
    write(run[1], "classifier-1", [{"step": 1}, {"step": 2}], at_s=200)
    write(run[1], "encoder-2", [{"step": 1}], at_s=300)

    every = api.get(f"{run[0]}/metrics").json
    part = api.get(f"{run[0]}/metrics?after=1&limit=2").json

    phases = ["encoder-1", "encoder-1", "classifier-1", "classifier-1", "encoder-2"]
    assert [line["phase"] for line in every["lines"]] == phases
    assert (part["lines"], part["next"]) == (every["lines"][1:3], 3)


def test_a_thinned_series_keeps_its_ends_and_its_rare_evaluations(api, run):
    lines = []
    for step in range(1, 10_001):
        lines.append({"step": step, "loss": 1.0, "lr": 1e-3})
        if step % 1000 == 0:
            lines.append({"step": step, "val_loss": 2.0})
    write(run[1], "train", lines)

    thin = api.get(f"{run[0]}/metrics?points=101").json
    train = [line["step"] for line in thin["lines"] if "loss" in line]
    rare = [line["step"] for line in thin["lines"] if "val_loss" in line]

    assert (len(train), train[0], train[-1]) == (101, 1, 10_000)
    assert {later - earlier for earlier, later in pairwise(train)} <= {99, 100, 101}
    assert rare == list(range(1000, 10_001, 1000)), "none of few is lost"
    assert [line["step"] for line in thin["lines"]] == sorted(line["step"] for line in thin["lines"])
    assert thin["next"] == len(lines), "from where one reads on"
    assert steps(api.get(f"{run[0]}/metrics?points=1")) == [10_000, 10_000]
