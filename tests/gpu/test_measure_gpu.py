"""Recordings measured on a GPU give the differences that the CPU gives."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from brim.rf.measurement import measure

sys.path.insert(0, str(Path(__file__).parents[1] / "rf"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


def test_a_gpu_measures_what_a_cpu_measures(tmp_path):
    from made_recordings import EPOCH, STATIONS, Scene, write_sigmf

    scene = Scene(3.0, 9_000.0, "ofdm", snr_db=15.0)
    for name, delay_s in (("ALFA", 1.3e-3), ("BRAVO", 0.9e-3), ("CHARLIE", 1.4e-3)):
        iq = scene.receive(50_000.0, 0.0, delay_s)
        start = f"{EPOCH}.000000000Z"
        write_sigmf(tmp_path / name, iq / np.abs(iq).max(), 50_000.0, start, place=STATIONS[name], station=name)
    files = sorted(tmp_path.glob("*.sigmf-meta"))

    cpu, gpu = (measure(files, device=device).observation for device in ("cpu", "cuda"))

    assert json.dumps(gpu.as_dict())
    for ours, theirs in zip(gpu.pairs, cpu.pairs, strict=True):
        assert (ours.reference, ours.station, ours.kind) == (theirs.reference, theirs.station, theirs.kind)
        assert ours.difference_us == pytest.approx(theirs.difference_us, abs=0.2 * theirs.sigma_us)
        assert ours.sigma_us == pytest.approx(theirs.sigma_us, rel=0.1)
