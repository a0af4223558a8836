"""From settings to a running service: all that happens before the first child process starts, in order.

One service per data directory, by a lock that ends with the process; databases are migrated once, here, so that workers
and API never race for it; jobs of workers that no longer exist return to the queue while nobody can be running them.
"""

import resource
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from brim.errors import ConfigError, Conflict, StorageError, Unavailable
from brim.jobs.durable import Queue, migrate
from brim.jobs.registry import datasets as sources
from brim.jobs.store import Catalogue, is_id, new_id, upgrade
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
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection and a request take one each
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
        reconcile.adopt_orphans(catalogue, queue, {f"w{index}" for index in range(settings.workers)}, settings.data)
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
    if not settings.is_loopback and token.find(settings.token_file) is None:
        raise ConfigError(
            "lets other machines connect, and there is no token yet",
            field="host",
            value=settings.host,
            hint="choose one in BRIM_TOKEN, or start once without {host}, which makes one",
        )
    return token.ensure(settings.token_file)


def open_databases(settings: Settings) -> tuple[Catalogue, Queue]:
    """Both databases, migrated, and of this data directory.

    The queue is made last: where there is one, the catalogue was complete before.
    """
    queue_file = Path(settings.jobs_url.removeprefix("sqlite:///"))
    upgrade(settings.catalogue_url)
    catalogue = Catalogue.open(settings.catalogue_url)
    try:
        owner = catalogue.owner()
        if owner is None and queue_file.is_file() and queue_file.stat().st_size:
            raise Unavailable(
                f"the catalogue of {settings.data} is empty, but {queue_file.name} is of an earlier start; restore "
                f"catalogue.sqlite from a copy, or move {queue_file.name} away to begin with an empty catalogue"
            )
        ours = _installation(settings.data / "installation", owner, is_own=settings.database is None)
        if catalogue.claim(ours) != ours:
            raise Conflict(
                f"the database belongs to another data directory than {settings.data}",
                field="database",
                hint="give the {data} it was first used with, or another database",
            )
        migrate(settings.jobs_url)
    except BaseException:
        catalogue.close()
        raise
    return catalogue, Queue(settings.jobs_url)


def tidy(settings: Settings) -> None:
    """Remove what processes of an earlier start left: unfinished uploads, counters, counts of loads."""
    for file in (settings.data / "workers").glob("predict-*.loading"):
        file.unlink(missing_ok=True)
    settings.discard_uploads()
    shutil.rmtree(settings.metrics_folder, ignore_errors=True)
    if settings.api_processes > 1:
        settings.metrics_folder.mkdir(mode=0o700)


def overseer(settings: Settings, catalogue: Catalogue, queue: Queue) -> Oversee:
    """Looks after the jobs: notes deaths of workers, then compares the jobs with the queue."""
    reconciler = reconcile.Reconciler(catalogue, queue, settings.data)

    def oversee(deaths: Sequence[Death]) -> Sequence[str]:
        for death in deaths:
            reconciler.died(death.name, death.reason)
        return reconciler.once()

    return oversee


def _installation(file: Path, owner: str | None, *, is_own: bool) -> str:
    """The identifier of this data directory, made once; owner is what the catalogue says, which lies in it or not."""
    try:
        text = file.read_bytes().strip().decode(errors="replace")
    except FileNotFoundError:
        if owner is not None and is_own:
            raise StorageError(f"{file} is missing; restore it from a copy, or write {owner} to it") from None
        text = new_id()
        token.write_secret(file, text)
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror}; restore it from a copy") from failure
    if not is_id(text):
        remedy = "remove it to have one made" if owner is None else f"or write {owner} to it, as the database says"
        raise StorageError(f"{file} is damaged; restore it from a copy, {remedy}")
    return text
