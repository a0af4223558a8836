"""Weights of other libraries: tensors under their published names and shapes become brim's, and none is lost.

The modules here are written anew with the names that timm, HRNet's authors and segmentation_models_pytorch publish.
"""

import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from brim.cli import main
from brim.errors import CheckpointError
from brim.segmentation import create_model
from brim.segmentation.config import REGISTERED
from brim.segmentation.networks import imports, load_model, load_weights
from brim.segmentation.networks.imports import import_weights


def conv_bn(inputs, outputs, kernel, stride=1):
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """A ResNet block of two convolutions, or of three."""

    def __init__(self, inputs, width, stride, expansion):
        super().__init__()
        self.expansion, outputs = expansion, width * expansion
        if expansion == 1:
            self.conv1, self.bn1 = conv_bn(inputs, width, 3, stride)
            self.conv2, self.bn2 = conv_bn(width, width, 3)
        else:
            self.conv1, self.bn1 = conv_bn(inputs, width, 1)
            self.conv2, self.bn2 = conv_bn(width, width, 3, stride)
            self.conv3, self.bn3 = conv_bn(width, outputs, 1)
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(*conv_bn(inputs, outputs, 1, stride))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.expansion > 1:
            y = self.bn3(self.conv3(F.relu(y)))
        return F.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))


class ResNet(nn.Module):
    """Named as in torchvision and timm."""

    def __init__(self, blocks, expansion, classes=0):
        super().__init__()
        self.conv1, self.bn1 = conv_bn(3, 64, 7, 2)
        inputs = 64
        for level, (width, number) in enumerate(zip((64, 128, 256, 512), blocks, strict=True)):
            layers = []
            for index in range(number):
                layers.append(Block(inputs, width, 2 if level and not index else 1, expansion))
                inputs = width * expansion
            setattr(self, f"layer{level + 1}", nn.Sequential(*layers))
        if classes:
            self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        levels = [F.relu(self.bn1(self.conv1(x)))]
        x = F.max_pool2d(levels[0], 3, 2, 1)
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
            levels.append(x)
        return levels


class Unet(nn.Module):
    """Named as in segmentation_models_pytorch."""

    def __init__(self, blocks, expansion, classes=1):
        super().__init__()
        self.encoder = ResNet(blocks, expansion)
        channels = [64, *(width * expansion for width in (64, 128, 256, 512))]
        self.decoder = nn.Module()
        self.decoder.blocks = nn.ModuleList()
        below = channels[-1]
        for width, skip in zip((256, 128, 64, 32, 16), [*channels[-2::-1], 0], strict=True):
            part = nn.Module()
            part.conv1 = nn.Sequential(*conv_bn(below + skip, width, 3), nn.ReLU())
            part.conv2 = nn.Sequential(*conv_bn(width, width, 3), nn.ReLU())
            self.decoder.blocks.append(part)
            below = width
        self.segmentation_head = nn.Sequential(nn.Conv2d(16, classes, 3, padding=1))

    def forward(self, x):
        *skips, x = self.encoder(x)
        for part in self.decoder.blocks:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            if skips:
                x = torch.cat([x, skips.pop()], 1)
            x = part.conv2(part.conv1(x))
        return self.segmentation_head(x)


def randomised(module):
    """With statistics that a mistake in a name or a fold would show."""
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.2)
            layer.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(layer.weight, 0.5, 1.0)
            nn.init.normal_(layer.bias, 0, 0.1)
    return module.eval()


