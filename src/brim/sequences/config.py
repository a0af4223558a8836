"""The settings of the sequences package: the network's shape, augmentation, clustering, loading and training.

Nothing here imports torch or NumPy: the command line and the API describe and check settings without them.
"""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from brim.config import Doc, Range, check
from brim.engine.config import (
    BucketConfig,
    CheckpointEveryS,
    CompileChoice,
    LearningRate,
    PrecisionChoice,
    TierChoice,
    TrainConfig,
    WeightDecay,
    recipe_of,
)
from brim.errors import ConfigError

Mode = Literal["self", "supervised"]
Reverse = Literal["gate", "gather"]

DEFAULT_CLUSTERS = 10  # where neither the settings nor labels say how many there are

_Width = Range(1, 16384)
_Share = Range(0, 1, note="it is a share, such as 0.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The shape of the encoder, apart from the number of features. It has 3.7 million parameters at 1024 features."""

    channels: Annotated[int, _Width, Doc("Channels of the convolutions.")] = 384
    kernel: Annotated[
        int,
        Range(1, 16383, step=2, note="a kernel must be odd, so that it has a middle frame"),
        Doc("Frames that a convolution sees, odd."),
    ] = 5
    convolutions: Annotated[int, Range(1, 64), Doc("Number of convolutions.")] = 2
    hidden: Annotated[
        int, _Width, Doc("Units of the LSTM per direction; up to 128, cuDNN keeps the whole recurrence in one kernel.")
    ] = 128
    layers: Annotated[int, Range(1, 64), Doc("Layers of the LSTM.")] = 2
    attention: Annotated[int, _Width, Doc("Width of the hidden layer of the attention scores.")] = 128
    embedding: Annotated[int, _Width, Doc("Size of the embedding of a sequence.")] = 256
    dropout: Annotated[
        float,
        Range(0, below=1, note="0.1 is usual"),
        Doc("Dropout after each convolution, between LSTM layers and before the embedding."),
    ] = 0.1
    normalise: Annotated[
        bool, Doc("Whether frames are normalised by the mean and standard deviation of the training data.")
    ] = True
    reverse: Annotated[
        Reverse,
        Doc("How the reverse direction of the LSTM starts at each sequence's end; see docs/sequences.md."),
    ] = "gate"
    concurrent: Annotated[bool, Doc("With gather: run both directions at once, on two CUDA streams.")] = False

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceConfig(EncoderShape):
    """The shape of an encoder for frames with `dim` features; saved with every run."""

    dim: Annotated[int, Range(1), Doc("Features of a frame.")]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values; SequenceConfig(**values) reads them back."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """The largest changes to a sequence; each one's strength is drawn between none and these. 0 switches it off."""

    crop: Annotated[float, _Share, Doc("Share of a sequence that is cut off at its ends.")] = 0.2
    noise: Annotated[float, Range(0), Doc("Standard deviation of the noise, relative to that of each feature.")] = 0.1
    time_masks: Annotated[int, Range(0), Doc("Spans of frames that are masked.")] = 2
    time_width: Annotated[float, _Share, Doc("Width of a span, as a share of the sequence.")] = 0.1
    feature_masks: Annotated[int, Range(0), Doc("Bands of features that are masked.")] = 2
    feature_width: Annotated[float, _Share, Doc("Width of a band, as a share of the features.")] = 0.1

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfConfig:
    """The loss of an encoder that learns without labels."""

    temperature: Annotated[
        float,
        Range(above=0, note="0.2 is usual"),
        Doc("Temperature of the contrastive loss; lower weighs the most similar sequences more."),
    ] = 0.2
    contrast: Annotated[float, Range(0), Doc("Weight of the contrastive loss between two augmented views.")] = 1.0
    reconstruction: Annotated[float, Range(0), Doc("Weight of the prediction error of masked frames.")] = 1.0
    projection: Annotated[
        int, Range(1), Doc("Size of the projection in which views are compared; not kept after training.")
    ] = 128

    def __post_init__(self) -> None:
        check(self)
        if self.contrast + self.reconstruction == 0:
            raise ConfigError(
                "and reconstruction=0 leave no loss", field="contrast", value=self.contrast, code="conflict"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KmeansConfig:
    """How k-means looks for clusters."""

    clusters: Annotated[int, Range(1), Doc("Number of clusters.")]
    restarts: Annotated[int, Range(1), Doc("Random starts; the one with the lowest inertia is kept.")] = 8
    steps: Annotated[int, Range(1), Doc("Lloyd iterations, at most.")] = 100
    tolerance: Annotated[
        float, Range(0), Doc("Squared movement of all centres at which to stop, relative to the points' variance.")
    ] = 1e-4
    seed: Annotated[int, Doc("Seed of the random starts.")] = 0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """The settings of a torch DataLoader, by its own names."""

    batch_size: Annotated[int, Range(1), Doc("Sequences per batch.")] = 64
    num_workers: Annotated[
        int, Range(0), Doc("Processes that read, at most one per core; 0: the training process reads.")
    ] = 8
    prefetch_factor: Annotated[int, Range(1), Doc("Batches each worker reads ahead.")] = 6
    persistent_workers: Annotated[bool, Doc("Keep the workers from one epoch to the next.")] = True
    pin_memory: Annotated[bool, Doc("Pin batches that go to a GPU.")] = True
    non_blocking: Annotated[bool, Doc("Copy pinned batches to a GPU asynchronously.")] = True
    augmentation: Annotated[Augmentation | None, Doc("Augmentation on the CPU, in the workers; none: no changes.")] = (
        None
    )
    buckets: Annotated[
        BucketConfig | None,
        Doc("Batches of similar lengths, whose size replaces batch_size; none: sequences at random."),
    ] = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTraining:
    """How a network is trained on sequences, without labels or with them."""

    mode: Annotated[Mode, Doc("self: learn without labels; supervised: learn from labels.")] = "self"
    iterations: Annotated[
        int, Range(1, 1000), Doc("self: rounds of training the encoder, clustering and training the classifier.")
    ] = 3
    encoder_epochs: Annotated[int, Range(1), Doc("self: epochs of the encoder in each round.")] = 15
    classifier_epochs: Annotated[
        int, Range(1), Doc("self: epochs of the classifier in each round; supervised: all epochs.")
    ] = 15
    batch_size: Annotated[int, Range(1), Doc("Sequences per batch.")] = 64
    max_frames: Annotated[
        int | None, Range(1), Doc("Frames per batch, padding included, instead of a number of sequences.")
    ] = None
    learning_rate: LearningRate = 1e-3
    weight_decay: WeightDecay = 0.01
    label_smoothing: Annotated[
        float, Range(0, below=1, note="0.1 is usual"), Doc("Share of the target probability spread over all classes.")
    ] = 0.0
    tier: TierChoice = "auto"
    precision: PrecisionChoice = "auto"
    compile: CompileChoice = "auto"
    autotune: Annotated[bool, Doc("Whether cuDNN benchmarks its algorithms for every batch shape.")] = True
    num_workers: Annotated[
        int, Range(0), Doc("Processes that read a folder that is not packed; a packed corpus needs none.")
    ] = 8
    prefetch_factor: Annotated[int, Range(1), Doc("Batches each of these processes reads ahead.")] = 6
    seed: Annotated[
        int,
        Range(0, 2**63 - 1),
        Doc("Seed of the split, the initial weights, the batch order, the augmentation and the clusters."),
    ] = 0
    encoder: Annotated[
        str | None, Doc("supervised: directory of a run whose encoder training starts from; none: new weights.")
    ] = None
    members: Annotated[
        int, Range(1), Doc("supervised: networks trained one after another, whose probabilities are averaged.")
    ] = 1
    clusters: Annotated[
        int | None,
        Range(2),
        Doc("self: number of clusters; none: the number of classes, or 10 without labels."),
    ] = None
    restarts: Annotated[int, Range(1, 10_000), Doc("self: random starts of k-means.")] = 8
    fine_tune: Annotated[bool, Doc("self: whether training the classifier also trains the encoder.")] = True
    val_fraction: Annotated[
        float,
        Range(0, below=1, note="0.1 is usual"),
        Doc("supervised: share of the training items that selects the best weights; 0: keep the last weights."),
    ] = 0.1
    holdout: Annotated[
        float,
        Range(0, below=1, note="0.2 is usual"),
        Doc("Share of the labelled items held out for evaluation, if the corpus has no split of its own."),
    ] = 0.2
    model: Annotated[EncoderShape, Doc("Shape of the encoder.")] = field(default_factory=EncoderShape)
    augmentation: Annotated[
        Augmentation | None, Doc("The largest changes to a sequence; none: no augmentation, in supervised mode only.")
    ] = field(default_factory=Augmentation)
    variants: Annotated[
        int,
        Range(0, 1000),
        Doc("supervised: augmented copies made once and used in turn; 0: augment anew at every step."),
    ] = 0
    objective: Annotated[SelfConfig, Doc("self: the loss of the encoder.")] = field(default_factory=SelfConfig)
    checkpoint_every_s: CheckpointEveryS = 60.0

    def __post_init__(self) -> None:
        check(self)
        if self.mode == "self":
            self._check_self()
        elif self.variants and self.augmentation is None:
            raise self._conflict("variants", "needs an augmentation")
        elif self.variants and self.max_frames is not None:
            raise self._conflict("variants", "needs batches of a fixed size", "set {batch_size}, not {max_frames}")

    def _check_self(self) -> None:
        labels_only = "is for supervised mode"
        hint = "set {mode} to supervised"
        if self.members > 1:
            raise self._conflict("members", f"{labels_only}; clusters have no common names to average", hint)
        if self.encoder is not None:
            raise self._conflict("encoder", f"{labels_only}; without labels training starts from new weights", hint)
        if self.variants:
            raise self._conflict("variants", f"{labels_only}; without labels every step makes new views", hint)
        if self.augmentation is None:
            raise self._conflict("augmentation", "leaves nothing to learn from without labels")
        if self.max_frames is None and self.batch_size < 2:
            raise self._conflict("batch_size", "must be at least 2 without labels, to have other sequences to contrast")

    def _conflict(self, name: str, message: str, hint: str = "") -> ConfigError:
        return ConfigError(message, field=name, value=getattr(self, name), code="conflict", hint=hint)

    def shape(self, dim: int) -> SequenceConfig:
        """The encoder's shape for frames with `dim` features."""
        return SequenceConfig(dim=dim, **asdict(self.model))

    def buckets(self) -> BucketConfig:
        """How sequences are grouped into batches."""
        if self.max_frames is None:
            return BucketConfig(batch_size=self.batch_size)
        return BucketConfig(batch_size=None, max_frames=self.max_frames)

    def recipe(self, epochs: int) -> TrainConfig:
        """The trainer's settings for one phase."""
        return recipe_of(self, epochs)

    def num_clusters(self, num_classes: int) -> int:
        """How many clusters to look for; of the labels only the number of classes is used."""
        return self.clusters or (num_classes if num_classes > 1 else DEFAULT_CLUSTERS)
