"""Networks by name, their weights and their batch sizes: images in, polygons out.

    loader = ModelLoader(weights={"hrnet": "runs/cells"})
    for prediction in loader.predict_batch(["a.png", "b.tif"], "hrnet"):
        print(prediction.name, len(prediction.polygons))

The batch size is the one tuned on this device; if it is not known, it is tuned on first use, for some seconds, and
saved. One lock guards the device; it is held for a batch or for tuning, and released in every case.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from brim.engine.device import resolve_device, worker_count
from brim.engine.meter import within
from brim.errors import ConfigError, ImageError
from brim.segmentation.config import DEFAULT_TILE, QUICK_SECONDS, ImagePlanes, PredictConfig
from brim.segmentation.images import ImageInput, StoredImage, header_size
from brim.segmentation.images.reading import read_image
from brim.segmentation.networks import InferenceNetwork, create_model, find_model, load_model, traits_of
from brim.segmentation.objects import Polygon, Prediction
from brim.segmentation.objects.rings import trace
from brim.segmentation.prediction.patches import pad, padded, usable_tile
from brim.segmentation.prediction.scoring import resized
from brim.segmentation.prediction.stream import (
    MakePrediction,
    PredictProgress,
    PredictReport,
    predict_one,
    predict_stream,
)
from brim.segmentation.tuning import BatchSizeEntry, KnownSizes, device_key

PROBED = 1000  # images of a list whose headers are read to find the side to tune for


class ModelLoader:
    """Predicts with networks by name.

    Safe to use from several threads: their batches take turns on the device.
    """

    def __init__(
        self,
        weights: Mapping[str, str | Path] | None = None,
        device: str | torch.device = "auto",
        batch_sizes: str | Path | None = "auto",
        precision: str = "auto",
        tile: int = DEFAULT_TILE,
        resize: int | None = None,
        *,
        overlap: int | None = None,
        planes: ImagePlanes | None = None,
        tune_seconds: float = QUICK_SECONDS,
    ) -> None:
        """Files are read when they are first needed.

        weights       model name → a file of weights, or the directory of a training run
        batch_sizes   the file that tuning reads and writes; "auto": batch_sizes.json in the current directory if it
                      exists, else in the user's cache directory; None keeps results of tuning in memory
        precision     "auto" is the tuned one, else fp16 on a GPU and fp32 on a CPU
        tile          pixels, rounded down to a multiple of 32; a larger image is cut into overlapping windows
        resize        pixels; instead of cutting, every image is scaled to this side for the network
        planes        what is read of images with several channels, Z slices or times
        tune_seconds  for tuning on first use
        """
        chosen = planes or ImagePlanes()
        self._config = PredictConfig(
            tile=tile, overlap=overlap, resize=resize, channels=chosen.channels, z=chosen.z, t=chosen.t
        )
        self._weights = {name: Path(path) for name, path in (weights or {}).items()}
        for name in self._weights:
            find_model(name)
        self.device = resolve_device(str(device))
        self._sizes = KnownSizes(self.device, batch_sizes, precision, tune_seconds)
        self._limit = resize if resize is not None else usable_tile(tile)  # largest input of the network
        self.lock = threading.RLock()  # held while the device is used
        self._networks: dict[str, InferenceNetwork] = {}

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._weights)

    @property
    def only_model(self) -> str:
        """The name of the model, if there is exactly one."""
        if len(self._weights) != 1:
            raise ConfigError(
                "is missing, and there are several", field="model", code="missing", hint="name one of them"
            )
        return self.models[0]

    # Predicting

    def predict(
        self,
        image: ImageInput,
        model_name: str,
        threshold: float = 0.5,
        detect_holes: bool = True,
        strict: bool = False,
    ) -> Prediction:
        """Polygons of one image; an image that cannot be used raises ImageError."""
        config = self._configured(model_name, None, threshold, detect_holes, strict)
        network = self.load(model_name)
        entry = self._sizes.find(model_name)  # only an image in windows has more than one patch
        if entry is not None and entry.image_size >= self._limit:
            config = replace(config, batch_size=entry.optimal_batch_size)
        return predict_one(network, image, config, lock=self.lock)

    def predict_batch(
        self,
        images: Sequence[ImageInput],
        model_name: str,
        batch_size: int | None = None,
        threshold: float = 0.5,
        detect_holes: bool = True,
        strict: bool = False,
    ) -> list[Prediction]:
        """Polygons of many images, in their order; the prediction of an image that cannot be used has an `error`.

        batch_size None is the tuned optimum; a size above the safe limit is lowered to it, with a UserWarning. strict
        runs every image alone, so that its bits do not depend on the others, at the speed of batches of one.
        """
        return list(self.predict_stream(images, model_name, batch_size, threshold, detect_holes, strict))

    def predict_stream(
        self,
        images: Iterable[ImageInput],
        model_name: str,
        batch_size: int | None = None,
        threshold: float = 0.5,
        detect_holes: bool = True,
        strict: bool = False,
        *,
        progress: Callable[[PredictProgress], None] | None = None,
        on_report: Callable[[PredictReport], None] | None = None,
    ) -> Iterator[Prediction]:
        """Like predict_batch, but one prediction after the other in bounded memory, for any number of images.

        progress is called at least once a second from the caller's thread, on_report once at the end.
        """
        config = self._configured(model_name, batch_size, threshold, detect_holes, strict)
        return self.stream(images, model_name, config, progress=progress, on_report=on_report)

    def stream(
        self,
        images: Iterable[ImageInput],
        model_name: str,
        config: PredictConfig,
        *,
        progress: Callable[[PredictProgress], None] | None = None,
        on_report: Callable[[PredictReport], None] | None = None,
        make: MakePrediction | None = None,
        contrast: tuple[float, float] | None = None,
    ) -> Iterator[Prediction]:
        """Like predict_stream, with every setting but those of tiles, which are the loader's.

        `make` converts and may write the objects of an image; contrast replaces that of each image.
        """
        own = self._config
        config = replace(config, tile=own.tile, overlap=own.overlap, resize=own.resize)
        _check_several(images)
        if isinstance(images, Sequence) and not images and on_report is None:
            return iter(())
        network, config = self.prepare(images, model_name, config)
        return predict_stream(
            network, images, config, lock=self.lock, progress=progress, on_report=on_report, make=make,
            contrast=contrast,
        )  # fmt: skip

    def prepare(
        self, images: Iterable[ImageInput], model_name: str, config: PredictConfig
    ) -> tuple[InferenceNetwork, PredictConfig]:
        """The loaded network, and the config with its batch size tuned or limited."""
        self._weights_of(model_name)  # before anything is tuned
        if not config.strict and config.batch_size != 1:
            config = replace(config, batch_size=self._batch_size(model_name, images, config.batch_size))
        return self.load(model_name), config

    def _configured(
        self, model_name: str, batch_size: int | None, threshold: float, detect_holes: bool, strict: bool
    ) -> PredictConfig:
        find_model(model_name)
        return replace(
            self._config, batch_size=batch_size, threshold=threshold, detect_holes=detect_holes, strict=strict
        )

    def load(self, model_name: str) -> InferenceNetwork:
        """The network with its weights on the device; loaded once."""
        with self.lock:
            setting = self._sizes.setting(self._sizes.find(model_name))
            network = self._networks.get(model_name)
            if network is None or network.setting != setting:
                network = self._networks[model_name] = InferenceNetwork(
                    self._trained(model_name), self.device, setting, traits=traits_of(self._weights_of(model_name))
                )
            return network

    # Batch sizes

    def get_optimal_batch_size(self, model_name: str) -> int:
        """The smallest batch within noise of the best throughput; tuned now if it is not known."""
        return self._tuned(model_name, self._limit).optimal_batch_size

    def is_tuned(self, model_name: str) -> bool:
        return self._sizes.find(model_name) is not None

    def get_max_safe_batch_size(self, model_name: str) -> int:
        """The largest batch proven to fit with the reserve left free; tuned now if it is not known."""
        return self._tuned(model_name, self._limit).max_safe_batch_size

    def _batch_size(self, name: str, images: Iterable[ImageInput], wanted: int | None) -> int:
        side = self._limit
        entry = self._sizes.find(name)
        if entry is None or entry.image_size < side:
            largest = _largest_side(images)
            if largest == 0:
                return 1  # none of them can be read: nothing to tune for
            if largest is not None and self._config.resize is None:
                side = min(side, largest)
        entry = self._tuned(name, side)
        if wanted is None:
            return entry.optimal_batch_size
        if wanted > entry.max_safe_batch_size:
            warnings.warn(
                f"batch_size={wanted} is above {entry.max_safe_batch_size}, the largest proven safe for {name} on "
                f"{device_key(self.device)}; using {entry.max_safe_batch_size}",
                UserWarning,
                stacklevel=5,
            )
        return min(wanted, entry.max_safe_batch_size)

    def _tuned(self, name: str, side: int) -> BatchSizeEntry:
        """The entry for images of up to that side, tuned now if there is none."""
        find_model(name)

        def module(name: str) -> nn.Module:  # speed does not depend on weights, the check of a precision does
            return self._trained(name) if name in self._weights else create_model(name)

        with self.lock, within("tuning"):
            return self._sizes.find_or_tune(name, side, module)

    # Weights

    def _weights_of(self, name: str) -> Path:
        find_model(name)
        if name not in self._weights:
            raise ConfigError(
                f'model "{name}" has no weights, and random ones would find nothing',
                field="weights",
                code="missing",
                hint="give {weights}, or train some with {segment train}",
            )
        return self._weights[name]

    def _trained(self, name: str) -> nn.Module:
        return load_model(name, self._weights_of(name))

    # The two ends of a prediction, for callers who run the network themselves

    def preprocess_image_batch(self, images: Sequence[ImageInput]) -> Tensor:
        """(B, 3, H, W) uint8 on the device, as a network takes them; smaller images are extended by reflection.

        H and W are those of the largest image, rounded up to a multiple of 32, or `resize`.
        """
        _check_several(images)
        arrays = [read_image(image, planes=self._config) for image in images]
        side = self._config.resize
        if not arrays:
            return torch.empty(0, 3, side or 0, side or 0, dtype=torch.uint8, device=self.device)
        if side is not None:
            return torch.cat([resized(torch.from_numpy(array).to(self.device), side) for array in arrays])
        height, width = (padded(max(array.shape[axis] for array in arrays)) for axis in (0, 1))
        batch = torch.stack([pad(array, (height, width), pinned=False) for array in arrays])
        return batch.to(self.device).permute(0, 3, 1, 2)

    def postprocess_mask_batch(
        self, masks: Tensor | np.ndarray, threshold: float = 0.5, detect_holes: bool = True
    ) -> list[list[Polygon]]:
        """Polygons of each mask.

        masks  (B, H, W) or (B, 1, H, W)  float probabilities, or bool or whole numbers where non-zero is foreground
        """
        replace(self._config, threshold=threshold)  # checks it
        probabilities, inside = _as_masks(masks, threshold)

        def work(row: int) -> list[Polygon]:
            probability = None if probabilities is None else probabilities[row]
            return trace(inside[row], probability, detect_holes=detect_holes)

        with ThreadPoolExecutor(worker_count()) as pool:
            return list(pool.map(work, range(len(inside))))


def _check_several(images: object) -> None:
    single = isinstance(images, str | bytes | Path) or not isinstance(images, Iterable)
    if single or (isinstance(images, np.ndarray) and images.ndim != 4):
        shape = f" of shape {images.shape}" if isinstance(images, np.ndarray) else ""
        raise ConfigError(
            f"images is a single {type(images).__name__}{shape}, expected several; put it in a list, or use predict"
        )


def _largest_side(images: Iterable[ImageInput]) -> int | None:
    """Largest padded side in pixels; 0 if no image can be read, None if the images cannot be read twice."""
    if not isinstance(images, Sequence | np.ndarray):
        return None
    probed = images[:: max(1, len(images) // PROBED)]
    if any(isinstance(image, StoredImage) for image in probed):
        return None  # reading a header there takes as long as predicting
    return max((_side(image) for image in probed), default=0)


def _side(image: ImageInput) -> int:
    """Padded side in pixels, from the header if possible; 0 if the image cannot be read."""
    try:
        size = image.shape[:2] if isinstance(image, np.ndarray) else header_size(image)
        return padded(max(size or read_image(image).shape[:2]))
    except (ImageError, ValueError):
        return 0


def _as_masks(masks: Tensor | np.ndarray, threshold: float) -> tuple[np.ndarray | None, np.ndarray]:
    """Probabilities, if the masks are floats, and (B, H, W) uint8 masks."""
    if isinstance(masks, Tensor):  # NumPy has no bfloat16
        masks = (masks.detach().float() if masks.is_floating_point() else masks.detach()).cpu().numpy()
    array = np.asarray(masks)
    if array.ndim == 4 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 3:
        raise ConfigError(f"masks have shape {array.shape}, expected (B, H, W) or (B, 1, H, W)")
    if not np.issubdtype(array.dtype, np.floating):
        return None, (array != 0).astype(np.uint8)
    if array.size and not (array.min() >= 0 and array.max() <= 1):  # False for NaN as well
        raise ConfigError(
            f"masks go from {array.min():.3g} to {array.max():.3g}, expected probabilities in [0, 1]; "
            "apply a sigmoid to logits"
        )
    return array, (array > threshold).astype(np.uint8)
