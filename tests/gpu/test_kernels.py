"""The GPU path against the torch path, and against itself in other batches."""

import gc

import numpy as np
import pytest
import torch

from brim.rf.config import GenerateConfig, preset
from brim.rf.features import FEATURES, F
from brim.rf.generation.backend import CpuBackend, Measured, make_transmissions
from brim.rf.generation.dataset import generate
from brim.rf.generation.stages import generate_batch
from brim.rf.physics.scene import make_scenes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

# Largest difference between the paths that rounding and the hardware's sine explain, per feature.
TOLERANCE = {
    "rssi_dbm": 1e-3,
    "snr_db": 1e-3,
    "noise_floor_dbm": 1e-3,
    "frequency_offset_hz": 0.02,
    "bandwidth_hz": 2.0,
    "psd_dbm_per_hz": 2e-3,
    "spectral_centroid_hz": 0.02,
    "spectral_rolloff_hz": 125.0,
    "zero_crossing_rate": 50.0,
    "coherence_bandwidth_khz": 20.0,
    "arrival_difference_us": 0.02,
    "arrival_sigma_us": 0.02,
}


def both(config: GenerateConfig, num: int = 4, first: int = 0) -> tuple[Measured, Measured]:
    from brim.rf.generation.cuda import CudaBackend

    scenes = make_scenes(config, np.arange(first, first + num))
    work = make_transmissions(config, scenes[np.nonzero(scenes.accepted)[0]])
    with CpuBackend(config) as cpu:
        reference = cpu.measure(work, iq=True)
    return CudaBackend(config, torch.device("cuda:0")).measure(work, iq=True).to("cpu"), reference


@pytest.mark.parametrize("waveform", ["nbfm", "am", "cw", "fsk"])
@pytest.mark.parametrize("fading", ["rayleigh", "rician", "none"])
def test_the_triton_path_equals_the_torch_path(waveform: str, fading: str) -> None:
    config = GenerateConfig(waveform=waveform, fading=fading, tx_power_dbm=30.0, seed=2**40 + 3)  # type: ignore[arg-type]
    fast, reference = both(config, first=2**33)
    assert reference.iq is not None
    assert fast.iq is not None
    error = (fast.iq - reference.iq).abs().square().sum() / reference.iq.abs().square().sum()
    assert error.sqrt() < 2e-5
    assert torch.allclose(fast.truth[..., 0], reference.truth[..., 0], rtol=1e-4)
    for name, _ in FEATURES:
        difference = (fast.chunks[..., F[name]] - reference.chunks[..., F[name]]).abs().max().item()
        assert difference <= TOLERANCE.get(name, 1e-3), name


@pytest.mark.parametrize(
    "config",
    [
        GenerateConfig(),
        preset("production"),
        GenerateConfig(duration_s=0.2, waveform="am"),
        GenerateConfig(duration_s=2.0, waveform="fsk"),
    ],
)
def test_a_batch_equals_its_rows_one_at_a_time(config: GenerateConfig) -> None:
    whole = generate_batch(config, range(300), "cuda:0", chunks=True)
    for n in (0, 7, 150, 299):
        alone = generate_batch(config, [int(whole["index"][n])], "cuda:0", chunks=True)
        for name, rows in whole.items():
            assert torch.equal(alone[name][0], rows[n]), name


def test_shards_do_not_depend_on_the_batch_size_or_a_stop(tmp_path) -> None:
    config = preset("production", seed=5)
    generate(config, tmp_path / "a", 2000, device="cuda:0")
    generate(config, tmp_path / "b", 2000, device="cuda:0", batch_size=77)
    calls = iter(range(100))
    generate(config, tmp_path / "c", 2000, device="cuda:0", batch_size=300, stop=lambda: next(calls) >= 2)
    generate(config, tmp_path / "c", 2000, device="cuda:0", memory=2**30)
    for shard in sorted((tmp_path / "a" / "shards").iterdir()):
        for other in ("b", "c"):
            assert (tmp_path / other / "shards" / shard.name).read_bytes() == shard.read_bytes()


def test_out_of_memory_halves_the_batch_and_loses_nothing(tmp_path) -> None:
    config = GenerateConfig()
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 4 * 2**30, dtype=torch.uint8, device="cuda:0")
    report = generate(config, tmp_path / "a", 3000, device="cuda:0", batch_size=2048)
    del hog
    torch.cuda.empty_cache()
    assert report.accepted == 3000
    assert report.batch_size < 2048
    generate(config, tmp_path / "b", 3000, device="cuda:0")
    assert (tmp_path / "a/shards/000000.safetensors").read_bytes() == (
        tmp_path / "b/shards/000000.safetensors"
    ).read_bytes()


def test_memory_stays_under_the_cap(tmp_path) -> None:
    gc.collect()  # what other tests left on the device counts as in use
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    report = generate(preset("production"), tmp_path / "a", 600, device="cuda:0", memory=before + 2**30)
    assert report.accepted == 600
    assert report.peak_bytes <= before + 2**30
