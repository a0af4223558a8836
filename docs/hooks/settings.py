"""Writes the tables of settings in the documentation from the declarations in the code.

A page marks where a table belongs; what stands between the two comments is generated:

    <!-- settings: brim.rf.config.GenerateConfig -->
    <!-- end -->

python docs/hooks/settings.py     refreshes every page
"""

import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_origin

from brim.config import Setting, settings

DOCS = Path(__file__).parents[1]
_BLOCK = re.compile(r"^<!-- settings: ([\w.]+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)


def refreshed(text: str) -> str:
    """The page with all its tables as the code declares them now."""
    return _BLOCK.sub(lambda match: f"<!-- settings: {match[1]} -->\n\n{_table(match[1])}\n\n<!-- end -->", text)


def _table(name: str) -> str:
    module, _, config = name.rpartition(".")
    return table(getattr(import_module(module), config))


def table(config: type) -> str:
    """The settings of the class as a Markdown table: name, values, default and meaning."""
    lines = ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name, setting in settings(config).items():
        default = "required" if setting.required else _shown_default(setting)
        lines.append(f"| `{name}` | {_values(setting)} | {default} | {setting.doc} |")
    return "\n".join(lines)


def _values(setting: Setting) -> str:
    words = [f"`{choice}`" for choice in setting.choices]
    if setting.range is not None:
        words.append(f"{setting.range}{f' {setting.unit}' if setting.unit else ''}")
    elif setting.types:
        named = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
        words += [named.get(kind, "list" if get_origin(kind) is tuple else "object") for kind in setting.types]
    return ", ".join(words)


def _shown_default(setting: Setting) -> str:
    value = setting.default
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return ", ".join(f"`{item}`" for item in value) or "none"
    return "" if isinstance(value, tuple) or is_dataclass(value) else f"`{value}`"


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
