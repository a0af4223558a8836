"""Every Triton kernel compiles for an H100 or H200 without one: what would be launched is compiled instead.

Triton decides at import whether to interpret, so each of these runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "segmentation"))
from test_fused import CASES

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform"),
]

INSTEAD = """
import inspect
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TENSORS = {torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
UNROLLED = {"BP": 32}  # at most: the same code, unrolled less often
compiled = set()


def kind(value):
    if isinstance(value, torch.Tensor):
        return TENSORS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_only(self, *args, grid, warmup, **kwargs):
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    given = inspect.signature(self.fn).bind(*args, **kwargs).arguments
    constants = {p.name: given[p.name] for p in self.params if p.is_constexpr}
    constants = {name: min(UNROLLED.get(name, value), value) for name, value in constants.items()}
    whole = {p.name: given[p.name] for p in self.params if type(given[p.name]) is int and not p.do_not_specialize}
    ones = [name for name, value in whole.items() if value == 1]  # constants too when launched
    constants |= dict.fromkeys(ones, 1)
    signature = {p.name: "constexpr" if p.name in constants else kind(given[p.name]) for p in self.params}
    variant = self.fn.__name__, *sorted(ones), *(item for item in constants.items() if item[0] not in ("C", "BP", "BC"))
    if variant not in compiled:
        source = ASTSource(self, signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
        compiled.add(variant)


JITFunction.run = compile_only
"""
GENERATION = """
import numpy as np
from brim.rf.generation import kernels
from brim.rf.generation.backend import make_transmissions
from brim.rf.config import GenerateConfig
from brim.rf.generation.cuda import CudaBackend
from brim.rf.physics.scene import make_scenes

for waveform in ("nbfm", "am"):
    config = GenerateConfig(waveform=waveform, duration_s=float(sys.argv[1]), seed=2**40, max_gdop=1e6)
    work = make_transmissions(config, make_scenes(config, np.arange(1)))
    CudaBackend(config, torch.device("cpu")).measure(work, iq=True)
"""
NETWORKS = """
from brim.segmentation.networks import kernels

fused.fast = lambda x: x.dtype == torch.float16
for shape in (SHAPES[1], (16, 2, 1)):
    for _, case in cases(*shape):
        case(lambda t: t)
    merged(*shape)
"""
OBJECTS = """
from brim.segmentation.objects import instances, kernels
from brim.segmentation.scenes.drawing import draw

labels = draw(("nuclei", "phase"), 3, torch.arange(2, dtype=torch.int32), 48, 56).labels
foreground, height = (labels > 0).float(), instances.heights(labels, 5000)
kernels.climb(foreground, height, 0.5)
root, level = instances._climb(foreground, height, 0.5)
kernels.merge(root, level, torch.arange(3), 0.12, 4)
kernels.edge_distance(labels, level, 8)
"""
ALL = """
every = {n for n, v in vars(kernels).items() if isinstance(v, JITFunction) and not n.startswith("_")}
assert every and every <= {name for name, *_ in compiled}, every - {name for name, *_ in compiled}
"""


@pytest.mark.parametrize(
    ("script", "duration_s"),
    [(GENERATION, "0.2"), (GENERATION, "1.0"), (GENERATION, "10.0"), (CASES + NETWORKS, ""), (OBJECTS, "")],
    ids=["generation-0.2s", "generation-1s", "generation-10s", "networks", "objects"],
)
def test_every_kernel_compiles_for_the_h200(script, duration_s, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}

    command = [sys.executable, "-W", "ignore", "-c", INSTEAD + script + ALL, duration_s]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)

    assert done.returncode == 0, done.stderr[-2_000:]
