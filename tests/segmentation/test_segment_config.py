"""Settings of segmentation, which processes without torch read too."""

import subprocess
import sys

import pytest

from brim.errors import ConfigError
from brim.segmentation.config import REGISTERED, FilesConfig, PredictConfig, SegmentTrainConfig, TuneConfig


def test_settings_load_neither_torch_nor_opencv_nor_numpy():
    code = "import sys, brim.segmentation.config\nprint(*{'torch', 'cv2', 'numpy', 'PIL'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


def test_a_registered_network_is_a_valid_choice(monkeypatch):
    with pytest.raises(ConfigError):
        SegmentTrainConfig(model="just_registered")

    monkeypatch.setitem(REGISTERED, "just_registered", object)

    assert SegmentTrainConfig(model="just_registered").model == "just_registered"
    assert TuneConfig(models=("just_registered",)).models == ("just_registered",)


@pytest.mark.parametrize("config", [PredictConfig, FilesConfig])
def test_windows_overlap_by_half_a_tile_at_most(config):
    assert config(tile=64, overlap=32).overlap == 32
    with pytest.raises(ConfigError, match="overlap=33 must be at most 32 px, half the tile"):
        config(tile=64, overlap=33)
