"""A network over the set of receivers that says where the transmitter is and how sure it is.

Axes: B samples, R receivers (any number), F features, K statistics, W width. Attention is masked by `present`: padding
never matters, nor does the order of receivers.

The hybrid starts from the Gauss-Newton answer. `prepare` computes that once per dataset, as columns beside the others;
the network sees each receiver's whitened residuals and answers in units of the solver's own uncertainty, along the
principal axes of its ellipse: a correction near 0 and a covariance near 1. Components in the frame of the stations can
overrule it. The pure network sees features and stations alone and answers in units of the stations' spread.

The posterior is a mixture of G Gaussians, trained by likelihood: places may be far apart, and their tails long. The
position said is where the expected error is about least. Where the network of stations is fixed, each station's
measurements also enter at a place of their own, so that what is peculiar to it can be learnt.

Positions, arrival differences and covariances stay float32 under autocast; only the layers between follow it.
"""

import math
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
    Observations,
    SampleRows,
    observe,
    residuals,
    solve,
    solver_batch,
    target,
)
from brim.rf.physics.geometry import to_local

_MEASURED = ("features", "present", "receivers", "reference")
_POINT_STEPS = 8
_AT_STATION_DEG = 1e-3  # a receiver this near to a station of the network is that station
_MAP_WIDTH = 256  # of the layers that see all stations of a fixed network at once
_NEVER_LOGIT = 60.0
_FAR_LOGIT = -4.0  # of components in the stations' frame, before training
_LENGTH_M = 100_000.0  # positions enter the network in units of this
_MAX_FEATURE = 5.0  # standard deviations; beyond them only the side matters
_MAX_LOG = 3.0  # the network may stretch an ellipse by e³ either way
_NUM_SOLVER_TOKENS = 5
LEVELS = ("rssi_dbm", "noise_floor_dbm", "psd_dbm_per_hz")  # features that shift with a receiver's calibration
_LOG2PI = 1.8378770664093453


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatorConfig:
    """The network's shape; saved with every checkpoint."""

    hybrid: bool = True  # start from the solver's answer
    power_known: bool = True  # else strengths count relative to the sample's mean, here and in the solver
    width: Annotated[int, Range(1)] = 64
    heads: Annotated[int, Range(1)] = 4
    layers: Annotated[int, Range(1)] = 3
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    features: Annotated[tuple[str, ...], Length(1)] = tuple(name for name, _ in FEATURES)
    components: Annotated[int, Range(1)] = 1  # Gaussians of the posterior
    stations: Annotated[int, Range(0)] = 0  # of a fixed network, in its order; 0: any receivers

    def __post_init__(self) -> None:
        check(self)
        if self.width % self.heads:
            raise ConfigError(
                f"must be a multiple of heads={self.heads}", field="width", value=self.width, code="conflict"
            )

    def as_dict(self) -> dict[str, Any]:
        """JSON-able values; LocatorConfig(**values) reads them back."""
        return asdict(self) | {"features": list(self.features)}


class Estimate(NamedTuple):
    """A position and how sure, as a mixture of G Gaussians; all float32 but the origin."""

    position_en: Tensor  # (B, 2) m east and north of the origin
    covariance: Tensor  # (B, 2, 2) m², mean square deviation from the position
    origin: Tensor  # (B, 3) lat, lon, alt of the frame, float64
    root: Tensor  # (B, 2, 2) m; covariance = root @ rootᵀ, better conditioned
    weights: Tensor  # (B, G) of the components, summing to 1
    means: Tensor  # (B, G, 2) m
    roots: Tensor  # (B, G, 2, 2) m, of their covariances

    def widened(self, factor: float) -> "Estimate":
        """The same about the position with this factor on all variances."""
        times = math.sqrt(factor)
        place = self.position_en[:, None]
        return self._replace(
            covariance=self.covariance * factor,
            root=self.root * times,
            means=place + (self.means - place) * times,
            roots=self.roots * times,
        )

    @classmethod
    def single(cls, position: Tensor, root: Tensor, origin: Tensor) -> "Estimate":
        """One Gaussian."""
        ones = torch.ones_like(position[:, :1])
        return cls(position, root @ root.mT, origin, root, ones, position[:, None], root[:, None])

    @classmethod
    def mixed(cls, logits: Tensor, means: Tensor, roots: Tensor, origin: Tensor) -> "Estimate":
        """The mixture of Gaussians whose weights have these logits."""
        with torch.autocast(logits.device.type, enabled=False):
            weights = logits.softmax(-1)
            position = _point(weights, means, roots)
            off = means - position[:, None]
            each = roots @ roots.mT + off[..., :, None] * off[..., None, :]
            covariance = (weights[..., None, None] * each).sum(1)
            return cls(position, covariance, origin, _cholesky(covariance), weights, means, roots)


