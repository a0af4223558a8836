"""Charts of matplotlib as PNG files: checked before anything is measured, and written atomically."""

import importlib.util
import io
import tempfile
from pathlib import Path
from typing import Any

from brim.errors import ConfigError
from brim.report.page import write_errors, write_whole

INK, GREY = "#2b2b2b", "#8a8a8a"
STYLE: dict[Any, Any] = {  # for matplotlib.rc_context
    "font.size": 9.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "figure.constrained_layout.w_pad": 0.08,  # inches
}


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
    with write_errors(file, "plot"):
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()


def save_figure(figure: Any, file: Path | str) -> None:
    """Write a matplotlib figure; the file that was there stays until the new one is whole."""
    file, picture = Path(file), io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    with write_errors(file, "plot"):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, picture.getvalue(), "plot")
