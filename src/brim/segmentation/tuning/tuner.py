"""The fastest safe batch of a network on a device: check or search the compute setting, then sweep batch sizes.

Axes: B images. A step is the device's part of a prediction: normalise, forward, sigmoid, threshold. The pixels are
random: the speed of these networks does not depend on the image."""

import gc
import logging
import math
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch
from torch import Tensor, nn

from brim.engine.config import SweepConfig
from brim.engine.device import Halving, guard, resolve_device, stream
from brim.engine.tuning import ProbeConfig, Prober, Sweep, Trial, budget_bytes, merge, sweep
from brim.errors import BrimError, ConfigError, OutOfMemory, StorageError
from brim.segmentation.config import TuneConfig
from brim.segmentation.networks import CAPTURE_AFTER, InferenceNetwork, create_model, default_setting
from brim.segmentation.networks.network import ComputeConfig, MemoryLayout, NetworkPrecision
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning.batch_sizes import (
    BatchSizeEntry,
    BatchSizes,
    device_info,
    device_key,
    save_entry,
    sizes_file,
)

_log = logging.getLogger("brim")

THRESHOLD: Final = 0.5
PROBABILITY_TOLERANCE: Final = 0.05  # largest difference where masks cannot be compared

_SEED = 20  # of the generated images
_COMPARABLE = (0.001, 0.999)  # share of foreground; beyond it, masks agree whatever the setting
_COMPARE_IMAGES = {"cuda": 4, "cpu": 2}  # settings are compared at this batch size
_LIMITS = {"cuda": 4096, "cpu": 256}  # largest batch tried; a CPU is saturated long before
_SAME = 0.02  # settings this close in speed count as equal, and the simpler one is chosen
_QUICK_BELOW_S = 15.0  # with less time there are fewer repeats; the safe batch is still proven

