"""Bulk prediction on a Ray cluster: images to polygons by Ray Data, each image once.

    tasks → read ×CPUs → score ×GPUs, warm networks → write ×CPUs → outcomes → here

Ray Data moves the parcels (segmentation/bulk.py has the steps), holds back a step that runs ahead, and does again what
was lost with a process or a machine. It does not run over Ray's client connection, so an actor of the cluster conducts
it and this process takes the outcomes from there. Results in a store are written where they are made; those for a
directory of this machine come here and are written here. An image is finished when its record is there: the same
command again reads every image, compares hashes, and predicts only what is missing or changed.
"""

import hashlib
import json
import os
import pickle
import queue
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from brim import errors
from brim.cluster.ray_connect import Cluster, Node, connect, import_ray
from brim.engine.memory import format_size
from brim.engine.meter import ceiling_share
from brim.engine.storage import Place, place_of
from brim.errors import BrimError, ClusterError, ConfigError
from brim.segmentation.batch_sizes import BatchSizes
from brim.segmentation.bulk import BulkScorer, Parcel, Recipe, Sheet, Task, pack_weights, parcels, read, write
from brim.segmentation.formats import Writer
from brim.segmentation.predict import PredictProgress, PredictReport
from brim.segmentation.predict_files import FilesReport, Found, find_inputs
from brim.segmentation.records import FOLDER, Record, Records, recipe_of

TRIES = 2  # of a parcel whose worker dies; then of each of its images alone, which fails when workers die over it
SHARE = 0.25  # of a core for a step beside the network, where the network runs on the same cores
AT_ONCE = 2  # parcels in a scorer: one is prepared while the other is on the device
WAIT_S = 0.5  # longest wait for an outcome before progress is told
AHEAD = 8  # outcomes that wait to be taken
NODE_BYTES = 2**30  # of memory free on each node: a process of each step and a few parcels
SEE_S = 60.0  # for a node to say whether it sees the images
_GATHERERS = 16  # parts of a COCO file asked for at once


