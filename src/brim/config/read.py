"""Values into configurations: each value against its declaration, and plain JSON or TOML into nested dataclasses.

A wrong value raises a ConfigError whose field is the dotted path, such as `config.stations[2].lat`, and whose code is
`unknown_field`, `missing`, `wrong_type`, `out_of_range`, `wrong_length`, `unprintable`, `repeated` or `unknown_choice`.
A configuration's own `__post_init__` raises with code `conflict` where values are right by themselves but not together.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_origin

from brim.config.settings import PRINTABLE, Length, Setting, nearest, settings
from brim.errors import BrimError, ConfigError, printable

_T = TypeVar("_T")
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character; most schema validators do not know them
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check(config: object) -> None:
    """Validate every field of a dataclass; whole numbers become floats and lists tuples where the field says so."""
    for name, setting in settings(config.__class__).items():
        value = getattr(config, name)
        accepted = _accept(setting, value, name)
        if accepted is not value:
            object.__setattr__(config, name, accepted)


def read(config: type[_T], values: Mapping[str, Any], path: str = "config") -> _T:
    """The configuration from plain values; a field in an error begins with path, and the error has all wrong fields."""
    known = settings(config)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must be an object with {', '.join(known)}", field=path, code="wrong_type")
    faults, ready = list[BrimError](), dict[str, Any]()
    for name in values:
        if name not in known:
            where = printable(_join(path, str(name)))
            near = nearest(str(name), list(known))
            faults.append(ConfigError(f"{where} is unknown; {near}", field=where, code="unknown_field"))
    for name, setting in known.items():
        if setting.required and name not in values:
            where = _join(path, name)
            faults.append(ConfigError(f"{where} is missing", field=where, code="missing"))
    for name, value in values.items():
        try:
            if name in known:
                ready[name] = _accept(known[name], value, _join(path, name))
        except ConfigError as failure:
            faults += [failure, *failure.more]
    raise_all(faults)
    try:
        return config(**ready)
    except ConfigError as failure:
        if failure.code == ConfigError.default_code:  # every value was accepted by itself
            failure.code = "conflict"
        raise failure.within(path) from failure


def raise_all(faults: Sequence[BrimError]) -> None:
    """Raise the first, if there is any, with the others."""
    if faults:
        faults[0].more = tuple(faults[1:])
        raise faults[0]


def part(config: type[_T], whole: object) -> _T:
    """The configuration of a base class out of one of its subclass: what belongs to the base alone."""
    return config(**{name: getattr(whole, name) for name in settings(config)})


def plain(value: Any) -> Any:
    """A configuration, or a value of one, as JSON-able values, which `read` accepts again."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in settings(type(value))}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _accept(setting: Setting, value: Any, path: str) -> Any:
    """The value in the field's own type, or a ConfigError."""
    if value is None and setting.optional:
        return None
    if any(type(choice) is type(value) and choice == value for choice in setting.choices):
        return value
    for kind in setting.types:
        converted = _convert(setting, kind, value, path)
        if converted is not _NO:
            return _bounded(setting, converted, path)
    if setting.choices and not (setting.types and not isinstance(value, str)):
        raise _error(
            path, value, f"is unknown; {nearest(str(value), [str(c) for c in setting.choices])}", "unknown_choice"
        )
    if setting.types == (bool,):  # the value says nothing, and may be an address or worse
        raise ConfigError(f"{path} must be true or false", field=path, code="wrong_type")
    raise _error(path, value, f"must be {_expected(setting)}", "wrong_type")


_NO = object()


def _convert(setting: Setting, kind: Any, value: Any, path: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            return _NO
        item = setting.item
        assert item is not None
        return tuple(_accept(item, one, f"{path}[{index}]") for index, one in enumerate(value))
    if isinstance(kind, type) and is_dataclass(kind):
        if isinstance(value, kind):
            return value
        return read(kind, value, path) if isinstance(value, Mapping) else _NO
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return _float(value) if is_number else _NO
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    origin = get_origin(kind) or kind
    return value if not isinstance(origin, type) or isinstance(value, origin) else _NO


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _bounded(setting: Setting, value: Any, path: str) -> Any:
    if setting.range is not None and isinstance(value, int | float) and value not in setting.range:
        note = f": {setting.range.note}" if setting.range.note else ""
        unit = f" {setting.unit}" if setting.unit else ""
        raise _error(path, value, f"must be {setting.range}{unit}{note}", "out_of_range")
    if setting.length is not None and isinstance(value, str | tuple):
        _check_length(setting.length, value, path)
    if setting.names is not None and isinstance(value, str) and value not in setting.names.names():
        known = setting.names.names()
        raise _error(
            path, value, f"is unknown; {nearest(value, known)}" if known else "is not accepted here", "unknown_choice"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise _error(path, value, "must be a finite number", "out_of_range")
    return value


def _check_length(length: Length, value: str | tuple[Any, ...], path: str) -> None:
    low, high = length.low, length.high
    if len(value) < low or (high is not None and len(value) > high):
        units = "characters" if isinstance(value, str) else "items"
        size = f"{low} to {high}" if high is not None else f"at least {low}"
        raise ConfigError(f"{path} has {len(value)} {units}; expected {size}", field=path, code="wrong_length")
    if isinstance(value, str) and (not re.fullmatch(PRINTABLE, value) or _SURROGATE.search(value)):
        raise _error(path, value, "must be printable and not blank", "unprintable")
    if length.unique and isinstance(value, tuple):
        for index, item in enumerate(value):
            if item in value[:index]:
                raise _error(f"{path}[{index}]", item, "is given twice", "repeated")


def _expected(setting: Setting) -> str:
    words = [_NAMES.get(kind, "a list" if get_origin(kind) is tuple else "an object") for kind in setting.types]
    words += [json.dumps(choice) for choice in setting.choices]
    if setting.optional:
        words.append("null")
    return " or ".join(words)


def _error(path: str, value: Any, rest: str, code: str) -> ConfigError:
    return ConfigError(rest, field=path, value=value, code=code)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
