"""The edge where a request becomes one of the library's configurations.

A model has the fields of a frozen dataclass with its types and defaults, and refuses what it does not know and what the
dataclass refuses of a single value; ranges stay where they are, in the dataclass itself. Whatever is refused becomes a
ConfigError: one sentence and the field's name. What the dataclass still refuses afterwards is values that are right by
themselves but not together: a Conflict.
"""

import difflib
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pydantic
from pydantic import BaseModel, ConfigDict, create_model

from brim.errors import ConfigError, Conflict
from brim.jobs.kinds.alone import RefusedAlone, alone
from brim.jobs.kinds.task import in_words

MAX_COUNT = 10**9  # of anything that is counted: epochs, samples, items of a batch
MAX_SEED = 2**63 - 1
MAX_DEVICES = 64  # of one machine
MAX_TEXT = 200  # characters of a name
CHECKPOINT_S = 5.0  # of training that a killed worker loses at most; the command line's default is longer
_SHOWN = 60  # characters of a value that a message repeats

_T = TypeVar("_T")


# What a database or a terminal could not show, or would show as something else: control characters, marks that turn the
# direction of writing, marks without width; and not blank.
_HIDDEN = (
    r"\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff0-\uffff"
)
PATTERN = rf"^[^{_HIDDEN}]*[^ {_HIDDEN}][^{_HIDDEN}]*$"

Text = Annotated[str, pydantic.Field(min_length=1, max_length=MAX_TEXT, pattern=PATTERN)]
Count = Annotated[int, pydantic.Field(ge=0, le=MAX_COUNT)]
Seed = Annotated[int, pydantic.Field(ge=0, le=MAX_SEED)]
Accelerator = Literal["auto", "cpu", "gpu", "cuda"]  # auto: the worker's own device
DatasetIds = Annotated[
    list[Text], pydantic.Field(min_length=1, max_length=100, json_schema_extra={"uniqueItems": True})
]


def _check_devices(value: Any) -> Any:
    if value == "all" or (type(value) is int and 1 <= value <= MAX_DEVICES):
        return value
    raise ValueError(f'must be "all" or a whole number from 1 to {MAX_DEVICES}: devices of this machine, no address')


