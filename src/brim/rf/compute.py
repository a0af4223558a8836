"""From scenes to tensors: the same work as cache-sized tiles over CPU threads or as packed kernels on a GPU.

Axes: B samples, R receivers, M packed records, C chunks, F features.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Thread
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.engine.device import resolve_device, worker_count
from brim.rf import features as ft
from brim.rf.bound import crlb_m
from brim.rf.channel import Links, make_links, receive
from brim.rf.config import NUM_CHUNKS, GenerateConfig
from brim.rf.geometry import SPEED_OF_LIGHT
from brim.rf.link import noise_dbm
from brim.rf.receiver import record, tune
from brim.rf.scene import Scenes, baselines_m, make_scenes, max_baseline_m
from brim.rf.waveform import MARGIN, TABLE_HZ, Messages, make_messages, make_table, rms_frequency_hz, scale

TRUTH: tuple[tuple[str, str], ...] = (
    ("power_dbm", "dBm"),
    ("snr_db", "dB"),
    ("rssi_dbm", "dBm"),
    ("bandwidth_hz", "Hz"),
    ("power_record_dbm", "dBm"),
    ("snr_record_db", "dB"),
    ("link_power_dbm", "dBm"),
    ("link_snr_db", "dB"),
    ("noise_dbm", "dBm"),
    ("delay_s", "s"),
    ("clock_error_s", "s"),
    ("arrival_difference_us", "us"),
    ("frequency_offset_hz", "Hz"),
    ("distance_m", "m"),
    ("loss_db", "dB"),
    ("shadowing_db", "dB"),
    ("doppler_hz", "Hz"),
    ("coherence_time_s", "s"),
    ("delay_spread_us", "us"),
    ("rms_frequency_hz", "Hz"),
)
TRUTH_CHUNKS: tuple[tuple[str, str], ...] = (
    ("power_dbm", "dBm"),
    ("snr_db", "dB"),
    ("rssi_dbm", "dBm"),
    ("bandwidth_hz", "Hz"),
)
STREAM_STRIDE = TABLE_HZ // 25_000  # points of the channel at 50 kHz per point of the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A batch ready to compute: accepted scenes, what is said, and the packed links."""

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
    """What the device made of a batch, packed by record."""

    peak: Tensor  # (B,) float32, of each message
    truth: Tensor  # (M, C, 2) float32: power in the channel, in units of its noise; occupied bandwidth in Hz
    features: Tensor  # (M, F, 4) float32
    chunks: Tensor | None = None  # (M, C, F) float32
    iq: Tensor | None = None  # (M, N) complex64, in sqrt(mW)

    def to(self, device: str) -> Self:
        """The same on another device."""
        return type(self)(
            peak=self.peak.to(device),
            truth=self.truth.to(device),
            features=self.features.to(device),
            chunks=None if self.chunks is None else self.chunks.to(device),
            iq=None if self.iq is None else self.iq.to(device),
        )


class Backend(Protocol):
    """A device that turns work into measurements."""

    def measure(self, work: Work, *, iq: bool) -> Measured:
        """Signals, noise and features of a batch, on the device; may return before the device is done."""
        ...


