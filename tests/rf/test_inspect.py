import numpy as np
import pytest
import torch
from small_dataset import write_dataset

from brim.rf.config import GenerateConfig
from brim.rf.datasets import summary as module
from brim.rf.datasets.summary import inspect
from brim.rf.features import F

CONFIG = GenerateConfig(duration_s=0.2, tx_power_dbm=20.0, max_gdop=5.0, seed=3)  # rejects a part by each gate


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect") / "data"
    return path, write_dataset(path, CONFIG, attempts=24)


def test_counts_agree_with_the_rows(dataset):
    path, rows = dataset
    found = inspect(path)
    heard = rows["present"].sum(-1)
    assert found.samples == len(rows["index"])
    assert found.attempted == 24
    assert sum(found.rejected.values()) == 24 - found.samples
    assert found.rejected["receivers"] > 0
    assert found.rejected["gdop"] > 0
    assert found.acceptance_rate == found.samples / 24
    assert found.records == heard.sum()
    assert found.receivers_per_sample == {
        "min": heard.min(),
        "mean": pytest.approx(float(heard.double().mean())),
        "max": heard.max(),
    }


def test_quantiles_agree_with_the_rows(dataset):
    path, rows = dataset
    found = inspect(path)
    present = rows["present"]
    measured = rows["features"][:, :, F["snr_db"], 0][present].double()
    assert found.snr_db["measured"]["median"] == pytest.approx(float(np.median(measured)))
    assert found.snr_db["link"]["min"] >= CONFIG.min_snr_db
    assert found.gdop["max"] == pytest.approx(float(rows["gdop"].max()))
    assert found.gdop["max"] <= CONFIG.max_gdop
    assert found.crlb_m["p25"] == pytest.approx(float(np.quantile(rows["crlb_m"].double(), 0.25)))
    assert found.quantiles_from == found.samples


def test_bounds_are_of_valid_receivers_and_all_transmitters(dataset):
    path, rows = dataset
    found = inspect(path)
    lat, lon = rows["transmitter"][:, 0], rows["transmitter"][:, 1]
    assert found.transmitters["lat"] == [float(lat.min()), float(lat.max())]
    assert found.transmitters["lon"] == [float(lon.min()), float(lon.max())]
    assert found.receivers["lat"] == [44.395, 45.478]
    assert found.receivers["alt"] == [100.0, 700.0]


def test_stopped_dataset_is_counted_by_its_running_totals(tmp_path):
    rows = write_dataset(tmp_path / "stopped", CONFIG, attempts=24, finish=False)
    found = inspect(tmp_path / "stopped")
    assert not found.complete
    assert found.throughput is None
    assert found.attempted == int(rows["index"][-1]) + 1
    assert found.attempted == found.samples + sum(found.rejected.values())


def test_large_datasets_are_thinned_evenly_across_shards(dataset, monkeypatch):
    path, rows = dataset
    monkeypatch.setattr(module, "MAX_KEPT", 5)
    step = -(-len(rows["index"]) // 5)
    kept = module.survey(path).columns
    assert torch.equal(torch.from_numpy(kept.gdop), rows["gdop"][::step])
    assert torch.equal(torch.from_numpy(kept.transmitter), rows["transmitter"][::step])
    assert inspect(path).records == rows["present"].sum()


def test_arrival_errors_leave_out_the_reference_and_the_unmeasured(dataset, tmp_path):
    path, rows = dataset
    heard, samples = int(rows["present"].sum()), len(rows["index"])
    assert len(module.survey(path).columns.arrival_error_us) == heard - samples
    write_dataset(tmp_path / "cw", GenerateConfig(duration_s=0.2, waveform="cw"), attempts=4)
    assert len(module.survey(tmp_path / "cw").columns.arrival_error_us) == 0
