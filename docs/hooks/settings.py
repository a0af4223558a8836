"""Writes the tables of settings in the documentation from the declarations in the code.

A page marks where a table belongs; what stands between the two comments is generated:

    <!-- settings: brim.rf.config.GenerateConfig -->
    <!-- end -->

python docs/hooks/settings.py     refreshes every page
"""

import re
from importlib import import_module
from pathlib import Path

from brim.config import table

DOCS = Path(__file__).parents[1]
_BLOCK = re.compile(r"^<!-- settings: ([\w.]+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)


def refreshed(text: str) -> str:
    """The page with all its tables as the code declares them now."""
    return _BLOCK.sub(lambda match: f"<!-- settings: {match[1]} -->\n\n{_table(match[1])}\n\n<!-- end -->", text)


def _table(name: str) -> str:
    module, _, config = name.rpartition(".")
    return table(getattr(import_module(module), config))


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
