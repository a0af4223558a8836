"""What brim hands to trackers, as a tracker sees it: none of their packages is needed."""

import csv
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from brim.errors import ConfigError
from brim.loggers import CSV, MLflow, WandB, _checksum, _varint, current, parse, using


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A package mlflow that notes what it is told."""
    told: list[Any] = []

    class MlflowClient:
        def __init__(self, uri: str | None) -> None:
            told.append(("at", uri))

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="7") if name == "known" else None

        def create_experiment(self, name: str) -> str:
            return f"new {name}"

        def create_run(self, experiment: str, run_name: str | None) -> Any:
            told.append(("run in", experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id=f"run-{len(told)}"))

        def __getattr__(self, name: str) -> Any:
            return lambda *values, **more: told.append((name, *values, *more.values()))

    module = ModuleType("mlflow")
    module.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    vars(module)["MlflowClient"] = MlflowClient
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return told


def test_a_run_in_mlflow_is_continued_when_training_is(tracker, tmp_path):
    first, second = MLflow("http://here", "known", "mine"), MLflow("http://here", "known")
    first.begin(tmp_path, 0)
    first.log({"loss": 0.5, "lr": 0.1}, 3)
    first.end()
    second.begin(tmp_path, 3)
    second.log({"loss": 0.25}, 4)
    second.artifact(tmp_path / "weights")
    second.end()

    assert tracker == [
        *(("at", "http://here"), ("run in", "7", "mine")),
        *(("log_metric", "run-2", "loss", 0.5, 3), ("log_metric", "run-2", "lr", 0.1, 3)),
        *(("set_terminated", "run-2", "FAILED"), ("at", "http://here")),
        *(("log_metric", "run-2", "loss", 0.25, 4), ("log_artifact", "run-2", str(tmp_path / "weights"))),
        ("set_terminated", "run-2", "FINISHED"),
    ]


def test_a_training_that_begins_anew_is_another_run_in_a_new_experiment(tracker, tmp_path):
    for _ in range(2):
        MLflow(experiment="new").begin(tmp_path, 0)

    assert [each for each in tracker if each[0] == "run in"] == [("run in", "new new", None)] * 2


def test_a_table_loses_the_rows_that_come_again_and_gains_columns(tmp_path):
    table = CSV()
    table.begin(tmp_path, 0)
    for step in (1, 2, 3):
        table.log({"loss": step / 2}, step)
    again = CSV()
    again.begin(tmp_path, 2)
    again.log({"loss": 9.0}, 3)
    again.log({"val_loss": 4.0}, 3)

    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "loss", "val_loss"], ["1", "0.5", ""], ["2", "1.0", ""], ["3", "9.0", ""], ["3", "", "4.0"],
        ]  # fmt: skip


def test_records_of_tensorboard_have_the_checksums_of_the_standard():
    crc = 0xE3069283  # CRC-32C of "123456789", from the catalogue of CRCs
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32

    assert _checksum(b"123456789") == masked.to_bytes(4, "little")
    assert [_varint(number) for number in (1, 127, 128, 300)] == [b"\x01", b"\x7f", b"\x80\x01", b"\xac\x02"]


def test_a_setting_names_loggers_beside_those_of_the_block(monkeypatch):
    monkeypatch.setenv("BRIM_LOGGERS", "CSV, mlflow=http://tracker:5000,wandb=cells")
    mine = CSV("mine.csv")

    with using([mine]):
        found = current()

    assert found[0] is mine
    assert [type(each) for each in found[1:]] == [CSV, MLflow, WandB]
    assert (found[2].tracking_uri, found[3].project) == ("http://tracker:5000", "cells")
    assert len(current()) == 3
    with pytest.raises(ConfigError, match='"neptune" is no logger'):
        parse("neptune")
