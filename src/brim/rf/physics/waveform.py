"""One transmission: the message, and the table of phase (or amplitude) that every receiver reads at its own delay.

Axes: B samples, K tones, S symbols, T table points at 50 kHz, starting `guard` points before time 0.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.rf.config import SAMPLE_RATE_HZ, GenerateConfig, Waveform
from brim.rf.physics.philox import Purpose, uniform, words
from brim.rf.physics.scene import max_clock_s, max_delay_s, max_echo_s

TABLE_HZ = 50_000  # 17 points per cycle of the highest message tone: cubic interpolation errs below −80 dB
OVERSAMPLING = SAMPLE_RATE_HZ // TABLE_HZ
MARGIN = 4  # table and channel points kept on either side for interpolation

NUM_TONES = 16
MESSAGE_HZ = (300.0, 3000.0)
SYLLABLE_HZ = (2.5, 6.0)  # rate of the slow modulation, as of speech
SYLLABLE_DEPTH = 0.6  # below 1: the message never falls silent
NUM_FORMANTS = 4  # groups of tones that share one slow modulation
TILT_CORNER_HZ = 2_000.0  # tone amplitudes fall by 6 dB per octave above this: 99 % of nbfm within 4.7 kHz
PEAK_DEVIATION_HZ = 2_500.0  # nbfm
AM_DEPTH = 0.8
FSK_BAUD = 1_250
FSK_DEVIATION_HZ = 1_500.0
POINTS_PER_SYMBOL = TABLE_HZ // FSK_BAUD
FSK_EDGE = POINTS_PER_SYMBOL // 4  # table points on either side of a symbol change in which the frequency turns over

_MESSAGE: dict[str, Any] = {
    "message_hz": MESSAGE_HZ,
    "tones": NUM_TONES,
    "tilt_corner_hz": TILT_CORNER_HZ,
    "syllable_hz": SYLLABLE_HZ,
    "syllable_depth": SYLLABLE_DEPTH,
    "formants": NUM_FORMANTS,
}
PARAMETERS: dict[Waveform, dict[str, Any]] = {  # for the manifest
    "nbfm": {"peak_deviation_hz": PEAK_DEVIATION_HZ, **_MESSAGE},
    "am": {"depth": AM_DEPTH, **_MESSAGE},
    "cw": {},
    "fsk": {
        "symbols_per_s": FSK_BAUD,
        "deviation_hz": FSK_DEVIATION_HZ,
        "line_code": "manchester",
        "edge_s": FSK_EDGE / TABLE_HZ,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What a batch of transmitters says, as integer oscillators: exact on every device."""

    step: NDArray[np.uint32]  # (B, K) phase advance per table point, 2^32 per turn
    phase: NDArray[np.uint32]  # (B, K) phase at time 0
    amplitude: NDArray[np.float32]  # (B, K) of each tone; total rms 1
    frequency_hz: NDArray[np.float32]  # (B, K)
    symbols: NDArray[np.int32]  # (B, S + 1) fsk: sum of the ±1 symbols before each, from the table's first point

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def guard_points(config: GenerateConfig) -> int:
    """Table points before time 0, so that the latest arrival still finds its past; a multiple of a symbol."""
    late = max_delay_s(config) + max_echo_s(config) + max_clock_s(config)
    points = int(np.ceil(late * TABLE_HZ)) + 2 * MARGIN + 4
    return -(-points // POINTS_PER_SYMBOL) * POINTS_PER_SYMBOL


def table_points(config: GenerateConfig) -> int:
    """T, points in a table: the guard, the record and a margin for early clocks."""
    early = int(np.ceil(max_clock_s(config) * TABLE_HZ))
    return guard_points(config) + channel_points(config) + early + 2 * MARGIN + 4


def channel_points(config: GenerateConfig) -> int:
    """Points of the received signal at 50 kHz."""
    return config.num_samples_iq // OVERSAMPLING


def make_messages(config: GenerateConfig, index: NDArray[np.int64]) -> Messages:
    """Messages of the given attempts: tones under slow modulation for nbfm and am, random symbols for fsk."""
    if config.waveform in ("nbfm", "am"):
        return _tones(config, index)
    empty_u, empty_f = np.zeros((len(index), 0), np.uint32), np.zeros((len(index), 0), np.float32)
    num = -(-table_points(config) // POINTS_PER_SYMBOL) if config.waveform == "fsk" else 0
    symbols = np.zeros((len(index), num + 1), np.int32)
    if num:
        # Manchester: every bit is a symbol and its opposite, so that the mean frequency is the carrier's.
        bits = words(config.seed, index, 0, Purpose.MESSAGE, -(-num // 2)) >> np.uint64(31)
        first = 2 * bits.astype(np.int32) - 1
        symbols[:, 1:] = np.cumsum(np.stack([first, -first], -1).reshape(len(index), -1)[:, :num], axis=1)
    return Messages(step=empty_u, phase=empty_u, amplitude=empty_f, frequency_hz=empty_f, symbols=symbols)


def _tones(config: GenerateConfig, index: NDArray[np.int64]) -> Messages:
    draws = uniform(config.seed, index, 0, Purpose.MESSAGE, 3 * NUM_TONES + 2 * NUM_FORMANTS)
    place, theta, level = (draws[:, k * NUM_TONES : (k + 1) * NUM_TONES] for k in range(3))
    rate, psi = draws[:, 3 * NUM_TONES : -NUM_FORMANTS], draws[:, -NUM_FORMANTS:]
    low, high = MESSAGE_HZ[0] + SYLLABLE_HZ[1], MESSAGE_HZ[1] - SYLLABLE_HZ[1]
    centre = low + (high - low) * (np.arange(NUM_TONES) + place) / NUM_TONES  # one tone per band: no gaps
    group = np.arange(NUM_TONES) * NUM_FORMANTS // NUM_TONES
    slow = (SYLLABLE_HZ[0] + (SYLLABLE_HZ[1] - SYLLABLE_HZ[0]) * rate)[:, group]
    a = (0.5 + level) / np.sqrt(1 + (centre / TILT_CORNER_HZ) ** 2)
    side = a * SYLLABLE_DEPTH / 2  # (1 + depth·cos) times a tone is the tone and two sidebands
    frequency = np.concatenate([centre, centre - slow, centre + slow], 1)
    amplitude = np.concatenate([a, side, side], 1)
    amplitude /= np.sqrt((amplitude**2).sum(-1, keepdims=True) / 2)
    turn = np.concatenate([theta, theta - psi[:, group], theta + psi[:, group]], 1)
    return Messages(
        step=np.round(frequency / TABLE_HZ * 2**32).astype(np.uint32),
        phase=np.floor((turn % 1.0) * 2**32).astype(np.uint64).astype(np.uint32),
        amplitude=amplitude.astype(np.float32),
        frequency_hz=frequency.astype(np.float32),
        symbols=np.zeros((len(index), 1), np.int32),
    )


def make_table(config: GenerateConfig, message: Messages, row: int) -> tuple[Tensor, float]:
    """The table of one sample and the peak of its message.

    returns  (T,) float32: phase in rad at unit scale (nbfm, fsk) or message (am); and the peak the scale divides by
    """
    points = table_points(config)
    if config.waveform == "cw":
        return torch.zeros(points), 1.0
    if config.waveform == "fsk":
        return symbol_tables(torch.from_numpy(message.symbols[row : row + 1]), points)[0], 1.0
    clock = (np.arange(points) - guard_points(config)).astype(np.uint32)  # wraps: the oscillators do too
    wave, integral = torch.zeros(points), torch.zeros(points)
    for k in range(message.step.shape[1]):
        turn = clock * message.step[row, k] + message.phase[row, k]
        angle = torch.from_numpy(turn.view(np.int32)).to(torch.float32).mul_(float(np.pi * 2**-31))
        amplitude = float(message.amplitude[row, k])
        wave.add_(torch.cos(angle), alpha=amplitude)
        integral.add_(torch.sin(angle), alpha=amplitude / float(message.frequency_hz[row, k]))
    peak = float(wave.abs().max())
    return (wave if config.waveform == "am" else integral), peak


def symbol_tables(sums: Tensor, points: int) -> Tensor:
    """Phases of fsk.  (B, S + 1) int32 sums of symbols → (B, T) float32 rad

    The frequency turns over along a raised cosine: behind sharp edges some of the power would lie beyond the 12.5 kHz
    of the channel stream and fold back into it.
    """
    at = torch.arange(points, device=sums.device)
    symbol, within = at // POINTS_PER_SYMBOL, at % POINTS_PER_SYMBOL
    # Area between the smooth and a sharp edge, per unit of change, beyond each distance from the edge.
    distance = torch.arange(POINTS_PER_SYMBOL + 1, dtype=torch.float32, device=sums.device).clamp(max=FSK_EDGE)
    area = (FSK_EDGE - distance - 2 * FSK_EDGE / np.pi * torch.cos(distance * float(np.pi / 2 / FSK_EDGE))) / 2
    value = torch.nn.functional.pad(sums.diff(dim=1), (1, 1))  # nothing is said before the first and after the last
    before, here, after = value[:, symbol], value[:, symbol + 1], value[:, symbol + 2]
    turns = (sums[:, symbol] * POINTS_PER_SYMBOL + here * within).to(torch.float32)
    turns = turns + (here - before) * area[within] + (after - here) * area[POINTS_PER_SYMBOL - within]
    return turns * float(2 * np.pi * FSK_DEVIATION_HZ / TABLE_HZ)


def scale(config: GenerateConfig, peak: Any) -> Any:
    """What a table is multiplied by: rad for nbfm and fsk, depth over the peak for am."""
    if config.waveform == "nbfm":
        return PEAK_DEVIATION_HZ / peak
    return AM_DEPTH / peak if config.waveform == "am" else peak * 0 + 1.0


def rms_frequency_hz(config: GenerateConfig, messages: Messages, peak: NDArray[np.float64]) -> NDArray[np.float64]:
    """β, (B,): rms instantaneous frequency; for am, which has none, the rms bandwidth that takes its place."""
    if config.waveform == "nbfm":
        return PEAK_DEVIATION_HZ / peak  # the message's rms is 1
    if config.waveform == "fsk":
        changes = (np.diff(messages.symbols, n=2) != 0).mean(-1)  # a change passes through every frequency between
        return np.asarray(FSK_DEVIATION_HZ * np.sqrt(1 - changes * FSK_EDGE / POINTS_PER_SYMBOL))
    if config.waveform == "cw":
        return np.zeros_like(peak)
    slope = np.sqrt(((messages.amplitude.astype(np.float64) * messages.frequency_hz) ** 2).sum(-1) / 2)
    depth = AM_DEPTH / peak
    return np.asarray(depth * slope / np.sqrt(1 + depth**2))
