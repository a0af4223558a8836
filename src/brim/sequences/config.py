"""How a network is trained on sequences: every choice of a run, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from brim.engine.config import TIERS, BucketConfig, Compile, Precision, Tier, TrainConfig, recipe_of
from brim.errors import ConfigError
from brim.sequences.model.network import SequenceConfig
from brim.sequences.training.augment import Augmentation
from brim.sequences.training.objectives import SelfConfig

Mode = Literal["self", "supervised"]

DEFAULT_CLUSTERS = 10  # where neither the user nor labels say how many kinds there are


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTraining:
    """How a network is trained on sequences."""

    mode: Mode = "self"  # without labels, or on them
    iterations: int = 3  # self: encoder, clusters and classifier, so many times
    encoder_epochs: int = 15  # self: of each iteration
    classifier_epochs: int = 15  # self: of each iteration; supervised: in all
    batch_size: int = 64  # sequences
    max_frames: int | None = None  # frames of a batch, padding included, instead of a number of sequences
    learning_rate: float = 1e-3  # AdamW's highest in each phase, after a warm-up; a cosine to 0 follows
    weight_decay: float = 0.01
    label_smoothing: float = 0.0  # share of a true class that is spread over all
    tier: Tier | Literal["auto"] = "auto"  # where a packed corpus is held: vram, ram, window
    precision: Precision = "auto"  # bf16 or fp16 on a GPU, fp32 on a CPU
    compile: Compile = "auto"  # a captured graph for each bucket on a GPU
    autotune: bool = True  # cuDNN tries its algorithms for every shape of batches
    num_workers: int = 8  # processes that read a folder that is not packed
    prefetch_factor: int = 6  # batches each of them reads ahead
    seed: int = 0  # of the split, the first weights, the order, the augmentation and the clusters
    encoder: str | None = None  # supervised: a run whose encoder training starts from; None: from new weights
    members: int = 1  # supervised: networks trained one after the other, whose probabilities are averaged
    clusters: int | None = None  # self: kinds looked for; None: as many as there are classes, 10 without labels
    restarts: int = 8  # self: of k-means
    fine_tune: bool = True  # self: the classifier trains the encoder too, not its own layers alone
    val_fraction: float = 0.1  # supervised: of the training items, to choose the best weights by; 0: the last ones
    holdout: float = 0.2  # of the labelled items, to score on, where the corpus has no split of its own
    model: Mapping[str, Any] = field(default_factory=dict)  # fields of SequenceConfig other than dim
    augmentation: Augmentation | None = field(default_factory=Augmentation)  # None: none, in supervised mode
    variants: int = 0  # supervised: augmented copies made once and used in turn; 0: new ones at every step
    objective: SelfConfig = field(default_factory=SelfConfig)
    checkpoint_every_s: float = 60.0  # most training that a killed run loses

    def __post_init__(self) -> None:
        """Check every value."""
        self._check_choice("mode", get_args(Mode))
        self._check_choice("tier", ("auto", *TIERS))
        for name, least in (
            ("iterations", 1), ("encoder_epochs", 1), ("classifier_epochs", 1), ("batch_size", 1), ("restarts", 1),
            ("prefetch_factor", 1), ("num_workers", 0), ("seed", 0), ("variants", 0), ("clusters", 2),
            ("members", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        for name, usual in (("val_fraction", 0.1), ("holdout", 0.2), ("label_smoothing", 0.1)):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be a share in [0, 1), such as {usual}")
        self._check_views()
        self.shape(1), self.buckets(), self.recipe(1)  # each checks its own

    def shape(self, dim: int) -> SequenceConfig:
        """The encoder for frames of so many features."""
        known = {name for name in SequenceConfig.__dataclass_fields__ if name != "dim"}
        for name in self.model:
            if name not in known:
                raise ConfigError(f"model: {name} is unknown; choose from {', '.join(sorted(known))}")
        return SequenceConfig(dim=dim, **self.model)

    def buckets(self) -> BucketConfig:
        """How batches are made."""
        if self.max_frames is None:
            return BucketConfig(batch_size=self.batch_size)
        return BucketConfig(batch_size=None, max_frames=self.max_frames)

    def recipe(self, epochs: int) -> TrainConfig:
        """The trainer's part of a phase."""
        return recipe_of(self, epochs)

    def num_clusters(self, num_classes: int) -> int:
        """Kinds to look for; of the labels only the number of their classes is used."""
        return self.clusters or (num_classes if num_classes > 1 else DEFAULT_CLUSTERS)

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ConfigError(f"{name}={getattr(self, name)} is unknown; choose one of {', '.join(choices)}")

    def _check_views(self) -> None:
        if self.mode == "self":
            if self.members > 1:
                raise ConfigError(f"members={self.members} is for supervised mode; clusters have no names to agree on")
            if self.encoder is not None:
                raise ConfigError(f"encoder={self.encoder} is for supervised mode; without labels training begins anew")
            if self.augmentation is None:
                raise ConfigError("augmentation=None leaves nothing to learn from without labels; give an Augmentation")
            if self.variants:
                raise ConfigError(f"variants={self.variants} is for supervised mode; views without labels are new ones")
            if self.max_frames is None and self.batch_size < 2:
                raise ConfigError(f"batch_size={self.batch_size} leaves nothing to compare a sequence with; at least 2")
        elif self.variants and (self.augmentation is None or self.max_frames is not None):
            raise ConfigError(f"variants={self.variants} needs an augmentation, and batch_size instead of max_frames")
