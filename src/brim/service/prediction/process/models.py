"""Models in memory: loaded when first requested, warmed up, kept in one budget, replaced when their version changes.

    models = Models("cuda", share=0.2, batch_sizes=data / "batch_sizes.json")
    models.see({"name": "cells", "kind": "segment", "network": "hrnet", "path": "/runs/cells", "version": "1"})
    models.ask("cells").add_done_callback(…)  # a warm servable; others are served while this one loads

One thread loads, one model after the other. A model that was replaced or evicted is dropped here and lives on in the
requests in progress; its memory counts until the last of them is done. torch is imported with the first model: an
unused service stays small.
"""

import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import BrimError, ConfigError, NotFound, OutOfMemory, Unavailable

if TYPE_CHECKING:
    import torch

    from brim.engine.batching import Servable
    from brim.service.prediction.process.decoders import Decoders

log = logging.getLogger("brim")

State = Literal["cold", "loading", "warm", "failed"]
LEAVE_S = 10.0  # how long a load waits for requests that hold an evicted model
RETRY_S = 30.0  # after which a model that did not fit is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A model as the catalogue lists it."""

    name: str
    kind: str  # segment, locate or classify
    network: str  # architecture of segmentation weights; informative for the others
    path: str
    version: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Registered":
        """From the values the API sends with a request; other keys are ignored."""
        missing = [each.name for each in fields(cls) if each.name not in values]
        if missing:
            raise ConfigError(f"a registered model lacks {', '.join(missing)}; this is a bug in brim")
        return cls(**{each.name: str(values[each.name]) for each in fields(cls)})


LoadModel = Callable[[Registered, "torch.device", Any], Any]  # model, device, and the lock of the device


