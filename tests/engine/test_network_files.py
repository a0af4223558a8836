"""Networks that users bring: names with the digest of their file, what they must give, and folded norms."""

from pathlib import Path

import pytest
import torch
from torch import nn

from brim.engine.networks import ProgramModule, check_module, factory_of, find_source, named_source, title_of
from brim.errors import ConfigError

CODE = """
from torch import nn

def make(classes, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, classes, 1))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


def test_a_network_is_named_by_its_file_and_the_beginning_of_its_digest(file: Path) -> None:
    source = find_source(f"{file}:make")

    assert source.name == f"{file}:make@{source.sha256[:16]}"
    assert (find_source(source.name), source.title, title_of(source.name)) == (source, "mine.py:make", "mine.py:make")
    assert type(source).of(source.as_dict() | {"name": "x"}) == source


def test_changed_code_is_another_network(file: Path) -> None:
    before = find_source(f"{file}:make")
    first = factory_of(before)(classes=2)
    file.write_text(CODE.replace("width=4", "width=8"))

    with pytest.raises(ConfigError, match="has changed: its SHA-256 began with") as caught:
        find_source(before.name)
    assert caught.value.code == "changed"
    assert before.now().name != before.name
    assert (first[0].out_channels, factory_of(before.now())(classes=2)[0].out_channels) == (4, 8)


def test_the_administrator_names_networks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_NETWORKS", f"small={file}:make")

    source = find_source("small")
    assert (source.name, source.path, source.factory) == ("small", str(file), "make")
    assert named_source("large") is None


def test_a_network_gives_a_map_for_each_output_as_large_as_the_image(file: Path) -> None:
    network = factory_of(find_source(f"{file}:make"))(classes=2).train()

    check_module(network, "mine", 2)
    assert network.training
    for wrong, message in (
        (network, r"\[1, 3, 64, 64\] into \[1, 2, 64, 64\], expected \[1, 3, 64, 64\]; return 3 maps"),
        (nn.Sequential(network, nn.Conv2d(2, 3, 3)), r"into \[1, 3, 62, 62\]"),
        (nn.Conv2d(1, 3, 1), "does not accept images of shape"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_module(wrong, "mine", 3)


@pytest.mark.parametrize("bias", [True, False])
def test_a_program_with_folded_norms_gives_the_same_maps_without_them(bias: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 5, 3, bias=bias), nn.BatchNorm2d(5), nn.ReLU())
    for values in (network[1].weight, network[1].bias, network[1].running_mean, network[1].running_var):
        nn.init.uniform_(values, 0.5, 2.0)
    images = torch.randn(2, 3, 8, 8)
    program = ProgramModule(torch.export.export(network.eval(), (images,)).module())

    program.fold()

    assert not [node for node in program.program.graph.nodes if "batch_norm" in str(node.target)]
    torch.testing.assert_close(program(images), network(images))
