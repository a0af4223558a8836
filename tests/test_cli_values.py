"""What a command takes and what it prints, against values written down here."""

import json
import math
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
import typer

from brim.cli import main, terminal
from brim.cli.jobs import ENDED
from brim.cli.options import duration, number_or_name, percent, power, words
from brim.cli.serve import visible_gpus
from brim.cli.terminal import Display, Stop, end_stopped, figure, metres, print_facts, print_page
from brim.engine.training import TrainProgress
from brim.rf import GenerateProgress
from brim.segmentation.prediction import PredictProgress

# Typed


@pytest.mark.parametrize(("text", "seconds"), [("60", 60), ("60s", 60), ("2m", 120), ("1h", 3600), ("0.5h", 1800)])
def test_a_time_is_in_seconds_minutes_or_hours(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["0", "0s", "-1m", "h", "1d", "inf", "nan", ""])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(typer.BadParameter, match="is not a time; write it like 60s, 2m or 1h"):
        duration(text)


@pytest.mark.parametrize(("text", "value"), [("20", 20.0), ("20%", 20.0), (" 0.5% ", 0.5), (20.0, 20.0)])
def test_a_percentage_stays_in_percent(text, value):
    assert percent(text) == value


def test_names_are_separated_by_commas_and_counted_once():
    assert words("b, a,b") == ("b", "a")
    assert words("") == ()
    with pytest.raises(typer.BadParameter, match="empty name"):
        words("a,,b")


@pytest.mark.parametrize(
    ("text", "good"), [("unknown", 1), ("-50", 1), ("120", 1), ("-50.1", 0), ("121", 0), ("nan", 0)]
)
def test_a_power_is_a_number_of_dbm_or_unknown(text, good):
    if good:
        assert power(text) == text
        return
    with pytest.raises(typer.BadParameter, match="between -50 and 120"):
        power(text)


def test_a_number_of_folds_may_be_the_name_of_a_column():
    assert [number_or_name(text) for text in ("5", "-5", "speaker", "5a")] == [5, -5, "speaker", "5a"]


# Printed