def predict_many(
    inputs: Sequence[Path | str],
    out: Path | str,
    recipe: Recipe,
    weights: Path | str,
    address: str,
    *,
    batch_sizes: Path | str | None = None,
    allow_mixed: bool = False,
    progress: Callable[[PredictProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> FilesReport:
    """What predict_files does, on the cluster at that address; images whose record and bytes agree are kept.

    batch_sizes is the file that is read and added to, as ModelLoader does it; allow_mixed takes GPUs of several types,
    whose results may differ in their last bits.
    """
    if recipe.device not in ("auto", "cpu"):
        raise ConfigError(f"device={recipe.device} names one device; on a cluster use auto or cpu")
    images = {str(image): image for image in find_inputs(inputs, out)}
    packed = pack_weights(recipe.files.model, weights)
    sizes = BatchSizes.read(batch_sizes).as_json() if batch_sizes is not None else None  # a broken file is named now
    place = place_of(out)
    with connect(address) as cluster:
        check_nodes(cluster.nodes)
        if recipe.device == "auto" and not allow_mixed:
            check_alike(import_ray().nodes())
        _check_seen(cluster, images.values())
        with Writer(out, recipe.files.format, list(images)) as writer:
            records = Records(place, _recipe_name(recipe, packed))
            run = _Run(images, writer, place, records, recipe, progress, stop)
            try:
                run.work(cluster, packed, _text(sizes), batch_sizes)
            finally:
                if recipe.files.format == "coco":
                    run.gather()
    return run.report()


def _recipe_name(recipe: Recipe, weights: bytes) -> str:
    """All that results depend on; not the batch size, by which none may differ but in the last bit."""
    facts = asdict(recipe)
    facts["files"].pop("batch_size")
    return recipe_of({**facts, "weights": hashlib.sha256(weights).hexdigest()})


def _text(sizes: Any) -> str | None:
    return None if sizes is None else json.dumps(sizes)


class _Run:
    """One call: what was asked for, and what came back so far."""

    def __init__(
        self,
        images: dict[str, Found],
        writer: Writer,
        place: Place,
        records: Records,
        recipe: Recipe,
        progress: Callable[[PredictProgress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self._images, self._writer, self._place, self._records = images, writer, place, records
        self._recipe, self._progress, self._stop = recipe, progress, stop
        self._total = len(images)
        self._sheets: dict[int, Sheet] = {}  # what came back, by index
        self._parcels: list[Parcel] = []  # their accounts
        self._seconds = 0.0
        self._workers = 0
        self._batch_size = 1
        self._stopped = False

    def work(self, cluster: Cluster, weights: bytes, sizes: str | None, sizes_file: Path | str | None) -> None:
        """Predict what is missing."""
        ray = import_ray()
        resources = _resources(cluster, self._recipe)
        if self._recipe.needs_tuning:
            self._batch_size, tuned = _tuned(ray, resources.score, self._recipe, weights, sizes)
            if tuned is not None and tuned != sizes and sizes_file is not None:
                _save(tuned, sizes_file)
            sizes = tuned
        work = parcels(self._tasks(), self._batch_size, resources.num_scorers)
        plan = _Plan(
            work=work,
            recipe=self._recipe,
            sizes=sizes,
            place=None if self._place.path is not None else self._place,
            records=self._records,
            resources=resources.at_most(len(work)),
        )
        self._workers = plan.resources.num_scorers
        began_s = time.perf_counter()
        with _conducted(ray, plan, weights) as outcomes:
            self._take(outcomes, began_s)
        self._seconds = time.perf_counter() - began_s
        if not self._stopped and len(self._sheets) != self._total:  # never a short result without a word
            raise RuntimeError(f"{self._total} images went and {len(self._sheets)} came back; this is a bug in brim")

    def _tasks(self) -> list[Task]:
        """All images, each with its record where its result is there too."""
        done, coco = self._records.open(), self._recipe.files.format == "coco"
        there = set(self._place.walk()) if done and coco else set[str]()
        tasks = []
        for index, (name, image) in enumerate(self._images.items()):
            file = self._file(name)
            has = name in done and (file in there if coco else self._writer.has(name))
            known = done[name] if has else None
            tasks.append(Task(index=index, name=name, image=_absolute(image), file=file, done=known))
        return tasks

    def _file(self, name: str) -> str:
        """Where an image's result goes; of a COCO file, its part."""
        if self._recipe.files.format != "coco":
            return self._writer.file(name)
        return f"{FOLDER}/coco/{hashlib.sha256(name.encode()).hexdigest()}.jsonl"

    # What comes back

    def _take(self, outcomes: Iterator[Parcel | None], began_s: float) -> None:
        failed = 0
        for parcel in outcomes:
            if parcel is not None:
                failed += sum(sheet.error is not None for sheet in parcel.sheets)
                self._keep(parcel)
            if self._progress is not None:
                done = len(self._sheets)
                rate = done / max(time.perf_counter() - began_s, 1e-9)
                self._progress(PredictProgress(done=done, failed=failed, total=self._total, rate=rate))
            if self._stop is not None and self._stop():
                self._stopped = True
                return

    def _keep(self, parcel: Parcel) -> None:
        """Write what was not written where it was made, and count."""
        fresh: list[Record] = []
        for sheet in parcel.sheets:
            if sheet.index in self._sheets:
                raise RuntimeError(f"{sheet.name} came back twice; this is a bug in brim")
            if sheet.result is not None and self._place.path is not None:
                self._put(sheet, sheet.result)
                fresh.append(sheet.record())
            sheet.result = None
            self._sheets[sheet.index] = sheet
        self._records.add(fresh)
        self._parcels.append(parcel)

    def _put(self, sheet: Sheet, result: bytes) -> None:
        if self._recipe.files.format == "coco":
            self._place.put_bytes(result, sheet.file)
        else:
            self._writer.put(sheet.name, result)

    def gather(self) -> None:
        """Put the parts of a COCO file together."""
        whole = [sheet for sheet in self._sheets.values() if sheet.error is None]
        with ThreadPoolExecutor(_GATHERERS) as pool:
            for start in range(0, len(whole), _GATHERERS):
                some = whole[start : start + _GATHERERS]
                for sheet, lines in zip(
                    some, pool.map(lambda sheet: self._place.read_bytes(sheet.file), some), strict=True
                ):
                    self._writer.put_lines(sheet.name, (sheet.height, sheet.width), lines)

    def report(self) -> FilesReport:
        """By the names of one machine's report; seconds are those of the cluster, starting workers included."""
        sheets = [self._sheets[index] for index in sorted(self._sheets)]
        fresh, kept = [s for s in sheets if not s.kept], [s for s in sheets if s.kept]
        failures = {sheet.name: sheet.error for sheet in fresh if sheet.error is not None}
        report = PredictReport(
            images=len(fresh),
            failed=len(failures),
            polygons=sum(sheet.polygons for sheet in fresh),
            seconds=self._seconds,
            images_per_s=len(fresh) / max(self._seconds, 1e-9),
            ceiling_share=self._ceiling_share(),
            batch_size=min((parcel.batch_size for parcel in self._parcels if parcel.pixels), default=self._batch_size),
            stages=self._stages(),
        )
        return FilesReport(
            report=None if self._stopped else report,
            failures=failures,
            written=len(fresh) - len(failures),
            kept=len(kept),
            kept_polygons=sum(sheet.polygons for sheet in kept),
            stopped=self._stopped,
        )

    def _ceiling_share(self) -> float | None:
        ceilings = {parcel.scorer: parcel.ceiling for parcel in self._parcels if parcel.ceiling is not None}
        pixels = sum(parcel.pixels for parcel in self._parcels)
        return ceiling_share(pixels / max(self._seconds, 1e-9), sum(ceilings.values())) if ceilings else None

    def _stages(self) -> dict[str, Any]:
        """Seconds of work in each step, of all workers together."""
        busy = {step: sum(p.busy_s.get(step, 0.0) for p in self._parcels) for step in ("read", "score", "write")}
        stages: dict[str, Any] = {step: {"busy_s": seconds} for step, seconds in busy.items()}
        return stages | {"workers": self._workers}


def _absolute(image: Found) -> Found:
    return Path(os.path.abspath(image)) if isinstance(image, Path) else image  # noqa: PTH100  links stay links


def _save(sizes: str, file: Path | str) -> None:
    with tempfile.TemporaryDirectory(prefix="brim-") as folder:
        tuned = Path(folder, "sizes.json")
        tuned.write_text(sizes)
        BatchSizes.read(tuned).write(file)


# What the cluster can do


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resources:
    """Ray's words for what each step takes."""

    num_scorers: int
    score: dict[str, float]
    beside: dict[str, float]  # reading and writing

    def at_most(self, num: int) -> "_Resources":
        return _Resources(num_scorers=max(1, min(num, self.num_scorers)), score=self.score, beside=self.beside)


def _resources(cluster: Cluster, recipe: Recipe) -> _Resources:
    if recipe.device == "auto" and cluster.gpus:
        return _Resources(num_scorers=cluster.gpus, score={"num_gpus": 1, "num_cpus": 0}, beside={"num_cpus": 1})
    half = {"num_cpus": 1 - 2 * SHARE, "num_gpus": 0}  # of a core: what is beside it needs the rest
    return _Resources(num_scorers=max(1, cluster.cpus), score=half, beside={"num_cpus": SHARE})


def check_nodes(nodes: Iterable[Node]) -> None:
    """Refuse nodes whose memory is used up: what starts there would be killed again and again."""
    for node in nodes:
        if node.free_bytes < NODE_BYTES:
            raise ClusterError(
                f"node {node.host} has {format_size(node.free_bytes)} of memory free, bulk prediction needs "
                f"{format_size(NODE_BYTES)}; end what else runs there, or take the node away"
            )


def check_alike(nodes: Iterable[dict[str, Any]]) -> None:
    """Refuse GPUs of several types, as Ray names them: the last bits of results may differ."""
    kinds: dict[str, str] = {}
    for node in nodes:
        for name in node["Resources"] if node["Alive"] and node["Resources"].get("GPU") else ():
            if name.startswith("accelerator_type:"):
                kinds.setdefault(name.partition(":")[2], str(node["NodeManagerAddress"]))
    if len(kinds) > 1:
        found = ", ".join(f"{kind} on {host}" for kind, host in kinds.items())
        raise ClusterError(f"the cluster mixes GPUs ({found}), whose last bits may differ; allow it with --allow-mixed")


def _check_seen(cluster: Cluster, images: Iterable[Found]) -> None:
    """Refuse files of this machine that another node does not see: it could only list them all as failed."""
    paths = [image for image in images if isinstance(image, Path)]
    if not paths:
        return
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    wanted = {str(_absolute(path)): path.stat().st_size for path in {paths[0], paths[-1]} if path.is_file()}
    ask = ray.remote(num_cpus=0, max_retries=0)(_unseen)
    asked = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(wanted)
        for node in cluster.nodes
    ]
    for node, unseen in zip(cluster.nodes, ray.get(asked, timeout=SEE_S), strict=True):
        if unseen is not None:
            raise ClusterError(
                f"node {node.host} does not see {unseen}; put the images where every node has them under one path, "
                "or into an object store"
            )


def _unseen(wanted: dict[str, int]) -> str | None:
    for name, size in wanted.items():
        if not Path(name).is_file() or Path(name).stat().st_size != size:
            return name
    return None


def _tuned(
    ray: Any, resources: dict[str, float], recipe: Recipe, weights: bytes, sizes: str | None
) -> tuple[int, str | None]:
    """The batch size of a worker's device and the sizes it knows now: tuned once, not by every worker."""
    tune = ray.remote(**resources)(_tune)
    found = ray.get(tune.remote(recipe, weights, sizes))
    _raise_if_told(found)
    return found  # type: ignore[no-any-return]


def _tune(recipe: Recipe, weights: bytes, sizes: str | None) -> "tuple[int, str | None] | _Told":
    try:
        scorer = BulkScorer(recipe, weights, sizes)
    except BrimError as failure:
        return _Told(type(failure).__name__, str(failure))
    return scorer.batch_size, scorer.batch_sizes


@dataclass(frozen=True, slots=True)
class _Told:
    """An error for the user on its way here: Ray would wrap it in its own."""

    kind: str
    message: str


def _raise_if_told(found: Any) -> None:
    if isinstance(found, _Told):
        raise getattr(errors, found.kind, BrimError)(found.message)


# The conductor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """All that the conductor needs besides the weights."""

    work: list[list[Task]]
    recipe: Recipe
    sizes: str | None
    place: Place | None  # None: results go back
    records: Records
    resources: _Resources


@contextmanager
def _conducted(ray: Any, plan: _Plan, weights: bytes) -> Iterator[Iterator[Parcel | None]]:
    """Outcomes as they come, None where none came for a while; leaving ends all work."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = next((node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]), None)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 8}  # one who takes, and workers who count
    if head is not None:  # where it is least likely to be lost
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(head, soft=False)
    conductor = ray.remote(**options)(_Conductor).remote()
    try:
        ray.get(conductor.start.remote(pickle.dumps(plan), weights))
        yield _outcomes(ray, conductor)
    except ray.exceptions.RayError as failure:
        raise ClusterError(
            f"the cluster lost the work: {_words(failure)}; what is finished is recorded, the same command goes on"
        ) from failure
    finally:
        ray.kill(conductor)  # and with it all that it started


def _outcomes(ray: Any, conductor: Any) -> Iterator[Parcel | None]:
    while True:
        found = ray.get(conductor.take.remote(WAIT_S))
        if found == b"":
            return
        if found is None:
            yield None
            continue
        outcome = pickle.loads(found)
        _raise_if_told(outcome)
        if isinstance(outcome, _Lost):
            raise ClusterError(
                f"the cluster gave up: {outcome.message}; what is finished is recorded, the same command goes on"
            )
        yield outcome


@dataclass(frozen=True, slots=True)
class _Lost:
    """Ray Data gave up."""

    message: str


class _Conductor:
    """Runs Ray Data in the cluster; its outcomes wait in a short queue until they are taken."""

    def __init__(self) -> None:
        self._outcomes: queue.Queue[bytes] = queue.Queue(AHEAD)
        self._begun: dict[_Key, int] = {}
        self._lock = threading.Lock()

    def begin(self, key: "_Key") -> int:
        """Count a try of a piece of work; which one it is."""
        with self._lock:
            self._begun[key] = self._begun.get(key, 0) + 1
            return self._begun[key]

    def end(self, key: "_Key") -> None:
        """It did not end its worker."""
        with self._lock:
            self._begun.pop(key, None)

    def start(self, plan: bytes, weights: bytes) -> None:
        """Begin; the plan is pickled by us, so that brim is imported here and not by Ray's own process."""
        threading.Thread(target=self._run, args=(pickle.loads(plan), weights), daemon=True).start()

    def take(self, wait_s: float) -> bytes | None:
        """The next outcome, pickled; None: not yet; empty: no more."""
        try:
            return self._outcomes.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _run(self, plan: _Plan, weights: bytes) -> None:
        try:
            import ray

            ledger = _Ledger(ray.get_runtime_context().current_actor)
            for batch in _dataset(plan, weights, ledger).iter_batches(batch_size=None, prefetch_batches=0):
                for outcome in batch["parcel"]:
                    self._outcomes.put(outcome)
        except Exception as failure:  # whatever it is, whoever waits must hear of it
            self._outcomes.put(pickle.dumps(_Lost(_words(failure))))
        self._outcomes.put(b"")


def _words(failure: BaseException) -> str:
    """The last line of Ray's message that says something: the first ones say where."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[-1] if lines else type(failure).__name__


def _dataset(plan: _Plan, weights: bytes, ledger: "_Ledger") -> Any:
    """The whole of it, as Ray Data runs it.

    Tries are not limited here: Ray counts each call to a machine that is gone, some a second. The ledger limits them.
    """
    import ray
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    resources = plan.resources
    scorers = ray.data.ActorPoolStrategy(
        size=resources.num_scorers, max_tasks_in_flight_per_actor=2 * AT_ONCE, enable_true_multi_threading=True
    )
    rows = [{"tasks": pickle.dumps(tasks)} for tasks in plan.work]
    return (
        ray.data.from_items(rows, override_num_blocks=len(rows))
        .map_batches(_read, batch_size=None, fn_args=(ledger,), max_retries=-1, **resources.beside)
        .map_batches(
            _Score,
            batch_size=1,
            compute=scorers,
            fn_constructor_args=(plan.recipe, [ray.put(weights)], plan.sizes, ledger),
            max_concurrency=AT_ONCE,
            max_restarts=-1,
            max_task_retries=-1,
            **resources.score,
        )
        .map_batches(
            _write,
            batch_size=None,
            fn_args=(plan.recipe.files.format, plan.place, plan.records, ledger),
            max_retries=-1,
            **resources.beside,
        )
    )


# The steps in Ray Data's words: columns of pickled parcels. An error for the user passes by as a row.

_Rows = dict[str, Any]
_Key = tuple[str, int, bool]  # step, index of the first image, whether it is alone
_Piece = TypeVar("_Piece", Task, Sheet)


def _read(rows: _Rows, ledger: "_Ledger") -> Iterator[_Rows]:
    for data in rows["tasks"]:
        tasks: list[Task] = pickle.loads(data)
        with _telling() as told:
            for found in ledger.watch("read", tasks, read):
                yield _row(found if isinstance(found, Parcel) else Parcel(sheets=[_deadly_task(found)]))
        yield from told


class _Score:
    """A worker with a network; made once, called for every parcel."""

    def __init__(self, recipe: Recipe, weights: list[Any], sizes: str | None, ledger: "_Ledger") -> None:
        import ray

        self._ledger = ledger
        with _telling() as self._told:
            self._score = BulkScorer(recipe, ray.get(weights[0]), sizes, name=uuid.uuid4().hex)

    def __call__(self, rows: _Rows) -> Iterator[_Rows]:
        for data in rows["parcel"]:
            if self._told:
                yield self._told[0]
            else:
                yield from _passed(data, "score", self._ledger, self._score)


def _write(rows: _Rows, format: str, place: Place | None, records: Records, ledger: "_Ledger") -> Iterator[_Rows]:
    def work(parcel: Parcel) -> Parcel:
        return write(parcel, format, place, None if place is None else records)

    for data in rows["parcel"]:
        yield from _passed(data, "write", ledger, work)


def _passed(data: bytes, step: str, ledger: "_Ledger", work: Callable[[Parcel], Parcel]) -> Iterator[_Rows]:
    """A parcel through a step; where it is none, as it came."""
    parcel = pickle.loads(data)
    if not isinstance(parcel, Parcel):
        yield _row(parcel)
        return

    def some(sheets: Sequence[Sheet]) -> Iterator[Parcel]:
        yield work(replace(parcel, sheets=list(sheets)))

    with _telling() as told:
        for found in ledger.watch(step, parcel.sheets, some):
            yield _row(found if isinstance(found, Parcel) else replace(parcel, sheets=[_deadly(found)]))
    yield from told


def _deadly_task(task: Task) -> Sheet:
    return _deadly(Sheet(index=task.index, name=task.name, file=task.file))


def _deadly(sheet: Sheet) -> Sheet:
    error = f"{sheet.name}: {TRIES} workers died over it alone; look at its size, and at the memory of the nodes"
    return replace(sheet, error=error, pixels=None, rings=None, mask=None, result=None)


@contextmanager
def _telling() -> Iterator[list[_Rows]]:
    """Errors for the user become rows of the list: Ray would try again, and wrap them in its own."""
    told: list[_Rows] = []
    try:
        yield told
    except BrimError as failure:
        told.append(_row(_Told(type(failure).__name__, str(failure))))


def _row(parcel: Parcel | _Told) -> _Rows:
    return {"parcel": [pickle.dumps(parcel)]}


class _Ledger:
    """Counts tries at the conductor, where they survive a worker."""

    def __init__(self, conductor: Any) -> None:
        self._conductor = conductor

    def watch(
        self, step: str, pieces: Sequence[_Piece], work: Callable[[Sequence[_Piece]], Iterator[Parcel]]
    ) -> Iterator[Parcel | _Piece]:
        """Work on images together; where workers died over that, on each alone. One they die over comes back as is."""
        if not pieces:
            return
        if self._begin(step, pieces[0].index, False) <= TRIES:
            yield from work(pieces)
        else:
            for piece in pieces:
                if self._begin(step, piece.index, True) <= TRIES:
                    yield from work([piece])
                else:
                    yield piece
                self._end(step, piece.index, True)
        self._end(step, pieces[0].index, False)

    def _begin(self, step: str, index: int, alone: bool) -> int:
        import ray

        return int(ray.get(self._conductor.begin.remote((step, index, alone))))

    def _end(self, step: str, index: int, alone: bool) -> None:
        self._conductor.end.remote((step, index, alone))
