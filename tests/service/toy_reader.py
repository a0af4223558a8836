"""A reader whose functions hold, die and write, for tests; run by `Reading`."""

import ctypes
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from brim.errors import DatasetError
from brim.service.reader import functions, main


def echo(**values: Any) -> dict[str, Any]:
    return values


def hold(gate: str) -> None:
    """Until that file is there."""
    while not Path(gate).exists():
        time.sleep(0.01)


def die() -> None:
    ctypes.string_at(0)


def fail(kind: str) -> None:
    raise DatasetError("it is damaged", hint="make it again with {rf generate}") if kind == "ours" else ValueError("x")


def eat(gib: int) -> int:
    return len(bytearray(gib * 1024**3))


def write(file: str) -> None:
    Path(file).write_text("x")


def connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port)).close()


def facts() -> dict[str, Any]:
    return {
        "parent": os.getppid(),
        "threads": threading.active_count(),
        "torch": "torch" in sys.modules,
        "token": os.environ.get("BRIM_TOKEN"),
    }


def export(folder: str, **_: Any) -> list[str]:
    """Writes for as long as it lives."""
    place = Path(folder) / "export"
    while True:
        place.mkdir(parents=True, exist_ok=True)
        (place / "part").write_text("x")
        time.sleep(0.05)


functions.FUNCTIONS.update(
    {made.__name__: made for made in (echo, hold, die, fail, eat, write, connect, facts, export)}
)
if __name__ == "__main__":
    if "light" in sys.argv:
        main.import_libraries = lambda: None
    sys.exit(main.main(sys.argv[1:4]))
