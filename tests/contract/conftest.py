"""What the verbs read and what they make of it, for every file that compares with that."""

from pathlib import Path

import pytest
from cli_commands import brim
from verbs import VERBS, make_inputs, quickly


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What every verb makes when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with quickly():
        for name, verb in VERBS.items():
            ended = brim(*verb.command(inputs, folder / name))
            assert ended.code == 0, ended.err
    return {name: folder / name for name in VERBS}
