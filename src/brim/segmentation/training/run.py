"""From two folders to a trained network: pair, split, cut into crops, train, keep the best weights.

Axes: B crops, S pixels of a side. A run is a directory:

    RUN/config.json           settings and inputs
    RUN/crops/                the images as crops, which the trainer holds on the device
    RUN/train/                checkpoints and metrics.jsonl of the trainer
    RUN/weights.safetensors   the best weights, for prediction
    RUN/report.html           their scores, and the held-out crops that score worst
    RUN/worst.json            these crops alone

Images, not crops, are split: crops of one image overlap, and would leak training pixels into the validation. A single
image is divided into two. With scenes instead of images there are no crops: each step draws its own."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from brim.engine.config import recipe_of
from brim.engine.device import stream
from brim.engine.meter import Spent, accounting, within
from brim.engine.networks import ProgramModule, title_of
from brim.engine.rows import DatasetSource, Resident
from brim.engine.storage import Dataset
from brim.engine.training import (
    Batch,
    Ranks,
    RunFile,
    TrainReport,
    check_same,
    has_checkpoint,
    joined,
    locked,
    resolve_precision,
    share_norms,
    write_hub,
)
from brim.engine.training import load_weights as load_run_weights
from brim.engine.training import train as run_trainer
from brim.errors import ConfigError, DatasetError
from brim.segmentation.config import NETWORKS, OUTPUTS, ImagePlanes, SegmentTask, SegmentTrainConfig, source_named
from brim.segmentation.images.reading import numbers_objects
from brim.segmentation.networks import (
    WEIGHTS,
    create_model,
    find_weights,
    load_weights,
    normalise,
    read_metadata,
    save_weights,
)
from brim.segmentation.objects.instances import STANDARD_DIAMETER
from brim.segmentation.scenes.source import Drawing, SceneSource
from brim.segmentation.training.crops import (
    Cutting,
    ImagePair,
    OnProgress,
    augment,
    find_change,
    halves,
    object_areas,
    pack,
    pair_files,
    with_classes,
)
from brim.segmentation.training.evaluation import (
    CropEvaluation,
    Followed,
    SceneEvaluation,
    WorstCrops,
    labels_of,
    write_report,
)
from brim.segmentation.training.objective import losses_of, settle_norms, step_bytes

log = logging.getLogger("brim")

RUN = RunFile("config.json", "segment-train", "segment train")
OBJECT_SCORES = ("ap50", "ap75", "ap50_90", "pq", "f1", "count_error", "merges", "splits")
SINGLE_SHARE = 0.25  # of a single image is held out
_PROBED = 8  # label images looked at before training
_KEYS = ("run", "weights", "epochs", "dice", "iou", "images_per_s", "ceiling_share", "peak_bytes", "ceiling_spread")
_OLDER = {
    "task": "mask",
    "scenes": [],
    "scenes_per_epoch": 8192,
    "channels": None,
    "z": None,
    "t": None,
}  # settings that runs of older versions do not name
_FREE = ("epochs", "tier", "early_stopping_patience", "checkpoint_every_s")  # may change when a run is resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTrainReport:
    """Figures of a run; scores are those of its best weights on held-out images, or on scenes it never trained on."""

    run: str
    weights: str | None = None  # None: stopped before the end of the first epoch
    task: str
    epochs: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)  # dice, iou; of instances also ap50, ap75, pq, …
    images_per_s: float = 0.0  # crops trained on
    ceiling_share: float | None = None  # of the rate on fixed batches; None: not known
    peak_bytes: int = 0
    stopped: bool  # by request, before the last epoch
    training: TrainReport | None = None  # of the trainer; None: stopped before it began
    spent: Spent | None = None  # of the whole call, or of the command that it is part of

    @property
    def ceiling_spread(self) -> float | None:
        return None if self.training is None else self.training.ceiling_spread

    @property
    def dice(self) -> float | None:
        return self.scores.get("dice")

    @property
    def iou(self) -> float | None:
        return self.scores.get("iou")

    def to_json(self) -> dict[str, Any]:
        values = {key: getattr(self, key) for key in _KEYS}
        if self.task == "instances":
            values |= {"task": self.task} | {name: self.scores.get(name) for name in OBJECT_SCORES}
            values |= {name: score for name, score in self.scores.items() if name.startswith("ap50 ")}
        return values | (self.spent.as_dict() if self.spent is not None else {})


def train(
    images: Path | str | None,
    masks: Path | str | None,
    config: SegmentTrainConfig,
    out: Path | str,
    *,
    device: str = "auto",
    weights: Path | str | None = None,
    resume: bool = True,
    progress: OnProgress | None = None,
    stop: Callable[[], bool] | None = None,
    classes: Path | str | None = None,
) -> SegmentTrainReport:
    """Train a network on images and masks paired by file stem; with resume, continue the run in `out`.

    classes is a CSV file of image,label,class: the kinds of object that the network learns to distinguish.

    weights is a FILE, a RUN or "default", the model that comes with brim, to start from. With config.scenes there are
    no images and masks. On a CPU, a run that was stopped or killed and resumed ends with the same bits. Under torchrun
    all ranks train together; each must be able to read the folders and `out`.
    """
    with accounting() as account:
        report = _train_any(images, masks, config, Path(out), device, weights, resume, progress, stop, classes)
        return replace(report, spent=account.spent())


def _train_any(
    images: Path | str | None,
    masks: Path | str | None,
    config: SegmentTrainConfig,
    out: Path,
    device: str,
    weights: Path | str | None,
    resume: bool,
    progress: OnProgress | None,
    stop: Callable[[], bool] | None,
    table: Path | str | None,
) -> SegmentTrainReport:
    if config.scenes:
        if table is not None:
            raise ConfigError("are of images, not of drawn scenes", field="classes", code="conflict")
        if images is not None or masks is not None:
            raise ConfigError("scenes are drawn and need no images", field="scenes", code="conflict")
        return _train_on_scenes(config, out, device, weights, resume, progress, stop)
    if images is None or masks is None:
        raise ConfigError("are needed", field="images", code="missing", hint="give {images} and {masks}, or {scenes}")
    with within("reading"):
        pairs, classes = pair_files(images, masks), tuple[str, ...]()
        if table is not None:
            pairs, classes = with_classes(pairs, table)
    with joined(device) as ranks, ExitStack() as stack:
        resolve_precision(config.precision, ranks.device)
        module, config, start = _make_module(config, weights, ranks, pairs, out, classes)
        if len(pairs) == 1:
            pairs, train_images, val_images = halves(pairs[0], SINGLE_SHARE), torch.tensor([0]), torch.tensor([1])
        else:
            train_images, val_images = split(len(pairs), config)
        cutting = replace(_cutting(pairs, config, start), classes=classes)
        about = _describe(pairs, asdict(config), len(val_images), weights, classes)
        progress = progress if ranks.main else None

        def cut_crops() -> bool:
            """Lock `out` until the end of the run and cut the crops there; False if stopped."""
            may_resume = resume or ranks.restarted
            _check_free(out, pairs, about, may_resume, cutting)
            stack.enter_context(locked(out))
            _check_free(out, pairs, about, may_resume, cutting)  # another process may have been first
            RUN.write(out, about)
            with within("cutting crops"):
                return pack(pairs, out / "crops", cutting, progress=progress, stop=stop) is not None

        if not ranks.from_main(cut_crops):
            return SegmentTrainReport(run=str(out), task=config.task, stopped=True)
        crops = Dataset(out / "crops")
        columns = ("source", "foreground", *(("objects",) if cutting.instances else ()))
        loaded = crops.load(columns)
        rows, held = (torch.isin(loaded["source"], part).nonzero().flatten() for part in (train_images, val_images))
        foreground = loaded["foreground"]
        if not int(foreground.sum()):
            raise DatasetError(f"{masks}: no mask has foreground; pixels inside an object must not be 0")
        if not int(foreground[rows].sum()):
            raise DatasetError(
                f"{masks}: only the masks held out for validation have foreground",
                hint="give more images, or another {seed}",
            )
        most = int(loaded["objects"].max()) if cutting.instances else 1
        data = _Data(crops.path, rows, held, val_images, most, pairs, classes)
        learned = {"contrast": "stretch", "scale": str(cutting.scale)} if cutting.stretched else {}
        learned |= {"classes": json.dumps(classes)} if classes else {}
        return _train(module.to(ranks.device), data, config, out, ranks, progress, stop, learned)


def split(num_images: int, config: SegmentTrainConfig) -> tuple[Tensor, Tensor]:
    """Indices of the training and of the validation images, sorted; depends only on the seed and the count."""
    num_val = min(max(1, round(config.val_fraction * num_images)), num_images - 1)
    order = torch.randperm(num_images, generator=stream(config.seed, "split", device=torch.device("cpu")))
    return order[num_val:].sort().values, order[:num_val].sort().values


# Training


class _Data(NamedTuple):
    crops: Path
    rows: Tensor  # of the training crops
    held: Tensor  # of the validation crops
    val_images: Tensor  # indices of the validation images, sorted
    most: int  # objects in a crop
    pairs: list[ImagePair]
    classes: tuple[str, ...] = ()


def _train(
    module: nn.Module,
    data: _Data,
    config: SegmentTrainConfig,
    out: Path,
    ranks: Ranks,
    progress: OnProgress | None,
    stop: Callable[[], bool] | None,
    about: Mapping[str, str],
) -> SegmentTrainReport:
    device, objects = ranks.device, config.task == "instances"
    if device.type == "cuda":
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    columns = ("image", "mask", *(("label",) if objects else ()), *(("kind",) if data.classes else ()))
    resident = Resident(
        DatasetSource(data.crops, columns), batch_size=config.batch_size, device=device, tier=config.tier,
        seed=config.seed, shuffle="blocks" if config.tier == "window" else True, rows=data.rows,
        # a last batch of one or two crops would disturb the norms; the order changes, so no crop is left out for good
        drop_last=True, reserve_bytes=step_bytes(module, config.size, -(-config.batch_size // ranks.size)),
        ranks=ranks,
    )  # fmt: skip
    validation = Resident(
        DatasetSource(data.crops, (*columns, "source")), batch_size=config.batch_size, device=device,
        tier=config.tier, shuffle=False, rows=data.held,
    )  # fmt: skip

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        maps, kinds = module(normalise(batch["image"])), batch["kind"][:, 0] if data.classes else None
        return losses_of(config.task, maps, labels_of(batch), data.most, kinds).mean()

    def change(batch: Batch, rng: torch.Generator) -> Batch:
        masks = torch.cat([batch[name].short() for name in columns[1:]], 1)
        image, masks = augment(batch["image"], masks, rng, config.augmentation)
        return {"image": image} | {name: masks[:, at : at + 1] for at, name in enumerate(columns[1:])}

    with ExitStack() as stack:
        with within("reading"):
            stack.enter_context(resident)
            stack.enter_context(validation if ranks.main else nullcontext())  # only rank 0 evaluates
        precision = resolve_precision(config.precision, device)
        evaluate = CropEvaluation(validation, data.val_images, precision, config.task, data.most, data.classes)
        names = [pair.name for pair in data.pairs]
        followed = Followed(evaluate, names, config.task, out)
        report = run_trainer(
            module, loss, resident, config=recipe_of(config, config.epochs), out=out, device=device, progress=progress,
            stop=stop, evaluate=lambda trained: ranks.from_main(lambda: followed(trained)),
            transform=change if config.augment else None, ranks=ranks,
        )  # fmt: skip
        worst = WorstCrops(names)
        return ranks.from_main(lambda: _finish(module, evaluate, worst, report, config, out, about))


def _train_on_scenes(
    config: SegmentTrainConfig,
    out: Path,
    device_name: str,
    weights: Path | str | None,
    resume: bool,
    progress: OnProgress | None,
    stop: Callable[[], bool] | None,
) -> SegmentTrainReport:
    with joined(device_name) as ranks, ExitStack() as stack:
        device = ranks.device
        if not ranks.alone:
            raise ConfigError(f"drawn scenes are trained on by one process, not {ranks.size}", field="scenes")
        precision = resolve_precision(config.precision, device)
        module, config, _ = _make_module(config, weights, ranks, [], out)
        about = _describe([], asdict(config), 0, weights)
        _check_free(out, [], about, resume)
        out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(out))
        _check_free(out, [], about, resume)
        RUN.write(out, about)
        module.to(device)
        if device.type == "cuda":
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        draw = Drawing(config.scenes, 2 * config.seed, config.size)
        evaluate = SceneEvaluation(Drawing(config.scenes, 2 * config.seed + 1, config.size), device, precision, config)

        def loss(module: nn.Module, batch: Batch) -> Tensor:
            scenes = draw(batch["index"])
            return losses_of(config.task, module(normalise(scenes.images)), scenes.labels, draw.most).mean()

        report = run_trainer(
            module, loss, SceneSource(config.scenes_per_epoch, config.batch_size, device),
            config=recipe_of(config, config.epochs), out=out, device=device, progress=progress, stop=stop,
            evaluate=Followed(evaluate, None, config.task, out),
        )  # fmt: skip
        return _finish(module, evaluate, WorstCrops(None), report, config, out, {"contrast": "stretch"})


def _finish(
    module: nn.Module,
    evaluate: CropEvaluation | SceneEvaluation,
    worst: WorstCrops,
    report: TrainReport,
    config: SegmentTrainConfig,
    out: Path,
    about: Mapping[str, str],
) -> SegmentTrainReport:
    """about: what prediction needs to know of the images besides the network: contrast, scale."""
    file, scores = out / WEIGHTS, dict[str, float]()
    if has_checkpoint(out / "train" / "best"):
        load_run_weights(module, out)
        known = {"model": config.model, "task": config.task, "size": str(config.size), "format_version": "1"}
        source = source_named(config.model)
        brought = {} if source is None else {"network": json.dumps(source.as_dict())}
        save_weights(module, file, {**known, **brought, **about})
        if not report.stopped:
            with within("validation"):
                scores = evaluate(module.eval(), worst)
            write_report(out, config.task, scores, worst)
        write_hub(out, file, title=f"brim segmentation, {title_of(config.model)}", metrics=scores)
    return SegmentTrainReport(
        run=str(out), weights=str(file) if file.exists() else None, task=config.task, epochs=report.epochs,
        scores=scores, images_per_s=report.samples_per_s, ceiling_share=report.ceiling_share,
        peak_bytes=report.peak_bytes, stopped=report.stopped, training=report,
    )  # fmt: skip


# Before training


def _make_module(
    config: SegmentTrainConfig,
    weights: Path | str | None,
    ranks: Ranks,
    pairs: list[ImagePair],
    out: Path,
    classes: tuple[str, ...] = (),
) -> tuple[nn.Module, SegmentTrainConfig, dict[str, str]]:
    """The network, the settings with the task decided, and what the weights it starts from say of themselves."""
    start = {} if weights is None else read_metadata(weights)
    config = replace(config, task="instances" if classes else _task(config, start, pairs, out))
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        module = create_model(config.model, cast(SegmentTask, config.task), len(classes))
    if isinstance(module, ProgramModule) and not module.trainable:
        raise ConfigError(
            f"{config.model} is TorchScript, which can only predict; train a .pt2 or FILE.py:factory", field="network"
        )
    if weights is not None:
        same = json.dumps(classes) == start.get("classes", "[]")
        load_weights(module, weights, num_maps=None if same else OUTPUTS["instances"])
    if not ranks.alone:
        share_norms(module)
    settle_norms(module, always="contrast" in start)  # few images fine-tune a model of many
    return module, config, start


def _task(config: SegmentTrainConfig, start: Mapping[str, str], pairs: list[ImagePair], out: Path) -> SegmentTask:
    """What is learned, where the settings leave it open: what the weights or the run were trained for, else objects
    where label images number them."""
    if config.task != "auto":
        return config.task
    if "task" in start:
        return cast(SegmentTask, start["task"])
    if has_checkpoint(out / "train" / "last"):
        return cast(SegmentTask, RUN.read(out)["training"].get("task", "mask"))  # runs of older versions learn masks
    if config.scenes:
        return "instances"
    if config.model not in NETWORKS:
        return "mask"  # a user's network has one map, unless its task is named
    some = pairs[:: max(1, len(pairs) // _PROBED)]
    return "instances" if any(numbers_objects(pair.mask) for pair in some) else "mask"


def _cutting(pairs: list[ImagePair], config: SegmentTrainConfig, start: Mapping[str, str]) -> Cutting:
    """Crops at the images' own scale, or from a model that rescales images at the scale at which it works best."""
    objects, stretched = config.task == "instances", start.get("contrast") == "stretch"
    cutting = Cutting(
        config.size, objects, stretched, planes=ImagePlanes(channels=config.channels, z=config.z, t=config.t)
    )
    areas = [area for pair in pairs[:_PROBED] for area in object_areas(pair)] if objects and stretched else []
    if not areas:
        return cutting
    scale = STANDARD_DIAMETER / math.sqrt(float(np.median(areas)) * 4 / math.pi)
    return replace(cutting, scale=1.0 if 0.7 < scale < 1.4 else round(min(max(scale, 0.1), 8), 3))


