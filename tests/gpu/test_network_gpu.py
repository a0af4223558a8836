"""Networks on a GPU: the fused kernels against torch, captured graphs, memory, and company that changes nothing."""

import gc

import pytest
import torch
from torch import nn

from brim.segmentation.networks import CAPTURE_AFTER, GRAPHS, InferenceNetwork, create_model, fused, normalise
from brim.segmentation.networks.fused import AttentionWeights
from brim.segmentation.networks.network import ComputeConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NETWORKS = ("hrnet", "resunet_small", "resunet_advanced", "unet_tiny")
FINE = ComputeConfig(precision="fp16", layout="channels_last")
HALF = ComputeConfig(precision="bf16", layout="channels_last")


@pytest.fixture
def device():
    yield torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()


def settled(name):
    """A network whose norms have something to fold, as after training."""
    torch.manual_seed(3)
    module = create_model(name).eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, 0, 0.1)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return module


def images(device, batch, height=256, width=192, seed=0):
    rng = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8, device=device, generator=rng)


def maps(device, *shapes, dtype=torch.bfloat16):
    made = [(torch.randn(shape, device=device) + 0.3).to(dtype) for shape in shapes]
    return [tensor.contiguous(memory_format=torch.channels_last) for tensor in made]


def near(found, wanted, tolerance):
    error = (found.float() - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance, f"{error:.2e}"


@pytest.mark.parametrize("channels", [16, 96, 768])
@pytest.mark.parametrize(("height", "width"), [(64, 48), (33, 17), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_every_kernel_equals_torch(device, channels, height, width, dtype):
    shape, low = (2, channels, height, width), (2, channels, -(-height // 2), -(-width // 2))
    x, y, down = maps(device, shape, shape, low, dtype=dtype)
    scale, shift = torch.randn(2, 2 * channels, device=device)
    channel, centre = torch.rand(2, 2, channels, device=device)
    pixel = torch.rand(2, 1, height, width, device=device).to(dtype)
    size, full = torch.Size((height, width)), [tensor.float() for tensor in (x, y, down)]
    assert fused.fast(x)
    assert not fused.fast(full[0])
    half = scale[:channels], shift[:channels]

    near(fused.affine_relu(x, *half), fused.affine_relu(full[0], *half), 0.01)
    near(fused.merge([x, down, y], size, centre[0]), fused.merge([full[0], full[2], full[1]], size, centre[0]), 0.01)
    found = fused.beside(down, centre[0], x, pixel, scale, shift)
    wanted = fused.beside(full[2], centre[0], full[0], pixel.float(), scale, shift)
    for one, other in zip(found, wanted, strict=True):
        near(one, other, 0.01)
    for weights in (
        AttentionWeights(),
        AttentionWeights(channel),
        AttentionWeights(channel, pixel),
        AttentionWeights(channel, centre=centre),
    ):
        plain = weights._replace(pixel=None if weights.pixel is None else weights.pixel.float())
        one, other = fused.weigh_add(x, y, weights, shift[:channels], half), None
        other = fused.weigh_add(full[0], full[1], plain, shift[:channels], half)
        near(one[0], other[0], 0.01)
        near(one[1], other[1], 0.01)
    for one, other in zip(fused.channel_stats(x), fused.channel_stats(full[0]), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)
    near(fused.pixel_stats(x, channel), fused.pixel_stats(full[0], channel), 0.01)


@torch.no_grad()
def test_more_than_two_to_the_31_elements_are_addressed(device):
    shape = (34, 64, 1024, 1024)
    if torch.cuda.mem_get_info(device)[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB free")
    x = torch.empty(shape, dtype=torch.bfloat16, device=device, memory_format=torch.channels_last).zero_()
    x[-1] = 1.0

    y = fused.affine_relu(x, torch.full((64,), 2.0, device=device), torch.zeros(64, device=device))

    assert float(y[-1].float().mean()) == 2.0
    assert float(y[0].float().mean()) == 0.0


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("height", "width"), [(256, 192), (333, 517)])
def test_16_bits_are_near_fp32_at_any_size(device, name, height, width):
    module, batch = settled(name), images(device, 2, height, width)
    with torch.no_grad():
        wanted = torch.sigmoid(module.to(device)(normalise(batch)))

    for setting, tolerance in ((HALF, 0.03), (FINE, 0.005)):
        found = torch.sigmoid(InferenceNetwork(module, device, setting)(batch))

        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < tolerance


@pytest.mark.parametrize("name", NETWORKS)
def test_a_replayed_graph_gives_the_bits_of_the_first_run(device, name):
    network, batch = InferenceNetwork(settled(name), device, HALF), images(device, 3)
    first = network(batch)
    for _ in range(CAPTURE_AFTER):
        network(images(device, 3, seed=9))

    again = network(batch)

    assert len(network._graphs) == 1
    assert torch.equal(first, again)


@pytest.mark.parametrize(("setting", "tolerance"), [(ComputeConfig(), 1e-4), (HALF, 0.02), (FINE, 0.005)])
@pytest.mark.parametrize("name", NETWORKS)
def test_company_moves_probabilities_within_the_promise(device, name, setting, tolerance):
    network, batch = InferenceNetwork(settled(name), device, setting), images(device, 5)

    together = torch.sigmoid(network(batch))
    alone = torch.cat([torch.sigmoid(network(image[None])) for image in batch])

    assert (together - alone).abs().max() < tolerance


def test_no_call_waits_for_the_device(device):
    network, batch = InferenceNetwork(settled("resunet_advanced"), device, HALF), images(device, 2)
    for _ in range(CAPTURE_AFTER + 2):
        network(batch)
    other = images(device, 3)
    network(other)
    torch.cuda.set_sync_debug_mode("error")
    try:
        network(batch)  # replayed
        network(other)  # eager
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_many_shapes_do_not_capture_in_turns(device):
    network = InferenceNetwork(settled("unet_tiny"), device, HALF)
    for _ in range(CAPTURE_AFTER + 2):
        for index in range(2 * GRAPHS):
            network(images(device, 1, 64 + 32 * index, 64))
    captured = network.compile_s

    for index in range(2 * GRAPHS):
        network(images(device, 1, 64 + 32 * index, 64))

    assert len(network._graphs) <= GRAPHS
    assert network.compile_s == captured


def test_without_room_for_a_graph_it_runs_without_one(device):
    network, batch = InferenceNetwork(settled("resunet_small"), device, HALF), images(device, 8, 512, 512)
    wanted = network(batch)
    torch.cuda.empty_cache()
    with torch.cuda.device(device):
        torch.cuda.reset_peak_memory_stats()
        network(batch)
        needed = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.empty(max(0, free - int(1.2 * needed)), dtype=torch.uint8, device=device)
    try:
        for _ in range(CAPTURE_AFTER + 1):
            found = network(batch)
    finally:
        del held
    assert torch.equal(found, wanted)
