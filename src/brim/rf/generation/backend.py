"""What computes a batch: its input and output, the CPU backend, and what both backends share.

Axes: B samples, R receivers, M packed records, C chunks, F features. The CPU backend works record by record in plain
torch and is the reference for the GPU (`cuda.py`).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from threading import Thread
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.engine.device import worker_count
from brim.rf import features as ft
from brim.rf.config import NUM_CHUNKS, GenerateConfig
from brim.rf.physics.channel import Links, make_links, receive
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.impairments import impair, is_impaired
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.receiver import record, tune
from brim.rf.physics.scene import Scenes, baselines_m, max_baseline_m
from brim.rf.physics.waveform import MARGIN, TABLE_HZ, Messages, make_messages, make_table, scale

PASS_RECORDS = 16_384  # that go through a GPU's kernels together, at most: some 36 GB; each pass costs the host 3 ms
STREAM_STRIDE = TABLE_HZ // 25_000  # points of the channel at 50 kHz per point of the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmissions:
    """A batch ready to compute: accepted scenes, their messages and the packed links."""

    scenes: Scenes
    messages: Messages
    links: Links
    starts: NDArray[np.int64]  # (B + 1,) first record of each sample

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, rows: slice) -> Self:
        first, last, step = rows.indices(len(self))
        assert step == 1
        begin, end = int(self.starts[first]), int(self.starts[last])
        links = self.links[begin:end]
        return type(self)(
            scenes=self.scenes[rows],
            messages=self.messages[rows],
            links=replace(links, sample=links.sample - first),
            starts=self.starts[first : last + 1] - begin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a batch, packed by record."""

    peak: Tensor  # (B,) float32, of each message
    truth: Tensor  # (M, C, 2) float32: power in the channel, in units of its noise; occupied bandwidth in Hz
    features: Tensor  # (M, F, 4) float32
    power: Tensor  # (M,) float32, measured; the strongest record of a sample is its reference
    chunks: Tensor | None = None  # (M, C, F) float32
    iq: Tensor | None = None  # (M, N) complex64, in sqrt(mW)

    def to(self, device: str) -> Self:
        tensors = {column.name: getattr(self, column.name) for column in fields(self)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})


class Backend(Protocol):
    """A device that turns transmissions into measurements."""

    def measure(self, batch: Transmissions, *, iq: bool) -> Measured:
        """Signals, noise and features of a batch, on the device; may return before the device is done."""
        ...

    def limit_records(self, most: int) -> None:
        """Take so many records at once, at most, where a batch is computed as a whole."""
        ...

    def abandon(self) -> None:
        """Let `measure` raise soon, in whichever threads it runs: nobody wants the results any more."""
        ...


@contextmanager
def open_backend(config: GenerateConfig, device: torch.device, workers: int | None = None) -> Iterator[Backend]:
    """The backend for a device; its threads end with the block."""
    if device.type == "cuda":
        from brim.rf.generation.cuda import CudaBackend  # Triton is imported only where there is a GPU

        yield CudaBackend(config, device)
        return
    with CpuBackend(config, workers) as backend:
        yield backend


