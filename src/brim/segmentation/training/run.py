"""From two folders to a network that segments: pair, split, cut, train, keep the best weights.

Axes: B crops, S pixels of a side. A run is a directory:

    RUN/config.json           what is trained on what
    RUN/crops/                the images as crops, which the trainer holds on the device
    RUN/train/                the trainer's own: checkpoints, metrics.jsonl
    RUN/weights.safetensors   the best weights, to predict with

Images, not crops, are split: crops of one image overlap, and would show the validation what was trained on."""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import brim
from brim.engine.config import recipe_of
from brim.engine.device import Halving, stream
from brim.engine.rows import DatasetSource, Resident
from brim.engine.storage import Dataset
from brim.engine.training import (
    Batch,
    Ranks,
    TrainReport,
    Transform,
    has_checkpoint,
    joined,
    locked,
    resolve_precision,
    share_norms,
)
from brim.engine.training import load_weights as load_run_weights
from brim.engine.training import train as run_trainer
from brim.errors import CheckpointError, ConfigError, DatasetError, StorageError
from brim.segmentation.config import SegmentTrainConfig
from brim.segmentation.networks import (
    DTYPES,
    WEIGHTS,
    create_model,
    find_weights,
    load_weights,
    normalise,
    save_weights,
)
from brim.segmentation.training.crops import (
    COUNTED,
    FOREGROUND,
    ImagePair,
    OnProgress,
    augment,
    find_change,
    pack,
    pair_files,
)
from brim.segmentation.training.objective import PixelCounts, item_losses, settle_norms, step_bytes

log = logging.getLogger("brim")

