"""Settings of the engine: the training recipe, where data is held, how batches are cut, and the batch size search.

Workloads build their own settings on these. The annotated types (`LearningRate`, `TierChoice`, …) declare a setting
that several workloads share, so that its range and help are written once. Nothing here imports torch.
"""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from brim.config import Doc, Range, Unit, check
from brim.errors import ConfigError

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Compile = Literal["auto", "none", "compile", "graph"]
Tier = Literal["vram", "ram", "window"]
TIERS: tuple[Tier, ...] = get_args(Tier)
SHORT_RUN = 200  # steps: a run of fewer logs each of them
LOG_EVERY = 50

Epochs = Annotated[int, Range(1), Doc("Passes over the training data.")]
LearningRate = Annotated[
    float,
    Range(above=0, note="0.001 is usual"),
    Doc("Peak learning rate of AdamW, reached after the warm-up; a cosine to 0 follows."),
]
WeightDecay = Annotated[float, Range(0, note="0.01 is usual"), Doc("Decoupled weight decay of AdamW.")]
TierChoice = Annotated[
    Tier | Literal["auto"],
    Doc("Where the data is held: GPU memory, host memory, or a window of it; auto: the fastest one it fits in."),
]
PreloadToGpu = Annotated[
    bool | None,
    Doc("Whether data is copied to GPU memory before training; none: if it fits. A named tier decides instead."),
]
PrecisionChoice = Annotated[
    Precision, Doc("Precision of the forward pass; auto: bf16 on a GPU that has it, else fp16; fp32 on a CPU.")
]
CompileChoice = Annotated[
    Compile,
    Doc("How a step is made fast; auto: a CUDA graph on a GPU; compile: torch.compile, captured too on a GPU."),
]
EarlyStoppingPatience = Annotated[
    int | None, Range(1), Doc("Epochs without a better validation loss after which training stops; none: never.")
]
CheckpointEveryS = Annotated[
    float, Range(above=0), Unit("s"), Doc("Time between checkpoints: the most training a killed run loses.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The recipe of one phase of training."""

    epochs: Epochs = 10
    learning_rate: LearningRate = 1e-3
    weight_decay: WeightDecay = 0.01
    warmup: Annotated[
        float, Range(0, below=1, note="0.05 is usual"), Doc("Share of all steps in which the learning rate rises.")
    ] = 0.05
    clip_norm: Annotated[
        float | None, Range(above=0), Doc("Largest gradient norm over all parameters; none: gradients are not clipped.")
    ] = 1.0
    precision: PrecisionChoice = "auto"
    early_stopping_patience: EarlyStoppingPatience = None
    seed: Annotated[int, Doc("Seed of dropout and random transforms; the data source has its own.")] = 0
    compile: CompileChoice = "auto"
    max_graphs: Annotated[
        int, Range(1), Doc("Batch shapes captured as CUDA graphs at most; each keeps its inputs in GPU memory.")
    ] = 32
    log_every: Annotated[
        int | None,
        Range(1),
        Doc("Steps between log lines; each one synchronises the device. None: 50, in runs of under 200 steps 1."),
    ] = None
    checkpoint_every_s: Annotated[
        float | None,
        Range(above=0),
        Unit("s"),
        Doc("Time between checkpoints; none: only by steps, when stopped and at the end."),
    ] = 60.0
    checkpoint_every_steps: Annotated[int | None, Range(1), Doc("Steps between checkpoints; none: only by time.")] = (
        None
    )
    tensorboard: Annotated[bool, Doc("Write TensorBoard events beside metrics.jsonl.")] = True
    measure_ceiling: Annotated[bool, Doc("Time the step on fixed batches now and then during training.")] = True

    def __post_init__(self) -> None:
        check(self)

    def log_interval(self, num_steps: int) -> int:
        """Steps between log lines of a run of num_steps."""
        return self.log_every or (LOG_EVERY if num_steps >= SHORT_RUN else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTraining:
    """How a module that is not brim's own is trained."""

    epochs: Epochs = 10
    batch_size: Annotated[int, Range(1), Doc("Rows in a step.")] = 256
    learning_rate: LearningRate = 1e-3
    weight_decay: WeightDecay = 0.01
    tier: TierChoice = "auto"
    precision: PrecisionChoice = "auto"
    compile: CompileChoice = "auto"
    seed: Annotated[
        int, Range(0, 2**63 - 1), Doc("Random seed of the split, the initial weights, the order and the dropout.")
    ] = 0
    val_share: Annotated[
        float, Range(0, below=1, note="0.1 is usual"), Doc("Share of the rows held out for val_loss; 0: none.")
    ] = 0.1
    early_stopping_patience: EarlyStoppingPatience = None
    checkpoint_every_s: CheckpointEveryS = 10.0

    def __post_init__(self) -> None:
        check(self)


def recipe_of(settings: Any, epochs: int) -> TrainConfig:
    """The trainer's part of a workload's settings, a dataclass: the fields of the same names."""
    names = {field.name for field in fields(TrainConfig)} & {field.name for field in fields(settings)} - {"epochs"}
    return TrainConfig(epochs=epochs, **{name: getattr(settings, name) for name in names})


def learning_rate_at(config: TrainConfig, step: int, num_steps: int) -> float:
    """Learning rate of a step, counted from 0, in a run of num_steps: a linear warm-up, then a cosine to 0."""
    warm = round(config.warmup * num_steps)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    share = min(1.0, (step - warm) / max(1, num_steps - warm))
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """How sequences of different lengths are cut into batches: their size, and how much of them may be padding."""

    batch_size: Annotated[int | None, Range(1), Doc("Sequences in a batch; none: as many as max_frames allows.")] = 64
    max_frames: Annotated[
        int | None, Range(1), Doc("Frames in a batch, padding included, instead of a number of sequences.")
    ] = None
    max_waste: Annotated[
        float, Range(0, below=1, note="0.05 is usual"), Doc("Share of padding in an epoch, if max_buckets allows it.")
    ] = 0.05
    # with the short last batch as many shapes as TrainConfig.max_graphs lets a GPU capture
    max_buckets: Annotated[int, Range(1), Doc("Different padded lengths in an epoch at most.")] = 31
    multiple: Annotated[
        int | None,
        Range(1),
        Doc("Padded lengths are multiples of this; none: the largest of 8, 4, 2, 1 that keeps max_waste."),
    ] = None
    max_stretch: Annotated[
        float,
        Range(1, note="4 is usual"),
        Doc(
            "With batch_size: frames of a padded batch relative to one of mean length (the longest twentieth left "
            "out); longer sequences come in smaller batches, down to one."
        ),
    ] = 4.0

    def __post_init__(self) -> None:
        check(self)
        if (self.batch_size is None) == (self.max_frames is None):
            raise ConfigError(
                f"batch_size={self.batch_size} and max_frames={self.max_frames}: exactly one of them must be set",
                field="max_frames",
                code="conflict",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """How far, how long and how precisely to search for the fastest batch size."""

    limit: Annotated[int, Range(1, note="4096 is the default"), Doc("Largest batch size tried.")] = 4096
    headroom: Annotated[
        float,
        Range(0, below=1, note="0.1 keeps 10 % of the memory free"),
        Doc("Share of the memory budget kept free, for fragmentation."),
    ] = 0.10
    seconds: Annotated[
        float,
        Range(above=0, note="60 is the default"),
        Unit("s"),
        Doc("Time for the search; the first call of a size (compilation) counts separately."),
    ] = 60.0
    warmup_seconds: Annotated[
        float,
        Range(0, note="600 is the default"),
        Unit("s"),
        Doc("First calls may take this long in total before they count against seconds."),
    ] = 600.0
    tolerance: Annotated[
        float,
        Range(above=0, below=0.5, note="0.02 gives up 2 % for a smaller batch"),
        Doc("Share of throughput given up at most for a smaller batch."),
    ] = 0.02
    p95_ms: Annotated[float | None, Range(above=0), Unit("ms"), Doc("Longest 95th percentile of a step.")] = None
    budget_bytes: Annotated[
        int | None, Range(above=0), Unit("B"), Doc("Memory available; none: found by running out of it.")
    ] = None
    prove_steps: Annotated[
        int, Range(1, note="5 is the default"), Doc("Steps a batch must survive to count as safe.")
    ] = 5
    full: Annotated[
        int, Range(2, note="25 is the default"), Doc("Probes of a full measurement; only a close race needs them all.")
    ] = 25
    refine: Annotated[
        int, Range(0, note="8 is the default"), Doc("Sizes tried around the knee besides the bisection.")
    ] = 8

    def __post_init__(self) -> None:
        check(self)

    @property
    def allowed_bytes(self) -> float | None:
        """Memory a step may use: the budget less its headroom."""
        return None if self.budget_bytes is None else self.budget_bytes * (1 - self.headroom)
