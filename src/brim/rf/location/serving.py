"""A trained locator that answers requests: observations in, positions and ellipses as GeoJSON out.

Axes: B observations, R receivers. A part is one observation, padded to a number of receivers that others share, so
that observations of different requests run together; padding never matters to the solver or the network.
"""

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brim.engine.batching import Answer, DecodedRequest, Payload, RequestShape
from brim.engine.batching.warm_up import ladder
from brim.errors import ConfigError, TooLarge
from brim.rf.location.evaluate import MIN_STATIONS, geojson, parse_observations, station_names
from brim.rf.location.model import Estimate
from brim.rf.location.run import load_run
from brim.rf.location.solver import SampleRows

MEDIA_TYPE = "application/geo+json"
MOST = {"cuda": 1024, "cpu": 64}  # observations of a batch; on a CPU what the solver takes at once
MAX_STATIONS = 256  # of an observation: what attention takes grows with their square
_EXAMPLE_STATIONS = 8

_numbers = itertools.count()


class LocateServable:
    """One run on a device."""

    def __init__(
        self, run: str | Path, device: torch.device, *, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self._run, self._device, self._lock = load_run(run), device, lock or threading.RLock()
        self._run.module.to(device)
        self.weight_bytes = sum(tensor.nbytes for tensor in self._run.module.state_dict().values())
        self.max_batch_size = MOST[device.type]
        self.sizes: Sequence[int] = ladder(self.max_batch_size)
        self.tuned = False
        self.expected_s: Mapping[int, float] = {}
        self._number = next(_numbers)  # in the keys: no batch holds parts of two versions of a model

    # Requests

    def inspect(self, payload: Payload) -> RequestShape:
        """Key and observations from how many stations there are."""
        listed = _listed(_read(payload))
        num = max(map(_num_stations, listed))
        if num > MAX_STATIONS:
            raise TooLarge(f"an observation of {num} stations, at most {MAX_STATIONS} are taken; send the strongest")
        most = padded(num)
        scale = most / _EXAMPLE_STATIONS
        expected_s = {size: seconds * scale for size, seconds in self.expected_s.items()}
        return RequestShape((self._number, most), len(listed), cost=float(most), expected_s=expected_s)

    def decode(self, payload: Payload) -> DecodedRequest:
        value = _read(payload)
        names, rows = parse_observations(value, self._run.generation, payload.name or "observations")
        most = padded(rows["present"].shape[1])
        rows = {name: _grown(tensor, most) if tensor.ndim > 1 else tensor for name, tensor in rows.items()}
        parts = [{name: tensor[n] for name, tensor in rows.items()} for n in range(len(names))]
        return DecodedRequest((self._number, most), parts, (names, station_names(value)))

    def forward(self, parts: list[SampleRows]) -> Estimate:
        """Queue observations of one number of receivers."""
        rows = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        with self._lock:
            return self._run.predict(rows, self._device)

    def collect(self, running: Estimate) -> list[Any]:
        """The parts of each estimate, on the host."""
        parts = (part.cpu() for part in running)
        return list(zip(*parts, strict=True))

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        """GeoJSON of all observations of a request."""
        names, stations = item.context
        for name, parts in zip(names, outputs, strict=True):
            if not all(bool(part.isfinite().all()) for part in parts):
                raise ConfigError(f'observation "{name}" has no position: its numbers lead to none; check its stations')
        try:
            value = geojson(Estimate(*map(torch.stack, zip(*outputs, strict=True))), names, stations)
        except torch.linalg.LinAlgError as failure:  # type: ignore[attr-defined]
            raise ConfigError("an observation has no ellipse; check its stations and what they measured") from failure
        return Answer(json.dumps(value, separators=(",", ":")).encode(), MEDIA_TYPE, {"observations": len(outputs)})

    def close(self) -> None:
        del self._run

    # Warming up

    def example(self, num: int) -> list[SampleRows]:
        stations = [
            {"lat": 47 + 0.1 * (n % 3), "lon": 8 + 0.1 * (n // 3), "alt": 400, "rssi_dbm": -80.0 - n,
             "arrival_difference_us": 5.0 * n}
            for n in range(_EXAMPLE_STATIONS)
        ]  # fmt: skip
        data = json.dumps({"stations": stations}).encode()
        return self.decode(Payload(data, "warm-up")).parts * num


def padded(num: int) -> int:
    """Receivers that an observation of so many is padded to: 4, 8, 16, … so that there are few shapes."""
    return 1 << max(2, (num - 1).bit_length())


def _grown(tensor: Tensor, most: int) -> Tensor:
    """(B, R, …) with zeros up to so many receivers, which are not present."""
    return torch.cat([tensor, tensor.new_zeros(len(tensor), most - tensor.shape[1], *tensor.shape[2:])], 1)


def _read(payload: Payload) -> Any:
    try:
        return json.loads(bytes(payload.data))
    except (ValueError, RecursionError) as failure:
        raise ConfigError(f"{payload.name or 'observations'}: not valid JSON: {failure}") from failure


def _listed(value: Any) -> list[Any]:
    """Observations as parse_observations finds them; what is none of them it refuses later, in words."""
    listed = value.get("observations", value) if isinstance(value, Mapping) else value
    return listed if isinstance(listed, list) and listed else [listed]


def _num_stations(one: Any) -> int:
    stations = one.get("stations") if isinstance(one, Mapping) else None
    return max(MIN_STATIONS, len(stations)) if isinstance(stations, list) else MIN_STATIONS
