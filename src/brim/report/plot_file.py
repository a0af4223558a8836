"""Charts of matplotlib as PNG files: checked before anything is measured, and written atomically."""

import importlib.util
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from brim.errors import ConfigError, StorageError


def check_plot(file: Path | str | None = None) -> None:
    """Reject a plot that cannot be drawn or written, before the minutes of measuring for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "plotting needs matplotlib", code="missing_package", hint='install it with pip install "brim[plot]"'
        )
    if file is None:
        return
    file = Path(file)
    if file.suffix.lower() != ".png" or file.is_dir():
        raise ConfigError(f"{file} is not a PNG file", field="plot", hint="choose another file for {plot}")
    with _write_errors(file):
        probe = _temporary(file)
        probe.touch()
        probe.unlink()


def save_figure(figure: Any, file: Path | str) -> None:
    """Write a matplotlib figure; the file that was there stays until the new one is whole."""
    file, picture = Path(file), io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    with _write_errors(file):
        temporary = _temporary(file)
        temporary.write_bytes(picture.getvalue())
        temporary.replace(file)


def _temporary(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.with_name(f".{file.name}.{os.getpid()}.new")


@contextmanager
def _write_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        with suppress(OSError):
            _temporary(file).unlink()
        reason = failure.strerror or failure
        raise StorageError(
            f"{file}: cannot write, {reason}", field="plot", hint="choose another file for {plot}"
        ) from failure
