"""The engine as a library: any rows, any module, any optimiser."""

import hashlib
import itertools
import json
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import brim
from brim.engine.config import ModuleTraining, TrainConfig
from brim.engine.library import modules
from brim.engine.library.loader import LoaderSource
from brim.engine.storage import ShardWriter
from brim.errors import BrimError, CheckpointError, ConfigError, DatasetError

X = torch.arange(400.0).reshape(100, 4).sin()
Y = X @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 1
QUIET = TrainConfig(tensorboard=False, measure_ceiling=False, clip_norm=None, checkpoint_every_steps=3)


class Items(Dataset[Any]):
    """A map-style dataset of whatever it is given."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([1])


def seen(data: Any) -> tuple[type, torch.Tensor]:
    """The type of the batches, and all rows in the order of y, of an epoch in batches of 32."""
    batches = list(brim.Resident(data, batch_size=32, device="cpu", seed=3).epoch(0))
    parts = [tuple(batch.values()) if isinstance(batch, dict) else batch for batch in batches]
    columns = [torch.cat([part[place] for part in parts]).double() for place in range(len(parts[0]))]
    rows = torch.cat([column.reshape(len(column), -1) for column in columns], 1)
    return type(batches[0]), rows[rows[:, -1].argsort()]


def folder_of_npy(path: Path) -> Path:
    (path / "npy").mkdir()
    np.save(path / "npy" / "x.npy", X.numpy())
    np.save(path / "npy" / "y.npy", Y.numpy())
    return path / "npy"


def safetensors_file(path: Path) -> str:
    save_file({"x": X, "y": Y}, path / "rows.safetensors")
    return str(path / "rows.safetensors")


def brim_dataset(path: Path) -> Path:
    with ShardWriter(path / "data", {}, items_per_shard=30) as out:
        out.append({"x": X, "y": Y}, {})
        out.finish()
    return path / "data"


def frame(_: Path) -> Any:
    return pandas.DataFrame({**{f"x{column}": X[:, column].numpy() for column in range(4)}, "y": Y.numpy()})


@pytest.mark.parametrize(
    ("make", "form"),
    [
        pytest.param(lambda _: {"x": X, "y": Y}, dict, id="dict of tensors"),
        pytest.param(lambda _: {"x": X.numpy(), "y": Y.tolist()}, dict, id="dict of arrays and lists"),
        pytest.param(lambda _: (X.numpy(), Y.numpy()), tuple, id="tuple of arrays"),
        pytest.param(lambda _: TensorDataset(X, Y), tuple, id="TensorDataset"),
        pytest.param(lambda _: Subset(TensorDataset(X, Y), range(100)), tuple, id="Subset"),
        pytest.param(lambda _: Items([(X[row], float(Y[row])) for row in range(100)]), tuple, id="map-style, tuples"),
        pytest.param(lambda _: Items([{"x": X[row].numpy(), "y": Y[row]} for row in range(100)]), dict, id="map-style"),
        pytest.param(lambda _: pyarrow.table({"x": X.tolist(), "y": Y.tolist()}), dict, id="Arrow"),
        pytest.param(frame, dict, id="pandas"),
        pytest.param(brim_dataset, dict, id="brim dataset"),
        pytest.param(folder_of_npy, dict, id="folder of .npy"),
        pytest.param(safetensors_file, dict, id="safetensors"),
    ],
)
def test_rows_come_from_anywhere_in_the_form_they_had(make: Any, form: type, tmp_path: Path) -> None:
    kind, rows = seen(make(tmp_path))

    assert kind is form
    expected = torch.cat([X, Y[:, None]], 1).double()
    torch.testing.assert_close(rows, expected[expected[:, -1].argsort()], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": X, "y": Y[:9]}, '"y" has 9 rows, "x" has 100'),
        ({"x": X, "y": torch.empty(100, device="meta")}, '"y" is on meta, "x" is on cpu; move them'),
        ({"x": np.array([1, "a", None], dtype=object)}, 'column "x" is an array of Python objects: str in row 1'),
        (Items([(X[0], 1), (X[0, :2], 1)]), r'"0" has shape \[2\] in item 1 of the Items'),
        ({"train": {"x": X}}, r'give that split: data\["train"\]'),
        (pandas.DataFrame({"x": pandas.array([1, None, 3], "Int64")}), 'column "x" is empty in row 1'),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), 'two columns "a"'),
        (Endless(), "an Endless has no rows that can be read by number; give a dict of arrays"),
        (DataLoader(Items([1])), "give what it reads: loader.dataset"),
    ],
)
def test_what_holds_no_rows_is_refused_in_one_sentence(data: Any, message: str) -> None:
    with pytest.raises((DatasetError, ConfigError), match=message):
        list(brim.Resident(data, batch_size=1, device="cpu").epoch(0))


def test_items_of_a_split_are_read_by_their_number() -> None:
    data = brim.Resident(
        Items([float(row) for row in range(50)]), batch_size=10, device="cpu", rows=slice(20, 40), shuffle=False
    )
    assert torch.cat(list(data.epoch(0))).tolist() == list(range(20, 40))


# Datasets


def test_a_dataset_is_rows_slices_fields_and_a_frame(tmp_path: Path) -> None:
    dataset = brim.Dataset(brim_dataset(tmp_path))

    assert len(dataset) == 100
    assert torch.equal(dataset[35]["x"], X[35])
    assert torch.equal(dataset[-1]["y"], Y[-1])
    assert torch.equal(dataset[25:65]["x"], X[25:65])
    assert torch.equal(dataset[[3, 99, 31]]["y"], Y[[3, 99, 31]])
    assert torch.equal(dataset["y"], Y)
    assert torch.equal(torch.stack([row["y"] for row in dataset]), Y)
    table = dataset.to_pandas()
    assert list(table.columns) == ["x", "y"]
    assert np.array_equal(np.stack(table["x"]), X.numpy())
    with pytest.raises(IndexError, match="row 100 is not in"):
        dataset[100]
    with pytest.raises(ConfigError, match="no row of"):
        dataset[1.5]


# Training


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make_scheduler", "counts"),
    [
        (lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.5), "epochs"),
        (lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0), "losses"),
        (lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=17), "steps"),
    ],
)
def test_training_equals_the_loop_one_would_write(make_scheduler: Any, counts: str, tmp_path: Path) -> None:
    data = brim.Resident(TensorDataset(X, Y), batch_size=32, device="cpu", seed=1)
    model, mine = linear(), linear()
    report = brim.train(
        model, loss, data, out=tmp_path / "run", epochs=4, optimizer=sgd, scheduler=make_scheduler,
        evaluate=lambda model: loss(model, (X, Y)).item(), loggers=[brim.loggers.CSV()],
    )  # fmt: skip

    optimizer = sgd(mine.parameters())
    scheduler = make_scheduler(optimizer)
    for epoch in range(4):
        for batch in data.epoch(epoch):
            optimizer.zero_grad()
            loss(mine, batch).backward()
            optimizer.step()
            if counts == "steps":
                scheduler.step()
        if counts != "steps":
            scheduler.step(*([loss(mine, (X, Y)).item()] if counts == "losses" else []))
    assert torch.equal(model.weight, mine.weight)
    assert report.steps == 16
    rows = (tmp_path / "run" / "train" / "metrics.csv").read_text().splitlines()
    assert rows[0] == "step,loss,lr,samples_per_s,val_loss"
    assert len(rows) == 1 + 16 + 4  # a short run logs every step, and every evaluation


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (sgd, lambda opt: torch.optim.lr_scheduler.MultiStepLR(opt, [1, 3])),
        (lambda params: torch.optim.Adam(params, 0.05), lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt)),
        (None, lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)),
    ],
)
@pytest.mark.parametrize("loader", [False, True])
def test_a_stopped_run_resumes_to_the_same_bits(optimizer: Any, scheduler: Any, loader: bool, tmp_path: Path) -> None:
    def run(out: str, stop_after: int | None = None) -> torch.Tensor:
        model, steps = nn.Sequential(linear(), nn.Dropout(0.1)), [0]
        data: Any = DataLoader(TensorDataset(X, Y), 32, shuffle=True) if loader else (X, Y)

        def stop() -> bool:
            steps[0] += 1
            return steps[0] == stop_after

        brim.train(
            model, loss, data, out=tmp_path / out, epochs=4, batch_size=32, optimizer=optimizer, scheduler=scheduler,
            evaluate=(X, Y), config=QUIET, stop=stop, device="cpu",
        )  # fmt: skip
        return model[0].weight.detach()

    whole = run("whole")
    run("parts", stop_after=6)
    again = run("parts")

    assert torch.equal(again, whole)
    lines = [(tmp_path / out / "train" / "metrics.jsonl").read_text().splitlines() for out in ("whole", "parts")]
    assert [json.loads(line).get("lr") for line in lines[0]] == [json.loads(line).get("lr") for line in lines[1]]


def test_another_optimiser_is_another_run(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"out": tmp_path / "run", "epochs": 1, "batch_size": 32, "config": QUIET}
    brim.train(linear(), loss, (X, Y), optimizer=sgd, **arguments)

    with pytest.raises(CheckpointError, match="optimizer was SGD and is Adam now"):
        brim.train(linear(), loss, (X, Y), optimizer=torch.optim.Adam, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"loss_fn": lambda model, batch: batch["x"]},
            r"loss_fn fails on a batch of \(\[32, 4\], \[32\]\) \(TypeError",
        ),
        ({"loss_fn": lambda model, batch: model(batch[0])}, r"loss_fn returned \[32, 1\], expected a scalar"),
        ({"loss_fn": lambda model, batch: loss(model, batch).detach()}, "depends on no parameter"),
        ({"out": "/dev/null/run"}, "/dev/null/run: cannot write"),
        ({"scheduler": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=2)}, "cannot advance"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)}, "not trainable ones of this model"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "needs val_loss"),
    ],
)
def test_a_training_that_cannot_be_is_refused_and_leaves_nothing(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    usual = {"model": linear(), "loss_fn": loss, "data": (X, Y), "epochs": 1, "batch_size": 32, "out": tmp_path / "run"}

    with pytest.raises(BrimError, match=message):
        brim.train(**(usual | change))
    assert not (tmp_path / "run").exists()


def test_torchs_own_criteria_are_losses_of_pairs(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), nn.Flatten(0))
    for number, criterion in enumerate((nn.MSELoss(), nn.functional.mse_loss)):
        brim.train(model, criterion, (X, Y), out=tmp_path / str(number), epochs=1, batch_size=32, config=QUIET)

    with pytest.raises(ConfigError, match="compares an output with a target"):
        brim.train(model, nn.MSELoss(), {"x": X, "y": Y}, out=tmp_path / "dict", epochs=1, config=QUIET)


# Loggers


class Kept:
    """The least that a logger is."""

    def __init__(self, fails: bool = False) -> None:
        self.values: list[tuple[int, dict[str, float]]] = []
        self.files: list[Path] = []
        self.fails = fails

    def log(self, values: Any, step: int) -> None:
        if self.fails:
            raise OSError("gone")
        self.values.append((step, dict(values)))

    def artifact(self, path: Path) -> None:
        self.files.append(path)


def test_a_logger_is_two_methods_and_its_failure_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, broken = Kept(), Kept(fails=True)
    with caplog.at_level(logging.WARNING, "brim"), brim.loggers.using([kept]):
        brim.train(
            linear(), loss, (X, Y), out=tmp_path / "run", epochs=2, batch_size=50, loggers=[broken], config=QUIET
        )

    assert [step for step, _ in kept.values] == [1, 2, 3, 4]
    assert set(load_file(kept.files[0])) == {"weight", "bias"}
    assert caplog.text.count("Kept failed in log (gone); going on without it") == 1


def test_a_table_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    for begin, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        table = brim.loggers.CSV()
        table.begin(tmp_path, begin)
        for step in steps:
            table.log({"loss": 10.0 * begin + step, **({"lr": 0.5} if step == 4 else {})}, step)
        table.end()

    rows = (tmp_path / "metrics.csv").read_text().split()
    assert rows == [
        "step,loss,lr",
        "1,1.0,",
        "2,2.0,",
        "3,23.0,",
        "4,24.0,0.5",
    ]


def test_a_tracked_run_continues_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, begun = ModuleType("wandb"), list[dict[str, Any]]()
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.init = lambda **options: begun.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for step in (0, 7, 0):
        brim.loggers.WandB(mode="offline").begin(tmp_path, step)

    first, resumed, another = (options["id"] for options in begun)
    assert first == resumed != another


# What a run leaves


def test_a_run_is_a_folder_that_others_read(tmp_path: Path) -> None:
    losses = iter([0.5, 0.21875, 0.25])
    model = linear()
    brim.train(
        model, loss, (X, Y), out=tmp_path / "run", epochs=3, batch_size=50, config=QUIET, optimizer=sgd,
        evaluate=lambda model: {"val_loss": next(losses), "accuracy": 0.75},
    )  # fmt: skip
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "run" / name).rename(shared / name)
    with (tmp_path / "run/train/metrics.jsonl").open("a") as lines:
        lines.write('{"step": 7, "val_loss": 0.0')  # by a run that is still being written
    run = brim.load_run(tmp_path / "run", module=linear(), device="cpu")

    assert "| val_loss | 0.2188 |" in (shared / "README.md").read_text()
    assert "| parameters | 5 |" in (shared / "README.md").read_text()
    assert json.loads((shared / "config.json").read_text())["model_type"] == "brim-module"
    assert torch.equal(load_file(shared / "model.safetensors")["weight"], run.module.weight)
    assert not torch.equal(run.module.weight, model.weight)  # the best, not the last
    assert (run.metrics["best_val_loss"], run.metrics["val_loss"], run.metrics["step"]) == (0.21875, 0.25, 6)
    assert torch.equal(run.predict(X), run.module(X))
    assert list(run.to_pandas()["val_loss"].dropna()) == [0.5, 0.21875, 0.25]


@pytest.mark.parametrize(
    ("change", "code"),
    [({"kind": "rf-locator"}, "wrong_kind"), ({"format_version": 2}, "other_version"), ({"training": None}, "damaged")],
)
def test_a_run_of_another_kind_or_version_is_not_continued(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    arguments: dict[str, Any] = {"out": tmp_path / "run", "epochs": 1, "batch_size": 50, "config": QUIET}
    brim.train(linear(), loss, (X, Y), **arguments)
    file = tmp_path / "run" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(CheckpointError) as caught:
        brim.train(linear(), loss, (X, Y), **arguments)
    assert caught.value.code == code
    file.unlink()
    with pytest.raises(CheckpointError, match=r"is not empty and has no run\.json"):
        brim.train(linear(), loss, (X, Y), **arguments)


def test_rows_held_out_have_the_mean_loss_of_their_rows(tmp_path: Path) -> None:
    """Three batches, the last of them of 36 rows; the model predicts 0, and the loss is the mean of y."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]).squeeze(-1) + batch[1]).mean()

    report = brim.train(
        model, mean, (X, Y), out=tmp_path / "run", epochs=1, batch_size=32, evaluate=(X, Y), config=QUIET,
        optimizer=lambda params: torch.optim.SGD(params, 0.0),
    )  # fmt: skip

    assert report.best_val_loss == pytest.approx(float(Y.double().mean()), rel=1e-6)


