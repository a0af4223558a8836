"""The supervisor around small stand-in programs: real processes, pipes and signals, no jobs."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from supervised import Supervised

from brim.errors import ConfigError, Conflict
from brim.service.run import process
from brim.service.run.process import Child, Death, Program
from brim.service.run.supervisor import Programs, listen, programs
from brim.service.settings import Settings
from waiting import PATIENCE_S, until

# Each stand-in notes its number under its name, then does what the test is about.
HEAD = """
import json, os, signal, sys, threading, time
from pathlib import Path
from brim.jobs.worker.process import FileLock, Heartbeat, die_with_supervisor, read_settings
settings = read_settings()
die_with_supervisor(int(sys.argv[2]))
beat = Heartbeat(int(sys.argv[1])) if sys.argv[1] != "None" else lambda: None
with open(settings["notes"], "a") as notes: notes.write(f"{os.getpid()}\\n")
"""
BEATING = "while True: beat(); time.sleep(0.02)"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").touch()
    return tmp_path / "notes"


def program(notes: Path, body: str, *, name: str = "w0", hang_s: float | None = None) -> Program:
    code = HEAD + textwrap.dedent(body)
    command = [sys.executable, "-c", code, "{beat}", "{lifeline}"]
    return Program(name=name, command=command, stdin=json.dumps({"notes": str(notes)}), hang_s=hang_s)


def pids(notes: Path) -> list[int]:
    return [int(line) for line in notes.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    except FileNotFoundError:
        return False


def everything(made: Programs) -> list[Program]:
    return [*made.apis, *made.workers, *made.predictors]


@pytest.fixture
def running(notes: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervised]]:
    monkeypatch.setattr(process, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(process, "SHORT_LIFE_S", 0.2)
    made: list[Supervised] = []

    def make(*workers: Program, oversee: Callable = lambda deaths: []) -> Supervised:
        api_notes = notes.with_name("api")
        api_notes.touch()
        api = program(api_notes, "time.sleep(600)", name="api")
        made.append(Supervised(Programs([api], workers), oversee))
        return made[-1].__enter__()

    yield make
    for one in made:
        one.end()


# Ends and restarts


def test_what_is_killed_is_started_again_and_only_the_death_of_a_worker_is_told(running, notes):
    deaths: list[Death] = []
    running(program(notes, "time.sleep(600)"), oversee=lambda died: deaths.extend(died) or [])
    api = notes.with_name("api")
    until(lambda: pids(api) and pids(notes))

    os.kill(pids(api)[0], signal.SIGKILL)
    until(lambda: len(pids(api)) == 2)
    assert len(pids(notes)) == 1
    os.kill(pids(notes)[0], signal.SIGKILL)
    until(lambda: len(pids(notes)) == 2 and deaths)

    assert [(death.name, death.code) for death in deaths] == [("w0", -signal.SIGKILL)]


def test_a_silent_worker_is_killed_and_one_that_beats_is_not(running, notes):
    silent = notes.with_name("silent")
    silent.touch()
    running(
        program(notes, BEATING, name="w0", hang_s=4.0),
        program(silent, "beat(); time.sleep(600)", name="w1", hang_s=4.0),
    )

    until(lambda: len(pids(silent)) >= 2)

    assert len(pids(notes)) == 1


def test_one_that_gives_up_is_killed_at_once_and_said_so(running, notes):
    told: list[Death] = []
    body = "beat()\nif not Path(settings['notes'] + '.second').exists():\n    beat.give_up()\ntime.sleep(600)"

    def oversee(deaths: Sequence[Death]) -> list[str]:
        notes.with_name("notes.second").touch()
        told.extend(deaths)
        return []

    running(program(notes, body, hang_s=60), oversee=oversee)
    until(lambda: told)

    assert told[0].reason == "it hung and asked to be killed"


def test_deaths_are_told_with_their_reason_also_after_an_outage(running, notes, caplog):
    told: list[Death] = []
    calls = []

    def oversee(deaths: Sequence[Death]) -> list[str]:
        calls.append(1)
        if len(calls) < 3:
            raise Conflict("the database does not answer")
        told.extend(deaths)
        return []

    body = "first = len(Path(settings['notes']).read_text().split()) == 1\nif first:\n    os._exit(7)\ntime.sleep(600)"
    running(program(notes, body), oversee=oversee)
    until(lambda: told)

    assert (told[0].name, told[0].reason) == ("w0", "exit code 7")
    assert caplog.text.count("the database does not answer") == 1


def test_what_a_worker_started_ends_with_it(running, notes):
    body = """
    import subprocess
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(settings["notes"] + ".helper", "a") as notes: notes.write(f"{helper.pid}\\n")
    time.sleep(600)
    """
    helpers = notes.with_name("notes.helper")
    running(program(notes, body))
    until(helpers.exists)
    until(lambda: pids(helpers))

    os.kill(pids(notes)[0], signal.SIGKILL)

    until(lambda: not is_running(pids(helpers)[0]))


def test_a_child_that_ends_at_once_waits_longer_each_time(notes):
    reading, writing = os.pipe()
    child = Child(program(notes, "os._exit(3)"), reading)
    starts, now = [], 0.0
    while len(starts) < 5:
        before = child.pid
        if child.step(now) is None and before is None and child.pid is not None:
            starts.append(now)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        now += 0.25
    child.wait(PATIENCE_S)
    os.close(reading), os.close(writing)

    waits = [round(late - early, 1) for early, late in itertools.pairwise(starts)]
    assert waits == sorted(waits)
    assert waits[0] <= 1.0
    assert waits[-1] >= 4.0


# Ending


def test_workers_are_asked_to_end_before_the_api(running, notes):
    body = """
    def leave(*_):
        api = Path(settings["notes"]).with_name("api").read_text().strip()
        Path(settings["notes"] + ".drained").write_text(str(Path("/proc", api).exists()))
        os._exit(0)
    signal.signal(signal.SIGTERM, leave)
    with open(settings["notes"] + ".ready", "w"): pass
    while True: beat(); time.sleep(0.02)
    """
    one = running(program(notes, body, hang_s=60))
    until(notes.with_name("notes.ready").exists)

    one.end()

    assert notes.with_name("notes.drained").read_text() == "True", "people can watch them end"
    assert not any(is_running(pid) for pid in pids(notes) + pids(notes.with_name("api")))


def test_a_worker_that_will_not_end_is_killed(running, notes, monkeypatch):
    monkeypatch.setattr("brim.service.run.supervisor.DRAIN_S", 0.5)
    one = running(program(notes, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"))
    until(lambda: pids(notes))
    time.sleep(0.2)

    one.end()

    assert not is_running(pids(notes)[0])


def test_a_killed_supervisor_takes_its_children_along(notes):
    code = f"""
