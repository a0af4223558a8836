"""`torchrun … -m brim … train`: the losses of one process, one voice, and a run that goes on when a rank dies."""

import json
from pathlib import Path

import pytest
import torch
from cli_commands import brim

from brim.cli import main
from brim.engine.config import TrainConfig
from brim.segmentation.scenes import write_cells
from brim.sequences.corpus.synthetic import make_sequences
from brim_steps import logging_all
from torchruns import STEPS, differences, logged, torchrun

pytestmark = pytest.mark.long

torch.set_num_threads(1)  # as the ranks have it

RF = ["--epochs", "3", "--batch-size", "12", "--device", "cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Something to train on for every workload: samples, images with masks, sequences."""
    path = tmp_path_factory.mktemp("data")
    (path / "quick.toml").write_text("duration_s = 0.2\nsamples_per_shard = 16\n")
    generate = ["rf", "generate", "--out", str(path / "samples"), "--samples", "60", "--device", "cpu"]
    assert main([*generate, "--config", str(path / "quick.toml")]) == 0
    write_cells(path / "images", path / "masks", 6, seed=1, height=64, width=64)
    make_sequences(path / "files", 40, 6, 3, mean_length=10)
    assert main(["sequence", "pack", str(path / "files"), "--out", str(path / "corpus")]) == 0
    return path


def alone(*args: str | Path) -> None:
    """A training in this process alone, with every step logged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainConfig, "__init__", logging_all)
        ended = brim(*args)
    assert ended.code == 0, ended.err


@pytest.fixture(scope="module")
def located(data: Path) -> Path:
    """A run of one process."""
    alone("rf", "train", data / "samples", "--out", data / "one", *RF)
    return data / "one"


def both(args: list[str], out: Path) -> None:
    """The same training in one process and on two ranks."""
    alone(*args, "--out", out / "one")
    code, _, err = torchrun(STEPS, *args, "--out", out / "two")
    assert code == 0, err


# Results


@pytest.mark.smoke
def test_a_locator_trains_on_two_ranks_as_on_one(data: Path, located: Path, tmp_path: Path) -> None:
    code, out, err = torchrun("-m", "brim", "rf", "train", data / "samples", "--out", tmp_path / "run", *RF, "--json")
    assert code == 0, err
    assert out.count("\n") == 1  # rank 0 alone speaks
    report = json.loads(out)
    assert (report["epochs"], report["ceiling_share"]) == (3, None)
    assert differences(located / "train", tmp_path / "run" / "train", "val_loss") < 1e-5
    assert err.count("tier ram") == 1


def test_a_network_trains_on_two_ranks_as_on_one(data: Path, tmp_path: Path) -> None:
    folders = ["--images", str(data / "images"), "--masks", str(data / "masks")]
    # a low rate: roundings that differ grow with every step of a network of batch norms, on any two machines
    settings = "--model unet_tiny --task mask --size 32 --epochs 2 --batch-size 5 --learning-rate 1e-4 --device cpu"

    both(["segment", "train", *folders, *settings.split()], tmp_path)

    assert differences(tmp_path / "one/train", tmp_path / "two/train") < 1e-5
    assert (tmp_path / "two/weights.safetensors").is_file()


def test_sequences_without_labels_train_on_two_ranks_as_on_one(data: Path, tmp_path: Path) -> None:
    settings = ["--mode", "self", "--iterations", "1", "--encoder-epochs", "2", "--classifier-epochs", "1"]
    sizes = ["--clusters", "3", "--batch-size", "7", "--learning-rate", "3e-4"]

    both(["sequence", "train", str(data / "corpus"), *settings, *sizes, "--device", "cpu"], tmp_path)

    for phase in ("encoder-1", "classifier-1"):
        assert differences(tmp_path / "one" / phase, tmp_path / "two" / phase) < 1e-5
    one, two = (json.loads((tmp_path / name / "report.json").read_text())["scores"] for name in ("one", "two"))
    assert one == two


# Ranks that die, and what else goes wrong


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_goes_on_from_its_checkpoint_when_a_rank_is_killed(
    data: Path, located: Path, tmp_path: Path, rank: int
) -> None:
    args = ["rf", "train", data / "samples", "--out", tmp_path / "run", *RF]

    code, _, err = torchrun(STEPS, *args, restarts=1, BRIM_TEST_DEATH=f"{rank}:8")

    assert code == 0, err
    assert "step 5 of 15" in err
    assert differences(located / "train", tmp_path / "run" / "train") < 1e-5


def test_one_process_goes_on_with_a_run_of_two_ranks(data: Path, located: Path, tmp_path: Path) -> None:
    args = ["rf", "train", data / "samples", "--out", tmp_path / "run", *RF]
    code, out, err = torchrun(STEPS, *args, BRIM_TEST_DEATH="1:8")
    assert code != 0
    assert out == ""
    assert "rank" in err

    alone(*args, "--resume")

    assert differences(located / "train", tmp_path / "run" / "train") < 1e-5
    assert len(logged(tmp_path / "run" / "train")) == 15


@pytest.mark.smoke
def test_what_is_refused_is_said_once(data: Path, located: Path) -> None:
    code, out, err = torchrun("-m", "brim", "rf", "train", data / "samples", "--out", located, *RF)
    assert code != 0
    assert out == ""
    assert err.count("error: ") == 1
    assert "--resume" in err
