"""Ranges found by asking: the document says what the library itself takes, no more and no less."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from brim.errors import BrimError, ConfigError, Conflict
from brim.jobs.kinds.alone import Alone, alone
from brim.jobs.kinds.fields import Count, read
from brim.jobs.kinds.registry import KINDS


@dataclass
class Toy:
    share: float = 0.1
    angle: float = 0.25
    size: int = 64
    overlap: int = 8
    kernel: int = 5
    wait_s: float = 1.0
    free: float = 0.0

    def __post_init__(self) -> None:
        for name, right in (
            ("share", 0 < self.share < 1),
            ("angle", -0.3 <= self.angle <= 1 / 3),
            ("size", 32 <= self.size <= 4096),
            ("overlap", self.overlap <= self.size // 2),
            ("kernel", self.kernel % 2 == 1 and 0 < self.kernel < 100),
            ("wait_s", 0.2 <= self.wait_s <= 10 and abs(self.wait_s * 5 - round(self.wait_s * 5)) < 1e-9),
        ):
            if not right:
                raise ConfigError(f"{name}={getattr(self, name)} cannot be")


def schema(kind: Any, name: str, *others: dict[str, Any], **hint: Any) -> dict[str, Any]:
    return TypeAdapter(alone(kind, name, Toy, others or ({},), hint)).json_schema()


def test_ends_that_are_taken_and_ends_that_are_not_are_told_apart():
    assert schema(float, "share") == {"type": "number", "exclusiveMinimum": 0.0, "exclusiveMaximum": 1.0}
    assert schema(float, "angle") == {"type": "number", "minimum": -0.3, "maximum": 1 / 3}
    assert schema(Count, "size") == {"type": "integer", "minimum": 32, "maximum": 4096}
    assert schema(float, "free") == {"type": "number"}


def test_a_value_is_right_that_some_configuration_takes():
    assert schema(Count, "overlap")["maximum"] == 32
    assert schema(Count, "overlap", {}, {"size": 4096})["maximum"] == 2048
    assert Alone(name="overlap", make=Toy, others=({}, {"size": 4096})).accepts(33)


def test_values_in_steps():
    assert schema(float, "wait_s", multipleOf=0.2) == {
        "type": "number", "minimum": 0.2, "maximum": 10.0, "multipleOf": 0.2,
    }  # fmt: skip
    assert schema(Count, "kernel", **{"not": {"multipleOf": 2}}) == {
        "type": "integer", "minimum": 1, "maximum": 99, "not": {"multipleOf": 2},
    }  # fmt: skip


def test_what_may_be_left_open_stays_so():
    found = schema(Count | None, "size")

    assert found["anyOf"] == [{"type": "integer", "minimum": 32, "maximum": 4096}, {"type": "null"}]


def test_a_refusal_is_the_librarys_own():
    with pytest.raises(ValidationError, match="size=31 cannot be"):
        TypeAdapter(alone(Count, "size", Toy)).validate_python(31)


def _numbers(found: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every number of a schema of objects, with its place."""
    numbers = []
    for name, part in found.get("properties", {}).items():
        part = {**part, **next((one for one in part.get("anyOf", ()) if one["type"] != "null"), {})}
        if part.get("type") in ("integer", "number"):
            numbers.append(((*path, name), part))
        numbers += _numbers(part, (*path, name))
    return numbers


def _ends(part: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The last numbers that a schema takes, and the first that it does not."""
    step = 1 if part["type"] == "integer" else 0
    taken, refused = [], []
    for key, way in (("minimum", -1), ("maximum", 1)):
        if key in part:
            taken.append(part[key])
            refused.append(part[key] + way * step if step else math.nextafter(part[key], way * math.inf))
        strict = f"exclusive{key.capitalize()}"
        if strict in part:
            taken.append(math.nextafter(part[strict], -way * math.inf))
            refused.append(part[strict])
    return taken, refused


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_in_the_document_are_where_requests_begin_to_be_refused(kind):
    from brim.jobs.kinds.specs import _explicit_form, _inlined

    model = _explicit_form(kind)
    config = _inlined(model.model_json_schema())["properties"]["config"]
    needed = {"dataset_ids": ["0"], "run_id": "0", "model": "unet_tiny", "num_samples": 1}
    usual = {name: needed[name] for name in config.get("required", ())}

    def take(place: tuple[str, ...], value: float) -> None:
        inner: Any = value
        for name in reversed(place):
            inner = {name: inner}
        read(model, {"kind": kind, "name": "n", "config": {**usual, **inner}})

    for place, part in _numbers(config):
        taken, refused = _ends(part)
        for value in taken:
            take(place, value)
        for value in refused:
            with pytest.raises(BrimError) as caught:
                take(place, value)
            assert caught.value.field == ".".join(("config", *place))
            assert not isinstance(caught.value, Conflict)
