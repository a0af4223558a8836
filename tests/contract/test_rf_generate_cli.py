"""The command line as others build on it: JSON, exit codes, what is written, what a killed run leaves."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_commands import answer, brim, refused

from brim.engine.storage.dataset import Dataset
from waiting import PATIENCE_S, until

KEYS = {
    "dataset",
    "accepted",
    "attempted",
    "rejected",
    "seconds",
    "samples_per_s",
    "iq_per_s",
    "device",
    "batch_size",
    "ceiling_share",
    "stages",
    "peak_bytes",
    "ceiling_spread",
    "wall_s",
    "startup_s",
    "work_s",
    "overhead",
}
SAMPLES = 48
MANY = ["--samples", "50000"]  # more than can be made before a signal arrives
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


def test_samples_are_accepted_ones_where_gates_refuse_many(tmp_path):
    out = tmp_path / "data"

    report = answer(
        *("rf", "generate", "--out", out, "--samples", "12", "--tx-power-dbm", "20", "--min-snr-db", "15"),
        *("--max-gdop", "10", "--waveform", "fsk", "--seed", "3", "--memory", "1GiB"),
    )

    dataset = Dataset(out)
    assert report["accepted"] == len(dataset) == 12
    assert sum(report["rejected"].values()) == report["attempted"] - 12 > 0
    assert int(dataset.load(["index"])["index"][-1]) + 1 == report["attempted"]
    assert dataset.manifest["config"]["waveform"] == "fsk"


def test_out_of_memory_halves_the_batch_with_one_warning_and_the_same_bytes(
    undisturbed, options, tmp_path, monkeypatch
):
    out = tmp_path / "data"
    monkeypatch.setenv("BRIM_INJECT_OOM_ABOVE", "5")

    done = brim("rf", "generate", "--out", out, *options, "--batch-size", "16", "--json")

    assert done.code == 0, done.err
    assert done.err.count("warning:") == 1
    assert contents(out / "shards") == contents(undisturbed / "shards")


def test_inspect_says_what_generate_made(undisturbed, tmp_path):
    page = tmp_path / "report.html"

    summary = answer("rf", "inspect", undisturbed, "--report", page)

    assert (summary["samples"], summary["verified"], summary["complete"]) == (SAMPLES, True, True)
    assert "<html" in page.read_text()


@pytest.mark.parametrize("fmt", ["parquet", "hdf5"])
def test_export_writes_a_directory(undisturbed, tmp_path, fmt):
    pytest.importorskip({"parquet": "pyarrow", "hdf5": "h5py"}[fmt])
    out = tmp_path / "out"

    answer("rf", "export", undisturbed, "--format", fmt, "--out", out)

    assert any(out.iterdir())


# Stopped and killed


def start_and_signal(out: Path, options: list[str], number: int) -> subprocess.CompletedProcess[str]:
    """Run until the second shard is there, then send the signal."""
    argv = [sys.executable, "-m", "brim", "rf", "generate", "--out", str(out), *options, *MANY, "--json"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: process.poll() is not None or (out / "shards/000001.safetensors").exists())
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def resume(out: Path, options: list[str], undisturbed: Path, *more: str) -> None:
    """Go on to some more samples; those of the undisturbed run are the same bytes."""
    samples = max(SAMPLES, len(Dataset(out)) + 8)
    resumed = answer("rf", "generate", "--out", out, *options, "--samples", str(samples), *more, "--resume")
    assert resumed["accepted"] == samples
    assert contents(undisturbed / "shards").items() <= contents(out / "shards").items()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_usable_dataset_that_resumes_to_the_same_bytes(undisturbed, options, tmp_path, number):
    out = tmp_path / "data"

    stopped = start_and_signal(out, options, number)

    assert stopped.returncode == 128 + number, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "--resume" in stopped.stderr
    report = json.loads(stopped.stdout)
    usable = Dataset(out)
    usable.verify()
    assert 0 < report["accepted"] == len(usable)
    assert not usable.manifest["complete"]

    resume(out, options, undisturbed)


def test_kill_9_leaves_a_dataset_that_resumes_to_the_same_bytes(undisturbed, options, tmp_path):
    out = tmp_path / "data"

    killed = start_and_signal(out, options, signal.SIGKILL)
    Dataset(out).verify()

    assert killed.returncode == -signal.SIGKILL
    resume(out, options, undisturbed, "--batch-size", "3")


# Bad input: exit code 2, a message, nothing written


def test_a_refusal_of_the_real_command_is_two_and_one_line(tmp_path):
    command = ["rf", "generate", "--out", str(tmp_path / "d"), "--waveform", "nbmf", "--json"]
    done = subprocess.run([sys.executable, "-m", "brim", *command], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'error: --waveform="nbmf" is unknown; did you mean nbfm?\n'
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--preset best", "--preset"),
        ("--waveform morse", "--waveform="),
        ("--loss three_ray", "--loss="),
        ("--dataset-type iq", "--dataset-type="),
        ("--device gpu", "gpu"),
        ("--device cuda:99", "cuda:99"),
        ("--tx-power-dbm 51", "--tx-power-dbm=51"),
        ("--tx-power-dbm -1", "--tx-power-dbm=-1"),
        ("--tx-power-dbm nan", "--tx-power-dbm="),
        ("--min-snr-db 61", "--min-snr-db=61"),
        ("--min-snr-db inf", "--min-snr-db="),
        ("--max-gdop 0", "--max-gdop=0"),
        ("--max-gdop -inf", "--max-gdop="),
        ("--frequency-mhz 0", "--frequency-mhz=0"),
        ("--min-receivers 2", "--min-receivers=2"),
        ("--min-receivers 8", "--min-receivers=8"),
        ("--seed -1", "--seed=-1"),
        ("--samples 0", "--samples"),
        ("--samples -5", "--samples"),
        ("--batch-size 0", "--batch-size"),
        ("--memory 2GigaBytes", "2GigaBytes"),
        ("--memory 0", "0"),
        ("--memory 3", "one sample needs"),
        ("--config missing.toml", "missing.toml"),
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
        ('seed = "seven"\n', "seed"),
        ('preset = "best"\n', "preset"),
        ("max_gdop = nan\n", "max_gdop"),
        ("duration_s = 0.3\n", "duration_s"),
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
        ("name,lat,lon,alt", [*GOOD, "D,45.0,7.0,10"], "'D'"),
        ("name,lat,lon,alt", [*GOOD, "D,95.0,7.0,10"], "line 5"),
        ("name,lat,lon,alt", [*GOOD, "D,45.0,181,10"], "line 5"),
        ("name,lat,lon,alt", [*GOOD, "D,45.0,7.1,99999"], "line 5"),
        ("name,lat,lon,alt", [*GOOD, "D,north,7.1,10"], "line 5"),
        ("name,lat,lon,alt", [*GOOD, "D,nan,7.1,10"], "line 5"),
        ("name,lat,lon,alt", [*GOOD, "D,45.0"], "line 5"),
        ("name,lat,lon,alt", GOOD[:2], "2 stations"),
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


def test_an_occupied_directory_is_left_alone_without_resume(copy, options):
    before = contents(copy)

    message = refused("rf", "generate", "--out", copy, *options)

    assert "--resume" in message
    assert contents(copy) == before


def test_resume_with_another_config_is_refused(copy, options):
    before = contents(copy)

    message = refused("rf", "generate", "--out", copy, *options, "--resume", "--max-gdop", "40")

    assert "max_gdop" in message
    assert contents(copy) == before


def test_resume_of_a_foreign_directory_is_refused(tmp_path, options):
    (tmp_path / "notes.txt").write_text("mine")

    message = refused("rf", "generate", "--out", tmp_path, *options, "--resume")

    assert "manifest.json" in message
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_file_as_out_is_refused(tmp_path, options):
    (tmp_path / "file").write_text("mine")

    assert str(tmp_path / "file") in refused("rf", "generate", "--out", tmp_path / "file", *options)


def damage(copy: Path, how: str) -> None:
    shard = copy / "shards/000001.safetensors"
    data = bytearray(shard.read_bytes())
    if how == "truncated":
        del data[len(data) // 2 :]
    else:
        data[-100] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "altered"])
@pytest.mark.parametrize("command", ["inspect", "report", "export", "resume", "extend"])
def test_a_damaged_shard_is_named_and_nothing_is_written(copy, options, tmp_path, how, command):
    damage(copy, how)
    argv = {
        "inspect": ["inspect", copy],
        "report": ["inspect", copy, "--report", tmp_path / "new"],
        "export": ["export", copy, "--format", "parquet", "--out", tmp_path / "new"],
        "resume": ["generate", "--out", copy, *options, "--resume"],
        "extend": ["generate", "--out", copy, *options, "--samples", str(SAMPLES + 8), "--resume"],
    }[command]
    before = contents(copy)

    message = refused("rf", *argv)

    assert "shard 000001.safetensors" in message
    assert contents(copy) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_a_directory_without_a_dataset_is_named(tmp_path, command):
    more = ["--format", "parquet", "--out", tmp_path / "new"] if command == "export" else []

    message = refused("rf", command, tmp_path / "nothing", *more)

    assert str(tmp_path / "nothing") in message
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_export_format_is_named_with_the_choices(undisturbed, tmp_path):
    message = refused("rf", "export", undisturbed, "--format", "csv", "--out", tmp_path / "new")

    assert "--format" in message
    assert list(tmp_path.iterdir()) == []
