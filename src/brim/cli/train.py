"""`brim train`: any module, made by a function of the user's, on rows from anywhere."""

from pathlib import Path
from typing import Annotated, Any

from brim.cli.options import AsJson, DeviceName, NewRun, Resume, argument, from_settings, option
from brim.cli.terminal import Display, Stop, end_stopped, print_report, show, show_spent
from brim.engine.config import ModuleTraining
from brim.errors import ConfigError


@from_settings(
    ModuleTraining, "epochs", "batch_size", "learning_rate", "weight_decay", "tier", "precision", "compile", "seed",
    "val_share", "early_stopping_patience",
)  # fmt: skip
def train(
    *,
    factory: Annotated[str, argument("FILE.py:FACTORY", "A function that returns the module and the loss.")],
    data: Annotated[
        str,
        option(
            "SOURCE",
            "Rows: a dataset (directory or URL), a folder of .npy, a .safetensors, .npy, .npz, .parquet or .csv file, "
            "or the URL of a database.",
        ),
    ],
    out: NewRun,
    query: Annotated[str | None, option("SQL", "With a database: what to select, numbers only.")] = None,
    settings: dict[str, Any],
    device: DeviceName = "auto",
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a module of your own on rows of your own.

    FACTORY gets the columns (name to dtype and shape of a row) and returns the module and loss_fn(model, batch), and
    optionally functions that make an optimiser and a scheduler. Ctrl-C stops at the next batch; --resume continues.
    """
    config = ModuleTraining(**settings)
    if ":" not in factory or not factory.rpartition(":")[2].isidentifier():
        raise ConfigError(f'"{factory}" names no function; write FILE.py:NAME, as in my_module.py:make')
    if factory.rpartition(":")[0].endswith(".py") and not Path(factory.rpartition(":")[0]).is_file():
        raise ConfigError(f"{factory.rpartition(':')[0]} does not exist; write FILE.py:NAME, as in my_module.py:make")
    with Stop() as stop:
        from brim.engine.library import train_module

        with Display(stop, preparing=("loading", "rows")) as display:
            report = train_module(
                factory, data, out, config, query=query, device=device, progress=display.training, stop=stop,
                resume=resume,
            )  # fmt: skip
    if as_json:
        print_report(report.as_dict())
    if report.stopped:
        text = f"after {report.epochs} of {config.epochs} epochs, {report.steps} steps; nothing of them is lost"
        end_stopped(text, stop, resume=resume)
    if not as_json:
        from brim.engine.training import summary_line

        show(f"run:  {out}\nnext: brim.load_run({str(out)!r}) in Python gives its weights, metrics and settings")
        best = "" if report.best_val_loss is None else f", best val_loss {report.best_val_loss:.4g}"
        show(f"{report.epochs} epochs, {report.steps} steps{best}, tier {report.tier}\n{summary_line(report)}")
        show_spent()
