"""The same seed gives the same bytes whatever batch, tier, worker or order made them, and another seed other ones."""

import shutil
from pathlib import Path

import pytest
import torch
from cli_commands import brim
from verbs import CPU, VERBS, quickly

from brim.segmentation.config import SegmentTrainConfig
from brim.segmentation.training import train

torch.set_num_threads(1)  # sums over more threads differ in their last bits


@pytest.fixture(scope="module")
def made(undisturbed: dict[str, Path]) -> dict[str, dict[str, str]]:
    """Checksums of what every verb makes."""
    found = {name: VERBS[name].made(folder) for name, folder in undisturbed.items()}
    assert all(found.values())
    return found


def run(name: str, words: list[str], out: Path) -> dict[str, str]:
    with quickly():
        ended = brim(*words)
    assert ended.code == 0, ended.err
    return VERBS[name].made(out)


WAYS = {
    "rf generate": ("--batch-size 1", "--batch-size 7", "--memory 8MiB"),
    "rf train": ("--tier vram",),  # a window is shuffled in another way
    "segment predict": ("--batch-size 2", "--batch-size 5"),
    "sequence train": ("--tier vram", "--tier window", "--tier window --num-workers 1"),
}


@pytest.mark.parametrize(("name", "options"), [(name, options) for name in WAYS for options in WAYS[name]])
def test_batch_tier_and_workers_change_no_byte(name, options, inputs, made, tmp_path):
    words = VERBS[name].command(inputs, tmp_path / "out", *options.split())

    assert run(name, words, tmp_path / "out") == made[name]


@pytest.mark.parametrize("tier", ["vram", "window"])
def test_where_crops_are_held_changes_no_byte(tier, inputs, made, tmp_path):
    cells, recipe = inputs / "cells", VERBS["segment train"].job

    with quickly():
        train(cells / "images", cells / "masks", SegmentTrainConfig(**recipe, tier=tier), tmp_path, device="cpu")

    assert VERBS["segment train"].made(tmp_path) == made["segment train"]


def test_two_processes_make_the_dataset_of_one(inputs, made, tmp_path):
    words = VERBS["rf generate"].command(inputs, tmp_path / "out", "--devices", "cpu,cpu")
    at = words.index(CPU[0])

    assert run("rf generate", words[:at] + words[at + 2 :], tmp_path / "out") == made["rf generate"]


def test_out_of_memory_halves_the_batch_with_one_warning_and_changes_no_byte(inputs, made, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIM_INJECT_OOM_ABOVE", "2")

    with quickly():
        ended = brim(*VERBS["rf generate"].command(inputs, tmp_path / "out", "--batch-size", "16"))

    assert ended.err.count("warning:") == 1
    assert VERBS["rf generate"].made(tmp_path / "out") == made["rf generate"]


def test_the_order_of_images_and_what_lies_beside_them_change_no_outline(inputs, made, tmp_path):
    images = sorted((inputs / "cells/images").iterdir(), reverse=True)[:4]
    words = VERBS["segment predict"].command(inputs, tmp_path / "out", "--batch-size", "3")
    at = words.index(str(inputs / "cells/images"))

    found = run("segment predict", [*words[:at], *map(str, images), *words[at + 1 :]], tmp_path / "out")

    assert found == {f"{image.stem}.geojson": made["segment predict"][f"{image.stem}.geojson"] for image in images}


@pytest.mark.parametrize("name", ["rf train", "sequence train"])
def test_data_that_moved_changes_no_byte(name, inputs, made, tmp_path):
    source = inputs / {"rf train": "radio", "sequence train": "corpus"}[name]
    shutil.copytree(source, tmp_path / "moved")
    words = [
        str(tmp_path / "moved") if word == str(source) else word
        for word in VERBS[name].command(inputs, tmp_path / "out")
    ]

    assert run(name, words, tmp_path / "out") == made[name]


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.another])
def test_another_seed_gives_other_bytes(name, inputs, made, tmp_path):
    other = run(name, VERBS[name].command(inputs, tmp_path / "out", "--seed", "17"), tmp_path / "out")

    assert other.keys() == made[name].keys()
    assert not set(other.values()) & set(made[name].values())
