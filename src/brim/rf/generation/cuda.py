"""The GPU backend: a whole batch of packed records is one set of kernels.

Axes: B samples, R receivers, M packed records, C chunks. FFTs run on tiles of one fixed number of chunks, the last one
padded: a plan for another count may sum in another order.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from brim.rf import features as ft
from brim.rf.config import NUM_CHUNKS, PATH_STRIDE, GenerateConfig
from brim.rf.generation import kernels
from brim.rf.generation.backend import PASS_RECORDS, STREAM_STRIDE, Measured, Transmissions, feature_chunks
from brim.rf.physics.channel import FADING_HZ, NUM_SINUSOIDS, TAPS, fading_points
from brim.rf.physics.geometry import SPEED_OF_LIGHT, ecef
from brim.rf.physics.impairments import impair, is_impaired
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.philox import Purpose
from brim.rf.physics.receiver import (
    DECIMATION,
    FILTER_TAPS,
    FLOOR_BIAS,
    FLOOR_POINTS,
    NOISE_POWER,
    QUIET,
    UPSAMPLING_TAPS,
    filter_matrix,
    floor_plan,
    floor_samples,
    floor_taper,
    upsampling_weights,
)
from brim.rf.physics.scene import NUM_PATHS, max_baseline_m
from brim.rf.physics.waveform import MARGIN, TABLE_HZ, channel_points, guard_points, scale, symbol_tables, table_points

FFT_ROWS = (
    2_560  # chunks per FFT tile: 512 records, some 100 MB; smaller tiles are more launches than the host can make
)
FLOOR_RECORDS = 256  # per tile of the noise floor's short FFTs: some 95 MB
ROUND_ROWS = 64  # records or samples
ALIGNED = 64  # bytes: kernels are compiled for aligned arrays
PAD = FILTER_TAPS // 2  # zeros before a record: the filter's past


class Tuning(NamedTuple):
    """How the channel filter runs: the samples a row of the product advances by, and what a program computes."""

    row: int
    window: int  # at least row − 8 + 129, a multiple of `step`
    columns: int  # at least row / 8, a power of two; the last ones are 0
    rows: int = 128
    step: int = 32
    warps: int = 8
    stages: int = 3


TUNING = Tuning(row=128, window=256, columns=16, stages=4)  # the fastest of 27 on an H200


class CudaBackend:
    """Runs the kernels; also on the CPU under Triton's interpreter, for tests of small records."""

    def __init__(self, config: GenerateConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.grid = ft.FeatureGrid.of(config, max_baseline_m(config))
        self.fast = os.environ.get("TRITON_INTERPRET") != "1"
        self.pass_records = PASS_RECORDS
        self.tuning = TUNING
        self.upsampling = torch.from_numpy(upsampling_weights()).to(device)
        places = floor_samples(config.num_samples_iq)
        self.floor_segments = places.shape[1]  # per chunk
        self.floor_starts = (places[..., 0].flatten() + PAD).to(device, torch.int32)
        self.floor_taper, self.floor_bins = floor_taper().to(device), torch.zeros(FLOOR_POINTS, dtype=torch.int32)
        self.floor_bins[floor_plan()[0]] = 1
        self.floor_bins = self.floor_bins.to(device)

    @property
    def tuning(self) -> Tuning:
        return self._tuning

    @tuning.setter
    def tuning(self, value: Tuning) -> None:
        filters = torch.from_numpy(filter_matrix(value.row, value.window))
        self.filters = torch.nn.functional.pad(filters, (0, value.columns - filters.shape[1])).to(self.device)
        self._tuning = value

    def measure(self, batch: Transmissions, *, iq: bool) -> Measured:
        """Signals, noise and features of a batch, queued on the current stream."""
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            parts = [batch[samples] for samples in self._passes(batch)]
            uploaded = self._upload([self._arrays(part) for part in parts])
            passes = [self._pass(part, arrays, iq=iq) for part, arrays in zip(parts, uploaded, strict=True)]
            one = passes[0] if len(passes) == 1 else _Pass.join(passes)
            spectrum, envelope = ft.SpectrumSums(*one.spectrum.unbind(-1)), ft.EnvelopeSums(*one.envelope.unbind(-1))
            chunks = feature_chunks(self.config, self.grid, spectrum, envelope, one.floor, *one.arrival.unbind(-1))
            return Measured(
                peak=one.peak, truth=one.truth, chunks=chunks, features=ft.aggregate(chunks), power=one.power, iq=one.iq
            )

    def _passes(self, batch: Transmissions) -> Iterator[slice]:
        """Samples that go through the kernels together: whole ones, with `pass_records` records at most."""
        first = 0
        while first < len(batch):
            most = int(np.searchsorted(batch.starts, batch.starts[first] + self.pass_records, "right")) - 1
            last = max(first + 1, most)
            yield slice(first, last)
            first = last

    def _pass(self, batch: Transmissions, links: dict[str, Tensor], *, iq: bool) -> "_Pass":
        table, peak = self._tables(len(batch), links)
        signal, clean = self._channel(links, table, scale(self.config, peak))
        truth = self._truth(clean, len(signal))
        del clean
        record = self._record(links, signal)
        if is_impaired(self.config):
            self._impair(record, batch)
        del signal
        stream, floor = self._tune(record), self._floor(record)
        raw = self._iq(record) if iq else None
        del record
        spectrum = self._spectrum(stream, floor)
        envelope, demodulated = self._envelope(stream, len(floor))
        del stream
        sums = ft.SpectrumSums(*spectrum.unbind(-1))
        power, heard = ft.reference_power(sums), ft.timing_heard(sums, floor)
        scales = ft.timing_scale(ft.EnvelopeSums(*envelope.unbind(-1)), self.grid)
        arrival = torch.stack(self._arrival(links, power, demodulated, scales, heard), -1)
        return _Pass(
            peak=peak, truth=truth, floor=floor, spectrum=spectrum, envelope=envelope, arrival=arrival, power=power,
            iq=raw,
        )  # fmt: skip

    def limit_records(self, most: int) -> None:
        self.pass_records = min(most, PASS_RECORDS)

    def abandon(self) -> None:
        """A batch takes milliseconds."""

    def _iq(self, record: Tensor) -> Tensor:
        """(M, N) complex64 in sqrt(mW)."""
        unit = ft.milliwatt_units(noise_dbm(self.config))
        parts = record[..., PAD : PAD + self.config.num_samples_iq].mul(unit)
        return torch.complex(parts[:, 0], parts[:, 1])

    def _empty(self, *shape: int) -> Tensor:
        """Uninitialised float32, allocated for a rounded number of rows: batches differ by a few records, and torch's
        allocator would keep a block for each size until the memory is full.
        """
        rows = triton.cdiv(shape[0], ROUND_ROWS) * ROUND_ROWS if self.device.type == "cuda" else shape[0]
        return torch.empty((rows, *shape[1:]), dtype=torch.float32, device=self.device)[: shape[0]]

    def _arrays(self, batch: Transmissions) -> dict[str, NDArray[Any]]:
        """What the kernels read of a pass."""
        links, messages, num = batch.links, batch.messages, len(batch.links)
        number = np.zeros(batch.scenes.present.shape, np.int32)
        number[links.sample, links.receiver] = np.arange(num)
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
            "number": number,
            "antenna": _antennas(batch, self.config),
        }
        if self.config.waveform == "fsk":
            arrays["symbols"] = messages.symbols
        elif self.config.waveform != "cw":
            arrays |= {"tone_amplitude": messages.amplitude, "tone_hz": messages.frequency_hz}
            arrays |= {"tone_step": messages.step.view(np.int32), "tone_phase": messages.phase.view(np.int32)}
        return arrays

    def _upload(self, passes: list[dict[str, NDArray[Any]]]) -> list[dict[str, Tensor]]:
        """All arrays in one copy from pinned memory, which does not wait for the kernels; each is aligned."""
        if self.device.type != "cuda":
            return [{name: torch.from_numpy(np.ascontiguousarray(part[name])) for name in part} for part in passes]
        sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for part in passes for array in part.values()]
        host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        starts = [0, *accumulate(sizes)]
        places = iter(starts)
        for part in passes:
            for array in part.values():
                at = next(places)
                host[at : at + array.nbytes].numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        device, places = host.to(self.device, non_blocking=True), iter(starts)

        def there(array: NDArray[Any]) -> Tensor:
            at = next(places)
            return device[at : at + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)

        return [{name: there(array) for name, array in part.items()} for part in passes]

    def _tables(self, num: int, links: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(B, T) tables and (B,) peaks."""
        config, points = self.config, table_points(self.config)
        if config.waveform == "cw":
            return torch.zeros(num, points, device=self.device), torch.ones(num, device=self.device)
        if config.waveform == "fsk":
            return symbol_tables(links["symbols"], points), torch.ones(num, device=self.device)
        block = 1024
        num_blocks = triton.cdiv(points, block)
        table, peaks = self._empty(num, points), self._empty(num, num_blocks)
        kernels.message_kernel[(num, num_blocks)](
            links["tone_step"], links["tone_phase"], links["tone_amplitude"], links["tone_hz"], table, peaks, points,
            guard_points(config), num_blocks,
            K=links["tone_step"].shape[1], AM=config.waveform == "am", BLOCK=block, FAST=self.fast,
        )  # fmt: skip
        return table, peaks.amax(1)

    def _channel(self, links: dict[str, Tensor], table: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(M, L + 2·MARGIN, 2) at 50 kHz and (M·C padded, W, 2) at 25 kHz, without noise."""
        config, num = self.config, len(links["sample"])
        fades, points, kept = fading_points(config), channel_points(config) + 2 * MARGIN, NUM_CHUNKS * self.grid.points
        k = 10 ** (config.rician_k_db / 10) if config.fading == "rician" else 0.0
        gain = self._empty(num, NUM_PATHS, fades, 2)
        kernels.fading_kernel[(num, NUM_PATHS)](
            links["item_low"], links["item_high"], links["receiver"], links["doppler_hz"], gain, config.seed, fades,
            float((k / (k + 1)) ** 0.5), float((1 / (k + 1)) ** 0.5),
            P=NUM_PATHS, SINUSOIDS=NUM_SINUSOIDS, FADES=config.fading != "none", PURPOSE=int(Purpose.FADING),
            STRIDE=PATH_STRIDE, BLOCK=triton.next_power_of_2(fades), FAST=self.fast,
        )  # fmt: skip
        signal, clean = self._empty(num, points, 2), self._empty(*self._rows(num), self.grid.points, 2)
        block = 256
        kernels.channel_kernel[(num, triton.cdiv(points, block))](
            table, factor.to(torch.float32), links["sample"], links["amplitude"], links["shift"], links["weights"],
            links["offset_step"], gain, signal, clean, table.shape[1], points, fades, kept,
            P=NUM_PATHS, TAPS=TAPS, MARGIN=MARGIN, PER_FADE=TABLE_HZ // FADING_HZ, AM=config.waveform == "am",
            STRIDE=STREAM_STRIDE, BLOCK=block, FAST=self.fast, num_warps=2,
        )  # fmt: skip
        return signal, clean

    def _record(self, links: dict[str, Tensor], signal: Tensor) -> Tensor:
        """(M, 2, padded N) signal and noise at 200 kHz, real and imaginary parts apart."""
        num, low, count = len(signal), channel_points(self.config), self.config.num_samples_iq
        past_last = triton.cdiv(count, self.tuning.row) * self.tuning.row + self.tuning.window - self.tuning.row
        record = self._empty(num, 2, max(past_last, PAD + count))
        record[..., :PAD] = 0
        record[..., PAD + count :] = 0
        block = 256
        kernels.record_kernel[(num, triton.cdiv(low, block))](
            signal, self.upsampling, links["item_low"], links["item_high"], links["receiver"], record,
            self.config.seed, signal.shape[1], low, record.shape[2], PAD, NOISE_POWER,
            TAPS=UPSAMPLING_TAPS, FIRST=MARGIN - UPSAMPLING_TAPS // 2 + 1, PURPOSE=int(Purpose.NOISE), BLOCK=block,
            FAST=self.fast, num_warps=2,
        )  # fmt: skip
        return record

    def _impair(self, record: Tensor, batch: Transmissions) -> None:
        """Change records in place, some at once."""
        inside, links = slice(PAD, PAD + self.config.num_samples_iq), batch.links
        for at in range(0, len(record), ROUND_ROWS):
            part = slice(at, at + ROUND_ROWS)
            iq = torch.complex(record[part, 0, inside], record[part, 1, inside])
            iq = impair(self.config, iq, links.index[part], links.receiver[part])
            record[part, 0, inside], record[part, 1, inside] = iq.real, iq.imag

    def _tune(self, record: Tensor) -> Tensor:
        """(M·C padded, W, 2) channel stream."""
        num, tuning = len(record), self.tuning
        rows = triton.cdiv(self.config.num_samples_iq, tuning.row)
        stream = self._empty(*self._rows(num), self.grid.points, 2)
        kernels.tune_kernel[(num, triton.cdiv(rows, tuning.rows))](
            record, self.filters, stream, record.shape[2], rows, NUM_CHUNKS * self.grid.points,
            ROW=tuning.row, POINTS=tuning.row // DECIMATION, WINDOW=tuning.window, COLUMNS=tuning.columns,
            ROWS=tuning.rows, STEP=tuning.step, num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        return stream

    def _floor(self, record: Tensor) -> Tensor:
        """(M, C) noise power in the channel, in tiles of one fixed number of records."""
        per, num_segments = min(FLOOR_RECORDS, self._tile // NUM_CHUNKS), len(self.floor_starts)
        bins, ranks, moments = floor_plan()
        floor, block = self._empty(len(record), NUM_CHUNKS), 16
        for first in range(0, len(record), per):
            part = record[first : first + per]
            segments = torch.empty(per, num_segments, FLOOR_POINTS, 2, device=self.device)
            kernels.segment_kernel[(len(part), triton.cdiv(num_segments, block))](
                part, self.floor_starts, self.floor_taper, segments, record.shape[2], num_segments,
                POINTS=FLOOR_POINTS, BLOCK=block,
            )  # fmt: skip
            kernels.floor_kernel[(len(part) * NUM_CHUNKS,)](
                _fft(segments), self.floor_bins, floor[first:], *moments, QUIET, FLOOR_BIAS * NOISE_POWER,
                POINTS=FLOOR_POINTS, SEGMENTS=self.floor_segments, BINS=len(bins), LOW=ranks.start,
                HIGH=ranks.stop, ROWS=triton.next_power_of_2(self.floor_segments), FAST=self.fast, num_warps=16,
            )  # fmt: skip
        return floor

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
                _fft(clean[tile]), truth.view(-1, 2)[own], grid.bin_hz, (1 - ft.OCCUPIED) / 2,
                POINTS=grid.points, BINS=grid.bins, BLOCK=1024,
            )  # fmt: skip
        return truth

    def _spectrum(self, stream: Tensor, floor: Tensor) -> Tensor:
        """(M, C, 8) in the order of SpectrumSums."""
        num, grid = len(floor), self.grid
        sums = self._empty(num, NUM_CHUNKS, len(fields(ft.SpectrumSums)))
        per_band = grid.bins // ft.NUM_BANDS
        for tile, own, count in self._tiles(num):
            kernels.spectrum_kernel[(count,)](
                _fft(stream[tile]), floor.view(-1)[own], sums.view(-1, sums.shape[-1])[own], grid.bin_hz,
                round(ft.OFFSET_HZ / grid.bin_hz), (1 - ft.OCCUPIED) / 2, ft.ROLLOFF,
                POINTS=grid.points, BINS=grid.bins, BANDS=ft.NUM_BANDS, PER_BAND=per_band,
                LINES=triton.next_power_of_2(per_band), FAST=self.fast,
            )  # fmt: skip
        return sums

    def _envelope(self, stream: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """(M, C, 9) in the order of EnvelopeSums, and the demodulated signal, (M·C padded, W)."""
        rows, points = stream.shape[:2]
        demodulated = self._empty(rows, points)
        sums = self._empty(num, NUM_CHUNKS, len(fields(ft.EnvelopeSums)))
        kernels.envelope_kernel[(num * NUM_CHUNKS,)](
            stream, demodulated, sums, POINTS=points, AM=self.config.waveform == "am", BLOCK=1024
        )
        own, shape = slice(num * NUM_CHUNKS), (num, NUM_CHUNKS, points)
        ft.bridge_chunks(torch.view_as_complex(stream[own]).view(shape), demodulated[own].view(shape), self.config)
        return sums, demodulated

    def _arrival(
        self,
        links: dict[str, Tensor],
        power: Tensor,
        demodulated: Tensor,
        scales: Tensor,
        heard: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(M, C) arrival differences and their standard deviations, s; see features.measure_arrival."""
        num = len(power)
        if self.config.waveform == "cw":
            return ft.unknown_arrival(num, self.device)
        reference, place = self._reference(links, power).long(), links["antenna"]
        baseline = (place - place[reference]).square().unbind(-1)
        limit = (baseline[0] + baseline[1] + baseline[2]).sqrt() / SPEED_OF_LIGHT + ft.lag_slack_s(self.config)
        limit = limit.to(torch.float32)
        rough, _ = self._compare(self._timing_band(demodulated, num), scales, reference, limit, self.grid.lags)
        points = ft.whole_points(rough)
        own = torch.arange(num, device=self.device)
        value, sigma = self._compare(
            self._aligned_band(demodulated, scales, reference, points),
            torch.ones(2 * num, device=self.device),
            own + num,
            torch.full_like(limit, ft.FINE_LIMIT_S),
            ft.FINE_LAGS,
        )
        value, sigma = ft.whole_arrival(value, sigma, points, limit, own == reference)
        return ft.only_heard(value, sigma, heard & heard[reference])

    def _aligned_band(self, demodulated: Tensor, scales: Tensor, reference: Tensor, points: Tensor) -> Tensor:
        """(2·M·C, K, 2) spectra of records moved by whole points, then of what their references share with them.

        Both are real, so one complex FFT serves a record and its reference.
        """
        (first, last), num, per_chunk = self.grid.timing, len(points), self.grid.points
        packed, block = self._empty(*self._rows(num), per_chunk, 2), 1024
        kernels.align_kernel[(num, triton.cdiv(NUM_CHUNKS * per_chunk, block))](
            demodulated, scales, reference.to(torch.int32), points.to(torch.int32), packed,
            POINTS=NUM_CHUNKS * per_chunk, BLOCK=block,
        )  # fmt: skip
        band = self._empty(2 * num * NUM_CHUNKS, last - first, 2)
        for tile, own, count in self._tiles(num):
            kernels.unpack_kernel[(count,)](
                _fft(packed[tile]), band, own.start, num * NUM_CHUNKS, first,
                POINTS=per_chunk, LINES=last - first, BLOCK=triton.next_power_of_2(last - first),
            )  # fmt: skip
        return band

    def _timing_band(self, demodulated: Tensor, num: int) -> Tensor:
        """(chunks padded, K, 2) spectra of so many records."""
        first, last = self.grid.timing
        band = torch.empty(len(demodulated), last - first, 2, device=self.device)
        for tile, _, _ in self._tiles(num):
            band[tile] = torch.view_as_real(torch.fft.rfft(demodulated[tile])[:, first:last])
        return band

    def _compare(
        self, band: Tensor, scales: Tensor, reference: Tensor, limit: Tensor, lags: int
    ) -> tuple[Tensor, Tensor]:
        """(M, C) lags behind the references and their standard deviations, s."""
        grid, num = self.grid, len(limit)
        first, last = grid.timing
        arrival = self._empty(num, NUM_CHUNKS, 2)
        kernels.arrival_kernel[(num,)](
            band, scales, reference.to(torch.int32), limit, arrival, first, 2 * np.pi * grid.bin_hz, ft.LAG_STEP_S,
            ft.MAX_STEP_S, ft.PRIOR, ft.UNKNOWN_SIGMA_US * 1e-6,
            LAGS=lags, C=NUM_CHUNKS, GROUPS=(last - first) // grid.timing_group, PER_GROUP=grid.timing_group,
            ROWS=32, LINES=triton.next_power_of_2(grid.timing_group), NEWTON=ft.NEWTON_STEPS, FAST=self.fast,
            num_warps=2,
        )  # fmt: skip
        return arrival[..., 0], arrival[..., 1]

    def _reference(self, links: dict[str, Tensor], measured: Tensor) -> Tensor:
        """(M,) int32: the record of the same sample with the greatest measured power."""
        number, sample, receiver = links["number"], links["sample"].long(), links["receiver"].long()
        power = torch.full(number.shape, -1.0, device=self.device)
        power[sample, receiver] = measured
        strongest = number.gather(1, power.argmax(1, keepdim=True)).squeeze(1)
        return strongest[sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What is kept of the records of one pass, packed by record."""

    peak: Tensor  # (B,)
    truth: Tensor  # (M, C, 2)
    floor: Tensor  # (M, C)
    spectrum: Tensor  # (M, C, 8)
    envelope: Tensor  # (M, C, 9)
    arrival: Tensor  # (M, C, 2)
    power: Tensor  # (M,)
    iq: Tensor | None  # (M, N)

    @classmethod
    def join(cls, parts: "list[_Pass]") -> "_Pass":
        joined: dict[str, Any] = {}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            joined[column.name] = None if values[0] is None else torch.cat(values)
        return cls(**joined)


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