def _point(weights: Tensor, means: Tensor, roots: Tensor) -> Tensor:
    """(B, 2) about the place of the least expected distance, by Weiszfeld's iteration."""
    size = roots.square().sum((-2, -1)) / 2  # (B, G) m²
    place = (weights[..., None] * means).sum(1)
    for _ in range(_POINT_STEPS):
        pull = weights / ((means - place[:, None]).square().sum(-1) + size).sqrt().clamp(min=1e-3)
        place = (pull[..., None] * means).sum(1) / pull.sum(1, keepdim=True)
    return place


def _cholesky(covariance: Tensor) -> Tensor:
    """(..., 2, 2) lower roots, in plain operations so that they can be exported."""
    a, b, d = covariance[..., 0, 0], covariance[..., 1, 0], covariance[..., 1, 1]
    first = a.clamp(min=1e-12).sqrt()
    low = b / first
    last = (d - low.square()).clamp(min=1e-12).sqrt()
    return torch.stack([torch.stack([first, torch.zeros_like(a)], -1), torch.stack([low, last], -1)], -2)


def prepare(
    rows: SampleRows,
    config: GenerateConfig,
    noise: NoiseModel | None = None,
    *,
    power_known: bool = True,
    chunk: int | None = None,
) -> SampleRows:
    """The columns a Locator reads beside `features` and `present`, on the device of the rows; the solver runs here.

    stations         (B, R, 2)  float32  m east, north in the frame
    origin           (B, 3)     float64  lat, lon, alt of the frame
    axes             (B, 2, 2)  float32  columns: principal axes of the solver's ellipse, m
    solver_position  (B, 2)     float32  m
    solver_tokens    (B, R, 5)  float32  residual of time and of strength; log of time sigma; sensitivities
    home             (B, 3)     float32  middle of the stations in the frame, and their spread, m
    station          (B, R)     int64    number of the station in a fixed network from 1 on, or 0
    target           (B, 2)     float32  the truth, if `transmitter` is among the rows
    """
    step = chunk or solver_batch(rows["present"].device)
    inputs = {name: rows[name] for name in (*_MEASURED, "transmitter") if name in rows}
    parts = [
        _prepare({name: part[at : at + step] for name, part in inputs.items()}, config, noise, power_known)
        for at in range(0, max(len(rows["present"]), 1), step)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _prepare(rows: SampleRows, config: GenerateConfig, noise: NoiseModel | None, power_known: bool) -> SampleRows:
    seen = observe(rows, config, noise, power_known=power_known)
    solution = solve(seen)
    time, strength, distance = residuals(seen, solution)
    sigma = seen.arrival_sigma_m
    tokens = [time.clamp(-10, 10), strength.clamp(-10, 10), (sigma / METRES_PER_US).log()]
    tokens += [seen.timed / sigma * 1e3, 10 * seen.present / distance.clamp(min=1e3) * 1e3]
    out = {
        "stations": seen.stations[..., :2].float(),
        "origin": seen.origin,
        "axes": principal_axes(solution.covariance).float(),
        "solver_position": solution.position.float(),
        "solver_tokens": torch.where(seen.present[..., None], torch.stack(tokens, -1), 0.0).float(),
        "home": _home(seen, config),
        "station": station_numbers(rows, config),
    }
    if "transmitter" in rows:
        out["target"] = target(rows, seen.origin, config).float()
    return out


def _home(seen: Observations, config: GenerateConfig) -> Tensor:
    """(B, 3) middle and rms distance of the stations of a fixed network, or of those present."""
    if config.use_random_receivers:
        here = seen.present.double()[..., None]
        mean = (seen.stations[..., :2].square() * here).sum((1, 2)) / here.sum((1, 2)).clamp(min=1)
        return torch.cat([torch.zeros_like(seen.origin[:, :2]), mean.sqrt().clamp(min=1.0)[:, None]], -1).float()
    place = seen.origin.new_tensor([[station.lat, station.lon, station.alt] for station in config.stations])
    flat = to_local(place.expand(len(seen.origin), -1, -1), seen.origin[:, None])[..., :2]  # (B, S, 2)
    middle = flat.mean(1)
    spread = (flat - middle[:, None]).square().sum(-1).mean(-1).sqrt().clamp(min=1.0)
    return torch.cat([middle, spread[:, None]], -1).float()


def station_numbers(rows: SampleRows, config: GenerateConfig) -> Tensor:
    """(B, R) which station of the configuration a receiver is, from 1 on; 0: none of them, or not present."""
    present, place = rows["present"], rows["receivers"].double()[..., :2]
    if config.use_random_receivers:
        return torch.zeros_like(present, dtype=torch.int64)
    known = place.new_tensor([[station.lat, station.lon] for station in config.stations])
    off, number = (place[..., None, :] - known).abs().amax(-1).min(-1)
    return torch.where(present & (off < _AT_STATION_DEG), number + 1, 0)


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


def turned(batch: SampleRows, rng: torch.Generator) -> SampleRows:
    """The same batch, each sample seen from another side: turned about its origin and perhaps mirrored."""
    device, count = batch["stations"].device, len(batch["stations"])

    def toss(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=rng, device=device)

    draws = drawn(toss, (count, 2))
    angle, side = draws[:, 0] * (2 * math.pi), torch.where(draws[:, 1] < 0.5, -1.0, 1.0)
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([torch.stack([cos, -sin * side], -1), torch.stack([sin, cos * side], -1)], -2)
    out = dict(batch)
    for name in ("stations", "solver_position", "target"):
        if name in batch:
            value = batch[name] if batch[name].ndim == 3 else batch[name][:, None]
            out[name] = (value @ turn.mT).view_as(batch[name])
    out["home"] = torch.cat([(batch["home"][:, None, :2] @ turn.mT)[:, 0], batch["home"][:, 2:]], -1)
    return flip(out | {"axes": turn @ batch["axes"]}, rng) if "axes" in batch else out


def _levels() -> Tensor:
    """(F, 4) float32: 1 where a statistic shifts with the level; a standard deviation does not."""
    shifts = torch.zeros(len(FEATURES), len(STATISTICS))
    for name in LEVELS:
        shifts[F[name]] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    return shifts


class Locator(nn.Module):
    """Masked set transformer; `forward` takes features, present and what `prepare` adds."""

    feature_mean: Tensor
    feature_std: Tensor
    is_level: Tensor
    chosen: Tensor

    def __init__(self, config: LocatorConfig) -> None:
        super().__init__()
        self.config = config
        columns = len(config.features) * len(STATISTICS)
        self.register_buffer("feature_mean", torch.zeros(columns))
        self.register_buffer("feature_std", torch.ones(columns))
        self.register_buffer("is_level", _levels(), persistent=False)
        self.register_buffer("chosen", torch.tensor([F[name] for name in config.features]), persistent=False)
        geometry = 2 + 4 + _NUM_SOLVER_TOKENS if config.hybrid else 3
        self.embed = nn.Linear(columns + geometry, config.width)
        self.summary = nn.Parameter(torch.randn(config.width) * 0.02)
        self.overall = nn.Linear(3, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        num, at_solver = config.components, config.components // 3 if config.hybrid else 0
        self.head = nn.Linear(config.width, 5 if num == 1 else 6 * num)
        nn.init.zeros_(self.head.weight)  # untrained: the solver's answer, or the middle of the stations
        nn.init.zeros_(self.head.bias)
        if num > 1:  # components by turns about the solver's position and over the area of the stations
            raw = torch.zeros(num, 6)
            raw[at_solver:, 0] = _FAR_LOGIT if config.hybrid else 0.0
            raw[at_solver:, 1:3] = 0.7 * torch.randn(num - at_solver, 2)
            raw[1:at_solver, 3:5] = torch.linspace(0.0, 1.5, max(at_solver - 1, 0))[:, None]  # ever wider
            raw[1:at_solver, 0] = -2.0
            self.head.bias.data.copy_(raw.flatten())
            nn.init.normal_(self.head.weight, std=1e-3)
        self.at_solver = at_solver
        self.stretch = 1.0  # of the components' standard deviations, fitted to held-out samples after training
        if config.stations:
            self.map = nn.Sequential(
                nn.Linear(config.stations * (columns + geometry + 1), _MAP_WIDTH), nn.GELU(),
                nn.Linear(_MAP_WIDTH, _MAP_WIDTH), nn.GELU(), nn.Linear(_MAP_WIDTH, config.width),
            )  # fmt: skip

    def repeat_solver(self) -> None:
        """Change the weights so that a hybrid answers as the solver does."""
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if self.config.components > 1:
            self.head.bias.data[6::6] = -_NEVER_LOGIT
            self.head.bias.data[0] = _NEVER_LOGIT

    def set_statistics(self, features: Tensor, present: Tensor) -> None:
        """Take the normalisation from training data; it is saved with the weights.

        features  (B, R, F, 4)  float32
        present   (B, R)        bool
        """
        seen = self._columns(self._levelled(features, present))[present].double()
        self.feature_mean.copy_(seen.mean(0))
        self.feature_std.copy_(seen.std(0, correction=0).clamp(min=1e-6))

    def _columns(self, features: Tensor) -> Tensor:
        """(B, R, F·K) the chosen features side by side; sigmas, which span seven decades, as logarithms."""
        sigma = F["arrival_sigma_us"]
        logs = features[..., sigma : sigma + 1, :].clamp(min=0).log1p()
        whole = torch.cat([features[..., :sigma, :], logs, features[..., sigma + 1 :, :]], -2)
        return whole.index_select(-2, self.chosen).flatten(-2)

    def _levelled(self, features: Tensor, present: Tensor) -> Tensor:
        """Features whose powers are relative to the sample's mean strength, where the transmitter's is not known."""
        if self.config.power_known:
            return features
        strength = torch.where(present, torch.nan_to_num(features[..., F["rssi_dbm"], 0]), 0.0)
        level = strength.sum(-1) / present.sum(-1).clamp(min=1)
        return features - level[:, None, None, None] * self.is_level

    def forward(self, batch: SampleRows) -> Estimate:
        names = graph_names(self.config)
        logits, means, roots = self.components(**{name: batch[name] for name in names})
        if self.config.components == 1:
            return Estimate.single(means[:, 0], roots[:, 0], batch["origin"])
        return Estimate.mixed(logits, means, roots, batch["origin"])

    def components(
        self,
        features: Tensor,
        present: Tensor,
        stations: Tensor,
        axes: Tensor | None = None,
        solver_position: Tensor | None = None,
        solver_tokens: Tensor | None = None,
        home: Tensor | None = None,
        station: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, G), means (B, G, 2) and roots (B, G, 2, 2) of the mixture, from plain tensors."""
        with torch.autocast(features.device.type, enabled=False):
            levelled = self._levelled(features.float(), present)
            known = torch.nan_to_num((self._columns(levelled) - self.feature_mean) / self.feature_std)
            known = known.clamp(-_MAX_FEATURE, _MAX_FEATURE)
            if home is None:
                middle, area = torch.zeros_like(stations[:, 0]), _spread(stations, present)
            else:
                middle = home[:, :2]
                area = torch.eye(2, device=home.device, dtype=home.dtype) * home[:, 2, None, None]
            if axes is not None and solver_position is not None and solver_tokens is not None:
                shape, overall = _relative(stations, axes, solver_position, solver_tokens)
            else:
                timed = "arrival_difference_us" in self.config.features
                shape, overall = _plain(features * timed, stations - middle[:, None], area), _sizes(area)
            tokens = torch.where(present[..., None], torch.cat([known, shape], -1), 0.0)
            first = self.summary + self.overall(overall)
            if self.config.stations and station is not None:
                first = first + self.map(self._by_station(tokens, station))
            hidden = torch.cat([first[:, None], self.embed(tokens)], 1)
        seen = functional.pad(present, (1, 0), value=True)[:, None, None]  # the summary is always there
        for block in self.blocks:
            hidden = block(hidden, seen)
        with torch.autocast(features.device.type, enabled=False):
            out = self.head(self.norm(hidden[:, 0].float()))
            if self.config.components == 1:
                if axes is not None and solver_position is not None:
                    middle, area = solver_position, axes
                position = middle + (area @ out[:, :2, None])[..., 0]
                root = self.stretch * (area @ _triangle(out[:, 2:]))
                return torch.zeros_like(out[:, :1]), position[:, None], root[:, None]
            raw = out.unflatten(-1, (self.config.components, 6))
            middles = middle[:, None].expand(-1, raw.shape[1] - self.at_solver, -1)
            frames = area[:, None].expand(-1, raw.shape[1] - self.at_solver, -1, -1)
            if axes is not None and solver_position is not None:
                middles = torch.cat([solver_position[:, None].expand(-1, self.at_solver, -1), middles], 1)
                frames = torch.cat([axes[:, None].expand(-1, self.at_solver, -1, -1), frames], 1)
            means = middles + (frames @ raw[..., 1:3, None])[..., 0]
            return raw[..., 0], means, self.stretch * (frames @ _triangle(raw[..., 3:]))

    def _by_station(self, tokens: Tensor, station: Tensor) -> Tensor:
        """(B, S·(T + 1)) what each station of the network says, at its own place; 0 where it says nothing."""
        heard = torch.cat([tokens, torch.ones_like(tokens[..., :1])], -1)
        slots = heard.new_zeros(len(heard), self.config.stations + 1, heard.shape[-1])
        slots = slots.scatter_add(1, station[..., None].expand_as(heard), heard)
        return slots[:, 1:].flatten(1)


def gaussian_nll(position: Tensor, root: Tensor, true: Tensor) -> Tensor:
    """(...,) negative log-likelihood of true positions in metres under N(position, root @ rootᵀ), in float32.

    position, true  (..., 2)     m
    root            (..., 2, 2)  m
    """
    with torch.autocast(position.device.type, enabled=False):
        (a, b), (c, d) = (row.unbind(-1) for row in root.float().unbind(-2))
        east, north = (true.float() - position.float()).unbind(-1)
        det = a * d - b * c
        size = ((d * east - b * north) / det).square() + ((a * north - c * east) / det).square()
        return 0.5 * size + det.abs().log() + _LOG2PI


def mixture_nll(estimate: Estimate, true: Tensor) -> Tensor:
    """(B,) negative log-likelihood of true positions in metres under the mixture, in float32."""
    each = gaussian_nll(estimate.means, estimate.roots, true[:, None])
    return -torch.logsumexp(estimate.weights.clamp(min=1e-12).log() - each, -1)


def loss(model: nn.Module, batch: SampleRows) -> Tensor:
    """Mean negative log-likelihood of a batch, for a trainer; samples may have a `weight`, 1 on average."""
    each = mixture_nll(model(batch), batch["target"])
    return (each * batch["weight"]).mean() if "weight" in batch else each.mean()


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
    """(..., 2, 2) lower triangular with positive diagonal from three numbers; 0 is the identity."""
    scale = (_MAX_LOG * torch.tanh(raw[..., :2] / _MAX_LOG)).exp()
    zero = torch.zeros_like(raw[..., 0])
    return torch.stack([torch.stack([scale[..., 0], zero], -1), torch.stack([raw[..., 2], scale[..., 1]], -1)], -2)


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
        home: Tensor | None = None,
        station: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits, means, roots = self.locator.components(
            features, present, stations, axes, solver_position, solver_tokens, home, station
        )
        if self.locator.config.components == 1:
            return means[:, 0], roots[:, 0] @ roots[:, 0].mT
        estimate = Estimate.mixed(logits, means, roots, stations)
        return estimate.position_en, estimate.covariance


def graph_names(config: LocatorConfig) -> list[str]:
    """The tensors that a network of this configuration reads."""
    names = ["features", "present", "stations"]
    names += ["axes", "solver_position", "solver_tokens"] if config.hybrid else []
    return names + (["home"] if config.components > 1 else []) + (["station"] if config.stations else [])


def graph_inputs(model: Locator, batch: SampleRows) -> dict[str, Tensor]:
    """The tensors LocatorGraph takes, by name and in order, from a prepared batch."""
    return {name: batch[name] for name in graph_names(model.config)}
