"""A configuration class as JSON schema, for the API and its forms."""

from dataclasses import is_dataclass
from typing import Any, get_origin

from brim.config.read import plain
from brim.config.settings import PRINTABLE, Setting, settings

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema(config: type) -> dict[str, Any]:
    """JSON schema of the class, complete in itself, with defaults and descriptions."""
    known = settings(config)
    return {
        "type": "object",
        "title": config.__name__,
        "properties": {name: _property(setting) for name, setting in known.items()},
        "required": [name for name, setting in known.items() if setting.required],
        "additionalProperties": False,
    }


def _property(setting: Setting) -> dict[str, Any]:
    out = _shape(setting)
    out["title"] = setting.name
    if setting.doc:
        out["description"] = setting.doc if not setting.unit else f"{setting.doc.rstrip('.')} ({setting.unit})."
    if not setting.required:
        out["default"] = plain(setting.default)
    return out


def _shape(setting: Setting) -> dict[str, Any]:
    is_closed = setting.names is not None and not setting.names.names()  # no text is accepted
    parts = [_part(setting, kind) for kind in setting.types if not (kind is str and is_closed)]
    if setting.choices:
        parts.append({"enum": list(setting.choices), "type": "string"})
    if setting.optional:
        parts.append({"type": "null"})
    return dict(parts[0]) if len(parts) == 1 else {"anyOf": parts}


def _part(setting: Setting, kind: Any) -> dict[str, Any]:
    if get_origin(kind) is tuple:
        assert setting.item is not None
        array: dict[str, Any] = {"type": "array", "items": _shape(setting.item)}
        if setting.length is not None:
            array |= {"minItems": setting.length.low}
            array |= {} if setting.length.high is None else {"maxItems": setting.length.high}
            array |= {"uniqueItems": True} if setting.length.unique else {}
        return array
    if isinstance(kind, type) and is_dataclass(kind):
        return schema(kind)
    part: dict[str, Any] = {"type": _TYPES.get(kind, "object")}
    if kind in (int, float) and setting.range is not None:
        part |= _bounds(setting)
    if kind is str and setting.length is not None:
        part |= {"minLength": setting.length.low, "pattern": PRINTABLE}
        part |= {} if setting.length.high is None else {"maxLength": setting.length.high}
    if kind is str and setting.names is not None:
        part["enum"] = list(setting.names.names())
    return part


def _bounds(setting: Setting) -> dict[str, Any]:
    range_ = setting.range
    assert range_ is not None
    low = range_.low if range_.also is None or range_.low is None else min(range_.low, range_.also)
    bounds = {
        "minimum": low,
        "maximum": range_.high,
        "exclusiveMinimum": range_.above,
        "exclusiveMaximum": range_.below,
        "multipleOf": range_.step if not range_.low or range_.low % (range_.step or 1) == 0 else None,
    }
    odd = {"not": {"multipleOf": 2}} if range_.step == 2 and range_.low and range_.low % 2 else {}
    return {key: value for key, value in bounds.items() if value is not None} | odd
