"""The first items of a dataset, small enough for a table: read from its files on request, nothing is kept."""

import math
from pathlib import Path
from typing import Any

Item = dict[str, Any]
_MAX_IMAGE_BYTES = 256 * 1024**2  # of a file that is opened for its size


def preview(path: Path, kind: str, limit: int) -> list[Item]:
    """Up to `limit` items; errors of the dataset are those of its reader."""
    return {"rf": _samples, "images": _images, "sequences": _sequences}[kind](path, limit)


def _samples(path: Path, limit: int) -> list[Item]:
    from brim.rf.inspect import named_columns, open_dataset

    dataset = open_dataset(path)
    if not len(dataset):
        return []
    names = ("index", "transmitter", "receivers", "present", "features", "gdop", "crlb_m")
    rows = {name: tensor.numpy() for name, tensor in dataset.rows(0, limit, names).items()}
    snr = [name for name, _ in named_columns(dataset.manifest, "features")].index("snr_db")
    features = rows["features"][:, :, snr]
    means = features[..., 0] if features.ndim == 3 else features
    return [_sample(rows, means, at) for at in range(len(rows["index"]))]


def _sample(rows: dict[str, Any], snr_db: Any, at: int) -> Item:
    heard = rows["present"][at].nonzero()[0]
    receivers = [{**_place(rows["receivers"][at][r]), "snr_db": _number(snr_db[at][r])} for r in heard]
    return {
        "index": int(rows["index"][at]),
        "transmitter": _place(rows["transmitter"][at]),
        "receivers_heard": len(receivers),
        "receivers": receivers,
        "snr_db": max((one["snr_db"] for one in receivers if one["snr_db"] is not None), default=None),
        "gdop": _number(rows["gdop"][at]),
        "bound_m": _number(rows["crlb_m"][at]),
    }


def _place(position: Any) -> Item:
    return {name: _number(value) for name, value in zip(("lat_deg", "lon_deg", "alt_m"), position, strict=True)}


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _images(path: Path, limit: int) -> list[Item]:
    from brim.jobs.sources import image_folders
    from brim.segmentation.images import find_images

    images, _ = image_folders(path)
    found = []
    for file in find_images([images])[:limit]:
        width, height = _size(file)
        found.append({"name": file.relative_to(images).as_posix(), "width": width, "height": height})
    return found


def _size(file: Path) -> tuple[int | None, int | None]:
    """Width and height in pixels; neither for a file that cannot be read."""
    from brim.errors import ImageError
    from brim.segmentation.containers import JPEG, PNG, TIFFS, read_jpeg, read_png, read_tiff
    from brim.segmentation.images import read_image

    try:
        data = file.read_bytes() if file.stat().st_size <= _MAX_IMAGE_BYTES else b""
        for starts, read in (((PNG,), read_png), ((JPEG,), read_jpeg), (TIFFS, read_tiff)):
            if data.startswith(starts):
                header = read(data)
                return header.width, header.height
        height, width = read_image(data).shape[:2]
    except (ImageError, OSError):
        return None, None
    return int(width), int(height)


def _sequences(path: Path, limit: int) -> list[Item]:
    from brim.sequences.corpus import Corpus

    corpus = Corpus.open(path)
    classes = corpus.classes
    return [
        {"id": id, "frames": int(frames), "label": classes[int(label)] if int(label) >= 0 else None}
        for id, frames, label in zip(corpus.ids[:limit], corpus.lengths[:limit], corpus.labels[:limit], strict=True)
    ]
