"""How much memory and time does an image too large for memory take, without its network?

    python benchmarks/bench_slides.py --side 40000

Draws discs that do not touch into a tiled TIFF, finds them by a threshold, tile by tile, and writes them as GeoJSON or
labels. Every disc must be found once; the areas of all must be those drawn. Prints a table, then one JSON line.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np
import tifffile

from brim.segmentation import FilesConfig
from brim.segmentation.prediction.slide_files import write_slide
from brim.segmentation.prediction.slides import TileLabels

CELL = 40  # pixels; one disc in each square of this side
TILE = 1024  # of the file


def drawn(side: int, top: int, left: int) -> np.ndarray:
    """One tile of the file, (TILE, TILE) uint8."""
    image = np.full((TILE, TILE), 20, np.uint8)
    for row in range(top // CELL, min((top + TILE) // CELL + 1, side // CELL)):
        for column in range(left // CELL, min((left + TILE) // CELL + 1, side // CELL)):
            number = (row * 73856093 ^ column * 19349663) & 0xFFFFFFFF
            radius = 6 + number % 10
            room = CELL - 2 * radius - 3
            y, x = radius + 2 + (number >> 4) % room, radius + 2 + (number >> 12) % room
            cv2.circle(image, (column * CELL + x - left, row * CELL + y - top), radius, (200,), -1)
    return image


def write_discs(path: Path, side: int) -> tuple[int, int]:
    """Number of discs, and of their pixels."""
    pixels = 0

    def tiles() -> Iterator[np.ndarray]:
        nonlocal pixels
        for top in range(0, side, TILE):
            for left in range(0, side, TILE):
                tile = drawn(side, top, left)
                pixels += int((tile[: side - top, : side - left] > 100).sum())
                yield tile

    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(
            tiles(), shape=(side, side), dtype=np.uint8, tile=(TILE, TILE), compression="deflate",
            compressionargs={"level": 1}, photometric="minisblack", metadata=None,
        )  # fmt: skip
    return (side // CELL) ** 2, pixels


def threshold(tiles: Iterable[np.ndarray]) -> Iterator[TileLabels]:
    for tile in tiles:
        yield TileLabels(cv2.connectedComponents((tile[..., 0] > 100).astype(np.uint8), connectivity=4)[1])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--side", type=int, default=12_000, help="pixels")
    options.add_argument("--format", choices=["geojson", "labels", "csv"], default="geojson")
    options.add_argument("--folder", type=Path, default=None, help="for the files; about 10 bytes per pixel")
    chosen = options.parse_args()
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        source, target = Path(name, "discs.tif"), Path(name, f"result.{chosen.format}")
        num, pixels = write_discs(source, chosen.side)
        base_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        began_s = time.perf_counter()
        found = write_slide(source, target, FilesConfig(format=chosen.format), lambda slide: threshold)
        seconds = time.perf_counter() - began_s
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        area = total_area(target, chosen.format)
        result_mb = target.stat().st_size / 1e6
    print("| side, px | discs | found | pixels | found | seconds | peak RSS, MB | before, MB | result, MB |")
    print("| --- " * 9 + "|")
    print(
        f"| {chosen.side} | {num} | {found} | {pixels} | {area} | {seconds:.1f} | {peak_mb:.0f} | {base_mb:.0f} "
        f"| {result_mb:.0f} |"
    )
    result = {"side": chosen.side, "discs": num, "found": found, "pixels": pixels, "area": area}
    print(
        json.dumps({**result, "seconds": round(seconds, 1), "peak_rss_mb": round(peak_mb), "base_mb": round(base_mb)})
    )


def total_area(file: Path, format: str) -> int:
    """Pixels of all objects in a result, without holding it in memory."""
    if format == "labels":
        with tifffile.TiffFile(file) as labels:
            return sum(int((part > 0).sum()) for part, *_ in labels.pages[0].segments(maxworkers=1))  # type: ignore
    area, rest, mark = 0, b"", b'"area_px":' if format == "geojson" else b","
    with file.open("rb") as opened:
        if format == "csv":
            return sum(int(float(line.split(mark)[2])) for line in opened if line[:1].isdigit())
        while piece := opened.read(2**24):
            parts = (rest + piece).split(mark)
            area += sum(int(float(part.partition(b",")[0])) for part in parts[1:-1])
            rest = mark + parts[-1] if len(parts) > 1 else parts[-1]
    return area + (int(float(rest[len(mark) :].partition(b",")[0])) if rest.startswith(mark) else 0)


if __name__ == "__main__":
    main()
