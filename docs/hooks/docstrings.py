"""What the Python reference shows beside docstrings: settings with their description, tables of shapes in columns."""

import re
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import griffe

from brim.config import settings

_ROW = re.compile(r"^\w[\w./-]*(, \w+)* {2,}\S")  # a name, then two spaces or more


class Shown(griffe.Extension):
    """Aligned lines become a code block; a field gets the description of its setting, or the comment on its line."""

    def on_instance(self, *, obj: griffe.Object, **_others: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_others: Any) -> None:
        """Give a field its description, and the type alone as its annotation."""
        if attr.docstring is not None or attr.parent is None or not attr.parent.is_class or not attr.lines:
            return
        text = described(attr.parent.module.path, attr.parent.name, attr.name)
        if text is None:
            _, _, comment = attr.lines[-1].partition("  # ")
            text = "" if comment.startswith(("type:", "noqa")) else comment[:1].upper() + comment[1:] + "."
        if len(text) > 1:
            attr.docstring = griffe.Docstring(text, parent=attr)
        if isinstance(attr.annotation, griffe.ExprSubscript) and str(attr.annotation.left) == "Annotated":
            marks = attr.annotation.slice
            attr.annotation = marks.elements[0] if isinstance(marks, griffe.ExprTuple) else marks


def described(module: str, owner: str, name: str) -> str | None:
    """The description, range and unit of a setting, or None if the field is not one."""
    if not module.endswith(".config"):
        return None
    config = getattr(import_module(module), owner)
    setting = settings(config).get(name) if is_dataclass(config) else None
    if setting is None or not setting.doc:
        return None
    bounds = f"{setting.range or ''} {setting.unit}".strip()
    return f"{setting.doc} ({bounds[:1].upper()}{bounds[1:]}.)" if bounds else setting.doc


def with_blocks(text: str) -> str:
    """Indent aligned lines and their continuations as a Markdown code block; leave other lines unchanged."""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        begins = _ROW.match(line) is not None
        continues = inside and line.startswith("  ")
        if begins and not inside and out and out[-1]:
            out.append("")
        if inside and not (begins or continues) and line:
            out.append("")
        inside = begins or continues
        out.append(f"    {line}" if inside else line)
    return "\n".join(out)
