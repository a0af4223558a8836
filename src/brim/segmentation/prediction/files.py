"""From files and folders to files: every image is predicted and written as soon as it is ready.

Inputs and outputs may be URLs of an object store; the decoding threads read images from there.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from brim.config import part
from brim.engine.meter import within
from brim.engine.meter.spent import WORK
from brim.engine.storage import is_url, place_of
from brim.errors import ConfigError, ImageError, OutOfMemory
from brim.segmentation.config import NETWORKS, FilesConfig, PredictConfig
from brim.segmentation.images import ImageFile, StoredImage, find_images, is_image_name
from brim.segmentation.images.files import unreadable_kind
from brim.segmentation.images.reading import read_image
from brim.segmentation.images.writing import Writer
from brim.segmentation.objects import ImageObjects, Prediction
from brim.segmentation.prediction.loader import ModelLoader
from brim.segmentation.prediction.patches import ImageFrame
from brim.segmentation.prediction.slide_files import is_slide, predict_slide_file
from brim.segmentation.prediction.stream import PredictProgress, PredictReport, prediction_of

FEW_IMAGES = 64  # one by one they take less time than ten seconds of tuning would save


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesReport:
    report: PredictReport | None  # None: stopped before the end
    failures: dict[str, str]  # image → reason
    written: int
    kept: int = 0  # written by an earlier run
    kept_polygons: int | None = 0  # in the kept files; None if their format cannot be counted
    stopped: bool

    def as_dict(self) -> dict[str, Any]:
        assert self.report is not None
        polygons = None if self.kept_polygons is None else self.report.polygons + self.kept_polygons
        return self.report.as_dict() | {"images": self.report.images + self.kept, "polygons": polygons}


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

    A few images are predicted one by one unless the batch size is known; more are worth tuning it first. With resume,
    images whose file exists are skipped; files are written atomically. The one file of the format coco
    spans all images and is written anew.
    """
    with within("reading"):
        images = {str(image): image for image in find_inputs(inputs, out)}
    model = config.model or loader.only_model
    if model not in NETWORKS:
        with within("loading"):
            loader.load(model)  # code of others: before anything is created
    reports: list[PredictReport] = []
    failures: dict[str, str] = {}
    written: list[str] = []
    is_done = False
    classes = loader.load(model).traits.classes if config.format == "coco" else ()
    with Writer(out, config.format, list(images), classes) as writer:
        kept = {name for name in images if resume and config.format != "coco" and writer.has(name)}
        counts = [writer.polygons_in(name) for name in kept]
        left = [image for name, image in images.items() if name not in kept]
        slides = [image for image in left if isinstance(image, Path) and is_slide(image, config.format)]
        whole = [image for image in left if image not in slides] if slides else left
        if config.batch_size is None and len(whole) <= FEW_IMAGES and not loader.is_tuned(model):
            config = replace(config, batch_size=1)

        def report_progress(state: PredictProgress) -> None:
            if progress is not None:
                progress(replace(state, done=state.done + len(kept), total=len(images)))
            if stop is not None and stop():
                raise _Stopped

        def write(frame: ImageFrame, objects: ImageObjects) -> Prediction:
            """Write an image's file, in one of several threads; the polygons are not kept."""
            if not writer.write_objects(frame.name, (frame.height, frame.width), objects):
                shown = config.format in ("overlay", "csv")  # the image may have been removed since: an ImageError
                pixels = (
                    frame.pixels
                    if frame.pixels is not None or not shown
                    else read_image(images[frame.name], planes=config)
                )
                writer.write(prediction_of(frame, objects), pixels)
            written.append(frame.name)
            return Prediction(frame.name, frame.height, frame.width)

        def predict_slides() -> None:
            """After the others: each takes minutes."""
            for number, slide in enumerate(slides):
                began_s, name = time.perf_counter(), str(slide)

                def tell(share: float, done: int = len(whole) + number, began_s: float = began_s) -> None:
                    failed = len(failures)
                    report_progress(PredictProgress(done=done, failed=failed, total=len(left), rate=0.0, share=share))

                try:
                    num_objects = predict_slide_file(slide, loader, writer.path(name), config, tell)
                    written.append(name)
                except (ImageError, OutOfMemory) as failure:
                    failures[name], num_objects = str(failure), 0
                reports[0] = reports[0].with_image(num_objects, time.perf_counter() - began_s)

        with within("loading"):
            stream = loader.stream(
                whole, model, part(PredictConfig, config), progress=report_progress, on_report=reports.append,
                make=write,
            )  # fmt: skip
        with closing(cast("Generator[Prediction]", stream)), suppress(_Stopped), within(WORK):
            for prediction in stream:
                if prediction.error is not None:
                    failures[prediction.name] = prediction.error
            predict_slides()
            is_done = True
    return FilesReport(
        report=replace(reports[0], failed=len(failures)) if is_done else None,
        failures=failures,
        written=len(written),
        kept=len(kept),
        kept_polygons=None if None in counts else sum(count for count in counts if count),
        stopped=not is_done,
    )


def find_inputs(inputs: Sequence[Path | str], out: Path | str) -> list[ImageFile]:
    """Images of files, folders and URLs, without results in an output folder below them."""
    images = {str(image): image for source in inputs for image in _find(source, out)}
    if not images:
        folders = [Path(source) for source in inputs if not is_url(str(source))]
        kinds = (unreadable_kind(file.name) for folder in folders if folder.is_dir() for file in folder.rglob("*.*"))
        hint = next((kind for kind in kinds if kind), "give image files or a folder of them")
        raise ConfigError(f"{', '.join(map(str, inputs))}: no images found; {hint}")
    return list(images.values())


def _find(source: Path | str, out: Path | str) -> list[ImageFile]:
    path, results = place_of(source).path, place_of(out)
    if path is None:
        own = f"{results}/"
        below = f"{source.rstrip('/')}/".startswith(own) if isinstance(source, str) else False
        return [image for image in _find_stored(str(source)) if below or not str(image).startswith(own)]
    if results.path is None:
        return list(find_images([path]))
    place = results.path.resolve()
    below = path.resolve().is_relative_to(place)
    return [image for image in find_images([path]) if below or not image.resolve().is_relative_to(place)]


def _find_stored(url: str) -> list[StoredImage]:
    """The object at that URL, else the images among the objects below it."""
    place, (folder, _, name) = place_of(url), url.rstrip("/").rpartition("/")
    if name and is_image_name(name) and is_url(folder + "/") and not folder.endswith("//"):
        parent = place_of(folder)
        if parent.exists(name):
            return [StoredImage(parent, name)]
    images = [StoredImage(place, key) for key in place.walk() if is_image_name(key.rpartition("/")[2] or ".")]
    for image in images:
        if {"", ".", ".."} & set(str(image).partition("://")[2].split("/")):
            raise ConfigError(f'{image}: a part of its name is empty, "." or "..", which is no file name; rename it')
    return images


class _Stopped(Exception):
    """Leaves the stream while an image is computed, which may take minutes."""
