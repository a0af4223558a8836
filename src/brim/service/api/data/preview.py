"""The first items of a dataset, small enough for a table: read from its files on request, nothing is kept."""

import math
from pathlib import Path
from typing import Any

from brim.errors import BrimError

Item = dict[str, Any]
_HEADS = (4 * 1024, 256 * 1024, 256 * 1024**2)  # bytes read for an image's size: a TIFF may have it at its end


def preview(path: Path, kind: str, limit: int) -> list[Item]:
    """Up to `limit` items; errors of the dataset are those of its reader."""
    return {"rf": _samples, "images": _images, "sequences": _sequences}[kind](path, limit)


def _samples(path: Path, limit: int) -> list[Item]:
    from brim.rf.datasets.inspect import named_columns, open_dataset

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
    from brim.jobs.registry.datasets import image_folders
    from brim.segmentation.images import find_images

    images, _ = image_folders(path)
    found = []
    for file in find_images([images])[:limit]:
        width, height = size_of(file)
        found.append({"name": file.relative_to(images).as_posix(), "width": width, "height": height})
    return found


def size_of(file: Path) -> tuple[int | None, int | None]:
    """Width and height in pixels, from as little of the file as it takes; neither for one that cannot be read."""
    from brim.segmentation.images import image_size

    try:
        size = file.stat().st_size
        for num_bytes in _HEADS:
            with file.open("rb") as opened:
                head = opened.read(num_bytes)
            try:
                return image_size(head, file.name)
            except BrimError:
                if num_bytes >= size:
                    break
    except OSError:
        pass
    return None, None


def _sequences(path: Path, limit: int) -> list[Item]:
    from brim.sequences.corpus.packed import Corpus

    corpus = Corpus.open(path)
    classes = corpus.classes
    return [
        {"id": id, "frames": int(frames), "label": classes[int(label)] if int(label) >= 0 else None}
        for id, frames, label in zip(corpus.ids[:limit], corpus.lengths[:limit], corpus.labels[:limit], strict=True)
    ]
