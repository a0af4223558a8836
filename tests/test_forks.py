"""Processes of tests that are forked behave as executed ones do."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import forks
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(not forks.is_possible(), reason="processes are executed here")
WHO = "import os; print(os.getpid(), os.getppid(), os.getpgrp(), os.getcwd())"


def python(*words: object, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)


def test_a_child_is_our_own_with_its_folder_and_its_group(tmp_path):
    child, parent, group, folder = python("-c", WHO, cwd=tmp_path, process_group=0).stdout.split()

    assert (int(parent), group, folder) == (os.getpid(), child, str(tmp_path))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('no')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_exit_code_is_an_interpreter_s(code, expected):
    assert python("-c", code).returncode == expected


def test_descriptors_keep_their_numbers_and_others_are_closed():
    reading, writing = os.pipe()
    code = f"import os; os.write({writing}, b'x'); print(sorted(map(int, os.listdir('/proc/self/fd')))[:3])"

    done = python("-c", code, pass_fds=[writing])
    os.close(writing)

    assert os.read(reading, 2) == b"x"  # and then the end, as nobody else holds it
    assert os.read(reading, 2) == b""
    os.close(reading)
    assert done.returncode == 0


def test_the_environment_is_the_one_that_was_given(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.HOOKED = True\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "MINE": "x"}
    code = "import os, torch; print(HOOKED, torch.get_num_threads(), os.environ['MINE'])"

    assert python("-c", code, env=env).stdout == "True 1 x\n"


def test_a_child_of_a_child_is_forked_too_and_shows_its_command():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHO!r}]); {WHO}"
    inner, outer = [line.split() for line in python("-c", code).stdout.splitlines()]

    assert inner[1] == outer[0]
    shown = python("-c", "print(open('/proc/self/cmdline').read().split(chr(0))[1:4])", "word").stdout
    assert shown.endswith(", 'word']\n")


def test_nothing_is_left_of_a_child_that_is_killed():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    servers = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    while not servers.read_text().split():
        assert child.poll() is None
    server = Path("/proc") / servers.read_text().split()[0]
    child.kill()
    child.wait(PATIENCE_S)

    def is_gone() -> bool:
        with suppress(OSError):
            return (server / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    until(is_gone)
