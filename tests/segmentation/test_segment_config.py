"""Settings of segmentation, which processes without torch read too."""

import subprocess
import sys

import pytest

from brim.errors import ConfigError
from brim.segmentation.config import (
    REGISTERED,
    FilesConfig,
    PredictConfig,
    RequestConfig,
    SegmentTrainConfig,
    TuneConfig,
)


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


@pytest.mark.parametrize(
    ("config", "values", "field", "code"),
    [
        (SegmentTrainConfig, {"model": "unet"}, "model", "unknown_choice"),
        (SegmentTrainConfig, {"model": "hrnet", "size": 31}, "size", "out_of_range"),
        (SegmentTrainConfig, {"model": "hrnet", "learning_rate": float("inf")}, "learning_rate", "out_of_range"),
        (SegmentTrainConfig, {"model": "hrnet", "tier": "disk"}, "tier", "unknown_choice"),
        (PredictConfig, {"threshold": 1.0}, "threshold", "out_of_range"),
        (PredictConfig, {"batch_size": True}, "batch_size", "wrong_type"),
        (PredictConfig, {"tile": 16}, "tile", "out_of_range"),
        (PredictConfig, {"tile": 64, "overlap": 33}, "overlap", "conflict"),
        (FilesConfig, {"format": "svg"}, "format", "unknown_choice"),
        (FilesConfig, {"tile": 64, "overlap": 33}, "overlap", "conflict"),
        (RequestConfig, {"threshold": 0}, "threshold", "out_of_range"),
        (TuneConfig, {"search": ("speed",)}, "search[0]", "unknown_choice"),
    ],
)
def test_a_wrong_setting_is_named(config, values, field, code):
    with pytest.raises(ConfigError) as caught:
        config(**values)

    assert (caught.value.field, caught.value.code) == (field, code)