OnMessage = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of tuning one model."""

    entry: BatchSizeEntry
    trials: list[dict[str, Any]]  # kind "search": settings compared; kind "sweep": batch sizes tried
    messages: list[str]
    setting: ComputeConfig
    compile_s: float  # first calls, compilation and capture; not part of seconds
    seconds: float


def tune_model(
    name: str,
    module: nn.Module,
    device: torch.device | str,
    config: TuneConfig,
    *,
    setting: ComputeConfig | None = None,
    images: Tensor | None = None,
    trained: bool | None = None,
    progress: OnMessage | None = None,
) -> Tuned:
    """Find setting and batch size of a network for images of config.size × config.size pixels.

    `setting` replaces the device's default; the dimensions in config.search vary around it. With trained weights
    (None: decided by the batch norms), masks are compared with those of fp32 on `images`, (B, 3, H, W) uint8, or on
    generated images.
    """
    device = resolve_device(str(device))
    tuning = _Tuning(name, module, device, config, progress or (lambda text: None))
    began_s = time.perf_counter()
    candidates = settings(config.search, setting or default_setting(device))
    chosen = tuning.choose(candidates, images, is_trained(module) if trained is None else trained)
    spent_s = time.perf_counter() - began_s - tuning.compile_s
    left_s = config.seconds if config.search else max(config.seconds / 2, config.seconds - spent_s)
    entry, sweep_s = tuning.sweep(chosen, left_s)
    total_s = spent_s + sweep_s
    tuning.report_time(total_s)
    return Tuned(
        entry=entry, trials=tuning.trials, messages=tuning.messages, setting=chosen, compile_s=tuning.compile_s,
        seconds=total_s,
    )  # fmt: skip


def tune(
    config: TuneConfig,
    device: torch.device | str,
    *,
    out: Path | str = "auto",
    make: Callable[[str], nn.Module] = create_model,
    progress: OnMessage | None = None,
) -> dict[str, Tuned]:
    """Tune several models and save each result to the file when it is known ("auto": see sizes_file).

    A model that cannot be tuned does not stop the others; its error is raised at the end.
    """
    device = resolve_device(str(device))
    out = sizes_file(out)
    BatchSizes.read(out).write(out)  # fails now rather than after a minute if the file cannot be read or written
    key, info = device_key(device), device_info(device)
    results: dict[str, Tuned] = {}
    failures: dict[str, BrimError] = {}
    for name in dict.fromkeys(config.models):
        try:
            tuned = results[name] = tune_model(name, make(name), device, config, progress=progress)
        except BrimError as failure:
            failures[name] = failure
            continue
        save_entry(out, key, info, name, tuned.entry, tuned.trials)
    if failures:
        first = next(iter(failures.values()))
        parts = [f'model "{name}" could not be tuned: {reason}' for name, reason in failures.items()]
        parts += [f"tuned and saved: {', '.join(results)}"] * bool(results)
        raise type(first)("; ".join(parts)) from first
    return results


# Settings and their accuracy


class Reference:
    """The fp32 results on some images, with which settings are compared."""

    def __init__(
        self, module: nn.Module, device: torch.device, images: Tensor, *, trained: bool, tolerance: float
    ) -> None:
        """images (B, 3, H, W) uint8 run one by one through the network in fp32."""
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8 or not len(images):
            raise ConfigError(
                f"images are {images.dtype} {list(images.shape)}; expected uint8 of shape (B, 3, H, W) with at least "
                "one image"
            )
        self._device, self._images = device, images.to(device)
        network = InferenceNetwork(module, device, ComputeConfig())
        self._truth = torch.cat([torch.sigmoid(network(image)) for image in torch.split(self._images, 1)])
        share = (self._truth > THRESHOLD).float().mean().item()
        self.why_not_masks = "" if trained else "weights look random"  # why masks cannot be compared
        if trained and not _COMPARABLE[0] <= share <= _COMPARABLE[1]:
            self.why_not_masks = f"{_percent(share)} of the pixels are foreground in fp32"
        self._tolerance = PROBABILITY_TOLERANCE if self.why_not_masks else tolerance

    def judge(self, network: InferenceNetwork) -> dict[str, Any]:
        """Compare a network's results, on all images at once or as many as fit; what the file stores of it."""
        halving = Halving(len(self._images), self._device)
        probability = torch.cat(halving.run(lambda part: torch.sigmoid(network(part)), self._images))
        differs = (probability > THRESHOLD) != (self._truth > THRESHOLD)
        share = differs.float().mean().item()  # of pixels on the other side of the threshold
        largest = (probability - self._truth).abs().max().item()
        is_finite, by_masks, tolerance = math.isfinite(largest), not self.why_not_masks, self._tolerance
        if not is_finite:
            reason = "its logits are not finite numbers"
        elif by_masks:
            reason = f"{_percent(share)} of mask pixels differ from fp32 (tolerance {_percent(tolerance)})"
        else:
            reason = f"probabilities differ from fp32 by up to {largest:.2g} (tolerance {tolerance:.2g})"
        accepted = is_finite and (share if by_masks else largest) <= tolerance
        return {
            "batch": min(len(self._images), halving.size),
            "status": "ok" if accepted else "refused",
            "detail": f"{'accepted' if accepted else 'refused'} {network.setting}: {reason}",
            "mask_difference": share,
            "probability_difference": largest if is_finite else None,
            "judged_by": "masks" if by_masks else "probabilities",
            "tolerance": tolerance,
        }


def settings(search: Collection[str], default: ComputeConfig) -> list[ComputeConfig]:
    """The settings to compare, simplest first: dimensions in `search` vary, the others keep their default."""
    precisions = get_args(NetworkPrecision) if "precision" in search else [default.precision]
    layouts = get_args(MemoryLayout) if "layout" in search else [default.layout]
    compiled = (False, True) if "compile" in search else [default.compiled]
    choices = product(precisions, layouts, compiled)
    return [ComputeConfig(precision=precision, layout=layout, compiled=flag) for precision, layout, flag in choices]


def is_trained(module: nn.Module) -> bool:
    """Whether the weights look trained: the batch norms of a new network still have mean 0 and variance 1."""
    state = module.state_dict()
    initial = {name: value for suffix, value in (("running_mean", 0), ("running_var", 1)) for name in state
               if name.endswith(suffix)}  # fmt: skip
    return not initial or any(bool((state[name] != value).any()) for name, value in initial.items())


