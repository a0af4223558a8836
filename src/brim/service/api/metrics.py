"""Metrics for Prometheus, and the outermost layer of the application, which counts, logs and sets headers.

The log has the route's pattern, never ids or the query, which may hold a token.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from brim.errors import Unavailable
from brim.jobs.status import STATUSES
from brim.service.access import SHARED, Actions
from brim.service.api.errors import INTERNAL, send_problem, template
from brim.service.settings import DASHBOARD

log = logging.getLogger("brim.service.access")

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PAGES: Final = "(dashboard)"  # route of all pages and their files
CSP: Final = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
_CHANGES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_UNNOTED: Final = ("/api/training/jobs/validate", "/api/segment", "/api/batch-segment", "/api/classify", "/api/locate")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STAGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0)
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", CSP.encode()),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


_INTERVAL_S: Final = 1.0
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServiceMetrics:
    """Counters of one API, in a registry of its own.

    With several API processes the library keeps them in the files of PROMETHEUS_MULTIPROC_DIR, and each process
    answers with the sum; gauges are those of the process that answers.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self._requests = Counter("brim_http_requests", "Requests answered.", labels, registry=registry)
        self._seconds = Histogram(
            "brim_http_request_seconds", "From a request to the first byte of its answer.", ("route",),
            buckets=_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._predicted = Counter(
            "brim_predict_requests", "Prediction requests by status.", ("model", "status"), registry=registry
        )
        self._rejected = Counter(
            "brim_predict_rejected", "Requests without a prediction, by reason.", ("reason",), registry=registry
        )
        self._stages = Histogram(
            "brim_predict_seconds",
            "Seconds of a prediction by stage.",
            ("stage",),
            buckets=_STAGES_S,
            registry=registry,
        )
        self._jobs = self._gauge("brim_jobs", "Jobs by status.", "status")
        self._streams = self._gauge("brim_event_streams", "Event streams that are open.")
        self._free = self._gauge("brim_free_bytes", "Free bytes where the data lies.")
        self._workers = self._gauge("brim_workers", "Workers that have reported their device.")
        self._database = self._gauge("brim_database_up", "Whether the catalogue answers.")
        self._predictors = PredictorMetrics()
        self._shown = registry
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown)  # type: ignore[no-untyped-call]
        self._shown.register(self._predictors)

    def _gauge(self, name: str, words: str, *labels: str) -> Gauge:
        return Gauge(name, words, labels, registry=self._registry, multiprocess_mode="mostrecent")

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method if method in _METHODS else "other", route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def predicted(self, model: str, status: str) -> None:
        """Count one request for predictions; model is a registered one, or empty."""
        self._predicted.labels(model, status).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def stages(self, seconds: Mapping[str, float]) -> None:
        for stage, value in seconds.items():
            self._stages.labels(stage).observe(value)

    def render(
        self,
        counts: Callable[[], Mapping[str, int]],
        workers: Callable[[], int],
        *,
        streams: int,
        free_bytes: int,
        predictors: Sequence[Mapping[str, Any]] = (),
    ) -> bytes:
        """The exposition text; a catalogue that does not answer is itself a metric."""
        self._predictors.update(predictors)
        self._streams.set(streams)
        self._free.set(free_bytes)
        try:
            num_jobs = counts()
            for status in STATUSES:
                self._jobs.labels(status).set(num_jobs.get(status, 0))
            self._workers.set(workers())
            self._database.set(1)
        except Unavailable:
            self._database.set(0)
        return generate_latest(self._shown)