import sys, threading
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from pathlib import Path
from test_supervisor import BEATING, program
from brim.service.run.supervisor import Programs, Supervisor
api = program(Path({str(notes)!r}), "time.sleep(600)", name="api")
workers = [program(Path({str(notes)!r}), BEATING, hang_s=60)]
Supervisor(Programs([api], workers), lambda deaths: []).run(lambda: False)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: len(pids(notes)) == 2)

    parent.kill()
    parent.wait()

    until(lambda: not any(map(is_running, pids(notes))))


# Locks, sockets, what is run


def test_a_port_in_use_is_refused_in_words(monkeypatch):
    monkeypatch.setattr("brim.service.run.supervisor.BIND_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match=r"port \d+: address already"),
    ):
        listen("127.0.0.1", other.getsockname()[1])


def test_secrets_are_neither_in_arguments_nor_environment(tmp_path):
    database = "postgresql://me:hunter2@db/jobs"
    settings = Settings(data=tmp_path, token="secret-token", database=database, workers=2)

    for one in everything(programs(settings, 7, gpus=[])):
        shown = repr([one.command, dict(one.env), one])
        assert "secret-token" not in shown
        assert "hunter2" not in shown
        assert Settings.from_json(one.stdin) == settings


def test_children_do_not_inherit_secrets(running, notes, monkeypatch):
    monkeypatch.setenv("BRIM_TOKEN", "secret-token")
    body = 'Path(settings["notes"] + ".env").write_text(str(dict(os.environ)))\ntime.sleep(600)'
    running(program(notes, body))
    seen = notes.with_name("notes.env")
    until(lambda: seen.exists() and seen.read_text())

    assert "secret-token" not in seen.read_text()


def test_each_worker_has_its_own_gpu_or_its_share_of_the_cores_and_the_api_none(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = Settings(data=tmp_path, token="t", workers=2, predictors=2)

    gpus, cores = programs(settings, 7, gpus=["2", "5"]), programs(settings, 7, gpus=[])

    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in everything(gpus)] == ["", "2", "5", "2", "5"]
    assert [one.env["OMP_NUM_THREADS"] for one in cores.workers] == ["4", "4"]


@pytest.mark.parametrize(("percent", "jobs", "predictors"), [(20.0, "0.8", ["0.2"]), (0.0, "1", [])])
def test_jobs_leave_the_share_of_prediction_alone(tmp_path, percent, jobs, predictors):
    made = programs(Settings(data=tmp_path, token="t", predict_memory=percent), 7, gpus=[])

    assert [one.env["BRIM_MEMORY_SHARE"] for one in made.workers] == [jobs]
    assert [one.env["BRIM_MEMORY_SHARE"] for one in made.predictors] == predictors
