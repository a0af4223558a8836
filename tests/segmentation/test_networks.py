"""The three networks: their size and cost, any height and width, and that folding and padding change nothing."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from brim.errors import ConfigError
from brim.segmentation import create_model
from brim.segmentation.config import REGISTERED
from brim.segmentation.networks import InferenceNetwork, blocks, normalise
from brim.segmentation.networks.network import ComputeConfig

NETWORKS = ("hrnet", "resunet_small", "resunet_advanced")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def networks():
    torch.manual_seed(5)
    made = {name: create_model(name).eval() for name in (*NETWORKS, "unet_tiny", "cells")}
    for module in made.values():
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):  # as after training: folding must have something to fold
                nn.init.normal_(layer.running_mean, 0, 0.2)
                nn.init.uniform_(layer.running_var, 0.5, 2)
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.normal_(layer.bias, 0, 0.2)
    return made


def images(batch, height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("name", "parameters", "flop"),
    [("hrnet", 66e6, 746e9), ("resunet_small", 58e6, 1116e9), ("resunet_advanced", 78e6, 3771e9)],
)
def test_size_and_cost_are_those_of_the_published_networks(name, parameters, flop):
    with torch.device("meta"):
        module = create_model(name)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(torch.empty(1, 3, 1024, 1024))

    assert sum(tensor.numel() for tensor in module.parameters()) == pytest.approx(parameters, rel=0.10)
    assert counter.get_total_flops() == pytest.approx(flop, rel=0.15)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_size_from_32_to_1100_comes_back_as_it_went_in(name):
    with torch.device("meta"), torch.no_grad():
        module = create_model(name).eval()
        for side in (32, 33, 63, 131, 1100):
            height, width = side, 32 + (side * 37) % 1069
            assert module(torch.empty(1, 3, height, width)).shape == (1, 1, height, width)


@pytest.mark.parametrize("name", [*NETWORKS, "unet_tiny", "cells"])
def test_folded_norms_change_nothing(networks, name):
    batch = images(2, 71, 45)
    with torch.no_grad():
        wanted = networks[name](normalise(batch))

    found = InferenceNetwork(networks[name], CPU, ComputeConfig())(batch)

    assert torch.allclose(found, wanted, atol=2e-5)
    assert wanted.std() > 0.01


@pytest.mark.parametrize("name", [*NETWORKS, "cells"])
def test_padded_channels_change_nothing(networks, name):
    batch = normalise(images(1, 71, 45))
    wide = networks[name].aligned().eval()
    with torch.no_grad():
        assert torch.allclose(wide(batch), networks[name](batch), atol=2e-5)

    assert sum(p.numel() for p in wide.parameters()) > sum(p.numel() for p in networks[name].parameters())


@pytest.mark.parametrize("name", [*NETWORKS, "unet_tiny", "cells"])
def test_every_parameter_gets_a_gradient(name):
    module = create_model(name).train()

    module(normalise(images(2, 64, 64))).square().mean().backward()

    missing = [name for name, tensor in module.named_parameters() if tensor.grad is None or not tensor.grad.any()]
    assert len(missing) <= 2, missing  # a bias ahead of a batch norm may be without effect


@pytest.mark.parametrize("name", [*NETWORKS, "unet_tiny", "cells"])
def test_every_network_has_a_second_map_for_instances(name):
    module = create_model(name, "instances").eval()
    with torch.no_grad():
        assert module(normalise(images(1, 40, 33))).shape == (1, 2, 40, 33)


def test_a_registered_network_without_outputs_finds_no_instances(monkeypatch):
    monkeypatch.setitem(REGISTERED, "single", lambda: nn.Conv2d(3, 1, 1))

    with pytest.raises(ConfigError, match="takes no number of outputs"):
        create_model("single", "instances")


def test_the_module_given_stays_as_it_is(networks):
    module = networks["unet_tiny"]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    InferenceNetwork(module, CPU, ComputeConfig(precision="bf16", layout="channels_last"))(images(1, 32, 32))

    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_squeeze_excite_is_the_papers():
    x, layer = torch.randn(2, 16, 5, 7), blocks.SqueezeExcite(16)
    weight = torch.sigmoid(layer.mlp(x.mean((2, 3))))

    assert torch.allclose(layer.weigh(x).channel, weight)


def test_simam_is_the_papers():
    x = torch.randn(2, 8, 6, 5)
    away = (x - x.mean((2, 3), keepdim=True)).square()
    variance = away.sum((2, 3), keepdim=True) / (6 * 5 - 1)
    wanted = x * torch.sigmoid(away / (4 * (variance + 1e-4)) + 0.5)

    found, _ = blocks.fused.weigh_add(x, torch.zeros_like(x), blocks.SimAM().weigh(x))

    assert torch.allclose(found, wanted, atol=1e-6)


def test_cbam_is_channels_then_pixels():
    x, layer = torch.randn(2, 16, 6, 5), blocks.CBAM(16)
    scaled = x * torch.sigmoid(layer.mlp(x.mean((2, 3))) + layer.mlp(x.amax((2, 3))))[:, :, None, None]
    seen = torch.stack((scaled.mean(1), scaled.amax(1)), 1)
    wanted = scaled * torch.sigmoid(layer.spatial.conv(seen))

    found, _ = blocks.fused.weigh_add(x, torch.zeros_like(x), layer.weigh(x))

    assert torch.allclose(found, wanted, atol=1e-6)


def test_an_attention_gate_is_the_papers():
    layer, skip, gate = blocks.AttentionGate(8, 12), torch.randn(1, 8, 10, 6), torch.randn(1, 12, 5, 3)
    compared = torch.relu(layer.skip(skip) + layer.gate(gate))

    assert torch.allclose(layer(skip, gate), torch.sigmoid(layer.score(compared)), atol=1e-6)


def test_self_attention_looks_at_every_pixel():
    layer, x = blocks.SelfAttention(64, head_channels=32).eval(), torch.randn(1, 64, 3, 4)
    pixels = x.flatten(2).transpose(1, 2)
    query, key, value = layer.qkv(layer.norm(pixels)).view(1, 12, 3, 2, 32).permute(2, 0, 3, 1, 4)
    weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(32), -1)
    found = layer.out((weights @ value).transpose(1, 2).reshape(1, 12, 64))

    assert torch.allclose(layer(x), x + found.transpose(1, 2).view(1, 64, 3, 4), atol=1e-5)
