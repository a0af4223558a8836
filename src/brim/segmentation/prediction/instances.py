"""From the maps of a network for instances to numbered, outlined and measured objects, and the scale they need.

Axes: B images, h, w pixels.

Networks see objects of some diameters best. If those found at an image's own scale are not among them, the image is
shown again at the scale that fits; if they do not rise to the height of a whole object, coarser scales are looked at
first, to learn their diameter. Where the edges of objects are uncertain over several pixels, the image is blurred or
noisy, and a coarser scale shows it sharper; a grey image on a bright background may be clearer inverted. The maps are
brought back to the image's size.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from brim.engine.pipeline import Pending
from brim.errors import OutOfMemory
from brim.segmentation.config import PredictConfig
from brim.segmentation.images.stacks import StoredChannels
from brim.segmentation.networks import InferenceNetwork
from brim.segmentation.objects import ChannelMeans, ImageObjects, Rings, to_measurements, value_sums
from brim.segmentation.objects.instances import MIN_AREA, Instances, find_instances, kinds_of
from brim.segmentation.objects.measuring import SIZES, find_objects
from brim.segmentation.objects.polygons import doubled_areas
from brim.segmentation.prediction.patches import (
    Blend,
    ImageFrame,
    TileGrid,
    padded,
    scaled_size,
    usable_tile,
)
from brim.segmentation.prediction.scoring import (
    BatchScores,
    BatchTracer,
    ScoredImage,
    TracedImage,
    TracedObjects,
    instance_maps,
    stretched,
)

DIAMETERS = (16.0, 31.0)  # pixels, of objects that need no other scale
_GROWN, _SHRUNK = 20.0, 26.0  # pixels, that smaller and larger objects are brought to
_LEAST = 13.0  # pixels, to which objects are shrunk at most for being blurred
_UNCERTAIN = (0.1, 0.5)  # probabilities
BLURRED, SHARP = 2.9, 2.4  # width of the uncertain edge: more is blurred, and brought to this
_CLEARER = 0.75  # of the width of the edge, for an inverted image to be taken
COMPLETE = 0.8  # median height of the peaks of objects seen at a scale that fits
_HIGHER = 0.05  # by which objects rise at a better scale where none is complete: less is chance, as in dense tissue
_LARGE = 44.0  # pixels; objects that seem larger may be larger than they seem
_SCALES = (0.5, 0.25, 0.125)  # at which objects are looked for that are too large
_RANGE = (1 / 16, 4.0)  # of scales
_ALIKE = 0.25  # octaves between two scales of which one will do
_MOST_PIXELS = 2**26  # of an image that is enlarged
_TOGETHER = 2**24  # pixels labelled together; more does not make it faster


class Size(NamedTuple):
    """What objects look like at a scale."""

    diameter: float  # pixels, of the object that the median pixel belongs to; 0: no objects
    height: float  # of their peaks, median
    edge: float = 0.0  # pixels of uncertain foreground for each of the objects' outlines, up to a constant factor

    @property
    def is_complete(self) -> bool:
        return self.height >= COMPLETE

    @property
    def fits(self) -> bool:
        return DIAMETERS[0] <= self.diameter <= DIAMETERS[1] and self.is_complete and self.edge <= BLURRED

    @property
    def scale(self) -> float:
        """The scale, relative to this one, at which the objects are seen best."""
        small, large = self.diameter < DIAMETERS[0], self.diameter > DIAMETERS[1]
        wanted = (_GROWN if small else _SHRUNK if large else self.diameter) / self.diameter
        if self.edge > BLURRED or small:
            wanted = min(wanted, max(SHARP / max(self.edge, 1e-6), _LEAST / self.diameter, 0.5))
        return wanted


@dataclass(frozen=True, slots=True)
class CopiedObjects(TracedObjects):
    """Objects of images that were labelled together, being copied to the host."""

    pending: Pending  # see InstanceTracer._copied
    detect_holes: bool
    classes: tuple[str, ...] = ()

    def wait(self) -> None:
        self.pending.wait()

    def of(self, place: int, frame: ImageFrame) -> ImageObjects:
        """The objects of the image at this place; waits for the copy."""
        host = {name: tensor.numpy() for name, tensor in self.pending.wait().items()}
        start, end = host["ring_ends"][place : place + 2].tolist()
        first = host["first"][start : end + 1]
        points, first = host["points"][first[0] : first[-1]].copy(), first - first[0]
        owner = host["owner"][start:end] - start
        area = -doubled_areas(points, first[:-1], np.diff(first)) / 2 if len(owner) else np.zeros(0)
        rows = slice(*host["object_ends"][place : place + 2].tolist())
        table = host["table"][rows].copy()
        outlines = np.flatnonzero(owner == np.arange(len(owner)))
        mass = np.zeros(len(owner))
        mass[outlines] = table[:, SIZES.index("confidence")] * table[:, SIZES.index("area")]
        if not self.detect_holes:
            owner = np.where(owner == np.arange(len(owner)), owner, -1)
        labels = host["labels"][place, : frame.height, : frame.width]
        labels = labels.view(np.uint16) if labels.dtype == np.int16 else labels.view(np.uint32)
        means = _channel_means(labels, table, frame.measured)
        measurements = to_measurements(table, frame.pixel_um, means)
        if self.classes:
            measurements = measurements._replace(kind=host["kind"][rows].copy(), classes=self.classes)
        return ImageObjects(Rings(points, first, area, mass, owner), None, labels.copy(), measurements)


class InstanceTracer(BatchTracer):
    """Finds instances; an image that does not fit on the device fails alone."""

    def __init__(
        self,
        network: InferenceNetwork,
        lock: AbstractContextManager[Any],
        config: PredictConfig,
        batch_size: Callable[[], int],
    ) -> None:
        """lock is held while the network runs."""
        super().__init__(network.device)
        self._network, self._lock, self._config, self._batch_size = network, lock, config, batch_size
        self._min_area = MIN_AREA if config.min_area is None else config.min_area
        self._tile = usable_tile(config.tile)
        self._classes = network.traits.classes
        self._rescales = network.traits.scale is None and config.diameter is None and config.resize is None

    def _parts(self, scores: BatchScores, group: list[ScoredImage]) -> Iterator[list[ScoredImage]]:
        num = max(1, _TOGETHER // scores.probability[0, 0].numel())
        return (group[start : start + num] for start in range(0, len(group), num))

    def _too_large(self, scores: BatchScores, scored: ScoredImage, message: str) -> TracedImage:
        scored.frame.failure = OutOfMemory(f"{scored.frame.name}: {message}")
        return TracedImage(scored.frame)

    def _traced(self, scores: BatchScores, part: list[ScoredImage]) -> list[TracedImage]:
        frames = [each.frame for each in part]
        maps = _cut([scores.probability[each.row] for each in part], frames)
        instances = self._instances(maps)
        labels = instances.labels
        if self._rescales:
            for place, size in enumerate(sizes_of(instances, maps[:, 0])):
                better = None if size.fits else self._rescaled(frames[place], size)
                if better is not None:
                    maps[place, :, : frames[place].height, : frames[place].width] = better
                    labels[place] = self._instances(maps[place : place + 1]).labels[0]
        images = self._images(scores, part, labels.shape[1:])
        pending = self._copied(labels, maps, images)
        objects = CopiedObjects(pending, self._config.detect_holes, self._classes)
        return [
            TracedImage(each.frame, scores.host, each.row, place=place, objects=objects)
            for place, each in enumerate(part)
        ]

    def _instances(self, maps: Tensor) -> Instances:
        return find_instances(maps[:, 0], maps[:, 1], threshold=self._config.threshold, min_area=self._min_area)

    def _images(self, scores: BatchScores, part: list[ScoredImage], shape: torch.Size) -> Tensor | None:
        """(B, 3, h, w) uint8, the pixels to be measured."""
        if scores.images is not None:
            return torch.stack([scores.images[each.row, :, : shape[0], : shape[1]] for each in part])
        pixels = [each.frame.pixels for each in part]
        images = torch.zeros((len(part), 3, *shape), dtype=torch.uint8, device=self._device)
        for image, own in zip(images, pixels, strict=True):
            if own is None:
                return None
            own = own if own.flags.writeable else own.copy()  # torch warns, although the tensor is only read
            image[:, : own.shape[0], : own.shape[1]] = torch.from_numpy(own).to(self._device).permute(2, 0, 1)
        return images

    def _copied(self, labels: Tensor, maps: Tensor, images: Tensor | None) -> Pending:
        objects = find_objects(labels, maps[:, 0], images)
        kinds = {"kind": kinds_of(objects.labels, maps[:, 2:], objects.object_ends)} if self._classes else {}
        narrow = len(objects.table) < 2**16
        return self._copies.start(
            {
                "points": objects.rings.points,
                "first": objects.rings.first,
                "owner": objects.owner,
                "ring_ends": objects.ring_ends,
                "object_ends": objects.object_ends,
                "table": objects.table,
                "labels": objects.labels.to(torch.int16) if narrow else objects.labels,  # the bits of uint16
                **kinds,
            }
        )

    # Scales

    def _rescaled(self, frame: ImageFrame, size: Size) -> Tensor | None:
        """Maps (maps, H, W) of the scale that fits the objects; None: the image's own."""
        if frame.pixels is None:
            return None
        pixels = frame.pixels if frame.pixels.flags.writeable else frame.pixels.copy()
        image = stretched(torch.from_numpy(pixels).to(self._device).permute(2, 0, 1)[None], [frame.contrast])
        best, scale = size, 1.0
        inverts = False
        if size.edge > SHARP and _is_bright(pixels):
            seen = self._size_at(255 - image, 1.0)
            inverts = seen.is_complete and seen.edge < _CLEARER * size.edge
            image, best = (255 - image, seen) if inverts else (image, best)
        if not best.is_complete or best.diameter > _LARGE:
            for smaller in _SCALES:
                if min(scaled_size((frame.height, frame.width), smaller)) < padded(1) // 2:
                    break
                seen = self._size_at(image, smaller)
                if seen.diameter and seen.height > best.height + (0 if seen.is_complete else _HIGHER):
                    best, scale = seen, smaller
                if seen.is_complete and seen.diameter <= _LARGE:
                    break
        if not best.diameter:
            return None
        wanted = scale * best.scale
        wanted = min(max(wanted, _RANGE[0]), _RANGE[1], math.sqrt(max(1.0, _MOST_PIXELS / image[0, 0].numel())))
        wanted = scale if abs(math.log2(wanted / scale)) < _ALIKE else wanted
        if wanted == 1.0 and not inverts:
            return None
        maps = self._maps_at(image, wanted)
        return F.interpolate(maps[None], (frame.height, frame.width), mode="bilinear", antialias=True)[0]

    def _size_at(self, image: Tensor, scale: float) -> Size:
        maps = self._maps_at(image, scale)[None]
        return sizes_of(self._instances(maps), maps[:, 0])[0]

    def _maps_at(self, image: Tensor, scale: float) -> Tensor:
        """Maps (maps, h, w) of an image (1, 3, H, W) uint8 at a scale, in windows if it is larger than a tile."""
        height, width = scaled_size(tuple(image.shape[2:]), scale)
        mode = "bicubic" if scale > 1 else "bilinear"
        shown = F.interpolate(image.float(), (height, width), mode=mode, antialias=scale < 1)
        shape = (padded(height), padded(width))
        pad = (0, shape[1] - width, 0, shape[0] - height)
        mode = "reflect" if pad[1] < width and pad[3] < height else "replicate"
        shown = F.pad(shown, pad, mode=mode).round_().clamp_(0, 255).to(torch.uint8)
        grid = TileGrid(*shape, self._tile, self._config.overlap)
        rows, columns = grid.rows.weights().to(self._device), grid.columns.weights().to(self._device)
        windows, blend = list(grid), None
        num = max(1, self._batch_size())
        for start in range(0, len(windows), num):
            some = windows[start : start + num]
            tiles = [
                shown[0, :, one.top : one.top + grid.rows.size, one.left : one.left + grid.columns.size] for one in some
            ]
            with self._lock:
                logits = self._network(torch.stack(tiles))
            maps = instance_maps(logits)
            blend = blend or Blend(grid, rows, columns, maps.shape[1])
            for window, own in zip(some, maps, strict=True):
                blend.add(window, own)
        assert blend is not None
        return blend.total[:, :height, :width]


