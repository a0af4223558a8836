"""The GPU's kernels without a GPU: against the torch path under Triton's interpreter.

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