def _check_cluster(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    raise ValueError("must be true or false: whoever runs the service chooses its cluster, no request names one")


Devices = Annotated[
    Annotated[int, pydantic.Field(ge=1, le=MAX_DEVICES)] | Literal["all"], pydantic.BeforeValidator(_check_devices)
]
Cluster = Annotated[bool, pydantic.BeforeValidator(_check_cluster)]
OneDatasetId = Annotated[list[Text], pydantic.Field(min_length=1, max_length=1)]


class Fields(BaseModel):
    """Base of all bodies: nothing unknown, nothing converted, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class RunOnDataset(Fields):
    """The config of kinds that measure a run."""

    run_id: Text
    dataset_ids: OneDatasetId
    accelerator: Accelerator = "auto"


def resolve_run_on_dataset(values: Mapping[str, Any]) -> dict[str, Any]:
    """All of it."""
    return {"accelerator": "auto", **values}


def one_place(values: Mapping[str, Any]) -> dict[str, Any]:
    """On how many devices of this machine, or on the cluster; not both."""
    devices, cluster = values.get("devices", 1), values.get("cluster", False)
    if cluster and devices != 1:
        raise Conflict(
            f"config.devices={_show(devices)} is of this machine, config.cluster=true is elsewhere; give one of them",
            field="config.devices",
        )
    return {"devices": devices, "cluster": cluster}


def tier_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The tier that preload_to_gpu means, where it means one: off is the host's memory."""
    tier, preload = values.get("tier", "auto"), values.get("preload_to_gpu")
    if tier != "auto" and preload is not None and preload != (tier == "vram"):
        raise Conflict(
            f"config.preload_to_gpu={str(preload).lower()} contradicts config.tier={tier!r}; give one of them",
            field="config.preload_to_gpu",
        )
    return {"tier": "ram"} if tier == "auto" and preload is False else {}


# From a dataclass to a model


def model_of(
    config: type,
    *,
    leave: Sequence[str] = (),
    most: Mapping[str, int] | None = None,
    name: str | None = None,
    make: Callable[..., object] | None = None,
    others: Sequence[Mapping[str, Any]] = ({},),
    also: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    hints: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> type[Fields]:
    """A model with the fields of a dataclass, but those in leave; more gives further or other ones.

    most    name → the greatest whole number taken, where the library has no limit but a service needs one
    make    what checks a single value, if not the dataclass itself
    others  values of other fields with which a single value may be right; see Alone
    also    name → further others, for that field
    hints   name → what to add to the schema of the field
    more    name → (type, default), as pydantic.create_model takes them
    """
    types_of, most, also, hints = get_type_hints(config), most or {}, also or {}, hints or {}
    known: dict[str, Any] = {
        field.name: (_edge_type(types_of[field.name], field.name), _default(field))
        for field in fields(config)
        if field.name not in leave
    } | more
    for limited, limit in most.items():
        kind, default = known[limited]
        known[limited] = (Annotated[kind, pydantic.Field(le=limit)], default)
    for plain in [name for name in known if name in types_of and _is_plain(types_of[name])]:
        kind, default = known[plain]
        with_these = (*others, *also.get(plain, ()))
        known[plain] = (alone(kind, plain, make or config, with_these, hints.get(plain)), default)
    made: type[Fields] = create_model(name or config.__name__, __base__=Fields, **known)
    return made


def _is_plain(hint: Any) -> bool:
    """Whether it is a number or a text, or may be one."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(part in (int, float, str) for part in parts)


def _edge_type(hint: Any, name: str) -> Any:
    """The type of a field as a request gives it."""
    if hint is int:
        return Seed if name == "seed" else Count
    if hint is str:
        return Text
    if is_dataclass(hint) and isinstance(hint, type):
        return model_of(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return _edge_union(get_args(hint), name)
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return list[_edge_type(get_args(hint)[0], name)]  # type: ignore[misc]
    return hint


def _edge_union(parts: tuple[Any, ...], name: str) -> Any:
    """One choice instead of several, so that a refusal names the field and not the part of a union."""
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    others = [_edge_type(part, name) for part in parts if get_origin(part) is not Literal]
    if choices:
        others.insert(0, Literal[tuple(choices)])
    return Union[tuple(others)]  # noqa: UP007  its members are known only now


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        default = field.default
        return list(default) if isinstance(default, tuple) else default
    if field.default_factory is not MISSING:
        return pydantic.Field(default_factory=field.default_factory)
    return ...


# From a request to values


def read(model: type[Fields], values: Mapping[str, Any], path: str = "") -> Fields:
    """The values as the model has them; the first fault is a ConfigError."""
    try:
        return model.model_validate(dict(values))
    except pydantic.ValidationError as failure:
        faults = failure.errors(include_url=False)
        # an unknown name before a missing one: it is most often the same thing, misspelt
        worst = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
        raise _refusal(model, worst, path) from None


def given(values: Fields) -> dict[str, Any]:
    """What the request itself said, without defaults, as plain values."""
    return values.model_dump(exclude_unset=True)


def build(config: type[_T], values: Mapping[str, Any], path: str = "config") -> _T:
    """The dataclass from plain values, nested ones too; what it refuses is a ConfigError."""
    hints = get_type_hints(config)
    ready = {name: _built(hints[name], value, f"{path}.{name}") for name, value in values.items()}
    return settle(lambda: config(**ready), path, tuple(hints))


def own(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are fields of the dataclass."""
    return {field.name: values[field.name] for field in fields(config) if field.name in values}


def _built(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, list):
        item = (get_args(hint) or (None,))[0]
        return tuple(_built(item, one, f"{path}[{at}]") for at, one in enumerate(value))
    inner = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
    return build(inner, value, path) if isinstance(inner, type) and isinstance(value, Mapping) else value


def settle(make: Callable[[], _T], path: str, names: Sequence[str], *, other: str | None = None) -> _T:
    """What make() returns; a ConfigError that begins with one of the names is that field's, else that of other.

    The values have been read, so each is right by itself: what is refused now is a conflict.
    """
    try:
        return make()
    except ConfigError as failure:
        if (failure.field or "").startswith(path):
            raise
        text = _in_json(failure)
        word = re.match(r"\w*", text)[0]  # type: ignore[index]  # matches everywhere
        if word in names:
            raise Conflict(plain_text(f"{path}.{text}"), field=f"{path}.{word}") from failure
        field = other or path
        raise Conflict(plain_text(text if text.startswith(field) else f"{field}: {text}"), field=field) from failure


def _in_json(failure: Exception) -> str:
    """A text of the library in the words of a request."""
    return re.sub(r"\bNone\b", "null", in_words(str(failure)))


# Refusals


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text without halves of characters",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "above {gt}",
    "literal_error": "one of {expected}",
    "string_pattern_mismatch": "text that can be printed, and not blank",
    "string_too_short": "at least {min_length} character long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def _refusal(model: type[Fields], fault: Any, path: str) -> ConfigError:
    place = [*([path] if path else []), *fault["loc"]]
    field = dotted(place)
    if fault["type"] == "extra_forbidden":
        return ConfigError(unknown(field, str(fault["loc"][-1]), _known(model, fault["loc"][:-1])), field=field)
    if fault["type"] == "missing":
        return ConfigError(plain_text(f"{field} is missing"), field=field)
    if isinstance(said := fault.get("ctx", {}).get("error"), RefusedAlone):
        text, within = _in_json(said), field.rpartition(".")[0]
        own = re.match(r"\w*", text)[0] == fault["loc"][-1]  # type: ignore[index]  # matches everywhere
        return ConfigError(plain_text(f"{within}.{text}" if own else f"{field}: {text}"), field=field)
    expected = _EXPECTED.get(fault["type"])
    if expected is None:
        return ConfigError(plain_text(f"{field} {fault['msg'].removeprefix('Value error, ')}"), field=field)
    context = {name: str(value).replace("'", "") for name, value in fault.get("ctx", {}).items()}
    shown = (
        ""
        if isinstance(fault["input"], list | dict) or fault["type"] == "string_unicode"
        else f"={_show(fault['input'])}"
    )
    return ConfigError(plain_text(f"{field}{shown} must be {expected.format(**context)}"), field=field)


def unknown(field: str, name: str, known: Sequence[str]) -> str:
    """The sentence on a field that is not known."""
    near = difflib.get_close_matches(name[:MAX_TEXT], known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return plain_text(f"{field} is unknown; {hint}")


def dotted(place: Sequence[Any]) -> str:
    """config.dataset_ids[0] of its parts."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' * bool(text)}{part}"
    return plain_text(text)


def plain_text(text: str, limit: int = 500) -> str:
    """Text that any encoding and any terminal takes: a request may hold halves of characters and control codes."""
    safe = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return safe if len(safe) <= limit else f"{safe[: limit - 3]}..."


def _show(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool | str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _known(model: type[BaseModel], place: Sequence[Any]) -> list[str]:
    """Names of the fields of the model at that place."""
    for part in place:
        if isinstance(part, int):
            continue
        found = model.model_fields.get(str(part))
        inner = _models_in(found.annotation) if found is not None else []
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _models_in(hint: Any) -> list[type[BaseModel]]:
    if isinstance(hint, type) and not get_args(hint) and issubclass(hint, BaseModel):
        return [hint]
    return [model for part in get_args(hint) for model in _models_in(part)]
