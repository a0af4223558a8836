"""The GPU's kernels without a GPU: against plain torch under Triton's interpreter.

Triton decides at import whether to interpret, so each of these runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")

# Every function of fused.py once by torch in float32 and once by its kernel in float16.
CASES = """
import torch
from brim.segmentation.networks import fused
from brim.segmentation.networks.fused import AttentionWeights

torch.manual_seed(3)
last = torch.channels_last


def maps(*shapes):
    return [(torch.randn(shape) + 0.3).half().contiguous(memory_format=last) for shape in shapes]


def cases(channels, height, width):
    batch = 2
    shape = (batch, channels, height, width)
    x, y = maps(shape, shape)
    low, lower = maps((batch, channels, -(-height // 2), -(-width // 2)), (batch, channels, 3, 5))
    scale, shift = torch.randn(2, 2 * channels)
    channel, centre = torch.rand(2, batch, channels)
    pixel = torch.rand(batch, 1, height, width).half()
    weight = torch.rand(batch, 1, max(1, height // 2), max(1, width // 2)).half()
    size = torch.Size((height, width))
    yield "affine_relu", lambda c: fused.affine_relu(c(x), scale[:channels], shift[:channels])
    yield "merge up", lambda c: fused.merge([c(x), c(low), c(lower), c(y)], size, shift[:channels])
    yield "merge two", lambda c: fused.merge([c(low), c(x)], size)
    yield "merge down", lambda c: fused.merge([c(x), c(y)], torch.Size((max(1, height // 2), width)))
    yield "beside", lambda c: torch.cat(fused.beside(c(low), centre[0], c(x), c(weight), scale, shift))
    then = scale[:channels], shift[:channels]
    yield "weigh nothing", lambda c: torch.cat(fused.weigh_add(c(x), c(y), AttentionWeights(), centre[0], then))
    yield "weigh channel", lambda c: fused.weigh_add(c(x), c(y), AttentionWeights(channel), centre[0])[0]
    yield (
        "weigh pixel",
        lambda c: torch.cat(fused.weigh_add(c(x), c(y), AttentionWeights(channel, c(pixel)), None, then)),
    )
    yield "weigh simam", lambda c: fused.weigh_add(c(x), c(y), AttentionWeights(channel, centre=centre))[0]
    yield "channel_stats", lambda c: torch.cat(fused.channel_stats(c(x)))
    yield "pixel_stats", lambda c: fused.pixel_stats(c(x), channel)


def merged(channels, height, width):
    parts = maps((2, channels, height, width), (2, channels, 3, 4), (2, channels, 2, 2), (2, channels, 1, 1))
    bias, weight, size = torch.randn(channels), torch.randn(channels), torch.Size((height, width))
    seen = sum(fused.resize(part.float(), size) for part in parts) + bias[:, None, None]
    wanted = torch.einsum("bchw,c->bhw", seen.relu(), weight)[:, None]
    return fused.merge_score(parts, bias, weight, size), wanted


SHAPES = [(64, 9, 13), (96, 8, 6), (288, 5, 4), (8, 31, 33), (16, 2, 1)]
"""

COMPARE = (
    CASES
    + """
torch.set_grad_enabled(False)
real = fused.fast
for shape in SHAPES:
    for name, case in cases(*shape):
        fused.fast = lambda x: False
        wanted = case(lambda t: t.float())
        fused.fast = lambda x: x.dtype == torch.float16
        found = case(lambda t: t)
        assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
        error = (found.float() - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-3, f"{name} {shape}: {error}"
    found, wanted = merged(shape[0], min(12, shape[1]), shape[2])
    assert (found - wanted).abs().max() < 2e-3 * wanted.abs().max(), ("merge_score", shape)
x = maps((2, 16, 8, 12))[0]
weight = torch.randn(24, 16, 2, 2).half()
found, wanted = fused.halve(x, weight).float(), torch.nn.functional.conv2d(x.float(), weight.float(), stride=2)
assert (found - wanted).abs().max() < 2e-3 * wanted.abs().max(), "halve"
"""
)


OBJECTS = """
import torch
from brim.segmentation.objects import instances, kernels
from brim.segmentation.scenes.drawing import draw

scenes = draw(("nuclei", "phase"), 3, torch.arange(2, 6, dtype=torch.int32), 48, 56)
height, rng = instances.heights(scenes.labels, 5000), torch.Generator().manual_seed(0)
inside, noise = (scenes.labels > 0).float(), torch.rand(height.shape, generator=rng)
CASES = [(inside, height), (inside, height + 0.1 * noise), (noise, noise.flip(2)),
         (torch.ones_like(height), torch.ones_like(height)), (torch.zeros_like(height), height)]
for foreground, level in CASES:
    root, found = kernels.climb(foreground, level, 0.5)
    wanted_root, wanted = instances._climb(foreground, level, 0.5)
    assert torch.equal(root, wanted_root) and torch.equal(found, wanted)
    peaks = torch.nonzero(root.flatten() == torch.arange(root.numel()))[:, 0]
    areas = kernels.merge(root, found, peaks, 0.12, 4)
    assert torch.equal(areas.long(), instances._merge(wanted_root, wanted, peaks, 0.12, 4))
    assert torch.equal(root, wanted_root)
other, columns = scenes.labels[..., :, None] != scenes.labels[..., None, :], torch.arange(56)
across = torch.where(other, (columns[:, None] - columns).abs(), 8).amin(-1).clamp(max=8).float() ** 2
found, inside = kernels.edge_distance(scenes.labels, across, 8).sqrt(), scenes.labels > 0
assert inside.float().mean() > 0.1 and found[inside].max() > 4
assert torch.allclose(found[inside], instances._edge_distance(scenes.labels, 8)[inside])
"""


def run(script, **environment):
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_interpreted_kernels_equal_torch():
    done = run(COMPARE, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2_000:]


def test_the_interpreted_kernels_of_objects_equal_torch():
    done = run(OBJECTS, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2_000:]
