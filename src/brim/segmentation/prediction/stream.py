"""Images in, polygons out, every stage overlapped; results in the order of the input.

    source → decode ×W → batch → forward (device) → trace (device) → unbatch → polygons ×W → the caller's for loop

The device finds the outlines (tracing.py) and the last threads make objects of them; on a CPU these threads do both.
Batches leave in another order than images came, and images of several batches are finished at once; the last step puts
them in order. All queues are bounded, so that a folder of any length runs in the same memory.
"""

import gc
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np
from torch import Tensor

from brim.engine.device import guard, worker_count
from brim.engine.meter import BUSY, INPUT, ROOM, GpuSampler, Meter, ceiling_share
from brim.engine.pipeline import Pending, Pipeline, Stage
from brim.errors import ImageError, OutOfMemory
from brim.segmentation.config import PredictConfig
from brim.segmentation.images import ImageInput, StoredImage
from brim.segmentation.images.reading import read_image
from brim.segmentation.networks import InferenceNetwork
from brim.segmentation.objects import Polygon, Prediction, Rings, to_polygons
from brim.segmentation.objects.rings import find_rings, stack, trace_all
from brim.segmentation.prediction.patches import ImageFrame, PatchBatch, cut, group, usable_tile
from brim.segmentation.prediction.scoring import ScoredImage, Scorer, TracedImage, Tracer

TRACER_SHARE = 0.375  # of the threads that decode: an image takes 9 ms to trace, and as a PNG 33 ms to decode
MAKER_SHARE = 0.125  # likewise where the device traces: what is left takes 1 ms, under the interpreter's lock
TRACED_PIXELS = 2**23  # traced together: an operation for all instead of for each, and still work for every thread
CEILING_S = 0.5  # how long the ceiling is measured
DECODED_BYTES = 2**31  # of pixels that wait between decoding and batching; one image may always pass
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Lock = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictProgress:
    """Where a run is; handed to the caller at least once a second."""

    done: int  # images, failed ones included
    failed: int
    total: int | None  # unknown for a stream
    rate: float  # images per second so far


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictReport:
    """What a run took; tuning, loading of weights and measuring the ceiling are not in it."""

    images: int  # failed ones included
    failed: int
    polygons: int
    seconds: float
    images_per_s: float
    ceiling_share: float | None  # of the same forward on a batch that stays on the device; None when nothing ran
    batch_size: int  # at the end: smaller than at the start when memory ran out
    stages: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        return asdict(self)


def predict_stream(
    network: InferenceNetwork,
    images: Iterable[ImageInput],
    config: PredictConfig,
    *,
    lock: Lock | None = None,
    progress: Callable[[PredictProgress], None] | None = None,
    on_report: Callable[[PredictReport], None] | None = None,
) -> Iterator[Prediction]:
    """Predictions of images in their order, made ahead of the caller with bounded memory.

    An image that cannot be read, does not fit or gives no finite result is a Prediction with `error` in its place; any
    other failure, of the source too, is raised after the predictions before it. `lock` is held whenever the network
    runs and never between two batches, so that several streams can share a network. `on_report` is called once, when
    the last prediction has been taken; it costs half a second for the ceiling.
    """
    run = PredictRun(network, config, lock)
    total = len(images) if isinstance(images, Sized) else None
    with GpuSampler(network.device) if on_report is not None else nullcontext() as gpu:
        yield from run.results(images, total, progress)
    if on_report is not None:
        on_report(run.report(gpu.summary() if gpu is not None else None))


def predict_one(
    network: InferenceNetwork, image: ImageInput, config: PredictConfig, *, lock: Lock | None = None
) -> Prediction:
    """Prediction of one image without any threads; what would be an `error` in a stream is raised."""
    run = PredictRun(network, config, lock)
    frames = [run.decode((0, image))]
    (done,) = [done for batch in group(frames, run.scorer.size) for done in run.scorer.forward(batch)]
    ((_, prediction),) = run.finish(run.trace([done]))
    if done.frame.failure is not None:
        raise done.frame.failure
    return prediction


