"""Microscopes' own formats, through packages that are installed apart: CZI, LIF and ND2 with
`pip install 'brim[microscopes]'`, slides that are no TIFF with `pip install 'brim[openslide]'`.

Of several scenes, positions or images in a file the first is read.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from brim.errors import ImageError
from brim.segmentation.images.stacks import RGB_NAMES, ImageWindow, Stack, StackShape

log = logging.getLogger("brim")

_PACKAGES = {
    ".czi": "czifile", ".lif": "liffile", ".nd2": "nd2", ".mrxs": "openslide", ".vms": "openslide", ".vmu": "openslide",
}  # fmt: skip
_MOST_BYTES = 2**32  # of a CZI or LIF, which are read at once
_OPENSLIDE_MPP = "openslide.mpp-x"


def extra_of(name: str) -> str | None:
    """The extra of brim that reads files of this name; None: there is none."""
    package = _PACKAGES.get(Path(name).suffix.lower())
    return "microscopes" if package and package != "openslide" else package


def is_readable(name: str) -> bool:
    """Whether a file of this name is read by a package that is installed."""
    package = _PACKAGES.get(Path(name).suffix.lower())
    return package is not None and find_spec(package) is not None


def vendor_stack(path: Path) -> Stack:
    """The planes of a file whose name is_readable."""
    package = _PACKAGES[path.suffix.lower()]
    with _errors(package):
        return _OPENERS[package](path)


class _AxesStack(Stack):
    """An array with named axes: T, Z, C, Y, X, and S for the samples of a colour image."""

    def __init__(
        self, axes: Sequence[str], array: Any, names: Sequence[str], pixel_um: float | None, close: Callable[[], Any]
    ) -> None:
        """Axes by other names are left out, but for their first place."""
        self._axes, self._array, self._package_close = list(axes), array, close
        size = dict(zip(self._axes, array.shape, strict=True))
        if not {"Y", "X"} <= set(size):
            raise ImageError(f"has the axes {', '.join(axes)}; expected Y and X among them")
        self._samples = size.get("S", 1)
        is_rgb = self._samples in (3, 4) and size.get("C", 1) == 1
        channels = RGB_NAMES if is_rgb else (*names, *("",) * size.get("C", 1))[: size.get("C", 1)]
        self.shape = StackShape(
            height=size["Y"], width=size["X"], dtype=np.dtype(array.dtype), channels=tuple(channels), is_rgb=is_rgb,
            num_z=size.get("Z", 1), num_t=size.get("T", 1), pixel_um=pixel_um if pixel_um and pixel_um > 0 else None,
        )  # fmt: skip

    def read(self, t: int, z: int, channels: tuple[int, ...], window: ImageWindow) -> np.ndarray:
        rows, columns = slice(window.top, window.bottom), slice(window.left, window.right)
        parts = []
        for channel in channels:
            sample, own = (channel, 0) if self.shape.is_rgb else (0, channel)
            at: dict[str, Any] = {"T": t, "Z": z, "C": own, "S": sample, "Y": rows, "X": columns}
            with _errors("file"):
                part = np.asarray(self._array[tuple(at.get(axis, 0) for axis in self._axes)])
            parts.append(part if self._axes.index("Y") < self._axes.index("X") else part.T)
        return np.stack(parts, 2)

    def close(self) -> None:
        self._package_close()


def _nd2(path: Path) -> Stack:
    import nd2

    file = nd2.ND2File(path)
    try:
        names = [str(each.channel.name) for each in getattr(file.metadata, "channels", None) or ()]
        return _AxesStack(list(file.sizes), file.to_dask(), names, float(file.voxel_size().x), file.close)
    except BaseException:
        file.close()
        raise


def _czi(path: Path) -> Stack:
    import czifile

    with czifile.CziFile(str(path)) as file:
        _check_bytes(file.shape, file.dtype)
        text = str(file.metadata())
        if "<!DOCTYPE" in text:
            raise ImageError("corrupt: its metadata declares a document type")
        about = ElementTree.fromstring(text)
        metres = [one.findtext("Value") for one in about.iter("Distance") if one.get("Id") == "X"]
        kinds = next(about.iter("Channels"), None)
        names = [] if kinds is None else [str(one.get("Name") or "") for one in kinds]
        # its letters: S is a scene, 0 the samples
        axes = ["S" if axis == "0" else "scene" if axis == "S" else axis for axis in file.axes]
        return _AxesStack(axes, file.asarray(), names, 1e6 * float((metres or [None])[0] or 0), lambda: None)


def _lif(path: Path) -> Stack:
    import liffile

    with liffile.LifFile(path) as file:
        if len(file.images) > 1:
            log.warning("%s: the first of its %d images is used", path, len(file.images))
        image = file.images[0]
        _check_bytes(image.shape, image.dtype)
        along = np.asarray(image.coords.get("X", ()), float)
        pixel_um = 1e6 * abs(float(along[1] - along[0])) if len(along) > 1 else None
        return _AxesStack(image.dims, image.asarray(), (), pixel_um, lambda: None)


def _check_bytes(shape: Sequence[int], dtype: Any) -> None:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if size > _MOST_BYTES:
        raise ImageError(f"holds {size} bytes of pixels; at most {_MOST_BYTES} are read. Save it as OME-TIFF")


class _OpenSlideStack(Stack):
    """The full resolution of a slide; what lies outside of the scanned regions is white."""

    def __init__(self, path: Path) -> None:
        import openslide

        self._slide = openslide.OpenSlide(str(path))
        width, height = self._slide.dimensions
        pixel_um = self._slide.properties.get(_OPENSLIDE_MPP)
        self.shape = StackShape(
            height=height, width=width, dtype=np.dtype(np.uint8), channels=RGB_NAMES, is_rgb=True,
            pixel_um=float(pixel_um) if pixel_um else None,
        )  # fmt: skip

    def read(self, t: int, z: int, channels: tuple[int, ...], window: ImageWindow) -> np.ndarray:
        height, width = window.shape
        with _errors("openslide"):
            region = np.asarray(self._slide.read_region((window.left, window.top), 0, (width, height)))
        return np.where(region[..., 3:] > 0, region[..., :3], 255).astype(np.uint8)[..., list(channels)]

    def close(self) -> None:
        self._slide.close()


_OPENERS: dict[str, Callable[[Path], Stack]] = {
    "czifile": _czi, "liffile": _lif, "nd2": _nd2, "openslide": _OpenSlideStack,
}  # fmt: skip


@contextmanager
def _errors(package: str) -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except Exception as error:  # broad on purpose: these packages raise anything for a damaged file
        raise ImageError(f"corrupt or truncated: {package} cannot read it ({type(error).__name__}: {error})") from error
