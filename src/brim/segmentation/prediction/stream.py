"""Images in, polygons out, with all stages overlapped and results in the order of the input.

    source → decode ×W → batch → forward (device) → trace (device) → unbatch → polygons ×W → the caller's for loop

A GPU finds the outlines (scoring.py) and the last threads convert them; on a CPU these threads do both. Batches finish
in another order than images arrive, so the last step sorts. All queues are bounded: memory does not grow with the
number of images.
"""

import gc
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
from torch import Tensor

from brim.engine.device import guard, worker_count
from brim.engine.meter import BUSY, INPUT, ROOM, CeilingProbe, GpuSampler, Meter, Spent, current_account
from brim.engine.pipeline import Pending, Pipeline, Stage
from brim.errors import ImageError, OutOfMemory
from brim.segmentation.config import PredictConfig
from brim.segmentation.images import ImageInput, StoredImage
from brim.segmentation.images.reading import read_picture
from brim.segmentation.networks import InferenceNetwork
from brim.segmentation.objects import ImageObjects, Prediction, to_polygons, without_small
from brim.segmentation.objects.rings import find_rings
from brim.segmentation.prediction.instances import InstanceTracer
from brim.segmentation.prediction.patches import ImageFrame, PatchBatch, group, prepare, usable_tile
from brim.segmentation.prediction.scoring import ScoredImage, Scorer, TracedImage, Tracer

