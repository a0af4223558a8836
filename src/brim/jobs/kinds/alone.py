"""What a single value may be, found out by asking the library that checks it.

Ranges live in the checks of the library's own configurations and nowhere else. A request's value is right by itself if
some ordinary configuration takes it; the range that the API's document gives is where those configurations begin and
end to take it, found by halving.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, GetJsonSchemaHandler

from brim.errors import ConfigError

_STARTS = (1, 0, 0.5, 2, 16, 512)  # one of them is taken where the default says nothing
_GREATEST = math.nextafter(math.inf, 0)


class RefusedAlone(ValueError):
    """A value that no ordinary configuration takes; the text is the library's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alone:
    """The check of one field of a configuration, with everything else as usual."""

    name: str
    make: Callable[..., object]  # a configuration of keywords, or a ConfigError
    others: Sequence[Mapping[str, Any]] = ({},)  # the ordinary configurations: values of the other fields
    hint: Mapping[str, Any] = field(default_factory=dict)  # of the schema: what trying cannot find out

    def check(self, value: Any) -> Any:
        """The value, if one of the configurations takes it."""
        text = ""
        for others in self.others:
            try:
                self.make(**{**others, self.name: value})
            except ConfigError as failure:
                text = text or str(failure)
            else:
                return value
        raise RefusedAlone(text)

    def accepts(self, value: Any) -> bool:
        """Whether one of the configurations takes it."""
        try:
            self.check(value)
        except RefusedAlone:
            return False
        return True

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of the type with the range in it."""
        schema = dict(handler(core_schema))
        if "anyOf" in schema:
            return {**schema, "anyOf": [self._narrowed(part) for part in schema["anyOf"]]}
        return self._narrowed(schema)

    def _narrowed(self, part: dict[str, Any]) -> dict[str, Any]:
        if part.get("type") == "null":
            return part
        if part.get("type") in ("integer", "number"):
            part = {**part, **self._range(part)}
        if "enum" in self.hint:
            part = {key: value for key, value in part.items() if key in ("type", "title", "default")}
        return {**part, **self.hint}

    def _range(self, part: Mapping[str, Any]) -> dict[str, Any]:
        start = next(value for value in (part.get("default"), *_STARTS) if value is not None and self.accepts(value))
        step = self.hint.get("multipleOf", self.hint.get("not", {}).get("multipleOf"))
        if step is not None:
            return _stepped(self.accepts, start, step, part)
        return _whole(self.accepts, start, part) if part["type"] == "integer" else _real(self.accepts, start)


def alone(
    kind: Any,
    name: str,
    make: Callable[..., object],
    others: Sequence[Mapping[str, Any]] = ({},),
    hint: Mapping[str, Any] | None = None,
) -> Any:
    """The type with that check."""
    asked = Alone(name=name, make=make, others=others, hint=hint or {})
    return Annotated[kind, AfterValidator(asked.check), asked]


# Ranges


def _last(accepts: Callable[[int], bool], good: int, limit: int) -> int:
    """The last number that is taken on the way from one that is to a limit."""
    if accepts(limit):
        return limit
    bad = limit
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if accepts(middle) else (good, middle)
    return good


def _whole(accepts: Callable[[Any], bool], start: Any, part: Mapping[str, Any]) -> dict[str, Any]:
    start = int(start)
    return {
        "minimum": _last(accepts, start, part["minimum"]),
        "maximum": _last(accepts, start, part["maximum"]),
    }


def _stepped(accepts: Callable[[Any], bool], start: Any, step: float, part: Mapping[str, Any]) -> dict[str, Any]:
    def at(number: int) -> Any:
        return start + number * step if isinstance(step, int) else round(start + number * step, 9)

    def takes(number: int) -> bool:
        return accepts(at(number))

    low, high = part.get("minimum", -1_000_000), part.get("maximum", 1_000_000)
    return {
        "minimum": at(_last(takes, 0, int((low - start) // step))),
        "maximum": at(_last(takes, 0, int((high - start) // step))),
    }


def _real(accepts: Callable[[Any], bool], start: Any) -> dict[str, Any]:
    """The ends among all floating-point numbers; where the next one is shorter to write, it is an end left out."""

    def takes(number: int) -> bool:
        return accepts(_from_place(number))

    found: dict[str, Any] = {}
    for limit, beyond, closed, left_out in (
        (-_GREATEST, -math.inf, "minimum", "exclusiveMinimum"),
        (_GREATEST, math.inf, "maximum", "exclusiveMaximum"),
    ):
        last = _from_place(_last(takes, _place(float(start)), _place(limit)))
        if last == limit:
            continue
        after = math.nextafter(last, beyond)
        short = len(_plain(after)) < len(_plain(last))
        found[left_out if short else closed] = float(_plain(after if short else last))
    return found


def _plain(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _place(value: float) -> int:
    """Which floating-point number it is, counted from 0."""
    found: int = struct.unpack("<q", struct.pack("<d", abs(value)))[0]
    return found if value >= 0 else -found


def _from_place(number: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<q", abs(number)))[0]
    return found if number >= 0 else -found
