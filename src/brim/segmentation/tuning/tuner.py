"""The fastest safe batch of a network on a device: its setting is checked or searched, then batch sizes are swept.

Axes: B images. A step is what prediction does on the device: normalise, forward, sigmoid, threshold. The pixels are
random, since no network here is faster for some images than for others."""

import gc
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from brim.engine.config import SweepConfig
from brim.engine.device import Halving, guard, resolve_device, stream
from brim.engine.tuning import ProbeConfig, Prober, Sweep, Trial, budget_bytes, merge, sweep
from brim.errors import BrimError, ConfigError, OutOfMemory
from brim.segmentation.config import TuneConfig
from brim.segmentation.networks import CAPTURE_AFTER, InferenceNetwork, create_model, default_setting
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.scenes import make_cells
from brim.segmentation.tuning.batch_sizes import (
    LAYOUTS,
    PRECISIONS,
    BatchSizeEntry,
    BatchSizes,
    device_info,
    device_key,
    sizes_file,
)

THRESHOLD: Final = 0.5
PROBABILITY_TOLERANCE: Final = 0.05  # largest difference, where masks say nothing
DIMENSIONS: Final = {"precision": PRECISIONS, "layout": LAYOUTS, "compile": (False, True)}
TRUTH: Final = ComputeConfig()  # fp32, contiguous, eager

_FIELDS = {"precision": "precision", "layout": "layout", "compile": "compiled"}
_SEED = 20  # of the generated images
_TELLING = (0.001, 0.999)  # share of foreground outside of which masks agree whatever the setting does
_COMPARE_IMAGES = {"cuda": 4, "cpu": 2}  # a fixed small batch, at which settings are compared
_LIMITS = {"cuda": 4096, "cpu": 256}  # largest batch tried; a CPU is full long before
_SAME = 0.02  # settings this close are as fast: the plainer one is taken
_QUICK_BELOW_S = 15.0  # less time than this buys fewer repeats; what is safe is proven all the same

OnMessage = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What tuning one model found."""

    entry: BatchSizeEntry
    trials: list[dict[str, Any]]  # kind "search": settings compared; kind "sweep": batch sizes tried
    messages: list[str]  # what was refused, skipped and concluded
    setting: ComputeConfig
    compile_s: float  # in first calls, compiling and capturing: apart from seconds
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

    `setting` replaces the device's default; the dimensions named in config.search vary around it. If the weights are
    trained (None: as its batch norms suggest), a setting's masks are compared with those of fp32 on `images`,
    (B, 3, H, W) uint8, or on generated ones.
    """
    device, seconds = resolve_device(str(device)), config.seconds
    candidates = settings(config.search, setting or default_setting(device))
    tuning = _Tuning(name, module, device, config.size, _probe_config(seconds), progress or (lambda text: None))
    began_s = time.perf_counter()
    chosen = tuning.choose(candidates, images, config.tolerance, is_trained(module) if trained is None else trained)
    spent_s = time.perf_counter() - began_s - tuning.compile_s
    left_s = seconds if config.search else max(seconds / 2, seconds - spent_s)
    sweep_config = _sweep_config(device, left_s, config)
    found = tuning.sweep(chosen, sweep_config)
    best = no_slower_than_one(found)
    total_s = spent_s + found.seconds - found.warmup_s
    tuning.say_time(total_s, seconds, searched=bool(config.search))
    return Tuned(
        entry=_entry(found.max_safe, best, chosen, config.size, sweep_config),
        trials=tuning.trials,
        messages=tuning.messages,
        setting=chosen,
        compile_s=tuning.compile_s,
        seconds=total_s,
    )


def tune(
    config: TuneConfig,
    device: torch.device | str,
    *,
    out: Path | str = "auto",
    make: Callable[[str], nn.Module] = create_model,
    progress: OnMessage | None = None,
) -> dict[str, Tuned]:
    """Tune several models; each result is saved to the file as soon as it is known ("auto": see sizes_file).

    A model that cannot be tuned does not stop the others; its error is raised when they are done.
    """
    device = resolve_device(str(device))
    out = sizes_file(out)
    BatchSizes.read(out).write(out)  # a file that cannot be read or written is known now, not after a minute
    key, info = device_key(device), device_info(device)
    found: dict[str, Tuned] = {}
    failures: dict[str, BrimError] = {}
    for name in dict.fromkeys(config.models):
        try:
            found[name] = tune_model(name, make(name), device, config, progress=progress)
        except BrimError as failure:
            failures[name] = failure
            continue
        BatchSizes().with_entry(key, info, name, found[name].entry, found[name].trials).write(out)
    if failures:
        first = next(iter(failures.values()))
        told = [f'model "{name}" could not be tuned: {reason}' for name, reason in failures.items()]
        told += [f"tuned and saved: {', '.join(found)}"] * bool(found)
        raise type(first)("; ".join(told)) from first
    return found


