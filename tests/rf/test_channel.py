"""From the transmitter to the antenna: exact delays, echoes, fading, offsets, against the closed form."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closed_form import sent
from scipy import stats
from scipy.special import j0

from brim.rf.config import GenerateConfig
from brim.rf.physics.channel import fading, make_links, receive
from brim.rf.physics.receiver import noise, record
from brim.rf.physics.scene import make_scenes
from brim.rf.physics.waveform import make_messages, make_table, scale

QUIET = {"fading": "none", "tx_power_dbm": 50.0, "min_snr_db": -20.0, "max_gdop": 1e6, "duration_s": 0.2, "seed": 7}
LIGHT = 299_792_458.0
SAMPLE_HZ = 200_000


def without_echoes(scenes):
    direct = np.zeros_like(scenes.path_power)
    direct[..., 0] = 1
    return replace(scenes, path_power=direct)


def received(config, scenes, m):
    """Record m of the first scenes at 200 kHz, the noise taken off again; its links, message and peak."""
    links, messages = make_links(config, scenes), make_messages(config, scenes.index)
    row = int(links.sample[m])
    table, peak = make_table(config, messages, row)
    at_50_khz = receive(config, links, m, table, float(scale(config, peak)))
    key = int(links.index[m]), int(links.receiver[m])
    return (record(config, at_50_khz, *key) - noise(config, *key)).to(torch.complex128).numpy(), links, messages, peak


def arrival_s(scenes, links, m):
    """Time from the start of the message to its arrival by the receiver's clock."""
    at = int(links.sample[m]), int(links.receiver[m])
    return scenes.range_m[at] / LIGHT + scenes.clock_error_s[at]


def expected(config, scenes, links, messages, peak, m, late_s=0.0):
    """Closed form of record m's direct path at unit power, with its oscillator's offset."""
    row, at = int(links.sample[m]), (int(links.sample[m]), int(links.receiver[m]))
    t = np.arange(config.num_samples_iq) / SAMPLE_HZ
    turn = np.exp(2j * np.pi * scenes.frequency_offset_hz[at] * t)
    return sent(config, messages, row, peak, t - arrival_s(scenes, links, m) - late_s) * turn


def fit(signal, model):
    """Complex gain of the model in the signal, and the relative error that remains in dB."""
    gain = np.vdot(model, signal) / np.vdot(model, model).real
    error = np.sum(np.abs(signal - gain * model) ** 2) / np.sum(np.abs(signal) ** 2)
    return gain, 10 * np.log10(error)


@pytest.fixture(scope="module")
def many():
    """Links of 2 100 records in as many independent channels, Rayleigh."""
    config = GenerateConfig(**QUIET | {"fading": "rayleigh"})
    return config, make_links(config, make_scenes(config, np.arange(300)))


@pytest.fixture(scope="module")
def rayleigh(many):
    """(2 000, P, J) gains at 1 kHz, all with a Doppler of 8 Hz."""
    return gains(many, "rayleigh")


@pytest.fixture(scope="module")
def rician(many):
    return gains(many, "rician")


def gains(many, kind, num=2_000):
    config, links = replace(many[0], fading=kind), replace(many[1], doppler_hz=np.full(len(many[1]), 8.0, np.float32))
    return torch.stack([fading(config, links, m) for m in range(num)]).to(torch.complex128).numpy()


@pytest.mark.parametrize(("waveform", "clock_sigma_s"), [("nbfm", 1e-6), ("am", 1e-4), ("cw", 0.0), ("nbfm", None)])
def test_a_single_path_is_the_transmission_at_its_exact_delay(waveform, clock_sigma_s):
    clock = {"clock_sigma_s": clock_sigma_s} if clock_sigma_s is not None else {"clock": "none"}
    config = GenerateConfig(**QUIET, waveform=waveform, **clock)
    scenes = without_echoes(make_scenes(config, np.arange(3)))
    for m in range(0, 21, 4):
        signal, links, messages, peak = received(config, scenes, m)
        gain, error_db = fit(signal, expected(config, scenes, links, messages, peak, m))
        assert error_db < -60
        snr_db = scenes.snr_db[links.sample[m], links.receiver[m]]
        assert 20 * np.log10(abs(gain)) == pytest.approx(snr_db, abs=0.01)


