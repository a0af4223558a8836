"""A setting is declared once; everything else follows from the declaration."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from brim.config import Doc, Length, OneOf, Range, Unit, check, part, plain, read, schema
from brim.errors import ConfigError, from_dict


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    name: Annotated[str, Length(1, 20), Doc("Name.")]
    lat: Annotated[float, Range(-90, 90), Unit("°"), Doc("Latitude.")] = 0.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    rate: Annotated[float, Range(above=0, note="0.001 is usual"), Doc("Learning rate.")] = 0.001
    epochs: Annotated[int, Range(1), Doc("Passes over the data.")] = 10
    patience: Annotated[int | None, Range(1), Doc("Epochs without improvement; none: never stop.")] = None
    kernel: Annotated[int, Range(3, 9, step=2), Doc("Frames.")] = 5
    shard: Annotated[int, Range(1, 100, also=0), Doc("Items of a shard; 0: chosen.")] = 0
    mode: Annotated[Literal["self", "supervised"], Doc("With or without labels.")] = "self"
    channels: Annotated[Literal[1, 3], Doc("Grey or colour.")] = 1
    devices: Annotated[int | Literal["all"], Range(1, 64), Doc("Devices.")] = 1
    network: Annotated[str, OneOf(lambda: ("unet", "hrnet")), Doc("Network.")] = "unet"
    flag: Annotated[bool, Doc("Whether.")] = False
    stations: Annotated[tuple[Station, ...], Length(0, 3), Doc("Receivers.")] = ()
    nested: Annotated[Station, Doc("One station.")] = field(default_factory=lambda: Station(name="a"))

    def __post_init__(self) -> None:
        check(self)
        if self.mode == "self" and self.flag:
            raise ConfigError(
                "needs labels", field="flag", value=True, code="conflict", hint="set {mode} to supervised"
            )


@pytest.mark.parametrize(
    ("values", "name", "code"),
    [
        ({"rate": 0}, "rate", "out_of_range"),
        ({"rate": float("nan")}, "rate", "out_of_range"),
        ({"rate": float("inf")}, "rate", "out_of_range"),
        ({"rate": "fast"}, "rate", "wrong_type"),
        ({"rate": True}, "rate", "wrong_type"),
        ({"epochs": 0}, "epochs", "out_of_range"),
        ({"epochs": 1.5}, "epochs", "wrong_type"),
        ({"epochs": None}, "epochs", "wrong_type"),
        ({"patience": 0}, "patience", "out_of_range"),
        ({"kernel": 4}, "kernel", "out_of_range"),
        ({"shard": 101}, "shard", "out_of_range"),
        ({"mode": "slef"}, "mode", "unknown_choice"),
        ({"channels": True}, "channels", "unknown_choice"),
        ({"devices": "some"}, "devices", "unknown_choice"),
        ({"devices": 65}, "devices", "out_of_range"),
        ({"network": "alexnet"}, "network", "unknown_choice"),
        ({"flag": 1}, "flag", "wrong_type"),
        ({"flag": True}, "flag", "conflict"),
        ({"epoch": 3}, "epoch", "unknown_field"),
        ({"stations": [{"lat": 3}]}, "stations[0].name", "missing"),
        ({"stations": [{"name": "x", "lat": 91}]}, "stations[0].lat", "out_of_range"),
        ({"stations": [{"name": "x"}] * 4}, "stations", "wrong_length"),
        ({"stations": 3}, "stations", "wrong_type"),
        ({"nested": {"name": ""}}, "nested.name", "wrong_length"),
        ({"nested": []}, "nested", "wrong_type"),
    ],
)
def test_a_wrong_value_names_its_field_and_its_fault(values: dict[str, Any], name: str, code: str):
    with pytest.raises(ConfigError) as caught:
        read(Config, values)

    assert (caught.value.field, caught.value.code) == (f"config.{name}", code)


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(ConfigError) as raised:
        read(Config, {"epochs": "x", "raet": 1, "nested": {"lat": 99}, "kernel": 5})

    faults = [raised.value, *raised.value.more]
    assert str(raised.value) == "config.raet is unknown; did you mean rate?"
    assert [one.field for one in faults] == ["config.raet", "config.epochs", "config.nested.name", "config.nested.lat"]


def test_plain_values_become_nested_configurations():
    config = read(Config, {"rate": 1, "stations": [{"name": "x", "lat": 3}], "devices": "all", "patience": None})

    assert config.stations == (Station(name="x", lat=3.0),)
    assert isinstance(config.rate, float)


def test_an_instance_is_checked_as_a_request_is():
    with pytest.raises(ConfigError, match="epochs=0 must be at least 1"):
        Config(epochs=0)


def test_each_surface_writes_names_its_own_way():
    with pytest.raises(ConfigError) as caught:
        Config(flag=True)

    assert str(caught.value) == "flag=true needs labels; set mode to supervised"
    assert caught.value.phrase(lambda name: f"--{name}") == "--flag=true needs labels; set --mode to supervised"


def test_an_error_is_data_that_survives_another_process():
    error = ConfigError("is wrong", field="a", value="x" * 200, code="conflict", hint="see {b}").within("config")
    again = from_dict(json.loads(json.dumps(error.as_dict())))

    assert (type(again), again.field, again.code, str(again)) == (ConfigError, "config.a", "conflict", str(error))
    assert str(error) == f'config.a="{"x" * 56}... is wrong; see b'


def test_the_schema_has_ranges_choices_defaults_and_sentences():
    properties = schema(Config)["properties"]

    assert properties["rate"]["exclusiveMinimum"] == 0
    assert properties["kernel"].items() >= {"minimum": 3, "maximum": 9, "not": {"multipleOf": 2}}.items()
    assert (properties["shard"]["minimum"], properties["shard"]["maximum"]) == (0, 100)
    assert (schema(Station)["required"], schema(Config)["required"]) == (["name"], [])
    assert properties["patience"]["anyOf"] == [{"type": "integer", "minimum": 1}, {"type": "null"}]
    assert properties["mode"]["enum"] == ["self", "supervised"]
    assert properties["network"]["enum"] == ["unet", "hrnet"]
    assert properties["stations"]["items"]["properties"]["lat"]["description"] == "Latitude (°)."
    assert properties["nested"]["default"] == {"name": "a", "lat": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Config):
    """A larger configuration: more settings, and one that cannot be given."""

    network: str = field(init=False, default="unet")
    ids: Annotated[tuple[Annotated[str, Length(1, 5)], ...], Length(1, 3, unique=True), Doc("Ids.")]


def test_a_subclass_adds_settings_and_fixes_others():
    job = read(Job, {"ids": ["a", "b"], "epochs": 3})

    assert part(Config, job) == Config(epochs=3)
    assert "network" not in plain(job)
    assert read(Job, plain(job)) == job
    with pytest.raises(ConfigError, match="unknown"):
        read(Job, {"ids": ["a"], "network": "hrnet"})


@pytest.mark.parametrize(
    ("ids", "name", "code"),
    [
        (["a", "b", "a"], "ids[2]", "repeated"),
        ([], "ids", "wrong_length"),
        (["a", ""], "ids[1]", "wrong_length"),
        (["a", "toolong"], "ids[1]", "wrong_length"),
        (["a", " "], "ids[1]", "unprintable"),
        (["a", "\x00"], "ids[1]", "unprintable"),
        (["\ud800"], "ids[0]", "unprintable"),
        ([5], "ids[0]", "wrong_type"),
    ],
)
def test_items_are_checked_one_by_one(ids: list[Any], name: str, code: str):
    with pytest.raises(ConfigError) as caught:
        read(Job, {"ids": ids})

    assert (caught.value.field, caught.value.code) == (f"config.{name}", code)


def test_the_schema_of_a_list_says_what_its_items_are():
    ids = schema(Job)["properties"]["ids"]

    assert (ids["minItems"], ids["maxItems"], ids["uniqueItems"]) == (1, 3, True)
    assert ids["items"].items() >= {"type": "string", "minLength": 1, "maxLength": 5}.items()
