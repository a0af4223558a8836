"""Loads that were begun and did not end, kept on disk: read by the process that comes after one that died of them.

Registered models are loaded at every start. One whose loading ends the process would end every one that follows, and
with it the answers of all other models, so it is left alone after a few times, until it is registered anew.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from brim.errors import BrimError
from brim.service.prediction.process.models import Registered

LIMIT: Final = 3  # processes may also die of something else while a model is loaded


class Attempts:
    """How often each model's loading was begun and neither succeeded nor failed."""

    def __init__(self, file: Path) -> None:
        """Take the file and what an earlier process left in it."""
        self._file = file
        try:
            self._begun: dict[str, int] = json.loads(file.read_text())
        except (OSError, ValueError):
            self._begun = {}

    @contextmanager
    def __call__(self, wanted: Registered) -> Iterator[None]:
        """Note it within the block; BrimError where it has not ended too often before."""
        key = f"{wanted.name} {wanted.version}"
        begun = self._begun.get(key, 0)
        if begun >= LIMIT:
            raise BrimError(
                f"the prediction process ended {begun} times while it was loaded; "
                f'register it again with "brim models add {wanted.name} …", or restart the service to try once more'
            )
        self._note({**self._begun, key: begun + 1})
        try:
            yield
        finally:
            self._note({other: count for other, count in self._begun.items() if other != key})

    def _note(self, begun: dict[str, int]) -> None:
        self._begun = begun
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(begun))
            temporary.replace(self._file)
        except OSError:
            return  # a full disk: then nobody can know