def sample_images(device: torch.device, size: int, count: int) -> Tensor:
    """Generated images of cells on the device, (B, 3, size, size) uint8."""
    images = [make_cells(_SEED, index, size, size)[0] for index in range(count)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().to(device)


class _Tuning:
    """Tunes one model and collects trials and messages."""

    def __init__(
        self, name: str, module: nn.Module, device: torch.device, config: TuneConfig, progress: OnMessage
    ) -> None:
        self._name, self._module, self._device, self._config = name, module, device, config
        self._progress = progress
        self.trials: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.compile_s = 0.0

    def choose(self, candidates: list[ComputeConfig], images: Tensor | None, trained: bool) -> ComputeConfig:
        """The fastest setting whose results agree with fp32, the simplest of equals; fp32 itself if none does."""
        first, several = candidates[0], len(candidates) > 1
        if not several and first.precision == "fp32" and not first.compiled:
            return first
        reference = self._reference(images, trained)
        rates = {setting: self._compare(setting, reference, timed=several) for setting in candidates}
        if rates == {replace(first, precision="fp16"): None}:  # bf16 has room for what overflows in fp16
            wider = replace(first, precision="bf16")
            rates[wider] = self._compare(wider, reference, timed=False)
        accepted = {setting: rate for setting, rate in rates.items() if rate is not None}
        if not accepted:
            self._say(f"{ComputeConfig()} is used, since no other setting was accepted")
            return ComputeConfig()
        best = max(accepted.values())
        chosen = next(setting for setting, rate in accepted.items() if rate >= (1 - _SAME) * best)
        if several:
            self._say(f"chose {chosen} out of {len(candidates)} settings: {_rate(accepted[chosen])}")
        return chosen

    def _reference(self, images: Tensor | None, trained: bool) -> Reference:
        size, tolerance = self._config.size, self._config.tolerance
        self._progress(f"{self._name}: fp32 results to compare with")
        try:
            with guard():
                if images is None:
                    images = sample_images(self._device, size, _COMPARE_IMAGES[self._device.type])
                reference = Reference(self._module, self._device, images, trained=trained, tolerance=tolerance)
        except OutOfMemory as failure:
            raise OutOfMemory(
                f"one image of {size} x {size} does not fit on {self._device} in fp32 ({failure})",
                hint="use a smaller {size} or free memory",
            ) from failure
        if reference.why_not_masks:
            self._say(
                f"{reference.why_not_masks}: settings are judged by probabilities within {PROBABILITY_TOLERANCE} of "
                "fp32, not by masks"
            )
        return reference

    def _compare(self, setting: ComputeConfig, reference: Reference, *, timed: bool) -> float | None:
        """Images/s of a setting, 0 if not timed; None if it is refused or cannot run."""
        self._progress(f"{self._name}: comparing {setting}")
        try:
            with guard():
                judgement, trial = self._judge(setting, reference, timed)
        except Exception as failure:
            # A precision, layout or compiler that fails on this network rules out this setting only, and compilers
            # raise classes of their own. A network that always fails has already failed as the reference.
            reason = str(failure).strip().partition("\n")[0]
            self._say(f"skipped {setting}: {reason or type(failure).__name__}")
            return None
        finally:
            self._release()
        accepted = judgement["status"] == "ok"
        if timed or not accepted:
            speed = f"; {_rate(trial.throughput)} at batch {trial.batch}" if trial.throughput else ""
            self._say(judgement["detail"] + speed)
        self.trials.append(_trial_json("search", setting, trial) | judgement)
        return trial.throughput if accepted else None

    def _judge(self, setting: ComputeConfig, reference: Reference, timed: bool) -> tuple[dict[str, Any], Trial]:
        network = InferenceNetwork(self._module, self._device, setting)
        try:
            judgement = reference.judge(network)
            if timed and judgement["status"] == "ok":
                return judgement, self._prober(network)(judgement["batch"])
            return judgement, Trial(batch=judgement["batch"], seconds=0.0, steps=0)
        finally:
            self.compile_s += network.compile_s
            network.release()

    def sweep(self, setting: ComputeConfig, seconds: float) -> tuple[BatchSizeEntry, float]:
        """The entry found by trying batch sizes within these seconds, and the seconds used without compilation."""
        config = SweepConfig(
            limit=_LIMITS[self._device.type],
            headroom=self._config.reserve,
            seconds=seconds,
            p95_ms=self._config.p95_ms,
            budget_bytes=budget_bytes(self._device),
        )
        if seconds < _QUICK_BELOW_S:
            config = replace(config, full=8, refine=4)
        prober = self._prober(InferenceNetwork(self._module, self._device, setting))
        try:
            result = sweep(prober, config, prove=prober.prove, progress=self._show)
        finally:
            del prober
            self._release()
        self.compile_s += result.warmup_s
        self.trials += [_trial_json("sweep", setting, trial) for trial in result.trials]
        for text in [*(f"skipped {text}" for text in result.skipped), result.verdict]:
            if text:
                self._say(text)
        limit_mb = (config.allowed_bytes or 0.0) / 1e6
        entry = _entry(result.max_safe, no_slower_than_one(result), setting, self._config.size, limit_mb)
        return entry, result.seconds - result.warmup_s

    def _prober(self, network: InferenceNetwork) -> Prober:
        quick = ProbeConfig(settle_s=0.1, block_s=0.02)
        config = quick if self._config.seconds < _QUICK_BELOW_S else ProbeConfig()
        return Prober(lambda batch: _Step(network, batch, self._config.size), self._device, config)

    def _release(self) -> None:
        """Return the memory of a deleted network, so that the next one is measured alone."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # Messages

    def report_time(self, total_s: float) -> None:
        limit_s, compile_s = self._config.seconds, self.compile_s
        apart = f", not counting {compile_s:.1f} s of first calls and compilation" if compile_s >= 0.1 else ""
        over = f"; {total_s - limit_s:.1f} s more than the {limit_s:g} s allowed" if total_s > limit_s else ""
        why = ", since settings were searched" if over and self._config.search else ""
        self._say(f"took {total_s:.1f} s{apart}{over}{why}")

    def _show(self, trial: Trial) -> None:
        self._progress(
            f"{self._name}: batch {trial.batch}, {_rate(trial.throughput) if trial.throughput else trial.status}"
        )

    def _say(self, text: str) -> None:
        self.messages.append(text)
        self._progress(f"{self._name}: {text}")


class _Step:
    """Random pixels to masks, all on the device."""

    def __init__(self, network: InferenceNetwork, batch: int, size: int) -> None:
        shape, device = (batch, 3, size, size), network.device
        rng = stream(0, "tune", batch, device=device)
        self._images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=rng)
        self._network = network
        self._extra_runs = CAPTURE_AFTER if device.type == "cuda" else 0  # then the shape is captured
        weakref.finalize(self, network.release)  # drops the graphs captured for this step

    def __call__(self) -> Tensor:
        for _ in range(self._extra_runs):  # in the first call, since capture is part of the warm-up
            self._network(self._images)
        self._extra_runs = 0
        return torch.sigmoid(self._network(self._images)) > THRESHOLD


def no_slower_than_one(result: Sweep) -> Trial:
    """The chosen size, or a batch of one if all its measurements, proofs included, show it to be faster."""
    single = [trial for trial in result.trials if trial.batch == 1 and trial.status == "ok"]
    if result.chosen.status != "ok" or not single:
        return result.chosen
    one = merge(single)
    return one if one.throughput > result.chosen.throughput else result.chosen


def _entry(max_safe: int, best: Trial, setting: ComputeConfig, size: int, limit_mb: float) -> BatchSizeEntry:
    if best.status == "over budget":
        raise OutOfMemory(
            f"one image of {size} x {size} does not fit: {best.detail}", hint="use a smaller {size} or free memory"
        )
    p50_ms = best.p50_ms or 1e3 * best.seconds
    return BatchSizeEntry(
        optimal_batch_size=best.batch,
        max_safe_batch_size=max_safe,
        expected_throughput=best.throughput,
        p50_latency_ms=p50_ms,
        p95_latency_ms=max(p50_ms, best.p95_ms or 1e3 * best.seconds),
        memory_limit_mb=limit_mb,
        image_size=size,
        **asdict(setting),
    )


def _trial_json(kind: str, setting: ComputeConfig, trial: Trial) -> dict[str, Any]:
    """A trial as the file stores it; values that are not finite become null."""
    facts = {"kind": kind, **asdict(trial), "throughput": trial.throughput, **asdict(setting)}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in facts.items()
    }


def _rate(per_s: float) -> str:
    return f"{per_s:.4g} images/s" if per_s < 1e4 else f"{per_s:.0f} images/s"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


class KnownSizes:
    """Entries of one device in one precision; entries of other devices are never used."""

    def __init__(self, device: torch.device, file: str | Path | None, precision: str, seconds: float) -> None:
        """file None keeps tuned entries in memory; precision "auto" is the tuned one; seconds to tune a model."""
        if precision not in ("auto", *get_args(NetworkPrecision)):
            raise ConfigError(f'precision="{precision}" must be one of auto, {", ".join(get_args(NetworkPrecision))}')
        self._device, self._precision, self._seconds = device, precision, seconds
        self._file = None if file is None else sizes_file(file)
        self._tuned: dict[str, BatchSizeEntry] = {}

    def find(self, name: str) -> BatchSizeEntry | None:
        """The entry of a model; of the one in the file and the one tuned here, that for larger images."""
        entries = [self._tuned.get(name)]
        if self._file is not None:
            entries.insert(0, BatchSizes.read(self._file).entry(device_key(self._device), name))
        fitting = [entry for entry in entries if entry is not None and self._precision in ("auto", entry.precision)]
        return max(fitting, key=lambda entry: entry.image_size, default=None)

    def find_or_tune(self, name: str, side: int, make: Callable[[str], nn.Module]) -> BatchSizeEntry:
        """The entry for images of up to that side; if there is none, tune the module made by make(name)."""
        entry = self.find(name)
        if entry is not None and entry.image_size >= side:
            return entry
        module = make(name)  # first: its weights may be of another network
        _log.warning("%s; tuning it now for about %g s", self._describe_gap(name, side, entry), self._seconds)
        config = TuneConfig(size=side, seconds=self._seconds)
        tuned = tune_model(name, module, self._device, config, setting=self.setting(entry))
        self._tuned[name] = tuned.entry
        # A precision that the caller chose is not saved for everybody who reads the file.
        if self._file is not None and self._precision in ("auto", default_setting(self._device).precision):
            key, info = device_key(self._device), device_info(self._device)
            try:
                save_entry(self._file, key, info, name, tuned.entry, tuned.trials)
            except StorageError as failure:
                _log.warning("the batch size of %s is not saved, and will be tuned again: %s", name, failure)
        return tuned.entry

    def setting(self, entry: BatchSizeEntry | None) -> ComputeConfig:
        """How a network with this entry computes."""
        if entry is not None:
            return ComputeConfig(precision=entry.precision, layout=entry.layout, compiled=entry.compiled)
        setting = default_setting(self._device)
        return setting if self._precision == "auto" else replace(setting, precision=self._precision)  # type: ignore[arg-type]

    def _describe_gap(self, name: str, side: int, entry: BatchSizeEntry | None) -> str:
        key, where = device_key(self._device), self._file or "memory"
        if entry is not None:
            return f"{where} has {name} on {key} for images of {entry.image_size} pixels, not of {side}"
        others = BatchSizes.read(self._file).elsewhere(key, name) if self._file is not None else ()
        foreign = f" (it has other devices, {', '.join(others)}, whose sizes do not apply here)" if others else ""
        return f"{where} has no batch size of {name} on {key}{foreign}"
