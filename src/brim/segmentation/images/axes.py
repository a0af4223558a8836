"""Which page of a TIFF is which channel, Z slice and time, and how large a pixel is: OME-XML, ImageJ, tifffile, plain.

Descriptions may be hostile: they are limited in length, XML may declare no entities, and no plane exists that has no
page. Lengths are in micrometres.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from brim.errors import ImageError

MAX_DESCRIPTION_BYTES = 2**24
MAX_PLANES = 2**17
MAX_PLAIN_PAGES = 2**14
_LARGEST_PIXEL_UM = 20.0  # of a file that gives only dots per inch, which are those of a printer if larger
_UNITS = {
    "pm": 1e-6, "Å": 1e-4, "nm": 1e-3, "µm": 1.0, "um": 1.0, "micron": 1.0, "microns": 1.0, "micrometer": 1.0,
    "\\u00B5m": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6, "inch": 25400.0, "in": 25400.0,
}  # fmt: skip
_UM = {unit.casefold(): scale for unit, scale in _UNITS.items()}  # which also joins the two characters for micro

TiffPage = Any  # that of tifffile, which may not be installed
CountPages = Callable[[int], int]  # pages of the first one's size, of which no more than so many are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAxes:
    """The planes of a file, by page."""

    num_c: int = 1
    num_z: int = 1
    num_t: int = 1
    order: str = "CZT"  # the fastest first
    names: tuple[str, ...] = ()  # of channels
    in_pages: bool = False  # each channel has its page; else channels are the samples of a page
    is_described: bool = True
    is_contiguous: bool = False  # all planes lie behind the first one's, without pages of their own
    pixel_um: float | None = None
    pages: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (t, z, c) → page, if out of order

    def page(self, t: int, z: int, c: int) -> int:
        if self.pages:
            if (t, z, c) not in self.pages:
                raise ImageError(f"channel {c}, slice {z}, time {t} is described, but has no page")
            return self.pages[t, z, c]
        at, sizes = {"C": c, "Z": z, "T": t}, {"C": self.num_c if self.in_pages else 1, "Z": self.num_z}
        page, step = 0, 1
        for axis in self.order:
            page += at[axis] * step if axis != "C" or self.in_pages else 0
            step *= sizes.get(axis, self.num_t)
        return page


def page_axes(page: TiffPage, description: bytes, count_pages: CountPages) -> PageAxes:
    """The axes of a file with this first page."""
    if len(description) > MAX_DESCRIPTION_BYTES:
        raise ImageError(f"its description has {len(description)} bytes; at most {MAX_DESCRIPTION_BYTES} are read")
    text = description.rstrip(b"\0").decode("utf-8", "replace").strip()
    if text[-4:] == "OME>" or text.endswith(":OME>"):
        return _ome_axes(text, page, count_pages)
    if text.startswith("ImageJ="):
        return _imagej_axes(text, page, count_pages)
    if text.startswith('{"shape"'):
        axes = _shaped_axes(text, page)
        if axes is not None:
            return axes
    return PageAxes(num_z=count_pages(MAX_PLAIN_PAGES), is_described=False, pixel_um=_plain_pixel(text, page))


# OME-XML


def _ome_axes(text: str, page: TiffPage, count_pages: CountPages) -> PageAxes:
    pixels = _ome_pixels(text)
    try:
        size_c, size_z, size_t = (int(pixels.get(f"Size{axis}", "1")) for axis in "CZT")
        order = pixels.get("DimensionOrder", "XYCZT")[2:]
    except ValueError as error:
        raise ImageError(f"corrupt: the OME-XML's sizes are no numbers ({error})") from error
    samples = page.samplesperpixel
    in_pages = size_c > samples
    num_c = size_c if in_pages else 1
    if min(size_c, size_z, size_t) < 1 or sorted(order) != ["C", "T", "Z"] or num_c * size_z * size_t > MAX_PLANES:
        raise ImageError(f"corrupt: the OME-XML describes {size_c} x {size_z} x {size_t} planes in order {order}")
    names = tuple(channel.get("Name", "").strip() for channel in _children(pixels, "Channel"))
    names = (names + ("",) * size_c)[:size_c] if in_pages or size_c == len(names) else ()
    scale = _UM.get(pixels.get("PhysicalSizeXUnit", "µm").casefold())
    axes = PageAxes(
        num_c=num_c, num_z=size_z, num_t=size_t, order=order, names=names, in_pages=in_pages,
        pixel_um=_positive(pixels.get("PhysicalSizeX"), scale), pages=_ome_pages(pixels, order, num_c, size_z, size_t),
    )  # fmt: skip
    num_planes, num_pages = num_c * size_z * size_t, count_pages(num_c * size_z * size_t)
    if not axes.pages and num_pages < num_planes:
        raise ImageError(f"truncated: the OME-XML describes {num_planes} planes, the TIFF has {num_pages} of that size")
    return axes


def _ome_pixels(text: str) -> ElementTree.Element:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ImageError("corrupt: OME-XML that declares a document type")
    try:
        root = ElementTree.fromstring(text)  # no entities, and a limited length
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise ImageError(f"corrupt: the OME-XML cannot be read ({error})") from error
    for image in _children(root, "Image"):
        for pixels in _children(image, "Pixels"):
            return pixels
    raise ImageError("corrupt: the OME-XML describes no image")


def _children(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [child for child in element if child.tag.rpartition("}")[2] == name]


def _ome_pages(
    pixels: ElementTree.Element, order: str, num_c: int, num_z: int, num_t: int
) -> dict[tuple[int, int, int], int]:
    """Pages of planes that are listed one by one; empty if they come in order."""
    blocks = _children(pixels, "TiffData")
    files = {child.get("FileName", "") for block in blocks for child in _children(block, "UUID")}
    if len(files) > 1:
        raise ImageError(f"its planes are spread over {len(files)} files; save them as one OME-TIFF")
    if not blocks or all(not block.attrib or _is_whole(block, num_c * num_z * num_t) for block in blocks):
        return {}
    sizes = {"C": num_c, "Z": num_z, "T": num_t}
    pages: dict[tuple[int, int, int], int] = {}
    try:
        for block in blocks:
            at = {axis: int(block.get(f"First{axis}", "0")) for axis in "CZT"}
            page, num = int(block.get("IFD", "0")), int(block.get("PlaneCount", "1"))
            if not 0 <= num <= MAX_PLANES or not 0 <= page <= MAX_PLANES:
                raise ValueError(f"{num} planes from page {page}")
            for step in range(num):
                pages[at["T"], at["Z"], at["C"]] = page + step
                for axis in order:
                    at[axis] += 1
                    if at[axis] < sizes[axis]:
                        break
                    at[axis] = 0
            if len(pages) > MAX_PLANES:
                raise ValueError("too many planes")
    except ValueError as error:
        raise ImageError(f"corrupt: the OME-XML's list of pages cannot be read ({error})") from error
    return pages


def _is_whole(block: ElementTree.Element, num_planes: int) -> bool:
    firsts = {block.get(name, "0") for name in ("IFD", "FirstC", "FirstZ", "FirstT")}
    return firsts == {"0"} and block.get("PlaneCount") == str(num_planes)


# ImageJ and tifffile


def _imagej_axes(text: str, page: TiffPage, count_pages: CountPages) -> PageAxes:
    facts = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)

    def number(name: str) -> int:
        value = facts.get(name, "1").strip()
        return max(1, int(value)) if value.isascii() and value.isdigit() and len(value) < 9 else 1

    images, num_c, num_z, num_t = (number(name) for name in ("images", "channels", "slices", "frames"))
    if num_c * num_z * num_t != images:  # a stack without a hyperstack's axes
        num_c, num_z, num_t = 1, images, 1
    if images > MAX_PLANES:
        raise ImageError(f"corrupt: ImageJ's description has {images} images")
    num_pages = count_pages(images)
    is_contiguous = num_pages < images and num_pages == 1 and page.compression == 1
    if num_pages < images and not is_contiguous:
        raise ImageError(f"truncated: ImageJ's description has {images} images, the TIFF {num_pages} pages")
    in_pages = num_c > 1
    scale = _UM.get(facts.get("unit", "").strip().casefold())
    pixel = _per_length(page.tags.valueof(282), scale)
    labels = _imagej_labels(page)
    return PageAxes(
        num_c=num_c, num_z=num_z, num_t=num_t, in_pages=in_pages, is_contiguous=is_contiguous, pixel_um=pixel,
        names=(labels + ("",) * num_c)[:num_c] if in_pages else (),
    )  # fmt: skip


def _imagej_labels(page: TiffPage) -> tuple[str, ...]:
    metadata = page.tags.valueof(50839)
    labels = metadata.get("Labels") if isinstance(metadata, dict) else None
    return tuple(str(label) for label in labels) if isinstance(labels, list | tuple) else ()


def _shaped_axes(text: str, page: TiffPage) -> PageAxes | None:
    """Axes as tifffile writes them: {"shape": [2, 3, 40, 50], "axes": "ZCYX"}."""
    try:
        facts = json.loads(text)
        letters, shape = str(facts["axes"]).upper(), [int(size) for size in facts["shape"]]
        names = facts.get("Channel", {}).get("Name", ()) if isinstance(facts.get("Channel"), dict) else ()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if len(letters) != len(shape) or len(set(letters)) != len(letters) or not {"Y", "X"} <= set(letters):
        return None
    sizes = {letter: size for letter, size in zip(letters, shape, strict=True) if letter not in "YXS"}
    if not set(sizes) <= set("TZC") or min(sizes.values(), default=1) < 1 or math.prod(sizes.values()) > MAX_PLANES:
        return None
    num_c = sizes.get("C", 1)
    in_pages = num_c > 1 and page.samplesperpixel == 1
    order = "".join(reversed([letter for letter in letters if letter in "TZC"]))
    order += "".join(letter for letter in "CZT" if letter not in order)
    known = tuple(str(name) for name in names) if isinstance(names, list) else ()
    return PageAxes(
        num_c=num_c if in_pages else 1, num_z=sizes.get("Z", 1), num_t=sizes.get("T", 1), order=order,
        in_pages=in_pages, names=(known + ("",) * num_c)[:num_c] if num_c > 1 else (),
        pixel_um=_positive(facts.get("PhysicalSizeX"), _UM.get(str(facts.get("PhysicalSizeXUnit", "µm")).casefold())),
    )  # fmt: skip


# Size of a pixel


def _plain_pixel(text: str, page: TiffPage) -> float | None:
    aperio = re.search(r"\bMPP ?= ?([0-9.]{1,20})", text) if text.startswith("Aperio") else None
    if aperio is not None:
        return _positive(aperio[1], 1.0)
    unit = {2: "inch", 3: "cm"}.get(int(page.tags.valueof(296) or 2), "inch")
    pixel = _per_length(page.tags.valueof(282), _UM[unit])
    return pixel if pixel is not None and pixel < _LARGEST_PIXEL_UM else None


def _per_length(resolution: Any, scale: float | None) -> float | None:
    """From pixels per unit, a fraction."""
    try:
        pixels, units = resolution
        return None if scale is None else _positive(scale * units / pixels, 1.0)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None


def _positive(value: Any, scale: float | None) -> float | None:
    try:
        size = float(value) * (scale or 0)
    except (TypeError, ValueError, OverflowError):
        return None
    return size if math.isfinite(size) and size > 0 else None
