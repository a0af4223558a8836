"""Datasets on disk: the same bytes whatever made them, and counts that add up."""

import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from brim.engine.storage import Dataset
from brim.errors import DatasetError, NothingAccepted, ShardCorrupt
from brim.rf.config import BUILTIN_STATIONS, GenerateConfig
from brim.rf.features import FEATURES
from brim.rf.generation.backend import CpuBackend
from brim.rf.generation.dataset import generate
from brim.rf.generation.rows import TRUTH, dataset_bytes
from brim.rf.generation.stages import generate_batch
from brim.rf.physics.scene import make_scenes

SAMPLES = 20


def shards(path):
    return {file.name: file.read_bytes() for file in sorted((path / "shards").iterdir())}


@pytest.fixture(scope="module")
def dataset(gated_config, tmp_path_factory):
    """The dataset that every other way of making it must repeat, and its report."""
    out = tmp_path_factory.mktemp("rf") / "data"
    return out, generate(gated_config, out, SAMPLES, device="cpu", batch_size=4)


# The same bytes


def test_a_stop_drops_what_is_being_computed(gated_config, tmp_path, monkeypatch):
    computed, sample = [], CpuBackend._sample
    monkeypatch.setattr(CpuBackend, "_sample", lambda *args: computed.append(1) or sample(*args))
    report = generate(gated_config, tmp_path / "d", 100, device="cpu", batch_size=12, stop=lambda: True)
    assert report.accepted == 12
    assert len(computed) <= 3 * 12  # two further batches may be under way


def test_a_longer_run_begins_with_the_shorter_one(dataset, gated_config, tmp_path):
    out = tmp_path / "again"
    generate(gated_config, out, 13, device="cpu")
    first = shards(out)["000000.safetensors"]
    report = generate(gated_config, out, SAMPLES, device="cpu")
    assert shards(out)["000000.safetensors"] == first
    assert shards(out) == shards(dataset[0])
    assert (report.accepted, report.attempted) == (dataset[1].accepted, dataset[1].attempted)


def test_asking_again_for_what_is_there_changes_nothing(dataset, gated_config):
    before = shards(dataset[0])
    report = generate(gated_config, dataset[0], SAMPLES, device="cpu")
    assert (report.accepted, report.attempted) == (dataset[1].accepted, dataset[1].attempted)
    assert shards(dataset[0]) == before


@pytest.mark.parametrize("samples", [10, SAMPLES - 1])
def test_asking_for_less_than_is_there_is_refused(dataset, gated_config, samples):
    before = shards(dataset[0])
    with pytest.raises(DatasetError, match=f"already holds {SAMPLES} samples"):
        generate(gated_config, dataset[0], samples, device="cpu")
    assert shards(dataset[0]) == before
    assert len(Dataset(dataset[0])) == SAMPLES


# What is in it


def test_the_dataset_is_the_first_accepted_attempts_in_order(dataset, gated_config):
    index = Dataset(dataset[0]).load(["index"])["index"].numpy()
    accepted = np.nonzero(make_scenes(gated_config, np.arange(1_000)).accepted)[0]
    assert np.array_equal(index, accepted[:SAMPLES])


def test_rejections_are_counted_by_reason_receivers_first(dataset, gated_config):
    report = dataset[1]
    scenes = make_scenes(gated_config, np.arange(report.attempted))
    few = scenes.present.sum(-1) < gated_config.min_receivers
    wide = ~few & ~(scenes.gdop <= gated_config.max_gdop)
    assert report.rejected == {"receivers": int(few.sum()), "gdop": int(wide.sum())}
    assert min(report.rejected.values()) > 0


def test_counts_add_up(dataset):
    out, report = dataset
    found = Dataset(out)
    assert report.accepted == len(found) == SAMPLES
    assert report.attempted == int(found.load(["index"])["index"][-1]) + 1
    assert report.accepted + sum(report.rejected.values()) == report.attempted
    counts = found.manifest["counts"]
    assert (counts["accepted"], counts["attempted"]) == (report.accepted, report.attempted)
    assert counts["rejected"] == report.rejected
    assert report.samples_per_s * report.seconds == pytest.approx(SAMPLES)
    assert report.iq_per_s * report.seconds == pytest.approx(int(found.load(["present"])["present"].sum()))


