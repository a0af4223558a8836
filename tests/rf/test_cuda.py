"""The GPU's kernels without a GPU: against the torch path under Triton's interpreter, and compiled for an H100/H200.

Triton decides at import whether to interpret, so each of these runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from functools import partial

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform"),
]

COMPARE = """
import sys
import numpy as np
import torch
from dataclasses import replace
from brim.rf.generation.backend import make_transmissions
from brim.rf.generation.backend import CpuBackend
from brim.rf.config import GenerateConfig
from brim.rf.generation.cuda import CudaBackend
from brim.rf.features import FEATURES
from brim.rf.physics.scene import make_scenes

waveform, fading, *impaired = sys.argv[1:]
torch.set_num_threads(1)
common = {"duration_s": 0.2, "tx_power_dbm": 35.0, "seed": 2**40 + 3, "max_gdop": 1e6}
if impaired:
    common |= {"adc_clip_db": 35.0, "agc_step_db": 3.0, "phase_noise_deg": 3.0, "filter_ripple_db": 1.0}
    common |= {"interferer_share": 1.0, "interferer_db": 0.0, "impulses_per_s": 20.0}
config = GenerateConfig(waveform=waveform, fading=fading, **common)
scenes = make_scenes(config, np.array([2**33 + 1]))
keep = np.isin(np.arange(7), np.nonzero(scenes.present[0])[0][-2:])
work = make_transmissions(config, replace(scenes, present=keep[None]))
assert len(work.links) == 2
with CpuBackend(config) as cpu:
    expected = cpu.measure(work, iq=True)
found = CudaBackend(config, torch.device("cpu")).measure(work, iq=True)

error = (found.iq - expected.iq).abs().square().sum() / expected.iq.abs().square().sum()
assert error.sqrt() < 1e-5, f"iq: {error.sqrt()}"
assert torch.allclose(found.truth[..., 0], expected.truth[..., 0], rtol=1e-4)
assert (found.truth[..., 1] - expected.truth[..., 1]).abs().max() <= 2 * 25
loose = {"frequency_offset_hz": 0.05, "bandwidth_hz": 5.0, "spectral_centroid_hz": 0.05, "spectral_rolloff_hz": 125.0}
loose |= {"zero_crossing_rate": 50.0, "coherence_bandwidth_khz": 20.0, "arrival_difference_us": 0.05}
loose |= {"arrival_sigma_us": 0.05}
for k, (name, _) in enumerate(FEATURES):
    difference = (found.chunks[..., k] - expected.chunks[..., k]).abs().max().item()
    assert difference <= loose.get(name, 5e-3), f"{name}: {difference}"
"""

COMPILE = """
import inspect
import sys
import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from brim.rf.generation import kernels
from brim.rf.generation.backend import make_transmissions
from brim.rf.config import GenerateConfig
from brim.rf.generation.cuda import CudaBackend
from brim.rf.physics.scene import make_scenes

OPTIONS = ("num_warps", "num_stages")
compiled = set()


def kind(value):
    if isinstance(value, torch.Tensor):
        return {torch.float32: "*fp32", torch.int32: "*i32"}[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_only(self, *args, grid, warmup, **kwargs):
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = inspect.signature(self.fn).bind(*args, **kwargs).arguments
    constants = {p.name: given[p.name] for p in self.params if p.is_constexpr}
    signature = {p.name: "constexpr" if p.is_constexpr else kind(given[p.name]) for p in self.params}
    source = ASTSource(self, signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    compiled.add(self.fn.__name__)


JITFunction.run = compile_only
for waveform in ("nbfm", "am"):
    config = GenerateConfig(waveform=waveform, duration_s=float(sys.argv[1]), seed=2**40, max_gdop=1e6)
    work = make_transmissions(config, make_scenes(config, np.arange(1)))
    CudaBackend(config, torch.device("cpu")).measure(work, iq=True)
every = {name for name, value in vars(kernels).items() if name.endswith("_kernel") and isinstance(value, JITFunction)}
assert every and every == compiled, every - compiled
"""


def run(script, *arguments, **environment):
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


LONG = partial(pytest.param, marks=pytest.mark.long)  # each takes half a minute of a core


@pytest.mark.parametrize(
    "words",
    [("nbfm", "rayleigh"), LONG(("am", "rician")), LONG(("fsk", "none")), LONG(("nbfm", "rayleigh", "impaired"))],
    ids="-".join,
)
def test_the_interpreted_kernels_equal_the_torch_path(words):
    done = run(COMPARE, *words, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2_000:]


@pytest.mark.long
@pytest.mark.parametrize("duration_s", [LONG("0.2"), "1.0", LONG("10.0")])
def test_every_kernel_compiles_for_the_h200(tmp_path, duration_s):
    done = run(COMPILE, duration_s, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2_000:]
