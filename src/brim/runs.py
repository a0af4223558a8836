"""brim.load_run: a trained run of any kind as one object with `predict`, `metrics` and `config`."""

import io
import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError, CheckpointError, ConfigError, with_article
from brim.report.frames import data_frame
from brim.report.summary import Summarised

if TYPE_CHECKING:
    from torch import nn

METRICS, REPORT = "metrics.jsonl", "report.json"


class LoadedRun(Summarised):
    """A run that was trained: its settings, its metrics, and its best weights, loaded when they are first needed."""

    def __init__(self, path: Path, about: Mapping[str, Any], device: str) -> None:
        self.path, self.about, self.device = path, dict(about), device

    @property
    def kind(self) -> str:
        """What was trained: rf-locator, segment-train, sequence-train or module."""
        return str(self.about["kind"])

    @property
    def config(self) -> dict[str, Any]:
        """The settings it was trained with."""
        return dict(self.about["training"])

    @property
    def metrics(self) -> dict[str, Any]:
        """The last value of everything that was logged, the best val_loss, and scores on data held out, if any."""
        values: dict[str, Any] = {}
        for line in self.history:
            values |= {name: value for name, value in line.items() if name != "phase"}
        losses = [line["val_loss"] for line in self.history if isinstance(line.get("val_loss"), int | float)]
        if losses:
            values["best_val_loss"] = min(losses)
        report = self._report()
        if isinstance(scores := report.get("scores"), dict):
            values |= {name: value for name, value in scores.items() if value is not None}
        return values

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every line that was logged, in order, with the name of its phase."""
        files = sorted(self.path.glob(f"*/{METRICS}"), key=lambda file: file.stat().st_mtime)
        return [
            {"phase": file.parent.name, **json.loads(line)}
            for file in files
            for line in file.read_text(encoding="utf-8").splitlines()
            if line.endswith("}")  # a line that is being written ends later
        ]

    def to_pandas(self) -> Any:
        """The history as a DataFrame."""
        lines = self.history
        names = list(dict.fromkeys(name for line in lines for name in line))
        return data_frame({name: [line.get(name) for line in lines] for name in names})

    @abstractmethod
    def predict(self, inputs: Any, **options: Any) -> Any:
        """What the run predicts for inputs of its kind."""

    def _report(self) -> dict[str, Any]:
        file = self.path / REPORT
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def _summary(self) -> tuple[str, Mapping[str, Any]]:
        shown = {name: f"{value:.4g}" for name, value in self.metrics.items() if isinstance(value, int | float)}
        return f"LoadedRun {self.path}: {self.kind}", shown


class LoadedLocator(LoadedRun):
    def predict(self, inputs: Any, **options: Any) -> Any:
        """Positions with covariances, of a dataset (path, Dataset, rows, a row); GeoJSON of a file of observations."""
        import torch

        from brim.engine.device import resolve_device
        from brim.engine.storage import Dataset
        from brim.rf.location import MEASURED, load_run, locate

        run = load_run(self.path)
        if isinstance(inputs, str | Path) and Path(inputs).suffix == ".json":
            return locate(run, inputs)
        if isinstance(inputs, str | Path):
            inputs = Dataset(inputs)
        if isinstance(inputs, Dataset):
            inputs = inputs.load(MEASURED)
        if not isinstance(inputs, Mapping) or not set(MEASURED) <= set(inputs):
            raise _wrong(inputs, f"a dataset, rows with {', '.join(MEASURED)}, or a file of observations")
        rows = {name: torch.as_tensor(inputs[name]) for name in MEASURED}
        if rows["reference"].ndim == 0:  # one row
            rows = {name: column[None] for name, column in rows.items()}
        return run.predict(rows, resolve_device(self.device))


class LoadedSegmentation(LoadedRun):
    _loader: Any = None

    def predict(self, inputs: Any, **options: Any) -> Any:
        """The Prediction of one image (path or array), or a list of them for a list; options as ModelLoader's."""
        from brim.segmentation import ModelLoader
        from brim.segmentation.networks import recall

        name = recall(self.path) or str(self.config["model"])
        if self._loader is None:
            self._loader = ModelLoader({name: self.path}, self.device)
        if isinstance(inputs, list | tuple):
            return self._loader.predict_batch(list(inputs), name, **options)
        return self._loader.predict(inputs, name, **options)