def _channel_means(labels: np.ndarray, table: np.ndarray, measured: StoredChannels | None) -> ChannelMeans | None:
    if measured is None:
        return None
    sums = value_sums(labels, measured.values, len(table))
    return ChannelMeans(measured.names, sums / table[:, SIZES.index("area"), None], measured.shown)


def sizes_of(instances: Instances, foreground: Tensor) -> list[Size]:
    """The size of the objects of each image; foreground (B, h, w) is the map they come from."""
    least, most = _UNCERTAIN
    inside = (foreground > most).flatten(1).sum(1)
    uncertain = (foreground > least).flatten(1).sum(1) - inside
    share = (uncertain / inside.clamp(min=1)).cpu().numpy()
    image, area, peak = (
        torch.stack([instances.image.double(), instances.area.double(), instances.peak.double()]).cpu().numpy()
    )
    return [_size(area[image == number], peak[image == number], float(own)) for number, own in enumerate(share)]


def _size(area: np.ndarray, peak: np.ndarray, uncertain: float) -> Size:
    if not len(area):
        return Size(0.0, 0.0)
    # by area: at a scale that is too fine, many small pieces lie beside the objects
    ascending = np.sort(area)
    middle = ascending[np.searchsorted(ascending.cumsum(), area.sum() / 2)]
    diameter = 2 * math.sqrt(middle / math.pi)
    return Size(diameter, float(np.median(peak)), uncertain * diameter)


def _is_bright(pixels: np.ndarray) -> bool:
    """Whether an image (H, W, 3) is grey, and most of it is bright."""
    some = pixels[::8, ::8]
    grey = np.array_equal(some[..., 0], some[..., 1]) and np.array_equal(some[..., 1], some[..., 2])
    return grey and bool(np.median(some) > some.mean())


def _cut(maps: list[Tensor], frames: list[ImageFrame]) -> Tensor:
    """(B, maps, h, w) of the largest image, without foreground beyond each one's own size."""
    height, width = max(frame.height for frame in frames), max(frame.width for frame in frames)
    together = torch.stack([own[:, :height, :width] for own in maps])
    for own, frame in zip(together, frames, strict=True):
        own[0, frame.height :] = 0
        own[0, :, frame.width :] = 0
    return together
