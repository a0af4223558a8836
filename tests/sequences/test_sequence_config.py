"""The settings are declared once and need no torch."""

import subprocess
import sys

import pytest

from brim.config import read, settings
from brim.errors import ConfigError
from brim.sequences.config import (
    Augmentation,
    EncoderShape,
    LoaderConfig,
    SelfConfig,
    SequenceConfig,
    SequenceTraining,
)

ALL = (Augmentation, EncoderShape, LoaderConfig, SelfConfig, SequenceConfig, SequenceTraining)


def test_settings_load_neither_torch_nor_numpy():
    code = "import sys, brim.sequences, brim.sequences.config; print(*{'torch', 'numpy'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


@pytest.mark.parametrize("config", ALL)
def test_every_setting_has_its_sentence(config):
    assert [name for name, setting in settings(config).items() if not setting.doc] == []


def test_the_shape_of_the_network_may_be_given_as_plain_values():
    config = SequenceTraining(model={"channels": 8})

    assert config.model == EncoderShape(channels=8)
    assert config.shape(5) == SequenceConfig(dim=5, channels=8)


@pytest.mark.parametrize(
    ("values", "field", "code"),
    [
        ({"model": {"kernel": 4}}, "config.model.kernel", "out_of_range"),
        ({"model": {"widht": 3}}, "config.model.widht", "unknown_field"),
        ({"model": {"dim": 3}}, "config.model.dim", "unknown_field"),
        ({"augmentation": {"crop": 2}}, "config.augmentation.crop", "out_of_range"),
        ({"augmentation": None}, "config.augmentation", "conflict"),
        ({"objective": {"contrast": 0, "reconstruction": 0}}, "config.objective.contrast", "conflict"),
        ({"learning_rate": 0}, "config.learning_rate", "out_of_range"),
        ({"learning_rate": float("inf")}, "config.learning_rate", "out_of_range"),
        ({"tier": "disk"}, "config.tier", "unknown_choice"),
        ({"members": 2}, "config.members", "conflict"),
        ({"batch_size": 1}, "config.batch_size", "conflict"),
        ({"mode": "supervised", "variants": 2, "max_frames": 9}, "config.variants", "conflict"),
    ],
)
def test_a_wrong_setting_names_its_field_and_its_fault(values, field, code):
    with pytest.raises(ConfigError) as caught:
        read(SequenceTraining, values)

    assert (caught.value.field, caught.value.code) == (field, code)
