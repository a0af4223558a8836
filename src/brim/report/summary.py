"""How an object of the library shows itself: a few lines of text in a terminal, a table in a notebook."""

from collections.abc import Mapping
from html import escape
from typing import Any


class Summarised:
    """Base of classes that show facts about themselves instead of an address; a subclass says which."""

    __slots__ = ()

    def _summary(self) -> tuple[str, Mapping[str, Any]]:
        """A title, and facts by name, each shown on its own line."""
        return type(self).__name__, {}

    def __repr__(self) -> str:
        title, facts = self._summary()
        width = max(map(len, facts), default=0)
        return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in facts.items())])

    def _repr_html_(self) -> str:
        title, facts = self._summary()
        rows = "".join(
            f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(str(value))}</td>'
            for name, value in facts.items()
        )
        return f"<b>{escape(title)}</b><table>{rows}</table>"


def counted(number: int, thing: str) -> str:
    """1 row, 2 rows, 12 000 rows."""
    return f"{number:,} {thing}{'s' * (number != 1)}".replace(",", " ")
