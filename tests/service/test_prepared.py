"""Programs that are forked from the prepared process: children of the supervisor like any other."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.service.run.prepared import Prepared
from brim.service.run.process import Child, Death, Program
from waiting import until

PROGRAM = '''
import json, os, sys, threading, time
from pathlib import Path
from brim.jobs.worker.process import Heartbeat, die_with_supervisor, read_settings
def main(argv):
    die_with_supervisor(int(argv[1]))
    settings, beat = read_settings(), Heartbeat(int(argv[0]))
    facts = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "argv": argv,
             "mark": os.environ["MARK"], "home": os.environ.get("HOME"),
             "threads": sys.modules["torch"].get_num_threads()}
    with open(settings["notes"], "a") as notes: notes.write(json.dumps(facts) + chr(10))
    beat()
    if settings["exit"] is not None: sys.exit(settings["exit"])
    time.sleep(600)
'''  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Iterator[tuple[Prepared, int]]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "forked_program.py").write_text(PROGRAM)
    lifeline = os.pipe()
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    made = Prepared({**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, lifeline[0])
    until(lambda: not made.is_starting())
    assert made._is_ready
    yield made, lifeline[0]
    made.close()
    for end in lifeline:
        os.close(end)


def child(prepared, notes: Path, exit: int | None = None) -> Child:
    command = [sys.executable, "-m", "forked_program", "{beat}", "{lifeline}", "word"]
    program = Program(
        name="w0", command=command, stdin=json.dumps({"notes": str(notes), "exit": exit}), is_forked=True, hang_s=60.0,
        env={"MARK": "here", "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    return Child(program, prepared[1], prepared[0])


def steps(child: Child) -> Death | None:
    """One step; the death if there was one."""
    time.sleep(0.01)
    return child.step(time.monotonic())


def facts(notes: Path) -> list[dict]:
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def test_a_fork_is_a_child_with_its_own_group_environment_and_command_line(prepared, tmp_path):
    made = child(prepared, tmp_path / "notes")
    steps(made)
    until(lambda: facts(tmp_path / "notes"))
    (one,) = facts(tmp_path / "notes")
    assert (one["pid"], one["parent"], one["group"]) == (made.pid, os.getpid(), made.pid)
    assert (one["mark"], one["home"], one["threads"]) == ("here", os.environ.get("HOME"), 2)
    assert one["argv"][1:] == [str(prepared[1]), "word"]
    assert f"-m\0forked_program\0{one['argv'][0]}\0" in Path(f"/proc/{made.pid}/cmdline").read_text()

    made.kill()
    until(lambda: (death := steps(made)) is not None and death.reason == "signal 9")


def test_the_exit_code_is_known_and_the_next_one_comes_soon(prepared, tmp_path):
    made = child(prepared, tmp_path / "notes", exit=3)
    deaths: list[Death] = []
    until(lambda: deaths.extend(filter(None, [steps(made)])) or len(deaths) == 2)
    assert [death.code for death in deaths] == [3, 3]
    assert len(facts(tmp_path / "notes")) == 2
