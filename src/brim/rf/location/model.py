"""A network over the set of receivers that says where the transmitter is and how sure it is.

Axes: B samples, R receivers (any number), F features, K statistics, W width. Attention is masked by `present`: padding
never matters, nor does the order of receivers.

The hybrid starts from the Gauss-Newton answer. `prepare` computes that once per dataset, as columns beside the others;
the network sees each receiver's whitened residuals and answers in units of the solver's own uncertainty, along the
principal axes of its ellipse: a correction near 0 and a covariance near 1. Untrained, it repeats the solver.
The pure network sees features and stations alone and answers in units of the stations' spread.

Positions, arrival differences and covariances stay float32 under autocast; only the layers between follow it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from brim.config import Length, Range, check
from brim.engine.training import Dropout, drawn
from brim.errors import ConfigError
from brim.rf.config import GenerateConfig
from brim.rf.features import FEATURES, STATISTICS, F
from brim.rf.location.solver import (
    METRES_PER_US,
    NoiseModel,
    SampleRows,
    SolverConfig,
    observe,
    residuals,
    solve,
    solver_batch,
    target,
)

PREPARED = ("stations", "origin", "axes", "solver_position", "solver_tokens")  # and `target` where the truth is known
_MEASURED = ("features", "present", "receivers", "reference")
_LENGTH_M = 100_000.0  # positions enter the network in units of this
_MAX_FEATURE = 5.0  # standard deviations; beyond them only the side matters
_MAX_LOG = 3.0  # the network may stretch an ellipse by e³ either way
_NUM_SOLVER_TOKENS = 5
_LOG2PI = 1.8378770664093453


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatorConfig:
    """The network's shape; saved with every checkpoint."""

    hybrid: bool = True  # start from the solver's answer
    width: Annotated[int, Range(1)] = 64
    heads: Annotated[int, Range(1)] = 4
    layers: Annotated[int, Range(1)] = 3
    dropout: Annotated[float, Range(0, below=1)] = 0.2  # beyond the solver there is little to learn: it overfits easily
    features: Annotated[tuple[str, ...], Length(1)] = tuple(name for name, _ in FEATURES)

    def __post_init__(self) -> None:
        check(self)
        if self.width % self.heads:
            raise ConfigError(
                f"must be a multiple of heads={self.heads}", field="width", value=self.width, code="conflict"
            )

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values; LocatorConfig(**values) reads them back."""
        return asdict(self) | {"features": list(self.features)}

    def check_features(self, names: Sequence[str], source: str) -> None:
        """Reject data whose features are not those of the network."""
        if tuple(names) != self.features:
            odd = sorted(set(names) ^ set(self.features)) or ["their order"]
            raise ConfigError(
                f"{source}: features differ from the model's ({', '.join(odd)})",
                code="conflict",
                hint="use data made with the same version of brim",
            )


class Estimate(NamedTuple):
    """A position and how sure; all float32 but the origin."""

    position_en: Tensor  # (B, 2) m east and north of the origin
    covariance: Tensor  # (B, 2, 2) m²
    origin: Tensor  # (B, 3) lat, lon, alt of the frame, float64
    root: Tensor  # (B, 2, 2) m; covariance = root @ rootᵀ, better conditioned


def prepare(
    rows: SampleRows,
    config: GenerateConfig,
    noise: NoiseModel | None = None,
    solver: SolverConfig | None = None,
    *,
    chunk: int | None = None,
) -> SampleRows:
    """The columns a Locator reads beside `features` and `present`, on the device of the rows; the solver runs here.

    stations         (B, R, 2)  float32  m east, north in the frame
    origin           (B, 3)     float64  lat, lon, alt of the frame
    axes             (B, 2, 2)  float32  columns: principal axes of the solver's ellipse, m
    solver_position  (B, 2)     float32  m
    solver_tokens    (B, R, 5)  float32  residual of time and of strength; log of time sigma; sensitivities
    target           (B, 2)     float32  the truth, if `transmitter` is among the rows
    """
    step = chunk or solver_batch(rows["present"].device)
    inputs = {name: rows[name] for name in (*_MEASURED, "transmitter") if name in rows}
    parts = [
        _prepare({name: part[at : at + step] for name, part in inputs.items()}, config, noise, solver)
        for at in range(0, max(len(rows["present"]), 1), step)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _prepare(
    rows: SampleRows, config: GenerateConfig, noise: NoiseModel | None, solver: SolverConfig | None
) -> SampleRows:
    seen = observe(rows, config, noise)
    found = solve(seen, solver)
    left = residuals(seen, found)
    sigma = seen.arrival_sigma_m
    tokens = [left.time.clamp(-10, 10), left.strength.clamp(-10, 10), (sigma / METRES_PER_US).log()]
    tokens += [seen.timed / sigma * 1e3, 10 * seen.present / left.distance.clamp(min=1e3) * 1e3]
    out = {
        "stations": seen.stations[..., :2].float(),
        "origin": seen.origin,
        "axes": principal_axes(found.covariance).float(),
        "solver_position": found.position.float(),
        "solver_tokens": torch.where(seen.present[..., None], torch.stack(tokens, -1), 0.0).float(),
    }
    if "transmitter" in rows:
        out["target"] = target(rows, seen.origin, config).float()
    return out


def principal_axes(covariance: Tensor) -> Tensor:
    """(..., 2, 2) a root of symmetric positive matrices whose columns are the ellipse's axes, longest first."""
    a, b, d = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
    angle = 0.5 * torch.atan2(2 * b, a - d)
    middle, reach = (a + d) / 2, torch.hypot((a - d) / 2, b)
    long = (middle + reach).sqrt()
    short = ((a * d - b * b).clamp(min=0).sqrt() / long).clamp(min=1e-6)
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.stack([torch.stack([long * cos, -short * sin], -1), torch.stack([long * sin, short * cos], -1)], -2)


