"""The declaration of a setting: its type, range, unit, default and one sentence, read from the field of a dataclass."""

import difflib
import math
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

# Control characters, marks that change the writing direction and marks without width: a terminal or a database could
# not show them, or would show something else.
_HIDDEN = (
    r"\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff0-\uffff"
)
PRINTABLE = rf"^[^{_HIDDEN}]*[^ {_HIDDEN}][^{_HIDDEN}]*$"  # and not blank


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers a setting accepts: low to high inclusive, or strictly above and below."""

    low: float | None = None
    high: float | None = None
    _: KW_ONLY
    above: float | None = None
    below: float | None = None
    step: float | None = None  # only low + k·step, or k·step without a low end
    also: float | None = None  # one value outside the range, such as 0 for "choose for me"
    note: str = ""  # what helps somebody whose value was refused

    def __contains__(self, value: float) -> bool:
        if value == self.also:
            return True
        if (
            (isinstance(value, float) and not math.isfinite(value))  # an int may be too large for a float
            or (self.low is not None and value < self.low)
            or (self.high is not None and value > self.high)
        ):
            return False
        if (self.above is not None and value <= self.above) or (self.below is not None and value >= self.below):
            return False
        return self.step is None or self._is_on_step(value)

    def _is_on_step(self, value: float) -> bool:
        assert self.step is not None
        steps = (value - (self.low or 0)) / self.step
        return math.isfinite(steps) and abs(steps - round(steps)) < 1e-9

    def __str__(self) -> str:
        """As a sentence continues after "must be": "between 30 and 3000", "at least 1", "above 0"."""
        low = None if self.low is None else _digits(self.low)
        high = None if self.high is None else _digits(self.high)
        parts = []
        if low is not None and high is not None:
            parts.append(f"between {low} and {high}")
        elif low is not None:
            parts.append(f"at least {low}")
        elif high is not None:
            parts.append(f"at most {high}")
        if self.above is not None:
            parts.append(f"above {self.above:g}")
        if self.below is not None:
            parts.append(f"below {self.below:g}")
        text = " and ".join(parts)
        if self.step is not None and self.step != 1:
            text += f", in steps of {self.step:g}"
        return text if self.also is None else f"{self.also:g}, or {text}"


def _digits(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


@dataclass(frozen=True, slots=True)
class Length:
    """How many items a list, or characters a text, may have; such a text must be printable and not blank."""

    low: int = 0
    high: int | None = None
    unique: bool = False  # no item twice


@dataclass(frozen=True, slots=True)
class OneOf:
    """Names a text may be, where they are known only at run time, such as registered networks."""

    names: Callable[[], Collection[str]]


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a number, as it is written after it: MHz, dB, s."""

    symbol: str


@dataclass(frozen=True, slots=True)
class Doc:
    """What the setting does, in one sentence."""

    text: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration, as every surface sees it."""

    name: str
    types: tuple[Any, ...]  # what a value may be, None apart: bool, int, float, str, a dataclass, or a tuple of one
    choices: tuple[Any, ...]  # of a Literal; may stand beside types, as in int | Literal["all"]
    optional: bool  # None is accepted
    field: "Field[Any]"
    range: Range | None = None
    length: Length | None = None
    names: OneOf | None = None
    unit: str = ""
    doc: str = ""

    @property
    def required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING

    @property
    def default(self) -> Any:
        """The default, or None if there is none."""
        if self.field.default is not MISSING:
            return self.field.default
        return None if self.field.default_factory is MISSING else self.field.default_factory()

    @property
    def is_unlimited(self) -> bool:
        """Whether numbers have no upper end."""
        return self.range is None or (self.range.high is None and self.range.below is None)

    @property
    def all_choices(self) -> tuple[Any, ...]:
        """Choices of the type, and the names known at this moment."""
        return (*self.choices, *(self.names.names() if self.names else ()))

    @property
    def item(self) -> "Setting | None":
        """The items of a list as a setting of their own; the list's range and names are those of its items."""
        hint = next((get_args(kind)[0] for kind in self.types if get_origin(kind) is tuple), None)
        if hint is None:
            return None
        one = _setting(self.field, hint)
        return replace(one, range=one.range or self.range, names=one.names or self.names)

    @property
    def group(self) -> type | None:
        """The dataclass, for a nested configuration or a list of them."""
        kinds = (*self.types, *(self.item.types if self.item else ()))
        return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def settings(config: type) -> dict[str, Setting]:
    """The settings of a configuration class by name, in the order of its fields.

    A subclass fixes a setting with `field(init=False, default=…)`: then it is no setting any more, and cannot be given.
    """
    return _settings(config)


@cache
def _settings(config: Any) -> dict[str, Setting]:
    hints = get_type_hints(config, include_extras=True)
    return {field.name: _setting(field, hints[field.name]) for field in fields(config) if field.init}


def nearest(name: str, known: Collection[str]) -> str:
    """How to go on after an unknown name: the nearest known one, or all of them."""
    text = str(name)[:200].lower()
    begin = [one for one in known if text and one.lower().startswith(text)]  # unet: unet_tiny rather than hrnet
    near = begin or difflib.get_close_matches(text, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"


def _setting(field: "Field[Any]", hint: Any) -> Setting:
    hint, marks = _split(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types: list[Any] = []
    choices: list[Any] = []
    for part in parts:
        plain, more = _split(part)
        marks += more
        if get_origin(plain) is Literal:
            choices += get_args(plain)
        elif plain is not NoneType:
            types.append(plain)
    return Setting(
        name=field.name,
        types=tuple(types),
        choices=tuple(choices),
        optional=NoneType in parts,
        field=field,
        range=_mark(marks, Range),
        length=_mark(marks, Length),
        names=_mark(marks, OneOf),
        unit=getattr(_mark(marks, Unit), "symbol", ""),
        doc=getattr(_mark(marks, Doc), "text", ""),
    )


def _split(hint: Any) -> tuple[Any, list[Any]]:
    return (get_args(hint)[0], list(get_args(hint)[1:])) if get_origin(hint) is Annotated else (hint, [])


def _mark(marks: list[Any], kind: type) -> Any:
    return next((mark for mark in marks if isinstance(mark, kind)), None)
