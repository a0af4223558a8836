"""What is said: band, deviation, level and bandwidth of every waveform."""

import numpy as np
import pytest
from closed_form import message
from scipy.signal import get_window

from brim.rf.config import GenerateConfig
from brim.rf.physics.waveform import PARAMETERS, make_messages, make_table, rms_frequency_hz, scale, table_points

TABLE_HZ = 50_000
NUM = 40


@pytest.fixture(scope="module")
def tables():
    """Scaled tables of some transmissions by waveform: phase in rad, for am the message over the carrier."""
    out = {}
    for waveform in ("nbfm", "am", "fsk", "cw"):
        config = GenerateConfig(waveform=waveform, seed=4)
        messages = make_messages(config, np.arange(NUM))
        made = [make_table(config, messages, row) for row in range(NUM)]
        out[waveform] = np.stack([table.double().numpy() * float(scale(config, peak)) for table, peak in made])
    return out


def instantaneous_hz(phase):
    return np.diff(phase) * TABLE_HZ / (2 * np.pi)


def spectrum(signal):
    """Frequencies and power spectrum with side lobes below −90 dB."""
    power = np.abs(np.fft.fft(signal * get_window("blackmanharris", signal.shape[-1]))) ** 2
    return np.fft.fftfreq(signal.shape[-1], 1 / TABLE_HZ), power


def share_outside(signal, low_hz, high_hz):
    frequency, power = spectrum(signal)
    outside = (np.abs(frequency) < low_hz) | (np.abs(frequency) > high_hz)
    return (power[..., outside].sum(-1) / power.sum(-1)).max()


def occupied_hz(signal):
    """99 % occupied bandwidth of a complex signal."""
    frequency = np.fft.fftshift(np.fft.fftfreq(len(signal), 1 / TABLE_HZ))
    share = np.cumsum(np.fft.fftshift(np.abs(np.fft.fft(signal)) ** 2))
    share /= share[-1]
    return frequency[np.searchsorted(share, 0.995)] - frequency[np.searchsorted(share, 0.005)]


def test_the_nbfm_message_lies_between_300_and_3000_hz(tables):
    assert share_outside(instantaneous_hz(tables["nbfm"]), 295, 3_005) < 1e-7


def test_nbfm_deviates_by_2500_hz_at_its_peak(tables):
    peak = np.abs(instantaneous_hz(tables["nbfm"])).max(-1)
    assert peak.max() < 2_550
    assert peak.min() > 2_440


def test_the_message_rises_and_falls_like_syllables(tables):
    wave = instantaneous_hz(tables["nbfm"])[:, : 20 * 2_500] ** 2
    level = 10 * np.log10(wave.reshape(NUM, 20, -1).mean(-1))  # over 50 ms each
    assert np.median(np.ptp(level, axis=-1)) > 3


def test_nbfm_occupies_about_4_7_khz(tables):
    widths = [occupied_hz(np.exp(1j * phase)) for phase in tables["nbfm"]]
    assert np.mean(widths) == pytest.approx(4_700, rel=0.10)


def test_the_table_is_the_closed_form(tables):
    config = GenerateConfig(seed=4)
    messages = make_messages(config, np.arange(NUM))
    points = table_points(config)
    t = (np.arange(points) - (points - 50_000 - 12)) / TABLE_HZ  # up to a shift: guards are an inner matter
    for row in (0, 7):
        phase = message(messages, row, t, derivative=-1)
        table = tables["nbfm"][row]
        shifts = [np.corrcoef(table[40:50_000], phase[40 + k : 50_000 + k])[0, 1] for k in range(-40, 41)]
        assert max(shifts) > 1 - 1e-9


def test_am_never_overmodulates(tables):
    envelope = 1 + tables["am"]
    assert envelope.min() == pytest.approx(0.2, abs=0.03)
    assert np.abs(tables["am"]).max() == pytest.approx(0.8, abs=1e-5)
    assert np.abs(tables["am"].mean(-1)).max() < 2e-3


def test_fsk_sends_one_of_two_frequencies_but_near_a_change(tables):
    frequency = np.abs(instantaneous_hz(tables["fsk"]))
    deviation = PARAMETERS["fsk"]["deviation_hz"]
    assert np.all(frequency < deviation * 1.002)
    # 0.75 changes a symbol, each 0.2 ms long on either side, of 0.8 ms symbols.
    assert (frequency > deviation * 0.998).mean() == pytest.approx(1 - 0.75 * 0.5, abs=0.03)
    assert (instantaneous_hz(tables["fsk"]) > 0).mean() == pytest.approx(0.5, abs=0.01)


def test_fsk_changes_only_between_symbols(tables):
    change = np.diff(np.sign(instantaneous_hz(tables["fsk"])))
    symbol = TABLE_HZ // PARAMETERS["fsk"]["symbols_per_s"]
    places = np.nonzero(change)[1]
    assert len(np.unique(places % symbol)) == 1
    assert len(places) / change.size * symbol == pytest.approx(
        0.75, abs=0.02
    )  # Manchester: half always, half by chance


def test_fsk_has_no_mean_frequency_over_any_chunk(tables):
    chunk = instantaneous_hz(tables["fsk"])[:, :50_000].reshape(NUM, 5, -1).mean(-1)
    assert np.abs(chunk).max() < 10


def test_every_sample_has_its_own_message(tables):
    for waveform in ("nbfm", "am", "fsk"):
        frequency = np.diff(tables[waveform])
        correlation = np.corrcoef(frequency[:10]) - np.eye(10)
        assert np.abs(correlation).max() < 0.3, waveform


def test_rms_frequency_is_that_of_the_waveform(tables):
    for waveform in ("nbfm", "fsk"):
        config = GenerateConfig(waveform=waveform, seed=4)
        messages = make_messages(config, np.arange(NUM))
        peak = np.array([make_table(config, messages, row)[1] for row in range(NUM)])
        measured = np.sqrt((instantaneous_hz(tables[waveform]) ** 2).mean(-1))
        assert rms_frequency_hz(config, messages, peak) == pytest.approx(measured, rel=0.04), waveform
    assert not rms_frequency_hz(GenerateConfig(waveform="cw"), messages, np.ones(NUM)).any()


def test_rms_bandwidth_stands_in_for_it_in_am(tables):
    config = GenerateConfig(waveform="am", seed=4)
    messages = make_messages(config, np.arange(NUM))
    peak = np.array([make_table(config, messages, row)[1] for row in range(NUM)])
    slope = np.diff(tables["am"]) * TABLE_HZ / (2 * np.pi)
    measured = np.sqrt((slope**2).mean(-1) / ((1 + tables["am"]) ** 2).mean(-1))
    assert rms_frequency_hz(config, messages, peak) == pytest.approx(measured, rel=0.05)
