"""The reader process: calls are answered, time out, die alone, and never take the API with them."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_api import running
from supervised import Supervised

from brim.errors import DatasetError, ImageError, TooMany, Unavailable
from brim.jobs import sandbox
from brim.service.reader.client import Reader
from brim.service.run import unix_socket
from brim.service.run.process import Program
from brim.service.run.supervisor import Programs, programs
from brim.service.settings import Settings
from waiting import until

TOY = Path(__file__).with_name("toy_reader.py")


class Reading(Supervised):
    """A supervisor with a toy reader, at work in a thread."""

    def __init__(self, data: Path, *, light: bool = True) -> None:
        self.settings = Settings(data=data, token="t")
        self.settings.make_folders()
        self._listening = unix_socket.listen(self.settings.reader_socket)
        (program,) = programs(self.settings, 0, [], None, self._listening.fileno()).readers
        super().__init__(Programs([], [], readers=[_toy(program, light)]))

    def end(self) -> None:
        super().end()
        self._listening.close()

    def call(self, function: str, **arguments: Any) -> Any:
        return asyncio.run(Reader(self.settings.reader_socket).call(function, **arguments))

    @property
    def pid(self) -> int | None:
        return self.supervisor.pids()["reader"]

    def num_running(self) -> int:
        """Calls that have a process now, each with a session of its own."""
        num = 0
        for pid in map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                num += os.getsid(pid) == pid
        return num


def _toy(program: Program, light: bool) -> Program:
    command = [sys.executable, str(TOY), *program.command[-3:], "light" if light else "full"]
    return replace(program, command=command)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    with Reading(tmp_path_factory.mktemp("reading") / "data") as made:
        yield made


def test_a_call_returns_the_functions_value(reading):
    assert reading.call("echo", text="ü", number=1.5, nothing=None) == {"text": "ü", "number": 1.5, "nothing": None}


def test_an_error_arrives_with_its_hint(reading):
    with pytest.raises(DatasetError) as failure:
        reading.call("fail", kind="ours")
    assert (failure.value.message, failure.value.hint) == ("it is damaged", "make it again with {rf generate}")
    with pytest.raises(RuntimeError, match="its log says more"):
        reading.call("fail", kind="unexpected")


def test_a_call_that_dies_takes_nothing_with_it(reading):
    before = reading.pid
    with pytest.raises(Unavailable):
        reading.call("die")
    assert reading.call("echo", a=1) == {"a": 1}
    assert reading.pid == before


def test_a_call_has_a_limit_of_memory(reading):
    assert reading.call("eat", gib=1) == 1024**3
    with pytest.raises(ImageError, match="more memory"):
        reading.call("eat", gib=16)


@pytest.mark.skipif(len(sandbox.available()) < 2, reason="this kernel has no walls")
def test_a_call_that_reads_can_neither_write_nor_connect(reading, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calls = {"write": {"file": str(tmp_path / "x")}, "connect": {"port": listening.getsockname()[1]}}
        for function, arguments in calls.items():
            with pytest.raises(RuntimeError):
                reading.call(function, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_call_is_killed_on_its_time_out(reading, tmp_path):
    with pytest.raises(Unavailable, match="longer than"):
        reading.call("hold", gate=str(tmp_path / "never"), timeout_s=0.5)
    until(lambda: reading.num_running() == 0)


def test_calls_run_beside_each_other_and_not_too_many(reading, tmp_path):
    gate = tmp_path / "gate"

    async def beside() -> list[Any]:
        reader = Reader(reading.settings.reader_socket, limit=2)
        held = [asyncio.create_task(reader.call("hold", gate=str(gate)))]
        await asyncio.to_thread(until, lambda: reading.num_running() == 1)
        assert await reader.call("echo", a=1) == {"a": 1}
        held.append(asyncio.create_task(reader.call("hold", gate=str(gate))))
        await asyncio.to_thread(until, lambda: reading.num_running() == 2)
        with pytest.raises(TooMany):
            await reader.call("echo")
        gate.touch()
        return await asyncio.gather(*held)

    assert asyncio.run(beside()) == [None, None]


def test_a_reader_that_is_killed_comes_back(reading):
    reading.call("echo")
    before = reading.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert reading.call("echo", a=1) == {"a": 1}, "calls wait while it is started again"
    assert reading.pid not in (before, None)


def test_the_process_holds_the_libraries_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIM_TOKEN", "secret")
    with Reading(tmp_path / "data", light=False) as reading:
        assert reading.call("facts") == {"parent": reading.pid, "threads": 1, "torch": True, "token": None}
        threads = list(Path(f"/proc/{reading.pid}/task").iterdir())
        assert len(threads) == 1, "a process with threads must not fork"


def test_an_export_ends_when_its_client_leaves(tmp_path, monkeypatch):
    with Reading(tmp_path / "data") as reading:
        reading.call("echo")
        with running(tmp_path / "data", reader=Reader(reading.settings.reader_socket)) as api:
            id = api.add_dataset(path="/nowhere", owned=False).id
            uploads = api.settings.data / "uploads"
            with api.connect("GET", f"/api/datasets/{id}/export"):
                until(lambda: any(uploads.iterdir()))
            until(lambda: api.context.exports.num_free == 2)
            time.sleep(0.3)  # a process that still ran would write again
            assert list(uploads.iterdir()) == []
