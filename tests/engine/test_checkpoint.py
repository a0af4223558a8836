import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from brim.engine.training.checkpoint import has_checkpoint, load_checkpoint, load_weights, locked, save_checkpoint
from brim.errors import CheckpointError, StorageError


def save(directory: Path, value: float = 1.0) -> None:
    save_checkpoint(directory, {"model": {"w": torch.full((3,), value), "n": torch.tensor(7)}}, {"value": value})


def test_tensors_and_state_come_back(tmp_path: Path) -> None:
    save(tmp_path / "last", 2.5)
    groups, state = load_checkpoint(tmp_path / "last")
    assert torch.equal(groups["model"]["w"], torch.full((3,), 2.5))
    assert groups["model"]["n"].shape == ()
    assert state["value"] == 2.5


def test_a_new_checkpoint_takes_the_place_of_the_old_and_leaves_nothing_else(tmp_path: Path) -> None:
    save(tmp_path / "last", 1.0)
    save(tmp_path / "last", 2.0)
    assert load_checkpoint(tmp_path / "last")[1]["value"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_whatever_fails_one_checkpoint_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    save(tmp_path / "last", 1.0)
    for fail_at in range(6):
        calls = {"num": 0}
        owner = Path if call == "rename" else os
        real: Callable[..., object] = getattr(owner, call)

        def failing(*args: object, limit: int = fail_at, counted: dict[str, int] = calls, to: object = real) -> object:
            counted["num"] += 1
            if counted["num"] > limit:
                raise OSError(5, "the disk failed")
            return to(*args)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(owner, call, failing)
            with suppress(StorageError):
                save(tmp_path / "last", 2.0)
        assert load_checkpoint(tmp_path / "last")[1]["value"] in (1.0, 2.0)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, rename, synced = os.fsync, Path.rename, set[int]()

    def watched_sync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def watched_rename(self: Path, target: Path) -> Path:
        if target.name == "last":
            assert {path.stat().st_ino for path in (self, *self.iterdir())} <= synced
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    for value in (1.0, 2.0):
        save(tmp_path / "last", value)


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        save(tmp_path / "file" / "last")


def test_a_run_killed_between_two_renames_is_found(tmp_path: Path) -> None:
    save(tmp_path / "last")
    (tmp_path / "last").rename(tmp_path / ".last.old")
    assert has_checkpoint(tmp_path / "last")
    assert load_checkpoint(tmp_path / "last")[1]["value"] == 1.0
    save(tmp_path / "last", 3.0)
    assert load_checkpoint(tmp_path / "last")[1]["value"] == 3.0


def test_a_missing_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load_checkpoint(tmp_path / "last")


def corrupt(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda path: corrupt(path / "model.safetensors"), "differs from the checksum"),
        (lambda path: (path / "model.safetensors").unlink(), "is missing"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "differs from the checksum"),
        (lambda path: (path / "state.json").unlink(), "is missing"),
        (lambda path: (path / "state.json").write_text("{"), "not valid JSON"),
        (lambda path: (path / "state.json").write_text(json.dumps({"format_version": 9})), "format_version is 9"),
        (lambda path: (path / "state.json").write_text("[]"), "format_version is None"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], object], match: str) -> None:
    save(tmp_path / "last")
    damage(tmp_path / "last")
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(tmp_path / "last")


def test_weights_of_another_model_name_the_first_difference_and_change_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "train" / "last", {"model": nn.Linear(3, 2).state_dict()}, {})
    other = nn.Sequential(nn.Linear(3, 2))
    before = other[0].weight.clone()
    with pytest.raises(CheckpointError, match=r'"0.weight" is absent in the checkpoint and float32 \[2, 3\]'):
        load_weights(other, tmp_path)
    assert torch.equal(before, other[0].weight)


def test_tied_weights_are_written(tmp_path: Path) -> None:
    def tied(value: float) -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].weight = module[0].weight
        nn.init.constant_(module[0].weight, value)
        return module

    saved, loaded = tied(2.0), tied(5.0)
    save_checkpoint(tmp_path / "train" / "last", {"model": saved.state_dict()}, {})
    load_weights(loaded, tmp_path)
    assert loaded[1].weight is loaded[0].weight
    assert all(map(torch.equal, loaded.state_dict().values(), saved.state_dict().values()))


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(CheckpointError, match="another process"), locked(tmp_path / "run"):
        pass