@dataclass(eq=False, slots=True)
class _Entry:
    """A name, the version registered under it, and the loaded one."""

    wanted: Registered
    servable: Any = None  # warm, with the batch sizes that are proven to fit
    polite: bool = False  # nobody requested it: it loads only if there is room
    loaded: Registered | None = None
    memory_bytes: int = 0
    used: int = 0  # order of the last requests, for eviction
    loading: "Future[Any] | None" = None
    failure: "_Failure | None" = None  # of the last attempt

    @property
    def state(self) -> State:
        if self.servable is not None:
            return "warm"
        if self.loading is not None:
            return "loading"
        return "failed" if self.failure is not None else "cold"


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a model was not loaded."""

    wanted: Registered
    reason: str
    is_for_room: bool = False  # nobody requested it, and another would have been evicted
    is_for_memory: bool = False
    at_s: float = field(default_factory=time.monotonic)

    def holds(self, wanted: Registered) -> bool:
        """Whether another attempt would fail too: until the version changes, or for a while if memory was short."""
        return self.wanted == wanted and not (self.is_for_memory and time.monotonic() - self.at_s > RETRY_S)


class Models:
    """Loaded models by name; safe to use from any thread."""

    def __init__(
        self,
        device: str = "auto",
        *,
        share: float = 0.2,
        budget_bytes: int | None = None,
        batch_sizes: Path | str | None = None,
        make: LoadModel | None = None,
        wrap: Callable[[Any], Any] = lambda servable: servable,
        attempt: Callable[[Registered], AbstractContextManager[None]] = lambda wanted: nullcontext(),
        decoders: int = 2,
    ) -> None:
        """Nothing is loaded yet.

        share         of the device's memory for all models together
        budget_bytes  the same in bytes, instead
        batch_sizes   the file that segmentation's tuning reads and writes
        make          loads a model; by default by its kind
        wrap          wraps a warm model for requests
        attempt       context in which a model is loaded and warmed up; may reject it
        decoders      images decoded at a time
        """
        self._device_name, self._share, self._budget_bytes = device, share, budget_bytes
        self._batch_sizes, self._make, self._wrap, self._attempt = batch_sizes, make or self._by_kind, wrap, attempt
        self._num_decoders = decoders
        self._decoders: Decoders | None = None  # started with the first model of images
        self._device: torch.device | None = None
        self.device_lock = threading.RLock()  # held while using the device: forward passes, and each size of a warm-up
        self._lock = threading.RLock()  # guards all below
        self._entries: dict[str, _Entry] = {}
        self._retired: list[tuple[weakref.ref[Any], int]] = []  # evicted and perhaps in use, and their bytes
        self._clock = itertools.count(1)
        self._closed = False
        self._waiting: list[_Entry] = []  # for the loader
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="brim-load")

    # Registration

    def see(self, registered: Mapping[str, Any]) -> None:
        """Note a registered model; a new version of a loaded model is loaded beside the old one."""
        new = Registered.of(registered)
        with self._lock:
            entry = self._entries.get(new.name)
            if entry is None:
                self._entries[new.name] = _Entry(new)
            elif entry.wanted != new:
                entry.wanted, entry.failure = new, None
                if entry.servable is not None and not self._closed:
                    self._start(entry)

    def register(self, registered: Iterable[Mapping[str, Any]]) -> None:
        """Note all registered models: others are forgotten, new ones load if there is room."""
        values = list(registered)
        for each in values:
            self.see(each)
        with self._lock:
            for name in self._entries.keys() - {str(each["name"]) for each in values}:
                self.forget(name)
            for entry in self._entries.values():
                if entry.state == "cold" and not self._closed:
                    entry.polite = True
                    self._start(entry)

    def forget(self, name: str) -> None:
        """Drop a model that is no longer registered; requests in progress keep it."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._retire(entry)

    # Use

    def ask(self, name: str) -> "Future[Servable]":
        """The warm model, now or once it is loaded; Unavailable with the reason if it cannot be loaded."""
        with self._lock:
            entry = self._entries.get(name)
            if self._closed:
                return _settled(failure=_stopping())
            if entry is None:
                text = f'model "{name}" is not registered; "GET /api/models" lists the registered ones'
                return _settled(failure=NotFound(text))
            entry.used, entry.polite = next(self._clock), False
            if entry.servable is not None:
                return _settled(entry.servable)
            if entry.failure is not None and entry.failure.holds(entry.wanted):
                return _settled(failure=_cannot(entry.wanted, entry.failure))
            return self._start(entry)

    def find(self, name: str) -> "Servable":
        """The warm model; waits while it loads."""
        return self.ask(name).result()

    def describe(self) -> list[dict[str, Any]]:
        with self._lock:
            return [self._facts(entry) for entry in self._entries.values()]

    @property
    def loading(self) -> bool:
        """Whether a model is being loaded, tuned or warmed up."""
        with self._lock:
            return any(entry.loading is not None for entry in self._entries.values())

    def close(self) -> None:
        """Wait for the load in progress and free everything; requests must have ended."""
        with self._lock:
            self._closed = True
        self._loader.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            if entry.loading is not None:
                entry.loading.set_exception(_stopping())
            if entry.servable is not None:
                entry.servable.close()
                entry.servable = None
        if self._decoders is not None:
            self._decoders.close()
        self._free()

    def _facts(self, entry: _Entry) -> dict[str, Any]:
        servable, wanted = entry.servable, entry.loaded or entry.wanted
        return {
            "name": wanted.name,
            "kind": wanted.kind,
            "network": wanted.network,
            "version": wanted.version,
            "state": entry.state,
            "error": None if entry.failure is None else entry.failure.reason,
            "memory_bytes": entry.memory_bytes if servable is not None else None,
            "batch_size": servable.sizes[-1] if servable is not None else None,
            "max_batch_size": servable.max_batch_size if servable is not None else None,
            "device": str(self._device) if servable is not None else None,
        }

    # Loading, in a thread of its own

    def _start(self, entry: _Entry) -> "Future[Any]":
        """Load the registered version in the loader's thread; the lock is held."""
        if entry.loading is None:
            entry.loading = Future()
            entry.loading.set_running_or_notify_cancel()  # several may wait for it: none of them may cancel it
            self._enqueue(entry)
        return entry.loading

    def _enqueue(self, entry: _Entry) -> None:
        self._waiting.append(entry)
        self._loader.submit(self._load_next)

    def _load_next(self) -> None:
        with self._lock:
            entry = min(self._waiting, key=lambda each: each.polite)  # requested ones first, else in order
            self._waiting.remove(entry)
        self._load(entry)

    def _load(self, entry: _Entry) -> None:
        wanted = entry.wanted
        loaded, failure = self._try(entry, wanted)
        with self._lock:
            if failure is not None and failure.is_for_room:
                if not entry.polite and not self._closed:
                    self._enqueue(entry)  # requested meanwhile
                    return
                entry.failure = None
            else:
                entry.failure = failure
            loading, entry.loading = entry.loading, None
            assert loading is not None
            if loaded is not None:
                self._retire(entry)  # the version before
                entry.servable, entry.memory_bytes = loaded
                entry.loaded = wanted
            servable = entry.servable  # the version before, if the new one failed
            if self._entries.get(wanted.name) is not entry:
                self._retire(entry)  # forgotten meanwhile
            elif entry.wanted != wanted and not self._closed:
                self._start(entry)
        if servable is not None:
            loading.set_result(servable)
        else:
            loading.set_exception(_stopping() if failure is None else _cannot(wanted, failure))

    def _try(self, entry: _Entry, wanted: Registered) -> tuple[tuple[Any, int] | None, "_Failure | None"]:
        """A warm model and its bytes, or why there is none, as text: an exception would keep its frames alive."""
        try:
            return self._warm_in_budget(entry, wanted), None
        except BrimError as error:
            short = isinstance(error, OutOfMemory)
            reason = f"{error}; predictions need a larger share of the memory" if short else str(error)
            return None, _Failure(wanted, reason, is_for_room=isinstance(error, _NoRoom), is_for_memory=short)
        except BaseException as error:
            log.exception("model %s cannot be loaded", wanted.name)
            return None, _Failure(wanted, f"{type(error).__name__}, a bug in brim; the service's log says more")

    def _warm_in_budget(self, entry: _Entry, wanted: Registered) -> tuple[Any, int]:
        """A warm model and its bytes; others are evicted for it."""
        budget_bytes = self._budget()
        guess_bytes = _file_bytes(Path(wanted.path))
        self._make_room(entry, guess_bytes, budget_bytes)
        warm: tuple[Any, int] | None = None
        try:
            warm = self._warm(wanted, budget_bytes)
        except OutOfMemory:
            if entry.polite or not self._evict(entry, everything=True):
                raise
        if warm is None:  # outside the handler, which would keep the first attempt's tensors
            self._make_room(entry, guess_bytes, budget_bytes)
            self._free()
            warm = self._warm(wanted, budget_bytes)
        self._make_room(entry, warm[1], budget_bytes)
        return warm

    def _warm(self, wanted: Registered, budget_bytes: int) -> tuple[Any, int]:
        from brim.engine.batching.warm_up import warm_up

        assert self._device is not None
        began_s = time.perf_counter()
        with self._attempt(wanted):
            servable = self._make(wanted, self._device, self.device_lock)
            report = warm_up(servable, self._device, self.device_lock, limit_bytes=budget_bytes)
        log.info(
            "model %s is warm after %.1f s: batches of up to %d, %.0f MB",
            wanted.name, time.perf_counter() - began_s, report.sizes[-1], report.memory_bytes / 1e6,
        )  # fmt: skip
        return self._wrap(servable), report.memory_bytes

    def _by_kind(self, wanted: Registered, device: "torch.device", lock: Any) -> Any:
        if wanted.kind == "segment":
            from brim.segmentation.prediction import SegmentServable
            from brim.service.prediction.process.decoders import Decoders

            with self._lock:
                alone = all(entry.servable is None for entry in self._entries.values())
            self._decoders = self._decoders or Decoders(self._num_decoders)
            return SegmentServable(
                wanted.network, wanted.path, device, lock=lock, batch_sizes=self._batch_sizes, may_tune=alone,
                images=self._decoders,
            )  # fmt: skip
        if wanted.kind == "locate":
            from brim.rf.location import LocateServable

            return LocateServable(wanted.path, device, lock=lock)
        if wanted.kind == "classify":
            from brim.sequences.evaluation.serving import ClassifyServable

            return ClassifyServable(wanted.path, device, lock=lock)
        raise ConfigError(f'kind="{wanted.kind}" is unknown; expected segment, locate or classify')

    # Memory

    def _budget(self) -> int:
        from brim.engine.device import keep_to_share, resolve_device, total_bytes

        if self._device is None:
            self._device = resolve_device(self._device_name)
            keep_to_share(self._device)
        if self._budget_bytes is None:
            self._budget_bytes = int(self._share * total_bytes(self._device))
        return self._budget_bytes

    def _make_room(self, entry: _Entry, needed_bytes: int, budget_bytes: int) -> None:
        """Evict the least recently used until there is room, and wait for requests that still hold them.

        _NoRoom if nobody requested the model and another would be evicted for it.
        """
        if entry.polite and self._taken() + needed_bytes > budget_bytes:
            raise _NoRoom("another model would be evicted")
        while self._held() + needed_bytes > budget_bytes and self._evict(entry):
            pass
        for pause_s in (LEAVE_S / 10, LEAVE_S):
            end_s = time.monotonic() + pause_s
            while self._taken() + needed_bytes > budget_bytes and self._retired and time.monotonic() < end_s:
                time.sleep(0.005)
            if self._taken() + needed_bytes <= budget_bytes or not self._retired:
                break
            self._free()  # a cycle may keep it; not at first, since nothing is served meanwhile

    def _held(self) -> int:
        with self._lock:
            return sum(entry.memory_bytes for entry in self._entries.values() if entry.servable is not None)

    def _taken(self) -> int:
        """Bytes of warm models and of evicted ones still in use."""
        with self._lock:
            self._retired = [(servable, num_bytes) for servable, num_bytes in self._retired if servable() is not None]
            return self._held() + sum(num_bytes for _, num_bytes in self._retired)

    def _evict(self, entry: _Entry, *, everything: bool = False) -> bool:
        """Drop the least recently used model other than this one, or all, an older version of this one too."""
        with self._lock:
            warm = [each for each in self._entries.values() if each.servable is not None]
            if not everything:
                warm = sorted((each for each in warm if each is not entry), key=lambda each: each.used)[:1]
            for each in warm:
                log.info("model %s is evicted", each.wanted.name)
                self._retire(each)
        return bool(warm)

    def _retire(self, entry: _Entry) -> None:
        """Drop the loaded model of an entry; requests keep it. The lock is held."""
        if entry.servable is not None:
            self._retired.append((weakref.ref(entry.servable), entry.memory_bytes))
            entry.servable, entry.loaded, entry.memory_bytes = None, None, 0

    def _free(self) -> None:
        gc.collect()
        if self._device is not None and self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()


class _NoRoom(BrimError):
    """A model that nobody requested would evict another."""


def _settled(servable: Any = None, *, failure: BrimError | None = None) -> "Future[Any]":
    future: Future[Any] = Future()
    if failure is None:
        future.set_result(servable)
    else:
        future.set_exception(failure)
    return future


def _file_bytes(path: Path) -> int:
    """The size of the weights before they are read: of the file, or of the largest in a run's directory."""
    try:
        files = [path] if path.is_file() else [file for file in path.rglob("*.safetensors") if file.is_file()]
        return max((file.stat().st_size for file in files), default=0)
    except OSError:
        return 0  # loading it says what is wrong


def _cannot(wanted: Registered, failure: _Failure) -> Unavailable:
    return Unavailable(f'model "{wanted.name}" cannot be loaded: {failure.reason}')


def _stopping() -> Unavailable:
    return Unavailable("the service is stopping; try again soon")
