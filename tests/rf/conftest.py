"""Batches that many tests look at from different sides, each made once."""

import fcntl
import os
from collections.abc import Callable

import pytest
import torch
from columns import SampleRows

from brim.rf.config import GenerateConfig
from brim.rf.generation.stages import generate_batch

torch.set_num_threads(1)  # the backend has its own threads; torch's would only compete with them

# From far below 0 dB to far above 40 dB; no clock error, so that arrival errors are the estimator's own.
WIDE = {"tx_power_dbm": 35.0, "min_snr_db": -5.0, "clock_sigma_s": 0.0, "max_gdop": 1e6, "seed": 11}


@pytest.fixture(scope="session")
def nbfm_rows(tmp_path_factory: pytest.TempPathFactory) -> SampleRows:
    """100 samples at the built-in network, every SNR, chunk by chunk; made by one of pytest's workers for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    file = folder / "nbfm_rows.pt"
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            torch.save(generate_batch(GenerateConfig(**WIDE), range(100), chunks=True), file)
    return dict(torch.load(file))


@pytest.fixture(scope="session")
def rows_of(nbfm_rows: SampleRows) -> Callable[[str], SampleRows]:
    """The same of another waveform, fewer samples."""
    made = {"nbfm": nbfm_rows}

    def get(waveform: str) -> SampleRows:
        if waveform not in made:
            made[waveform] = generate_batch(GenerateConfig(**WIDE, waveform=waveform), range(24), chunks=True)
        return made[waveform]

    return get


@pytest.fixture(scope="session")
def gated_config() -> GenerateConfig:
    """Short records under gates that refuse about half of the attempts, for either reason."""
    return GenerateConfig(
        tx_power_dbm=20.0, max_gdop=2.5, min_receivers=4, duration_s=0.2, samples_per_shard=8, seed=31
    )
