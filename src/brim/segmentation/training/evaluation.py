"""Loss and scores of a network during training: on the crops held out, or on drawn scenes it was not trained on; and
the page of a run, with pictures of those that score worst."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from brim.engine.device import Halving
from brim.engine.rows import Resident
from brim.engine.training import Batch
from brim.report.page import card, document, tiles, write_page
from brim.segmentation.config import SegmentTrainConfig
from brim.segmentation.networks import DTYPES, normalise
from brim.segmentation.objects.instances import kinds_of, maps_to_labels
from brim.segmentation.objects.pictures import CYAN, YELLOW, figure, figures, jpeg, outlined
from brim.segmentation.objects.scores import ObjectScores
from brim.segmentation.scenes.source import Drawing
from brim.segmentation.training.crops import COUNTED, FOREGROUND
from brim.segmentation.training.objective import PixelCounts, losses_of

SCORED_SCENES = 128  # at each evaluation
OUTLINES = "Left with the true outlines, right with those predicted by the best weights; held out from training."
AT_EVALUATION = (
    "Left with the true outlines, right with those predicted at the newest evaluation; held out from training."
)
FOLLOWED = 6  # crops whose pictures are drawn while a network trains
DRAWN_S = 5.0  # at least between two drawings: drawing takes some 10 ms
_SCORES = {
    "ap50": "AP at IoU 0.5", "ap75": "AP at IoU 0.75", "ap50_90": "AP, IoU 0.5 to 0.9", "pq": "PQ", "f1": "F1",
    "count_error": "count error", "dice": "Dice", "iou": "IoU of pixels",
}  # fmt: skip


class CropEvaluation:
    """Loss and scores of a module in eval mode on the validation images; every pixel counts once.

    Objects are scored crop by crop, those at its edges too.
    """

    def __init__(
        self,
        validation: Resident,
        images: Tensor,
        precision: str,
        task: str,
        most: int,
        classes: Sequence[str] = (),
    ) -> None:
        self._validation, self._device, self._dtype = validation, validation.device, DTYPES[precision]
        self._images, self._task, self._most = images.to(self._device), task, most  # images are sorted
        self._classes = classes
        self._halving = Halving(validation.batch_size, self._device)

    @torch.no_grad()
    def __call__(self, module: nn.Module, worst: "WorstCrops | None" = None) -> dict[str, float]:
        pixels, objects = PixelCounts(len(self._images), self._device), ObjectScores()
        of_class = {name: ObjectScores() for name in self._classes}
        total = torch.zeros((), device=self._device)
        with closing(self._validation.epoch(0)) as batches:
            for batch in batches:
                run = partial(self._forward, module, batch)
                for losses, maps, at in self._halving.run(run, range(len(batch["source"]))):
                    total += losses.sum()
                    mask, image = batch["mask"][at], torch.searchsorted(self._images, batch["source"][at])
                    pixels.add(maps[:, :1] > 0, _bit(mask, FOREGROUND), image, _bit(mask, COUNTED))
                    true, predicted = labels_of(batch)[at], _predicted(maps, self._task)
                    if self._task == "instances":
                        objects.add_batch(true, predicted)
                    kinds = _predicted_kinds(predicted, maps) if of_class else predicted
                    for kind, own in enumerate(of_class.values()):
                        own.add_batch(true * (batch["kind"][at][:, 0] == kind + 1), predicted * (kinds == kind))
                    if worst is not None:
                        worst.add(batch["source"][at].tolist(), batch["image"][at], true, predicted)
        scores = objects.as_dict() if self._task == "instances" else {}
        scores |= {f"ap50 {name}": own.average_precision(0.5) for name, own in of_class.items()}
        return _in_order(float(total) / self._validation.num_items, pixels.result() | scores)

    def _forward(self, module: nn.Module, batch: Batch, part: range) -> tuple[Tensor, Tensor, slice]:
        at = slice(part.start, part.stop)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            maps = module(normalise(batch["image"][at])).float()
        kinds = batch["kind"][at][:, 0] if self._classes else None
        return losses_of(self._task, maps, labels_of(batch)[at], self._most, kinds), maps, at


class SceneEvaluation:
    """Loss and scores of a module in eval mode on scenes of another seed, the same ones each time."""

    def __init__(self, draw: Drawing, device: torch.device, precision: str, config: SegmentTrainConfig) -> None:
        self._draw, self._device, self._dtype, self._task = draw, device, DTYPES[precision], config.task
        self._batch = min(config.batch_size, SCORED_SCENES)

    @torch.no_grad()
    def __call__(self, module: nn.Module, worst: "WorstCrops | None" = None) -> dict[str, float]:
        pixels, objects, losses = PixelCounts(1, self._device), ObjectScores(), list[Tensor]()
        for first in range(0, SCORED_SCENES, self._batch):
            index = torch.arange(first, first + self._batch, dtype=torch.int32, device=self._device)
            scenes = self._draw(index)
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
                maps = module(normalise(scenes.images)).float()
            losses.append(losses_of(self._task, maps, scenes.labels, self._draw.most))
            pixels.add(maps[:, :1] > 0, scenes.labels[:, None] > 0, torch.zeros_like(index))
            predicted = _predicted(maps, self._task)
            if self._task == "instances":
                objects.add_batch(scenes.labels, predicted)
            if worst is not None:
                worst.add(index.tolist(), scenes.images, scenes.labels, predicted)
        scores = objects.as_dict() if self._task == "instances" else {}
        return _in_order(float(torch.cat(losses).mean()), pixels.result() | scores)


def _in_order(val_loss: float, scores: Mapping[str, float]) -> dict[str, float]:
    """The telling scores first: a training says only these of every epoch."""
    first = [name for name in ("ap50", "count_error", "dice") if name in scores]
    return {"val_loss": val_loss} | {name: scores[name] for name in (*first, *scores)}


def _predicted(maps: Tensor, task: str) -> Tensor:
    """(B, S, S) int32: objects, or 1 for all foreground."""
    return maps_to_labels(maps[:, :2]) if task == "instances" else (maps[:, 0] > 0).int()


def _predicted_kinds(labels: Tensor, maps: Tensor) -> Tensor:
    """The class of each pixel's predicted object, (B, S, S) int64 from 0."""
    most = labels.flatten(1).amax(1).cumsum(0)
    ends = torch.cat([most.new_zeros(1), most]).long()
    kind = torch.cat([most.new_zeros(1).long(), kinds_of(labels, torch.softmax(maps[:, 2:], 1), ends)])
    return kind[torch.where(labels > 0, labels.long() + ends[:-1, None, None], 0)]


