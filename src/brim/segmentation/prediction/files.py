"""From files and folders to files: every image found is predicted and written as soon as it is ready.

Inputs and outputs may be URLs of an object store: images are read from there by the threads that decode them.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from brim.engine.storage import is_url, place_of
from brim.errors import ConfigError, ImageError
from brim.segmentation.config import FilesConfig
from brim.segmentation.images import ImageFile, StoredImage, find_images, is_image_name
from brim.segmentation.images.reading import read_image
from brim.segmentation.images.writing import Writer
from brim.segmentation.objects import Prediction
from brim.segmentation.prediction.loader import ModelLoader
from brim.segmentation.prediction.stream import PredictProgress, PredictReport


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesReport:
    report: PredictReport | None  # None: stopped before the end
    failures: dict[str, str]  # image → why
    written: int
    kept: int = 0  # written by a run before this one
    kept_polygons: int | None = 0  # in them; None: their format does not tell
    stopped: bool

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        assert self.report is not None
        found = self.report.as_dict()
        polygons = None if self.kept_polygons is None else self.report.polygons + self.kept_polygons
        return found | {"images": self.report.images + self.kept, "polygons": polygons}


def predict_files(
    inputs: Sequence[Path | str],
    loader: ModelLoader,
    out: Path | str,
    config: FilesConfig,
    *,
    progress: Callable[[PredictProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    resume: bool = False,
) -> FilesReport:
    """Predict all images in files and folders, in order; images that fail are listed, the others are written.

    resume keeps what is there: an image whose file exists is not predicted again, since a file appears whole or not at
    all. Not so for coco, whose one file spans all images and is made anew.
    """
    images = {str(image): image for image in find_inputs(inputs, out)}
    names = list(images)
    reports: list[PredictReport] = []
    failures: dict[str, str] = {}
    done = 0
    with Writer(out, config.format, names) as writer:
        left = [name for name in names if not (resume and config.format != "coco" and writer.has(name))]
        kept, kept_polygons = len(names) - len(left), _count(writer, set(names).difference(left))
        stream = loader.predict_stream(
            [images[name] for name in left], config.model or loader.only_model, config.batch_size, config.threshold,
            config.detect_holes, config.strict, progress=_watched(progress, stop, kept), on_report=reports.append,
        )  # fmt: skip
        with closing(cast("Generator[Prediction]", stream)), suppress(_Stopped):
            for prediction in stream:
                image = images[prediction.name] if config.format == "overlay" else None
                reason = _write(writer, prediction, image)
                if reason is not None:
                    failures[prediction.name] = reason
                done += 1
    if not reports:
        return FilesReport(
            report=None, failures=failures, written=done - len(failures), kept=kept, kept_polygons=kept_polygons,
            stopped=True,
        )  # fmt: skip
    report = replace(reports[0], failed=len(failures))  # an image may be gone when its overlay is drawn
    return FilesReport(
        report=report, failures=failures, written=done - len(failures), kept=kept, kept_polygons=kept_polygons,
        stopped=False,
    )  # fmt: skip


def find_inputs(inputs: Sequence[Path | str], out: Path | str) -> list[ImageFile]:
    """Images of files, folders and URLs; results in a folder below those searched are not taken for images."""
    found: dict[str, ImageFile] = {}
    for given in inputs:
        for image in _find(given, out):
            found.setdefault(str(image), image)
    if not found:
        raise ConfigError(f"{', '.join(map(str, inputs))}: no images found; give image files or a folder of them")
    return list(found.values())


def _find(given: Path | str, out: Path | str) -> list[ImageFile]:
    path, results = place_of(given).path, place_of(out)
    if path is None:
        own = f"{results}/"
        asked = f"{given.rstrip('/')}/".startswith(own) if isinstance(given, str) else False
        return [image for image in _find_stored(str(given)) if asked or not str(image).startswith(own)]
    if results.path is None:
        return list(find_images([path]))
    place = results.path.resolve()
    asked = path.resolve().is_relative_to(place)
    return [image for image in find_images([path]) if asked or not image.resolve().is_relative_to(place)]


def _find_stored(url: str) -> list[StoredImage]:
    """The object of that URL, else the images among the objects below it."""
    place, (folder, _, name) = place_of(url), url.rstrip("/").rpartition("/")
    if name and is_image_name(name) and is_url(folder + "/") and not folder.endswith("//"):
        around = place_of(folder)
        if around.exists(name):
            return [StoredImage(around, name)]
    found = [StoredImage(place, key) for key in place.walk() if is_image_name(key.rpartition("/")[2] or ".")]
    for image in found:
        if {"", ".", ".."} & set(str(image).partition("://")[2].split("/")):
            raise ConfigError(f'{image}: a part of its name is empty, "." or ".."; rename it, it is no name of a file')
    return found


def _count(writer: Writer, names: Iterable[str]) -> int | None:
    """Polygons in files that are there; None where one does not tell."""
    counts = [writer.polygons_in(name) for name in names]
    return None if None in counts else sum(count for count in counts if count)


class _Stopped(Exception):
    """Leaves the stream in the middle of an image: one may take minutes."""


def _watched(
    progress: Callable[[PredictProgress], None] | None, stop: Callable[[], bool] | None, kept: int
) -> Callable[[PredictProgress], None]:
    def tell(where: PredictProgress) -> None:
        if progress is not None:
            total = None if where.total is None else where.total + kept
            progress(replace(where, done=where.done + kept, total=total))
        if stop is not None and stop():
            raise _Stopped

    return tell


def _write(writer: Writer, prediction: Prediction, image: ImageFile | None) -> str | None:
    """Write the prediction, on its image where one is given; why there is none, if so."""
    try:
        writer.write(prediction, read_image(image) if image is not None and prediction.error is None else None)
    except ImageError as failure:
        return str(failure)
    return prediction.error
