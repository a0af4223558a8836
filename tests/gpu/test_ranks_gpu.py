"""Two ranks on one GPU, over gloo: the losses of one process, and the data halved between them.

TF32 is off: one process and two multiply matrices of other shapes, which TF32 rounds in other ways.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brim.cli import main
from brim.sequences.corpus.synthetic import make_sequences
from torchruns import STEPS, alone, logged, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

GPU = ["--device", "cuda:0", "--precision", "fp32"]


def both(args: list[str], out: Path) -> tuple[str, str]:
    """The same training in one process and on two ranks; what each said."""
    said = []
    for name, start in (("one", alone), ("two", torchrun)):
        code, _, err = start(STEPS, *args, *GPU, "--out", out / name, NVIDIA_TF32_OVERRIDE="0")
        assert code == 0, err
        said.append(err)
    return said[0], said[1]


def check_alike(out: Path, phase: str) -> None:
    """Equal at first; roundings grow with the steps, so later only nearly so."""
    one, two = logged(out / "one" / phase), logged(out / "two" / phase)
    assert one.keys() == two.keys()
    away = [abs(one[step] - two[step]) / max(1.0, abs(one[step])) for step in sorted(one)]
    assert max(away[:3]) < 1e-4
    assert max(away) < 1e-2


def test_a_locator_trains_on_two_ranks_of_one_gpu_as_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "quick.toml").write_text("duration_s = 0.2\n")
    generate = ["rf", "generate", "--out", str(tmp_path / "samples"), "--samples", "400", "--device", "cuda:0"]
    assert main([*generate, "--config", str(tmp_path / "quick.toml")]) == 0

    one, two = both(
        ["rf", "train", str(tmp_path / "samples"), "--epochs", "3", "--batch-size", "50", "--tier", "vram"], tmp_path
    )

    check_alike(tmp_path, "train")
    assert "gradients go by gloo" in two
    assert _held_kib(two) == pytest.approx(_held_kib(one) / 2, rel=0.05)


def _held_kib(said: str) -> float:
    line = next(line for line in said.splitlines() if line.startswith("tier vram: "))
    size, unit = line.split()[2:4]
    return float(size) * {"KiB": 1, "MiB": 1024}[unit]


@pytest.mark.parametrize("mode", ["supervised", "self"])
def test_sequences_train_on_two_ranks_of_one_gpu_as_in_one_process(tmp_path: Path, mode: str) -> None:
    make_sequences(tmp_path / "files", 60, 16, 3, mean_length=20)
    assert main(["sequence", "pack", str(tmp_path / "files"), "--out", str(tmp_path / "corpus")]) == 0
    own: dict[str, Any] = {
        "supervised": ["--classifier-epochs", "2"],
        "self": ["--iterations", "1", "--encoder-epochs", "2", "--classifier-epochs", "1", "--clusters", "3"],
    }

    both(
        ["sequence", "train", str(tmp_path / "corpus"), "--mode", mode, *own[mode], "--batch-size", "9",
         "--learning-rate", "3e-4"],
        tmp_path,
    )  # fmt: skip

    check_alike(tmp_path, "supervised" if mode == "supervised" else "encoder-1")


def test_half_precision_trains_on_two_ranks_of_one_gpu(tmp_path: Path) -> None:
    make_sequences(tmp_path / "files", 60, 16, 3, mean_length=20)
    assert main(["sequence", "pack", str(tmp_path / "files"), "--out", str(tmp_path / "corpus")]) == 0
    args = ["sequence", "train", tmp_path / "corpus", "--mode", "supervised", "--classifier-epochs", "2"]

    for precision in ("bf16", "fp16"):
        out = tmp_path / precision
        code, _, err = torchrun(STEPS, *args, "--device", "cuda:0", "--precision", precision, "--out", out)
        assert code == 0, err
        assert all(np.isfinite(loss) for loss in logged(out / "supervised").values())
