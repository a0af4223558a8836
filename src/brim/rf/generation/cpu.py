"""The CPU backend: one sample at a time on each thread, record by record; plain torch, the reference of the GPU.

Axes: M records, C chunks, F features.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Self

import numpy as np
import torch
from torch import Tensor

from brim.engine.device import worker_count
from brim.rf.config import NUM_CHUNKS, GenerateConfig
from brim.rf.features import estimators as ft
from brim.rf.generation.batch import STREAM_STRIDE, Measured, Work, feature_chunks, record_power
from brim.rf.physics.channel import receive
from brim.rf.physics.geometry import SPEED_OF_LIGHT
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.receiver import record, tune
from brim.rf.physics.scene import baselines_m, max_baseline_m
from brim.rf.physics.waveform import MARGIN, make_table, scale


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
        demodulated = demodulated * ft.timing_scale(sums, self.grid)[:, None, None]
        value, sigma = ft.measure_arrival(demodulated, reference, limit, self.config, self.grid)
        heard = ft.timing_heard(spectrum, floor)
        value, sigma = ft.only_heard(value, sigma, heard & heard[reference])
        return feature_chunks(self.config, self.grid, spectrum, sums, floor, value, sigma)


def arrival_limit_s(config: GenerateConfig, work: Work, row: int, reference: int) -> Tensor:
    """(M,) how far the arrival differences of one sample may lie from 0."""
    span = slice(int(work.starts[row]), int(work.starts[row + 1]))
    receivers = work.links.receiver[span]
    limits = baselines_m(work.scenes[row : row + 1], config, receivers[reference : reference + 1])[0, receivers]
    return torch.from_numpy((limits / SPEED_OF_LIGHT + ft.lag_slack_s(config)).astype(np.float32))