# Settings and their accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How a setting's answers differ from those of fp32."""

    mask_difference: float  # share of pixels on the other side of the threshold
    probability_difference: float  # largest of a pixel; infinite where an answer was not a number
    tolerance: float  # of the one that was judged by
    by_masks: bool  # else by probabilities
    batch: int  # images that went through at once

    @property
    def is_accepted(self) -> bool:
        """Whether the setting may be used."""
        difference = self.mask_difference if self.by_masks else self.probability_difference
        return difference <= self.tolerance and math.isfinite(self.probability_difference)

    def describe(self, setting: ComputeConfig) -> str:
        verb = "accepted" if self.is_accepted else "refused"
        if not math.isfinite(self.probability_difference):
            return f"{verb} {label(setting)}: its logits are not finite numbers"
        if self.by_masks:
            return (
                f"{verb} {label(setting)}: {_percent(self.mask_difference)} of mask pixels differ from fp32 "
                f"(tolerance {_percent(self.tolerance)})"
            )
        return (
            f"{verb} {label(setting)}: probabilities differ from fp32 by up to {self.probability_difference:.2g} "
            f"(tolerance {self.tolerance:.2g})"
        )


class Reference:
    """The fp32 answers on some images, and settings judged by them."""

    def __init__(
        self, module: nn.Module, device: torch.device, images: Tensor, *, trained: bool, tolerance: float
    ) -> None:
        """Run the images, (B, 3, H, W) uint8, one by one through the network in fp32."""
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8 or not len(images):
            found = f"{images.dtype} {list(images.shape)}"
            raise ConfigError(f"images are {found}; expected uint8 of shape (B, 3, H, W) with at least one image")
        self.images = images.to(device)
        network = InferenceNetwork(module, device, TRUTH)
        self._truth = torch.cat([_probabilities(network, image) for image in torch.split(self.images, 1)])
        self._device = device
        share = (self._truth > THRESHOLD).float().mean().item()
        self.why_not_masks = "" if trained else "weights look random"  # why masks say nothing, where they do
        if trained and not _TELLING[0] <= share <= _TELLING[1]:
            self.why_not_masks = f"{_percent(share)} of the pixels are foreground in fp32"
        self.tolerance = PROBABILITY_TOLERANCE if self.why_not_masks else tolerance

    def judge(self, network: InferenceNetwork) -> Judgement:
        """Compare a network's answers, all images at once or as many as fit."""
        halving = Halving(len(self.images), self._device)
        found = torch.cat(halving.run(lambda part: _probabilities(network, part), self.images))
        differs = (found > THRESHOLD) != (self._truth > THRESHOLD)
        largest = (found - self._truth).abs().max().item()
        return Judgement(
            mask_difference=differs.float().mean().item(),
            probability_difference=largest if math.isfinite(largest) else float("inf"),
            tolerance=self.tolerance,
            by_masks=not self.why_not_masks,
            batch=min(len(self.images), halving.size),
        )


def settings(search: Collection[str], default: ComputeConfig) -> list[ComputeConfig]:
    """The settings to compare, simplest first: dimensions in `search` vary, the others are the default's."""

    def choices() -> Iterator[list[str | bool]]:
        for name, values in DIMENSIONS.items():
            yield list(values) if name in search else [getattr(default, _FIELDS[name])]

    return [ComputeConfig(**dict(zip(_FIELDS.values(), choice, strict=True))) for choice in product(*choices())]  # type: ignore[arg-type]


def label(setting: ComputeConfig) -> str:
    """A setting in short: "bf16/channels_last/compiled"."""
    return "/".join([setting.precision, setting.layout, *["compiled"] * setting.compiled])


def is_trained(module: nn.Module) -> bool:
    """Whether the weights look trained: a network fresh from its factory has batch norms that have seen nothing."""
    state = module.state_dict()
    means = [value for name, value in state.items() if name.endswith("running_mean")]
    variances = [value for name, value in state.items() if name.endswith("running_var")]
    if not means:
        return True  # nothing to tell by
    return any(bool(mean.any()) for mean in means) or any(bool((value - 1).any()) for value in variances)


