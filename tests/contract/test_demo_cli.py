"""`brim demo` as a newcomer meets it: the whole loop, reports that open, a data directory that a service can show."""

import json
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_commands import Ended, brim

from brim.cli import main, terminal
from brim.cli.catalogue import open_catalogue
from brim.engine.training import TrainProgress

LOOP = ("generate", "train", "evaluate", "tune", "segment", "sequences")
TRAINING = ("train", "segment", "sequences")


@dataclass
class Done:
    """A demo that was interrupted in every stage, and each time begun again with the same command."""

    folder: Path
    interrupted: dict[str, Ended]
    last: Ended

    @property
    def found(self) -> dict:
        return dict(json.loads(self.last.out))


def argv(out: Path) -> list[str]:
    return ["demo", "--out", str(out), "--samples", "3"]


def interrupt(out: Path, stage: str) -> Ended:
    """Ctrl-C as the stage begins, or after some steps of what it trains; in this process."""
    begun = []

    def say(text: str) -> None:
        terminal.say(text)
        if text.endswith(f" {stage}"):
            begun.append(stage)
            if stage not in TRAINING:
                signal.raise_signal(signal.SIGINT)

    def tell(display: object, progress: TrainProgress) -> None:
        if begun and progress.phase not in ("prepare", "pack") and progress.step >= 5:
            begun.clear()
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal.Display, "training", tell)
        patch.setattr(sys.modules["brim.cli.demo"], "say", say)  # brim.cli.demo is also the command
        patch.setattr(sys, "argv", ["brim", *argv(out), "--json"])
        return brim(*sys.argv[1:])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("first hour") / "demo"
    interrupted = {stage: interrupt(folder, stage) for stage in LOOP}
    return Done(folder, interrupted, brim(*argv(folder), "--json"))


def test_every_stage_has_its_figures(done):
    assert done.last.code == 0, done.last.err
    found = done.found

    assert found["generate"]["accepted"] == found["accepted"] == 3
    assert found["train"]["epochs"] == 10
    assert found["evaluate"]["median_error_m"] > 0
    assert found["tune"]["unet_tiny"]["optimal_batch_size"] >= 1
    assert found["segment"]["train"]["dice"] > 0.8
    assert found["segment"]["predict"]["images"] == 4
    assert found["segment"]["predict"]["polygons"] > 0
    assert found["sequences"]["evaluate"]["accuracy"] > 0.8
    assert found["total_seconds"] > 0


def test_the_page_links_to_what_exists_and_loads_nothing(done):
    out, found = done.folder, done.found
    page = Path(found["report"]).read_text()

    assert found["evaluation_report"] == str(out / "evaluation.html")
    targets = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert {"dataset.html", "evaluation.html"} < set(targets)
    assert [target for target in targets if not (out / target).is_file()] == []
    assert "http" not in page
    assert found["dashboard"]["command"] in page.replace("&#x27;", "'")


def test_datasets_runs_and_models_are_listed_for_a_service_once(done, capsys):
    out, found = done.folder, done.found
    data = Path(found["dashboard"]["data"])
    shard = out / "dataset/shards/000000.safetensors"
    made_ns = shard.stat().st_mtime_ns

    assert main(["demo", "--out", str(out), "--samples", "3"]) == 0

    printed = capsys.readouterr().out
    assert shard.stat().st_mtime_ns == made_ns
    assert all(text in printed for text in (str(out / "dataset"), str(out / "report.html"), "next:"))
    with open_catalogue(data, None) as (catalogue, _):
        datasets = {row.name: row for row in catalogue.datasets.page().rows}
        runs = {row.kind: row for row in catalogue.runs.page().rows}
        models = {row.name: row.kind for row in catalogue.models.all()}
        assert catalogue.datasets.page().total == len(datasets) == 5
        assert catalogue.runs.page().total == 3
    assert models == {"cells": "segment", "classes": "classify", "locator": "locate"}
    assert set(runs) == {"rf.train", "segment.train", "sequence.train"}
    assert runs["rf.train"].config["dataset_ids"] == [datasets["demo radio"].id]
    assert runs["segment.train"].summary["step"] > 0
    training = json.loads((out / "cells-run" / "config.json").read_text())["training"] | {"task": "auto"}  # as given
    assert {name: runs["segment.train"].config[name] for name in training} == training
    assert "unet_tiny" in (data / "batch_sizes.json").read_text()
    assert found["dashboard"]["command"] in printed


@pytest.mark.parametrize("stage", LOOP)
def test_ctrl_c_stops_every_stage_cleanly(done, stage):
    ended = done.interrupted[stage]

    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
    assert "continue with: brim demo" in ended.err
    assert isinstance(json.loads(ended.out), dict)


def test_another_service_s_database_is_left_alone(done, monkeypatch, capsys):
    monkeypatch.setenv("BRIM_DATABASE", "postgresql://nobody:nothing@127.0.0.1:1/none")

    assert main(["demo", "--out", str(done.folder), "--samples", "3"]) == 0

    assert "dashboard: BRIM_DATABASE" in capsys.readouterr().out