TRACER_SHARE = 0.375  # of the decoding threads: tracing an image takes 9 ms, decoding it as a PNG 33 ms
MAKER_SHARE = 0.125  # likewise if the device traces: the rest takes 1 ms, under the interpreter lock
TRACED_PIXELS = 2**23  # traced together: fewer operations, and still work for every thread
WRITER_SHARE = 0.5  # likewise if they also write files
CEILING_S = 0.03  # how long the ceiling is measured, each time
DECODED_BYTES = 2**31  # of pixels that wait between decoding and batching; one image is always admitted
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Lock = AbstractContextManager[Any]
MakePrediction = Callable[[ImageFrame, ImageObjects], Prediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictProgress:
    """The state of a run; passed to the caller at least once a second."""

    done: int  # images, failed ones included
    failed: int
    total: int | None  # unknown for a stream
    rate: float  # images per second so far
    share: float = 0.0  # of an image that is predicted by tile


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictReport:
    """Figures of a run, without tuning, loading weights and measuring the ceiling."""

    images: int  # failed ones included
    failed: int
    polygons: int
    seconds: float
    images_per_s: float
    ceiling_share: float | None  # of the forward alone, timed between batches; None: not known
    batch_size: int  # at the end; halved whenever memory ran out
    stages: dict[str, Any]
    ceiling_spread: float | None = None  # standard deviation of ceiling_share between measurements
    ceiling_words: str = "ceiling not measured"
    spent: Spent | None = None  # of the whole command; None: called from Python

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["ceiling_words"], values["spent"]
        return values | (self.spent.as_dict() if self.spent is not None else {})

    def with_image(self, polygons: int, seconds: float) -> "PredictReport":
        """With one more image, predicted by tile."""
        images, seconds = self.images + 1, self.seconds + seconds
        return replace(
            self, images=images, polygons=self.polygons + polygons, seconds=seconds,
            images_per_s=images / max(seconds, 1e-9),
        )  # fmt: skip


def predict_stream(
    network: InferenceNetwork,
    images: Iterable[ImageInput],
    config: PredictConfig,
    *,
    lock: Lock | None = None,
    progress: Callable[[PredictProgress], None] | None = None,
    on_report: Callable[[PredictReport], None] | None = None,
    make: MakePrediction | None = None,
    contrast: tuple[float, float] | None = None,
) -> Iterator[Prediction]:
    """Predictions of images in their order, computed ahead of the caller in bounded memory.

    An image that cannot be read, does not fit or has logits that are not finite gives a Prediction with `error`. Any
    other failure, also of the source, is raised after the predictions that precede it. `lock` is held while the
    network runs and released between batches, so that several streams can share a network. `on_report` is called once
    after the last prediction. `make` converts the objects of an image in one of several threads, and may write them:
    they leave with what it returns. contrast is that of all images.
    """
    share = WRITER_SHARE if make else None
    run = PredictRun(network, config, lock, make=make or prediction_of, maker_share=share, contrast=contrast)
    with GpuSampler(network.device) if on_report is not None else nullcontext() as gpu:
        yield from run.results(images, progress)
    if on_report is not None:
        on_report(run.report(gpu.summary() if gpu is not None else None))


def predict_one(
    network: InferenceNetwork, image: ImageInput, config: PredictConfig, *, lock: Lock | None = None
) -> Prediction:
    """Prediction of one image without threads; raises what would be an `error` in a stream."""
    run = PredictRun(network, config, lock)
    frames = [run.decode((0, image))]
    (scored,) = [scored for batch in group(frames, run.scorer.size) for scored in run.scorer.forward(batch)]
    (traced,) = run.trace([scored])
    return run.finish_one(traced, prediction_of)


def prediction_of(frame: ImageFrame, objects: ImageObjects) -> Prediction:
    if objects.mask is None:
        assert objects.labels is not None
        mask = (objects.labels > 0) * np.uint8(255)
    else:
        mask = objects.mask.copy()  # the view would keep the whole batch alive
    polygons, size = tuple(to_polygons(objects.rings)), (frame.height, frame.width)
    return Prediction(frame.name, *size, polygons, mask, None, objects.labels, objects.measurements, frame.pixel_um)


class PredictRun:
    """The stages of one call; a server batches on its own and calls decode, scorer, trace and finish_one."""

    def __init__(
        self,
        network: InferenceNetwork,
        config: PredictConfig,
        lock: Lock | None,
        *,
        make: MakePrediction = prediction_of,
        names: Sequence[str] | None = None,
        maker_share: float | None = None,
        contrast: tuple[float, float] | None = None,
    ) -> None:
        """make converts the objects of an image; names replace those of the images.

        maker_share is the number of threads that call make, relative to those that decode.
        """
        self._network, self._config, self._make, self._names = network, config, make, names
        self._contrast = contrast
        self._tile = usable_tile(config.tile)
        self._overlap = config.overlap if config.overlap is None else min(config.overlap, self._tile // 2)
        self._meter, self._gate, self._probe = Meter(), _Gate(DECODED_BYTES), CeilingProbe()
        lock = lock if lock is not None else threading.Lock()
        self.scorer = Scorer(
            network,
            lock,
            batch_size=1 if config.strict else config.batch_size or 1,
            threshold=config.threshold,
            resize=config.resize,
        )
        self.tracer: Tracer | InstanceTracer
        if network.traits.task == "instances":
            self.tracer = InstanceTracer(network, lock, config, self.scorer.size)
        else:
            self.tracer = Tracer(network.device, detect_holes=config.detect_holes)
        self._maker_share = maker_share
        self._arrived = self._images = self._failed = self._polygons = 0

    def results(
        self, images: Iterable[ImageInput], progress: Callable[[PredictProgress], None] | None = None
    ) -> Iterator[Prediction]:
        """Every prediction in order; leaving early stops all threads."""
        total = len(images) if isinstance(images, Sized) else None
        began_s = time.perf_counter()

        def tick() -> None:
            if progress is not None:
                rate = self._images / max(time.perf_counter() - began_s, 1e-9)
                progress(PredictProgress(done=self._images, failed=self._failed, total=total, rate=rate))

        self._meter.start()
        with ExitStack() as stack:
            for prediction, num in _ordered(self._open(stack, images, total, tick)):
                self._images += 1
                self._failed += prediction.error is not None
                self._polygons += num
                self._meter.count(1)
                tick()
                yield prediction
        if self._images != self._arrived:  # never end short without an error
            raise RuntimeError(f"{self._arrived} images came and {self._images} results left; this is a bug in brim")
        self._meter.stop()

    def _open(
        self, stack: ExitStack, images: Iterable[ImageInput], total: int | None, tick: Callable[[], None]
    ) -> Pipeline:
        """Three pipelines, each the source of the next: images to batches to images."""
        num = worker_count() if total is None else max(1, min(worker_count(), total))
        share = max(MAKER_SHARE if self.tracer.on_device else TRACER_SHARE, self._maker_share or 0)
        decode = Stage(name="decode", work=self._admit, workers=num, depth=num)
        forward = Stage(name="forward", work=self._forward, depth=1)
        trace = Stage(name="trace", work=self.trace, depth=1)
        polygons = Stage(name="polygons", work=self._finish, workers=math.ceil(share * num), depth=num)
        meter = self._meter
        stack.enter_context(_quiet_opencv)
        decoded = Pipeline(enumerate(images), [decode], meter=meter, depth=num)
        batches = group(self._frames(decoded), self.scorer.size)
        computed = Pipeline(batches, [forward, trace], meter=meter, source_name="batch", depth=1)
        parts = self._unbatched(computed)
        finished = Pipeline(parts, [polygons], meter=meter, source_name="unbatch", depth=num, tick=tick)
        for pipeline in (decoded, computed, finished):
            stack.enter_context(pipeline)
        # Leave from the source on: a pipeline that waits for the one before it cannot be joined.
        stack.callback(computed.__exit__)
        stack.callback(decoded.__exit__)
        stack.callback(self._gate.open)
        return finished

    # The stages

    def _admit(self, item: tuple[int, ImageInput]) -> ImageFrame:
        began_s = time.perf_counter()
        self._gate.enter(item[0])
        self._count_wait("decode", began_s, ROOM)
        frame = self.decode(item)
        self._gate.add(frame)
        return frame

    def decode(self, item: tuple[int, ImageInput]) -> ImageFrame:
        """Read an image and cut it into patches; item is its index and the image."""
        index, image = item
        name = str(image) if isinstance(image, str | Path | StoredImage) else f"image {index}"
        name = self._names[index] if self._names is not None else name
        pinned, resize, traits = self._network.device.type == "cuda", self._config.resize, self._network.traits

        def work() -> ImageFrame:
            picture = read_picture(image, planes=self._config)
            measured = picture.measured if traits.task == "instances" else None
            frame = ImageFrame(index, name, pixel_um=picture.pixel_um, measured=measured)
            return prepare(
                frame, picture.pixels, traits, self._config.diameter, self._contrast, tile=self._tile,
                overlap=self._overlap, resize=resize, pinned=pinned,
            )  # fmt: skip

        try:
            return _twice(work)
        except (ImageError, OutOfMemory) as failure:
            return ImageFrame(index, name, failure=failure)

    def _frames(self, decoded: Iterator[ImageFrame]) -> Iterator[ImageFrame]:
        for frame in self._arrivals(decoded, "batch"):
            self._gate.leave(frame)
            self._arrived += 1
            yield frame

    def _forward(self, batch: PatchBatch) -> list[ScoredImage]:
        """Score a batch; now and then the forward alone is timed, while nothing else is on the device."""
        scored, spent = self.scorer.forward(batch), self._meter.stage("forward")
        run_s, mean_s = self._meter.seconds - self._probe.cost_s, spent["busy_s"] / max(1, spent["items"])
        if self._probe.due(run_s, max(CEILING_S, mean_s)):
            began_s = time.perf_counter()
            rate = self.scorer.ceiling(CEILING_S)
            if rate is not None:
                self._probe.add(rate, time.perf_counter() - began_s, run_s)
                self._count_wait("forward", began_s, "ceiling")
        return scored

    def trace(self, scored: list[ScoredImage]) -> list[TracedImage]:
        """Find the rings of a batch's images, if the device does that."""
        began_s = time.perf_counter()
        self.tracer.wait(scored)
        self._count_wait("trace", began_s)
        return self.tracer.trace(scored)

    def _unbatched(self, computed: Iterator[list[TracedImage]]) -> Iterator[list[TracedImage]]:
        """Parts of batches, each finished by one thread."""
        for traced in self._arrivals(computed, "unbatch"):
            while traced:
                num = max(1, TRACED_PIXELS // max(1, traced[0].frame.height * traced[0].frame.width))
                yield traced[:num]
                traced = traced[num:]

    def _finish(self, traced: list[TracedImage]) -> list["_Finished"]:
        """Images together; if they fail, each is tried alone."""
        failed = [
            _Finished(each.frame.index, _failed(each.frame), 0) for each in traced if each.frame.failure is not None
        ]
        whole = [each for each in traced if each.frame.failure is None]
        try:
            with guard():
                objects = zip(whole, self._objects(whole), strict=True)
                return failed + [self._finished(each.frame, own) for each, own in objects]
        except (ImageError, OutOfMemory):
            pass  # the next try is outside the handler, which would keep this one's arrays alive
        for each in whole:
            try:
                failed.append(self.finish_one(each, self._finished))
            except (ImageError, OutOfMemory) as failure:
                each.frame.failure = failure
                failed.append(_Finished(each.frame.index, _failed(each.frame), 0))
        return failed

    def _finished(self, frame: ImageFrame, objects: ImageObjects) -> "_Finished":
        return _Finished(frame.index, self._make(frame, objects), objects.rings.num_outlines)

    def finish_one(self, traced: TracedImage, make: Callable[[ImageFrame, ImageObjects], _Result]) -> _Result:
        """What make returns for frame and objects of one image; raises if the image failed."""
        if traced.frame.failure is not None:
            raise traced.frame.failure
        return _twice(lambda: make(traced.frame, self._objects([traced])[0]))

    def _objects(self, traced: list[TracedImage]) -> list[ImageObjects]:
        """The objects of each image; images that the device did not trace are traced here, together."""
        if isinstance(self.tracer, InstanceTracer):
            return [self._instances(each) for each in traced]
        masks = [self._mask(each) for each in traced]
        left = [(mask, each.probability) for each, mask in zip(traced, masks, strict=True) if each.probability]
        probabilities = [
            self._wait(pending)["probability"].numpy()[0, : len(mask), : mask.shape[1]] for mask, pending in left
        ]
        here = iter(find_rings([mask for mask, _ in left], probabilities, detect_holes=self._config.detect_holes))
        rings = []
        for each in traced:
            if each.rings is not None:
                self._wait(each.rings.pending)
            rings.append(next(here) if each.rings is None else each.rings.of(each.place))
        kept = self._config.min_area
        return [
            ImageObjects(own, mask) if not kept else without_small(own, mask, kept)
            for own, mask in zip(rings, masks, strict=True)
        ]

    def _instances(self, traced: TracedImage) -> ImageObjects:
        self._finite(traced)
        assert traced.objects is not None
        began_s = time.perf_counter()
        traced.objects.wait()
        self._count_wait("polygons", began_s)
        return traced.objects.of(traced.place, traced.frame)

    def _mask(self, traced: TracedImage) -> np.ndarray:
        """Mask (H, W) uint8 of an image, a view of the batch's."""
        host, frame = self._finite(traced), traced.frame
        return host["mask"].numpy()[traced.row, : frame.height, : frame.width]

    def _finite(self, traced: TracedImage) -> dict[str, Tensor]:
        """The host's copies of the batch; logits that are not finite raise ImageError."""
        frame = traced.frame
        assert traced.scored is not None
        host = self._wait(traced.scored)
        if not bool(host["finite"][traced.row]):
            wider = "bf16 or fp32" if self._network.setting.precision == "fp16" else "fp32"
            raise ImageError(
                f"{frame.name}: the network's logits are not finite (NaN or Inf) in {self._network.setting}; "
                f"use precision {wider}, or other weights"
            )
        return host

    def _wait(self, pending: Pending) -> dict[str, Tensor]:
        began_s = time.perf_counter()
        host = pending.wait()
        self._count_wait("polygons", began_s)
        return host

    # Times

    def _arrivals(self, results: Iterator[_Item], stage: str) -> Iterator[_Item]:
        """Results of the previous pipeline; waiting for them is not counted as work."""
        while True:
            began_s = time.perf_counter()
            try:
                item = next(results)
            except StopIteration:
                return
            finally:
                self._count_wait(stage, began_s)
            yield item

    def _count_wait(self, stage: str, began_s: float, cause: str = INPUT) -> None:
        """Move the seconds since began_s from a stage's work to its waiting."""
        seconds = time.perf_counter() - began_s
        self._meter.add(stage, seconds, cause)
        self._meter.add(stage, -seconds, BUSY)

    def report(self, gpu: dict[str, Any] | None) -> PredictReport:
        """Figures of the finished run."""
        summary, account = self._meter.summary(), current_account()
        # in pixels, since images may differ in size and number of windows
        ceiling = self._probe.share(self.scorer.pixels / max(summary["seconds"] - self._probe.cost_s, 1e-9))
        if account is not None:
            account.move(self._probe.cost_s, "ceiling")
        return PredictReport(
            images=self._images,
            failed=self._failed,
            polygons=self._polygons,
            seconds=summary["seconds"],
            images_per_s=summary["items_per_s"],
            ceiling_share=ceiling.share,
            ceiling_spread=ceiling.spread,
            ceiling_words=ceiling.words(),
            batch_size=self.scorer.size(),
            stages=summary["stages"] | ({"gpu": gpu} if gpu is not None else {}),
        )


class _Gate:
    """Limits the bytes of decoded images that wait for batching; the next image in order is always admitted."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._held_bytes = limit_bytes, 0
        self._next = 0  # index of the image that leaves next
        self._changed = threading.Condition()

    def enter(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: index <= self._next or self._held_bytes < self._limit_bytes)

    def add(self, frame: ImageFrame) -> None:
        with self._changed:
            self._held_bytes += _bytes(frame)

    def leave(self, frame: ImageFrame) -> None:
        with self._changed:
            self._held_bytes -= _bytes(frame)
            self._next = frame.index + 1
            self._changed.notify_all()

    def open(self) -> None:
        """Admit every image, at the end of the run."""
        with self._changed:
            self._limit_bytes = 2**62
            self._changed.notify_all()


class _QuietOpenCV:
    """Turns off OpenCV's own threads during runs, where they would compete with the workers."""

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


_quiet_opencv = _QuietOpenCV()  # one for the process, like OpenCV's setting


def _bytes(frame: ImageFrame) -> int:
    measured = 0 if frame.measured is None else frame.measured.values.nbytes
    return measured + sum(patch.pixels.nbytes for patch in frame.patches)


def _twice(work: Callable[[], _Result]) -> _Result:
    """The result of work, which is tried once more if memory runs out: other threads may have freed some."""
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


class _Finished(NamedTuple):
    number: int  # of the image
    prediction: Prediction
    polygons: int


def _ordered(finished: Iterable[list[_Finished]]) -> Iterator[tuple[Prediction, int]]:
    early: dict[int, _Finished] = {}
    following = 0
    for results in finished:
        early.update((one.number, one) for one in results)
        while following in early:
            yield early.pop(following)[1:]
            following += 1
