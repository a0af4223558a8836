"""A trained locator on disk: loading it, and using it to predict, evaluate, locate and export.

Axes: B samples, R receivers. A run is a directory: `run.json` describes the model, the trainer's `train/` holds its
weights.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brim.engine.device import resolve_device, stream
from brim.engine.training import load_weights
from brim.errors import BrimError, CheckpointError, ConfigError, DatasetError, StorageError
from brim.rf.config import GenerateConfig, from_mapping
from brim.rf.datasets.summary import named_columns, open_dataset
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.location.evaluate import baselines, breakdown, geojson, metrics, read_observations
from brim.rf.location.model import Estimate, Locator, LocatorConfig, LocatorGraph, graph_inputs, prepare
from brim.rf.location.solver import NoiseModel, SampleRows, solver_batch, target

log = logging.getLogger("brim")

FORMAT_VERSION = 1
KIND = "rf-locator"
RUN = "run.json"
UNFINISHED = ".run.json.new"  # what a process killed while writing it leaves
MEASURED = ("features", "present", "receivers", "reference")
CONTRACT = ("median_error_m", "mean_error_m", "p95_error_m", "crlb_ratio", "coverage", "baselines")
_EVALUATED = (*MEASURED, "transmitter", "crlb_m", "gdop")
# Which samples there are, not what a measurement means: these may differ between datasets of one run.
_CHOOSING = {
    "seed", "stations", "use_random_receivers", "inside_ratio", "dataset_type", "samples_per_shard", "min_receivers",
    "min_snr_db", "max_gdop",
}  # fmt: skip
_ONNX_TOLERANCE = 1e-3  # of the uncertainty: float32 kernels differ by far less


@dataclass(frozen=True, slots=True)
class LocatorRun:
    """A trained locator with its noise model and the configuration of its training data."""

    path: Path
    module: Locator  # on the host, in eval mode, with the best weights
    noise: NoiseModel
    generation: GenerateConfig  # of the training data; the solver's model of the link
    about: dict[str, Any]  # run.json

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
            parts.append(module({**part, **prepare(part, self.generation, self.noise)}))
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


def load_run(run: Path | str) -> LocatorRun:
    """The locator of a run; raises CheckpointError if it is missing, damaged or of another model."""
    path = Path(run)
    about = read_about(path)
    try:
        noise, model = NoiseModel(**about["noise"]), LocatorConfig(**about["model"])
        generation = from_mapping(about["generation"])
        before = about["untrained_val_loss"]
    except (KeyError, TypeError, ValueError, ConfigError) as failure:
        raise CheckpointError(
            f"{path / RUN} cannot be used ({failure})", code="damaged", hint="restore it from a copy, or train again"
        ) from failure
    check_features(model.features, str(path), CheckpointError)
    module = Locator(model)
    state = load_weights(module, path)
    val_loss = state.get("val_loss")
    if model.hybrid and before is not None and (val_loss is None or val_loss >= before):
        torch.nn.init.zeros_(module.head.weight)  # no epoch was better than the solver: repeat its answer
        torch.nn.init.zeros_(module.head.bias)
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
    for name, (ours, theirs) in differences(read_generation(data.manifest, dataset), loaded.generation).items():
        log.warning("%s: %s is %s, the run was trained with %s; its solver assumes that", dataset, name, ours, theirs)
    if not len(data):
        raise ConfigError(f"{dataset} has no samples", code="empty", hint="give a dataset with at least one")
    rows = data.load(_EVALUATED)
    estimate = _to_host(loaded.predict(rows, where, progress))
    measured = {name: rows[name].to(where) for name in MEASURED}
    compared = {name: _to_host(one) for name, one in baselines(measured, loaded.generation, loaded.noise).items()}
    true = target(rows, estimate.origin, loaded.generation)
    found = {
        **metrics(estimate.position_en, estimate.covariance, true, rows["crlb_m"]),
        "samples": len(true),
        "hybrid": loaded.module.config.hybrid,
        "baselines": {
            name: metrics(one.position_en, one.covariance, true, rows["crlb_m"]) for name, one in compared.items()
        },
        **breakdown(estimate.position_en, estimate.covariance, true, rows),
    }
    return LocatorEvaluation(found, rows, estimate, compared)


def locate(run: Path | str | LocatorRun, observations: Path | str) -> dict[str, Any]:
    """Where the transmitters of a file of observations are: a GeoJSON FeatureCollection of points and ellipses."""
    loaded = run if isinstance(run, LocatorRun) else load_run(run)
    names, rows = read_observations(Path(observations), loaded.generation)
    found = loaded.predict(rows)
    return geojson(found.position_en, found.covariance, found.origin, names)


# Export


def export_onnx(run: Path | str | LocatorRun, file: Path | str) -> dict[str, Any]:
    """Write the network as ONNX, checked against torch at another size; the solver stays outside of it."""
    loaded, file = run if isinstance(run, LocatorRun) else load_run(run), Path(file)
    if file.is_dir():
        raise ConfigError(f"{file} is a directory", field="out", code="occupied", hint="give a file in {out}")
    runtime, module = _import_onnx(), loaded.module.cpu()
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
    per_station = ("features", "present", "stations", "solver_tokens")
    shapes = {name: {0: items} | ({1: stations} if name in per_station else {}) for name in inputs}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's and its libraries' own
        torch.onnx.export(
            LocatorGraph(module), kwargs=inputs, f=file, dynamo=True, dynamic_shapes=shapes, verbose=False,
            output_names=["position", "covariance"], external_data=False,
        )  # fmt: skip
    return inputs


def _import_onnx() -> Any:
    try:
        import onnxruntime  # optional, as what torch exports with
        import onnxscript  # noqa: F401
    except ImportError as failure:
        raise ConfigError(
            f"export to ONNX needs {failure.name}", code="missing_package", hint="pip install 'brim[onnx]'"
        ) from failure
    return onnxruntime


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
    }


@torch.no_grad()
def _compare(runtime: Any, file: Path, module: Locator) -> float:
    """Largest difference of position and covariance from torch's, over the size of the ellipse."""
    inputs = graph_inputs(module, _made_up(module, num_items=7, num_stations=9))
    expected = LocatorGraph(module)(**inputs)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    size = expected[1].diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    position, covariance = (torch.from_numpy(one) - two for one, two in zip(found, expected, strict=True))
    off = max(
        float((position.norm(dim=-1) / size).max()), float((covariance.abs().amax((-2, -1)) / size.square()).max())
    )
    if not off <= _ONNX_TOLERANCE:
        raise ConfigError(
            f"the exported graph differs from torch by {off:.3g} of the uncertainty",
            hint="use other versions of torch and onnxruntime",
        )
    return off