def make_work(config: GenerateConfig, scenes: Scenes) -> Work:
    """Prepare accepted scenes for a device."""
    counts = scenes.present.sum(-1)
    return Work(
        scenes=scenes,
        messages=make_messages(config, scenes.index),
        links=make_links(config, scenes),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


class CpuBackend:
    """One sample at a time on each thread, every operation on one thread: the same bits for any batch or core count."""

    def __init__(self, config: GenerateConfig, workers: int | None = None) -> None:
        self.config = config
        self.grid = ft.Grid.of(config, max_baseline_m(config))
        self.noise_dbm = noise_dbm(config)
        self.threads_before = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(
            workers or worker_count(),
            thread_name_prefix="brim-rf",
            initializer=torch.set_num_threads,
            initargs=(1,),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        # A worker's setting becomes the default of threads started later; put that back, from a thread of its own.
        restore = Thread(target=torch.set_num_threads, args=(self.threads_before,))
        restore.start()
        restore.join()

    def measure(self, work: Work, *, iq: bool) -> Measured:
        """Signals, noise and features of a batch."""
        futures = [self.pool.submit(self._sample, work, row, iq) for row in range(len(work))]
        parts = [future.result() for future in futures]
        return Measured(
            peak=torch.cat([p.peak for p in parts]),
            truth=torch.cat([p.truth for p in parts]),
            features=torch.cat([p.features for p in parts]),
            chunks=torch.cat([p.chunks for p in parts if p.chunks is not None]),
            iq=torch.cat([p.iq for p in parts if p.iq is not None]) if iq else None,
        )

    def _sample(self, work: Work, row: int, iq: bool) -> Measured:
        config, links = self.config, work.links
        table, peak = make_table(config, work.messages, row)
        rows = range(int(work.starts[row]), int(work.starts[row + 1]))
        streams, floors, cleans, records = [], [], [], []
        for m in rows:
            signal = receive(config, links, m, table, float(scale(config, peak)))
            raw = record(config, signal, int(links.index[m]), int(links.receiver[m]))
            stream, floor = tune(config, raw)
            streams.append(stream)
            floors.append(floor)
            cleans.append(signal[MARGIN:-MARGIN:STREAM_STRIDE].reshape(NUM_CHUNKS, -1))
            if iq:
                records.append(raw.mul_(ft.milliwatt_units(self.noise_dbm)))
        truth = ft.measure_truth(torch.stack(cleans), self.grid)
        chunks = self._features(work, row, torch.stack(streams), torch.stack(floors), truth)
        return Measured(
            peak=torch.tensor([peak]),
            truth=truth,
            chunks=chunks,
            features=ft.aggregate(chunks),
            iq=torch.stack(records) if iq else None,
        )

    def _features(self, work: Work, row: int, stream: Tensor, floor: Tensor, truth: Tensor) -> Tensor:
        power = ft.channel_power(torch.fft.fft(stream), self.grid)
        spectrum = ft.sum_spectrum(power, floor, self.grid)
        sums, demodulated = ft.sum_envelope(stream, self.config)
        reference = int(record_power(truth).argmax())
        limit = arrival_limit_s(self.config, work, row, reference)
        value, sigma = ft.measure_arrival(demodulated, reference, limit, self.config, self.grid)
        return feature_chunks(self.config, self.grid, spectrum, sums, floor, value, sigma)


def feature_chunks(
    config: GenerateConfig,
    grid: ft.Grid,
    spectrum: ft.SpectrumSums,
    envelope: ft.EnvelopeSums,
    floor: Tensor,
    arrival_s: Tensor,
    sigma_s: Tensor,
) -> Tensor:
    """(M, C, F) from what a device reduced its chunks to; the same formulas on every device."""
    snr = ft.linear_snr(spectrum.total, floor)
    named = ft.spectrum_features(spectrum, floor, noise_dbm(config)) | ft.envelope_features(envelope, snr, config, grid)
    named |= {"arrival_difference_us": arrival_s * 1e6, "arrival_sigma_us": sigma_s * 1e6}
    return torch.stack([named[name] for name, _ in ft.FEATURES], -1)


def record_power(truth: Tensor) -> Tensor:
    """(M,) realised signal power over the whole record; chunks are added one by one, in order."""
    parts = truth[..., 0].unbind(-1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(parts)


def arrival_limit_s(config: GenerateConfig, work: Work, row: int, reference: int) -> Tensor:
    """(M,) how far the arrival differences of one sample may lie from 0."""
    span = slice(int(work.starts[row]), int(work.starts[row + 1]))
    receivers = work.links.receiver[span]
    limits = baselines_m(work.scenes[row : row + 1], config, receivers[reference : reference + 1])[0, receivers]
    return torch.from_numpy((limits / SPEED_OF_LIGHT + ft.lag_slack_s(config)).astype(np.float32))


def assemble(config: GenerateConfig, work: Work, measured: Measured, *, chunks: bool = False) -> dict[str, Tensor]:
    """Rows of the dataset: packed measurements laid out over the padded receiver axis, with truth and bounds."""
    scenes, pick = work.scenes, (work.links.sample, work.links.receiver)
    shape = scenes.valid.shape
    power = np.zeros((*shape, NUM_CHUNKS))
    bandwidth = np.zeros((*shape, NUM_CHUNKS))
    power[pick], bandwidth[pick] = (measured.truth[..., k].double().numpy() for k in range(2))
    beta = rms_frequency_hz(config, work.messages, measured.peak.double().numpy())
    whole = np.zeros(shape)
    whole[pick] = record_power(measured.truth).double().numpy()
    reference = whole.argmax(-1)
    truth, truth_chunks = _truth(config, scenes, power, bandwidth, whole, reference, beta)
    out = {
        "features": _padded(measured.features, pick, shape),
        "valid": torch.from_numpy(scenes.valid),
        "present": torch.from_numpy(scenes.present),
        "receivers": torch.from_numpy(scenes.receivers),
        "transmitter": torch.from_numpy(scenes.transmitter),
        "truth": truth,
        "reference": torch.from_numpy(reference),
        "gdop": torch.from_numpy(scenes.gdop.astype(np.float32)),
        "crlb_m": torch.from_numpy(crlb_m(config, scenes, beta).astype(np.float32)),
        "index": torch.from_numpy(scenes.index),
    }
    if measured.iq is not None:
        out["iq"] = _padded(measured.iq, pick, shape)
    if chunks and measured.chunks is not None:
        out["features_chunks"] = _padded(measured.chunks, pick, shape)
        out["truth_chunks"] = truth_chunks
    return out


def _padded(packed: Tensor, pick: tuple[NDArray[np.int64], NDArray[np.int64]], shape: tuple[int, ...]) -> Tensor:
    out = torch.zeros(*shape, *packed.shape[1:], dtype=packed.dtype)
    out[torch.from_numpy(pick[0]), torch.from_numpy(pick[1])] = packed
    return out


def _truth(
    config: GenerateConfig,
    scenes: Scenes,
    power: NDArray[np.float64],
    bandwidth: NDArray[np.float64],
    whole: NDArray[np.float64],
    reference: NDArray[np.int64],
    beta: NDArray[np.float64],
) -> tuple[Tensor, Tensor]:
    """(B, R, k) and (B, R, C, 4): link values for every valid receiver, realised ones for the present."""
    floor, here = noise_dbm(config), scenes.present
    snr_chunks = 10 * np.log10(np.maximum(power, 1e-30))
    per_chunk = np.stack([snr_chunks + floor, snr_chunks, 10 * np.log10(power + 1) + floor, bandwidth], -1)
    per_chunk[~here] = 0
    record_snr = 10 * np.log10(np.maximum(whole, 1e-30))
    arrival = scenes.delay_s + scenes.clock_error_s
    later = arrival - arrival[np.arange(len(scenes)), reference][:, None]
    share = scenes.path_power
    mean = (share * scenes.echo_delay_s).sum(-1)
    spread = np.sqrt(np.maximum((share * scenes.echo_delay_s**2).sum(-1) - mean**2, 0))
    columns = {name: per_chunk[..., k].mean(-1) for k, (name, _) in enumerate(TRUTH_CHUNKS)}
    columns |= {
        "power_record_dbm": np.where(here, record_snr + floor, 0),
        "snr_record_db": np.where(here, record_snr, 0),
        "link_power_dbm": scenes.power_dbm,
        "link_snr_db": scenes.snr_db,
        "noise_dbm": np.full(here.shape, floor),
        "delay_s": scenes.delay_s,
        "clock_error_s": scenes.clock_error_s,
        "arrival_difference_us": np.where(here, later * 1e6, 0),
        "frequency_offset_hz": scenes.frequency_offset_hz,
        "distance_m": scenes.range_m,
        "loss_db": scenes.loss_db,
        "shadowing_db": scenes.shadowing_db,
        "doppler_hz": scenes.doppler_hz,
        "coherence_time_s": scenes.coherence_time_s,
        "delay_spread_us": spread * 1e6,
        "rms_frequency_hz": np.broadcast_to(beta[:, None], here.shape),
    }
    stacked = np.stack([columns[name] for name, _ in TRUTH], -1)
    stacked[~scenes.valid] = 0
    return torch.from_numpy(stacked.astype(np.float32)), torch.from_numpy(per_chunk.astype(np.float32))


@contextmanager
def open_backend(config: GenerateConfig, device: torch.device, workers: int | None = None) -> Iterator[Backend]:
    """The backend for a device; its threads end with the block."""
    if device.type == "cuda":
        from brim.rf.cuda import CudaBackend  # Triton is imported only where there is a GPU

        yield CudaBackend(config, device)
        return
    with CpuBackend(config, workers) as backend:
        yield backend


def generate_batch(
    config: GenerateConfig,
    indices: NDArray[np.int64] | Tensor | list[int] | range,
    device: torch.device | str = "auto",
    *,
    chunks: bool = False,
) -> dict[str, Tensor]:
    """Rows of the accepted ones among the given attempts, in the order given, without touching the disk."""
    index = np.asarray(indices, np.int64).reshape(-1)
    scenes = make_scenes(config, index)
    work = make_work(config, scenes[np.nonzero(scenes.accepted)[0]])
    iq = config.dataset_type == "iq_raw"
    if not len(work):
        return assemble(config, work, _nothing(config, iq=iq), chunks=chunks)
    with open_backend(config, resolve_device(str(device))) as backend:
        return assemble(config, work, backend.measure(work, iq=iq).to("cpu"), chunks=chunks)


def _nothing(config: GenerateConfig, *, iq: bool) -> Measured:
    """The measurements of no records."""
    return Measured(
        peak=torch.empty(0),
        truth=torch.empty(0, NUM_CHUNKS, 2),
        features=torch.empty(0, len(ft.FEATURES), len(ft.STATISTICS)),
        chunks=torch.empty(0, NUM_CHUNKS, len(ft.FEATURES)),
        iq=torch.empty(0, config.num_samples_iq, dtype=torch.complex64) if iq else None,
    )
