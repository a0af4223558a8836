"""From settings to a running service: all that happens before the first child process starts, in order.

One service per data directory, by a lock that ends with the process; databases are migrated once, here, so that workers
and API never race for it; jobs of workers that no longer exist return to the queue while nobody can be running them.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from brim.errors import ConfigError, Conflict, StorageError
from brim.jobs.durable import Queue, migrate
from brim.jobs.registry import datasets as sources
from brim.jobs.store import Catalogue, upgrade
from brim.jobs.worker import reconcile
from brim.jobs.worker.process import FileLock
from brim.service import token
from brim.service.run import unix_socket
from brim.service.run.process import Death
from brim.service.run.supervisor import Oversee, Supervisor, listen, programs
from brim.service.settings import Settings


def serve(
    settings: Settings, gpus: Sequence[str], stop: Callable[[], bool], started: Callable[[Settings], None]
) -> None:
    """Run the service until stop returns True; `started` gets the complete settings, with token and port."""
    with ExitStack() as stack:
        stack.callback(hold(settings).release)
        settings = replace(settings, token=choose_token(settings))
        listening = stack.enter_context(listen(settings.host, settings.port))
        settings = replace(settings, port=listening.getsockname()[1])
        catalogue, queue = open_databases(settings)
        stack.callback(catalogue.close)
        stack.callback(queue.close)
        catalogue.devices.clear()  # workers report their devices at every start
        sources.tidy(catalogue, settings.data)
        reconcile.orphans(catalogue, queue, {f"w{index}" for index in range(settings.workers)}, settings.data)
        tidy(settings)
        pages = None
        if settings.dashboard:
            stack.callback(settings.dashboard_socket.unlink, missing_ok=True)
            pages = stack.enter_context(unix_socket.listen(settings.dashboard_socket)).fileno()
        stack.callback(settings.reader_socket.unlink, missing_ok=True)
        reading = stack.enter_context(unix_socket.listen(settings.reader_socket)).fileno()
        children = programs(settings, listening.fileno(), gpus, pages, reading)
        Supervisor(children, overseer(settings, catalogue, queue)).run(stop, lambda: started(settings))


def hold(settings: Settings) -> FileLock:
    """Create the data directory and lock it for this process."""
    try:
        settings.make_folders()
        lock = FileLock(settings.data / "service.lock")
        taken = lock.take()
    except OSError as failure:
        raise StorageError(
            f"{settings.data} cannot be used: {failure.strerror}", field="data", hint="choose another {data}"
        ) from failure
    if not taken:
        raise Conflict(
            f"{settings.data} is in use by process {lock.holder()}",
            field="data",
            code="in_use",
            hint="stop it or choose another {data}",
        )
    return lock


def choose_token(settings: Settings) -> str:
    """The token; other machines may connect only with one that somebody chose or has seen."""
    if not settings.is_loopback and not token.is_chosen(settings.token_file):
        raise ConfigError(
            "lets other machines connect, and there is no token yet",
            field="host",
            value=settings.host,
            hint="choose one in BRIM_TOKEN, or start once without {host}, which makes one",
        )
    return token.ensure(settings.token_file)


def open_databases(settings: Settings) -> tuple[Catalogue, Queue]:
    """Both databases, migrated, and of this data directory."""
    upgrade(settings.catalogue_url)
    migrate(settings.jobs_url)
    catalogue = Catalogue.open(settings.catalogue_url)
    ours = _installation(settings.data / "installation")
    if catalogue.claim(ours) != ours:
        catalogue.close()
        raise Conflict(
            f"the database belongs to another data directory than {settings.data}",
            field="database",
            hint="give the {data} it was first used with, or another database",
        )
    return catalogue, Queue(settings.jobs_url)


def tidy(settings: Settings) -> None:
    """Remove what processes of an earlier start left: unfinished uploads, counters, counts of loads."""
    for file in (settings.data / "workers").glob("predict-*.loading"):
        file.unlink(missing_ok=True)
    for folder in (settings.data / "uploads").glob("[0-9a-f]" * 32):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(settings.metrics_folder, ignore_errors=True)
    if settings.api_processes > 1:
        settings.metrics_folder.mkdir(mode=0o700)


def overseer(settings: Settings, catalogue: Catalogue, queue: Queue) -> Oversee:
    """Looks after the jobs: notes deaths of workers, then compares the jobs with the queue."""
    noted = reconcile.Deaths(catalogue, queue, settings.data)

    def oversee(deaths: Sequence[Death]) -> Sequence[str]:
        for death in deaths:
            noted.note(death.name, death.reason)
        return reconcile.once(catalogue, queue, time.time(), settings.data)

    return oversee


def _installation(file: Path) -> str:
    """The identifier of this data directory, made once."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        made = secrets.token_hex(16)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(made + "\n")
        temporary.replace(file)
        return made
