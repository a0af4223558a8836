"""What predictors have counted, as Prometheus reads it: the newest they told, all of them together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_LOOK_S: Final = 1.0
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class PredictorMetrics(Collector):
    """Queue, batches and devices of the predictors."""

    def __init__(self) -> None:
        self._told: list[Mapping[str, Any]] = []
        self._before: list[tuple[float, float]] = []  # busy and up, at the look before the last one
        self._shares: list[float] = []

    def take(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Note what each said now."""
        times = [(float(one.get("busy_s", 0.0)), float(one.get("up_s", 0.0))) for one in told]
        before = self._before if len(self._before) == len(times) else [(0.0, 0.0)] * len(times)
        since = [now[1] - then[1] for now, then in zip(times, before, strict=True)]
        self._told = list(told)
        if any(up_s < 0 for up_s in since):  # one was started again
            before, since = [(0.0, 0.0)] * len(times), [up_s for _, up_s in times]
        if all(up_s >= _LOOK_S for up_s in since):  # else too short a while to be a share of
            self._shares = [
                min(1.0, (now[0] - then[0]) / up_s) for now, then, up_s in zip(times, before, since, strict=True)
            ]
            self._before = times

    def collect(self) -> Iterable[Metric]:
        """As the library asks for it."""
        depth = sum(int(one.get("depth", 0)) for one in self._told)
        yield GaugeMetricFamily("brim_predict_queue_depth", "Parts of requests that wait for a device.", depth)
        yield GaugeMetricFamily("brim_predictors", "Prediction processes that answer.", len(self._told))
        share = sum(self._shares) / len(self._shares) if self._shares else 0.0
        yield GaugeMetricFamily(
            "brim_predict_device_busy_share", "Of the time since the last look, devices at work on predictions.", share
        )
        busy_s = sum(float(one.get("busy_s", 0.0)) for one in self._told)
        yield CounterMetricFamily("brim_predict_device_busy_seconds", "Devices at work on predictions.", busy_s)
        yield self._batches()

    def _batches(self) -> Metric:
        counts: dict[int, int] = {}
        for one in self._told:
            for size, count in one.get("batch_sizes", {}).items():
                counts[int(size)] = counts.get(int(size), 0) + int(count)
        buckets = [
            (str(float(most)), float(sum(count for size, count in counts.items() if size <= most))) for most in _SIZES
        ]
        return HistogramMetricFamily(
            "brim_predict_batch_size",
            "Items that ran together.",
            buckets=[*buckets, ("+Inf", float(sum(counts.values())))],
            sum_value=float(sum(size * count for size, count in counts.items())),
        )
