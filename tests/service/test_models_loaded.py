"""Models in one budget: loaded once, warm before they answer, out when unused, replaced without a gap."""

import gc
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from live_api import picture

from brim.engine.batching.servable import Payload
from brim.engine.device import total_bytes
from brim.errors import BrimError, CheckpointError, NotFound, OutOfMemory, Unavailable
from brim.segmentation.tuning import BatchSizeEntry, device_info, device_key, save_entry
from brim.service.prediction.process import models as module
from brim.service.prediction.process.models import Models, Registered
from waiting import PATIENCE_S, until

MIB = 1 << 20


class Toy:
    """A model that holds so many bytes."""

    def __init__(self, version: str, weight_bytes: int) -> None:
        self.version, self.weight_bytes = version, weight_bytes
        self.sizes, self.tuned, self.expected_s, self.max_batch_size = (1, 2), True, {}, 4
        self.is_closed = False

    def example(self, num: int) -> list[int]:
        return list(range(num))

    def forward(self, parts: list[int]) -> list[int]:
        return parts

    def collect(self, running: list[int]) -> list[int]:
        return running

    def close(self) -> None:
        self.is_closed = True


class Factory:
    """Makes toys; a name may be slow, or fail."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []
        self.alive: weakref.WeakSet[Toy] = weakref.WeakSet()
        self.bytes: dict[str, int] = {}
        self.failures: dict[tuple[str, str], BrimError] = {}
        self.gates: dict[tuple[str, str], threading.Event] = {}

    def __call__(self, wanted: Registered, device: torch.device, lock: Any) -> Toy:
        key = (wanted.name, wanted.version)
        self.made.append(key)
        if key in self.gates:
            assert self.gates[key].wait(PATIENCE_S)
        if key in self.failures:
            raise self.failures[key]
        toy = Toy(wanted.version, self.bytes.get(wanted.name, 100 * MIB))
        self.alive.add(toy)
        return toy

    def num_alive(self) -> int:
        gc.collect()
        return len(self.alive)


@pytest.fixture
def factory() -> Factory:
    return Factory()


@pytest.fixture
def models(factory):
    with_threads = set(threading.enumerate())
    found = Models("cpu", budget_bytes=250 * MIB, make=factory)
    for name in "abc":
        found.see(registered(name))
    yield found
    found.close()
    assert set(threading.enumerate()) <= with_threads


def registered(name: str, version: str = "1", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "segment", "network": "hrnet", "path": "/nothing", "version": version, **more}


def state(models: Models, name: str) -> str:
    return next(each["state"] for each in models.describe() if each["name"] == name)


# Loading


def test_a_requested_model_loads_before_those_that_are_only_registered(models, factory):
    factory.gates["a", "1"] = threading.Event()
    models.register([registered(name) for name in "abc"])
    until(lambda: factory.made)

    requested = models.ask("c")
    factory.gates["a", "1"].set()
    requested.result(PATIENCE_S)

    until(lambda: len(factory.made) == 3)
    assert [name for name, _ in factory.made] == ["a", "c", "b"]


def test_a_model_is_loaded_when_it_is_first_asked_for(models, factory):
    assert state(models, "a") == "cold"

    found = models.find("a")

    assert found is models.find("a")
    assert factory.made == [("a", "1")]
    about = next(each for each in models.describe() if each["name"] == "a")
    assert about["memory_bytes"] >= 100 * MIB
    assert about | {"memory_bytes": 0} == {
        "name": "a", "kind": "segment", "network": "hrnet", "version": "1", "state": "warm", "error": None,
        "memory_bytes": 0, "batch_size": 2, "max_batch_size": 4, "device": "cpu",
    }  # fmt: skip


# Memory


def test_the_least_recently_used_makes_room(models, factory):
    for name in ("a", "b", "a", "c"):
        models.find(name)

    assert [state(models, name) for name in "abc"] == ["warm", "cold", "warm"]
    assert factory.num_alive() == 2
    models.find("b")
    assert [state(models, name) for name in "abc"] == ["cold", "warm", "warm"]


def test_loading_waits_for_requests_that_hold_what_made_room(models):
    models.find("a")
    held = [models.find("b")]
    models.find("a")
    waiting = models.ask("c")
    time.sleep(0.1)
    assert not waiting.done()

    held.clear()

    waiting.result(PATIENCE_S)
    assert models._taken() <= 250 * MIB


def test_a_model_above_the_budget_is_refused_in_words(models, factory):
    factory.bytes["a"] = 300 * MIB

    with pytest.raises(Unavailable, match=r'"a" cannot be loaded: .*MiB may be used'):
        models.find("a")
    assert state(models, "a") == "failed"


def test_where_memory_is_short_everything_else_goes(models, factory):
    models.find("b")
    full = threading.Event()

    def make(wanted: Registered, device: torch.device, lock: Any) -> Toy:
        if wanted.name == "a" and factory.num_alive():
            full.set()
            raise OutOfMemory("the device is full")
        return factory(wanted, device, lock)

    models._make = make

    assert models.find("a").version == "1"
    assert full.is_set()
    assert state(models, "b") == "cold"


# Versions


def test_a_new_version_loads_beside_the_old_one(models, factory):
    old = models.find("a")
    factory.gates["a", "2"] = threading.Event()

    models.see(registered("a", "2"))

    assert models.find("a") is old
    assert state(models, "a") == "warm"
    factory.gates["a", "2"].set()
    until(lambda: models.find("a").version == "2")
    assert old.forward([1]) == [1]
    del old
    assert factory.num_alive() == 1


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests_until_its_version_changes(models, factory):
    factory.failures["a", "1"] = CheckpointError("weights.safetensors is not of this network")

    for _ in range(3):
        with pytest.raises(Unavailable, match=r'"a" cannot be loaded: weights\.safetensors is not of this network'):
            models.find("a")
    assert factory.made == [("a", "1")]
    assert models.find("b").version == "1"
    about = next(each for each in models.describe() if each["name"] == "a")
    assert (about["state"], about["error"]) == ("failed", "weights.safetensors is not of this network")

    models.see(registered("a", "2"))

    assert models.find("a").version == "2"
    assert state(models, "a") == "warm"


def test_a_new_version_that_cannot_be_loaded_leaves_the_old_one(models, factory):
    models.find("a")
    factory.failures["a", "2"] = CheckpointError("torn")

    models.see(registered("a", "2"))

    until(lambda: models.describe()[0]["error"] == "torn")
    assert models.find("a").version == "1"
    assert models.describe()[0]["state"] == "warm"


def test_a_model_that_found_no_memory_is_tried_again_after_a_while(models, factory, monkeypatch):
    factory.failures["a", "1"] = OutOfMemory("full")
    with pytest.raises(Unavailable, match="full"):
        models.find("a")
    factory.failures.clear()
    with pytest.raises(Unavailable, match="full"):
        models.find("a")

    monkeypatch.setattr(module, "RETRY_S", 0.0)

    assert models.find("a").version == "1"


# Registration


def test_what_is_registered_loads_where_there_is_room(models, factory):
    models.register(registered(name) for name in "abcd")

    until(lambda: not models.loading)
    assert [each["state"] for each in models.describe()] == ["warm", "warm", "cold", "cold"]
    assert models.find("d").version == "1"
    assert factory.num_alive() == 2


def test_what_is_no_longer_registered_is_forgotten(models, factory):
    held = models.find("a")

    models.register([registered("b")])

    with pytest.raises(NotFound):
        models.find("a")
    assert [each["name"] for each in models.describe()] == ["b"]
    assert held.forward([1]) == [1]


# The end


def test_closing_frees_everything_and_sends_away_who_waits(factory):
    models = Models("cpu", budget_bytes=250 * MIB, make=factory)
    for name in "abc":
        models.see(registered(name))
    kept = models.find("a")
    factory.gates["b", "1"] = threading.Event()
    asked: list[Future[Any]] = [models.ask("b"), models.ask("c")]
    threading.Timer(0.05, factory.gates["b", "1"].set).start()

    models.close()

    assert kept.is_closed
    del kept
    with pytest.raises(Unavailable, match="stopping"):
        asked[1].result(0)
    asked.clear()
    assert factory.num_alive() == 0
    with pytest.raises(Unavailable, match="stopping"):
        models.find("a")


# Real models


def test_a_registered_network_is_loaded_by_its_kind_within_its_share_of_the_memory(tmp_path: Path, weights: Path):
    entry = BatchSizeEntry(
        optimal_batch_size=1, max_safe_batch_size=1, expected_throughput=100.0, p50_latency_ms=40.0,
        p95_latency_ms=50.0, memory_limit_mb=1000.0, image_size=1024, precision="fp32", layout="contiguous",
        compiled=False,
    )  # fmt: skip
    cpu = torch.device("cpu")
    save_entry(tmp_path / "sizes.json", device_key(cpu), device_info(cpu), "unet_tiny", entry, [])
    models = Models("cpu", share=0.25, batch_sizes=tmp_path / "sizes.json", decoders=1)
    models.see(registered("cells", network="unet_tiny", path=str(weights)))
    image = Payload(picture(60, 50), "a.png", {"threshold": 0.4})

    servable = models.find("cells")
    item = servable.decode(image)
    answer = servable.finish(item, servable.collect(servable.forward(item.parts)))

    assert answer.facts["polygons"] > 0
    assert (servable.sizes[-1], models._budget()) == (1, total_bytes(cpu) // 4)
    models.close()


@pytest.mark.parametrize("kind", ["segment", "locate", "cook"])
def test_a_path_that_holds_no_model_is_an_error_in_words(tmp_path, kind):
    models = Models("cpu")
    models.see(registered("a", kind=kind, path=str(tmp_path)))

    with pytest.raises(Unavailable, match=r'"a" cannot be loaded: .*(holds none of|run\.json|is unknown)'):
        models.find("a")
    models.close()