class _ScoredCrop(NamedTuple):
    score: float  # AP at IoU 0.5 of objects, or IoU of masks
    source: int
    picture: NDArray[np.uint8]  # (S, S, 3)
    true: NDArray[np.int32]  # (S, S)
    predicted: NDArray[np.int32]
    objects: ObjectScores


class WorstCrops:
    """Keeps the crops that score worst."""

    def __init__(self, names: Sequence[str] | None, most: int = 12) -> None:
        """names of the sources, images; None: drawn scenes."""
        self._names, self._most = names, most
        self.crops: list[_ScoredCrop] = []  # the worst first

    def add(self, sources: Sequence[int], images: Tensor, true: Tensor, predicted: Tensor) -> None:
        """images (B, 3, S, S) uint8, true and predicted (B, S, S)"""
        pictures = images.permute(0, 2, 3, 1).cpu().numpy()
        rows = zip(sources, pictures, true.cpu().numpy(), predicted.cpu().numpy(), strict=True)
        for source, picture, one, other in rows:
            objects = ObjectScores()
            objects.add(one, other)
            self.crops.append(_ScoredCrop(objects.average_precision(0.5), source, picture.copy(), one, other, objects))
        self.crops = sorted(self.crops, key=lambda crop: (crop.score, crop.objects.iou_sum))[: self._most]

    def pictures(self, task: str) -> list[dict[str, str]]:
        """Each with a `caption` and a `picture`: a JPEG as base64, left the true outlines, right the predicted ones."""
        return [{"caption": self._caption(crop, task), "picture": _picture(crop)} for crop in self.crops]

    def _caption(self, crop: _ScoredCrop, task: str) -> str:
        name = f"scene {crop.source}" if self._names is None else self._names[crop.source]
        objects = crop.objects
        if task != "instances":
            shared = ((crop.true > 0) & (crop.predicted > 0)).sum()
            either = ((crop.true > 0) | (crop.predicted > 0)).sum()
            return f"{name}: IoU {shared / either if either else 1.0:.2f}"  # nothing is there, and nothing found
        counts = f"{objects.num_true} true, {objects.num_predicted} predicted"
        return f"{name}: {counts}, AP50 {crop.score:.2f}, merges {objects.merges}, splits {objects.splits}"


