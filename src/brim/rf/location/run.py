"""A trained locator on disk: loading it, and using it to predict, evaluate, locate and export.

Axes: B samples, R receivers. A run is a directory: `run.json` describes the model, the trainer's `train/` holds its
weights.
"""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from brim.engine.device import resolve_device, stream
from brim.engine.networks import import_onnx
from brim.engine.training import HUB_WEIGHTS, RunFile, copy_in, load_weights
from brim.errors import BrimError, CheckpointError, ConfigError, DatasetError, StorageError
from brim.report.frames import data_frame
from brim.rf.config import GenerateConfig, from_mapping
from brim.rf.datasets.summary import named_columns, open_dataset
from brim.rf.features import FEATURES, STATISTICS, F
from brim.rf.location.evaluate import (
    baselines,
    evaluate,
    geojson,
    parse_observations,
    read_document,
    station_names,
)
from brim.rf.location.fingerprints import FINGERPRINT_FILE, Fingerprints
from brim.rf.location.model import Estimate, Locator, LocatorConfig, LocatorGraph, graph_inputs, prepare
from brim.rf.location.solver import NoiseModel, SampleRows, geographic, solver_batch
from brim.rf.physics.geometry import to_local

log = logging.getLogger("brim")

RUN = RunFile("run.json", "rf-locator", "rf train")
MEASURED = ("features", "present", "receivers", "reference")
CONTRACT = (
    "median_error_m",
    "mean_error_m",
    "p95_error_m",
    "crlb_ratio",
    "coverage",
    "baselines",
    "best_baseline",
    "verdict",
    "differences",
)
_EVALUATED = (*MEASURED, "transmitter", "crlb_m", "gdop")
# Which samples there are, not what a measurement means: these may differ between datasets of one run.
_CHOOSING = {
    "seed",
    "bound",
    "environment_seed",
    "stations", "use_random_receivers", "inside_ratio", "dataset_type", "samples_per_shard", "min_receivers",
    "min_snr_db", "max_gdop",
}  # fmt: skip
_LEVEL = {"tx_power_dbm", "tx_gain_dbi", "rx_gain_dbi", "noise_figure_db"}  # of strengths, where power is unknown
_ONNX_TOLERANCE = 1e-3  # of the uncertainty: float32 kernels differ by far less


