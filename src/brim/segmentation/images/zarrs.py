"""OME-Zarr folders, versions 0.4 and 0.5: axes, channels and the size of a pixel; chunks are read by zarr.

Only the level of full resolution is read. An image in a folder of several, as converters write them, is the first.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from brim.errors import ImageError
from brim.segmentation.images.stacks import RGB_NAMES, ImageWindow, Stack, StackShape

SUFFIX = ".zarr"
_INSTALL = "reading OME-Zarr needs zarr; pip install 'brim[zarr]'"
_UM = {"nanometer": 1e-3, "micrometer": 1.0, "millimeter": 1e3, "angstrom": 1e-4}
_RGB_COLOURS = ["FF0000", "00FF00", "0000FF"]


def is_zarr(path: Path) -> bool:
    """Whether a folder is an OME-Zarr image, by its name."""
    return path.suffix.lower() == SUFFIX and path.is_dir()


class ZarrStack(Stack):
    """The planes of an OME-Zarr image."""

    def __init__(self, path: Path) -> None:
        about, path = _about(path)
        with _errors():
            scales = about["multiscales"][0]
            level = scales["datasets"][0]
            names = [str(axis["name"] if isinstance(axis, dict) else axis).lower() for axis in scales["axes"]]
            self._array = _array(path / str(level["path"]), path)
            sizes = dict(zip(names, self._array.shape, strict=True))
            if len(sizes) != len(names) or not {"y", "x"} <= set(names) <= set("tczyx"):
                raise ImageError(f"an OME-Zarr with the axes {', '.join(names)}; expected some of t, c, z, y, x")
            self._axes = names
            self.shape = _shape(about, scales, level, sizes, np.dtype(self._array.dtype))

    def read(self, t: int, z: int, channels: tuple[int, ...], window: ImageWindow) -> np.ndarray:
        rows, columns = slice(window.top, window.bottom), slice(window.left, window.right)
        with _errors():
            parts = []
            for channel in channels:
                at: dict[str, Any] = {"t": t, "z": z, "c": channel, "y": rows, "x": columns}
                part = np.asarray(self._array[tuple(at[axis] for axis in self._axes)])
                parts.append(part if self._axes.index("y") < self._axes.index("x") else part.T)
            return np.stack(parts, 2)


def _about(path: Path) -> tuple[dict[str, Any], Path]:
    """The description of the image, and its folder: that of the first one if there are several."""
    for folder in (path, path / "0"):
        try:
            about = json.loads((folder / "zarr.json").read_text()).get("attributes", {})
            about = about.get("ome", about)
        except FileNotFoundError:
            try:
                about = json.loads((folder / ".zattrs").read_text())
            except FileNotFoundError:
                about = {}
            except (OSError, ValueError) as error:
                raise ImageError(f"corrupt: its .zattrs cannot be read ({error})") from error
        except (OSError, ValueError, AttributeError) as error:
            raise ImageError(f"corrupt: its zarr.json cannot be read ({error})") from error
        if isinstance(about, dict) and about.get("multiscales"):
            return about, folder
        if isinstance(about, dict) and "plate" in about:
            raise ImageError("a plate of many images; give the folders of its fields, such as A/1/0")
    raise ImageError("a Zarr folder without an OME-Zarr image (multiscales)")


def _array(path: Path, folder: Path) -> Any:
    try:
        import zarr
    except ImportError as error:
        raise ImageError(_INSTALL) from error
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ImageError("corrupt: its first level lies outside of its folder")
    return zarr.open_array(str(path), mode="r")


def _shape(
    about: dict[str, Any], scales: dict[str, Any], level: dict[str, Any], sizes: dict[str, int], dtype: np.dtype
) -> StackShape:
    num_c = sizes.get("c", 1)
    listed = about.get("omero", {}).get("channels", [])
    names = tuple(str(channel.get("label", "")) for channel in listed)
    is_rgb = num_c == 3 and dtype == np.uint8 and [str(one.get("color")).upper() for one in listed] == _RGB_COLOURS
    return StackShape(
        height=sizes["y"], width=sizes["x"], dtype=dtype, num_z=sizes.get("z", 1), num_t=sizes.get("t", 1),
        channels=RGB_NAMES if is_rgb else (names + ("",) * num_c)[:num_c], is_rgb=is_rgb,
        pixel_um=_pixel_um(scales, level),
    )  # fmt: skip


def _pixel_um(scales: dict[str, Any], level: dict[str, Any]) -> float | None:
    """From the scale of x; none without a unit of length."""
    at = next(number for number, axis in enumerate(scales["axes"]) if isinstance(axis, dict) and axis["name"] == "x")
    unit = _UM.get(str(scales["axes"][at].get("unit", "")))
    if unit is None:
        return None
    size = unit
    for step in (*level.get("coordinateTransformations", ()), *scales.get("coordinateTransformations", ())):
        if step.get("type") == "scale":
            size *= float(step["scale"][at])
    return size if np.isfinite(size) and size > 0 else None


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except Exception as error:  # broad on purpose: codecs and stores raise anything for damaged chunks
        raise ImageError(
            f"corrupt or truncated: the OME-Zarr cannot be read ({type(error).__name__}: {error})"
        ) from error