class FirstCrops(WorstCrops):
    """Keeps the first crops instead, which are the same at every evaluation."""

    def add(self, sources: Sequence[int], images: Tensor, true: Tensor, predicted: Tensor) -> None:
        room = self._most - len(self.crops)
        if room > 0:
            super().add(sources[:room], images[:room], true[:room], predicted[:room])
            self.crops.sort(key=lambda crop: crop.source)


class Followed:
    """An evaluation whose pictures of a few held-out crops are kept in the run, for those who watch it train."""

    def __init__(
        self, evaluate: "CropEvaluation | SceneEvaluation", names: Sequence[str] | None, task: str, out: Path
    ) -> None:
        self._evaluate, self._names, self._task, self._out = evaluate, names, task, out
        self._drawn_s = -math.inf

    def __call__(self, module: nn.Module) -> dict[str, float]:
        if time.monotonic() - self._drawn_s < DRAWN_S:
            return self._evaluate(module)
        crops = FirstCrops(self._names, FOLLOWED)
        scores = self._evaluate(module, crops)
        _write_pictures(self._out, AT_EVALUATION, crops.pictures(self._task))
        self._drawn_s = time.monotonic()
        return scores


def _write_pictures(out: Path, note: str, pictures: list[dict[str, str]]) -> None:
    write_page(out / "worst.json", json.dumps({"note": note, "pictures": pictures}))


def _picture(crop: _ScoredCrop) -> str:
    return jpeg([outlined(crop.picture, crop.true, YELLOW), outlined(crop.picture, crop.predicted, CYAN)])


def write_report(out: Path, task: str, scores: Mapping[str, float], worst: WorstCrops) -> None:
    """report.html of a run: its scores, and the held-out crops it does worst on, which are in worst.json too."""
    pictures = worst.pictures(task)
    numbers = [(label, f"{scores[key]:.3f}", "") for key, label in _SCORES.items() if key in scores]
    numbers += [(key, f"{scores[key]:.0f}", "") for key in ("merges", "splits") if key in scores]
    numbers += [(f"AP at IoU 0.5, {key[5:]}", f"{scores[key]:.3f}", "") for key in scores if key.startswith("ap50 ")]
    shown = figures([figure(one["caption"], one["picture"]) for one in pictures])
    cards = card("worst", f"The worst {len(pictures)}", OUTLINES, shown)
    title = f"Segmentation run {out.name}"
    write_page(out / "report.html", document(title, f"<h1>{escape(title)}</h1>{tiles(numbers)}{cards}"))
    _write_pictures(out, OUTLINES, pictures)


def _bit(masks: Tensor, bit: int) -> Tensor:
    return (masks & bit) != 0


def labels_of(batch: Batch) -> Tensor:
    """(B, S, S) int32: objects, or 1 for all foreground."""
    return batch["label"][:, 0].int() if "label" in batch else _bit(batch["mask"][:, 0], FOREGROUND).int()
