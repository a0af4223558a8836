"""The schema of every kind says what requests accept, no more and no less, and what each setting means."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from brim.errors import ConfigError
from brim.jobs.kinds import KINDS, body_schema, config_schema, read_body


def fields(schema: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field of a schema, nested ones with a dot."""
    for name, part in schema.get("properties", {}).items():
        yield f"{within}{name}", part
        for inner in (part, part.get("items", {}), *part.get("anyOf", ())):
            yield from fields(inner, f"{within}{name}.")


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_sentence_a_type_and_a_default_unless_it_is_required(kind):
    schema = config_schema(kind)

    for name, part in fields(schema):
        assert part["description"].endswith("."), name
        assert "type" in part or "anyOf" in part, name
    assert {name for name, part in schema["properties"].items() if "default" not in part} == set(schema["required"])


def test_the_document_of_bodies_says_the_same():
    forms = {form["title"]: form["properties"] for form in body_schema()["oneOf"]}

    assert forms["GenerationRequest"]["num_samples"] == config_schema("rf.generate")["properties"]["num_samples"]
    assert "num_samples" not in forms["GenerationRequest"]["config"]["properties"]
    config = forms["SegmentTrainRequest"]["config"]["properties"]
    assert config == config_schema("segment.train")["properties"]


def numbers(schema: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every number of a schema of objects, with its place."""
    found = []
    for name, part in schema.get("properties", {}).items():
        part = {**part, **next((one for one in part.get("anyOf", ()) if one["type"] != "null"), {})}
        if part.get("type") in ("integer", "number"):
            found.append(((*path, name), part))
        found += numbers(part, (*path, name))
    return found


def ends(part: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The last numbers that a schema accepts, and the first that it does not."""
    step = 1 if part["type"] == "integer" else 0
    accepted, rejected = [], []
    for key, way in (("minimum", -1), ("maximum", 1)):
        if key in part:
            accepted.append(part[key])
            rejected.append(part[key] + way * step if step else math.nextafter(part[key], way * math.inf))
        strict = f"exclusive{key.capitalize()}"
        if strict in part:
            accepted.append(math.nextafter(part[strict], -way * math.inf))
            rejected.append(part[strict])
    return accepted, rejected


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_in_the_document_are_where_requests_begin_to_be_rejected(kind):
    schema = config_schema(kind)
    needed = {"dataset_ids": ["0"], "run_id": "0", "model": "unet_tiny", "num_samples": 1}
    usual = {name: needed[name] for name in schema["required"]}

    def code_of(place: tuple[str, ...], value: float) -> str | None:
        inner: Any = value
        for name in reversed(place):
            inner = {name: inner}
        try:
            read_body({"kind": kind, "name": "n", "config": {**usual, **inner}})
        except ConfigError as failure:
            known = failure.code == "conflict" or failure.field == ".".join(("config", *place))
            return failure.code if known else f"{failure.field}: {failure}"
        return None

    for place, part in numbers(schema):
        accepted, rejected = ends(part)
        assert {code_of(place, value) for value in accepted} <= {None, "conflict"}, place
        assert {code_of(place, value) for value in rejected} <= {"out_of_range", "conflict"}, place
