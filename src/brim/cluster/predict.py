"""Bulk prediction on a Ray cluster: images to polygons, each image once.

    tasks ──parcels──▶ workers: read → score → write ──outcomes──▶ here

The workers are those of `ray_pool.py`; `segmentation/prediction/bulk.py` has the steps. Results in a store are written
by the workers; those for a directory of this machine come here and are written here. An image is finished when its
record is there: the same command again reads every image, compares hashes, and predicts what is missing or changed.
"""

import hashlib
import json
import os
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from brim.cluster.ray_connect import Node, connect
from brim.cluster.ray_pool import CALLS, RayPool
from brim.engine.device import format_size
from brim.engine.meter.ceiling import of_several
from brim.engine.storage import Place, place_of
from brim.errors import ClusterError, ConfigError
from brim.rf.generation import (
    START_S,
    Pool,
    PoolEvent,
    TaskDone,
    TaskFailed,
    WorkerFacts,
    WorkerLost,
    WorkerReady,
    start_workers,
)
from brim.segmentation import prediction as bulk
from brim.segmentation.images import ImageFile
from brim.segmentation.images.writing import Writer
from brim.segmentation.networks import traits_of
from brim.segmentation.tuning import BatchSizes

NODE_BYTES = 2**30  # of memory free on each node: a worker and a few parcels
AT_ONCE = {"cuda:0": 12, "cpu": 3}  # parcels in a worker: reading one takes a core twelve times as long as scoring it
TRIES = 2  # of a parcel whose worker dies; then of each of its images alone, which fails when workers die over it
WAIT_S = 0.5  # longest wait for an outcome before progress is reported
_AGAIN = "finished images are recorded: run the same again to continue"
_GATHERERS = 16  # parts of a COCO file asked for at once


