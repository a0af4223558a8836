"""`brim rf generate | inspect | export` as others build on them: JSON, exit codes, what is written."""

import json
import shutil
from pathlib import Path

import pytest
from cli_commands import answer, brim, refused

from brim.engine.storage.dataset import Dataset

KEYS = {
    "dataset", "accepted", "attempted", "rejected", "seconds", "samples_per_s", "iq_per_s", "device", "batch_size",
    "ceiling_share", "stages", "peak_bytes", "ceiling_spread", "wall_s", "startup_s", "work_s", "overhead",
}  # fmt: skip
SAMPLES = 48
GOOD = ["A,45.0,7.0,100", "B,45.2,7.5,200", "C,44.8,7.3,150"]


def contents(path: Path) -> dict[str, bytes]:
    """Every file under a path, by its name there."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def stations(path: Path, *lines: str, header: str = "name,lat,lon,alt") -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Short records, small shards: everything is quick."""
    file = tmp_path_factory.mktemp("config") / "quick.toml"
    file.write_text("duration_s = 0.2\nsamples_per_shard = 8\n")
    return ["--samples", str(SAMPLES), "--config", str(file), "--device", "cpu"]


@pytest.fixture(scope="module")
def undisturbed(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "data"
    done = brim("rf", "generate", "--out", out, *options, "--json")
    assert done.code == 0, done.err
    (out.parent / "stdout").write_text(done.out)
    return out


@pytest.fixture
def copy(undisturbed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(undisturbed, tmp_path / "copy"))


# Results


def test_json_is_one_object_with_exactly_the_keys_of_the_contract(undisturbed):
    text = (undisturbed.parent / "stdout").read_text()

    report = json.loads(text)

    assert text.count("\n") == 1
    assert set(report) == KEYS
    assert set(report["rejected"]) == {"receivers", "gdop"}
    assert report["dataset"] == str(undisturbed)
    assert report["accepted"] == len(Dataset(undisturbed)) == SAMPLES
    assert report["attempted"] == report["accepted"] + sum(report["rejected"].values())
    assert report["device"] == "cpu"
    assert report["samples_per_s"] > 0
    assert report["peak_bytes"] > 0


def test_inspect_says_what_generate_made(undisturbed, tmp_path):
    page = tmp_path / "report.html"

    summary = answer("rf", "inspect", undisturbed, "--report", page)

    assert (summary["samples"], summary["verified"], summary["complete"]) == (SAMPLES, True, True)
    assert "<html" in page.read_text()


# Bad input: exit code 2, a message, nothing written


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--device gpu", "gpu"),
        ("--memory 3", "one sample needs"),
        ("--stations missing.csv", "missing.csv"),
        ("--min-snr-db 60 --tx-power-dbm 0", "60"),
    ],
)
def test_a_bad_option_is_named_and_nothing_is_written(tmp_path, flags, word):
    message = refused("rf", "generate", "--out", tmp_path / "d", "--samples", "5", *flags.split())

    assert word in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("power = 3\n", "power"),
        ("seed = \n", "TOML"),
    ],
)
def test_a_bad_config_file_is_named_and_nothing_is_written(tmp_path, text, word):
    file = tmp_path / "c.toml"
    file.write_text(text)

    message = refused("rf", "generate", "--out", tmp_path / "d", "--config", file)

    assert word in message
    assert str(file) in message
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("header", "lines", "word"),
    [
        ("name,lat,alt", ["A,45,100"], "lon"),
        ("name,lat,lon,alt", [], "no stations"),
        ("name,lat,lon,alt", [*GOOD, "A,44.5,7.1,10"], "'A'"),
        ("name,lat,lon,alt", [*GOOD, "D,45.0"], "line 5"),
    ],
)
def test_a_bad_station_file_is_named_and_nothing_is_written(tmp_path, header, lines, word):
    file = stations(tmp_path / "s.csv", *lines, header=header)

    message = refused("rf", "generate", "--out", tmp_path / "d", "--stations", file)

    assert word in message
    assert list(tmp_path.iterdir()) == [file]


def test_a_geometry_that_accepts_nothing_names_its_gate(tmp_path):
    file = stations(tmp_path / "s.csv", *GOOD)  # three receivers reach a GDOP of 1.29 at best

    message = refused("rf", "generate", "--out", tmp_path / "d", "--stations", file, "--max-gdop", "1")

    assert "--max-gdop" in message or "max_gdop" in message
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("command", ["inspect", "report", "export", "resume"])
def test_a_damaged_shard_is_named_and_nothing_is_written(copy, options, tmp_path, command):
    shard = copy / "shards/000001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    argv = {
        "inspect": ["inspect", copy],
        "report": ["inspect", copy, "--report", tmp_path / "new"],
        "export": ["export", copy, "--format", "parquet", "--out", tmp_path / "new"],
        "resume": ["generate", "--out", copy, *options, "--resume"],
    }[command]
    before = contents(copy)

    message = refused("rf", *argv)

    assert "shard 000001.safetensors" in message
    assert contents(copy) == before
    assert not (tmp_path / "new").exists()