# run.json


def read_about(path: Path) -> dict[str, Any]:
    """The contents of run.json; another model or version is rejected."""
    file = path / RUN
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as failure:
        fault = f"has no {RUN}" if path.is_dir() else "is not a directory"
        raise CheckpointError(
            f"{path} {fault}", code="not_found", hint="give the directory of a run made with {rf train}"
        ) from failure
    except OSError as failure:
        raise StorageError(
            f"{file} cannot be read: {failure.strerror or failure}", hint="check its permissions"
        ) from failure
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(
            f"{file} is not valid JSON ({failure})", code="damaged", hint="restore it from a copy"
        ) from failure
    if not isinstance(about, dict) or about.get("kind") != KIND:
        kind = about.get("kind") if isinstance(about, dict) else None
        raise CheckpointError(f'{path} is a run of another model: kind={kind!r}, expected "{KIND}"', code="wrong_kind")
    if about.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version is {about.get('format_version')!r}, expected {FORMAT_VERSION}",
            code="other_version",
            hint="use the version of brim that made it",
        )
    return about


def write_about(path: Path, about: Mapping[str, Any]) -> None:
    """Write run.json atomically."""
    new = path / UNFINISHED
    try:
        path.mkdir(parents=True, exist_ok=True)
        with new.open("w", encoding="utf-8") as out:
            out.write(json.dumps(about, indent=1, allow_nan=False) + "\n")
            out.flush()
            os.fsync(out.fileno())
        new.replace(path / RUN)
    except OSError as failure:
        raise _write_error(path, failure) from failure


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


def differences(ours: GenerateConfig, theirs: GenerateConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that affect measurements and differ between two configurations."""
    mine, other = ours.as_dict(), theirs.as_dict()
    return {name: (mine[name], other[name]) for name in mine if name not in _CHOOSING and mine[name] != other[name]}


def check_features(names: Sequence[str], source: str, error: type[BrimError]) -> None:
    """Reject features that this version does not have, with the caller's error class."""
    try:
        LocatorConfig().check_features(names, source)
    except ConfigError as failure:
        raise error(failure.message, code="other_version", hint=failure.hint) from failure


def _to_host(estimate: Estimate) -> Estimate:
    return Estimate(*(part.cpu() for part in estimate))