def sample_images(device: torch.device, size: int, count: int) -> Tensor:
    """Generated images of cells on the device, (B, 3, size, size) uint8."""
    images = [make_cells(_SEED, index, size, size)[0] for index in range(count)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().to(device)


def release(device: torch.device) -> None:
    """Give back what a network that is gone held, so that the next is measured alone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _probabilities(network: InferenceNetwork, images: Tensor) -> Tensor:
    return torch.sigmoid(network(images))


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


class _Tuning:
    """One model being tuned: what was tried and said so far."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        device: torch.device,
        size: int,
        probe: ProbeConfig,
        progress: OnMessage,
    ) -> None:
        self.name, self.module, self.device, self.size = name, module, device, size
        self._probe = probe
        self.trials: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.compile_s = 0.0
        self._progress = progress

    # The setting

    def choose(
        self, candidates: list[ComputeConfig], images: Tensor | None, tolerance: float, trained: bool
    ) -> ComputeConfig:
        """The fastest setting whose answers are those of fp32, the plainest of equals; fp32 itself where none is."""
        if len(candidates) == 1 and candidates[0].precision == "fp32" and not candidates[0].compiled:
            return candidates[0]
        reference = self._reference(images, tolerance, trained)
        rates = {setting: self._compare(setting, reference, is_timed=len(candidates) > 1) for setting in candidates}
        if rates == {replace(candidates[0], precision="fp16"): None}:  # what overflows there has room in bf16
            wider = replace(candidates[0], precision="bf16")
            rates[wider] = self._compare(wider, reference, is_timed=False)
        accepted = {setting: rate for setting, rate in rates.items() if rate is not None}
        if not accepted:
            self._say(f"{label(TRUTH)} is used, since no other setting was accepted")
            return TRUTH
        best = max(accepted.values())
        chosen = next(setting for setting, rate in accepted.items() if rate >= (1 - _SAME) * best)
        if len(candidates) > 1:
            self._say(f"chose {label(chosen)} out of {len(candidates)} settings: {_rate(accepted[chosen])}")
        return chosen

    def _reference(self, images: Tensor | None, tolerance: float, trained: bool) -> Reference:
        self._progress(f"{self.name}: fp32 answers to compare with")
        try:
            with guard():
                if images is None:
                    images = sample_images(self.device, self.size, _COMPARE_IMAGES[self.device.type])
                reference = Reference(self.module, self.device, images, trained=trained, tolerance=tolerance)
        except OutOfMemory as failure:
            raise OutOfMemory(
                f"one image of {self.size} x {self.size} does not fit on {self.device} in fp32 ({failure})",
                hint="use a smaller {size} or free memory",
            ) from failure
        if reference.why_not_masks:
            self._say(
                f"{reference.why_not_masks}: settings are judged by probabilities within {PROBABILITY_TOLERANCE} of "
                "fp32, not by masks"
            )
        return reference

    def _compare(self, setting: ComputeConfig, reference: Reference, *, is_timed: bool) -> float | None:
        """Images/s of a setting, 0 where nobody asks; None where it is refused or cannot run."""
        self._progress(f"{self.name}: comparing {label(setting)}")
        try:
            with guard():
                return self._try(InferenceNetwork(self.module, self.device, setting), reference, is_timed=is_timed)
        except Exception as failure:
            # Whatever a precision, a layout or a compiler cannot do with this network ends this setting alone, and
            # compilers raise classes of their own. A network that always fails has failed as the reference already.
            self._say(f"skipped {label(setting)}: {_first_line(failure)}")
            return None
        finally:
            release(self.device)

    def _try(self, network: InferenceNetwork, reference: Reference, *, is_timed: bool) -> float | None:
        try:
            judgement = reference.judge(network)
            trial = None
            if is_timed and judgement.is_accepted:
                trial = self._prober(network)(judgement.batch)
        finally:
            self.compile_s += network.compile_s
            network.release()
        if is_timed or not judgement.is_accepted:
            speed = f"; {_rate(trial.throughput)} at batch {trial.batch}" if trial else ""
            self._say(judgement.describe(network.setting) + speed)
        self.trials.append(_search_json(network.setting, judgement, trial))
        if not judgement.is_accepted:
            return None
        return trial.throughput if trial else 0.0

    # The batch

    def sweep(self, setting: ComputeConfig, config: SweepConfig) -> Sweep:
        """Try batch sizes with a setting."""
        prober = self._prober(InferenceNetwork(self.module, self.device, setting))
        try:
            found = sweep(prober, config, prove=prober.prove, progress=self._tell)
        finally:
            del prober
            release(self.device)
        self.compile_s += found.warmup_s
        self.trials += [_trial_json("sweep", setting, trial) for trial in found.trials]
        for text in [*(f"skipped {text}" for text in found.skipped), found.verdict]:
            if text:
                self._say(text)
        return found

    def _prober(self, network: InferenceNetwork) -> Prober:
        return Prober(lambda batch: self._step(network, batch), self.device, self._probe)

    def _step(self, network: InferenceNetwork, batch: int) -> "_Step":
        step = _Step(network, batch, self.size)
        weakref.finalize(step, network.release)  # with the step goes what was captured for it
        return step

    # What is said

    def say_time(self, total_s: float, limit_s: float, *, searched: bool) -> None:
        """What it took, and by how much that is more than allowed."""
        apart = f", first calls and compilation ({self.compile_s:.1f} s) apart" if self.compile_s >= 0.1 else ""
        over = f"; {total_s - limit_s:.1f} s more than the {limit_s:g} s allowed" if total_s > limit_s else ""
        why = ", since settings were searched" if over and searched else ""
        self._say(f"took {total_s:.1f} s{apart}{over}{why}")

    def _tell(self, trial: Trial) -> None:
        rate = _rate(trial.throughput) if trial.throughput else trial.status
        self._progress(f"{self.name}: batch {trial.batch}, {rate}")

    def _say(self, text: str) -> None:
        self.messages.append(text)
        self._progress(f"{self.name}: {text}")


