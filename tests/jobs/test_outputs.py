"""What a job or a person has made, as its directory tells it, whatever state a kill left that in."""

import json
import os
from types import SimpleNamespace

import pytest

from brim.errors import CheckpointError, ConfigError, Conflict
from brim.jobs.registry import models
from brim.jobs.registry.outputs import output_of
from brim.jobs.store import Output, to_json

STATE = {"phase": "train", "step": 40, "epoch": 2, "best": {"val_loss": 0.5, "epoch": 1, "step": 20}}


@pytest.fixture
def look(tmp_path):
    def at(makes) -> Output:
        return output_of(tmp_path, SimpleNamespace(id="a", makes=makes, out="out"))

    return at


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def write(file, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value if isinstance(value, str) else json.dumps(value))


def test_where_nothing_is_nothing_was_made(look, out):
    assert [look(makes).items for makes in ("dataset", "run", "result")] == [0, 0, 0]
    write(out / "about.json", {"model": "locator"})
    assert look("run").items == 0


def test_a_dataset_is_as_large_as_its_manifest_says(look, out):
    shards = [{"name": "000000.safetensors", "bytes": 70}, {"name": "000001.safetensors", "bytes": 50}]
    write(out / "manifest.json", {"items": 30, "config": {"seed": 3}, "shards": shards})
    write(out / "shards" / "000002.safetensors", "written, but not listed when it was killed")

    assert look("dataset") == Output(items=30, bytes=120, about={"config": {"seed": 3}, "shards": 2})


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"items": 3, "shards": [{"bxtes": 7}]}', '{"items": 1e9}', '{"items": -1}']
)
def test_a_manifest_that_is_damaged_leaves_the_dataset_as_it_was_listed(look, out, text):
    write(out / "manifest.json", text)

    assert look("dataset").items is None


@pytest.mark.parametrize("config", ['{"x": "\\ud800\\u0000"}', "[" * 800 + "]" * 800], ids=["text", "depth"])
def test_what_a_manifest_says_can_be_stored_and_shown(look, out, config):
    write(out / "manifest.json", f'{{"items": 3, "shards": [], "config": {config}}}')

    stored = json.loads(to_json(look("dataset").about))

    assert len(json.dumps(stored, ensure_ascii=False).encode()) < 1000


@pytest.mark.parametrize("folder", ["last", ".last.old"])
def test_a_run_is_at_its_last_checkpoint_also_between_two_renames(look, out, folder):
    write(out / "train" / folder / "state.json", STATE)

    found = look("run")

    assert found.items == 40
    assert found.bytes == len(json.dumps(STATE))
    assert found.about == {"phase": "train", "epoch": 2, "step": 40, "best_val_loss": 0.5}


def test_the_phase_written_last_is_where_a_run_is(look, out):
    write(out / "supervised" / "last" / "state.json", {"phase": "supervised", "step": 900})
    write(out / "self" / "last" / "state.json", {"phase": "self", "step": 30})
    os.utime(out / "supervised" / "last" / "state.json", (1000, 1000))

    assert look("run").about["phase"] == "self"


# Runs that no job made


def test_a_run_is_listed_once_where_it_lies_with_all_of_its_config(catalogue, out):
    write(out / "train" / "last" / "state.json", STATE)
    asked = {"name": "mine", "kind": "rf.train", "config": {"dataset_ids": ["d"], "epochs": 3}}
    row = models.add_run(catalogue, path=out, **asked)

    assert models.add_run(catalogue, path=out / ".." / out.name, **asked) == catalogue.runs.get(row.id) == row
    assert catalogue.runs.page().total == 1
    write(out.parent / "other" / "train" / "last" / "state.json", STATE)
    assert models.add_run(catalogue, path=out.parent / "other", **asked).id != row.id  # of the same name
    assert (row.name, row.kind, row.state, row.path, row.job_id) == ("mine", "rf.train", "ready", str(out), None)
    assert (row.config["epochs"], row.config["batch_size"], row.config["dataset_ids"]) == (3, 256, ["d"])
    assert (row.summary["step"], row.summary["best_val_loss"]) == (40, 0.5)


def test_a_run_without_a_checkpoint_and_one_with_another_config_are_refused(catalogue, out):
    def add(**config):
        models.add_run(catalogue, name="n", path=out, kind="rf.train", config={"dataset_ids": ["d"], **config})

    with pytest.raises(CheckpointError, match="holds no checkpoint; give the directory of a run"):
        add()
    write(out / "train" / "last" / "state.json", STATE)
    with pytest.raises(ConfigError, match="epochs"):
        add(epochs=0)
    assert catalogue.runs.page().total == 0


def test_weights_that_still_change_are_no_model():
    for state, is_refused in (("training", True), ("partial", False), ("ready", False)):
        try:
            models.check_trained(SimpleNamespace(name="n", state=state))
        except Conflict:
            assert is_refused
        else:
            assert not is_refused


def test_a_model_of_someone_elses_code_is_for_the_administrator_alone(out):
    write(out / "run.json", {"kind": "sequence-train", "network": {"name": "mine.py:make"}})

    with pytest.raises(ConfigError, match="only the administrator may load"):
        models.look(out)