class LoadedSequence(LoadedRun):
    _servable: Any = None

    def predict(self, inputs: Any, **options: Any) -> Any:
        """Class and probabilities of a sequence, (T, D) or the path of an .npy file; for a list, one for each."""
        import numpy as np

        from brim.engine.batching import Payload
        from brim.engine.device import resolve_device
        from brim.sequences.evaluation.serving import ClassifyServable

        if isinstance(inputs, list | tuple):
            return [self.predict(one, **options) for one in inputs]
        if self._servable is None:
            self._servable = ClassifyServable(self.path, resolve_device(self.device))
        if isinstance(inputs, str | Path):
            try:
                data, name = Path(inputs).read_bytes(), str(inputs)
            except OSError as failure:
                raise ConfigError(f"{inputs} cannot be read: {failure.strerror or failure}") from failure
        else:
            array = np.asarray(inputs.detach().cpu() if hasattr(inputs, "detach") else inputs)
            if array.dtype.kind not in "biuf" or array.ndim not in (1, 2):
                raise _wrong(inputs, "a sequence of frames, (T, D), or the path of an .npy file")
            buffer = io.BytesIO()
            np.save(buffer, array.astype(np.float32), allow_pickle=False)
            data, name = buffer.getvalue(), "the sequence"
        item = self._servable.decode(Payload(data, name))
        outputs = self._servable.collect(self._servable.forward(item.parts))
        return json.loads(self._servable.finish(item, outputs).body)


class LoadedModule(LoadedRun):
    """A run of brim.train or `brim train`; its code is not part of it, and is never imported by itself."""

    _module: "nn.Module | None" = None
    factory: str | None = None

    @property
    def module(self) -> "nn.Module":
        """The module with the run's best weights, in eval mode."""
        from brim.engine.device import resolve_device
        from brim.engine.library import Column, load_factory
        from brim.engine.training import load_weights

        if self._module is None and self.factory is None:
            known = self.about.get("factory")
            how = f'factory="{known}"' if known else "module=…"
            raise ConfigError(
                f"{self.path} has the weights of a {self.about.get('model')}, not its code",
                code="missing",
                hint=f"give it: brim.load_run(path, {how})",
            )
        if self._module is None:
            import torch

            columns = {
                name: Column(getattr(torch, dtype), torch.Size(shape))
                for name, (dtype, shape) in self.about["columns"].items()
            }
            made = load_factory(str(self.factory)).make(columns)
            self._module = made[0] if isinstance(made, tuple | list) else made
        load_weights(self._module, self.path)
        return self._module.to(resolve_device(self.device)).eval()

    def predict(self, inputs: Any, **options: Any) -> Any:
        """The module's output for a batch: a tensor or array, or a dict if the module takes one; on the host."""
        import numpy as np
        import torch

        module = self.module
        device = next(module.parameters()).device

        def moved(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: moved(one) for name, one in value.items()}
            if not isinstance(value, torch.Tensor | np.ndarray | list):
                raise _wrong(value, "a tensor, an array or a dict of them")
            return torch.as_tensor(value).to(device)

        with torch.inference_mode():
            try:
                output = module(moved(inputs), **options)
            except (RuntimeError, TypeError, LookupError, AttributeError) as failure:
                raise ConfigError(
                    f"the module does not run on these inputs ({str(failure).splitlines()[0]})"
                ) from failure
        return output.cpu() if isinstance(output, torch.Tensor) else output


_KINDS: dict[str, type[LoadedRun]] = {
    "rf-locator": LoadedLocator,
    "segment-train": LoadedSegmentation,
    "sequence-train": LoadedSequence,
    "module": LoadedModule,
}


def load_run(
    path: Path | str, *, module: "nn.Module | None" = None, factory: str | None = None, device: str = "auto"
) -> LoadedRun:
    """A trained run of radio, segmentation, sequences or a module of one's own, with .predict, .metrics and .config.

    module   of a run of brim.train: an instance of what was trained, which gets the weights
    factory  of a run of `brim train`: its "FILE.py:FACTORY", which is imported
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"{with_article(path)} is no run", hint="give the directory of a training run")
    if module is not None and not callable(getattr(module, "state_dict", None)):
        raise ConfigError(f"module is {with_article(module)}", hint="give an instance of the module that was trained")
    here = Path(path)
    about = _described(here)
    kind = _KINDS.get(str(about.get("kind")))
    if kind is None or not isinstance(about.get("training"), dict):
        raise CheckpointError(
            f"{here} is no run that can be loaded: kind={about.get('kind')!r}",
            code="wrong_kind",
            hint=f"expected one of {', '.join(_KINDS)}",
        )
    run = kind(here, about, device)
    if isinstance(run, LoadedModule):
        run._module, run.factory = module, factory
    elif module is not None or factory is not None:
        raise ConfigError(f"{here} is a run of {run.kind}, whose network is brim's own", hint="leave it out")
    return run


def _described(path: Path) -> dict[str, Any]:
    from brim.engine.training import read_json

    for name in ("run.json", "config.json"):
        if (path / name).is_file():
            about = read_json(path / name)
            if name == "run.json" or "kind" in about:
                return about
    fault = "is no directory" if not path.is_dir() else "has no run.json"
    raise CheckpointError(f"{path} {fault}", code="not_found", hint="give the directory of a training run")


def _wrong(value: Any, expected: str) -> BrimError:
    return ConfigError(f"{with_article(value)} cannot be predicted", hint=f"give {expected}")