_KEYS = ("run", "weights", "epochs", "dice", "iou", "images_per_s", "ceiling_share", "peak_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTrainReport:
    """What a run did; dice and iou are of its best weights on the images held out."""

    run: str
    weights: str | None  # None: stopped before the first epoch was over
    epochs: int
    dice: float | None
    iou: float | None
    images_per_s: float  # crops trained on
    ceiling_share: float | None  # of the rate on one fixed batch; None: not measured
    peak_bytes: int
    stopped: bool  # by request, before the last epoch
    training: TrainReport | None  # the trainer's own; None: stopped before it began

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able values, by the names of the contract."""
        return {key: getattr(self, key) for key in _KEYS}


def train(
    images: Path | str,
    masks: Path | str,
    config: SegmentTrainConfig,
    out: Path | str,
    *,
    device: str = "auto",
    weights: Path | str | None = None,
    resume: bool = True,
    progress: OnProgress | None = None,
    stop: Callable[[], bool] | None = None,
) -> SegmentTrainReport:
    """Train a network on images and masks paired by file stem, going on with the run in `out` if resume allows it.

    weights is a FILE or a RUN to begin from. A run that was stopped or killed ends, resumed, with the same bits on a
    CPU. Under torchrun all its ranks train as one; each must see the folders and `out`.
    """
    out, pairs = Path(out), pair_files(images, masks)
    with joined(device) as ranks, ExitStack() as stack:
        resolve_precision(config.precision, ranks.device)
        train_images, val_images = split(len(pairs), config)
        module = _make_module(config, weights, ranks)
        about = describe(pairs, asdict(config), len(val_images), weights)
        if out.is_file():
            raise CheckpointError(f"{out} is a file", code="occupied", hint="choose another {out}")
        tell = progress if ranks.main else None
        made = ranks.from_main(
            lambda: _cut_crops(stack, out, pairs, about, config, resume or ranks.restarted, tell, stop)
        )
        if not made:
            return _nothing_done(out)
        crops = Dataset(out / "crops")
        data = _Data(crops.path, _rows_of(crops, train_images), _rows_of(crops, val_images), val_images)
        _check_foreground(crops, data.rows, masks)
        return _train(module.to(ranks.device), data, config, out, ranks, tell, stop)


def _cut_crops(
    stack: ExitStack,
    out: Path,
    pairs: list[ImagePair],
    about: dict[str, Any],
    config: SegmentTrainConfig,
    resume: bool,
    progress: OnProgress | None,
    stop: Callable[[], bool] | None,
) -> bool:
    """Take `out` until the stack ends, and make the crops there; False when stopped."""
    stack.enter_context(locked(out))
    check_free(out, pairs, about, resume)
    write_config(out, about)
    return pack(pairs, out / "crops", config.size, progress=progress, stop=stop) is not None


def split(num_images: int, config: SegmentTrainConfig) -> tuple[Tensor, Tensor]:
    """Numbers of the images to train on and of those held out, sorted; a function of the seed and the count."""
    num_val = max(1, round(config.val_fraction * num_images))
    if num_val >= num_images:
        raise ConfigError(
            f"{num_images} image{'s' * (num_images > 1)}, of which {config.val_fraction:.0%} and at least one is held "
            "out, leave nothing to train on; give more images"
        )
    order = torch.randperm(num_images, generator=stream(config.seed, "split", device=torch.device("cpu")))
    return order[num_val:].sort().values, order[:num_val].sort().values


# Training


class _Data(NamedTuple):
    crops: Path
    rows: Tensor  # of the crops to train on
    held: Tensor  # of those held out
    val_images: Tensor  # the images these show


def _train(
    module: nn.Module,
    data: _Data,
    config: SegmentTrainConfig,
    out: Path,
    ranks: Ranks,
    progress: OnProgress | None,
    stop: Callable[[], bool] | None,
) -> SegmentTrainReport:
    device = ranks.device
    if device.type == "cuda":
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    resident = Resident(
        DatasetSource(data.crops, ("image", "mask")), batch_size=config.batch_size, device=device, tier=config.tier,
        seed=config.seed, shuffle="blocks" if config.tier == "window" else True, rows=data.rows,
        # a last batch of one or two crops would disturb the norms; the order changes, so every crop has its turn
        drop_last=True, reserve_bytes=step_bytes(module, config.size, -(-config.batch_size // ranks.size)),
        ranks=ranks,
    )  # fmt: skip
    validation = Resident(
        DatasetSource(data.crops, ("image", "mask", "source")), batch_size=config.batch_size, device=device,
        tier=config.tier, shuffle=False, rows=data.held,
    )  # fmt: skip
    with resident, validation if ranks.main else nullcontext():  # rank 0 alone evaluates
        judge = _Judge(validation, data.val_images, resolve_precision(config.precision, device))
        report = run_trainer(
            module, _loss, resident, config=recipe_of(config, config.epochs), out=out, device=device, progress=progress,
            stop=stop, evaluate=lambda trained: ranks.from_main(lambda: judge(trained)), transform=_transform(config),
            ranks=ranks,
        )  # fmt: skip
        return ranks.from_main(lambda: _finish(module, judge, report, config, out))


def _finish(
    module: nn.Module, judge: "_Judge", report: TrainReport, config: SegmentTrainConfig, out: Path
) -> SegmentTrainReport:
    file, found = out / WEIGHTS, dict[str, float]()
    if has_checkpoint(out / "train" / "best"):
        load_run_weights(module, out)
        metadata = {"model": config.model, "size": str(config.size), "format_version": str(FORMAT_VERSION)}
        save_weights(module, file, metadata)
        found = {} if report.stopped else judge(module.eval())
    return SegmentTrainReport(
        run=str(out), weights=str(file) if file.exists() else None, epochs=report.epochs, dice=found.get("dice"),
        iou=found.get("iou"), images_per_s=report.samples_per_s, ceiling_share=report.ceiling_share,
        peak_bytes=report.peak_bytes, stopped=report.stopped, training=report,
    )  # fmt: skip


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    return item_losses(module(normalise(batch["image"])), _bit(batch["mask"], FOREGROUND)).mean()


def _transform(config: SegmentTrainConfig) -> Transform | None:
    if not config.augment:
        return None

    def change(batch: Batch, rng: torch.Generator) -> Batch:
        image, mask = augment(batch["image"], batch["mask"], rng, config.augmentation)
        return {"image": image, "mask": mask}

    return change


def _bit(masks: Tensor, bit: int) -> Tensor:
    return (masks & bit) != 0


class _Judge:
    """Loss and scores of a module on the images held out; every pixel of them counts once."""

    def __init__(self, validation: Resident, images: Tensor, precision: str) -> None:
        self._validation, self._num_images = validation, len(images)
        self._device, self._dtype = validation.device, DTYPES[precision]
        places = torch.zeros(int(images.max()) + 1, dtype=torch.int64)
        places[images] = torch.arange(len(images))
        self._places = places.to(self._device)
        self._halving = Halving(validation.batch_size, self._device)

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> dict[str, float]:
        """By name; the module is in eval mode."""
        scores = PixelCounts(self._num_images, self._device)
        total = torch.zeros((), device=self._device)
        with closing(self._validation.epoch(0)) as batches:
            for batch in batches:
                run = partial(self._forward, module, batch)
                for losses, logits, at in self._halving.run(run, range(len(batch["source"]))):
                    total += losses.sum()
                    mask, image = batch["mask"][at], self._places[batch["source"][at]]
                    scores.add(logits > 0, _bit(mask, FOREGROUND), image, _bit(mask, COUNTED))
        return {"val_loss": float(total) / self._validation.num_items, **scores.result().as_dict()}

    def _forward(self, module: nn.Module, batch: Batch, part: range) -> tuple[Tensor, Tensor, slice]:
        at = slice(part.start, part.stop)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = module(normalise(batch["image"][at])).float()
        return item_losses(logits, _bit(batch["mask"][at], FOREGROUND)), logits, at


# Crops


def _rows_of(crops: Dataset, images: Tensor) -> Tensor:
    """Rows of the dataset that show these images."""
    return torch.isin(crops.load(("source",))["source"], images).nonzero().flatten()


def _check_foreground(crops: Dataset, rows: Tensor, masks: Path | str) -> None:
    pixels = crops.load(("foreground",))["foreground"]
    if not int(pixels.sum()):
        raise DatasetError(f"{masks}: no mask has foreground; pixels inside an object must not be 0")
    if not int(pixels[rows].sum()):
        raise DatasetError(
            f"{masks}: only the masks held out for validation have foreground",
            hint="give more images, or another {seed}",
        )


def _make_module(config: SegmentTrainConfig, weights: Path | str | None, ranks: Ranks) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        module = create_model(config.model)
    if weights is not None:
        load_weights(module, weights)
    if not ranks.alone:
        share_norms(module)
    settle_norms(module)
    return module


def _nothing_done(out: Path) -> SegmentTrainReport:
    return SegmentTrainReport(
        run=str(out), weights=None, epochs=0, dice=None, iou=None, images_per_s=0.0, ceiling_share=None, peak_bytes=0,
        stopped=True, training=None,
    )  # fmt: skip


FORMAT_VERSION = 1
KIND = "segment-train"
CONFIG = "config.json"
_UNFINISHED = f".{CONFIG}.new"  # what a process killed while writing it leaves
_FREE = ("epochs", "tier", "early_stopping_patience", "checkpoint_every_s")  # may change when a run goes on


def describe(
    pairs: list[ImagePair], training: dict[str, Any], num_val: int, weights: Path | str | None
) -> dict[str, Any]:
    inputs = json.dumps([[pair.name, *pair.identity()] for pair in pairs])
    return {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "training": training,
        "weights_sha256": None if weights is None else _digest(find_weights(weights)),
        "images": len(pairs),
        "split": {"train": len(pairs) - num_val, "validation": num_val},
        "inputs_sha256": hashlib.sha256(inputs.encode()).hexdigest(),
        "versions": {"brim": brim.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def check_free(out: Path, pairs: list[ImagePair], about: dict[str, Any], resume: bool) -> None:
    """Raise unless `out` is empty or holds this very run; one that has begun to train needs resume."""
    names = {entry.name for entry in out.iterdir()} - {_UNFINISHED}
    if not names:
        return
    if CONFIG not in names:
        raise CheckpointError(f"{out} is not empty and has no {CONFIG}", code="occupied", hint="choose another {out}")
    known = _read_config(out / CONFIG)
    if not has_checkpoint(out / "train" / "last"):
        return  # nothing was trained yet: crops that fit are used, others made anew
    if not resume:
        raise CheckpointError(
            f"{out} is not empty", code="occupied", hint="add {resume} to continue it or choose another {out}"
        )
    _check_same(out, pairs, known, about)


def write_config(out: Path, about: dict[str, Any]) -> None:
    """Write config.json; it is there entirely or not at all."""
    new = out / _UNFINISHED
    try:
        with new.open("w", encoding="utf-8") as opened:
            opened.write(json.dumps(about, indent=1, allow_nan=False) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(out / CONFIG)
    except OSError as failure:
        raise StorageError(
            f"{out}: cannot write, {failure.strerror or failure}", hint="choose another {out}"
        ) from failure


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_same(out: Path, pairs: list[ImagePair], known: dict[str, Any], about: dict[str, Any]) -> None:
    flat = [dict(side["training"], weights_sha256=side.get("weights_sha256")) for side in (known, about)]
    for name in dict.fromkeys((*flat[0], *flat[1])):
        old, new = (side.get(name) for side in flat)
        if old != new and name not in _FREE:
            raise CheckpointError(
                f"{out}: {name} was {old} and is {new} now",
                code="conflict",
                hint="resume with the same, or choose another {out}",
            )
    if known.get("inputs_sha256") != about["inputs_sha256"]:
        change = find_change(pairs, out / "crops", about["training"]["size"])
        raise DatasetError(
            f"{out}: {change} since the run began", code="conflict", hint="restore it, or choose another {out}"
        )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror or failure}; check its permissions") from failure
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(
            f"{file} is not valid JSON ({failure})", code="damaged", hint="choose another {out}"
        ) from failure
    if not isinstance(known, dict) or known.get("kind") != KIND or not isinstance(known.get("training"), dict):
        kind = known.get("kind") if isinstance(known, dict) else None
        raise CheckpointError(
            f'{file} is of another run: kind={kind!r}, expected "{KIND}"', code="conflict", hint="choose another {out}"
        )
    if known.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version is {known.get('format_version')!r}, expected {FORMAT_VERSION}; use its own brim"
        )
    return known
