"""Objects of an image: rings, polygons and their file formats. Importing this room loads neither OpenCV nor torch."""

from brim.segmentation.objects.formats import (
    COLOUR,
    MEDIA_TYPES,
    RINGS,
    CocoFile,
    annotation_lines,
    geojson,
    geojson_of,
    roi_bytes,
    roi_zip,
)
from brim.segmentation.objects.polygons import Polygon, Prediction, Rings, fill, measures, to_polygons

__all__ = [
    "COLOUR",
    "MEDIA_TYPES",
    "RINGS",
    "CocoFile",
    "Polygon",
    "Prediction",
    "Rings",
    "annotation_lines",
    "fill",
    "geojson",
    "geojson_of",
    "measures",
    "roi_bytes",
    "roi_zip",
    "to_polygons",
]
