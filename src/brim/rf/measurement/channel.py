"""Features of recordings as a dataset has them: the same estimators over the same chunks of the same channel.

Axes: R receivers, C chunks, W points of a chunk at 25 kHz, F features. A recording at 200 kHz, tuned to the
transmission, goes through the very filter that generation uses; any other is brought to the channel's rate first.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf import features as ft
from brim.rf.config import CHANNEL_HZ, NUM_CHUNKS, SAMPLE_RATE_HZ, GenerateConfig
from brim.rf.measurement.streams import Band, Receiver, extract
from brim.rf.measurement.transmission import BandSpectrum, Transmission
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef
from brim.rf.physics.receiver import STREAM_HZ, tune

STEP_S = 0.2  # records are whole multiples of this
MAX_RECORD_S = 10.0
PASS_HZ = 20_400.0  # of generation's channel filter
WAVEFORMS = ("nbfm", "am", "cw", "fsk")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFeatures:
    """Features of all receivers, relative to one of them in time."""

    chunks: Tensor  # (R, C, F) float32; levels in dBm, or dB of full scale where nothing is calibrated
    reference: int

    def of(self, receiver: int) -> dict[str, dict[str, float]]:
        """mean, std, min and max over the chunks, by name."""
        table = ft.aggregate(self.chunks[receiver])
        return {
            name: dict(zip(ft.STATISTICS, map(float, table[k]), strict=True)) for k, (name, _) in enumerate(ft.FEATURES)
        }


def channel_features(
    receivers: list[Receiver], spectra: list[BandSpectrum], transmission: Transmission, start_s: float, seconds: float
) -> ChannelFeatures | None:
    """Features of the 12.5 kHz channel; None where a recording is narrower than that, or too short."""
    duration_s = min(MAX_RECORD_S, math.floor(seconds / STEP_S + 1e-6) * STEP_S)
    if duration_s < STEP_S or min(one.clock.rate_hz for one in receivers) < STREAM_HZ:
        return None
    tuned_hz = _tuned_hz(receivers, transmission)
    if any(abs(tuned_hz - one.centre_hz) + CHANNEL_HZ / 2 > one.clock.rate_hz / 2 for one in receivers):
        return None
    waveform = next((one.recording.waveform for one in receivers if one.recording.waveform in WAVEFORMS), "nbfm")
    config = GenerateConfig(duration_s=round(duration_s, 1), waveform=waveform)  # type: ignore[arg-type]
    limits = _light_times(receivers)
    grid = ft.FeatureGrid.of(config, float(limits.max()) * SPEED_OF_LIGHT)
    streams, floors = zip(
        *(_stream(one, spectrum, config, tuned_hz, start_s) for one, spectrum in zip(receivers, spectra, strict=True)),
        strict=True,
    )
    stream, floor = torch.stack(streams), torch.stack(floors)
    spectrum_sums = ft.sum_spectrum(ft.channel_power(torch.fft.fft(stream), grid), floor, grid)
    sums, demodulated = ft.sum_envelope(stream, config)
    reference = int(ft.reference_power(spectrum_sums).argmax())
    limit = torch.from_numpy(limits[reference] + ft.lag_slack_s(config)).to(torch.float32)
    value, sigma = ft.measure_arrival(
        demodulated * ft.timing_scale(sums, grid)[:, None, None], reference, limit, config, grid
    )
    heard = ft.timing_heard(spectrum_sums, floor)
    value, sigma = ft.only_heard(value, sigma, heard & heard[reference])
    named = ft.spectrum_features(spectrum_sums, floor, 0.0)
    named |= ft.envelope_features(sums, ft.linear_snr(spectrum_sums.total, floor), config, grid)
    named |= {"arrival_difference_us": value * 1e6, "arrival_sigma_us": sigma * 1e6}
    return ChannelFeatures(chunks=torch.stack([named[name] for name, _ in ft.FEATURES], -1), reference=reference)


def _tuned_hz(receivers: list[Receiver], transmission: Transmission) -> float:
    """Where the channel lies: at the receivers' common centre if the transmission does, else at the transmission."""
    centre = receivers[0].centre_hz
    same = all(one.centre_hz == centre for one in receivers)
    return centre if same and abs(transmission.centre_hz - centre) <= ft.OFFSET_HZ else transmission.centre_hz


def _stream(
    one: Receiver, spectrum: BandSpectrum, config: GenerateConfig, tuned_hz: float, start_s: float
) -> tuple[Tensor, Tensor]:
    """(C, W) stream and (C,) noise in the channel; gain taken off where it is known."""
    gain = 1.0 if one.site.gain_db is None or one.recording.milliwatt else 10 ** (-one.site.gain_db / 20)
    clock = one.clock
    line = max(clock.lines, key=lambda part: part.end - part.first)
    if clock.rate_hz == SAMPLE_RATE_HZ and tuned_hz == one.centre_hz and not one.recording.is_real:
        first = round(clock.sample_at(start_s - one.late_s, line))
        if line.first <= first and first + config.num_samples_iq <= line.end:
            iq = one.recording.samples.complex(first, config.num_samples_iq) * np.float32(gain)
            return tune(config, torch.from_numpy(iq))
    band = Band(centre_hz=tuned_hz, width_hz=min(PASS_HZ, 0.9 * clock.rate_hz), rate_hz=float(STREAM_HZ))
    count = round(config.duration_s * STREAM_HZ)
    stream = extract(one, band, start_s, count).reshape(NUM_CHUNKS, -1) * gain
    floor = spectrum.floor / spectrum.bin_hz * CHANNEL_HZ * gain**2
    return stream, torch.full((NUM_CHUNKS,), floor)


def _light_times(receivers: list[Receiver]) -> NDArray[np.float64]:
    """(R, R) float64 s between the receivers."""
    places = np.array([[one.site.lat, one.site.lon, one.site.alt] for one in receivers])
    at = np.stack(ecef(places[:, 0], places[:, 1], places[:, 2]), -1)
    return np.asarray(np.linalg.norm(at[:, None] - at[None], axis=-1) / SPEED_OF_LIGHT)