def make_transmissions(config: GenerateConfig, scenes: Scenes) -> Transmissions:
    """Accepted scenes with their messages and links."""
    counts = scenes.present.sum(-1)
    return Transmissions(
        scenes=scenes,
        messages=make_messages(config, scenes.index),
        links=make_links(config, scenes),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


def feature_chunks(
    config: GenerateConfig,
    grid: ft.FeatureGrid,
    spectrum: ft.SpectrumSums,
    envelope: ft.EnvelopeSums,
    floor: Tensor,
    arrival_s: Tensor,
    sigma_s: Tensor,
) -> Tensor:
    """(M, C, F) features from the sums over each chunk; the same formulas on every device."""
    snr = ft.linear_snr(spectrum.total, floor)
    named = ft.spectrum_features(spectrum, floor, noise_dbm(config)) | ft.envelope_features(envelope, snr, config, grid)
    named |= {"arrival_difference_us": arrival_s * 1e6, "arrival_sigma_us": sigma_s * 1e6}
    return torch.stack([named[name] for name, _ in ft.FEATURES], -1)


def record_power(truth: Tensor) -> Tensor:
    """(M,) realised signal power over the whole record."""
    return ft.sum_chunks(truth[..., 0]) / NUM_CHUNKS


class CpuBackend:
    """One sample at a time on each thread, every operation on one thread: the same bits for any batch or core count."""

    def __init__(self, config: GenerateConfig, workers: int | None = None) -> None:
        self.config = config
        self.grid = ft.FeatureGrid.of(config, max_baseline_m(config))
        self.noise_dbm = noise_dbm(config)
        self.impaired = is_impaired(config)
        self.threads_before = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(
            workers or worker_count(), thread_name_prefix="brim-rf", initializer=torch.set_num_threads, initargs=(1,)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        # A worker's setting becomes the default of threads started later; put that back, from a thread of its own.
        restore = Thread(target=torch.set_num_threads, args=(self.threads_before,))
        restore.start()
        restore.join()

    def limit_records(self, most: int) -> None:
        """Each thread holds one sample."""

    def abandon(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def measure(self, batch: Transmissions, *, iq: bool) -> Measured:
        futures = [self.pool.submit(self._sample, batch, row, iq) for row in range(len(batch))]
        parts = [future.result() for future in futures]
        joined: dict[str, Any] = {}
        for column in fields(Measured):
            values = [getattr(part, column.name) for part in parts]
            joined[column.name] = None if values[0] is None else torch.cat(values)
        return Measured(**joined)

    def _sample(self, batch: Transmissions, row: int, iq: bool) -> Measured:
        config, links = self.config, batch.links
        table, peak = make_table(config, batch.messages, row)
        rows = range(int(batch.starts[row]), int(batch.starts[row + 1]))
        streams, floors, cleans, records = [], [], [], []
        for m in rows:
            signal = receive(config, links, m, table, float(scale(config, peak)))
            raw = record(config, signal, int(links.index[m]), int(links.receiver[m]))
            if self.impaired:
                raw = impair(config, raw[None], links.index[m : m + 1], links.receiver[m : m + 1])[0]
            stream, floor = tune(config, raw)
            streams.append(stream)
            floors.append(floor)
            cleans.append(signal[MARGIN:-MARGIN:STREAM_STRIDE].reshape(NUM_CHUNKS, -1))
            if iq:
                records.append(raw.mul_(ft.milliwatt_units(self.noise_dbm)))
        truth = ft.measure_truth(torch.stack(cleans), self.grid)
        chunks, power = self._features(batch, row, torch.stack(streams), torch.stack(floors))
        return Measured(
            peak=torch.tensor([peak]),
            truth=truth,
            chunks=chunks,
            features=ft.aggregate(chunks),
            power=power,
            iq=torch.stack(records) if iq else None,
        )

    def _features(self, batch: Transmissions, row: int, stream: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
        """(M, C, F) features of one sample's records and (M,) their measured power."""
        bins = ft.channel_power(torch.fft.fft(stream), self.grid)
        spectrum = ft.sum_spectrum(bins, floor, self.grid)
        sums, demodulated = ft.sum_envelope(stream, self.config)
        power = ft.reference_power(spectrum)
        reference = int(power.argmax())
        limit = arrival_limit_s(self.config, batch, row, reference)
        demodulated = demodulated * ft.timing_scale(sums, self.grid)[:, None, None]
        value, sigma = ft.measure_arrival(demodulated, reference, limit, self.config, self.grid)
        heard = ft.timing_heard(spectrum, floor)
        value, sigma = ft.only_heard(value, sigma, heard & heard[reference])
        return feature_chunks(self.config, self.grid, spectrum, sums, floor, value, sigma), power


def arrival_limit_s(config: GenerateConfig, batch: Transmissions, row: int, reference: int) -> Tensor:
    """(M,) largest possible arrival difference of each record of one sample."""
    span = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
    receivers = batch.links.receiver[span]
    limits = baselines_m(batch.scenes[row : row + 1], config, receivers[reference : reference + 1])[0, receivers]
    return torch.from_numpy((limits / SPEED_OF_LIGHT + ft.lag_slack_s(config)).astype(np.float32))
