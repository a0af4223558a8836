"""Settings of segmentation: networks by name, training, prediction and tuning. Nothing here imports torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from brim.config import Doc, Length, OneOf, Range, Unit, check
from brim.engine.config import (
    CheckpointEveryS,
    EarlyStoppingPatience,
    Epochs,
    LearningRate,
    Precision,
    PrecisionChoice,
    TierChoice,
)
from brim.engine.networks.source import NetworkSource, declared, find_source, is_reference, named_source
from brim.errors import ConfigError

NETWORKS: Final = (
    *("hrnet", "resunet_small", "resunet_advanced", "unet_tiny", "cells"),
    *("unet_resnet18", "unet_resnet34", "unet_resnet50"),
)  # built in
DEFAULT_MODEL: Final = "default"  # the name of the model that comes with brim
DEFAULT_NETWORK: Final = "cells"  # and its network
DEFAULT_WEIGHTS: Final = Path(__file__).parent / "weights" / "default.safetensors"
REGISTERED: Final[dict[str, Callable[..., Any]]] = {}  # by register_model and bring: name → factory of a new module

SegmentTask = Literal["mask", "instances"]
OUTPUTS: Final[dict[str, int]] = {"mask": 1, "instances": 2}  # maps of a network: foreground; and height

SCENES: Final = ("nuclei", "cytoplasm", "brightfield", "phase", "tissue", "bacteria", "round")  # kinds that are drawn
SCENE_CHOICES: Final = ("all", *SCENES)  # all: every kind, nuclei six times as often as another

Format = Literal["geojson", "coco", "roi", "mask", "overlay", "labels", "csv", "imagej", "ome-zarr"]  # imagej is roi
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
SEARCHES: Final = ("precision", "layout", "compile")

MIN_SIDE: Final = 32  # pixels; the smallest input the networks take
MAX_CROP: Final = 4096  # pixels; a larger crop fits no device together with its gradients
DEFAULT_TILE: Final = 1024  # pixels
QUICK_SECONDS: Final = 10.0  # for tuning on first use, while a caller waits for a prediction

Threshold = Annotated[
    float, Range(above=0, below=1, note="0.5 is usual"), Doc("A pixel above this probability is foreground.")
]
MinArea = Annotated[
    int | None,
    Range(0),
    Unit("px"),
    Doc("Smaller objects are left out; none: those of fewer than 16 px, of masks none."),
]
Diameter = Annotated[
    float | None,
    Range(4, 10_000),
    Unit("px"),
    Doc("Typical diameter of an object; none: estimated for each image, if the model was trained for that."),
]
DetectHoles = Annotated[bool, Doc("Polygons may have holes.")]


class BroughtFactory:
    """Makes the network of a source; its code is imported with the first one."""

    def __init__(self, source: NetworkSource) -> None:
        self.source = source

    def __call__(self, **settings: Any) -> Any:
        from brim.engine.networks import factory_of

        return factory_of(self.source)(**settings)


def network_names() -> tuple[str, ...]:
    """The built-in networks, the registered ones, and those that packages and the administrator declare."""
    return tuple(dict.fromkeys((*NETWORKS, *REGISTERED, *declared())))


def bring(text: str) -> str:
    """Make the network of FILE.py:factory, of a traced program or of a declared name usable here; returns its name.

    The name of a built-in or registered network stands for itself.
    """
    if text in NETWORKS or text in REGISTERED:
        return text
    if not is_reference(text) and text not in declared():
        known = ", ".join(network_names())
        raise ConfigError(
            f"is unknown; give FILE.py:factory, a program (.pt2, .pt), or one of {known}",
            field="network",
            value=text,
            code="unknown_choice",
        )
    source = find_source(text)
    REGISTERED[source.name] = BroughtFactory(source)
    return source.name


def source_named(name: str) -> NetworkSource | None:
    """Where the network of that name comes from; None for built-in ones, and for functions without a file."""
    factory = REGISTERED.get(name)
    if isinstance(factory, BroughtFactory):
        return factory.source
    if factory is not None:
        from brim.engine.networks import source_of_object

        return source_of_object(factory)
    return None if name in NETWORKS else named_source(name)


def check_network(name: str) -> None:
    """Raise a ConfigError if no network has this name."""
    if name not in network_names():
        known = ", ".join(network_names())
        raise ConfigError(f"is unknown; choose one of {known}", field="model", value=name, code="unknown_choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class CropAugmentation:
    """How strongly training crops are changed at random; every range is symmetric about no change."""

    turn: Annotated[bool, Doc("Mirror crops and turn them by multiples of 90°.")] = True
    affine: Annotated[
        float, Range(0, 1), Doc("Share of crops that are scaled, rotated and shifted; the others keep their pixels.")
    ] = 0.5
    scale: Annotated[float, Range(0, below=1), Doc("Scale by a factor of up to 1 ± this.")] = 0.15
    rotation_deg: Annotated[float, Range(0, 180), Unit("°"), Doc("Rotate by up to ± this.")] = 20.0
    shift: Annotated[float, Range(0, 1), Doc("Shift by up to ± this share of a side.")] = 0.06
    brightness: Annotated[float, Range(0, 1), Doc("Add up to ± this share of full scale.")] = 0.1
    contrast: Annotated[float, Range(0, 1), Doc("Multiply by up to 1 ± this, relative to the mean of the crop.")] = 0.2
    gamma: Annotated[float, Range(0, 1), Doc("Gamma correction: exponent between e^-this and e^this.")] = 0.2
    noise: Annotated[
        float, Range(0, 1), Doc("Largest standard deviation of added noise, as a share of full scale.")
    ] = 0.02

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlanes:
    """What is read of images with several channels, Z slices or times."""

    channels: Annotated[
        tuple[Annotated[str, Length(1, 200)], ...] | None,
        Length(1, 100),
        Doc("Channels by name or number, from 0; several are averaged. None: a colour image as it is, else all."),
    ] = None
    z: Annotated[
        int | Literal["max"] | None,
        Range(0),
        Doc("Z slice, from 0, or max: the maximum over all. None: the maximum, of pages without axes the first."),
    ] = None
    t: Annotated[int | None, Range(0), Doc("Time, from 0; none: the first.")] = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTrainConfig(ImagePlanes):
    """How a network is trained to segment."""

    model: Annotated[str, OneOf(network_names), Doc("Network to train.")]
    task: Annotated[
        Literal["auto", "mask", "instances"],
        Doc(
            "What it predicts: a mask, whose blobs become polygons, or instances, one polygon for each object; auto: "
            "instances where label images number the objects."
        ),
    ] = "auto"
    scenes: Annotated[
        tuple[str, ...],
        Length(0, 100),
        OneOf(lambda: SCENE_CHOICES),
        Doc("Train on drawn scenes of these kinds instead of images; all: every kind, mostly nuclei."),
    ] = ()
    scenes_per_epoch: Annotated[int, Range(1), Doc("Scenes drawn in an epoch; none is drawn twice.")] = 8192
    size: Annotated[
        int,
        Range(MIN_SIDE, MAX_CROP, note="512 is usual"),
        Unit("px"),
        Doc("Side of a crop, at the images' own scale."),
    ] = 512
    epochs: Epochs = 30
    batch_size: Annotated[int, Range(1), Doc("Crops per step; a batch that does not fit is split.")] = 8
    learning_rate: LearningRate = 1e-3
    seed: Annotated[
        int, Range(0, 2**63 - 1), Doc("Seed of the split, the initial weights, the order and the augmentation.")
    ] = 0
    precision: PrecisionChoice = "auto"
    val_fraction: Annotated[
        float,
        Range(above=0, below=1, note="0.1 is usual"),
        Doc("Share of the images held out for validation, at least one."),
    ] = 0.1
    augment: Annotated[bool, Doc("Augment the crops at random.")] = True
    augmentation: Annotated[CropAugmentation, Doc("How strongly crops are changed.")] = field(
        default_factory=CropAugmentation
    )
    tier: TierChoice = "auto"
    early_stopping_patience: EarlyStoppingPatience = None
    checkpoint_every_s: CheckpointEveryS = 60.0

    def __post_init__(self) -> None:
        check(self)


# Settings that differ when training starts from the default model
FINE_TUNING: Final[dict[str, Any]] = {
    "size": 256,
    "epochs": 100,
    "batch_size": 4,
    "learning_rate": 2e-4,
}
SCENE_TRAINING: Final[dict[str, Any]] = {"size": 256, "batch_size": 64, "learning_rate": 2e-3}  # and on scenes


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Which scenes are drawn and written as files."""

    kind: Annotated[
        tuple[str, ...], Length(1, 100), OneOf(lambda: SCENE_CHOICES), Doc("Kinds of scene; all: every kind.")
    ] = ("nuclei",)
    images: Annotated[int, Range(1, 10_000_000), Doc("Number of images.")] = 100
    size: Annotated[int, Range(MIN_SIDE, MAX_CROP), Unit("px"), Doc("Side of an image.")] = 256
    seed: Annotated[int, Range(0, 2**63 - 1), Doc("Seed; the images of a seed are the same on every machine.")] = 0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig(ImagePlanes):
    """How images become polygons."""

    batch_size: Annotated[int | None, Range(1), Doc("Patches the network sees at once; none: the tuned optimum.")] = (
        None
    )
    threshold: Threshold = 0.5
    detect_holes: DetectHoles = True
    min_area: MinArea = None
    diameter: Diameter = None
    strict: Annotated[bool, Doc("Run every patch alone: the same bits whatever else is predicted, but slower.")] = False
    tile: Annotated[
        int, Range(MIN_SIDE), Unit("px"), Doc("Larger images are cut into windows of this side and blended.")
    ] = DEFAULT_TILE
    resize: Annotated[
        int | None,
        Range(MIN_SIDE),
        Unit("px"),
        Doc("Show the network every image at this side instead of cutting windows; none: cut windows."),
    ] = None
    overlap: Annotated[
        int | None, Range(0), Unit("px"), Doc("Overlap of neighbouring windows; none: an eighth of the tile.")
    ] = None

    def __post_init__(self) -> None:
        ImagePlanes.__post_init__(self)
        if self.overlap is not None and self.overlap > self.tile // 2:
            raise ConfigError(
                f"must be at most {self.tile // 2} px, half the tile",
                field="overlap",
                value=self.overlap,
                code="conflict",
                hint="lower {overlap} or raise {tile}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesConfig(PredictConfig):
    """How files of images become files of results."""

    model: Annotated[
        str | None,
        OneOf(network_names),
        Doc("Network the weights belong to; none: the one they were trained as."),
    ] = None
    format: Annotated[Format, Doc("Format of the results.")] = "geojson"
    precision: Annotated[
        Precision, Doc("Precision of the network; auto: the tuned one, else fp16 on a GPU and fp32 on a CPU.")
    ] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestConfig:
    """Options of one request to a served network."""

    threshold: Threshold = 0.5
    detect_holes: DetectHoles = True
    min_area: MinArea = None
    diameter: Diameter = None
    format: Annotated[Format, Doc("Format of the answer.")] = "geojson"
    max_pixels: Annotated[int, Range(1), Doc("Largest image accepted, width times height.")] = 2**26
    as_rings: Annotated[bool, Doc("Answer GeoJSON requests with packed rings, to be written as text elsewhere.")] = (
        False
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """How the fastest safe batch size of networks is found."""

    models: Annotated[tuple[str, ...], Length(1, 100), OneOf(network_names), Doc("Networks to tune.")] = NETWORKS[:3]
    size: Annotated[int, Range(MIN_SIDE), Unit("px"), Doc("Side of the images.")] = 1024
    seconds: Annotated[
        float, Range(above=0, note="60 is the default"), Unit("s"), Doc("Time for each network, without compilation.")
    ] = 60.0
    p95_ms: Annotated[
        float | None, Range(above=0), Unit("ms"), Doc("Longest step allowed, as a 95th percentile; none: any.")
    ] = None
    search: Annotated[
        tuple[str, ...],
        OneOf(lambda: SEARCHES),
        Doc("What to search besides the batch size: precision, layout, compile."),
    ] = ()
    reserve: Annotated[float, Range(0, below=1, note="0.1 is usual"), Doc("Share of the memory left free.")] = 0.1
    tolerance: Annotated[
        float,
        Range(0, below=1, note="0.005 is usual"),
        Doc("Share of mask pixels in which a faster setting may differ from fp32."),
    ] = 0.005

    def __post_init__(self) -> None:
        check(self)
