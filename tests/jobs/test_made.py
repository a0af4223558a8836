"""What a job has made, as its directory tells it, whatever state a kill left that in."""

import json
import os
from types import SimpleNamespace

import pytest

from brim.jobs.registry.outputs import output_of
from brim.jobs.store import Output, to_json


@pytest.fixture
def look(tmp_path):
    def at(makes) -> Output:
        return output_of(tmp_path, SimpleNamespace(id="a", makes=makes, out="out"))

    return at


def write(file, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("makes", ["dataset", "run", "result"])
def test_where_nothing_is_nothing_was_made(look, makes):
    assert look(makes).items == 0


def test_a_dataset_is_as_large_as_its_manifest_says(look, tmp_path):
    shards = [{"name": "000000.safetensors", "bytes": 70}, {"name": "000001.safetensors", "bytes": 50}]
    write(tmp_path / "out" / "manifest.json", {"items": 30, "config": {"seed": 3}, "shards": shards})
    write(tmp_path / "out" / "shards" / "000002.safetensors", "written, but not listed when it was killed")

    assert look("dataset") == Output(items=30, bytes=120, about={"config": {"seed": 3}, "shards": 2})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"items": 3, "shards": [{"bxtes": 7}]}', '{"items": 1e9}', '{"items": -1}']
)
def test_a_manifest_that_is_damaged_leaves_the_dataset_as_it_was_listed(look, tmp_path, text):
    write(tmp_path / "out" / "manifest.json", text)

    assert look("dataset").items is None


@pytest.mark.parametrize("config", ['{"x": "\\ud800\\u0000"}', "[" * 800 + "]" * 800], ids=["text", "depth"])
def test_what_a_manifest_says_can_be_stored_and_shown(look, tmp_path, config):
    write(tmp_path / "out" / "manifest.json", f'{{"items": 3, "shards": [], "config": {config}}}')

    stored = json.loads(to_json(look("dataset").about))

    assert len(json.dumps(stored, ensure_ascii=False).encode()) < 1000


@pytest.mark.parametrize("folder", ["last", ".last.old"])
def test_a_run_is_at_its_last_checkpoint_also_between_two_renames(look, tmp_path, folder):
    state = {"phase": "train", "step": 40, "epoch": 2, "best": {"val_loss": 0.5, "epoch": 1, "step": 20}}
    write(tmp_path / "out" / "train" / folder / "state.json", state)

    found = look("run")

    assert found.items == 40
    assert found.about == {"phase": "train", "epoch": 2, "step": 40, "best_val_loss": 0.5}


def test_a_run_without_a_checkpoint_is_none(look, tmp_path):
    write(tmp_path / "out" / "about.json", {"model": "locator"})

    assert look("run").items == 0


def test_the_phase_written_last_is_where_a_run_is(look, tmp_path):
    write(tmp_path / "out" / "supervised" / "last" / "state.json", {"phase": "supervised", "step": 900})
    write(tmp_path / "out" / "self" / "last" / "state.json", {"phase": "self", "step": 30})
    os.utime(tmp_path / "out" / "supervised" / "last" / "state.json", (1000, 1000))

    assert look("run").about["phase"] == "self"
