"""From files and folders to files: every image found is predicted and written as soon as it is ready."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from brim.errors import ConfigError
from brim.segmentation.formats import FORMATS, Writer
from brim.segmentation.images import find_images, read_image
from brim.segmentation.loader import ModelLoader
from brim.segmentation.predict import PredictProgress, PredictReport
from brim.segmentation.predict_config import check_batch_size, check_threshold
from brim.segmentation.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesConfig:
    """What to predict with and what to write."""

    model: str  # a name of the registry
    format: str = "geojson"
    batch_size: int | None = None  # None: the tuned optimum
    threshold: float = 0.5
    detect_holes: bool = True
    strict: bool = False

    def __post_init__(self) -> None:
        """Check every value but the model, which the loader knows."""
        if self.format not in FORMATS:
            raise ConfigError(f"format={self.format} is unknown; choose one of {', '.join(FORMATS)}")
        check_threshold(self.threshold)
        if self.batch_size is not None:
            check_batch_size(self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesReport:
    """What a run over files did."""

    report: PredictReport | None  # None: stopped before the end
    failures: dict[str, str]  # image → why
    written: int
    stopped: bool

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        assert self.report is not None
        return self.report.as_dict()


def predict_files(
    inputs: Sequence[Path],
    loader: ModelLoader,
    out: Path,
    config: FilesConfig,
    *,
    progress: Callable[[PredictProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> FilesReport:
    """Predict all images in files and folders, in order; images that fail are listed, the others are written."""
    names = find_images(inputs)
    if not names:
        raise ConfigError(f"{', '.join(map(str, inputs))}: no images found; give image files or a folder of them")
    reports: list[PredictReport] = []
    failures: dict[str, str] = {}
    written, stopped = 0, False
    with Writer(out, config.format, names) as writer:
        stream = loader.predict_stream(
            names, config.model, config.batch_size, config.threshold, config.detect_holes, config.strict,
            progress=progress, on_report=reports.append,
        )  # fmt: skip
        with closing(cast("Generator[Prediction]", stream)):
            for prediction in stream:
                if prediction.error is not None:
                    failures[prediction.name] = prediction.error
                else:
                    image = read_image(prediction.name) if config.format == "overlay" else None
                    writer.write(prediction, image)
                    written += 1
                if stopped := stop is not None and stop():
                    break
    return FilesReport(report=reports[0] if reports else None, failures=failures, written=written, stopped=stopped)
