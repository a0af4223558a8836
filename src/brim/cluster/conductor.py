"""What runs in the cluster for bulk prediction: Ray Data, and an actor that conducts it.

    parcels → read → score → write → outcomes, a short queue ──▶ whoever asked

Ray Data moves the parcels, holds back a step that runs ahead, and does again what was lost with a process or a machine.
It does not run over Ray's client connection, so an actor of the cluster conducts it. The actor also counts how often a
piece of work was begun: what workers die over is done image by image, and at last given up.
"""

import pickle
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from brim import errors
from brim.engine.storage import Place
from brim.errors import BrimError, ClusterError
from brim.segmentation.prediction import (
    BulkImage,
    BulkParcel,
    BulkScorer,
    BulkTask,
    Recipe,
    Records,
    read_parcels,
    write_parcel,
)

TRIES = 2  # of a parcel whose worker dies; then of each of its images alone, which fails when workers die over it
AT_ONCE = 2  # parcels in a scorer: one is prepared while the other is on the device
WAIT_S = 0.5  # longest wait for an outcome before progress is told
_AGAIN = "finished images are recorded: run the same again to continue"
AHEAD = 8  # outcomes that wait to be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Ray's words for what each step takes."""

    num_scorers: int
    score: dict[str, float]
    beside: dict[str, float]  # reading and writing

    def at_most(self, num: int) -> "Resources":
        """The same, for so much work."""
        return Resources(num_scorers=max(1, min(num, self.num_scorers)), score=self.score, beside=self.beside)


@dataclass(frozen=True, slots=True)
class Told:
    """An error for the user on its way here: Ray would wrap it in its own."""

    kind: str
    message: str


def raise_if_told(found: Any) -> None:
    """Raise what was told."""
    if isinstance(found, Told):
        raise getattr(errors, found.kind, BrimError)(found.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that the conductor needs besides the weights."""

    work: list[list[BulkTask]]
    recipe: Recipe
    sizes: str | None
    place: Place | None  # None: results go back
    records: Records
    resources: Resources


@contextmanager
def conducted(ray: Any, plan: Plan, weights: bytes) -> Iterator[Iterator[BulkParcel | None]]:
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
        raise ClusterError(f"the cluster lost the work: {_words(failure)}", code="lost", hint=_AGAIN) from failure
    finally:
        ray.kill(conductor)  # and with it all that it started


def _outcomes(ray: Any, conductor: Any) -> Iterator[BulkParcel | None]:
    while True:
        found = ray.get(conductor.take.remote(WAIT_S))
        if found == b"":
            return
        if found is None:
            yield None
            continue
        outcome = pickle.loads(found)
        raise_if_told(outcome)
        if isinstance(outcome, _Lost):
            raise ClusterError(f"the cluster gave up: {outcome.message}", code="lost", hint=_AGAIN)
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

    def _run(self, plan: Plan, weights: bytes) -> None:
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


def _dataset(plan: Plan, weights: bytes, ledger: "_Ledger") -> Any:
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
_Piece = TypeVar("_Piece", BulkTask, BulkImage)


def _read(rows: _Rows, ledger: "_Ledger") -> Iterator[_Rows]:
    for data in rows["tasks"]:
        tasks: list[BulkTask] = pickle.loads(data)
        with _telling() as told:
            for found in ledger.watch("read", tasks, read_parcels):
                yield _row(found if isinstance(found, BulkParcel) else BulkParcel(sheets=[_deadly_task(found)]))
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
    def work(parcel: BulkParcel) -> BulkParcel:
        return write_parcel(parcel, format, place, None if place is None else records)

    for data in rows["parcel"]:
        yield from _passed(data, "write", ledger, work)


def _passed(data: bytes, step: str, ledger: "_Ledger", work: Callable[[BulkParcel], BulkParcel]) -> Iterator[_Rows]:
    """A parcel through a step; where it is none, as it came."""
    parcel = pickle.loads(data)
    if not isinstance(parcel, BulkParcel):
        yield _row(parcel)
        return

    def some(sheets: Sequence[BulkImage]) -> Iterator[BulkParcel]:
        yield work(replace(parcel, sheets=list(sheets)))

    with _telling() as told:
        for found in ledger.watch(step, parcel.sheets, some):
            yield _row(found if isinstance(found, BulkParcel) else replace(parcel, sheets=[_deadly(found)]))
    yield from told


def _deadly_task(task: BulkTask) -> BulkImage:
    return _deadly(BulkImage(index=task.index, name=task.name, file=task.file))


def _deadly(sheet: BulkImage) -> BulkImage:
    error = f"{sheet.name}: {TRIES} workers died over it alone; look at its size, and at the memory of the nodes"
    return replace(sheet, error=error, pixels=None, rings=None, mask=None, result=None)


@contextmanager
def _telling() -> Iterator[list[_Rows]]:
    """Errors for the user become rows of the list: Ray would try again, and wrap them in its own."""
    told: list[_Rows] = []
    try:
        yield told
    except BrimError as failure:
        told.append(_row(Told(type(failure).__name__, str(failure))))


def _row(parcel: BulkParcel | Told) -> _Rows:
    return {"parcel": [pickle.dumps(parcel)]}


class _Ledger:
    """Counts tries at the conductor, where they survive a worker."""

    def __init__(self, conductor: Any) -> None:
        self._conductor = conductor

    def watch(
        self, step: str, pieces: Sequence[_Piece], work: Callable[[Sequence[_Piece]], Iterator[BulkParcel]]
    ) -> Iterator[BulkParcel | _Piece]:
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