def predict_many(
    inputs: Sequence[Path | str],
    out: Path | str,
    recipe: bulk.Recipe,
    weights: Path | str,
    address: str,
    *,
    batch_sizes: Path | str | None = None,
    allow_mixed: bool = False,
    progress: Callable[[bulk.PredictProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> bulk.FilesReport:
    """What predict_files does, on the cluster at that address; images whose record and bytes agree are kept.

    batch_sizes is the file that is read and added to, as ModelLoader does it; allow_mixed takes GPUs of several types,
    whose results may differ in their last bits.
    """
    if recipe.device not in ("auto", "cpu"):
        raise ConfigError(
            "is one device", field="device", value=recipe.device, code="conflict", hint="on a cluster use auto or cpu"
        )
    images = {str(image): image for image in bulk.find_inputs(inputs, out)}
    packed = bulk.pack_weights(recipe.model, weights)
    sizes = json.dumps(BatchSizes.read(batch_sizes).as_json()) if batch_sizes is not None else None
    place = place_of(out)
    with connect(address) as cluster:
        check_nodes(cluster.nodes)
        with Writer(out, recipe.files.format, list(images), traits_of(weights).classes) as writer:
            records = bulk.Records(place, _recipe_name(recipe, packed))
            run = _Run(images, writer, place, records, recipe, progress, stop or (lambda: False))
            assignment = BulkAssignment(
                recipe=recipe, weights=packed, sizes=sizes, place=None if place.path is not None else place,
                seen=_some_files(images.values()),
            )  # fmt: skip
            try:
                with closing(RayPool(cluster, use_gpus=recipe.device == "auto")) as pool:
                    run.work(pool, assignment, batch_sizes, allow_mixed)
            finally:
                if recipe.files.format == "coco":
                    run.gather()
    return run.report()


def _recipe_name(recipe: bulk.Recipe, weights: bytes) -> str:
    """All that results depend on; not the batch size, by which none may differ but in the last bit."""
    files = asdict(recipe.files)
    shared = {name: files.pop(name) for name in ("precision", "tile", "resize", "overlap")}
    del files["batch_size"]
    for name in ("channels", "z", "t"):
        if files[name] is None:
            del files[name]
    facts = {"files": files, "device": recipe.device, **shared}  # in this form since the first version
    return bulk.recipe_name({**facts, "weights": hashlib.sha256(weights).hexdigest()})


def _some_files(images: Iterable[ImageFile]) -> dict[str, int]:
    """The first and the last of this machine's files and their sizes: all workers must see them under these paths."""
    paths = [_absolute(image) for image in images if isinstance(image, Path)]
    return {str(path): path.stat().st_size for path in (*paths[:1], *paths[-1:]) if path.is_file()}


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100  links stay links


def check_nodes(nodes: Iterable[Node]) -> None:
    """Reject nodes whose memory is used up: what starts there would be killed again and again."""
    for node in nodes:
        if node.free_bytes < NODE_BYTES:
            raise ClusterError(
                f"node {node.host} has {format_size(node.free_bytes)} of memory free, bulk prediction needs "
                f"{format_size(NODE_BYTES)}; end what else runs there, or take the node away"
            )


# In a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkAssignment:
    """Bulk prediction, as it is sent to a worker."""

    recipe: bulk.Recipe
    weights: bytes
    sizes: str | None  # content of the file of batch sizes
    place: Place | None  # None: results go back
    seen: dict[str, int]  # files that must be here → bytes

    @contextmanager
    def open(self, device: str, threads: int | None) -> Iterator["BulkServer"]:
        for name, num_bytes in self.seen.items():
            if not Path(name).is_file() or Path(name).stat().st_size != num_bytes:
                raise ClusterError(
                    f"does not see {name}; put the images where every node has them under one path, "
                    "or into an object store"
                )
        recipe = replace(self.recipe, device=device)
        scorer = bulk.BulkScorer(recipe, self.weights, self.sizes, name=uuid.uuid4().hex)
        with ThreadPoolExecutor(CALLS, "brim-bulk") as calls:
            yield BulkServer(scorer, device, calls, recipe.files.format, self.place)
            calls.shutdown(cancel_futures=True)


class BulkServer:
    """A warm network; each task is the images of a parcel and where to record them."""

    def __init__(
        self, scorer: bulk.BulkScorer, device: str, calls: ThreadPoolExecutor, format: str, place: Place | None
    ) -> None:
        self._scorer, self._calls, self._format, self._place = scorer, calls, format, place
        name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
        self.facts = WorkerFacts(
            device=device, device_name=name, kind=name, batch_size=scorer.batch_size, batch_sizes=scorer.batch_sizes
        )

    def submit(self, task: tuple[list[bulk.BulkTask], bulk.Records]) -> "Future[list[bulk.BulkParcel]]":
        return self._calls.submit(self._run, *task)

    def _run(self, tasks: list[bulk.BulkTask], records: bulk.Records) -> list[bulk.BulkParcel]:
        own = records if self._place is not None else None
        return [
            bulk.write_parcel(self._scorer(parcel), self._format, self._place, own)
            for parcel in bulk.read_parcels(tasks, self._scorer.planes)
        ]


# Here


@dataclass(slots=True)
class _Parcel:
    """Images of one task."""

    tasks: list[bulk.BulkTask]
    alone: bool = False  # an image over whose parcel workers died: no other task runs beside it
    tries: int = 0


class _Run:
    """One call: what is to do, and what came back so far."""

    def __init__(
        self,
        images: dict[str, ImageFile],
        writer: Writer,
        place: Place,
        records: bulk.Records,
        recipe: bulk.Recipe,
        progress: Callable[[bulk.PredictProgress], None] | None,
        stop: Callable[[], bool],
    ) -> None:
        self._images, self._writer, self._place, self._records = images, writer, place, records
        self._recipe, self._progress, self._stop = recipe, progress, stop
        self._left: deque[_Parcel] = deque()
        self._workers: dict[int, tuple[str, dict[int, _Parcel]]] = {}  # device and parcels by ticket
        self._sheets: dict[int, bulk.BulkImage] = {}  # what came back, by index
        self._parcels: list[bulk.BulkParcel] = []  # their accounts
        self._began_s = self._seconds = 0.0
        self._num_workers = 0
        self._batch_size = 1
        self._stopped = False

    def work(self, pool: Pool, assignment: BulkAssignment, sizes_file: Path | str | None, allow_mixed: bool) -> None:
        self._began_s = time.perf_counter()
        ready = start_workers(pool, assignment, allow_mixed=allow_mixed, stop=self._stop, tick=self._tell)
        self._num_workers = len(ready)
        tuned = ready[0].facts.batch_sizes if ready else None
        if tuned not in (None, assignment.sizes) and sizes_file is not None:
            _save(str(tuned), sizes_file)
        if self._recipe.needs_tuning:
            self._batch_size = min((event.facts.batch_size for event in ready), default=1)
        self._left.extend(map(_Parcel, bulk.split_tasks(self._tasks(), self._batch_size, max(1, len(ready)))))
        self._workers = {worker.worker: (worker.facts.device, {}) for worker in ready}
        alone_since_s = time.monotonic()
        while len(self._sheets) < len(self._images):
            if self._stop():
                self._stopped = True
                break
            self._feed(pool)
            events = pool.wait(WAIT_S)
            for event in events:
                self._handle(event)
            if self._workers:
                alone_since_s = time.monotonic()
            elif not pool.expects() or time.monotonic() - alone_since_s > START_S:
                reason = next((str(event.error) for event in events if isinstance(event, WorkerLost)), "no worker left")
                raise ClusterError(f"the cluster lost the work: {reason}", code="lost", hint=_AGAIN)
            self._tell()
        self._seconds = time.perf_counter() - self._began_s

    def _tasks(self) -> list[bulk.BulkTask]:
        """All images, each with its record where its result is there too."""
        done, coco = self._records.open(), self._recipe.files.format == "coco"
        written = set(self._place.walk()) if done and coco else set[str]()
        tasks = []
        for index, (name, image) in enumerate(self._images.items()):
            part = f"{bulk.FOLDER}/coco/{hashlib.sha256(name.encode()).hexdigest()}.jsonl"  # of the one COCO file
            file = part if coco else self._writer.file(name)
            has = name in done and (file in written if coco else self._writer.has(name))
            path = _absolute(image) if isinstance(image, Path) else image
            tasks.append(bulk.BulkTask(index=index, name=name, image=path, file=file, done=done[name] if has else None))
        return tasks

    def _feed(self, pool: Pool) -> None:
        for number, (device, held) in self._workers.items():
            while self._left and len(held) < AT_ONCE[device] and not any(parcel.alone for parcel in held.values()):
                if self._left[0].alone and held:
                    break
                parcel = self._left.popleft()
                held[pool.submit(number, (parcel.tasks, self._records))] = parcel

    def _handle(self, event: PoolEvent) -> None:
        if isinstance(event, WorkerReady):
            self._workers[event.worker] = event.facts.device, {}
        elif isinstance(event, TaskFailed):
            raise event.error
        elif isinstance(event, TaskDone):
            del self._workers[event.worker][1][event.ticket]
            for parcel in event.value:
                self._keep(parcel)
        elif event.was_ready:
            for parcel in self._workers.pop(event.worker)[1].values():
                self._retry(parcel)

    def _retry(self, parcel: _Parcel) -> None:
        """After a worker's death: again, then image by image, then not any more."""
        parcel.tries += 1
        if parcel.tries < TRIES:
            self._left.append(parcel)
        elif not parcel.alone:
            self._left.extend(_Parcel([task], alone=True) for task in parcel.tasks)
        else:
            task = parcel.tasks[0]
            error = f"{task.name}: {TRIES} workers died over it alone; look at its size, and at the memory of the nodes"
            self._keep(
                bulk.BulkParcel(sheets=[bulk.BulkImage(index=task.index, name=task.name, file=task.file, error=error)])
            )

    def _keep(self, parcel: bulk.BulkParcel) -> None:
        """Write what was not written where it was made, and count."""
        fresh: list[bulk.Record] = []
        for sheet in parcel.sheets:
            if sheet.result is not None and self._place.path is not None:
                if self._recipe.files.format == "coco":
                    self._place.put_bytes(sheet.result, sheet.file)
                else:
                    self._writer.put(sheet.name, sheet.result)
                fresh.append(sheet.record())
            sheet.result = None
            self._sheets[sheet.index] = sheet
        self._records.add(fresh)
        self._parcels.append(parcel)

    def _tell(self) -> None:
        if self._progress is not None:
            done, failed = len(self._sheets), sum(sheet.error is not None for sheet in self._sheets.values())
            rate = done / max(time.perf_counter() - self._began_s, 1e-9)
            self._progress(bulk.PredictProgress(done=done, failed=failed, total=len(self._images), rate=rate))

    def gather(self) -> None:
        """Put the parts of a COCO file together."""
        whole = [sheet for sheet in self._sheets.values() if sheet.error is None]
        with ThreadPoolExecutor(_GATHERERS) as pool:
            for start in range(0, len(whole), _GATHERERS):
                some = whole[start : start + _GATHERERS]
                parts = pool.map(lambda sheet: self._place.read_bytes(sheet.file), some)
                for sheet, lines in zip(some, parts, strict=True):
                    self._writer.put_lines(sheet.name, (sheet.height, sheet.width), lines)

    def report(self) -> bulk.FilesReport:
        """By the names of one machine's report; seconds are those of the cluster, starting workers included."""
        sheets = [self._sheets[index] for index in sorted(self._sheets)]
        fresh, kept = [s for s in sheets if not s.kept], [s for s in sheets if s.kept]
        failures = {sheet.name: sheet.error for sheet in fresh if sheet.error is not None}
        ceilings = {parcel.scorer: parcel.ceiling for parcel in self._parcels if parcel.ceiling is not None}
        pixels_per_s = sum(parcel.pixels for parcel in self._parcels) / max(self._seconds, 1e-9)
        ceiling = of_several(pixels_per_s, sum(ceilings.values()))
        stages: dict[str, Any] = {
            step: {"busy_s": sum(parcel.busy_s.get(step, 0.0) for parcel in self._parcels)}  # of all workers together
            for step in ("read", "score", "write")
        }
        report = bulk.PredictReport(
            images=len(fresh),
            failed=len(failures),
            polygons=sum(sheet.polygons for sheet in fresh),
            seconds=self._seconds,
            images_per_s=len(fresh) / max(self._seconds, 1e-9),
            ceiling_share=ceiling.share,
            ceiling_words=ceiling.words(),
            batch_size=min((parcel.batch_size for parcel in self._parcels if parcel.pixels), default=self._batch_size),
            stages=stages | {"workers": self._num_workers},
        )
        return bulk.FilesReport(
            report=None if self._stopped else report,
            failures=failures,
            written=len(fresh) - len(failures),
            kept=len(kept),
            kept_polygons=sum(sheet.polygons for sheet in kept),
            stopped=self._stopped,
        )


def _save(sizes: str, file: Path | str) -> None:
    with tempfile.TemporaryDirectory(prefix="brim-") as folder:
        tuned = Path(folder, "sizes.json")
        tuned.write_text(sizes)
        BatchSizes.read(tuned).write(file)
