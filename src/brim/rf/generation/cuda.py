"""The GPU backend: a whole batch of packed records is one set of kernels.

Axes: B samples, R receivers, M packed records, C chunks. FFTs run on tiles of one fixed number of chunks, the last one
padded: a plan for another count may sum in another order.
"""

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from brim.rf import features as ft
from brim.rf.config import NUM_CHUNKS, PATH_STRIDE, GenerateConfig
from brim.rf.generation import kernels
from brim.rf.generation.backend import STREAM_STRIDE, Measured, Transmissions, feature_chunks, record_power
from brim.rf.physics.channel import FADING_HZ, NUM_SINUSOIDS, TAPS, fading_points
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.philox import Purpose
from brim.rf.physics.receiver import (
    FILTER_TAPS,
    NOISE_POWER,
    NUM_PROBES,
    PROBE_GAIN,
    ROW,
    ROW_POINTS,
    UPSAMPLING_TAPS,
    WINDOW,
    filter_matrix,
    upsampling_weights,
)
from brim.rf.physics.scene import NUM_PATHS, max_baseline_m
from brim.rf.physics.waveform import (
    MARGIN,
    TABLE_HZ,
    channel_points,
    guard_points,
    scale,
    symbol_tables,
    table_points,
)

FFT_ROWS = 1_280  # chunks per FFT tile: 256 records, some 50 MB
ROUND_ROWS = 64  # records or samples
PAD = FILTER_TAPS // 2  # zeros before a record: the filter's past
TAIL = WINDOW - ROW - PAD  # zeros after it: the filter's future


