"""Tuning of small networks on the CPU: what is chosen was measured, what is refused really differs."""

import math
from dataclasses import replace

import pytest
import torch
from entries import entry_of
from torch import nn

from brim.engine.device.memory import inject_oom
from brim.engine.tuning import ProbeConfig
from brim.engine.tuning.search import Sweep
from brim.engine.tuning.trials import Trial, merge
from brim.errors import ConfigError, OutOfMemory, StorageError
from brim.segmentation.config import REGISTERED, TuneConfig
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.tuning import BatchSizes, Tuned, device_key, tune, tune_model, tuner
from brim.segmentation.tuning.plot import plot
from brim.segmentation.tuning.tuner import is_trained, no_slower_than_one, settings

CPU = torch.device("cpu")
SIZE = 64
QUICK = {"size": SIZE, "seconds": 0.3}
pytestmark = pytest.mark.usefixtures("one_thread")


class Blobs(nn.Module):
    """Dark is foreground, as in a stained image; `wrong` in any precision but fp32."""

    def __init__(self, wrong: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.blur = nn.Conv2d(3, 1, 3, padding=1)
        self.norm = nn.BatchNorm2d(1) if norm else nn.Identity()
        nn.init.constant_(self.blur.weight, -1.0 / 3)
        nn.init.constant_(self.blur.bias, 3.0)
        self.wrong = wrong

    def forward(self, images):
        logits = self.norm(self.blur(images))
        return logits if images.dtype == torch.float32 else logits + self.wrong


@pytest.fixture(autouse=True, scope="module")
def few_short_probes():
    """What is asserted here holds of any measurements: sizes up to 8 are measured, for a moment each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "ProbeConfig", lambda **_: ProbeConfig(settle_s=0.0, block_s=0.001))
        patch.setitem(tuner._LIMITS, "cpu", 8)
        yield


@pytest.fixture(scope="module")
def told():
    """What was told while `tuned` was."""
    return []


@pytest.fixture(scope="module")
def tuned(one_thread, few_short_probes, told):
    return tune_model("tiny", Blobs(), CPU, TuneConfig(**QUICK), progress=told.append)


@pytest.fixture
def known(monkeypatch):
    """Names that only this test knows."""
    return lambda name, factory: monkeypatch.setitem(REGISTERED, name, factory)


def swept(tuned: Tuned) -> list[dict]:
    return [trial for trial in tuned.trials if trial["kind"] == "sweep"]


def in_bf16(module: nn.Module, **changes: object) -> Tuned:
    return tune_model("tiny", module, CPU, TuneConfig(**QUICK, **changes), setting=ComputeConfig(precision="bf16"))


def said(tuned: Tuned) -> str:
    return "\n".join(tuned.messages)


# The batch


def test_a_network_is_tuned_on_the_cpu(tuned):
    entry = tuned.entry

    assert 1 <= entry.optimal_batch_size <= entry.max_safe_batch_size
    assert (entry.image_size, entry.precision, entry.layout, entry.compiled) == (SIZE, "fp32", "channels_last", False)
    assert tuned.setting == ComputeConfig(layout="channels_last")
    assert 0 < entry.p50_latency_ms <= entry.p95_latency_ms
    assert entry.memory_limit_mb > 100
    assert "took " in said(tuned)


def test_the_entry_is_what_the_sweep_found_within_what_was_asked(monkeypatch):
    chosen, asked = Trial(batch=4, seconds=0.010, p50_ms=9.0, p95_ms=12.0), []
    found = Sweep(batch=4, max_safe=32, trials=[chosen], best=chosen, chosen=chosen)
    monkeypatch.setattr(tuner, "sweep", lambda prober, config, **_: asked.append(config) or found)
    monkeypatch.setattr(tuner, "budget_bytes", lambda device: 10**10)

    entry = tune_model("tiny", Blobs(), CPU, TuneConfig(reserve=0.25, p95_ms=50.0, **QUICK)).entry

    assert (entry.optimal_batch_size, entry.max_safe_batch_size, entry.expected_throughput) == (4, 32, 400)
    assert (entry.p50_latency_ms, entry.p95_latency_ms, entry.memory_limit_mb) == (9, 12, 7500)
    assert (asked[0].p95_ms, asked[0].headroom, asked[0].budget_bytes) == (50, 0.25, 10**10)


def test_a_choice_that_its_proof_shows_to_be_slow_is_taken_back():
    trials = [Trial(batch=1, seconds=0.010), Trial(batch=2, seconds=0.019), Trial(batch=2, seconds=0.025)]
    found = Sweep(batch=2, max_safe=4, trials=trials, best=merge(trials[1:]), chosen=merge(trials[1:]))

    assert no_slower_than_one(found) == trials[0]
    assert no_slower_than_one(replace(found, chosen=trials[1])) == trials[1]


def test_out_of_memory_ends_the_growth_not_the_tuning():
    with inject_oom(above=3):
        tuned = tune_model("tiny", Blobs(), CPU, TuneConfig(**QUICK))

    assert tuned.entry.max_safe_batch_size <= 3
    assert all(trial["batch"] <= 3 for trial in swept(tuned) if trial["status"] == "ok")


def test_a_memory_that_holds_not_one_image_is_an_error():
    with pytest.raises(OutOfMemory, match="one image of 64 x 64 does not fit"):
        tune_model("tiny", Blobs(), CPU, TuneConfig(reserve=0.9999, **QUICK))


def test_a_latency_that_no_batch_keeps_is_said():
    tuned = tune_model("tiny", Blobs(), CPU, TuneConfig(p95_ms=1e-4, **QUICK))

    assert tuned.entry.optimal_batch_size == 1
    assert "even batch 1 is slow" in said(tuned)


# The setting


def test_a_setting_whose_masks_differ_is_refused():
    tuned = tune_model("tiny", Blobs(wrong=5.0), CPU, TuneConfig(search=("precision",), **QUICK))

    assert tuned.entry.precision == "fp32"
    assert "refused bf16/channels_last: " in said(tuned)
    assert "% of mask pixels differ from fp32 (tolerance 0.5 %)" in said(tuned)
    refused = [trial for trial in tuned.trials if trial["status"] == "refused"]
    assert {trial["precision"] for trial in refused} == {"bf16", "fp16"}
    assert all(trial["mask_difference"] > trial["tolerance"] == 0.005 for trial in refused)


def test_a_default_that_differs_falls_back_to_fp32():
    tuned = in_bf16(Blobs(wrong=5.0))

    assert tuned.setting == ComputeConfig()
    assert "refused bf16/contiguous" in said(tuned)
    assert "fp32/contiguous is used" in said(tuned)


def test_a_single_logit_that_is_no_number_is_refused():
    class Holed(Blobs):
        def forward(self, images):
            logits = super().forward(images).clone()
            logits[..., 0, 0] = logits[..., 0, 0] if images.dtype == torch.float32 else math.nan
            return logits

    tuned = in_bf16(Holed())

    assert tuned.setting.precision == "fp32"
    assert "not finite" in said(tuned)


def test_the_tolerance_is_the_callers():
    assert in_bf16(Blobs(wrong=5.0), tolerance=0.99).setting.precision == "bf16"


def test_random_weights_are_judged_by_probabilities_and_it_is_said():
    tuned = in_bf16(Blobs(wrong=0.1, norm=True))  # moves a probability by 0.025 at most

    assert tuned.setting.precision == "bf16"
    assert "weights look random" in said(tuned)
    assert tuned.trials[0]["judged_by"] == "probabilities"

    refused = in_bf16(Blobs(wrong=1.0, norm=True))

    assert refused.setting.precision == "fp32"
    assert "probabilities differ from fp32 by up to 0.2" in said(refused)


def test_masks_that_show_nothing_are_not_judged_by():
    module = Blobs(wrong=2.5)
    nn.init.zeros_(module.blur.weight)
    nn.init.constant_(module.blur.bias, -3.0)  # background everywhere, wrong or not
    tuned = in_bf16(module)

    assert tuned.setting.precision == "fp32"
    assert "0 % of the pixels are foreground in fp32: settings are judged by probabilities" in said(tuned)


def test_a_setting_that_cannot_run_is_skipped():
    class Picky(Blobs):
        def forward(self, images):
            if images.dtype == torch.float16:
                raise RuntimeError("no kernel for half\nand more")
            return super().forward(images)

    tuned = tune_model("tiny", Picky(), CPU, TuneConfig(search=("precision",), **QUICK))

    assert "skipped fp16/channels_last: no kernel for half" in tuned.messages


def test_settings_vary_in_the_asked_dimensions_alone():
    default = ComputeConfig(precision="bf16", layout="channels_last")

    assert settings(frozenset(), default) == [default]
    assert len(settings(frozenset({"precision", "layout", "compile"}), default)) == 12
    assert [str(found) for found in settings(frozenset({"compile"}), default)] == [
        "bf16/channels_last",
        "bf16/channels_last/compiled",
    ]


def test_batch_norms_tell_whether_weights_are_trained():
    module = Blobs(norm=True)
    assert not is_trained(module)
    module(torch.rand(2, 3, 32, 32))
    assert is_trained(module)
    assert is_trained(Blobs())  # nothing to tell by


# Several models and the file


def test_a_chart_has_the_values_of_the_trials_in_its_units(monkeypatch):
    figures = []
    monkeypatch.setattr("brim.segmentation.tuning.plot.save_figure", lambda figure, file: figures.append(figure))
    trials = [
        {"kind": "sweep", "batch": 2**n, "throughput": 100.0 * (n + 1), "p50_ms": 3.0, "p95_ms": 9.0,
         "peak_bytes": 2**n * 10**9}
        for n in range(3)
    ]  # fmt: skip
    entry = entry_of(optimal_batch_size=2, max_safe_batch_size=4, memory_limit_mb=8000.0)

    tuned = Tuned(entry=entry, trials=trials, messages=[], setting=ComputeConfig(), compile_s=0.0, seconds=0.0)

    plot("chart.png", {"tiny": tuned})

    throughput, latency, memory = figures[0].axes
    drawn = {tuple(line.get_xdata()): list(line.get_ydata()) for line in throughput.lines[:1]}
    assert drawn == {(1, 2, 4): [100, 200, 300]}
    assert [list(line.get_ydata()) for line in latency.lines[:2]] == [[3, 3, 3], [9, 9, 9]]
    assert [list(line.get_ydata()) for line in memory.lines[:2]] == [[1, 2, 4], [8, 8]]


def test_every_model_is_saved_when_it_is_found(known, tmp_path):
    known("one", Blobs)
    known("two", Blobs)
    file = tmp_path / "sizes.json"
    seen: list[tuple[str, ...]] = []

    def progress(text: str) -> None:
        if text.startswith("two: batch 1,"):
            seen.append(BatchSizes.read(file).models(device_key(CPU)))

    found = tune(TuneConfig(models=("one", "two"), **QUICK), CPU, out=file, progress=progress)

    sizes = BatchSizes.read(file)
    assert list(found) == ["one", "two"]
    assert seen[0] == ("one",)
    for name, tuned in found.items():
        assert sizes.entry(device_key(CPU), name) == tuned.entry
        assert sizes.as_json()["devices"][device_key(CPU)]["detailed_results"][name] == tuned.trials


def test_a_model_that_cannot_be_tuned_does_not_stop_the_others(known, tmp_path):
    class Broken(Blobs):
        def forward(self, images):
            raise MemoryError

    known("broken", Broken)
    known("good", Blobs)
    file = tmp_path / "sizes.json"

    with pytest.raises(OutOfMemory, match=r'model "broken" could not be tuned: .+; tuned and saved: good'):
        tune(TuneConfig(models=("broken", "good"), **QUICK), CPU, out=file)

    assert BatchSizes.read(file).models(device_key(CPU)) == ("good",)


def test_a_file_that_cannot_be_used_is_known_before_anything_runs(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{")

    def never(name: str) -> nn.Module:
        raise AssertionError(name)

    with pytest.raises(ConfigError, match="not valid JSON"):
        tune(TuneConfig(models=("unet_tiny",)), CPU, out=bad, make=never)
    with pytest.raises(StorageError, match="cannot"):
        tune(TuneConfig(models=("unet_tiny",)), CPU, out=bad / "sizes.json", make=never)