@pytest.mark.parametrize(
    ("network", "make"),
    [("unet_resnet18", lambda: Unet((2, 2, 2, 2), 1)), ("unet_resnet50", lambda: Unet((3, 4, 6, 3), 4))],
)
@torch.no_grad()
def test_an_imported_network_answers_as_its_own_library_does(tmp_path, network, make):
    module = randomised(make())
    torch.save({"model_state_dict": module.state_dict(), "epoch": 3}, tmp_path / "theirs.pth")

    report = import_weights(tmp_path / "theirs.pth", network, tmp_path / "ours.safetensors")

    assert (report.missing, report.left_over) == ([], [])
    assert len(report.mapped) == len(module.state_dict())
    ours = load_model(network, tmp_path / "ours.safetensors").eval()
    images = torch.randn(1, 3, 64, 96)
    expected = module(images)
    torch.testing.assert_close(ours(images), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("prefix", ["", "encoder."])
def test_an_encoder_is_mapped_and_the_rest_is_listed(tmp_path, prefix):
    module = ResNet((2, 2, 2, 2), 1, classes=1000)  # timm's and torchvision's resnet18
    save_file({prefix + name: tensor for name, tensor in module.state_dict().items()}, tmp_path / "r.safetensors")

    report = import_weights(tmp_path / "r.safetensors", "unet_resnet18", tmp_path / "ours.safetensors")

    assert {each["name"] for each in report.left_over} == {f"{prefix}fc.weight", f"{prefix}fc.bias"}
    assert all(name.startswith(("decoder.", "score.")) for name in report.missing)
    targets = create_model("unet_resnet18").state_dict()
    assert {each["to"] for each in report.mapped} | set(report.missing) == set(targets)
    with pytest.raises(CheckpointError, match="missing when it was imported"):
        load_model("unet_resnet18", tmp_path / "ours.safetensors")
    load_weights(create_model("unet_resnet18"), tmp_path / "ours.safetensors")  # training may start from it


def hrnet_names() -> list[str]:
    """Of the layers of HRNet-W48 for segmentation, as its authors, timm and the segmentation hub name them."""
    names = ["conv1", "bn1", "conv2", "bn2", "last_layer.0", "last_layer.1", "last_layer.3"]
    names += [f"layer1.{block}.{kind}{number}" for block in range(4) for kind in ("conv", "bn") for number in (1, 2, 3)]
    names += [f"layer1.0.downsample.{part}" for part in range(2)]
    entries = ("transition1.0", "transition1.1.0", "transition2.2.0", "transition3.3.0")
    names += [f"{entry}.{part}" for entry in entries for part in range(2)]
    for stage, modules in ((2, 1), (3, 4), (4, 3)):
        for module, one in ((module, one) for module in range(modules) for one in range(stage)):
            here = f"stage{stage}.{module}"
            names += [
                f"{here}.branches.{one}.{b}.{kind}{n}" for b in range(4) for kind in ("conv", "bn") for n in (1, 2)
            ]
            for other in range(stage):
                paths = [f".{step}" for step in range(one - other)] if other < one else [""] * (other > one)
                names += [f"{here}.fuse_layers.{one}.{other}{path}.{part}" for path in paths for part in range(2)]
    return names


def test_every_layer_of_hrnet_has_its_place():
    with torch.device("meta"):
        targets = create_model("hrnet").state_dict()
    layers = {name.rpartition(".")[0] for name in targets}

    found = {name: imports._name(f"{name}.weight", imports.RULES["hrnet"], targets) for name in hrnet_names()}

    assert {str(ours).removesuffix(".weight") for ours in found.values()} == layers
    assert len(found) == len(layers)
    for theirs, ours in {
        "layer1.2.conv3": "stage1.2.last.conv",
        "transition2.2.0.1": "entries.1.0.norm",
        "stage3.2.branches.1.3.bn2": "stages.1.2.branches.1.3.last.norm",
        "stage4.1.fuse_layers.0.3.0": "stages.2.1.rows.0.3.conv",
        "stage4.1.fuse_layers.3.0.2.1": "stages.2.1.rows.3.0.2.norm",
    }.items():
        assert found[theirs] == f"{ours}.weight"


class Normed(nn.Module):
    """A convolution without a bias before a norm."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Module()
        self.mix.conv, self.mix.norm = conv_bn(3, 1, 3)

    def forward(self, x):
        return self.mix.norm(self.mix.conv(x))


@torch.no_grad()
def test_the_bias_of_a_convolution_moves_into_the_norm_behind_it(tmp_path, monkeypatch):
    theirs = randomised(nn.Sequential(nn.Conv2d(3, 1, 3, padding=1), nn.BatchNorm2d(1)))
    theirs[0].bias.fill_(0.7)
    monkeypatch.setitem(REGISTERED, "normed", Normed)
    monkeypatch.setitem(imports.RULES, "normed", imports._rules(("0", "mix.conv"), ("1", "mix.norm")))
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")

    report = import_weights(tmp_path / "theirs.safetensors", "normed", tmp_path / "ours.safetensors")

    images = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(load_model("normed", tmp_path / "ours.safetensors").eval()(images), theirs(images))
    assert (report.missing, report.left_over) == ([], [])
    save_file({"0.bias": theirs[0].bias, "0.weight": theirs[0].weight}, tmp_path / "hub.safetensors")
    report = import_weights(tmp_path / "hub.safetensors", "normed", tmp_path / "ours.safetensors")
    assert [each["name"] for each in report.left_over] == ["0.bias"]  # its place would be the running mean


def test_the_command_lists_every_tensor_and_other_shapes_are_left_over(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = Unet((2, 2, 2, 2), 1, classes=19).state_dict()
    save_file(theirs, tmp_path / "city.safetensors")

    assert main(["weights", "import", "city.safetensors", "--as", "unet_resnet18", "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["out"] == "city.unet_resnet18.safetensors"
    assert {each["from"] for each in report["mapped"]} | {each["name"] for each in report["left_over"]} == set(theirs)
    assert sorted(each["name"] for each in report["left_over"]) == [
        f"segmentation_head.0.{end}" for end in ("bias", "weight")
    ]
    assert (report["missing"], report["complete"]) == (["score.weight", "score.bias"], False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["evil.pt", "--as", "hrnet"], "evil.pt"),
        (["other.safetensors", "--as", "hrnet"], "none of its 1 tensors is of hrnet"),
        (["other.safetensors", "--as", "unet_tiny", "--out", "other.safetensors"], "is the file to read"),
    ],
)
def test_what_cannot_be_imported_is_said_and_nothing_is_written(tmp_path, capsys, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(eval))
    save_file({"some.thing": torch.zeros(2)}, tmp_path / "other.safetensors")
    before = sorted(tmp_path.iterdir())

    assert main(["weights", "import", *argv]) == 2

    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n"), words in captured.err) == ("", 1, True), captured.err
    assert sorted(tmp_path.iterdir()) == before