@dataclass(frozen=True, slots=True)
class LocatorRun:
    """A trained locator with its noise model and the configuration of its training data."""

    path: Path
    module: Locator  # on the host, in eval mode, with the best weights
    noise: NoiseModel
    generation: GenerateConfig  # of the training data; the solver's model of the link
    about: dict[str, Any]  # run.json

    @property
    def power_known(self) -> bool:
        """Whether the transmitter's power is that of the training data, rather than unknown."""
        return self.module.config.power_known

    def fingerprints(self) -> Fingerprints | None:
        """Strengths and places of the training data, where the network of stations was fixed."""
        file = self.path / FINGERPRINT_FILE
        if not file.is_file():
            return None
        try:
            tensors = load_file(file)
            known = tensors["strength_db"], tensors["place"], tensors["width_db"]
            return Fingerprints(*known, power_known=self.power_known, config=self.generation)
        except (OSError, ValueError, KeyError, SafetensorError) as failure:
            raise CheckpointError(
                f"{file} cannot be read ({failure})", code="damaged", hint="restore it from a copy, or train again"
            ) from failure

    @torch.no_grad()
    def predict(
        self, rows: SampleRows, device: torch.device | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Estimate:
        """Positions and covariances of a dataset's rows; the result is on the device, by default that of the rows.

        rows  features (B, R, F, 4), present (B, R), receivers (B, R, 3), reference (B,)
        """
        device = device or rows["present"].device
        module, total, step = self.module.to(device), len(rows["present"]), solver_batch(device)
        parts = []
        for start in range(0, total, step):
            part = {name: rows[name][start : start + step].to(device) for name in MEASURED}
            parts.append(module({**part, **prepare(part, self.generation, self.noise, power_known=self.power_known)}))
            if progress is not None:
                progress(min(start + step, total), total)
        return Estimate(*map(torch.cat, zip(*parts, strict=True)))


class LocatorEvaluation(NamedTuple):
    """Metrics of a run on a dataset, and the estimates behind them, on the host."""

    metrics: dict[str, Any]  # with the breakdowns
    rows: SampleRows
    estimate: Estimate
    baselines: dict[str, Estimate]

    def as_dict(self) -> dict[str, Any]:
        return {name: self.metrics[name] for name in CONTRACT}

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each sample: where it was, where it was placed, and the error."""
        origin, place = self.estimate.origin, self.rows["transmitter"].double()
        estimated = geographic(self.estimate.position_en, origin)
        true = to_local(torch.cat([place[:, :2], estimated[:, 2:]], -1), origin)[:, :2]
        error_m = (self.estimate.position_en.double() - true).norm(dim=-1)
        columns = {
            "lat": self.rows["transmitter"][:, 0],
            "lon": self.rows["transmitter"][:, 1],
            "estimated_lat": estimated[:, 0],
            "estimated_lon": estimated[:, 1],
            "error_m": error_m,
            "crlb_m": self.rows["crlb_m"],
        }
        return data_frame({name: values.numpy() for name, values in columns.items()})


def load_run(run: Path | str) -> LocatorRun:
    """The locator of a run; raises CheckpointError if it is missing, damaged or of another model."""
    path = Path(run)
    about = RUN.read(path)
    try:
        noise, model = NoiseModel(**about["noise"]), LocatorConfig(**about["model"])
        generation = from_mapping(about["generation"])
        before, stretch = about["untrained_val_loss"], float(about.get("stretch", 1.0))
        if not 0 < stretch < math.inf:
            raise ValueError(f"stretch={stretch} must be above 0")
    except (KeyError, TypeError, ValueError, ConfigError) as failure:
        raise CheckpointError(
            f"{path / RUN.name} cannot be used ({failure})",
            code="damaged",
            hint="restore it from a copy, or train again",
        ) from failure
    _check_known(model.features, str(path))
    module = Locator(model)
    module.stretch = stretch
    if not (path / "train").is_dir() and (path / HUB_WEIGHTS).is_file():  # a folder that was shared
        copy_in(load_file(path / HUB_WEIGHTS), module.state_dict(), path)
        return LocatorRun(path, module.eval(), noise, generation, about)
    state = load_weights(module, path)
    val_loss = state.get("val_loss")
    if model.hybrid and before is not None and (val_loss is None or val_loss >= before):
        module.repeat_solver()  # no epoch was better
    return LocatorRun(path, module.eval(), noise, generation, about)


def evaluate_run(
    run: Path | str | LocatorRun,
    dataset: Path | str,
    *,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> LocatorEvaluation:
    """Errors, bound and coverage of a run on a held-out dataset, and those of the classical baselines."""
    loaded, where = run if isinstance(run, LocatorRun) else load_run(run), resolve_device(device)
    data = open_dataset(dataset)
    check_features([name for name, _ in named_columns(data.manifest, "features")], str(dataset), DatasetError)
    theirs_config = read_generation(data.manifest, dataset)
    other = differences(theirs_config, loaded.generation, loaded.power_known)
    if loaded.module.config.stations and theirs_config.place_seed != loaded.generation.place_seed:
        other["environment_seed"] = theirs_config.place_seed, loaded.generation.place_seed
    for name, (ours, theirs) in other.items():
        log.warning("%s: %s is %s, the run was trained with %s; its solver assumes that", dataset, name, ours, theirs)
    if not len(data):
        raise ConfigError(f"{dataset} has no samples", code="empty", hint="give a dataset with at least one")
    rows = data.load(_EVALUATED)
    estimate = _to_host(loaded.predict(rows, where, progress))
    measured = {name: rows[name].to(where) for name in MEASURED}
    classical = baselines(
        measured, loaded.generation, loaded.noise, power_known=loaded.power_known, fingerprints=loaded.fingerprints()
    )
    compared = {name: _to_host(one) for name, one in classical.items()}
    metrics = evaluate(estimate, rows, loaded.generation, compared) | {
        "hybrid": loaded.module.config.hybrid,
        "power": "known" if loaded.power_known else "unknown",
    }
    metrics["differences"] = {name: {"data": ours, "run": theirs} for name, (ours, theirs) in other.items()}
    return LocatorEvaluation(metrics, rows, estimate, compared)


def locate(run: Path | str | LocatorRun, observations: Path | str) -> dict[str, Any]:
    """Where the transmitters of a file of observations are: a GeoJSON FeatureCollection of points and ellipses."""
    loaded = run if isinstance(run, LocatorRun) else load_run(run)
    value = read_document(Path(observations))
    names, rows = parse_observations(value, loaded.generation, f"observations {observations}")
    return geojson(loaded.predict(rows), names, station_names(value))


# Export


def export_onnx(run: Path | str | LocatorRun, file: Path | str) -> dict[str, Any]:
    """Write the network as ONNX, checked against torch at another size; the solver stays outside of it."""
    loaded, file = run if isinstance(run, LocatorRun) else load_run(run), Path(file)
    if file.is_dir():
        raise ConfigError(f"{file} is a directory", field="out", code="occupied", hint="give a file in {out}")
    runtime, module = import_onnx(), loaded.module.cpu()
    new = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        inputs = _write_graph(module, new)
        off = _compare(runtime, new, module)
        new.replace(file)
    except torch.onnx.OnnxExporterError as failure:
        raise ConfigError(
            f"torch {torch.__version__} cannot export the network ({failure})", hint="use another version of torch"
        ) from failure
    except OSError as failure:
        raise _write_error(file, failure) from failure
    finally:
        new.unlink(missing_ok=True)
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "inputs": list(inputs),
        "outputs": ["position", "covariance"],
        "max_difference": off,
    }


def _write_graph(module: Locator, file: Path) -> dict[str, Tensor]:
    """Trace the network for any number of items and stations."""
    inputs = graph_inputs(module, _made_up(module, num_items=3, num_stations=5))
    items, stations = torch.export.Dim("items"), torch.export.Dim("stations")
    per_station = ("features", "present", "stations", "solver_tokens", "station")
    shapes = {name: {0: items} | ({1: stations} if name in per_station else {}) for name in inputs}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's and its libraries' own
        torch.onnx.export(
            LocatorGraph(module), kwargs=inputs, f=file, dynamo=True, dynamic_shapes=shapes, verbose=False,
            output_names=["position", "covariance"], external_data=False,
        )  # fmt: skip
    return inputs


def _made_up(module: Locator, *, num_items: int, num_stations: int) -> SampleRows:
    """Inputs as large as real ones, the last station of the first item absent."""
    rng = stream(0, "onnx", num_items, device=torch.device("cpu"))

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_items, *shape, generator=rng)

    columns = normal(num_stations, len(module.feature_mean)) * module.feature_std + module.feature_mean
    present = torch.ones(num_items, num_stations, dtype=torch.bool)
    present[0, -1] = False
    return {
        "features": columns.reshape(num_items, num_stations, len(FEATURES), len(STATISTICS)),
        "present": present,
        "stations": 5e4 * normal(num_stations, 2),
        "axes": torch.tensor([[300.0, -40.0], [200.0, 60.0]]) * (1 + 0.1 * normal(1, 1)),
        "solver_position": 2e4 * normal(2),
        "solver_tokens": normal(num_stations, 5),
        "home": torch.tensor([1e3, -2e3, 6e4]).expand(num_items, -1).contiguous(),
        "station": present * (torch.arange(num_stations) % max(module.config.stations, 1) + 1),
    }


@torch.no_grad()
def _compare(runtime: Any, file: Path, module: Locator) -> float:
    """Largest difference of position and covariance from torch's, over the size of the ellipse."""
    inputs = graph_inputs(module, _made_up(module, num_items=7, num_stations=9))
    expected = LocatorGraph(module)(**inputs)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    size = expected[1].diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    position, covariance = (torch.from_numpy(one) - two for one, two in zip(outputs, expected, strict=True))
    off = max(
        float((position.norm(dim=-1) / size).max()), float((covariance.abs().amax((-2, -1)) / size.square()).max())
    )
    if not off <= _ONNX_TOLERANCE:
        raise ConfigError(
            f"the exported graph differs from torch by {off:.3g} of the uncertainty",
            hint="use other versions of torch and onnxruntime",
        )
    return off


def _write_error(path: Path, failure: OSError) -> StorageError:
    return StorageError(f"{path}: cannot write, {failure.strerror or failure}", hint="choose another {out}")


def read_generation(manifest: Mapping[str, Any], path: Path | str) -> GenerateConfig:
    """The configuration a dataset was made with."""
    try:
        return from_mapping(manifest["config"])
    except (KeyError, TypeError, ValueError, ConfigError) as failure:
        raise DatasetError(
            f"{path}: the manifest's config cannot be read ({failure})",
            code="other_version",
            hint="use the version of brim that made it",
        ) from failure


def differences(ours: GenerateConfig, theirs: GenerateConfig, power_known: bool = True) -> dict[str, tuple[Any, Any]]:
    """Settings that affect measurements and differ between two configurations."""
    mine, other = ours.as_dict(), theirs.as_dict()
    free = _CHOOSING if power_known else _CHOOSING | _LEVEL
    return {name: (mine[name], other[name]) for name in mine if name not in free and mine[name] != other[name]}


def _check_known(names: Sequence[str], source: str) -> None:
    unknown = [name for name in names if name not in F]
    if unknown or not names:
        raise CheckpointError(
            f"{source}: features differ from the model's ({', '.join(unknown) or 'there are none'})",
            code="other_version",
            hint="use data made with the same version of brim",
        )


def check_features(names: Sequence[str], source: str, error: type[BrimError]) -> None:
    """Reject features that are not those of this version, with the caller's error class."""
    known = [name for name, _ in FEATURES]
    if list(names) != known:
        odd = sorted(set(names) ^ set(known)) or ["their order"]
        raise error(
            f"{source}: features differ from the model's ({', '.join(odd)})",
            code="other_version",
            hint="use data made with the same version of brim",
        )


def _to_host(estimate: Estimate) -> Estimate:
    return Estimate(*(part.cpu() for part in estimate))
