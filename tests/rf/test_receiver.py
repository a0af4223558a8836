"""What a receiver records: noise of the right density over the whole band, and the channel cut out of it."""

import numpy as np
import pytest
import torch
from scipy import signal, stats

from brim.rf.config import GenerateConfig
from brim.rf.physics.receiver import noise, tune

SAMPLE_HZ, STREAM_HZ, CHANNEL_HZ = 200_000, 25_000, 12_500
SHORT = GenerateConfig(duration_s=0.2)
CONFIG = GenerateConfig(seed=12)


@pytest.fixture(scope="module")
def quiet():
    """(8, N) noise of eight records, in units of the noise in the channel."""
    return torch.stack([noise(CONFIG, index, receiver) for index in range(4) for receiver in (0, 5)])


def tone(frequency_hz, config=SHORT, amplitude=1.0):
    t = torch.arange(config.num_samples_iq, dtype=torch.float64) / SAMPLE_HZ
    return (amplitude * torch.exp(2j * torch.pi * frequency_hz * t)).to(torch.complex64)


def passed_db(frequency_hz):
    """Gain of the channel filter at a frequency, wherever the tone lands in the stream."""
    stream, _ = tune(SHORT, tone(frequency_hz))
    inner = stream[1:4].abs().square().double().mean()  # without the record's ends
    return 10 * np.log10(float(inner) + 1e-30)


def test_the_noise_has_the_density_of_the_channel_over_the_whole_band(quiet):
    power = quiet.abs().square().double().mean().item()
    assert power == pytest.approx(SAMPLE_HZ / CHANNEL_HZ, rel=0.004)


def test_the_noise_is_white(quiet):
    bands = torch.fft.fft(quiet.reshape(-1, 2_000)).abs().square().double().mean(0).reshape(50, -1).mean(-1)
    assert (bands / bands.mean() - 1).abs().max() < 4.5 / np.sqrt(800 * 40)


def test_the_noise_is_gaussian_and_its_parts_are_independent(quiet):
    parts = torch.view_as_real(quiet).double().numpy() / np.sqrt(8)
    for record in range(8):
        for part in range(2):
            assert stats.kstest(parts[record, :, part], "norm").pvalue > 0.001
    assert abs((parts[..., 0] * parts[..., 1]).mean()) < 4.5 / np.sqrt(parts[..., 0].size)
    assert stats.kurtosis(parts.ravel()) == pytest.approx(0, abs=0.01)


def test_every_record_has_its_own_noise(quiet):
    overlap = (quiet @ quiet.conj().T).abs() / quiet.shape[1] / 16
    assert (overlap - torch.eye(8)).abs().max() < 0.015


@pytest.mark.parametrize("frequency_hz", [0, 50, 1_000, 3_000, 5_000, 6_000, 6_250])
def test_the_channel_filter_is_flat_inside_the_channel(frequency_hz):
    assert passed_db(frequency_hz) == pytest.approx(0, abs=0.05)
    assert passed_db(-frequency_hz) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("frequency_hz", [14_100, 16_000, 18_750, 22_000, 25_000, 40_000, 50_000, 75_000, 99_990])
def test_the_channel_filter_is_closed_outside(frequency_hz):
    assert passed_db(frequency_hz) < -60
    assert passed_db(-frequency_hz) < -60


def test_the_stream_is_the_signal_without_delay():
    stream, _ = tune(SHORT, tone(1_230.0))
    wanted = tone(1_230.0)[::8].reshape(5, -1)
    assert (stream - wanted)[1:4].abs().max() < 2e-3


def test_the_noise_floor_is_the_noise_power_in_the_channel(quiet):
    floors = torch.cat([tune(CONFIG, record)[1] for record in quiet])
    assert floors.mean().item() == pytest.approx(1, rel=0.012)
    assert floors.std().item() < 0.03


@pytest.mark.parametrize("frequency_hz", [0.0, 50.0, 1_500.0, -3_000.0, 4_000.0])
def test_a_signal_60_db_above_the_noise_does_not_raise_the_floor(frequency_hz):
    record = noise(CONFIG, 1, 2)
    loud = record + tone(frequency_hz, CONFIG, amplitude=1_000.0)
    assert torch.allclose(tune(CONFIG, loud)[1], tune(CONFIG, record)[1], rtol=0.01)


def disturbed(kind, record, config=CONFIG):
    t = np.arange(config.num_samples_iq) / SAMPLE_HZ
    if kind == "filter":  # 80 % of the band is usable
        taps = signal.firwin(129, 80_000, fs=SAMPLE_HZ, window=("kaiser", 8))
        return torch.from_numpy(np.convolve(record.numpy(), taps, "same").astype(np.complex64))
    if kind == "neighbour":
        phase = 2 * np.pi * (87_500 * t + np.cumsum(2_500 * np.sin(2 * np.pi * 1_000 * t)) / SAMPLE_HZ)
        return record + torch.from_numpy((100 * np.exp(1j * phase)).astype(np.complex64))
    rng = np.random.default_rng(3)
    hit = rng.choice(len(t), 400, replace=False)
    noisy = record.clone()
    noisy[hit] += torch.from_numpy((140 * np.exp(2j * np.pi * rng.random(len(hit)))).astype(np.complex64))
    return noisy


@pytest.mark.parametrize("kind", ["filter", "neighbour", "impulses"])
def test_the_noise_floor_is_right_within_half_a_db_whatever_else_is_in_the_band(quiet, kind):
    error = 10 * torch.log10(torch.cat([tune(CONFIG, disturbed(kind, record))[1] for record in quiet]))
    assert error.mean().abs() < 0.2
    assert (error.abs() < 0.5).all()
