import hashlib
import json
import resource
import warnings

import h5py
import numpy as np
import pyarrow.dataset
import pyarrow.parquet
import pytest
import sigmf.validate
from sigmf.sigmffile import fromfile
from small_dataset import write_dataset

from brim.engine.storage import Dataset, ShardWriter
from brim.errors import ConfigError, DatasetError, StorageError
from brim.rf.config import BUILTIN_STATIONS, GenerateConfig
from brim.rf.datasets.formats import FORMATS, export
from brim.rf.features import FEATURES, STATISTICS
from brim.rf.generation.rows import TRUTH

CONFIG = GenerateConfig(duration_s=0.2, use_random_receivers=True, min_snr_db=15.0)
IQ_CONFIG = GenerateConfig(duration_s=0.2, dataset_type="iq_raw", tx_power_dbm=25.0, seed=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "features"
    return path, write_dataset(path, CONFIG)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "iq"
    return path, write_dataset(path, IQ_CONFIG, attempts=6, shard=2)


# Parquet


@pytest.fixture(scope="module")
def parquet(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("parquet") / "out"
    return out, export(dataset[0], out, "parquet")


def test_parquet_has_a_row_per_sample_and_receiver(dataset, parquet):
    _, rows = dataset
    out, told = parquet
    table = pyarrow.dataset.dataset(out).to_table()
    valid = rows["valid"].numpy()
    sample, receiver = np.nonzero(valid)
    assert not valid.all()
    assert told["records"] == len(table) == valid.sum()
    np.testing.assert_array_equal(table["index"], rows["index"].numpy()[sample])
    np.testing.assert_array_equal(table["receiver"], receiver)
    np.testing.assert_array_equal(table["present"], rows["present"].numpy()[valid])
    np.testing.assert_array_equal(table["reference"], rows["reference"].numpy()[sample])
    assert not np.asarray(table["present"]).all()


def test_parquet_columns_hold_the_tensors(dataset, parquet):
    _, rows = dataset
    table = pyarrow.dataset.dataset(parquet[0]).to_table()
    valid = rows["valid"].numpy()
    sample = np.nonzero(valid)[0]
    for k, (name, _) in enumerate(FEATURES):
        for s, statistic in enumerate(STATISTICS):
            np.testing.assert_array_equal(table[f"{name}_{statistic}"], rows["features"].numpy()[valid, k, s])
    for k, (name, _) in enumerate(TRUTH):
        np.testing.assert_array_equal(table[f"truth_{name}"], rows["truth"].numpy()[valid, k])
    for k, name in enumerate(("lat", "lon", "alt")):
        np.testing.assert_array_equal(table[name], rows["receivers"].numpy()[valid, k])
        np.testing.assert_array_equal(table[f"tx_{name}"], rows["transmitter"].numpy()[sample, k])
    for name in ("gdop", "crlb_m"):
        np.testing.assert_array_equal(table[name], rows[name].numpy()[sample])


def test_parquet_columns_carry_units(dataset, parquet):
    schema = pyarrow.parquet.read_schema(parquet[0] / "part-000000.parquet")
    units = {field.name: field.metadata[b"unit"].decode() for field in schema}
    assert units["rssi_dbm_mean"] == "dBm"
    assert units["truth_delay_s"] == "s"
    assert units["crlb_m"] == units["tx_alt"] == "m"
    assert all(units.values())
    assert json.loads(schema.metadata[b"brim"])["config"] == Dataset(dataset[0]).manifest["config"]


# HDF5


def test_hdf5_holds_the_tensors(dataset, tmp_path):
    path, rows = dataset
    told = export(path, tmp_path / "out", "hdf5")
    with h5py.File(tmp_path / "out" / "dataset.h5") as file:
        assert set(file) == set(rows)
        for name, tensor in rows.items():
            np.testing.assert_array_equal(file[name][:], tensor.numpy())
            assert file[name].dtype == tensor.numpy().dtype
    assert told["records"] == int(rows["valid"].sum())
    assert told["files"] == 1


def test_hdf5_attributes_carry_names_units_and_the_manifest(dataset, tmp_path):
    path, _ = dataset
    export(path, tmp_path / "out", "hdf5")
    with h5py.File(tmp_path / "out" / "dataset.h5") as file:
        assert list(zip(file["features"].attrs["names"], file["features"].attrs["units"], strict=True)) == list(
            FEATURES
        )
        assert list(zip(file["truth"].attrs["names"], file["truth"].attrs["units"], strict=True)) == list(TRUTH)
        assert list(file["features"].attrs["statistics"]) == list(STATISTICS)
        assert list(file["features"].attrs["axes"]) == ["sample", "receiver", "feature", "statistic"]
        assert list(file["transmitter"].attrs["units"]) == ["deg", "deg", "m"]
        assert file["crlb_m"].attrs["unit"] == "m"
        manifest = json.loads(file.attrs["manifest"])
    assert manifest["config"] == Dataset(path).manifest["config"]
    assert "shards" not in manifest


def test_hdf5_takes_a_manifest_of_many_stations(dataset, tmp_path):
    header = {"kind": "rf", "config": {"stations": [{"name": f"station {k}" * 10} for k in range(2_000)]}}
    with ShardWriter(tmp_path / "data", header, items_per_shard=50) as writer:
        writer.append(dataset[1], {})
    export(tmp_path / "data", tmp_path / "out", "hdf5")
    with h5py.File(tmp_path / "out" / "dataset.h5") as file:
        assert json.loads(file.attrs["manifest"])["config"] == header["config"]


# SigMF


@pytest.fixture(scope="module")
def recordings(recorded, tmp_path_factory):
    out = tmp_path_factory.mktemp("sigmf") / "out"
    return out, export(recorded[0], out, "sigmf")


def test_sigmf_has_a_recording_per_receiver_that_heard(recorded, recordings):
    _, rows = recorded
    out, told = recordings
    index = rows["index"].tolist()
    expected = {f"sample_{index[s]}_rx{r}" for s, r in rows["present"].nonzero().tolist()}
    assert not rows["present"].all()
    assert {file.stem for file in out.glob("*.sigmf-meta")} == expected
    assert {file.stem for file in out.glob("*.sigmf-data")} == expected
    assert told["records"] == len(expected)
    assert told["files"] == 2 * len(expected)


def test_sigmf_validates_and_reads_back(recorded, recordings):
    _, rows = recorded
    for s, r in rows["present"].nonzero().tolist():
        name = f"sample_{int(rows['index'][s])}_rx{r}"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recording = fromfile(recordings[0] / f"{name}.sigmf-meta")  # compares the sha512 too
            recording.validate()
        np.testing.assert_array_equal(recording.read_samples(), rows["iq"][s, r].numpy())


def test_sigmf_metadata_says_what_was_recorded(recorded, recordings):
    _, rows = recorded
    s, r = rows["present"].nonzero()[-1].tolist()
    file = recordings[0] / f"sample_{int(rows['index'][s])}_rx{r}.sigmf-meta"
    meta = json.loads(file.read_text(encoding="utf-8"))
    sigmf.validate.validate(meta)
    top, capture, note = meta["global"], meta["captures"][0], meta["annotations"][0]
    assert (top["core:datatype"], top["core:sample_rate"]) == ("cf32_le", 200_000)
    content = file.with_suffix(".sigmf-data").read_bytes()
    assert top["core:sha512"] == hashlib.sha512(content).hexdigest()
    assert [extension["name"] for extension in top["core:extensions"]] == ["brim"]
    station = BUILTIN_STATIONS[r]
    assert capture["core:frequency"] == 145e6
    assert (note["core:freq_lower_edge"], note["core:freq_upper_edge"]) == (145e6 - 6_250, 145e6 + 6_250)
    assert top["brim:station"] == station.name
    assert (
        capture["core:datetime"]
        == f"2000-01-01T00:{20 * note['brim:index'] // 60:02}:{20 * note['brim:index'] % 60:02}.000000000Z"
    )
    assert capture["core:geolocation"] == {"type": "Point", "coordinates": [station.lon, station.lat, station.alt]}
    assert (note["core:sample_start"], note["core:sample_count"]) == (0, 40_000)
    assert note["brim:truth"] == dict(zip([name for name, _ in TRUTH], rows["truth"][s, r].tolist(), strict=True))
    lat, lon, alt = rows["transmitter"][s].tolist()
    assert note["brim:transmitter"]["coordinates"] == [lon, lat, alt]
    assert note["brim:reference"] == (int(rows["reference"][s]) == r)
    assert note["brim:seed"] == 4


def test_sigmf_without_iq_is_refused(dataset, tmp_path):
    with pytest.raises(ConfigError, match="dataset_type iq_raw"):
        export(dataset[0], tmp_path / "out", "sigmf")
    assert list(tmp_path.iterdir()) == []


# What is refused


@pytest.mark.parametrize("fmt", ["parquet", "hdf5"])
def test_occupied_directory_is_refused_and_left_alone(dataset, tmp_path, fmt):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(DatasetError, match="is not empty"):
        export(dataset[0], tmp_path / "out", fmt)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("inside", [".", "new/deeper", "../features/new"])
def test_target_inside_the_dataset_is_refused(dataset, inside):
    path, _ = dataset
    before = sorted(path.rglob("*"))
    with pytest.raises(DatasetError, match="is inside the dataset"):
        export(path, path / inside, "parquet")
    assert sorted(path.rglob("*")) == before


# The file system


@pytest.mark.parametrize("fmt", FORMATS)
def test_full_disk_is_a_storage_error_and_leaves_nothing(recorded, tmp_path, fmt):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # a write beyond fails like one on a full disk
    try:
        with pytest.raises(StorageError):
            export(recorded[0], tmp_path / "out", fmt)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