class CudaBackend:
    """Runs the kernels; also on the CPU under Triton's interpreter, for tests of small records."""

    def __init__(self, config: GenerateConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.grid = ft.FeatureGrid.of(config, max_baseline_m(config))
        self.fast = os.environ.get("TRITON_INTERPRET") != "1"
        self.filters = torch.from_numpy(filter_matrix()).to(device)
        self.upsampling = torch.from_numpy(upsampling_weights()).to(device)

    def measure(self, batch: Transmissions, *, iq: bool) -> Measured:
        """Signals, noise and features of a batch, queued on the current stream."""
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            links = self._upload(batch)
            table, peak = self._tables(batch)
            signal, clean = self._channel(links, table, scale(self.config, peak))
            record = self._record(links, signal)
            truth = self._truth(clean, len(record))
            del clean
            stream, floor = self._tune(record)
            spectrum = self._spectrum(stream, floor)
            envelope, demodulated = self._envelope(stream, len(record))
            scales, heard = ft.timing_scale(envelope, self.grid), ft.timing_heard(spectrum, floor)
            arrival = self._arrival(batch, links, truth, demodulated, scales, heard)
            chunks = feature_chunks(self.config, self.grid, spectrum, envelope, floor, *arrival)
            return Measured(
                peak=peak,
                truth=truth,
                chunks=chunks,
                features=ft.aggregate(chunks),
                iq=self._iq(record) if iq else None,
            )

    def _iq(self, record: Tensor) -> Tensor:
        """(M, N) complex64 in sqrt(mW)."""
        unit = ft.milliwatt_units(noise_dbm(self.config))
        parts = record[..., PAD : PAD + self.config.num_samples_iq].mul(unit)
        return torch.complex(parts[:, 0], parts[:, 1])

    def _put(self, array: NDArray[Any]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)  # pinned: the copy must not wait for the kernels

    def _empty(self, *shape: int) -> Tensor:
        """Uninitialised float32, allocated for a rounded number of rows: batches differ by a few records, and torch's
        allocator would keep a block for each size until the memory is full.
        """
        rows = triton.cdiv(shape[0], ROUND_ROWS) * ROUND_ROWS if self.device.type == "cuda" else shape[0]
        return torch.empty((rows, *shape[1:]), dtype=torch.float32, device=self.device)[: shape[0]]

    def _upload(self, batch: Transmissions) -> dict[str, Tensor]:
        links = batch.links
        arrays: dict[str, NDArray[Any]] = {
            "sample": links.sample.astype(np.int32),
            "receiver": links.receiver.astype(np.int32),
            "item_low": (links.index & 0xFFFFFFFF).astype(np.uint32).view(np.int32),
            "item_high": (links.index >> 32).astype(np.int32),
            "amplitude": links.amplitude,
            "shift": links.shift,
            "weights": links.weights,
            "doppler_hz": links.doppler_hz,
            "offset_step": links.offset_step.view(np.int32),
        }
        return {name: self._put(array) for name, array in arrays.items()}

    def _tables(self, batch: Transmissions) -> tuple[Tensor, Tensor]:
        """(B, T) tables and (B,) peaks."""
        config, messages, num = self.config, batch.messages, len(batch)
        points = table_points(config)
        if config.waveform == "cw":
            return torch.zeros(num, points, device=self.device), torch.ones(num, device=self.device)
        if config.waveform == "fsk":
            return symbol_tables(self._put(messages.symbols), points), torch.ones(num, device=self.device)
        block = 1024
        num_blocks = triton.cdiv(points, block)
        table, peaks = self._empty(num, points), self._empty(num, num_blocks)
        kernels.message_kernel[(num, num_blocks)](
            self._put(messages.step.view(np.int32)),
            self._put(messages.phase.view(np.int32)),
            self._put(messages.amplitude),
            self._put(messages.frequency_hz),
            table,
            peaks,
            points,
            guard_points(config),
            num_blocks,
            K=messages.step.shape[1],
            AM=config.waveform == "am",
            BLOCK=block,
            FAST=self.fast,
        )
        return table, peaks.amax(1)

    def _channel(self, links: dict[str, Tensor], table: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(M, L + 2·MARGIN, 2) at 50 kHz and (M·C padded, W, 2) at 25 kHz, without noise."""
        config, num = self.config, len(links["sample"])
        fades, points, kept = fading_points(config), channel_points(config) + 2 * MARGIN, NUM_CHUNKS * self.grid.points
        k = 10 ** (config.rician_k_db / 10) if config.fading == "rician" else 0.0
        gain = self._empty(num, NUM_PATHS, fades, 2)
        kernels.fading_kernel[(num, NUM_PATHS)](
            links["item_low"],
            links["item_high"],
            links["receiver"],
            links["doppler_hz"],
            gain,
            config.seed,
            fades,
            float((k / (k + 1)) ** 0.5),
            float((1 / (k + 1)) ** 0.5),
            P=NUM_PATHS,
            SINUSOIDS=NUM_SINUSOIDS,
            FADES=config.fading != "none",
            PURPOSE=int(Purpose.FADING),
            STRIDE=PATH_STRIDE,
            BLOCK=triton.next_power_of_2(fades),
            FAST=self.fast,
        )
        signal, clean = self._empty(num, points, 2), self._empty(*self._rows(num), self.grid.points, 2)
        block = 256
        kernels.channel_kernel[(num, triton.cdiv(points, block))](
            table,
            factor.to(torch.float32),
            links["sample"],
            links["amplitude"],
            links["shift"],
            links["weights"],
            links["offset_step"],
            gain,
            signal,
            clean,
            table.shape[1],
            points,
            fades,
            kept,
            P=NUM_PATHS,
            TAPS=TAPS,
            MARGIN=MARGIN,
            PER_FADE=TABLE_HZ // FADING_HZ,
            AM=config.waveform == "am",
            STRIDE=STREAM_STRIDE,
            BLOCK=block,
            FAST=self.fast,
            num_warps=2,
        )
        return signal, clean

    def _record(self, links: dict[str, Tensor], signal: Tensor) -> Tensor:
        """(M, 2, padded N) signal and noise at 200 kHz, real and imaginary parts apart."""
        num, low = len(signal), channel_points(self.config)
        record = self._empty(num, 2, PAD + self.config.num_samples_iq + TAIL)
        record[..., :PAD] = 0
        record[..., -TAIL:] = 0
        block = 256
        kernels.record_kernel[(num, triton.cdiv(low, block))](
            signal,
            self.upsampling,
            links["item_low"],
            links["item_high"],
            links["receiver"],
            record,
            self.config.seed,
            signal.shape[1],
            low,
            record.shape[2],
            PAD,
            NOISE_POWER,
            TAPS=UPSAMPLING_TAPS,
            FIRST=MARGIN - UPSAMPLING_TAPS // 2 + 1,
            PURPOSE=int(Purpose.NOISE),
            BLOCK=block,
            FAST=self.fast,
            num_warps=2,
        )
        return record

    def _tune(self, record: Tensor) -> tuple[Tensor, Tensor]:
        """(M, C, W, 2) channel stream and (M, C) noise floor."""
        num, rows = len(record), self.config.num_samples_iq // ROW // NUM_CHUNKS
        stream = self._empty(*self._rows(num), self.grid.points, 2)
        floor = self._empty(num, NUM_CHUNKS)
        kernels.tune_kernel[(num * NUM_CHUNKS,)](
            record,
            self.filters,
            stream,
            floor,
            1.0 / (rows * NUM_PROBES * PROBE_GAIN * NOISE_POWER),
            record.shape[2],
            CHUNK_ROWS=rows,
            C=NUM_CHUNKS,
            ROW=ROW,
            POINTS=ROW_POINTS,
            WINDOW=WINDOW,
            COLUMNS=ROW_POINTS + NUM_PROBES,
            ROWS=128,
            STEP=32,
            num_warps=8,
            num_stages=3,
        )
        return stream, floor

    def _rows(self, num: int) -> tuple[int]:
        """Chunks of a batch, rounded up to whole FFT tiles."""
        return (triton.cdiv(num * NUM_CHUNKS, self._tile) * self._tile,)

    @property
    def _tile(self) -> int:
        return FFT_ROWS if self.device.type == "cuda" else NUM_CHUNKS

    def _tiles(self, num: int) -> Iterator[tuple[slice, slice, int]]:
        """FFT tiles of a batch: their chunks, those of the batch's records among them, and how many."""
        for begin in range(0, num * NUM_CHUNKS, self._tile):
            end = min(begin + self._tile, num * NUM_CHUNKS)
            yield slice(begin, begin + self._tile), slice(begin, end), end - begin

    def _truth(self, clean: Tensor, num: int) -> Tensor:
        """(M, C, 2) power in the channel and occupied bandwidth of the noiseless signal."""
        grid = self.grid
        truth = self._empty(num, NUM_CHUNKS, 2)
        for tile, own, count in self._tiles(num):
            kernels.truth_kernel[(count,)](
                _fft(clean[tile]),
                truth.view(-1, 2)[own],
                grid.bin_hz,
                (1 - ft.OCCUPIED) / 2,
                POINTS=grid.points,
                BINS=grid.bins,
                BLOCK=1024,
            )
        return truth

    def _spectrum(self, stream: Tensor, floor: Tensor) -> ft.SpectrumSums:
        num, grid = len(floor), self.grid
        sums = self._empty(num, NUM_CHUNKS, len(fields(ft.SpectrumSums)))
        per_band = grid.bins // ft.NUM_BANDS
        for tile, own, count in self._tiles(num):
            kernels.spectrum_kernel[(count,)](
                _fft(stream[tile]),
                floor.view(-1)[own],
                sums.view(-1, sums.shape[-1])[own],
                grid.bin_hz,
                round(ft.OFFSET_HZ / grid.bin_hz),
                (1 - ft.OCCUPIED) / 2,
                ft.ROLLOFF,
                POINTS=grid.points,
                BINS=grid.bins,
                BANDS=ft.NUM_BANDS,
                PER_BAND=per_band,
                LINES=triton.next_power_of_2(per_band),
                FAST=self.fast,
            )
        return ft.SpectrumSums(*sums.unbind(-1))

    def _envelope(self, stream: Tensor, num: int) -> tuple[ft.EnvelopeSums, Tensor]:
        rows, points = stream.shape[:2]
        demodulated = self._empty(rows, points)
        sums = self._empty(num, NUM_CHUNKS, len(fields(ft.EnvelopeSums)))
        kernels.envelope_kernel[(num * NUM_CHUNKS,)](
            stream, demodulated, sums, POINTS=points, AM=self.config.waveform == "am", BLOCK=1024
        )
        return ft.EnvelopeSums(*sums.unbind(-1)), demodulated

    def _arrival(
        self,
        batch: Transmissions,
        links: dict[str, Tensor],
        truth: Tensor,
        demodulated: Tensor,
        scales: Tensor,
        heard: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(M, C) arrival differences and their standard deviations, s."""
        num, grid = len(truth), self.grid
        if self.config.waveform == "cw":
            return ft.unknown_arrival(num, self.device)
        arrival = self._empty(num, NUM_CHUNKS, 2)
        reference = self._reference(batch, links, truth)
        place = self._put(_antennas(batch, self.config))
        baseline = (place - place[reference.long()]).square().unbind(-1)
        limit = (baseline[0] + baseline[1] + baseline[2]).sqrt() / SPEED_OF_LIGHT + ft.lag_slack_s(self.config)
        first, last = grid.timing
        band = torch.empty(len(demodulated), last - first, 2, device=self.device)
        for tile, _, _ in self._tiles(num):
            band[tile] = torch.view_as_real(torch.fft.rfft(demodulated[tile])[:, first:last])
        kernels.arrival_kernel[(num,)](
            band,
            scales,
            reference,
            limit.to(torch.float32),
            arrival,
            first,
            2 * np.pi * grid.bin_hz,
            ft.LAG_STEP_S,
            ft.MAX_STEP_S,
            ft.PRIOR,
            ft.UNKNOWN_SIGMA_US * 1e-6,
            LAGS=grid.lags,
            C=NUM_CHUNKS,
            GROUPS=(last - first) // grid.timing_group,
            PER_GROUP=grid.timing_group,
            ROWS=32,
            LINES=triton.next_power_of_2(grid.timing_group),
            NEWTON=ft.NEWTON_STEPS,
            FAST=self.fast,
            num_warps=2,
        )
        return ft.only_heard(arrival[..., 0], arrival[..., 1], heard & heard[reference.long()])

    def _reference(self, batch: Transmissions, links: dict[str, Tensor], truth: Tensor) -> Tensor:
        """(M,) int32: the record of the same sample with the greatest power."""
        shape = batch.scenes.present.shape
        number = np.zeros(shape, np.int32)
        number[batch.links.sample, batch.links.receiver] = np.arange(len(batch.links))
        sample, receiver = links["sample"].long(), links["receiver"].long()
        power = torch.full(shape, -1.0, device=self.device)
        power[sample, receiver] = record_power(truth)
        strongest = self._put(number).gather(1, power.argmax(1, keepdim=True)).squeeze(1)
        return strongest[sample]


def _antennas(batch: Transmissions, config: GenerateConfig) -> NDArray[np.float32]:
    """(M, 3) antenna positions in metres from the first receiver of the sample."""
    at = np.stack(
        ecef(
            batch.scenes.receivers[..., 0].copy(),
            batch.scenes.receivers[..., 1].copy(),
            batch.scenes.receivers[..., 2] + config.rx_antenna_m,
        ),
        -1,
    )
    relative = at - at[:, :1]
    return relative[batch.links.sample, batch.links.receiver].astype(np.float32)


def _fft(rows: Tensor) -> Tensor:
    """(rows, W, 2) → (rows, W, 2)"""
    return torch.view_as_real(torch.fft.fft(torch.view_as_complex(rows)))