def flip(batch: SampleRows, rng: torch.Generator) -> SampleRows:
    """The same batch with axes of random sign: an ellipse has no head, and the network should not see one."""
    shape = (len(batch["axes"]), 1, 2)

    def toss(whole: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 2, whole, generator=rng, device=batch["axes"].device)

    sign = drawn(toss, shape).to(torch.float32) * 2 - 1
    return batch | {"axes": batch["axes"] * sign}


class Locator(nn.Module):
    """Masked set transformer; `forward` takes features, present and what `prepare` adds."""

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, config: LocatorConfig) -> None:
        super().__init__()
        self.config = config
        columns = len(config.features) * len(STATISTICS)
        self.register_buffer("feature_mean", torch.zeros(columns))
        self.register_buffer("feature_std", torch.ones(columns))
        geometry = 2 + 4 + _NUM_SOLVER_TOKENS if config.hybrid else 3
        self.embed = nn.Linear(columns + geometry, config.width)
        self.summary = nn.Parameter(torch.randn(config.width) * 0.02)
        self.overall = nn.Linear(3, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 5)
        nn.init.zeros_(self.head.weight)  # untrained: the solver's answer, or the middle of the stations
        nn.init.zeros_(self.head.bias)

    def set_statistics(self, features: Tensor, present: Tensor) -> None:
        """Take the normalisation from training data; it is saved with the weights.

        features  (B, R, F, 4)  float32
        present   (B, R)        bool
        """
        seen = _columns(features)[present].double()
        self.feature_mean.copy_(seen.mean(0))
        self.feature_std.copy_(seen.std(0, correction=0).clamp(min=1e-6))

    def forward(self, batch: SampleRows) -> Estimate:
        """Positions and covariances of a batch."""
        solver = [batch[name] for name in ("axes", "solver_position", "solver_tokens")] if self.config.hybrid else []
        position, root = self.compute(batch["features"], batch["present"], batch["stations"], *solver)
        return Estimate(position, root @ root.mT, batch["origin"], root)

    def compute(
        self,
        features: Tensor,
        present: Tensor,
        stations: Tensor,
        axes: Tensor | None = None,
        solver_position: Tensor | None = None,
        solver_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Position (B, 2) and root of the covariance (B, 2, 2) from plain tensors: what is exported."""
        with torch.autocast(features.device.type, enabled=False):
            known = torch.nan_to_num((_columns(features.float()) - self.feature_mean) / self.feature_std)
            known = known.clamp(-_MAX_FEATURE, _MAX_FEATURE)
            if axes is not None and solver_position is not None and solver_tokens is not None:
                shape, overall = _relative(stations, axes, solver_position, solver_tokens)
                middle, frame = solver_position, axes
            else:
                middle, frame = torch.zeros_like(stations[:, 0]), _spread(stations, present)
                shape, overall = _plain(features, stations, frame), _sizes(frame)
            tokens = torch.where(present[..., None], torch.cat([known, shape], -1), 0.0)
            tokens, first = self.embed(tokens), (self.summary + self.overall(overall))[:, None]
        hidden = self._mix(torch.cat([first, tokens], 1), present)
        with torch.autocast(features.device.type, enabled=False):
            out = self.head(self.norm(hidden[:, 0].float()))
            position = middle + (frame @ out[:, :2, None])[..., 0]
            return position, frame @ _triangle(out[:, 2:])

    def _mix(self, hidden: Tensor, present: Tensor) -> Tensor:
        seen = functional.pad(present, (1, 0), value=True)[:, None, None]  # the summary is always there
        for block in self.blocks:
            hidden = block(hidden, seen)
        return hidden


def gaussian_nll(position: Tensor, root: Tensor, true: Tensor) -> Tensor:
    """(B,) negative log-likelihood of true positions in metres under N(position, root @ rootᵀ), in float32.

    position, true  (B, 2)     m
    root            (B, 2, 2)  m
    """
    with torch.autocast(position.device.type, enabled=False):
        (a, b), (c, d) = (row.unbind(-1) for row in root.float().unbind(-2))
        east, north = (true.float() - position.float()).unbind(-1)
        det = a * d - b * c
        size = ((d * east - b * north) / det).square() + ((a * north - c * east) / det).square()
        return 0.5 * size + det.abs().log() + _LOG2PI


def loss(model: nn.Module, batch: SampleRows) -> Tensor:
    """Mean negative log-likelihood of a batch, for a trainer."""
    found: Estimate = model(batch)
    return gaussian_nll(found.position_en, found.root, batch["target"]).mean()


def solver_estimate(batch: SampleRows) -> Estimate:
    """What `prepare` found, in the form of a network's answer."""
    axes = batch["axes"]
    return Estimate(batch["solver_position"], axes @ axes.mT, batch["origin"], axes)


class _Block(nn.Module):
    def __init__(self, config: LocatorConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = Dropout(config.dropout)

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """Attention among those seen, then each on its own.

        hidden  (B, 1 + R, W)
        seen    (B, 1, 1, 1 + R)  bool
        """
        items, num, width = hidden.shape
        q, k, v = (
            part.reshape(items, num, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.before(hidden)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        hidden = hidden + self.drop(self.out(mixed.transpose(1, 2).reshape(items, num, width)))
        out: Tensor = hidden + self.drop(self.narrow(functional.gelu(self.wide(self.between(hidden)))))
        return out


def _columns(features: Tensor) -> Tensor:
    """(B, R, F·K) features side by side; sigmas, which span seven decades, as logarithms."""
    sigma = F["arrival_sigma_us"]
    logs = features[..., sigma : sigma + 1, :].clamp(min=0).log1p()
    return torch.cat([features[..., :sigma, :], logs, features[..., sigma + 1 :, :]], -2).flatten(-2)


def _relative(stations: Tensor, axes: Tensor, position: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Stations seen from the solver's position along its ellipse's axes, (B, R, 11); the ellipse's size, (B, 3).

    Sensitivities are how many standard deviations a measurement moves when the position moves by one.
    """
    length = axes.square().sum(-2).sqrt()  # (B, 2)
    turn = axes / length[:, None]
    off = (stations - position[:, None]) @ turn
    unit = off / off.square().sum(-1, keepdim=True).sqrt().clamp(min=1.0)
    by_time = unit * length[:, None] * (tokens[..., 3:4] * 1e-3)
    by_strength = unit * length[:, None] * (tokens[..., 4:5] * 1e-4)
    sides = [off / _LENGTH_M, by_time.clamp(-10, 10), by_strength.clamp(-10, 10), tokens]
    return torch.cat(sides, -1), _sizes(axes)


def _plain(features: Tensor, stations: Tensor, frame: Tensor) -> Tensor:
    """Stations and arrival differences in units of the stations' spread, (B, R, 3)."""
    unit = frame[:, :1, :1]
    arrival = features[..., F["arrival_difference_us"], 0].float() * METRES_PER_US
    return torch.cat([stations / unit, arrival[..., None] / unit], -1)


def _spread(stations: Tensor, present: Tensor) -> Tensor:
    """(B, 2, 2) the identity times the rms distance of the present stations from the origin."""
    here = present.to(stations.dtype)[..., None]
    mean = (stations.square() * here).sum((1, 2)) / here.sum((1, 2)).clamp(min=1)
    return torch.eye(2, device=stations.device) * mean.sqrt().clamp(min=1.0)[:, None, None]


def _sizes(axes: Tensor) -> Tensor:
    """(B, 3) logarithms of an ellipse's half-axes, and of their ratio."""
    long, short = (axes.square().sum(-2).sqrt() * 1e-3).clamp(min=1e-6).log().unbind(-1)
    return torch.stack([long, short, long - short], -1)


def _triangle(raw: Tensor) -> Tensor:
    """(B, 2, 2) lower triangular with positive diagonal from three numbers; 0 is the identity."""
    scale = (_MAX_LOG * torch.tanh(raw[:, :2] / _MAX_LOG)).exp()
    zero = torch.zeros_like(raw[:, 0])
    return torch.stack([torch.stack([scale[:, 0], zero], -1), torch.stack([raw[:, 2], scale[:, 1]], -1)], -2)


class LocatorGraph(nn.Module):
    """A Locator with plain tensors in and out (position, covariance), for export; the solver stays outside."""

    def __init__(self, locator: Locator) -> None:
        super().__init__()
        self.locator = locator

    def forward(
        self,
        features: Tensor,
        present: Tensor,
        stations: Tensor,
        axes: Tensor | None = None,
        solver_position: Tensor | None = None,
        solver_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As Locator.compute, with the covariance itself."""
        position, root = self.locator.compute(features, present, stations, axes, solver_position, solver_tokens)
        return position, root @ root.mT


def graph_inputs(model: Locator, batch: SampleRows) -> dict[str, Tensor]:
    """The tensors LocatorGraph takes, by name and in order, from a prepared batch."""
    names = ["features", "present", "stations"]
    if model.config.hybrid:
        names += ["axes", "solver_position", "solver_tokens"]
    return {name: batch[name] for name in names}
