"""Training, evaluating and locating as others build on them: JSON, exit codes, what a stopped run leaves."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_commands import answer, refused

from brim.cli import main
from brim.engine.storage.dataset import Dataset

TRAIN_KEYS = {
    "run", "epochs", "samples_per_s", "epoch_seconds", "tier", "ceiling_share", "busy_share", "waiting",
    "best_val_loss", "peak_bytes", "joules_per_sample", "ceiling_spread", "wall_s", "startup_s", "work_s", "overhead",
}  # fmt: skip
SPENT = {"wall_s", "startup_s", "work_s", "overhead"}
EVALUATE_KEYS = {
    "median_error_m", "mean_error_m", "p95_error_m", "crlb_ratio", "coverage", "baselines", "best_baseline", "verdict",
    "differences",
}  # fmt: skip
torch.set_num_threads(1)  # small batches: a second thread only competes

OPTIONS = ["--epochs", "2", "--batch-size", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset to train on, one held out, and a run."""
    path = tmp_path_factory.mktemp("made")
    (path / "quick.toml").write_text("duration_s = 0.2\nsamples_per_shard = 16\n")
    for name, samples, seed in (("data", "64", "1"), ("held", "24", "2")):
        argv = ["rf", "generate", "--out", str(path / name), "--samples", samples, "--seed", seed, "--device", "cpu"]
        assert main([*argv, "--config", str(path / "quick.toml")]) == 0
    assert main(["rf", "train", str(path / "data"), "--out", str(path / "run"), *OPTIONS]) == 0
    return path


# Results


def test_train_prints_the_keys_of_the_contract(made, tmp_path):
    report = answer("rf", "train", made / "data", "--out", tmp_path / "run", *OPTIONS, "--tier", "vram")

    assert set(report) == TRAIN_KEYS
    assert (report["run"], report["epochs"], report["tier"]) == (str(tmp_path / "run"), 2, "vram")
    assert set(report["waiting"]) == {"data", "copy", "host_sync", "logging", "checkpoint"}


def test_evaluate_prints_the_keys_of_the_contract_and_writes_a_page(made, tmp_path):
    page = tmp_path / "evaluation.html"

    found = answer("rf", "evaluate", made / "run", made / "held", "--report", page, "--device", "cpu")

    assert set(found) == EVALUATE_KEYS | SPENT
    assert found["work_s"] + sum(found["overhead"].values()) == pytest.approx(found["wall_s"], abs=1e-3)
    assert set(found["coverage"]) == {"50", "90", "95"}
    assert set(found["baselines"]) >= {"centroid", "strength", "arrival_strength", "grid"}
    assert "<html" in page.read_text()


def observed(path: Path) -> dict:
    """The first sample of a dataset as an observation."""
    data = Dataset(path)
    rows, names = data.load(), [entry["name"] for entry in data.manifest["features"]]
    stations = [
        {
            "name": str(n),
            **dict(zip(("lat", "lon", "alt"), rows["receivers"][0, n].tolist(), strict=True)),
            "features": {
                name: float(rows["features"][0, n, names.index(name), 0])
                for name in ("snr_db", "arrival_difference_us")
            },
        }
        for n in rows["present"][0].nonzero().flatten().tolist()
    ]
    return {"id": "first", "reference": str(int(rows["reference"][0])), "stations": stations}


def test_locate_prints_geojson_near_the_transmitter(made, tmp_path):
    file = tmp_path / "observations.json"
    file.write_text(json.dumps({"observations": [observed(made / "held")]}))

    found = answer("rf", "locate", made / "run", file)

    lat, lon, _ = Dataset(made / "held").load(["transmitter"])["transmitter"][0].tolist()
    assert found["type"] == "FeatureCollection"
    assert [one["geometry"]["type"] for one in found["features"]] == ["Point", *["Polygon"] * 3]
    assert found["features"][0]["geometry"]["coordinates"] == pytest.approx([lon, lat], abs=0.1)


# Bad input: exit code 2, a message, nothing lost


def test_a_missing_dataset_is_named(made, tmp_path):
    assert "nowhere" in refused("rf", "train", tmp_path / "nowhere", "--out", tmp_path / "run")
    assert "nowhere" in refused("rf", "evaluate", made / "run", tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["evaluate", "locate", "export-onnx"])
def test_a_run_that_is_missing_damaged_or_foreign_is_named(made, tmp_path, command):
    more = {"evaluate": [made / "held"], "locate": [tmp_path / "o.json"], "export-onnx": ["--out", tmp_path / "m"]}
    run = Path(shutil.copytree(made / "run", tmp_path / "run"))

    assert "nothing" in refused("rf", command, tmp_path / "nothing", *more[command])
    weights = run / "train/best/model.safetensors"
    weights.write_bytes(b"0" + weights.read_bytes()[1:])
    assert "checksum" in refused("rf", command, run, *more[command])
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"kind": "segmentation"}))
    assert "another model" in refused("rf", command, run, *more[command])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one | {"stations": one["stations"][:2]}, ["2 stations", "3"]),
        (lambda one: one | {"stations": [s | {"features": {}} for s in one["stations"]]}, ["rssi_dbm", "snr_db"]),
        (lambda one: one | {"stations": [s | {"loudness": 3} for s in one["stations"]]}, ["loudness"]),
        (lambda one: [], ["no observations"]),
    ],
)
def test_observations_that_lack_something_say_what(made, tmp_path, change, words):
    file = tmp_path / "observations.json"
    file.write_text(json.dumps(change(observed(made / "held"))))

    message = refused("rf", "locate", made / "run", file)

    assert [word for word in words if word not in message] == []


def test_an_observations_file_that_cannot_be_read_is_named(made, tmp_path):
    (tmp_path / "broken.json").write_text("{")

    assert "missing.json" in refused("rf", "locate", made / "run", tmp_path / "missing.json")
    assert "JSON" in refused("rf", "locate", made / "run", tmp_path / "broken.json")
