"""What is known of a device's batch sizes: from the file, else tuned now, told aloud and saved."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from brim.errors import ConfigError, StorageError
from brim.segmentation.config import TuneConfig
from brim.segmentation.networks import default_setting
from brim.segmentation.networks.network import ComputeConfig, NetworkPrecision
from brim.segmentation.tuning.batch_sizes import BatchSizeEntry, BatchSizes, device_info, device_key, sizes_file
from brim.segmentation.tuning.tuner import tune_model

_log = logging.getLogger("brim")


class KnownSizes:
    """Entries of one device in one precision; sizes of another device are named in the log and never used."""

    def __init__(self, device: torch.device, file: str | Path | None, precision: str, seconds: float) -> None:
        """Store; file None keeps what is tuned in memory, precision "auto" takes what was tuned."""
        if precision not in ("auto", *get_args(NetworkPrecision)):
            raise ConfigError(f'precision="{precision}" must be one of auto, {", ".join(get_args(NetworkPrecision))}')
        self._device, self._precision, self._seconds = device, precision, seconds
        self._file = None if file is None else sizes_file(file)
        self._tuned: dict[str, BatchSizeEntry] = {}

    def find(self, name: str) -> BatchSizeEntry | None:
        """What is known of a model; of the file and what was tuned here, the one for larger images."""
        found = [self._tuned.get(name)]
        if self._file is not None:
            found.insert(0, BatchSizes.read(self._file).entry(device_key(self._device), name))
        fitting = [entry for entry in found if entry is not None and self._precision in ("auto", entry.precision)]
        return max(fitting, key=lambda entry: entry.image_size, default=None)

    def find_or_tune(self, name: str, side: int, make: Callable[[str], nn.Module]) -> BatchSizeEntry:
        """The entry for images of up to that side, tuned now, with what make(name) returns, where there is none."""
        entry = self.find(name)
        if entry is not None and entry.image_size >= side:
            return entry
        return self._tune(name, side, entry, make(name))

    def setting(self, entry: BatchSizeEntry | None) -> ComputeConfig:
        """How a network with this entry computes."""
        if entry is not None:
            return ComputeConfig(precision=entry.precision, layout=entry.layout, compiled=entry.compiled)  # type: ignore[arg-type]
        setting = default_setting(self._device)
        return setting if self._precision == "auto" else replace(setting, precision=self._precision)  # type: ignore[arg-type]

    def _tune(self, name: str, side: int, known: BatchSizeEntry | None, module: nn.Module) -> BatchSizeEntry:
        setting = self.setting(known)
        _log.warning("%s; tuning it now for about %g s", self._what_is_missing(name, side, known), self._seconds)
        tuned = tune_model(name, module, self._device, TuneConfig(size=side, seconds=self._seconds), setting=setting)
        self._tuned[name] = tuned.entry
        # A precision asked for here and now is not for everybody who reads the file.
        if self._file is not None and self._precision in ("auto", default_setting(self._device).precision):
            self._save(self._file, name, tuned.entry, tuned.trials)
        return tuned.entry

    def _save(self, file: Path, name: str, entry: BatchSizeEntry, trials: list[dict[str, Any]]) -> None:
        key, info = device_key(self._device), device_info(self._device)
        try:
            BatchSizes().with_entry(key, info, name, entry, trials).write(file)
        except StorageError as failure:
            _log.warning("the batch size of %s is not saved, and will be tuned again: %s", name, failure)

    def _what_is_missing(self, name: str, side: int, known: BatchSizeEntry | None) -> str:
        key, where = device_key(self._device), self._file or "memory"
        if known is not None:
            return f"{where} has {name} on {key} for images of {known.image_size} pixels, not of {side}"
        others = BatchSizes.read(self._file).elsewhere(key, name) if self._file is not None else ()
        foreign = f" (it has other devices, {', '.join(others)}, whose sizes do not hold here)" if others else ""
        return f"{where} has no batch size of {name} on {key}{foreign}"