def test_rows_are_those_of_a_batch_without_a_disk(dataset, gated_config):
    found = Dataset(dataset[0]).load()
    rows = generate_batch(gated_config, found["index"])
    assert set(found) == set(rows)
    for name, values in rows.items():
        assert torch.equal(found[name], values), name


def test_the_manifest_says_how_to_read_the_rows(dataset, gated_config):
    manifest = Dataset(dataset[0]).manifest
    assert manifest["features"] == [{"name": name, "unit": unit} for name, unit in FEATURES]
    assert manifest["truth"] == [{"name": name, "unit": unit} for name, unit in TRUTH]
    assert (manifest["format_version"], manifest["seed"]) == (2, gated_config.seed)
    assert manifest["config"] == gated_config.as_dict()
    assert manifest["torch"] == torch.__version__
    assert manifest["noise_dbm"] == pytest.approx(-119.721, abs=0.002)
    assert manifest["iq"] == {"unit": "sqrt(mW)", "sample_rate_hz": 200_000}


def test_shards_hold_what_the_config_says_never_the_batch(dataset):
    found = Dataset(dataset[0])
    assert [len(found.shard(number)["index"]) for number in range(3)] == [8, 8, 4]


# Running


def test_progress_is_told_and_ends_at_the_total(tmp_path, caplog):
    told, config = [], GenerateConfig(loss="hata", environment="rural", duration_s=0.2)
    with caplog.at_level(logging.WARNING, logger="brim"):
        generate(config, tmp_path / "data", 6, device="cpu", batch_size=2, progress=told.append)
    assert len([r for r in caplog.records if "loss=hata is stated for" in r.getMessage()]) == 1
    done = [p.done for p in told]
    assert done == sorted(done)
    assert (told[-1].done, told[-1].total) == (6, 6)
    under_way = [one for one in told if one.rate and one.done < 6]
    assert under_way
    for one in under_way:
        assert one.eta_s * one.rate == pytest.approx(6 - one.done)


@pytest.mark.parametrize(
    ("gates", "named"),
    [
        ({"tx_power_dbm": 0.0, "min_snr_db": 60.0}, "min_receivers"),
        ({"max_gdop": 1.0, "stations": BUILTIN_STATIONS[:4]}, "max_gdop"),
    ],
)
def test_gates_that_refuse_everything_end_the_run_and_are_named(tmp_path, gates, named):
    with pytest.raises(NothingAccepted, match=named):
        generate(GenerateConfig(**gates), tmp_path / "data", 5, device="cpu")
    assert not (tmp_path / "data").exists()


# Large datasets


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES + 5])
def test_a_dataset_goes_on_without_reading_again_what_is_there(dataset, gated_config, tmp_path, monkeypatch, samples):
    shutil.copytree(dataset[0], tmp_path / "more")
    monkeypatch.setattr(Dataset, "verify", lambda *_: pytest.fail("every shard was read"))

    generate(gated_config, tmp_path / "more", samples, device="cpu", verify="sizes")

    assert len(Dataset(tmp_path / "more")) == samples


def test_a_finished_dataset_that_lost_a_shard_is_not_taken_for_finished(dataset, gated_config, tmp_path):
    shutil.copytree(dataset[0], tmp_path / "less")
    (tmp_path / "less/shards/000000.safetensors").unlink()

    with pytest.raises(ShardCorrupt, match="missing"):
        generate(gated_config, tmp_path / "less", SAMPLES, device="cpu", verify="sizes")


@pytest.mark.parametrize(
    "changes",
    [{}, {"dataset_type": "iq_raw"}, {"use_random_receivers": True}, {"samples_per_shard": 1}],
    ids=["features", "iq", "random", "one"],
)
def test_the_bytes_of_a_dataset_are_known_beforehand(tmp_path, changes):
    config = replace(GenerateConfig(duration_s=0.2, samples_per_shard=4), **changes)
    generate(config, tmp_path / "data", 10, device="cpu")

    actual = sum(file.stat().st_size for file in (tmp_path / "data").rglob("*") if file.is_file())

    assert actual <= dataset_bytes(config, 10) <= actual + 32_768
