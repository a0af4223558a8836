"""From the JSON schema of a config to the fields of a form, and from what was filled in back to a config.

Pure: what a page draws with it is no matter here. A value is kept as the form has it: text of a number, a choice, true
or false, a list of ids. What is empty or as the default says is left out of the config, so that a request says only
what somebody chose; what cannot be read as a number is sent as it is, and the API says what is wrong with it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

JsonSchema = dict[str, Any]
Sort = Literal["number", "switch", "choice", "choices", "text", "json", "datasets", "run"]

_HIDDEN: Final = ("preset",)  # a preset fills the fields instead
_COMMON: Final = {
    "rf.generate": "num_samples frequency_mhz tx_power_dbm min_snr_db max_gdop min_receivers seed use_random_receivers",
    "rf.train": "dataset_ids epochs batch_size learning_rate",
    "segment.tune": "model size seconds p95_ms",
    "segment.predict": "dataset_ids run_id format threshold",
    "segment.train": "dataset_ids model size epochs batch_size learning_rate",
    "sequence.train": "dataset_ids mode epochs batch_size learning_rate",
}
_UNITS: Final = {
    "mhz": "MHz", "hz": "Hz", "db": "dB", "dbm": "dBm", "dbi": "dBi", "m": "m", "s": "s", "ms": "ms", "deg": "°"
}  # fmt: skip
_WORDS: Final = {
    "num": "number of", "tx": "TX", "rx": "RX", "snr": "SNR", "gdop": "GDOP", "gpu": "GPU", "val": "validation"
}  # fmt: skip
_START: Final = {"num_samples": "1000"}  # to begin with, where the schema has no default


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """One field of a form; path is its place in the config, "augmentation.noise"."""

    path: str
    sort: Sort
    default: Any = None
    required: bool = False
    nullable: bool = False
    choices: tuple[Any, ...] = ()
    is_whole: bool = False  # numbers
    is_one: bool = False  # datasets: at most one
    help: str = ""
    common: bool = False

    @property
    def label(self) -> str:
        """As a person reads it."""
        parts = self.path.removesuffix("_ids").removesuffix("_id").replace(".", "_·_").split("_")
        unit = _UNITS.get(parts[-1]) if len(parts) > 1 else None
        text = " ".join(_WORDS.get(word, word) for word in (parts[:-1] if unit else parts))
        return text[:1].upper() + text[1:] + (f", {unit}" if unit else "")

    @property
    def start(self) -> Any:
        """What the form holds at first."""
        if self.sort in ("switch", "choice"):
            return self.default
        if self.sort in ("choices", "datasets"):
            return list(self.default or [])
        if self.sort == "run":
            return self.default
        return _START.get(self.path, "") if self.required else ""

    @property
    def hint(self) -> str:
        """What an empty field means."""
        if self.sort == "json":
            return ""
        if self.default is None:
            return "not set" if self.nullable else ""
        return str(self.default)

    def filled(self, value: Any) -> Any:
        """A value of a config as the form holds it."""
        if self.sort in ("number", "text"):
            return "" if value is None else _plain(value)
        if self.sort == "json":
            return "" if value is None else json.dumps(value, ensure_ascii=False)
        return list(value or []) if self.sort in ("choices", "datasets") else value


def read_fields(kind: str, schema: JsonSchema) -> list[FormField]:
    """The fields of a kind's config: those that people use most first."""
    found = [
        field for name, part in schema["properties"].items() for field in _read(name, part, _is_needed(schema, name))
    ]
    order = _COMMON.get(kind, "run_id dataset_ids").split()
    common = [_marked(field) for name in order for field in found if field.path == name]
    also = [_marked(field) for field in found if field.required and field.path not in order]
    named = {field.path for field in (*common, *also)}
    return [*common, *also, *(field for field in found if field.path not in named and field.path not in _HIDDEN)]


