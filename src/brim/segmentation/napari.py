"""brim in napari (`pip install 'brim[napari]'`): open results of `brim segment predict`, outline cells of a layer.

napari finds both through napari.yaml; nothing here imports it, so that readers also work without a window.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.errors import ImageError
from brim.segmentation.objects.label_files import LABELS, read_zarr

if TYPE_CHECKING:
    from brim.segmentation.prediction import ModelLoader

LayerData = tuple[Any, dict[str, Any], str]  # data, arguments, kind of layer
LayerReader = Callable[[str | list[str]], list[LayerData]]


def get_reader(path: str | list[str]) -> LayerReader | None:
    """The function that opens a result of brim; None: it is none, and other plugins may try."""
    paths = [path] if isinstance(path, str) else path
    readers = [_reader_of(Path(one)) for one in paths]
    if not readers or None in readers:
        return None
    return lambda path: [
        reader(Path(one))
        for one, reader in zip([path] if isinstance(path, str) else path, readers, strict=True)
        if reader is not None
    ]


def _reader_of(path: Path) -> Callable[[Path], LayerData] | None:
    name = path.name.lower()
    if name.endswith(".geojson"):
        return read_polygons
    if name.endswith("_labels.tif"):
        return read_label_tiff
    if name.endswith(".ome.zarr") and (path / LABELS / ".zattrs").is_file():
        return read_label_group
    return None


def read_polygons(path: Path) -> LayerData:
    """Outlines as shapes, with the measurements as features; napari's coordinates are those of pixels' centres."""
    try:
        features = json.loads(path.read_text(encoding="utf-8"))["features"]
        rings = [np.array(feature["geometry"]["coordinates"][0][:-1], float) for feature in features]
        rows = [feature["properties"].get("measurements", {}) for feature in features]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as failure:
        raise ImageError(
            f"{path}: not GeoJSON with the polygons of a prediction ({type(failure).__name__}: {failure})"
        ) from failure
    outlines = [ring[:, ::-1] - 0.5 for ring in rings]
    names = list(rows[0]) if rows else []
    table = {name: [row.get(name) for row in rows] for name in names}
    options = {"name": path.stem, "shape_type": "polygon", "features": table, "face_color": "transparent"}
    return outlines, {**options, "edge_color": "yellow", "edge_width": 1}, "shapes"


def read_label_tiff(path: Path) -> LayerData:
    from brim.segmentation.images.reading import read_labels

    return read_labels(path), {"name": path.stem}, "labels"


def read_label_group(path: Path) -> LayerData:
    labels, scale = read_zarr(path)
    return labels, {"name": path.name.removesuffix(".ome.zarr"), "scale": scale}, "labels"


def segment_cells(
    image: "napari.types.ImageData",  # type: ignore[name-defined] # noqa: F821
    diameter_px: float = 0.0,
    threshold: float = 0.5,
    min_area_px: int = 16,
) -> "napari.types.LabelsData":  # type: ignore[name-defined] # noqa: F821
    """Outline every cell of an image (H, W) or (H, W, 3) with the model that comes with brim.

    diameter_px 0 estimates the size of the cells.
    """
    from brim.segmentation.config import DEFAULT_NETWORK, PredictConfig

    config = PredictConfig(batch_size=1, diameter=diameter_px or None, threshold=threshold, min_area=min_area_px)
    (prediction,) = _loader().stream([_as_image(np.asarray(image))], DEFAULT_NETWORK, config)
    if prediction.error is not None:
        raise ImageError(prediction.error)
    return prediction.labels


def _as_image(image: np.ndarray) -> np.ndarray:
    if image.dtype.kind != "f" or not image.size:
        return image
    finite = np.nan_to_num(image, copy=True, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = finite.min(), finite.max()
    return np.asarray((finite - low) / max(high - low, 1e-12))


@cache
def _loader() -> "ModelLoader":
    from brim.segmentation.config import DEFAULT_NETWORK
    from brim.segmentation.networks import default_weights
    from brim.segmentation.prediction import ModelLoader

    return ModelLoader({DEFAULT_NETWORK: default_weights()}, batch_sizes=None)
