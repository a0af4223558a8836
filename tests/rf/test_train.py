import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from gaussian_rows import solver_estimate
from geographiclib.geodesic import Geodesic
from small_dataset import write_dataset

import brim
from brim.engine.rows import DatasetSource
from brim.engine.storage import Dataset
from brim.engine.training.checkpoint import load_checkpoint
from brim.errors import CheckpointError, ConfigError, DatasetError, ShardCorrupt
from brim.rf.config import GenerateConfig, LocatorTraining
from brim.rf.datasets import export
from brim.rf.features import F
from brim.rf.location import evaluate_run, load_run, locate_documents, split, train
from brim.rf.location.evaluate import parse_observations
from brim.rf.location.model import Locator, mixture_nll, prepare
from brim.rf.location.run import MEASURED
from brim.rf.location.solver import NoiseModel, calibrate, target
from brim.rf.location.training import _rows, _Solver

CONFIG = GenerateConfig(duration_s=0.2, tx_power_dbm=45.0, seed=1)
QUICK = LocatorTraining(epochs=3, batch_size=16, learning_rate=0.003)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("train") / "data"
    write_dataset(path, CONFIG, attempts=80, shard=32)
    return path


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    path = tmp_path_factory.mktemp("held") / "data"
    write_dataset(path, replace(CONFIG, seed=2), attempts=20, shard=16)
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    train([data], out, QUICK, device="cpu")
    return out


@pytest.fixture(scope="module")
def evaluation(run, held_out):
    return evaluate_run(run, held_out, device="cpu")


def test_a_run_is_loaded_by_its_directory_alone(run, held_out, evaluation):
    loaded = brim.load_run(run, device="cpu")

    assert loaded.config["epochs"] == QUICK.epochs
    assert loaded.metrics["best_val_loss"] == min(line["val_loss"] for line in loaded.history if "val_loss" in line)
    assert torch.equal(loaded.predict(held_out).position_en, evaluation.estimate.position_en)
    one = loaded.predict(brim.Dataset(held_out)[0]).position_en
    assert torch.allclose(one, evaluation.estimate.position_en[:1], atol=1.0)
    table = evaluation.to_pandas()
    assert table["error_m"].median() == pytest.approx(evaluation.metrics["median_error_m"], rel=0.2)
    for row in table.to_dict("records"):
        line = Geodesic.WGS84.Inverse(row["lat"], row["lon"], row["estimated_lat"], row["estimated_lon"])
        assert line["s12"] == pytest.approx(row["error_m"], rel=0.01, abs=1)
    with pytest.raises(ConfigError, match="cannot be predicted; give a dataset"):
        loaded.predict(3)


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "copy"))


