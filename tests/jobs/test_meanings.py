"""Every field of every kind says what it means, where forms and the API's document read it."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from brim.jobs.kinds.meanings import OWN, SHARED
from brim.jobs.kinds.registry import KINDS
from brim.jobs.kinds.specs import body_schema, config_schema


def fields(schema: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field of a schema, nested ones with a dot."""
    for name, part in schema.get("properties", {}).items():
        yield f"{within}{name}", part
        for inner in (part, part.get("items", {}), *part.get("anyOf", ())):
            yield from fields(inner, f"{within}{name}.")


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_sentence_and_every_sentence_a_field(kind):
    found = dict(fields(config_schema(kind)))

    assert [name for name, part in found.items() if not part.get("description", "").endswith(".")] == []
    assert [name for name in OWN[kind] if name not in found] == []


def test_what_is_shared_is_said_of_several_kinds():
    used = [name for kind in KINDS for name in dict(fields(config_schema(kind))) if name not in OWN[kind]]

    assert {name for name in SHARED if used.count(name) < 2} == set()


def test_the_document_of_bodies_says_the_same():
    forms = {form["title"]: form for form in body_schema()["oneOf"]}

    generation = forms["GenerationRequest"]["properties"]
    assert generation["num_samples"]["description"] == OWN["rf.generate"]["num_samples"]
    assert generation["config"]["properties"]["frequency_mhz"]["description"] == "Carrier, MHz."
    explicit = forms["SegmentTrainRequest"]["properties"]["config"]["properties"]
    assert explicit["augmentation"]["properties"]["scale"]["description"] == "Up to 1 ± this."
