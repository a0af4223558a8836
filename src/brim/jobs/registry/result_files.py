"""Files that a job leaves beside its result, for pages that draw more than a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from brim.errors import StorageError

ERRORS: Final = "errors.json"  # of rf.evaluate: where transmitters were put and where they are
EMBEDDING: Final = "embedding.json"  # of sequence.evaluate: sequences as points of a plane


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a file whole or not at all; its folder is made."""
    unfinished = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(file)
    except OSError as failure:
        raise StorageError(f"{file.name}: cannot write, {failure.strerror or failure}; free some space") from failure


def read_json(file: Path) -> dict[str, Any] | None:
    """What was written; None where it is not there, or not as we write it."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
