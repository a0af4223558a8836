"""What segmentation finds in one image."""

from dataclasses import dataclass

import numpy as np

from brim.segmentation.objects.polygons import Polygon


@dataclass(frozen=True, slots=True)
class Prediction:
    """The objects of one image, or why there are none: `error` is set and the rest is empty."""

    name: str  # of the image: its path, or what the caller called it
    height: int  # pixels, of the image as it was given
    width: int
    polygons: tuple[Polygon, ...] = ()
    mask: np.ndarray | None = None  # (H, W) uint8, 0 or 255
    error: str | None = None

    @property
    def confidence(self) -> float | None:
        """Mean probability over all pixels inside polygons; None when there are none."""
        area = sum(polygon.area for polygon in self.polygons)
        if not area:
            return None
        return sum(polygon.confidence * polygon.area for polygon in self.polygons) / area