def edit(file: Path, **changes) -> None:
    """Change values of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def weights(run: Path, which: str = "last") -> dict[str, torch.Tensor]:
    return load_checkpoint(run / "train" / which)[0]["model"]


# Configuration and split


def test_the_split_depends_on_the_seed_and_loses_nobody():
    rows, held = split(50, QUICK)

    assert (len(rows), len(held)) == (45, 5)
    assert torch.equal(torch.cat([rows, held]).sort().values, torch.arange(50))
    assert torch.equal(split(50, QUICK)[1], held)
    assert not torch.equal(split(50, replace(QUICK, seed=1))[1], held)


# Training


def test_a_run_says_what_it_is_of(run, data):
    about = json.loads((run / "run.json").read_text())

    assert (about["format_version"], about["kind"]) == (1, "rf-locator")
    assert about["datasets"] == [{"name": "data", "seed": 1, "samples": 80}]
    assert about["split"] == {"train": 72, "validation": 8}
    assert about["generation"]["tx_power_dbm"] == 45.0
    assert str(data.parent) not in (run / "run.json").read_text()


def test_training_looks_at_its_rows_alone_and_validates_on_the_others(run, data):
    loaded, rows = load_run(run), Dataset(data).load()
    mine, held = ({name: value[part] for name, value in rows.items()} for part in split(80, QUICK))
    noise = calibrate(mine, CONFIG, power_known=False)
    fresh = Locator(loaded.module.config)
    fresh.set_statistics(mine["features"], mine["present"])
    estimate = loaded.predict(held)
    true = target(held, estimate.origin, CONFIG)

    assert asdict(loaded.noise) == pytest.approx(asdict(noise), rel=1e-6)
    assert fresh.feature_mean == pytest.approx(loaded.module.feature_mean, rel=1e-5, abs=1e-6)
    assert fresh.feature_std == pytest.approx(loaded.module.feature_std, rel=1e-5, abs=1e-6)
    history = brim.load_run(run, device="cpu").history
    scores = min((line for line in history if "val_loss" in line), key=lambda line: line["val_loss"])
    assert scores["val_loss"] == pytest.approx(float(mixture_nll(estimate, true).mean()), rel=1e-4)
    error = (estimate.position_en - true).norm(dim=-1)
    assert scores["val_median_error_m"] == pytest.approx(float(error.median()), rel=1e-3)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "brim" / "solved"


def solved_by(data, out, **changes):
    """Rows that a training solved."""
    rows = []
    train(
        [data], out, replace(QUICK, **changes), device="cpu",
        progress=lambda now: rows.append(now.step) if now.phase == "prepare" else None,
    )  # fmt: skip
    return max(rows, default=0)


def test_rows_are_solved_once(data, run, cache, tmp_path):
    first, second = solved_by(data, tmp_path / "a"), solved_by(data, tmp_path / "b", epochs=4)

    assert first > 0
    assert second == 0
    assert len(list(cache.iterdir())) == 1
    assert all(torch.equal(value, weights(tmp_path / "a")[name]) for name, value in weights(run).items())


def test_solved_rows_in_the_cache_are_those_of_their_link_noise_and_power(data, cache):
    source, device = DatasetSource([data], (*MEASURED, "transmitter")), torch.device("cpu")
    rows = {name: value[:8] for name, value in Dataset(data).load().items()}
    settings = [
        (CONFIG, NoiseModel(), True),
        (CONFIG, NoiseModel(), False),
        (CONFIG, NoiseModel(timing_us=5.0), True),
        (replace(CONFIG, loss_exponent=2.5), NoiseModel(), True),
    ]
    for config, noise, power_known in settings * 2:
        kept = _Solver(source, config, noise, power_known, device, None, None).kept()
        found = _rows(kept, torch.arange(8), ("solver_position",))["solver_position"]
        expected = prepare(rows, config, noise, power_known=power_known)["solver_position"]
        assert found == pytest.approx(expected, abs=0.1)
    assert len(list(cache.iterdir())) == len(settings)


def damage_shard(place):
    shard = place / "shards" / "000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")


def other_rows(place):
    edit(place / "manifest.json", kind="rf", complete=False)


def a_file(place):
    shutil.rmtree(place)
    place.write_text("in the way")


@pytest.mark.parametrize("damage", [damage_shard, other_rows, a_file])
def test_a_damaged_cache_of_solved_rows_is_not_used(data, run, cache, tmp_path, caplog, damage):
    solved_by(data, tmp_path / "a")
    damage(next(cache.iterdir()))

    assert solved_by(data, tmp_path / "b") > 0

    assert all(torch.equal(value, weights(tmp_path / "b")[name]) for name, value in weights(run).items())
    assert caplog.text.count("solved rows in the cache are not used") == 1


def test_without_a_cache_rows_are_solved_in_memory(data, run, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert solved_by(data, tmp_path / "a") > 0

    assert caplog.text.count("nothing is kept in") == 1
    assert all(torch.equal(value, weights(tmp_path / "a")[name]) for name, value in weights(run).items())


def test_a_pure_network_trains_from_a_window_too(data, tmp_path):
    report = train([data], tmp_path / "run", replace(QUICK, epochs=1, tier="window", hybrid=False), device="cpu")

    assert report.tier == "window"
    assert math.isfinite(report.best_val_loss)
    assert not load_run(tmp_path / "run").module.config.hybrid


def test_a_run_is_not_begun_over_another(run, data, held_out):
    with pytest.raises(CheckpointError, match="add resume to continue it"):
        train([data], run, QUICK, device="cpu", resume=False)
    with pytest.raises(CheckpointError, match="datasets was"):
        train([held_out], run, QUICK, device="cpu")
    with pytest.raises(CheckpointError, match="seed was 0 and is 3"):
        train([data], run, replace(QUICK, seed=3), device="cpu")


def test_a_flipped_bit_is_found_before_training_evaluation_and_export(data, run, tmp_path):
    damaged = Path(shutil.copytree(data, tmp_path / "data"))
    train([damaged], tmp_path / "before", replace(QUICK, epochs=1), device="cpu")  # a cached check must not hide it
    shard = damaged / "shards" / "000001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    shard.write_bytes(content)

    for use in (
        lambda: train([damaged], tmp_path / "run", QUICK, device="cpu"),
        lambda: evaluate_run(run, damaged, device="cpu"),
        lambda: export(damaged, tmp_path / "out", "parquet"),
    ):
        with pytest.raises(ShardCorrupt, match=r"000001\.safetensors: checksum differs"):
            use()
    assert not (tmp_path / "run" / "train").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"features": [{"name": "rssi_dbm", "unit": "dBm"}]}, "differ in .features|features differ"),
        ({"config": CONFIG.as_dict() | {"loss_exponent": 2.5}}, "loss_exponent"),
        ({"config": {"loss": "magic"}}, "config"),
    ],
)
def test_datasets_that_do_not_go_together_are_refused(data, tmp_path, change, word):
    other = Path(shutil.copytree(data, tmp_path / "other"))
    edit(other / "manifest.json", **change)

    for paths in ([data, other], [other, data]):
        with pytest.raises(DatasetError, match=word):
            train(paths, tmp_path / "run", QUICK, device="cpu")
    assert not (tmp_path / "run").exists()


def test_datasets_of_other_power_and_recordings_are_trained_together(data, held_out, tmp_path):
    louder = Path(shutil.copytree(data, tmp_path / "louder"))
    edit(louder / "manifest.json", config=CONFIG.as_dict() | {"tx_power_dbm": 30.0})
    real = Path(shutil.copytree(held_out, tmp_path / "real"))
    edit(real / "manifest.json", source="recordings", config=CONFIG.as_dict() | {"frequency_mhz": 433.0})
    config = replace(QUICK, epochs=1, real_weight=5.0)

    report = train([real, data, louder], tmp_path / "run", config, device="cpu")

    assert report.epochs == 1
    loaded = load_run(tmp_path / "run")
    assert loaded.generation == CONFIG
    rows = Dataset(held_out).load()
    weaker = rows | {"features": rows["features"].clone()}
    for name in ("rssi_dbm", "noise_floor_dbm", "psd_dbm_per_hz"):  # receivers whose level nobody knows
        weaker["features"][:, :, F[name], [0, 2, 3]] -= 40.0
    assert torch.allclose(loaded.predict(rows).position_en, loaded.predict(weaker).position_en, atol=1.0)
    with pytest.raises(DatasetError, match="tx_power_dbm"):
        train([data, louder], tmp_path / "known", replace(QUICK, power="known"), device="cpu")
    with pytest.raises(DatasetError, match="recordings"):
        train([data, real], tmp_path / "known", replace(QUICK, power="known"), device="cpu")


def test_the_weight_of_recordings_is_theirs_in_the_loss(data, held_out, tmp_path):
    real = Path(shutil.copytree(held_out, tmp_path / "real"))
    edit(real / "manifest.json", source="recordings")
    runs = [tmp_path / "even", tmp_path / "heavy"]
    for run, weight in zip(runs, (1.0, 50.0), strict=True):
        train([data, real], run, replace(QUICK, epochs=1, real_weight=weight), device="cpu")

    assert any(not torch.equal(value, weights(runs[1])[name]) for name, value in weights(runs[0]).items())


# Loading


def test_what_held_out_samples_asked_for_widens_the_regions(copy, held_out, data, tmp_path, monkeypatch):
    before, rows = load_run(copy), Dataset(held_out).load()
    edit(copy / "run.json", stretch=1.5)

    narrow, wide = before.predict(rows), load_run(copy).predict(rows)

    torch.testing.assert_close(wide.roots, 1.5 * narrow.roots)
    torch.testing.assert_close(wide.means, narrow.means)
    assert "stretch" not in before.about  # too few were held out
    monkeypatch.setattr("brim.rf.location.training._LEAST_STRETCHED", 1)
    monkeypatch.setattr("brim.rf.location.training.fitted_stretch", lambda estimate, true: 1.25)
    train([data], tmp_path / "run", replace(QUICK, epochs=1), device="cpu")
    assert load_run(tmp_path / "run").module.stretch == 1.25


def test_a_run_no_better_than_the_solver_answers_as_the_solver(copy, held_out):
    edit(copy / "run.json", untrained_val_loss=-1e9)
    loaded, rows = load_run(copy), Dataset(held_out).load()

    estimate = loaded.predict(rows)

    solver = solver_estimate(prepare(rows, loaded.generation, loaded.noise, power_known=False))
    torch.testing.assert_close(estimate.position_en, solver.position_en, rtol=1e-5, atol=0.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "yolo"}, "another model"),
        ({"noise": {"timing_us": -1}}, "timing_us"),
        ({"stretch": 0}, "stretch"),
        ({"model": {"width": 32}}, "another model"),
        ({"model": {"features": ["loudness"]}}, "features differ"),
    ],
)
def test_a_run_of_something_else_is_refused(copy, change, words):
    edit(copy / "run.json", **change)

    with pytest.raises(CheckpointError, match=words):
        load_run(copy)


def test_a_missing_or_damaged_run_is_named(copy, tmp_path):
    with pytest.raises(CheckpointError, match=r"no run\.json"):
        load_run(tmp_path)
    file = copy / "train/best/model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="checksum"):
        load_run(copy)


# Evaluating, locating, exporting


def observed(data):
    """The first sample of a dataset as a person would write it down."""
    rows = {name: value[0] for name, value in Dataset(data).load().items()}
    columns = ("snr_db", "arrival_difference_us")
    stations = [
        {"name": f"S{n}", **dict(zip(("lat", "lon", "alt"), rows["receivers"][n].tolist(), strict=True))}
        | {name: float(rows["features"][n, F[name], 0]) for name in columns}
        for n in rows["present"].nonzero().flatten().tolist()
    ]
    return {"id": "one", "reference": f"S{int(rows['reference'])}", "stations": stations}


def test_a_network_answers_wider_where_arrivals_contradict_each_other(run, held_out):
    clash = observed(held_out)
    for station, late_us in zip(clash["stations"], (9, -7, 8, -9, 6, -8, 7), strict=False):
        station["arrival_difference_us"] += late_us * (station["name"] != clash["reference"])
    (plain,), (wide,) = (locate_documents([("o", one)], run=run) for one in (observed(held_out), clash))
    about = wide.features[0]["properties"]
    _, rows = parse_observations(wide.prepared.document, CONFIG)
    own = load_run(run).predict(rows).covariance[0]

    assert plain.features[0]["properties"]["widened"] == 1
    assert about["left_out"] == []
    assert about["widened"] == pytest.approx(about["chi2_dof"], rel=1e-3)
    assert about["widened"] > 2
    assert torch.tensor(about["covariance_m2"]) == pytest.approx(about["widened"] * own, rel=1e-3)


def test_a_network_cannot_answer_without_its_reference(run, held_out):
    late = observed(held_out)
    for station in late["stations"]:
        station["arrival_difference_us"] += 90.0 * (station["name"] != late["reference"])
    with pytest.raises(
        ConfigError, match=rf"the reference '{late['reference']}' is left out \(its arrival is .* earlier"
    ):
        locate_documents([("o", late)], run=run)


def test_evaluation_on_another_link_is_said_aloud(run, held_out, tmp_path, caplog):
    other = Path(shutil.copytree(held_out, tmp_path / "other"))
    edit(other / "manifest.json", config=CONFIG.as_dict() | {"shadowing_db": 8.0})

    evaluate_run(run, other, device="cpu")

    assert "shadowing_db is 8.0" in caplog.text
