"""The picture of a tuning: it is a PNG, it can be looked at, and what it cannot do it says."""

import sys

import cv2
import numpy as np
import pytest

from brim.errors import ConfigError, StorageError
from brim.segmentation.networks.network import ComputeConfig
from brim.segmentation.tuning import BatchSizeEntry, Tuned
from brim.segmentation.tuning.plot import plot


def made_up(best: float = 400.0, knee: int = 8, largest: int = 96, fails: int | None = 128) -> Tuned:
    """A sweep as a GPU would give it: throughput saturates at the knee, memory grows with the batch."""
    trials = [{"kind": "search", "batch": 4, "status": "ok", "throughput": 1.0}]
    batches = [batch for batch in (1, 2, 4, 6, 8, 12, 16, 32, 64, 96) if batch <= largest]
    for batch in batches:
        rate = best * min(1.0, 0.35 + 0.65 * batch / knee) * (1 - 0.0003 * batch)
        ms = 1000 * batch / rate
        trials.append(
            {"kind": "sweep", "batch": batch, "status": "ok", "throughput": rate, "spread": 0.01 + 0.03 / batch}
        )
        trials[-1] |= {"p50_ms": ms, "p95_ms": 1.05 * ms, "peak_bytes": int(1.2e9 * batch + 9e8)}
    if fails:
        trials.append({"kind": "sweep", "batch": fails, "status": "oom", "throughput": 0.0})
    chosen = next(trial for trial in trials if trial["kind"] == "sweep" and trial["batch"] >= knee)
    entry = BatchSizeEntry(
        optimal_batch_size=chosen["batch"],
        max_safe_batch_size=largest,
        expected_throughput=chosen["throughput"],
        p50_latency_ms=chosen["p50_ms"],
        p95_latency_ms=chosen["p95_ms"],
        memory_limit_mb=134_000.0,
        image_size=1024,
        precision="bf16",
        layout="channels_last",
        compiled=True,
    )
    return Tuned(entry=entry, trials=trials, messages=[], setting=ComputeConfig(), compile_s=0.0, seconds=1.0)


def test_every_model_has_a_row(tmp_path):
    one, three = tmp_path / "one.png", tmp_path / "new" / "three.png"
    plot(one, {"hrnet": made_up()}, device="NVIDIA H200 140 GiB")
    plot(three, {"hrnet": made_up(), "resunet_small": made_up(270), "resunet_advanced": made_up(100, 2, 64)})

    small, large = cv2.imread(str(one)), cv2.imread(str(three))

    assert small.shape[1] == large.shape[1] > 1000
    assert large.shape[0] > 2.5 * small.shape[0] - 200
    assert np.median(small) == 255  # light
    assert len(np.unique(small)) > 50  # and not empty
    assert sorted(found.name for found in tmp_path.iterdir()) == ["new", "one.png"]


@pytest.mark.parametrize("tuned", [made_up(5.0, 1, 1, None), made_up(5.0, 1, 1, 2)], ids=["one batch", "two fail"])
def test_a_single_trial_can_be_drawn(tmp_path, tuned):
    plot(tmp_path / "tuned.png", {"tiny": tuned})

    assert cv2.imread(str(tmp_path / "tuned.png")) is not None


def test_nothing_tuned_is_nothing_to_plot(tmp_path):
    with pytest.raises(ConfigError, match="nothing was tuned"):
        plot(tmp_path / "tuned.png", {})


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ConfigError, match=r'pip install "brim\[plot\]"'):
        plot(tmp_path / "tuned.png", {"hrnet": made_up()})


def test_a_file_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "plain").write_text("")

    with pytest.raises(StorageError, match=r"tuned\.png: cannot write"):
        plot(tmp_path / "plain" / "tuned.png", {"hrnet": made_up()})