class PredictRun:
    """One call: its stages and what they share; whoever batches otherwise calls decode, scorer and finish."""

    def __init__(self, network: InferenceNetwork, config: PredictConfig, lock: Lock | None) -> None:
        self.network, self.config = network, config
        self.tile = usable_tile(config.tile)
        self.overlap = config.overlap if config.overlap is None else min(config.overlap, self.tile // 2)
        self.meter, self.gate = Meter(), _Gate(DECODED_BYTES)
        self.scorer = Scorer(
            network,
            lock if lock is not None else threading.Lock(),
            batch_size=1 if config.strict else config.batch_size or 1,
            threshold=config.threshold,
            resize=config.resize,
        )
        self.tracer = Tracer(network.device, detect_holes=config.detect_holes)
        self.arrived = self.images = self.failed = self.polygons = 0

    def results(
        self, images: Iterable[ImageInput], total: int | None, progress: Callable[[PredictProgress], None] | None
    ) -> Iterator[Prediction]:
        """Every prediction in order; leaving early stops all threads."""
        tick = self._ticker(total, progress)
        self.meter.start()
        with ExitStack() as stack:
            for prediction in _ordered(self._open(stack, images, total, tick)):
                self._count(prediction)
                tick()
                yield prediction
        if self.images != self.arrived:  # never a short result without a word
            raise RuntimeError(f"{self.arrived} images came and {self.images} results left; this is a bug in brim")
        self.meter.stop()

    def _open(
        self, stack: ExitStack, images: Iterable[ImageInput], total: int | None, tick: Callable[[], None]
    ) -> Pipeline:
        """Three pipelines, each the source of the next: between them images become batches and images again."""
        num = worker_count() if total is None else max(1, min(worker_count(), total))
        decode = Stage(name="decode", work=self._admitted, workers=num, depth=num)
        forward = Stage(name="forward", work=self.scorer.forward, depth=1)
        trace = Stage(name="trace", work=self.trace, depth=1)
        share = MAKER_SHARE if self.tracer.on_device else TRACER_SHARE
        polygons = Stage(name="polygons", work=self.finish, workers=math.ceil(share * num), depth=num)
        meter = self.meter
        stack.enter_context(_quiet_opencv)
        decoded = stack.enter_context(Pipeline(enumerate(images), [decode], meter=meter, depth=num))
        batches = Pipeline(self._batches(decoded), [forward, trace], meter=meter, source_name="batch", depth=1)
        computed = stack.enter_context(batches)
        parts = self._unbatched(computed)
        finished = Pipeline(parts, [polygons], meter=meter, source_name="unbatch", depth=num, tick=tick)
        stack.enter_context(finished)
        # first of all on the way out, from the source on: a pipeline that waits for the one before it cannot be joined
        stack.callback(_close, decoded, computed)
        stack.callback(self.gate.open)
        return finished

    # The stages

    def _admitted(self, item: tuple[int, ImageInput]) -> ImageFrame:
        began_s = time.perf_counter()
        self.gate.enter(item[0])
        self._waited("decode", time.perf_counter() - began_s, ROOM)
        frame = self.decode(item)
        self.gate.add(frame)
        return frame

    def decode(self, item: tuple[int, ImageInput]) -> ImageFrame:
        index, image = item
        name = self.name(index, image)
        try:
            return _twice(lambda: self._cut(ImageFrame(index, name), image))
        except (ImageError, OutOfMemory) as failure:
            return ImageFrame(index, name, failure=failure)

    def name(self, index: int, image: ImageInput) -> str:
        """What messages and predictions call an image."""
        return str(image) if isinstance(image, str | Path | StoredImage) else f"image {index}"

    def _cut(self, frame: ImageFrame, image: ImageInput) -> ImageFrame:
        pinned = self.network.device.type == "cuda"
        pixels = read_image(image)
        return cut(frame, pixels, tile=self.tile, overlap=self.overlap, resize=self.config.resize, pinned=pinned)

    def _batches(self, decoded: Iterator[ImageFrame]) -> Iterator[PatchBatch]:
        """Batches of what was decoded; a failure comes after the images that were read before it."""
        failures: list[Exception] = []

        def frames() -> Iterator[ImageFrame]:
            try:
                for frame in self._arrivals(decoded, "batch"):
                    self.gate.leave(frame)
                    self.arrived += 1
                    yield frame
            except Exception as failure:
                failures.append(failure)

        yield from group(frames(), self.scorer.size)
        if failures:
            raise failures[0]

    def trace(self, done: list[ScoredImage]) -> list[TracedImage]:
        """Find the rings of a batch's images where the device does that."""
        began_s = time.perf_counter()
        self.tracer.wait(done)
        self._waited("trace", time.perf_counter() - began_s)
        return self.tracer.trace(done)

    def _unbatched(self, computed: Iterator[list[TracedImage]]) -> Iterator[list[TracedImage]]:
        """Images that one thread makes polygons of."""
        for traced in self._arrivals(computed, "unbatch"):
            while traced:
                num = max(1, TRACED_PIXELS // max(1, traced[0].frame.height * traced[0].frame.width))
                yield traced[:num]
                traced = traced[num:]

    def finish(self, traced: list[TracedImage]) -> list[tuple[int, Prediction]]:
        """Make the polygons of images; when they fail together, each is tried alone."""
        whole = [each for each in traced if each.frame.failure is None]
        failed = [(each.frame.index, _failed(each.frame)) for each in traced if each.frame.failure is not None]
        try:
            with guard():
                return failed + self._finished(whole)
        except (ImageError, OutOfMemory):
            pass  # the next try is outside the handler, which would keep this one's arrays alive
        return failed + [self._finish_alone(each) for each in whole]

    def rings(self, traced: TracedImage) -> Rings:
        """Rings alone, for those who make polygons elsewhere; what would be an `error` is raised."""
        if traced.frame.failure is not None:
            raise traced.frame.failure
        return _twice(lambda: self._rings(traced))

    def _rings(self, traced: TracedImage) -> Rings:
        self._check_finite(traced)
        if traced.found is not None:
            self._arrived(traced.found.pending)
            return traced.found.rings(traced.place)
        mask = self._mask(traced)
        return find_rings(stack([mask]), [self._probability(traced, mask)], self.config.detect_holes)

    def _finish_alone(self, traced: TracedImage) -> tuple[int, Prediction]:
        try:
            return _twice(lambda: self._finished([traced]))[0]
        except (ImageError, OutOfMemory) as failure:
            traced.frame.failure = failure
        return traced.frame.index, _failed(traced.frame)

    def _finished(self, traced: list[TracedImage]) -> list[tuple[int, Prediction]]:
        frames, masks = [each.frame for each in traced], [self._mask(each) for each in traced]
        return [
            (frame.index, Prediction(frame.name, frame.height, frame.width, tuple(polygons), mask))
            for frame, polygons, mask in zip(frames, self._polygons(traced, masks), masks, strict=True)
        ]

    def _polygons(self, traced: list[TracedImage], masks: list[np.ndarray]) -> Iterator[list[Polygon]]:
        """Polygons of every image; those that the device did not trace are traced here, together."""
        left = [
            (mask, self._probability(each, mask))
            for each, mask in zip(traced, masks, strict=True)
            if each.probability is not None
        ]
        here = iter(
            trace_all(*map(list, zip(*left, strict=True)), detect_holes=self.config.detect_holes) if left else []
        )
        for each in traced:
            if each.found is None:
                yield next(here)
            else:
                self._arrived(each.found.pending)
                yield to_polygons(each.found.rings(each.place))

    def _probability(self, traced: TracedImage, mask: np.ndarray) -> np.ndarray:
        """Probabilities (H, W) of an image that the device did not trace, once they are on the host."""
        assert traced.probability is not None
        return self._arrived(traced.probability)["probability"].numpy()[0, : len(mask), : mask.shape[1]]

    def _mask(self, traced: TracedImage) -> np.ndarray:
        """Mask (H, W) of an image, once it is on the host."""
        frame, host = traced.frame, self._check_finite(traced)
        # of its own: a view would keep the whole batch
        return host["mask"].numpy()[traced.row, : frame.height, : frame.width].copy()

    def _check_finite(self, traced: TracedImage) -> dict[str, Tensor]:
        """What was scored, once it is on the host, unless the network failed at this image."""
        frame = traced.frame
        assert traced.scored is not None
        host = self._arrived(traced.scored)
        if not bool(host["finite"][traced.row]):
            wider = "bf16 or fp32" if self.network.setting.precision == "fp16" else "fp32"
            raise ImageError(
                f"{frame.name}: the network's logits are not finite numbers (NaN or Inf) in {self.network.setting}; "
                f"use precision {wider}, or other weights"
            )
        return host

    def _arrived(self, pending: Pending) -> dict[str, Tensor]:
        """What is on its way to the host, once it is there."""
        began_s = time.perf_counter()
        host = pending.wait()
        self._waited("polygons", time.perf_counter() - began_s)
        return host

    # Where the time went

    def _arrivals(self, results: Iterator[_Item], stage: str) -> Iterator[_Item]:
        """Results of the pipeline before; waiting for them is not the work of this stage."""
        while True:
            began_s = time.perf_counter()
            try:
                item = next(results)
            except StopIteration:
                return
            finally:
                self._waited(stage, time.perf_counter() - began_s)
            yield item

    def _waited(self, stage: str, seconds: float, cause: str = INPUT) -> None:
        """Move seconds from a stage's work to its waiting."""
        self.meter.add(stage, seconds, cause)
        self.meter.add(stage, -seconds, BUSY)

    def _count(self, prediction: Prediction) -> None:
        self.images += 1
        self.failed += prediction.error is not None
        self.polygons += len(prediction.polygons)
        self.meter.count(1)

    def _ticker(self, total: int | None, progress: Callable[[PredictProgress], None] | None) -> Callable[[], None]:
        began_s = time.perf_counter()

        def tick() -> None:
            if progress is not None:
                rate = self.images / max(time.perf_counter() - began_s, 1e-9)
                progress(PredictProgress(done=self.images, failed=self.failed, total=total, rate=rate))

        return tick

    def report(self, gpu: dict[str, Any] | None) -> PredictReport:
        """What the run took; measures the ceiling."""
        summary = self.meter.summary()
        ceiling = self.scorer.ceiling(CEILING_S)
        # in pixels, since images may differ in size and in their number of windows
        rate = self.scorer.pixels / max(summary["seconds"], 1e-9)
        return PredictReport(
            images=self.images,
            failed=self.failed,
            polygons=self.polygons,
            seconds=summary["seconds"],
            images_per_s=summary["items_per_s"],
            ceiling_share=None if ceiling is None else ceiling_share(rate, ceiling),
            batch_size=self.scorer.size(),
            stages=summary["stages"] | ({"gpu": gpu} if gpu is not None else {}),
        )


class _Gate:
    """Bounds the bytes of decoded images that wait for their turn; the one whose turn it is may always pass."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._next = 0  # index of the image that leaves next
        self._open = False
        self._changed = threading.Condition()

    def enter(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open or index == self._next or self._held_bytes < self._limit_bytes)

    def add(self, frame: ImageFrame) -> None:
        with self._changed:
            self._held_bytes += _bytes(frame)

    def leave(self, frame: ImageFrame) -> None:
        """Account an image that goes on; they leave in order."""
        with self._changed:
            self._held_bytes -= _bytes(frame)
            self._next = frame.index + 1
            self._changed.notify_all()

    def open(self) -> None:
        """Let everybody pass, for the run is over."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


class _QuietOpenCV:
    """OpenCV without threads of its own while any run lasts: they would only compete with the workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_runs = self._num_threads = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_runs:
                self._num_threads = cv2.getNumThreads()
                cv2.setNumThreads(1)
            self._num_runs += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_runs -= 1
            if not self._num_runs:
                cv2.setNumThreads(self._num_threads)


_quiet_opencv = _QuietOpenCV()  # process-wide, as is what it sets


def _bytes(frame: ImageFrame) -> int:
    return sum(patch.pixels.nbytes for patch in frame.patches)


def _twice(work: Callable[[], _Result]) -> _Result:
    """The result of the work, tried once more when memory ran out: its neighbours may have left some since."""
    try:
        with guard():
            return work()
    except OutOfMemory:
        pass  # the second try is outside the handler, which would keep the first one's arrays alive
    gc.collect()
    with guard():
        return work()


def _failed(frame: ImageFrame) -> Prediction:
    return Prediction(frame.name, frame.height, frame.width, error=str(frame.failure))


def _ordered(finished: Iterable[list[tuple[int, Prediction]]]) -> Iterator[Prediction]:
    early: dict[int, Prediction] = {}
    following = 0
    for results in finished:
        early.update(results)
        while following in early:
            yield early.pop(following)
            following += 1


def _close(*pipelines: Pipeline) -> None:
    for pipeline in pipelines:
        pipeline.__exit__(None, None, None)
