import ast
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import brim.doctor
from brim import __version__
from brim.cli import main, terminal
from brim.cli.terminal import Stop
from brim.errors import ConfigError
from brim.rf import PRESETS, GenerateConfig, GenerateReport
from brim.segmentation.config import DEFAULT_WEIGHTS, FINE_TUNING
from waiting import PATIENCE_S

STATIONS = "name,lat,lon,alt\nA,45.0,7.0,100\nB,45.2,7.5,200\nC,44.8,7.3,150\nD,45.1,7.9,300\n"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Commands hand their work to this instead of generating."""
    calls: list[dict] = []

    def fake(config, out, samples, *, stop, progress, **options):
        calls.append({"config": config, "out": out, "samples": samples, **options})
        return report(accepted=samples)

    monkeypatch.setattr("brim.rf.generate", fake)
    return calls


def report(**changes) -> GenerateReport:
    values = {
        "dataset": "data", "accepted": 10, "attempted": 20, "rejected": {"receivers": 7, "gdop": 3}, "seconds": 2.0,
        "samples_per_s": 5.0, "iq_per_s": 35.0, "device": "cpu", "batch_size": 4, "ceiling_share": 0.93, "stages": {},
        "peak_bytes": 1,
    }  # fmt: skip
    return GenerateReport(**{**values, **changes})


def config_of(calls: list[dict], *argv: str) -> GenerateConfig:
    assert main(["rf", "generate", "--out", "data", *argv]) == 0
    return calls[-1]["config"]


# Starting


WITHOUT_TORCH = [
    ("--help", 0),
    ("--version", 0),
    ("rf generate --help", 0),
    ("rf generate --out x --samples many", 2),
    ("rf generate --out x --max-gdop 0", 2),
    ("rf train data --out x --epochs 0", 2),
    ("segment predict --help", 0),
    ("segment predict i --model hrnet --weights w --out x --tile 3", 2),
    ("segment train --images i --masks m --model hrnt --out x", 2),
    ("segment tune --size 3", 2),
    ("sequence train corpus --out x --mode other", 2),
    ("jobs list --status odd", 2),
    ("serve --workers 0", 2),
]


def test_a_command_imports_before_its_display_begins():
    """What it imports later would be counted as "other": torch, in `segment predict`."""
    late = [
        f"{file.name}:{inner.lineno}: {ast.unparse(inner)}"
        for file in (Path(brim.cli.__file__).parent / f"{name}.py" for name in ("rf", "segment", "sequence", "train"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.With) and any("Display(" in ast.unparse(item) for item in node.items)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert late == []


def test_help_and_wrong_options_import_no_torch(tmp_path):
    code = (
        "import sys; from brim.cli import main\n"
        f"for argv, code in {WITHOUT_TORCH}: assert main(argv.split()) == code, argv\n"
        "assert 'torch' not in sys.modules"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 0, done.stderr


def test_the_module_is_the_command_with_its_exit_code():
    done = subprocess.run([sys.executable, "-m", "brim", "jobs", "list", "--status", "odd"], stderr=subprocess.DEVNULL)

    assert done.returncode == 2


def test_no_command_shows_the_help_and_fails(capsys):
    assert main([]) == 2

    assert "Usage: brim" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["rf", "generate"], ["--out"]),
        (["rf", "generate", "--out", "x", "--samples", "1.5"], ["--samples", "1.5", "whole number"]),
        (["rf", "generate", "--out", "x", "--max-gdop", "wide"], ["--max-gdop", "wide", "number"]),
        (["rf", "generate", "--out", "x", "--samples", "0"], ["--samples", "at least 1"]),
    ],
)
def test_a_usage_error_names_the_value_and_exits_with_2(argv, words, capsys):
    assert main(argv) == 2

    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert all(word in captured.err for word in words)
    assert captured.out == ""


# Options


def test_flags_left_out_change_nothing(calls):
    assert config_of(calls) == GenerateConfig()
    assert calls[0] == {
        "config": GenerateConfig(), "out": "data", "samples": 1000, "device": "auto", "pool": None,
        "allow_mixed": False, "batch_size": None, "memory": None, "resume": False, "verify": "all",
    }  # fmt: skip


def test_every_flag_reaches_the_config(calls):
    flags = "--frequency-mhz 433 --tx-power-dbm 30 --min-snr-db -3 --max-gdop 30 --min-receivers 4 --random-receivers"
    more = "--waveform fsk --loss hata --dataset-type iq_raw --seed 7"

    config = config_of(calls, *flags.split(), *more.split())

    assert config == GenerateConfig(
        frequency_mhz=433, tx_power_dbm=30, min_snr_db=-3, max_gdop=30, min_receivers=4, use_random_receivers=True,
        waveform="fsk", loss="hata", dataset_type="iq_raw", seed=7,
    )  # fmt: skip


def test_running_options_reach_generate(calls):
    flags = "--samples 5 --device cpu --batch-size 3 --memory 1.5GiB --resume --json"

    config_of(calls, *flags.split())

    options = {key: calls[0][key] for key in ("samples", "device", "batch_size", "memory", "resume")}
    assert options == {"samples": 5, "device": "cpu", "batch_size": 3, "memory": 3 * 2**29, "resume": True}


def test_flags_win_over_the_file_and_the_file_over_the_preset(calls, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("max_gdop = 33.0\nmin_snr_db = 7.0\n")

    config = config_of(calls, "--preset", "quality", "--config", str(file), "--min-snr-db", "9")

    assert (config.min_snr_db, config.max_gdop) == (9.0, 33.0)
    assert config.min_receivers == PRESETS["quality"]["min_receivers"]


def test_a_preset_in_the_file_counts_and_may_be_repeated(calls, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('preset = "quality"\nseed = 5\n')

    alone = config_of(calls, "--config", str(file))
    repeated = config_of(calls, "--config", str(file), "--preset", "quality")

    assert alone == repeated == GenerateConfig(**PRESETS["quality"], seed=5)


def test_stations_take_the_place_of_a_presets_random_receivers(calls, tmp_path):
    file = tmp_path / "s.csv"
    file.write_text(STATIONS)

    config = config_of(calls, "--preset", "quality", "--stations", str(file))

    assert [station.name for station in config.stations] == ["A", "B", "C", "D"]
    assert (config.use_random_receivers, config.max_gdop) == (False, 20.0)


def test_stations_and_random_receivers_exclude_each_other(calls, tmp_path, capsys):
    file = tmp_path / "s.csv"
    file.write_text(STATIONS)

    assert main(["rf", "generate", "--out", "d", "--stations", str(file), "--random-receivers"]) == 2

    assert "exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("rf generate --out d --device cpu --devices all", "--device and --devices exclude each other"),
        ("rf generate --out d --devices all --cluster auto", "--devices and --cluster exclude each other"),
        ("rf generate --out d --allow-mixed", "--allow-mixed is for --devices and --cluster"),
        ("segment predict i --out o --allow-mixed", "--allow-mixed is for --cluster"),
        ("segment predict i --out o --network n.py:f --model hrnet", "both name a network"),
        ("segment tune --models hrnet,unet_tiny --weights w", "--weights w fit one network, --models names 2"),
        ("doctor auto", '"auto" needs --cluster; write: brim doctor --cluster auto'),
    ],
)
def test_options_that_exclude_each_other_are_refused(argv, said, capsys):
    assert main(argv.split()) == 2

    assert said in capsys.readouterr().err


def handed_on(monkeypatch, function: str, *argv: str) -> tuple[list, dict]:
    """What a command calls a function with."""
    seen: list[tuple] = []

    def fake(*values, **options):
        seen.append((list(values), options))
        raise ConfigError("enough")

    monkeypatch.setattr(function, fake)
    assert main([*argv, "--device", "cpu"]) == 2
    return seen[0]


def test_a_locator_starts_from_the_solver_unless_asked_not_to(monkeypatch):
    for more, hybrid in ([], True), (["--network", "pure"], False):
        values, options = handed_on(monkeypatch, "brim.rf.location.train", "rf", "train", "a", "b", "--out", "r", *more)
        assert (values[0], str(values[1]), values[2].hybrid) == (["a", "b"], "r", hybrid)
        assert (options["stream"], options["resume"]) == (None, False)


def test_streamed_samples_have_a_seed_of_their_own_and_the_place_of_their_settings(monkeypatch):
    words = ["rf", "train", "--stream", "quality", "--samples", "70", "--feature-level", "--seed", "5", "--out", "r"]

    values, options = handed_on(monkeypatch, "brim.rf.location.train", *words)

    made = options["stream"]
    assert (values[0], made.samples, made.drawn) == ([], 70, True)
    assert (made.generation.seed, made.generation.environment_seed) == (2**62 + 5, 0)
    assert made.generation.max_gdop == PRESETS["quality"]["max_gdop"]


def test_what_is_typed_wins_over_the_recipe_of_fine_tuning(monkeypatch):
    words = ["segment", "train", "--images", "i", "--masks", "m", "--from", "default", "--epochs", "3", "--out", "r"]

    values, options = handed_on(monkeypatch, "brim.segmentation.training.train", *words)

    recipe = {name: getattr(values[2], name) for name in FINE_TUNING}
    assert recipe == {**FINE_TUNING, "epochs": 3}
    assert FINE_TUNING["epochs"] != 3
    assert (str(values[0]), str(values[1]), options["weights"]) == ("i", "m", DEFAULT_WEIGHTS)


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        ([], "self"),
        (["--model", "rocket"], "supervised"),
        (["--model", "ensemble"], "supervised"),
        (["--folds", "3"], "supervised"),
        (["--model", "cnn_lstm"], "self"),
    ],
)
def test_methods_that_need_labels_are_supervised(monkeypatch, more, mode):
    function = "brim.sequences.training.run.train"

    values, _ = handed_on(monkeypatch, function, "sequence", "train", "corpus", "--out", "run", *more)

    assert values[2].mode == mode


# Results


def test_the_end_line_says_how_many_how_fast_where_and_what_next(calls, capsys):
    main(["rf", "generate", "--out", "my data", "--samples", "10"])

    out = capsys.readouterr().out
    assert "10 samples accepted of 20 tried (50.0%); 5.0 samples/s on cpu" in out
    assert "next:    brim rf inspect 'my data'" in out


def test_a_signal_that_comes_after_the_last_sample_is_no_failure(monkeypatch):
    def finished(config, out, samples, **options):
        signal.raise_signal(signal.SIGINT)
        return report(accepted=samples)

    monkeypatch.setattr("brim.rf.generate", finished)

    assert main(["rf", "generate", "--out", "d"]) == 0


def test_an_error_is_one_line_without_a_traceback(monkeypatch, capsys):
    def fail(*_, **__):
        raise ConfigError("value [bold]x[/bold]=3 must be smaller; lower it " + "word " * 60)

    monkeypatch.setattr("brim.rf.generate", fail)

    assert main(["rf", "generate", "--out", "d"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: value [bold]x[/bold]=3 must be smaller")
    assert captured.err.count("\n") == 1


def test_every_fault_is_told(monkeypatch, capsys):
    def fail(*_, **__):
        failure = ConfigError("is too small", field="samples", value=1)
        failure.more = (ConfigError("is too large", field="batch_size", value=9),)
        raise failure

    monkeypatch.setattr("brim.rf.generate", fail)

    assert main(["rf", "generate", "--out", "d"]) == 2
    assert capsys.readouterr().err == "error: --samples=1 is too small\nerror: --batch-size=9 is too large\n"


@pytest.mark.parametrize(
    ("hint", "written"),
    [
        ("set {batch_size} or {use_random_receivers}", "set --batch-size or --random-receivers"),
        ("{num_workers} is of another command", "--num-workers is of another command"),
        ("{duration_s} is in no command", "duration_s is in no command"),
        ("run {rf inspect} or {serve}", "run brim rf inspect or brim serve"),
    ],
)
def test_a_hint_names_options_and_commands_as_they_are_typed(monkeypatch, capsys, hint, written):
    def fail(*_, **__):
        raise ConfigError("must be smaller", field="min_snr_db", value=3, hint=hint)

    monkeypatch.setattr("brim.rf.generate", fail)

    assert main(["rf", "generate", "--out", "d"]) == 2

    assert capsys.readouterr().err == f"error: --min-snr-db=3 must be smaller; {written}\n"


def test_a_closed_pipe_is_no_traceback():
    code = "import sys; from brim.cli import main; sys.exit(main(['doctor', '--json']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()

    _, err = process.communicate()

    assert err == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_an_error_message():
    with Path("/dev/full").open("w") as full:
        code = "import sys; from brim.cli import main; sys.exit(main(['doctor', '--json']))"
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)

    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output: cannot write")


# Progress and signals


def test_two_signals_at_once_are_one_and_handlers_are_given_back(monkeypatch):
    monkeypatch.setattr(terminal, "AGAIN_S", 3600.0)
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a wrapper's copy
        assert stop()

    assert stop.number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_the_process_at_once():
    code = (
        "import time\nfrom brim.cli import terminal\nterminal.AGAIN_S = 0\n"
        "with terminal.Stop() as stop:\n print('ready', flush=True)\n"
        " while not stop(): time.sleep(0.01)\n"
        " print('asked', flush=True)\n while True: time.sleep(0.01)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in ("ready\n", "asked\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)

    _, err = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130
    assert "aborted" in err


# Doctor


def test_doctor_says_what_is_here(capsys):
    assert main(["doctor", "--json"]) == 0

    out = capsys.readouterr().out
    facts = json.loads(out)
    assert out.count("\n") == 1
    assert facts["brim"] == __version__
    assert facts["packages"]["torch"]
    assert facts["cpu"]["cores"] >= 1
    assert facts["uses"]["device"] in ("cpu", "cuda:0")
    assert set(facts["sandbox"]) <= {"read-only files", "no network"}


def test_doctor_says_what_is_free_and_what_would_be_used(monkeypatch, capsys):
    for name in ("_cpu", "_disk", "_shared_memory"):
        room = {"free_bytes": 3 * 2**30, "total_bytes": 64 * 2**30}
        monkeypatch.setattr(brim.doctor, name, lambda room=room: room)

    assert main(["doctor"]) == 0

    out = capsys.readouterr().out
    assert out.count("3.0 GiB free of 64.0 GiB") == 3
    assert "only 3.0 GiB" not in out
    assert all(word in out for word in ("packages", "sandbox", "uses"))


def test_doctor_never_fails(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("driver shut down\ndetails")

    for name in ("_cpu", "_nvml", "_disk", "_uses"):
        monkeypatch.setattr(brim.doctor, name, broken)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", broken)

    assert main(["doctor"]) == 0
    assert main(["doctor", "--json"]) == 0

    out = capsys.readouterr().out
    assert "cannot be used: driver shut down" in out
    assert "details" not in out


def test_doctor_names_the_fix_for_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(brim.doctor, "_cuda", lambda: {"version": None, "devices": [], "reason": "none"})
    monkeypatch.setattr(brim.doctor, "_nvml", lambda: {"works": True, "driver": "580", "num_devices": 1})

    problems = brim.doctor.collect()["problems"]

    assert any("built without CUDA" in p["problem"] and "install a CUDA build" in p["fix"] for p in problems)


def problem(facts: dict, words: str) -> str:
    """The fix of the one problem that has these words."""
    (fix,) = [each["fix"] for each in facts["problems"] if words in each["problem"]]
    return str(fix)


def test_doctor_names_the_extra_of_a_service_that_is_missing_once(monkeypatch):
    monkeypatch.setattr(brim.doctor, "_version", lambda name: None if name in ("dbos", "fastapi") else "1.0")

    facts = brim.doctor.collect()

    assert problem(facts, "dbos, fastapi are absent, so the service") == 'pip install "brim[service]"'


def test_doctor_names_the_fix_for_too_little_room(monkeypatch, tmp_path):
    for name in ("_disk", "_cpu", "_shared_memory"):
        monkeypatch.setattr(brim.doctor, name, lambda: {"free_bytes": 60 * 2**20, "total_bytes": 64 * 2**20})

    facts = brim.doctor.collect()

    assert "--data of brim serve, on another disk" in problem(facts, "of disk is free")
    assert "give --memory" in problem(facts, "of memory is free")
    assert "--shm-size=2g" in problem(facts, "only 60 MiB of shared memory")


def test_doctor_names_the_fix_for_a_driver_that_does_not_answer(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM version: 580")
    monkeypatch.setattr(brim.doctor, "NVIDIA", tmp_path / "version")
    monkeypatch.setattr(brim.doctor, "_nvml", lambda: {"works": False, "driver": None, "num_devices": 0})

    assert "nvidia-smi" in problem(brim.doctor.collect(), "driver is loaded")


def test_a_data_folder_that_others_can_read_is_reported(monkeypatch, tmp_path, capsys):
    data = tmp_path / "service data"
    monkeypatch.setenv("BRIM_DATA", str(data))
    monkeypatch.setattr("brim.service.run.start.serve", lambda *_: None)
    assert not any("other users" in each["problem"] for each in brim.doctor.collect()["problems"])
    data.mkdir()
    data.chmod(0o755)

    assert problem(brim.doctor.collect(), "can be read by other users (mode 755)") == f"chmod 700 '{data}'"
    main(["serve", "--port", "0"])
    assert f"make it private with: chmod 700 '{data}'" in capsys.readouterr().err

    data.chmod(0o700)
    main(["serve", "--port", "0"])
    assert "other users" not in capsys.readouterr().err


def test_every_extra_that_doctor_names_exists_and_brings_the_package():
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]

    for extra, packages in brim.doctor.OPTIONAL.values():
        listed = {re.split(r"[\[><=~;, ]", one)[0] for one in extras[extra]}
        assert set(packages) <= listed


# Demo


def test_demo_leaves_a_foreign_directory_alone(tmp_path, capsys):
    foreign = tmp_path / "demo/dataset/thesis.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("years of work")

    assert main(["demo", "--out", str(tmp_path / "demo"), "--samples", "3"]) == 2

    assert "--out" in capsys.readouterr().err
    assert [p for p in (tmp_path / "demo").rglob("*") if p.is_file()] == [foreign]


def test_what_a_killed_demo_left_half_is_made_again(tmp_path):
    once, made = sys.modules["brim.cli.demo"]._once, []

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "a").write_text("")
        made.append(len(list(folder.iterdir())))
        if len(made) == 1:
            raise KeyboardInterrupt
        (folder / "b").write_text("")

    with pytest.raises(KeyboardInterrupt):
        once(tmp_path / "cells", make)
    once(tmp_path / "cells", make)
    once(tmp_path / "cells", make)

    assert made == [1, 1]
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["a", "b", "cells"]


@pytest.mark.parametrize(("asked", "wanted"), [(None, "1000"), ("300000", "300000")])
def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise(monkeypatch, capsys, asked, wanted):
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is put back
    monkeypatch.delenv("GOMP_SPINCOUNT")
    if asked is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", asked)

    main(["--version"])

    assert os.environ["GOMP_SPINCOUNT"] == wanted
