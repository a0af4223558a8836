"""From the JSON schema of a config to the fields of a form, and from their values back to a config.

Pure. A value is what the form holds: the text of a number, a choice, true or false, a list of ids. Empty values and
defaults are left out of the config; what cannot be read as a number is sent as text, and the API rejects it in words.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

JsonSchema = dict[str, Any]
Sort = Literal["number", "switch", "choice", "choices", "text", "json", "dataset", "datasets", "run"]

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
_START: Final = {"num_samples": "1000"}  # where the schema has no default


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
    help: str = ""
    common: bool = False  # shown before "All settings"

    @property
    def label(self) -> str:
        parts = self.path.removesuffix("_ids").removesuffix("_id").replace(".", "_·_").split("_")
        unit = _UNITS.get(parts[-1]) if len(parts) > 1 else None
        text = " ".join(_WORDS.get(word, word) for word in (parts[:-1] if unit else parts))
        return text[:1].upper() + text[1:] + (f", {unit}" if unit else "")

    @property
    def is_typed(self) -> bool:
        return self.sort in ("number", "text", "json")

    @property
    def is_many(self) -> bool:
        return self.sort in ("choices", "datasets")

    @property
    def start(self) -> Any:
        """The value of a new form."""
        if self.is_typed:
            return _START.get(self.path, "") if self.required else ""
        return list(self.default or []) if self.is_many else self.default

    @property
    def placeholder(self) -> str:
        """What an empty field means."""
        if self.default is None:
            return "not set" if self.nullable else ""
        return "" if self.sort == "json" else str(self.default)

    def filled(self, value: Any) -> Any:
        """A value of a config as the form holds it."""
        if self.sort == "dataset":
            return value[0] if value else None
        if not self.is_typed:
            return list(value or []) if self.is_many else value
        if value is None:
            return ""
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            value = int(value)
        return json.dumps(value, ensure_ascii=False) if self.sort == "json" else str(value)


def read_fields(kind: str, schema: JsonSchema) -> list[FormField]:
    """The fields of a kind's config: the common and the required ones first."""
    fields = [
        field
        for name, part in schema["properties"].items()
        if name not in _HIDDEN and part.get("type") != "null"  # null alone: nothing to fill in
        for field in _read(name, part, name in schema.get("required", ()))
    ]
    order = _COMMON.get(kind, "run_id dataset_ids").split()
    common = [field for name in order for field in fields if field.path == name]
    common += [field for field in fields if field.required and field not in common]
    return [*(replace(field, common=True) for field in common), *(field for field in fields if field not in common)]


def make_config(fields: Sequence[FormField], values: Mapping[str, Any]) -> JsonSchema:
    """The config of a form's values by path."""
    config: JsonSchema = {}
    for field in fields:
        value = _config_value(field, values[field.path])
        if value is _LEFT_OUT:
            continue
        place: JsonSchema | None = config
        *outer, last = field.path.split(".")
        for name in outer:
            place = None if place is None else place.setdefault(name, {})
        if place is not None:  # its part of the config was not switched off
            place[last] = value
    return config


def field_of(named: str | None, paths: Sequence[str]) -> str | None:
    """The field of the form that a rejection is about: "config.stations[2].lat" is about stations."""
    text = (named or "").removeprefix("config.")
    while text and text not in paths:
        text = text[: max(text.rfind("."), text.rfind("["), 0)]
    return text or None


def _read(path: str, part: JsonSchema, required: bool) -> list[FormField]:
    """The field of one property, or those of its parts."""
    options = part.get("anyOf", [part])
    inner = next(one for one in options if one.get("type") != "null")
    about: dict[str, Any] = {
        "path": path,
        "default": part.get("default"),
        "required": required,
        "nullable": any(one.get("type") == "null" for one in options),
        "help": part.get("description", inner.get("description", "")),
    }
    if inner.get("type") != "object" or "properties" not in inner:
        return [FormField(**about, **_sort(path, inner, about["nullable"]))]
    fields = []
    if about["nullable"]:  # a switch for the part as a whole
        fields.append(FormField(**{**about, "default": part.get("default", 0) is not None}, sort="switch"))
    defaults = part.get("default") or {}
    for name, one in inner["properties"].items():
        own = {**one, "default": defaults[name]} if name in defaults else one
        fields += _read(f"{path}.{name}", own, False)
    return fields


def _sort(path: str, part: JsonSchema, nullable: bool) -> dict[str, Any]:
    if path == "dataset_ids":
        return {"sort": "dataset" if part.get("maxItems") == 1 else "datasets"}
    if path == "run_id":
        return {"sort": "run"}
    if "enum" in part:
        return {"sort": "choice", "choices": tuple(part["enum"])}
    kind = part.get("type")
    if kind == "boolean":
        return {"sort": "choice", "choices": (True, False)} if nullable else {"sort": "switch"}
    if kind in ("integer", "number"):
        return {"sort": "number", "is_whole": kind == "integer"}
    if kind == "array" and "enum" in part.get("items", {}):
        return {"sort": "choices", "choices": tuple(part["items"]["enum"])}
    return {"sort": "text" if kind == "string" else "json"}


_LEFT_OUT: Final = object()


def _config_value(field: FormField, value: Any) -> Any:
    """The value for the config, or _LEFT_OUT."""
    if field.is_typed:
        text = (value or "").strip()
        if not text or field.sort == "text":
            return text or _LEFT_OUT
        value = _read_json(text) if field.sort == "json" else _read_number(text, field.is_whole)
        return _LEFT_OUT if value == field.default and not isinstance(value, str) else value
    if value == field.start:
        return _LEFT_OUT
    if field.sort == "switch" and field.nullable:
        return {} if value else None  # a part of the config as a whole
    if field.sort == "dataset":
        return [value]
    if field.is_many:
        return list(value) or (None if field.nullable else [])
    return value


def _read_number(text: str, is_whole: bool) -> Any:
    for read in (int, float):  # int first: a float would lose the end of a long seed
        with suppress(ValueError):
            value = read(text)
            if math.isfinite(value):
                return int(value) if is_whole and value == int(value) else value
    return text


def _read_json(text: str) -> Any:
    def reject(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=reject)
    except ValueError:
        return text