def test_a_long_record_does_not_drift():
    config = GenerateConfig(**QUIET | {"duration_s": 4.0})
    scenes = without_echoes(make_scenes(config, np.array([2**35])))
    signal, links, messages, peak = received(config, scenes, 2)
    assert fit(signal, expected(config, scenes, links, messages, peak, 2))[1] < -60


@pytest.mark.parametrize("waveform", ["nbfm", "am"])
def test_the_delay_is_exact_to_a_nanosecond(waveform):
    config = GenerateConfig(**QUIET, waveform=waveform)
    scenes = without_echoes(make_scenes(config, np.arange(3)))
    for m in range(0, 21, 3):
        signal, links, messages, peak = received(config, scenes, m)
        model = expected(config, scenes, links, messages, peak, m)
        gain, _ = fit(signal, model)
        later = (expected(config, scenes, links, messages, peak, m, late_s=1e-6) - model) / 1e-6  # per second of delay
        later -= fit(later, model)[0] * model
        error_s = np.vdot(later, signal / gain - model).real / np.vdot(later, later).real
        assert abs(error_s) < 1e-9


def test_echoes_arrive_at_their_own_fractional_delays():
    config = GenerateConfig(**QUIET)
    scenes = make_scenes(config, np.arange(2))
    for m in (0, 5, 11):
        signal, links, messages, peak = received(config, scenes, m)
        phases = fading(config, links, m)[:, 0].to(torch.complex128).numpy()
        at = int(links.sample[m]), int(links.receiver[m])
        model = np.zeros_like(signal)
        for p in range(4):
            level = np.sqrt(10 ** (scenes.snr_db[at] / 10) * scenes.path_power[at][p])
            late_s = scenes.echo_delay_s[at][p]
            model += level * phases[p] * expected(config, scenes, links, messages, peak, m, late_s)
        assert 10 * np.log10((np.abs(signal - model) ** 2).mean() / (np.abs(model) ** 2).mean()) < -60


def test_an_oscillator_offset_turns_the_carrier():
    config = GenerateConfig(**QUIET, waveform="cw")
    scenes = without_echoes(make_scenes(config, np.arange(4)))
    for m in range(0, 28, 5):
        signal, links, *_ = received(config, scenes, m)
        turns = np.unwrap(np.angle(signal)) / (2 * np.pi)
        slope_hz = np.polyfit(np.arange(len(turns)) / SAMPLE_HZ, turns, 1)[0]
        assert slope_hz == pytest.approx(scenes.frequency_offset_hz[links.sample[m], links.receiver[m]], abs=1e-3)


@pytest.mark.parametrize("path", range(4))
@pytest.mark.parametrize("instant", [1, 77, 200])
def test_the_envelope_is_rayleigh(rayleigh, path, instant):
    envelope = np.abs(rayleigh[:, path, instant])
    assert stats.kstest(envelope, "rayleigh", args=(0, np.sqrt(0.5))).pvalue > 0.01


def test_fading_is_clarkes(rayleigh):
    lag_s = np.arange(0, 180, 3) / 1_000
    for path in range(4):
        for start in (1, 12):
            later = rayleigh[:, path, start : start + 180 : 3]
            got = (later * rayleigh[:, path, start : start + 1].conj()).mean(0)
            assert np.abs(got - j0(2 * np.pi * 8.0 * lag_s)).max() < 0.09  # four standard errors of 2 000 records


def test_paths_fade_independently(rayleigh):
    at = rayleigh[:, :, 100]
    correlation = at.conj().T @ at / len(at)
    assert np.abs(correlation - np.diag(np.diag(correlation))).max() < 0.09


@pytest.mark.parametrize("instant", [1, 20, 60, 100, 150, 200])
def test_the_direct_path_is_rician_with_k_of_6_db(rician, instant):
    k = 10**0.6
    expected = stats.rice(b=np.sqrt(2 * k), scale=np.sqrt(0.5 / (k + 1)))
    assert stats.kstest(np.abs(rician[:, 0, instant]), expected.cdf).pvalue > 0.01


def test_echoes_stay_rayleigh_when_the_direct_path_is_rician(rician):
    for path in (1, 2, 3):
        assert stats.kstest(np.abs(rician[:, path, 80]), "rayleigh", args=(0, np.sqrt(0.5))).pvalue > 0.01


def test_without_fading_a_path_keeps_its_gain(many):
    flat = gains(many, "none", num=50)
    assert np.allclose(np.abs(flat), 1, atol=1e-6)
    assert np.allclose(flat, flat[..., :1])