def test_a_loader_is_read_in_another_order_each_epoch_and_resumes_in_the_middle() -> None:
    source = LoaderSource(DataLoader(TensorDataset(torch.arange(40)), 8, shuffle=True), torch.device("cpu"), seed=3)
    epochs = [[batch[0].tolist() for batch in source.epoch(number)] for number in (0, 1, 0)]

    assert all(sorted(itertools.chain(*epoch)) == list(range(40)) for epoch in epochs)
    assert epochs[0] == epochs[2] != epochs[1]
    assert [batch[0].tolist() for batch in source.epoch(1, 3)] == epochs[1][3:]
    assert (source.num_items, source.num_batches, source.batch_size) == (40, 5, 8)


def test_a_factory_is_the_code_that_its_digest_is_of(tmp_path: Path) -> None:
    for number in (1, 2):  # files of one size, written within a second
        (tmp_path / "mine.py").write_text(f"def make(columns):\n    return {number}\n")
        factory = modules.load_factory(f"{tmp_path}/mine.py:make")
        assert factory.make({}) == number
        assert factory.sha256 == hashlib.sha256((tmp_path / "mine.py").read_bytes()).hexdigest()


def test_rows_held_out_are_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "seen = {True: set(), False: set()}\n"
        "def make(columns):\n"
        "    def loss(model, batch):\n"
        "        seen[model.training].update(batch['x'][:, 0].tolist())\n"
        "        return model(batch['x']).mean()\n"
        "    return torch.nn.Linear(1, 1), loss\n"
    )
    save_file({"x": torch.arange(50.0)[:, None]}, tmp_path / "rows.safetensors")
    settings = ModuleTraining(epochs=2, batch_size=8, val_share=0.2, seed=1)
    made: list[Any] = []
    make_module = modules.make_module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "make_module", lambda *given: made.append(given[0]) or make_module(*given))
        modules.train_module(
            f"{tmp_path}/mine.py:make", str(tmp_path / "rows.safetensors"), tmp_path / "run", settings, device="cpu"
        )
    seen = made[0].make.__globals__["seen"]

    assert (len(seen[True]), len(seen[False])) == (40, 10)
    assert seen[True] | seen[False] == set(range(50))