def make_config(fields: Sequence[FormField], values: Mapping[str, Any]) -> JsonSchema:
    """The config that was filled in."""
    config: JsonSchema = {}
    for field in fields:
        value = _value(field, values[field.path])
        if value is _LEFT_OUT:
            continue
        place, names = config, field.path.split(".")
        for name in names[:-1]:
            inner = place.setdefault(name, {})
            if inner is None:  # switched off as a whole
                break
            place = inner
        else:
            place[names[-1]] = value
    return config


def field_of(named: str | None, paths: Sequence[str]) -> str | None:
    """The field of the form that a refusal is about: "config.stations[2].lat" is about stations."""
    text = (named or "").removeprefix("config.")
    while text:
        if text in paths:
            return text
        cut = max(text.rfind("."), text.rfind("["))
        text = text[:cut] if cut > 0 else ""
    return None


# Reading a schema


def _read(path: str, part: JsonSchema, required: bool) -> list[FormField]:
    nullable, inner = _unwrapped(part)
    about: dict[str, Any] = {
        "path": path,
        "default": part.get("default"),
        "required": required,
        "nullable": nullable,
        "help": part.get("description", inner.get("description", "")),
    }
    if inner.get("type") == "object" and "properties" in inner:
        whole = (
            [FormField(**{**about, "default": part.get("default", 0) is not None}, sort="switch")] if nullable else []
        )
        given = part.get("default") or {}
        nested = [
            field
            for name, one in inner["properties"].items()
            for field in _read(f"{path}.{name}", {**one, **({"default": given[name]} if name in given else {})}, False)
        ]
        return [*whole, *nested]
    return [FormField(**about, **_sort(path, inner, nullable))]


def _sort(path: str, part: JsonSchema, nullable: bool) -> dict[str, Any]:
    if path == "dataset_ids":
        return {"sort": "datasets", "is_one": part.get("maxItems") == 1}
    if path == "run_id":
        return {"sort": "run"}
    if "enum" in part:
        return {"sort": "choice", "choices": tuple(part["enum"])}
    sort = part.get("type")
    if sort == "boolean":
        return {"sort": "choice", "choices": (True, False)} if nullable else {"sort": "switch"}
    if sort in ("integer", "number"):
        return {"sort": "number", "is_whole": sort == "integer"}
    if sort == "array" and "enum" in part.get("items", {}):
        return {"sort": "choices", "choices": tuple(part["items"]["enum"])}
    return {"sort": "text" if sort == "string" else "json"}


def _unwrapped(part: JsonSchema) -> tuple[bool, JsonSchema]:
    """Whether it may be null, and what it is otherwise."""
    options = part.get("anyOf", [part])
    real = [one for one in options if one.get("type") != "null"]
    return len(real) < len(options), real[0]


def _is_needed(schema: JsonSchema, name: str) -> bool:
    return name in schema.get("required", ())


def _marked(field: FormField) -> FormField:
    return replace(field, common=True)


# Reading a form


_LEFT_OUT: Final = object()


def _value(field: FormField, value: Any) -> Any:
    if field.sort in ("choices", "datasets"):
        return _LEFT_OUT if value == list(field.default or []) else _listed(field, value)
    if field.sort == "switch":
        return _LEFT_OUT if value == field.default else _switched(field, value)
    if field.sort in ("choice", "run"):
        return _LEFT_OUT if value == field.default else value
    text = (value or "").strip()
    if not text:
        return _LEFT_OUT
    if field.sort == "text":
        return text
    found = _read_json(text) if field.sort == "json" else _read_number(text, field.is_whole)
    return _LEFT_OUT if found == field.default and type(found) is not str else found


def _listed(field: FormField, value: Sequence[Any]) -> Any:
    if value:
        return list(value)
    return None if field.nullable else [] if field.required or field.default else _LEFT_OUT


def _switched(field: FormField, value: bool) -> Any:
    if not field.nullable:
        return value
    return {} if value else None  # a part of the config as a whole


def _read_number(text: str, is_whole: bool) -> Any:
    try:
        return int(text)  # as it stands: a float would lose the end of a long seed
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    return int(value) if is_whole and value.is_integer() else value


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return text


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")  # such a text is sent as it is


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)
