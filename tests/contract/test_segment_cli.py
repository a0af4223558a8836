"""Tuning, predicting and training networks as others build on them: JSON, exit codes, what is written."""

import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from cli_commands import answer, brim, refused

from brim.cli import main
from brim.cli.terminal import Display
from brim.segmentation.prediction import ModelLoader
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning import device_key

SPENT = {"ceiling_spread", "wall_s", "startup_s", "work_s", "overhead"}
TRAIN_KEYS = {"run", "weights", "epochs", "dice", "iou", "images_per_s", "ceiling_share", "peak_bytes"} | SPENT
PREDICT_KEYS = {
    "images",
    "failed",
    "polygons",
    "seconds",
    "images_per_s",
    "ceiling_share",
    "batch_size",
    "stages",
} | SPENT
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
    found = answer("segment", "tune", *QUICK, "--out", tmp_path / "sizes.json")

    assert set(found) == {"unet_tiny", *SPENT} - {"ceiling_spread"}
    assert set(found["unet_tiny"]) == {*ENTRY_KEYS, "trials"}
    assert found["unet_tiny"]["image_size"] == 64
    assert {"batch", "seconds", "status"} <= set(found["unet_tiny"]["trials"][0])


def test_tune_tells_a_person_the_batch_and_draws_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    more = ["--out", str(tmp_path / "sizes.json"), "--plot", str(tmp_path / "new/tuned.png"), "--p95-ms", "5000"]

    assert main(["segment", "tune", *QUICK, "--search", "layout", *more]) == 0

    out = capsys.readouterr().out.splitlines()
    assert "is safe" in out[-4]
    assert out[-3:-1] == [f"saved: {tmp_path / 'sizes.json'}", f"plot:  {tmp_path / 'new/tuned.png'}"]
    assert cv2.imread(str(tmp_path / "new/tuned.png")) is not None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "hrnet,,unet_tiny"], ["--models", "hrnet,,unet_tiny"]),
        (["--models", "unet_huge"], ["--models=", "unet_huge"]),
        (["--plot", "plain/tuned.png"], ["plain/tuned.png"]),
        (["--plot", "tuned.pdf"], ["tuned.pdf"]),
        (["--out", "plain/sizes.json"], ["plain/sizes.json"]),
        (["--device", "tpu"], ["tpu"]),
    ],
)
def test_what_cannot_be_tuned_is_named_before_anything_runs(tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")

    message = refused("segment", "tune", *QUICK, *flags)

    assert [word for word in words if word not in message] == []
    assert files_in(tmp_path) == ["plain"]


def test_sizes_of_another_device_are_named_not_used_and_kept(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(ModelLoader.__init__.__kwdefaults__, "tune_seconds", 0.3)
    monkeypatch.setattr("brim.segmentation.prediction.files.FEW_IMAGES", 0)
    sizes = tmp_path / "sizes.json"
    content = json.loads((made / "sizes.json").read_text())
    foreign = content["devices"]["NVIDIA H200 140 GiB"] = content["devices"].pop(HERE)
    foreign["batch_configurations"]["unet_tiny"] |= {"optimal_batch_size": 777, "max_safe_batch_size": 888}
    sizes.write_text(json.dumps(content))

    assert main([*predicting(made), "--out", str(tmp_path / "out"), "--batch-sizes", str(sizes)]) == 0

    assert "NVIDIA H200 140 GiB" in capsys.readouterr().err
    devices = json.loads(sizes.read_text())["devices"]
    assert set(devices) == {HERE, "NVIDIA H200 140 GiB"}
    assert devices["NVIDIA H200 140 GiB"] == foreign
    assert devices[HERE]["batch_configurations"]["unet_tiny"]["optimal_batch_size"] < 777


def test_ctrl_c_ends_a_tuning_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(Display, "update", lambda *_: signal.raise_signal(signal.SIGINT))

    ended = brim("segment", "tune", *QUICK, "--out", tmp_path / "sizes.json")

    assert (ended.code, ended.out) == (130, "")
    assert ended.err.splitlines()[-1] == f"stopped; networks tuned before are in {tmp_path / 'sizes.json'}"


# Predicting


def test_predict_prints_the_keys_of_the_contract(made, tmp_path):
    found = answer(*predicting(made), "--out", tmp_path / "out")

    assert set(found) == PREDICT_KEYS
    assert (found["images"], found["failed"]) == (10, 0)
    assert found["polygons"] > 10
    assert {"decode", "forward", "polygons"} <= set(found["stages"])
    assert files_in(tmp_path / "out") == [f"cell {index}.geojson" for index in range(10)]


def test_predict_tells_a_person_where_the_results_are(made, tmp_path, capsys):
    assert main([*predicting(made), "--out", str(tmp_path / "out")]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"results: {tmp_path / 'out'}"
    assert lines[1].startswith("10 images, ")
    assert len(lines) == 3
    assert "s of work" in lines[2]


def test_every_format_is_written(made, tmp_path):
    def run(format: str) -> Path:
        out = tmp_path / format
        answer(*predicting(made, made / "images/cell 1.png"), "--out", out, "--format", format)
        return out

    polygons = json.loads((run("geojson") / "cell 1.geojson").read_text())["features"]
    coco = json.loads((run("coco") / "annotations.json").read_text())
    assert [image["file_name"] for image in coco["images"]] == ["cell 1.png"]
    assert len(coco["annotations"]) == len(polygons) > 0
    assert len(zipfile.ZipFile(run("roi") / "cell 1.zip").namelist()) == len(polygons)
    mask = cv2.imread(str(run("mask") / "cell 1.png"), cv2.IMREAD_UNCHANGED)
    assert mask.shape == (64, 64)
    assert set(np.unique(mask)) == {0, 255}
    assert cv2.imread(str(run("overlay") / "cell 1_overlay.png")).shape == (64, 64, 3)


def test_a_file_of_weights_does_what_its_run_does(made, tmp_path):
    argv = [*predicting(made), "--strict", "--out"]
    assert main([*argv, str(tmp_path / "run")]) == 0
    assert main([*argv, str(tmp_path / "file"), "--weights", str(made / "run/weights.safetensors")]) == 0

    for file in files_in(tmp_path / "run"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "file" / file).read_bytes()


def test_a_run_may_be_read_by_others(made):
    assert (made / "run/weights.safetensors").stat().st_mode & 0o077 == 0o666 & ~umask() & 0o077


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "b truncated.png": lambda good: good[: len(good) // 2],
    "c text.png": lambda good: b"not an image at all",
}


def test_images_that_cannot_be_used_are_named_and_the_others_written(made, tmp_path, capsys):
    good, images = (made / "images/cell 1.png").read_bytes(), tmp_path / "in"
    images.mkdir()
    for name in ("a good.png", "z good.png"):
        (images / name).write_bytes(good)
    for name, change in BROKEN.items():
        (images / name).write_bytes(change(good))

    found = answer(*predicting(made, images), "--out", tmp_path / "out", code=2)
    assert main([*predicting(made, images), "--out", str(tmp_path / "out"), "--format", "overlay"]) == 2

    assert (found["images"], found["failed"]) == (4, 2)
    assert files_in(tmp_path / "out") == [
        "a good.geojson", "a good_overlay.png", "z good.geojson", "z good_overlay.png",
    ]  # fmt: skip
    captured = capsys.readouterr()
    assert "4 images, 2 failed" in captured.out
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in errors] == [str(images / name) for name in BROKEN]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "tpu"], ["tpu"]),
        (["--model", "unet_huge"], ["--model=", "unet_huge"]),
        (["--model", "hrnet"], ["weights.safetensors", "stem.0.conv.weight"]),
        (["--weights", "nowhere"], ["nowhere"]),
        (["--weights", "plain"], ["plain"]),
        (["--out", "plain"], ["plain"]),
        (["--out", "plain/out"], ["plain/out"]),
    ],
)
def test_what_cannot_be_predicted_is_named(made, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("plain")

    message = refused(*predicting(made), "--out", tmp_path / "out", *flags)

    assert [word for word in words if word not in message] == []
    assert files_in(tmp_path) == ["plain"]


def test_places_without_images_are_named(made, tmp_path):
    (tmp_path / "empty").mkdir()

    assert str(tmp_path / "empty") in refused(*predicting(made, tmp_path / "empty"), "--out", tmp_path / "o")
    assert "nowhere" in refused(*predicting(made, tmp_path / "nowhere"), "--out", tmp_path / "o")


# Training


def test_train_prints_the_keys_of_the_contract(made, tmp_path):
    options = [*SHORT[2:], "--epochs", "1", "--seed", "7", "--precision", "fp32"]
    found = answer(*training(made), "--out", tmp_path / "run", *options, "--weights", made / "run")

    assert set(found) == TRAIN_KEYS
    assert (found["run"], found["weights"]) == (str(tmp_path / "run"), str(tmp_path / "run/weights.safetensors"))
    assert found["epochs"] == 1
    assert 0 <= found["iou"] <= found["dice"] <= 1


def test_a_finished_run_may_be_resumed_with_more_epochs_and_no_other_way(made, tmp_path):
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))

    assert "--resume" in refused(*training(made), "--out", run, *SHORT)
    changed = refused(*training(made), "--out", run, *SHORT, "--resume", "--seed", "5")
    assert "seed" in changed
    assert answer(*training(made), "--out", run, *SHORT, "--resume", "--epochs", "9")["epochs"] == 9


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "unet_huge"], ["--model=", "unet_huge"]),
        (["--images", "plain"], ["plain"]),
        (["--masks", "nowhere"], ["nowhere"]),
        (["--images", "empty"], ["empty"]),
        (["--masks", "empty"], ["empty"]),
        (["--weights", "nowhere"], ["nowhere"]),
        (["--out", "plain"], ["plain"]),
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


def test_a_mask_that_is_missing_or_of_another_size_is_named(made, tmp_path):
    masks = Path(shutil.copytree(made / "masks", tmp_path / "masks"))
    argv = [*training(made), "--masks", masks, "--out", tmp_path / "run", *SHORT]

    cv2.imwrite(str(masks / "cell 3.png"), np.zeros((64, 50), np.uint8))
    message = refused(*argv)
    assert [word for word in ("cell 3.png", "64×64", "50×64") if word not in message] == []
    (masks / "cell 3.png").unlink()
    assert "cell 3.png has no mask" in refused(*argv)
