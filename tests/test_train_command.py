"""`brim train`: a factory in a file, rows from anywhere, one sentence and exit code 2 for what cannot be."""

import json
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import brim
from brim.cli import main

MODULE = """
import torch
from torch import nn
from neighbour import WIDTH

def make(columns):
    assert columns["x"].shape[0] == WIDTH and columns["x"].dtype == torch.float32
    return nn.Linear(WIDTH, 1), loss

def loss(model, batch):
    return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()

def from_numbers(columns):
    names = sorted(set(columns) - {"y"})
    def loss(model, batch):
        x = torch.stack([batch[name].float() for name in names], 1)
        return (model(x).squeeze(-1) - batch["y"]).square().mean()
    return nn.Linear(len(names), 1), loss, lambda params: torch.optim.SGD(params, 0.1)

def raises(columns):
    return columns["z"]

def nothing(columns): ...
def only_module(columns): return nn.Linear(4, 1)
def a_class(columns): return nn.Linear, loss
def wrong_loss(columns): return nn.Linear(4, 1), lambda model, batch: model(batch["w"]).mean()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(MODULE)
    (tmp_path / "code" / "neighbour.py").write_text("WIDTH = 4\n")
    (tmp_path / "code" / "broken.py").write_text("def make(:\n")
    x = torch.arange(400.0).reshape(100, 4).sin()
    save_file({"x": x, "y": x.sum(1)}, tmp_path / "rows.safetensors")
    return tmp_path


def command(*words: str) -> list[str]:
    return ["train", *words, "--device", "cpu", "--batch-size", "32"]


def test_a_module_trains_resumes_and_loads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command("code/mine.py:make", "--data", "rows.safetensors", "--out", "run")
    assert main([*words, "--epochs", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main([*words, "--epochs", "2"]) == 2
    assert "add --resume to continue it or choose another --out" in capsys.readouterr().err
    assert main([*words, "--epochs", "3", "--resume"]) == 0

    run = brim.load_run("run", factory="code/mine.py:make", device="cpu")
    assert set(printed) >= {"run", "epochs", "samples_per_s", "tier", "ceiling_share", "best_val_loss"}
    assert run.metrics["best_val_loss"] <= printed["best_val_loss"]
    assert run.config["epochs"] == 2
    assert run.history[-1]["step"] == 9
    weights = load_file("run/train/best/model.safetensors")
    x = load_file("rows.safetensors")["x"]
    torch.testing.assert_close(run.predict(x.numpy()), x @ weights["weight"].T + weights["bias"])
    with pytest.raises(brim.errors.ConfigError, match=r'factory="code/mine\.py:make"'):
        brim.load_run("run").predict(x)


def test_the_metrics_of_a_run_are_its_last_values_its_best_loss_and_its_scores(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"kind": "module", "training": {"epochs": 2}, "model": "Linear"}')
    (tmp_path / "report.json").write_text('{"scores": {"accuracy": 0.75, "uar": null}}')
    for number, (phase, lines) in enumerate(
        {
            "encoder-2": '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n',
            "classifier-1": '{"step": 3, "val_loss": 0.25}\n{"step": 4, "val_loss": 0.5, "loss": 1.5}\n{"step": 5, "lo',
        }.items()
    ):
        (tmp_path / phase).mkdir()
        (tmp_path / phase / "metrics.jsonl").write_text(lines)
        os.utime(tmp_path / phase / "metrics.jsonl", (number, number))

    run = brim.load_run(tmp_path)

    assert [(line["phase"], line["step"]) for line in run.history] == [
        *(("encoder-2", 1), ("encoder-2", 2), ("classifier-1", 3), ("classifier-1", 4)),
    ]
    assert run.metrics == {"step": 4, "loss": 1.5, "val_loss": 0.5, "best_val_loss": 0.25, "accuracy": 0.75}
    assert (run.kind, run.config) == ("module", {"epochs": 2})


def test_only_a_run_of_a_module_takes_code(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"kind": "sequence-train", "training": {}}')

    for given in ({"factory": "mine.py:make"}, {"module": torch.nn.Linear(1, 1)}):
        with pytest.raises(brim.errors.ConfigError, match="whose network is brim's own"):
            brim.load_run(tmp_path, **given)  # type: ignore[arg-type]


def test_a_module_trains_on_the_rows_of_a_query(here: Path) -> None:
    with sqlite3.connect(here / "data.db") as database:
        database.execute("create table rows (a real, b real, y real)")
        database.executemany(
            "insert into rows values (?, ?, ?)", np.random.default_rng(0).normal(size=(60, 3)).tolist()
        )
    rows = ["--data", "sqlite:///data.db", "--query", "select a, b, y from rows"]

    assert main([*command("code/mine.py:from_numbers", *rows, "--out", "run", "--epochs", "1")]) == 0
    about = json.loads((here / "run" / "run.json").read_text())
    assert sorted(about["columns"]) == ["a", "b", "y"]


@pytest.mark.parametrize(
    ("factory", "words", "said"),
    [
        ("code/mine.py:raises", [], "code/mine.py:raises raised KeyError: 'z' (line "),
        ("code/mine.py:nothing", [], "returned nothing; return the module and the loss"),
        ("code/mine.py:only_module", [], "returned a module and no loss"),
        ("code/mine.py:a_class", [], "returned the class Linear"),
        ("code/mine.py:wrong_loss", [], 'loss_fn fails on a batch of "x" [32, 4], "y" [32] (KeyError'),
        ("code/mine.py:absent", [], 'has no "absent"; it has make, loss'),
        ("code/broken.py:make", [], "code/broken.py cannot be imported: SyntaxError"),
        ("code/none.py:make", [], "code/none.py does not exist"),
        ("make", [], "names no function; write FILE.py:NAME"),
        ("code/mine.py:make", ["--data", "nowhere"], "nowhere does not exist"),
        ("code/mine.py:make", ["--query", "select 1"], "is no database; leave --query out"),
        ("code/mine.py:make", ["--data", "postgresql://host/db"], "a database needs a query; give --query"),
        ("code/mine.py:make", ["--early-stopping-patience", "2", "--val-share", "0"], "--val-share above 0"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], factory: str, words: list[str], said: str
) -> None:
    data = [] if "--data" in words else ["--data", "rows.safetensors"]

    assert main([*command(factory, *data, "--out", "run"), *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message
    assert not (here / "run").exists()
