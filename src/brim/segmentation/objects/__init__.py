"""Objects of an image: rings, polygons and their file formats. Importing this room loads neither OpenCV nor torch."""

from brim.segmentation.objects.formats import (
    MEDIA_TYPES,
    RINGS,
    CocoFile,
    annotation_lines,
    geojson,
    geojson_of,
    roi_bytes,
    roi_zip,
)
from brim.segmentation.objects.polygons import (
    ImageObjects,
    Polygon,
    Prediction,
    Rings,
    fill,
    to_polygons,
    without_small,
)
from brim.segmentation.objects.tables import ChannelMeans, Measurements, csv_text, to_measurements, value_sums

__all__ = [
    "MEDIA_TYPES",
    "RINGS",
    "ChannelMeans",
    "CocoFile",
    "ImageObjects",
    "Measurements",
    "Polygon",
    "Prediction",
    "Rings",
    "annotation_lines",
    "csv_text",
    "fill",
    "geojson",
    "geojson_of",
    "roi_bytes",
    "roi_zip",
    "to_measurements",
    "to_polygons",
    "value_sums",
    "without_small",
]
