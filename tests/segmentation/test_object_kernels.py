"""The GPU's kernels for objects without a GPU: against torch under Triton's interpreter, and compiled for an H100/H200.

Triton decides at import whether to interpret, so each of these runs in a process of its own.
"""

import os
import subprocess
import sys

COMMON = """
import torch
from brim.segmentation.objects import instances, kernels
from brim.segmentation.scenes.drawing import draw

scenes = draw(("nuclei", "phase"), 3, torch.arange(2, dtype=torch.int32), 48, 56)
height, rng = instances.heights(scenes.labels, 5000), torch.Generator().manual_seed(0)
inside, noise = (scenes.labels > 0).float(), torch.rand(height.shape, generator=rng)
CASES = [(inside, height), (inside, height + 0.1 * noise), (noise, noise.flip(2)),
         (torch.ones_like(height), torch.ones_like(height)), (torch.zeros_like(height), height)]
"""

COMPARE = (
    COMMON
    + """
for foreground, level in CASES:
    root, found = kernels.climb(foreground, level, 0.5)
    wanted_root, wanted = instances._climb(foreground, level, 0.5)
    assert torch.equal(root, wanted_root) and torch.equal(found, wanted)
    peaks = torch.nonzero(root.flatten() == torch.arange(root.numel()))[:, 0]
    areas = kernels.merge(root, found, peaks, 0.12, 4)
    assert torch.equal(areas.long(), instances._merge(wanted_root, wanted, peaks, 0.12, 4))
    assert torch.equal(root, wanted_root)
across = torch.full(height.shape, 9.0)
kernels.edge_distance(scenes.labels, across, 8)
"""
)


def run(script, **environment):
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_interpreted_kernels_equal_torch():
    done = run(COMPARE, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2_000:]