@pytest.mark.parametrize(
    ("value", "text"),
    [(346.2, "346 m"), (0.0, "0 m"), (999.4, "999 m"), (999.6, "1 km"), (32790.0, "32.8 km"), (None, "unknown")],
)
def test_distances_are_written_as_people_write_them(value, text):
    assert metres(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(32790.4, "32 790"), (9999.4, "9999"), (9999.6, "10 000"), (-12345.6, "-12 346"), (0.03412345, "0.03412"),
     (12.0, "12"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_are_written_without_an_exponent(value, text):
    assert figure(value) == text


def test_facts_are_lines_with_units_and_words(capsys):
    facts = {"peak_bytes": 2_500_000, "verified": True, "complete": False, "median_error_m": 1234.5, "seed": None,
             "range": [1.0, 2.5], "snr": {"link": {"median": 3.0, "max": 40.0}}}  # fmt: skip

    print_facts(facts)

    assert [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()] == [
        ["peak", "bytes", "2.5 MB"],
        ["verified", "yes"],
        ["complete", "no"],
        ["median", "error", "m  1.23 km"],
        ["seed", "unknown"],
        ["range", "1", "… 2.5"],
        ["snr", "link", "median 3, max 40"],
    ]


def test_a_page_of_a_list_is_a_table_and_says_which_page_it_is(capsys):
    listed = {"things": [{"id": "a", "n": 1}, {"id": "long", "n": 22}], "page": 2, "pages": 3, "total": 102}

    print_page(listed, False, "things", ("ID", "N"), lambda row: (row["id"], str(row["n"])))
    print_page({"things": [], "page": 1, "pages": 1, "total": 0}, False, "things", ("ID", "N"), lambda row: ())

    captured = capsys.readouterr()
    assert captured.out == "ID    N\na     1\nlong  22\n"
    assert captured.err == "page 2 of 3, 102 things\nno things\n"


def said(capsys: Any, monkeypatch: Any, show: Any) -> str:
    monkeypatch.setattr(terminal, "LINE_S", 0.0)
    with Display(preparing=("solving", "samples")) as display:
        show(display)
    return str(capsys.readouterr().err)


def test_progress_says_what_is_done_how_fast_and_how_long_it_takes(capsys, monkeypatch):
    train = TrainProgress(
        phase="train", epoch=1, epochs=4, step=30, steps=100, loss=0.1234, samples_per_s=1500.4, eta_s=3725.2
    )
    last = replace(train, epoch=4, step=100, loss=None, samples_per_s=0.0, eta_s=math.inf)
    solve = replace(last, phase="prepare", step=3, steps=9)
    fold = replace(last, phase="fold 2 of 5", epoch=0)
    make = GenerateProgress(done=5, total=10, attempted=8, rate=2.5, eta_s=2.0, message="generating")
    predict = PredictProgress(done=40, total=100, failed=2, rate=0.5, share=0.25)
    job = {"current": 5, "total": 20, "eta_s": 59.1, "message": "epoch 1/4", "rate": 2.0}

    lines = said(
        capsys,
        monkeypatch,
        lambda display: (
            display.generating(make),
            *(display.training(each) for each in (train, last, solve, fold)),
            display.predicting(predict),
            display.job("night running", job),
        ),
    )

    assert lines.splitlines() == [
        "generating: 5/10 samples, 2.5/s, 62% accepted, 0:00:02 left",
        "epoch 2/4: 30/100 steps, loss 0.123, 1500 samples/s, 1:02:06 left",
        "epoch 4/4: 100/100 steps",
        "solving: 3/9 samples",
        "fold 2 of 5, epoch 1/4: 100/100 steps",
        "predicting: 40/100 images, 2 failed, 25% of a large image, 0.5/s, 0:02:00 left",
        "night running: epoch 1/4, 5/20, 2.0/s, 0:01:00 left",
    ]


# How a command goes on


def test_a_stopped_command_is_continued_with_what_was_typed_and_resume_once(capsys, monkeypatch):
    stop = Stop()
    stop.number = 2
    monkeypatch.setattr(sys, "argv", ["brim", "rf", "train", "my data", "--out", "run"])

    for resume in (False, True):
        with pytest.raises(typer.Exit) as ended:
            end_stopped("after 1 epoch", stop, resume=resume)
        assert ended.value.exit_code == 130
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(typer.Exit):
        end_stopped("after 1 epoch", stop, resume=False)

    typed = "rf train 'my data' --out run"
    assert capsys.readouterr().err.splitlines() == [
        *("stopped after 1 epoch", f"continue with: brim {typed} --resume"),
        *("stopped after 1 epoch", f"continue with: brim {typed}"),
        *("stopped after 1 epoch", f"continue with: torchrun --nproc-per-node 2 -m brim {typed} --resume"),
    ]


@pytest.mark.parametrize(
    ("rank", "size", "prints"), [("0", "2", True), ("1", "2", False), ("3", "1", True), ("3", "", True)]
)
def test_of_several_ranks_the_first_one_prints(rank, size, prints, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)

    terminal.show("result")
    terminal.say("word")

    assert tuple(capsys.readouterr()) == (("result\n", "word\n") if prints else ("", ""))


def test_a_job_is_watched_until_there_is_nothing_more_to_see():
    assert {"completed", "failed", "cancelled", "paused"} == ENDED


# Chosen by `brim serve`


@pytest.mark.parametrize(
    ("visible", "names"),
    [("0,1", ["0", "1"]), (" 3 ,GPU-a", ["3", "GPU-a"]), ("0,-1,1", ["0"]), ("", []), ("2,,1", ["2"])],
)
def test_workers_have_the_gpus_that_cuda_shows(visible, names, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert visible_gpus() == names


def test_without_a_choice_every_gpu_has_a_worker_and_a_predictor(tmp_path, monkeypatch):
    started: list[Any] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("brim.doctor.num_gpus", lambda: 3)
    monkeypatch.setattr("brim.service.run.start.serve", lambda settings, *rest: started.append(settings))

    main(["serve", "--data", str(tmp_path)])
    main(["serve", "--data", str(tmp_path), "--workers", "2", "--predict-memory", "35%", "--port", "81"])

    first, second = started
    assert (first.workers, first.predictors, first.predict_memory) == (3, 3, 20.0)
    assert (first.host, first.port, first.dashboard) == ("127.0.0.1", 8000, True)
    assert (second.workers, second.predictors, second.predict_memory, second.port) == (2, 3, 35.0, 81)


def test_a_token_is_listed_without_its_digest_and_with_its_days(tmp_path, capsys):
    data = ["--data", str(tmp_path), "--json"]
    assert main(["tokens", "add", "ann", "--days", "2", *data]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["tokens", "list", *data]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["tokens"]

    assert made == listed | {"token": made["token"]}
    assert (listed["name"], listed["role"]) == ("ann", "viewer")
    assert "sha256" not in listed
    created, expires = (datetime.fromisoformat(listed[name]) for name in ("created_at", "expires_at"))
    assert expires - created == timedelta(days=2)