def _describe(
    pairs: list[ImagePair],
    training: dict[str, Any],
    num_val: int,
    weights: Path | str | None,
    classes: tuple[str, ...] = (),
) -> dict[str, Any]:
    inputs = json.dumps([[pair.name, *pair.identity()] for pair in pairs])
    source = source_named(training["model"])
    return RUN.describe(
        training=training,
        **({} if source is None else {"network": source.as_dict()}),
        weights_sha256=None if weights is None else hashlib.sha256(find_weights(weights).read_bytes()).hexdigest(),
        **({"classes": list(classes)} if classes else {}),
        images=len(pairs),
        split={"train": len(pairs) - num_val, "validation": num_val},
        inputs_sha256=hashlib.sha256(inputs.encode()).hexdigest(),
    )


def _check_free(
    out: Path, pairs: list[ImagePair], about: dict[str, Any], resume: bool, cutting: Cutting | None = None
) -> None:
    """Raise unless `out` is empty or holds this run; a run with a checkpoint needs resume."""
    has_begun = has_checkpoint(out / "train" / "last")
    known = RUN.read_begun(out, resume or not has_begun)
    if known is None or not has_begun:
        return  # nothing was trained yet: crops that fit are used, others are cut again
    new = dict(about["training"], weights_sha256=about.get("weights_sha256"), classes=about.get("classes"))
    old = _OLDER | dict(known["training"], weights_sha256=known.get("weights_sha256"), classes=known.get("classes"))
    check_same(out, old, json.loads(json.dumps(new)), _FREE)
    if known.get("inputs_sha256") != about["inputs_sha256"]:
        assert cutting is not None
        change = find_change(pairs, out / "crops", cutting)
        raise DatasetError(
            f"{out}: {change} since the run began", code="conflict", hint="restore it, or choose another {out}"
        )
