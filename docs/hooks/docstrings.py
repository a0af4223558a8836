"""What the reference shows beside docstrings: fields with the comment of their line, tables of shapes in columns."""

import re
from typing import Any

import griffe

_ROW = re.compile(r"^\w[\w./-]*(, \w+)* {2,}\S")  # a name, then two spaces or more


class Shown(griffe.Extension):
    """Every run of aligned lines becomes a block of code, the comment of a field's line its docstring."""

    def on_instance(self, *, obj: griffe.Object, **_others: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_others: Any) -> None:
        """Give a field what its comment says: unit and reason."""
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class and attr.lines:
            _, _, comment = attr.lines[-1].partition("  # ")
            if comment and not comment.startswith(("type:", "noqa")):
                attr.docstring = griffe.Docstring(comment[:1].upper() + comment[1:] + ".", parent=attr)


def with_blocks(text: str) -> str:
    """Indent aligned lines, and what continues them, as Markdown marks code; other lines stay."""
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
