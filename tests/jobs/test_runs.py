"""Runs that no job made, listed beside those of the jobs."""

import json
from pathlib import Path

import pytest

from brim.errors import CheckpointError, ConfigError
from brim.jobs.registry import models


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a training leaves of its state."""
    folder = tmp_path / "run"
    (folder / "train" / "last").mkdir(parents=True)
    state = {"phase": "train", "epoch": 3, "step": 40, "best": {"val_loss": 0.5}}
    (folder / "train" / "last" / "state.json").write_text(json.dumps(state))
    return folder


def test_a_run_is_listed_where_it_lies_with_all_of_its_config(catalogue, run):
    row = models.add_run(catalogue, name="mine", path=run, kind="rf.train", config={"dataset_ids": ["d"], "epochs": 3})

    assert catalogue.runs.get(row.id) == row
    assert (row.name, row.kind, row.state, row.path, row.job_id) == ("mine", "rf.train", "ready", str(run), None)
    assert (row.config["epochs"], row.config["batch_size"], row.config["dataset_ids"]) == (3, 256, ["d"])
    assert (row.summary["step"], row.summary["best_val_loss"]) == (40, 0.5)


def test_a_run_that_is_listed_already_is_not_listed_twice(catalogue, run):
    first = models.add_run(catalogue, name="mine", path=run, kind="rf.train", config={"dataset_ids": ["d"]})
    again = models.add_run(
        catalogue, name="mine", path=run / ".." / run.name, kind="rf.train", config={"dataset_ids": ["d"]}
    )

    assert again == first
    assert catalogue.runs.page().total == 1


def test_what_holds_no_checkpoint_or_no_config_is_refused(catalogue, run, tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint; give the directory of a run"):
        models.add_run(catalogue, name="n", path=tmp_path / "nowhere", kind="rf.train", config={"dataset_ids": ["d"]})
    with pytest.raises(ConfigError, match="epochs"):
        models.add_run(catalogue, name="n", path=run, kind="rf.train", config={"dataset_ids": ["d"], "epochs": 0})

    assert catalogue.runs.page().total == 0