class PredictorMetrics(Collector):
    """Queue, batches and devices of the predictors, summed over them."""

    def __init__(self) -> None:
        self._snapshots: list[Mapping[str, Any]] = []
        self._before: list[tuple[float, float]] = []  # busy and up at the last update of the shares
        self._shares: list[float] = []

    def update(self, snapshots: Sequence[Mapping[str, Any]]) -> None:
        """Take what each predictor has counted by now."""
        times = [(float(one.get("busy_s", 0.0)), float(one.get("up_s", 0.0))) for one in snapshots]
        before = self._before if len(self._before) == len(times) else [(0.0, 0.0)] * len(times)
        since = [now[1] - then[1] for now, then in zip(times, before, strict=True)]
        self._snapshots = list(snapshots)
        if any(up_s < 0 for up_s in since):  # a predictor was restarted
            before, since = [(0.0, 0.0)] * len(times), [up_s for _, up_s in times]
        if all(up_s >= _INTERVAL_S for up_s in since):  # a shorter time gives no meaningful share
            self._shares = [
                min(1.0, (now[0] - then[0]) / up_s) for now, then, up_s in zip(times, before, since, strict=True)
            ]
            self._before = times

    def collect(self) -> Iterable[Metric]:
        depth = sum(int(one.get("depth", 0)) for one in self._snapshots)
        yield GaugeMetricFamily("brim_predict_queue_depth", "Parts of requests that wait for a device.", depth)
        yield GaugeMetricFamily("brim_predictors", "Prediction processes that answer.", len(self._snapshots))
        share = sum(self._shares) / len(self._shares) if self._shares else 0.0
        yield GaugeMetricFamily(
            "brim_predict_device_busy_share", "Share of the time since the last scrape, devices predicting.", share
        )
        busy_s = sum(float(one.get("busy_s", 0.0)) for one in self._snapshots)
        yield CounterMetricFamily("brim_predict_device_busy_seconds", "Time that devices were predicting.", busy_s)
        yield self._batches()

    def _batches(self) -> Metric:
        counts: dict[int, int] = {}
        for one in self._snapshots:
            for size, count in one.get("batch_sizes", {}).items():
                counts[int(size)] = counts.get(int(size), 0) + int(count)
        buckets = [
            (str(float(most)), float(sum(count for size, count in counts.items() if size <= most))) for most in _SIZES
        ]
        return HistogramMetricFamily(
            "brim_predict_batch_size",
            "Items in a batch.",
            buckets=[*buckets, ("+Inf", float(sum(counts.values())))],
            sum_value=float(sum(size * count for size, count in counts.items())),
        )


class Observed:
    """Counts and logs every answer, adds common headers, and answers 500 for uncaught exceptions."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics, actions: Actions) -> None:
        self._app, self._metrics, self._actions = app, metrics, actions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, _headed(scope, send))
        began_s = time.perf_counter()
        answered = False

        async def watched(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                message = {**message, "headers": _with_headers(scope["path"], message.get("headers", ()))}
                self._note(scope, message["status"], time.perf_counter() - began_s)
                self._note_action(scope, message)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if answered:  # the framework has answered and logged it
                return None
            log.exception("internal error before any route")
            await send_problem(watched, 500, INTERNAL)
        return None

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = template(scope)
        self._metrics.answered(scope["method"], route, status, seconds)
        is_page = route == PAGES or (b"user-agent", DASHBOARD.encode()) in scope["headers"]
        # a page is dozens of files, and polls every second
        level = logging.DEBUG if is_page and status < 400 else logging.INFO
        actor = scope.get("actor")
        by = f" {actor.name}" if actor is not None and actor.name != SHARED else ""
        log.log(level, "%s %s %d %.1f ms%s", scope["method"][:20], route, status, 1e3 * seconds, by)

    def _note_action(self, scope: Scope, message: Message) -> None:
        """Log what changes something; predictions and checks change nothing."""
        actor, route = scope.get("actor"), scope.get("route")
        is_change = scope["method"] in _CHANGES and scope["path"].startswith("/api/")
        if actor is None or not is_change or scope["path"] in _UNNOTED:
            return
        made = dict(message.get("headers", ())).get(b"location", b"").decode("latin-1")
        action = getattr(route, "summary", None) or scope["method"]
        self._actions.note(actor.name, actor.role, action, about=made or scope["path"], status=message["status"])


def _headed(scope: Scope, send: Send) -> Send:
    """Adds the headers that all answers have to the rejection of a WebSocket."""

    async def headed(message: Message) -> None:
        if message["type"] == "websocket.http.response.start":
            message = {**message, "headers": _with_headers(scope["path"], message.get("headers", ()))}
        await send(message)

    return headed


def _with_headers(path: str, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The answer's headers with ours, where it has not set its own."""
    present = list(headers)
    names = {name.lower() for name, _ in present}
    may_be_cached = path.startswith("/docs/")  # files of the documentation
    ours = [*_HEADERS] if may_be_cached else [*_HEADERS, (b"cache-control", b"no-store")]
    return present + [(name, value) for name, value in ours if name not in names]
