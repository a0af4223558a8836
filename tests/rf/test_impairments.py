"""Effects on records, each against its formula, with references of their own."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import torch
from scipy import stats

from brim.errors import ConfigError
from brim.rf.config import PRESETS, GenerateConfig, preset
from brim.rf.location import Streamed
from brim.rf.physics.impairments import impair, is_impaired, phase_noise

BASE = GenerateConfig(duration_s=0.2, seed=9)
EVERY = {
    "adc_clip_db": 30.0, "agc_step_db": 6.0, "phase_noise_deg": 5.0, "filter_ripple_db": 2.0, "lost_share": 0.1,
    "interferer_share": 0.5, "impulses_per_s": 20.0,
}  # fmt: skip


def records(num, length=40_000, seed=1, power=16.0):
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((2, num, length)) * np.sqrt(power / 2)
    return torch.from_numpy((noise[0] + 1j * noise[1]).astype(np.complex64))


def impaired(changes, iq, first=0):
    index = np.arange(first, first + len(iq), dtype=np.int64)
    return impair(replace(BASE, **changes), iq.clone(), index, index % 7).numpy()


def test_nothing_is_done_unless_it_is_asked_for():
    assert not is_impaired(GenerateConfig())
    assert {name for name in PRESETS if is_impaired(preset(name))} == {"amateur"}  # which clips
    for name, value in EVERY.items():
        assert is_impaired(replace(BASE, **{name: value})), name


def test_a_record_is_the_same_in_any_batch():
    iq = records(5)
    whole, alone = impaired(EVERY, iq), impaired(EVERY, iq[3:4], first=3)
    assert np.array_equal(whole[3], alone[0])


@pytest.mark.parametrize("clip_db", [6.0, 9.0, 14.0])
def test_clipping_scales_what_is_received_as_bussgang_says(clip_db):
    iq = records(8)
    out, full = impaired({"adc_clip_db": clip_db}, iq), 10 ** (clip_db / 20)
    x, y = iq.numpy().view(np.float32).ravel(), out.view(np.float32).ravel()

    assert np.abs(y).max() <= full * 1.0001
    expected = scipy.special.erf(full / np.sqrt(2 * 8.0))  # each part has half the power of 16
    assert (x * y).mean() / (x * x).mean() == pytest.approx(expected, rel=0.01)


def test_phase_noise_has_its_size_and_falls_with_the_square_of_frequency():
    config, index = replace(BASE, phase_noise_deg=10.0), np.arange(40, dtype=np.int64)
    angle = phase_noise(config, torch.arange(0, 400_000, 50), index, index * 0).numpy()  # 2 s at 4 kHz
    power = (np.abs(np.fft.rfft(angle - angle.mean(-1, keepdims=True))) ** 2).mean(0)
    hertz = np.fft.rfftfreq(angle.shape[1], 50 / 200_000)

    def band(low, high):
        return power[(hertz >= low) & (hertz < high)].sum()

    assert np.degrees(np.sqrt((angle**2).mean())) == pytest.approx(10.0, rel=0.1)
    assert np.log2(band(4, 32) / band(32, 256)) / 3 == pytest.approx(1.0, abs=0.3)  # the integral of f⁻²
    assert band(1_100, 2_000) < 1e-3 * band(1, 1_000)


def test_ripple_of_a_filter_is_that_from_crest_to_trough():
    impulse = torch.zeros(6, 40_000, dtype=torch.complex64)
    impulse[:, 100] = 1
    response = np.abs(np.fft.fft(impaired({"filter_ripple_db": 3.0}, impulse), axis=-1))

    assert 20 * np.log10(response.max(-1) / response.min(-1)) == pytest.approx(np.full(6, 3.0), abs=0.02)


def test_blocks_are_lost_whole_and_as_often_as_said():
    lost = impaired({"lost_share": 0.3}, records(150)).reshape(150, -1, 4_000) == 0
    share = lost.mean(-1)

    assert set(np.unique(share)) <= {0.0, 1.0}
    assert share.mean() == pytest.approx(0.3, abs=0.03)


def test_another_carrier_is_one_line_that_starts_and_stops():
    silence = torch.zeros(60, 40_000, dtype=torch.complex64)
    out = impaired({"interferer_share": 0.5, "interferer_db": 20.0}, silence)
    loud = np.abs(out).max(-1) > 0

    assert loud.mean() == pytest.approx(0.5, abs=0.2)
    for record in out[loud]:
        (on,) = np.nonzero(record)
        assert np.array_equal(on, np.arange(on[0], on[-1] + 1))
        step = np.angle(record[on][1:] * record[on][:-1].conj())
        assert np.abs(step - step.mean()).max() < 1e-3
        assert abs(step.mean()) * 200_000 / (2 * np.pi) <= 18_000
    level = 20 * np.log10(np.abs(out[loud]).max(-1))
    assert level.mean() == pytest.approx(20, abs=4)


def test_impulses_are_as_many_as_said_and_have_exponential_powers():
    silence = torch.zeros(200, 40_000, dtype=torch.complex64)
    out = impaired({"impulses_per_s": 10.0, "impulse_db": 30.0}, silence)
    starts = (np.abs(out[:, 1:]) > 0) & (np.abs(out[:, :-1]) == 0)

    assert starts.sum(-1).mean() == pytest.approx(2.0, abs=0.35)  # in 0.2 s
    power = np.abs(out[:, 1:][starts]) ** 2 / 1e3
    assert stats.kstest(power, stats.expon.cdf).pvalue > 0.01


def test_gain_steps_stay_within_their_range():
    ones = torch.ones(200, 40_000, dtype=torch.complex64)
    gain_db = 20 * np.log10(np.abs(impaired({"agc_step_db": 8.0}, ones)))
    last = gain_db[:, -1][gain_db[:, -1] != 0]

    assert np.abs(gain_db).max() <= 8.001
    assert gain_db[:, 0] == pytest.approx(np.zeros(200), abs=1e-6)
    assert ((np.diff(gain_db, axis=-1) != 0).sum(-1) <= 4).all()
    assert stats.kstest(last, stats.uniform(-8, 16).cdf).pvalue > 0.01


def test_samples_without_records_know_none_of_it():
    with pytest.raises(ConfigError, match="knows nothing of interference"):
        Streamed(generation=replace(BASE, phase_noise_deg=5.0), samples=10, drawn=True)
