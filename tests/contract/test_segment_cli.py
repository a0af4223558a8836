"""Tuning, predicting and training networks as others build on them: JSON, exit codes, what is written."""

import json
import os
import shutil
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from cli_commands import answer, brim, refused

from brim.cli import main
from brim.cli.terminal import Display
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning import device_key

SPENT = {"ceiling_spread", "wall_s", "startup_s", "work_s", "overhead"}
TRAIN_KEYS = {"run", "weights", "epochs", "dice", "iou", "images_per_s", "ceiling_share", "peak_bytes"} | SPENT
PREDICT_KEYS = {"images", "failed", "polygons", "seconds", "images_per_s", "ceiling_share", "batch_size", "stages"}
ENTRY_KEYS = {
    "optimal_batch_size", "max_safe_batch_size", "expected_throughput", "p50_latency_ms", "p95_latency_ms",
    "memory_limit_mb", "image_size", "precision", "layout", "compiled",
}  # fmt: skip
HERE = device_key(torch.device("cpu"))
torch.set_num_threads(1)  # small batches: a second thread only competes

SHORT = ["--epochs", "8", "--size", "32", "--batch-size", "4", "--device", "cpu"]
QUICK = ["--models", "unet_tiny", "--size", "64", "--seconds", "0.3", "--device", "cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with masks, a run of a network trained on them, and the batch sizes of this device."""
    path = tmp_path_factory.mktemp("made")
    for folder in ("images", "masks"):
        (path / folder).mkdir()
    for index in range(10):
        image, mask = make_cells(3, index, 64, 64)
        cv2.imwrite(str(path / f"images/cell {index}.png"), image[..., ::-1])
        cv2.imwrite(str(path / f"masks/cell {index}.png"), mask.astype(np.uint8) * 255)
    assert main([*training(path), "--out", str(path / "run"), *SHORT]) == 0
    assert main(["segment", "tune", *QUICK, "--out", str(path / "sizes.json")]) == 0
    return path


@pytest.fixture(autouse=True)
def _short_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.segmentation.prediction.stream.CEILING_S", 0.02)


def training(made: Path) -> list[str]:
    options = ["--images", str(made / "images"), "--masks", str(made / "masks"), "--model", "unet_tiny"]
    return ["segment", "train", *options]


def predicting(made: Path, *images: Path) -> list[str]:
    """A command that predicts, without --out."""
    options = ["--model", "unet_tiny", "--weights", made / "run", "--batch-sizes", made / "sizes.json"]
    return ["segment", "predict", *map(str, images or [made / "images"]), *map(str, options), "--device", "cpu"]


def files_in(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


# Tuning


def test_tune_prints_the_entry_of_each_model_and_its_trials(tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "new/tuned.png"
    found = answer("segment", "tune", *QUICK, "--out", tmp_path / "sizes.json", "--search", "layout", "--plot", plot)

    assert set(found) == {"unet_tiny", *SPENT} - {"ceiling_spread"}
    assert set(found["unet_tiny"]) == {*ENTRY_KEYS, "trials"}
    assert found["unet_tiny"]["image_size"] == 64
    assert {"batch", "seconds", "status"} <= set(found["unet_tiny"]["trials"][0])
    assert cv2.imread(str(plot)) is not None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "hrnet,,unet_tiny"], ["--models", "hrnet,,unet_tiny"]),
        (["--plot", "plain/tuned.png"], ["plain/tuned.png"]),
        (["--out", "plain/sizes.json"], ["plain/sizes.json"]),
    ],
)
def test_what_cannot_be_tuned_is_named_before_anything_runs(tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")

    message = refused("segment", "tune", *QUICK, *flags)

    assert [word for word in words if word not in message] == []
    assert files_in(tmp_path) == ["plain"]


def test_ctrl_c_ends_a_tuning_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(Display, "update", lambda *_: signal.raise_signal(signal.SIGINT))

    ended = brim("segment", "tune", *QUICK, "--out", tmp_path / "sizes.json")

    assert (ended.code, ended.out) == (130, "")
    assert ended.err.splitlines()[-1] == f"stopped; networks tuned before are in {tmp_path / 'sizes.json'}"


# Predicting


def test_predict_prints_the_keys_of_the_contract(made, tmp_path):
    found = answer(*predicting(made), "--out", tmp_path / "out")

    assert set(found) == PREDICT_KEYS | SPENT
    assert (found["images"], found["failed"]) == (10, 0)
    assert found["polygons"] > 10
    assert {"decode", "forward", "polygons"} <= set(found["stages"])
    assert files_in(tmp_path / "out") == [f"cell {index}.geojson" for index in range(10)]


def test_a_run_may_be_read_by_others(made):
    mask = os.umask(0)
    os.umask(mask)

    assert (made / "run/weights.safetensors").stat().st_mode & 0o077 == 0o666 & ~mask & 0o077


def test_folders_below_are_searched_and_kept_apart(made, tmp_path):
    for place in ("wells/A 1", "wells/Größe", "other"):
        (tmp_path / place).mkdir(parents=True)
        shutil.copy(made / "images/cell 1.png", tmp_path / place / "site.png")
    Path(tmp_path / "wells/notes.txt").write_text("no image")

    images = [tmp_path / "wells", tmp_path / "other/site.png"]
    found = answer(*predicting(made, *images), "--out", tmp_path / "out", "--format", "coco")
    coco = json.loads((tmp_path / "out/annotations.json").read_text())

    assert found["images"] == 3
    assert [image["file_name"] for image in coco["images"]] == [
        "wells/A 1/site.png", "wells/Größe/site.png", "other/site.png",
    ]  # fmt: skip


def test_results_below_the_images_are_no_images(made, tmp_path):
    images = Path(shutil.copytree(made / "images", tmp_path / "images"))
    argv = [*predicting(made, images), "--out", images / "results", "--format", "mask"]

    assert [answer(*argv)["images"] for _ in range(2)] == [10, 10]
    assert "replace an input image" in refused(*predicting(made, images), "--out", images, "--format", "mask")


def test_a_second_prediction_replaces_the_first_unless_it_is_resumed(made, tmp_path):
    argv, file = [*predicting(made), "--out", tmp_path], tmp_path / "cell 1.geojson"
    answer(*argv)
    whole = file.read_bytes()

    file.write_text("changed")
    answer(*argv, "--resume")
    assert file.read_text() == "changed"
    answer(*argv)
    assert file.read_bytes() == whole


def test_a_batch_above_the_safe_limit_is_lowered_with_one_line(made, tmp_path, capsys):
    assert main([*predicting(made), "--out", str(tmp_path / "out"), "--batch-size", "100000"]) == 0

    (line,) = [line for line in capsys.readouterr().err.splitlines() if "100000" in line]
    assert line.startswith("warning: ")


# Predicting what cannot be read: the image's own failure


def test_images_that_cannot_be_used_are_named_and_the_others_written(made, tmp_path, capsys):
    good, images = (made / "images/cell 1.png").read_bytes(), tmp_path / "in"
    images.mkdir()
    for name in ("a good.png", "z good.png"):
        (images / name).write_bytes(good)
    broken = {"b truncated.png": good[: len(good) // 2], "c text.png": b"not an image at all"}
    for name, content in broken.items():
        (images / name).write_bytes(content)

    found = answer(*predicting(made, images), "--out", tmp_path / "out", code=2)
    assert main([*predicting(made, images), "--out", str(tmp_path / "out"), "--format", "overlay"]) == 2

    assert (found["images"], found["failed"]) == (4, 2)
    assert files_in(tmp_path / "out") == [
        "a good.geojson", "a good_overlay.png", "z good.geojson", "z good_overlay.png",
    ]  # fmt: skip
    captured = capsys.readouterr()
    assert "4 images, 2 failed" in captured.out
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in errors] == [str(images / name) for name in broken]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nowhere"], ["nowhere"]),
        (["--device", "tpu"], ["tpu"]),
        (["--model", "hrnet"], ["weights.safetensors", "stem.0.conv.weight"]),
        (["--weights", "plain"], ["plain"]),
        (["--out", "plain/out"], ["plain/out"]),
    ],
)
def test_what_cannot_be_predicted_is_named(made, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("plain")

    message = refused(*predicting(made), "--out", tmp_path / "out", *flags)

    assert [word for word in words if word not in message] == []
    assert files_in(tmp_path) == ["plain"]


# Training


def test_train_prints_the_keys_of_the_contract(made, tmp_path):
    options = [*SHORT[2:], "--epochs", "1", "--seed", "7", "--precision", "fp32"]
    found = answer(*training(made), "--out", tmp_path / "run", *options, "--weights", made / "run")

    assert set(found) == TRAIN_KEYS
    assert (found["run"], found["weights"]) == (str(tmp_path / "run"), str(tmp_path / "run/weights.safetensors"))
    assert found["epochs"] == 1
    assert 0 <= found["iou"] <= found["dice"] <= 1


def test_a_finished_run_may_be_resumed_with_more_epochs(made, tmp_path):
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))

    assert answer(*training(made), "--out", run, *SHORT, "--resume", "--epochs", "9")["epochs"] == 9


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--images", "plain"], ["plain"]),
        (["--masks", "empty"], ["empty"]),
        (["--weights", "nowhere"], ["nowhere"]),
        (["--out", "plain/run"], ["plain/run"]),
    ],
)
def test_what_cannot_be_trained_is_named_and_nothing_is_written(made, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")
    (tmp_path / "empty").mkdir()

    message = refused(*training(made), "--out", tmp_path / "run", *SHORT, *flags)

    assert [word for word in words if word not in message] == []
    assert files_in(tmp_path) == ["plain"]
