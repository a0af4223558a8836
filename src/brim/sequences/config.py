"""The settings of the sequences package: the network's shape, augmentation, clustering, loading and training.

Nothing here imports torch or NumPy: the command line and the API describe and check settings without them.
"""

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from brim.config import Doc, Length, Range, Unit, check
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
from brim.engine.networks.source import find_source
from brim.errors import ConfigError

Mode = Literal["self", "supervised"]
Method = Literal["auto", "rocket", "cnn_lstm", "ensemble"]
Reverse = Literal["gate", "gather"]
Front = Literal["plain", "residual"]
Layout = Literal["auto", "frames-first", "features-first"]
AudioChoice = Literal["logmel", "mfcc"]
LayerChoice = Literal["last", "all"]
TaskChoice = Literal["auto", "classification", "regression"]

LEAVE_ONE_OUT = "leave-one-group-out"

_NETWORK_SETTINGS = (
    "classifier_epochs", "batch_size", "max_frames", "learning_rate", "weight_decay", "label_smoothing", "precision",
    "compile", "encoder", "members", "network", "model", "augmentation", "variants",
)  # fmt: skip

_SELF_EPOCHS = 15
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
    stride: Annotated[
        int,
        Range(0, 100_000),
        Doc("Frames between steps of the LSTM; 0: as many as limit it to 250 steps; without labels, 1."),
    ] = 0
    front: Annotated[
        Front,
        Doc(
            "plain: convolutions normalised within a frame; residual: within a batch, with shortcuts, and their mean "
            "and maximum over time go into the embedding."
        ),
    ] = "plain"
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

    dim: Annotated[int, Range(1), Doc("Features of a frame; of several layers, those of all.")]
    stack: Annotated[
        int, Range(1), Doc("Layers that a frame holds one after the other; their weighted sum is encoded.")
    ] = 1

    def __post_init__(self) -> None:
        EncoderShape.__post_init__(self)
        if self.dim % self.stack:
            raise ConfigError(f"does not divide the {self.dim} features", field="stack", value=self.stack)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values; SequenceConfig(**values) reads them back."""
        values = asdict(self)
        return values if self.stack > 1 else {name: value for name, value in values.items() if name != "stack"}


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
class SequenceSample:
    """Which sequences are made up and written as files."""

    sequences: Annotated[int, Range(1, 10_000_000), Doc("Number of sequences.")] = 100
    features: Annotated[int, Range(1, 100_000), Doc("Features of a frame.")] = 8
    classes: Annotated[int, Range(1, 10_000), Doc("Number of classes.")] = 3
    mean_length: Annotated[float, Range(1, 1_000_000), Doc("Mean length; lengths are log-normal."), Unit("frames")] = (
        30.0
    )
    seed: Annotated[int, Range(0, 2**63 - 1), Doc("Seed; sequence i depends on it and i alone.")] = 0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """How files become sequences; each setting concerns some kinds of files only."""

    layout: Annotated[
        Layout,
        Doc(".npy: whether arrays are (frames, features) or (features, frames); auto: recognised by what varies."),
    ] = "auto"
    id_column: Annotated[
        str | None,
        Length(1, 200),
        Doc(".csv, .parquet: column that tells sequences apart; none: one called id or similar, if there is one."),
    ] = None
    time_column: Annotated[
        str | None, Length(1, 200), Doc(".csv, .parquet: column that orders frames; none: one called time or similar.")
    ] = None
    features: Annotated[AudioChoice, Doc("Audio: log mel spectra, or cepstral coefficients (MFCC).")] = "logmel"
    sample_rate: Annotated[
        int, Range(1000, 384_000), Unit("Hz"), Doc("Audio: rate to which recordings are resampled.")
    ] = 16_000
    window_ms: Annotated[float, Range(1, 1000), Unit("ms"), Doc("Audio: length of a window.")] = 25.0
    hop_ms: Annotated[float, Range(1, 1000), Unit("ms"), Doc("Audio: time between two frames.")] = 10.0
    mels: Annotated[int, Range(1, 512), Doc("Audio: mel bands.")] = 64
    coefficients: Annotated[int, Range(1, 512), Doc("Audio: coefficients of an MFCC, at most as many as bands.")] = 20
    speech_model: Annotated[
        str | None,
        Doc("Audio: folder of a Hugging Face speech model whose hidden states are the frames; none: spectra."),
    ] = None
    speech_layers: Annotated[
        LayerChoice, Doc("Audio: the last layer of the speech model, or all, whose weights are learned.")
    ] = "last"
    device: Annotated[str, Doc("Audio: device that computes features: auto, cpu, cuda or cuda:N.")] = "auto"

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
    method: Annotated[
        Method,
        Doc(
            "rocket: fixed kernels with a linear model; cnn_lstm: the network; ensemble: both, averaged; auto: the "
            "best of them by cross-validation on the training part, or cnn_lstm if settings of the network are given. "
            "Without labels: which clusters are kept."
        ),
    ] = "auto"
    budget: Annotated[
        float | None,
        Range(above=0),
        Unit("s"),
        Doc(
            "Time for training; none: 8 s for auto, 35 s for ensemble and for cnn_lstm on up to 5000 sequences without "
            "settings of the network, else no limit."
        ),
    ] = None
    iterations: Annotated[
        int, Range(1, 1000), Doc("self: rounds of training the encoder, clustering and training the classifier.")
    ] = 3
    encoder_epochs: Annotated[int, Range(1), Doc("self: epochs of the encoder in each round.")] = 15
    classifier_epochs: Annotated[
        int | None,
        Range(1),
        Doc(
            "self: epochs of the classifier in each round; supervised: all epochs; none: 15 without labels, with "
            "labels 1500 steps, or until the validation loss has not improved for a quarter of them."
        ),
    ] = None
    batch_size: Annotated[int, Range(1), Doc("Sequences per batch.")] = 64
    max_frames: Annotated[
        int | None, Range(1), Doc("Frames per batch, padding included, instead of a number of sequences.")
    ] = None
    learning_rate: LearningRate = 1e-3
    weight_decay: WeightDecay = 0.01
    label_smoothing: Annotated[
        float, Range(0, below=1, note="0.1 is usual"), Doc("Share of the target probability spread over all classes.")
    ] = 0.0
    balance: Annotated[
        float,
        Range(0, 1, note="0.5 is usual"),
        Doc("supervised: classes are weighted by their inverse frequency to this power; 0: all sequences count alike."),
    ] = 0.5
    tier: TierChoice = "auto"
    precision: PrecisionChoice = "auto"
    compile: CompileChoice = "auto"
    autotune: Annotated[bool, Doc("Whether cuDNN benchmarks its algorithms for every batch shape.")] = True
    num_workers: Annotated[
        int,
        Range(0),
        Doc(
            "Processes that read a folder that is not packed; none for a packed corpus, nor by default for a small one."
        ),
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
    network: Annotated[
        str | None,
        Doc("supervised: a network of your own: FILE.py:factory, a .pt2 program or a declared name; none: brim's."),
    ] = None
    label: Annotated[
        str | None, Length(1, 200), Doc("Column of labels.csv to learn; none: the one that was packed as the label.")
    ] = None
    task: Annotated[
        TaskChoice,
        Doc("Whether labels are classes or numbers; auto: numbers if there are ten different ones, with decimals."),
    ] = "auto"
    groups: Annotated[
        str | None,
        Length(1, 200),
        Doc("Column of labels.csv, such as speaker; no group is in two of training, validation and held-out part."),
    ] = None
    folds: Annotated[
        int | str | None,
        Range(2, 10_000),
        Length(1, 200),
        Doc(
            "supervised: cross-validation: a number of folds, leave-one-group-out, or a column of labels.csv that "
            "names them; none: one split."
        ),
    ] = None
    seeds: Annotated[
        int, Range(1, 1000), Doc("With folds: repetitions of all folds, with the seeds seed, seed + 1 and so on.")
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
        self._check_folds()
        if self.network is not None:
            self._check_network()
        if self.mode == "self" and self.classifier_epochs is None:
            object.__setattr__(self, "classifier_epochs", _SELF_EPOCHS)
        if self.mode == "self":
            self._check_self()
        elif self.variants and self.augmentation is None:
            raise self._conflict("variants", "needs an augmentation")
        elif self.variants and self.max_frames is not None:
            raise self._conflict("variants", "needs batches of a fixed size", "set {batch_size}, not {max_frames}")

    def _check_network(self) -> None:
        hint = "omit {network}, or set {mode} to supervised"
        if self.mode == "self":
            raise self._conflict("network", "learns from labels", hint)
        if self.method in ("rocket", "ensemble"):
            raise self._conflict("network", f"is not part of the method {self.method}", "set {method} to cnn_lstm")
        if self.encoder is not None or self.members > 1:
            other = "encoder" if self.encoder is not None else "members"
            raise self._conflict(other, "is for brim's own network")
        name = find_source(str(self.network)).name
        object.__setattr__(self, "network", name)  # with the digest of the file

    def _check_folds(self) -> None:
        if self.folds is None:
            if self.seeds > 1:
                raise self._conflict("seeds", "repeats the folds of a cross-validation", "set {folds} too")
            return
        if self.mode == "self":
            raise self._conflict("folds", "is for supervised mode", "set {mode} to supervised")
        if self.folds == LEAVE_ONE_OUT and self.groups is None:
            raise self._conflict("folds", "needs to know the groups", "set {groups} to a column of labels.csv")
        if self.seed + self.seeds > 2**63:
            raise self._conflict("seeds", "leads to seeds beyond 2⁶³", "choose a smaller {seed}")

    def _check_self(self) -> None:
        labels_only = "is for supervised mode"
        hint = "set {mode} to supervised"
        if self.method == "ensemble":
            raise self._conflict("method", f"{labels_only}; clusters have no common names to average", hint)
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

    def shape(self, dim: int, stack: int = 1) -> SequenceConfig:
        """The encoder's shape for frames with `dim` features, those of `stack` layers."""
        return SequenceConfig(dim=dim, stack=stack, **asdict(self.model))

    @property
    def resolved_method(self) -> Method:
        """The method; auto with a setting of the network is the network."""
        if self.method != "auto":
            return self.method
        defaults = {setting.name: setting for setting in fields(SequenceTraining)}

        def is_default(name: str) -> bool:
            setting = defaults[name]
            known = setting.default if setting.default_factory is MISSING else setting.default_factory()
            return bool(getattr(self, name) == known)

        names = [name for name in _NETWORK_SETTINGS if self.mode == "supervised" or name != "classifier_epochs"]
        return "auto" if all(map(is_default, names)) else "cnn_lstm"

    def buckets(self) -> BucketConfig:
        if self.max_frames is None:
            return BucketConfig(batch_size=self.batch_size)
        return BucketConfig(batch_size=None, max_frames=self.max_frames)

    def recipe(self, epochs: int) -> TrainConfig:
        return recipe_of(self, epochs)

    def num_clusters(self, num_classes: int) -> int:
        """How many clusters to look for; of the labels only the number of classes is used."""
        return self.clusters or (num_classes if num_classes > 1 else DEFAULT_CLUSTERS)