class _Step:
    """Random pixels on the device to masks there."""

    def __init__(self, network: InferenceNetwork, batch: int, size: int) -> None:
        shape, device = (batch, 3, size, size), network.device
        rng = stream(0, "tune", batch, device=device)
        self._images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=rng)
        self._network = network
        self._is_first = True

    def __call__(self) -> Tensor:
        if self._is_first and self._images.is_cuda:
            for _ in range(CAPTURE_AFTER):  # a shape that comes again is captured: that belongs to the first call too
                self._network(self._images)
        self._is_first = False
        return torch.sigmoid(self._network(self._images)) > THRESHOLD


def _sweep_config(device: torch.device, seconds: float, tuning: TuneConfig) -> SweepConfig:
    config = SweepConfig(
        limit=_LIMITS[device.type],
        headroom=tuning.reserve,
        seconds=seconds,
        p95_ms=tuning.p95_ms,
        budget_bytes=budget_bytes(device),
    )
    return replace(config, full=8, refine=4) if seconds < _QUICK_BELOW_S else config


def _probe_config(seconds: float) -> ProbeConfig:
    return ProbeConfig(settle_s=0.1, block_s=0.02) if seconds < _QUICK_BELOW_S else ProbeConfig()


def no_slower_than_one(found: Sweep) -> Trial:
    """The chosen size, or one image where all that was measured, proofs included, says that it is faster."""
    single = [trial for trial in found.trials if trial.batch == 1 and trial.status == "ok"]
    if found.chosen.status != "ok" or not single:
        return found.chosen
    one = merge(single)
    return one if one.throughput > found.chosen.throughput else found.chosen


def _entry(max_safe: int, best: Trial, setting: ComputeConfig, size: int, config: SweepConfig) -> BatchSizeEntry:
    """What the file keeps of a sweep."""
    allowed = config.allowed_bytes or 0.0
    if best.status == "over budget":
        raise OutOfMemory(
            f"one image of {size} x {size} does not fit: {best.detail}", hint="use a smaller {size} or free memory"
        )
    step_ms = 1e3 * best.seconds
    p50_ms = best.p50_ms or step_ms
    return BatchSizeEntry(
        optimal_batch_size=best.batch,
        max_safe_batch_size=max_safe,
        expected_throughput=best.throughput,
        p50_latency_ms=p50_ms,
        p95_latency_ms=max(p50_ms, best.p95_ms or step_ms),
        memory_limit_mb=allowed / 1e6,
        image_size=size,
        **asdict(setting),
    )


def _trial_json(kind: str, setting: ComputeConfig, trial: Trial) -> dict[str, Any]:
    """A trial as the file keeps it; what was not measured is null."""
    facts = {"kind": kind, **asdict(trial), "throughput": trial.throughput, **asdict(setting)}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in facts.items()
    }


def _search_json(setting: ComputeConfig, judgement: Judgement, trial: Trial | None) -> dict[str, Any]:
    timed = trial or Trial(batch=judgement.batch, seconds=0.0, steps=0)
    status = "ok" if judgement.is_accepted else "refused"
    difference = judgement.probability_difference
    return {
        **_trial_json("search", setting, timed),
        "status": status,
        "detail": judgement.describe(setting),
        "mask_difference": judgement.mask_difference,
        "probability_difference": difference if math.isfinite(difference) else None,
        "judged_by": "masks" if judgement.by_masks else "probabilities",
        "tolerance": judgement.tolerance,
    }


def _rate(per_s: float) -> str:
    return f"{per_s:.4g} images/s" if per_s < 1e4 else f"{per_s:.0f} images/s"


def _first_line(failure: BaseException) -> str:
    return str(failure).strip().split("\n")[0] or type(failure).__name__
