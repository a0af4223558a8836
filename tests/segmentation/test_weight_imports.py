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


class HighResolutionModule(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*(Block(width, width, 1, 1) for _ in range(4))) for width in widths)
        self.fuse_layers = nn.ModuleList(
            nn.ModuleList(self._fuse(widths, i, j) for j in range(len(widths))) for i in range(len(widths))
        )

    @staticmethod
    def _fuse(widths, i, j):
        if j == i:
            return nn.Identity()
        if j > i:
            return nn.Sequential(*conv_bn(widths[j], widths[i], 1))
        steps = [nn.Sequential(*conv_bn(widths[j], widths[j], 3, 2), nn.ReLU()) for _ in range(i - j - 1)]
        return nn.Sequential(*steps, nn.Sequential(*conv_bn(widths[j], widths[i], 3, 2)))


class HRNetV2(nn.Module):
    """HRNet-W48 for segmentation, named as its authors, timm and the segmentation hub name it."""

    def __init__(self, head=True, classes=1):
        super().__init__()
        self.conv1, self.bn1 = conv_bn(3, 64, 3, 2)
        self.conv2, self.bn2 = conv_bn(64, 64, 3, 2)
        self.layer1 = nn.Sequential(Block(64, 64, 1, 4), *(Block(256, 64, 1, 4) for _ in range(3)))
        widths = (48, 96, 192, 384)

        def entry(inputs, outputs, stride):
            return nn.Sequential(*conv_bn(inputs, outputs, 3, stride), nn.ReLU())

        self.transition1 = nn.ModuleList([entry(256, 48, 1), nn.Sequential(entry(256, 96, 2))])
        self.transition2 = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Sequential(entry(96, 192, 2))])
        self.transition3 = nn.ModuleList([*(nn.Identity() for _ in range(3)), nn.Sequential(entry(192, 384, 2))])
        for stage, number in ((2, 1), (3, 4), (4, 3)):
            modules = nn.Sequential(*(HighResolutionModule(widths[:stage]) for _ in range(number)))
            setattr(self, f"stage{stage}", modules)
        if head:
            self.last_layer = nn.Sequential(
                nn.Conv2d(720, 720, 1), nn.BatchNorm2d(720), nn.ReLU(), nn.Conv2d(720, classes, 1)
            )


@pytest.fixture(scope="module")
def hrnet() -> HRNetV2:
    return randomised(HRNetV2())


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
    [
        ("unet_resnet18", lambda: Unet((2, 2, 2, 2), 1)),
        ("unet_resnet50", lambda: Unet((3, 4, 6, 3), 4)),
    ],
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


def test_timm_s_classifier_and_norms_without_statistics_are_listed(tmp_path, hrnet, monkeypatch):
    """timm's hrnet_w48 has a classification head; the hub's norms keep no running statistics."""
    monkeypatch.setattr(imports, "save_weights", lambda *_: None)  # 260 MB; only the lists matter here
    theirs = {name: tensor for name, tensor in hrnet.state_dict().items() if not name.startswith("last_layer.")}
    extra = {"incre_modules.0.0.conv1.weight": torch.zeros(32, 48, 1, 1), "classifier.bias": torch.zeros(1000)}
    save_file({**theirs, **extra}, tmp_path / "timm.safetensors")
    report = import_weights(tmp_path / "timm.safetensors", "hrnet", tmp_path / "ours.safetensors")
    assert {each["name"] for each in report.left_over} == set(extra)
    assert all(name.startswith("head.") for name in report.missing)

    hub = {name: tensor for name, tensor in hrnet.state_dict().items() if "running" not in name and "num_" not in name}
    save_file(hub, tmp_path / "hub.safetensors")
    report = import_weights(tmp_path / "hub.safetensors", "hrnet", tmp_path / "ours.safetensors")
    assert {name.rpartition(".")[2] for name in report.missing} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    assert [each["name"] for each in report.left_over] == ["last_layer.0.bias"]  # its place would be a running mean


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
        (["other.safetensors", "--as", "resnet"], "is unknown"),
        (["nowhere.safetensors", "--as", "hrnet"], "nowhere.safetensors"),
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
