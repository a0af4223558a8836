"""Datasets of a dozen real samples, written the way generation writes them."""

import torch

import brim
from brim.engine.storage import ShardWriter
from brim.rf.config import SAMPLE_RATE_HZ, GenerateConfig
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.generation.rows import TRUTH
from brim.rf.generation.stages import generate_batch
from brim.rf.physics.link import noise_dbm
from brim.rf.physics.scene import make_scenes
from brim.rf.physics.waveform import PARAMETERS

REPORT = {
    "seconds": 2.0,
    "samples_per_s": 6.0,
    "iq_per_s": 42.0,
    "device": "cpu",
    "batch_size": 2,
    "ceiling_share": 0.97,
    "peak_bytes": 123_456_789,
    "stages": {
        "compute": {"busy_s": 1.9, "share": 0.95, "wait_input_s": 0.1, "wait_room_s": 0.0, "items": 12},
        "write": {"busy_s": 0.2, "share": 0.1, "wait_input_s": 1.8, "wait_room_s": 0.0, "items": 12},
    },
}


def write_dataset(path, config: GenerateConfig, attempts=12, shard=5, finish=True):
    """Write the accepted ones among the first attempts; returns their rows."""
    rows = generate_batch(config, range(attempts))
    rejected = rejections(config, attempts)
    index = rows["index"]
    totals = {"attempted": index + 1}
    totals |= {reason: counts[index] for reason, counts in rejected.items()}
    with ShardWriter(path, header(config), items_per_shard=shard) as writer:
        if len(index):
            writer.append(rows, totals)
        if finish:
            counts = {
                "accepted": len(index),
                "attempted": attempts,
                "rejected": {reason: int(counts[-1]) for reason, counts in rejected.items()},
            }
            writer.finish(counts=counts, report=REPORT)
    return rows


def rejections(config, attempts):
    """Running total of rejections by reason after each attempt."""
    scenes = make_scenes(config, torch.arange(attempts).numpy())
    few, poor = ~scenes.enough, scenes.enough & ~scenes.accepted
    return {"receivers": torch.from_numpy(few).cumsum(0), "gdop": torch.from_numpy(poor).cumsum(0)}


def header(config):
    return {
        "kind": "rf",
        "config": config.as_dict(),
        "seed": config.seed,
        "features": [{"name": name, "unit": unit} for name, unit in FEATURES],
        "truth": [{"name": name, "unit": unit} for name, unit in TRUTH],
        "statistics": list(STATISTICS),
        "waveform": PARAMETERS[config.waveform],
        "noise_dbm": noise_dbm(config),
        "iq": {"unit": "sqrt(mW)", "sample_rate_hz": SAMPLE_RATE_HZ},
        "brim": brim.__version__,
        "torch": torch.__version__,
        "device": "cpu",
    }
