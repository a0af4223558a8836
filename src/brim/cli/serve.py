"""`brim serve`: the service in the foreground, until Ctrl-C or SIGTERM; `brim tokens`: who may do what.

The commands for tokens work on the data directory, whether its service runs or not; a running one follows at once.
"""

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli.options import AsJson, DataDir, argument, count, needing_service, number, one_of, option, percent, whole
from brim.cli.terminal import Stop, print_json, print_result, print_table, quote, say, show
from brim.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from brim.service.access import NamedToken, TokenFile
    from brim.service.settings import Settings

tokens = typer.Typer(no_args_is_help=True, epilog="Example: brim tokens add ann --role operator > ann.token")
_ROLES = ("viewer", "operator", "administrator")


def serve(
    host: Annotated[
        str, option("HOST", "Address to listen on; one that others can reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, option("PORT", "0 takes any free port.", parser=whole)] = 8000,
    database: Annotated[
        str | None,
        option("URL", "postgresql://USER:PASSWORD@HOST/NAME, or BRIM_DATABASE.", show_default="SQLite files in --data"),
    ] = None,
    data: Annotated[
        Path | None, option("DIR", "Datasets, runs, results and the token.", show_default="BRIM_DATA, brim-data")
    ] = None,
    workers: Annotated[
        int | None, option("N", "Worker processes.", parser=count, show_default="one per GPU, or one")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        option("NAME", "Another name the service is reached by: a proxy's, a container's. Repeatable."),
    ] = None,
    predict_memory: Annotated[
        float,
        option(
            "PERCENT",
            "Share of each device's memory reserved for prediction over HTTP; 0 turns prediction off.",
            parser=percent,
        ),
    ] = 20.0,
    api_processes: Annotated[
        int | None,
        option(
            "N", "API processes.", parser=count, show_default="one, on more than 4 cores three for every 8, up to 6"
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Ray cluster for jobs that ask for one: auto or ray://HOST:PORT.",
            show_default="BRIM_CLUSTER, none",
        ),
    ] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Serve pages for a browser beside the API.")
    ] = True,
) -> None:
    """Serve durable jobs, predictions and a dashboard over HTTP, with a worker and a predictor per GPU.

    Prints one address to open in a browser. Ctrl-C stops jobs at their next batch; they continue at the next start.
    """
    gpus = visible_gpus()
    if workers is not None and gpus and workers > len(gpus):
        hint = "give fewer, or set CUDA_VISIBLE_DEVICES= for workers on the CPU"
        message = f"is more than the {len(gpus)} GPUs here, one for each worker"
        raise ConfigError(message, field="workers", value=workers, code="conflict", hint=hint)
    with needing_service("the service"):
        from brim.service.run.start import serve as run_service
        from brim.service.settings import from_options, open_to_others
    settings = from_options(
        host=host, port=port, database=database, data=data, workers=workers or len(gpus) or 1,
        allow_hosts=tuple(allow_host or ()), api_processes=api_processes or default_api_processes(),
        predictors=len(gpus) or 1, predict_memory=predict_memory, dashboard=dashboard, gpus=tuple(gpus),
        cluster=cluster,
    )  # fmt: skip
    if problem := open_to_others(settings.data):
        say(f"warning: {problem}; make it private with: chmod 700 {quote(settings.data)}")
    with Stop() as stop:
        run_service(settings, gpus, stop, _announce)
    stop.exit()


def default_api_processes() -> int:
    """One, or on a large machine enough that parsing requests and writing answers keep no GPU waiting.

    Estimated, not measured: some 3 cores at three times what an H200 segments, from times on faster cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if cores <= 4 else min(6, 3 * cores // 8)


def visible_gpus() -> list[str]:
    """The GPUs for workers, as CUDA names them; this process never imports torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        from brim.doctor import num_gpus

        return [str(index) for index in range(num_gpus())]
    names = [name.strip() for name in chosen.split(",")]
    ends = [index for index, name in enumerate(names) if name in ("", "-1")]  # CUDA stops reading there too
    return names[: ends[0]] if ends else names


def _announce(settings: "Settings") -> None:
    """Print the address, with the token unless it came from BRIM_TOKEN: logs may be kept."""
    database = "the database" if settings.database else "SQLite files there"
    say(f"data in {settings.data}, jobs in {database}, {settings.workers} worker{'s' * (settings.workers > 1)}")
    say("Ctrl-C stops; jobs continue at the next start")
    show(settings.url if os.environ.get("BRIM_TOKEN") else settings.entry_url)


# Tokens


@tokens.command("add", epilog="Example: brim tokens add ann --role operator > ann.token")
def add_token(
    name: Annotated[str, argument("NAME", "Whom it is for: letters, digits, dots, @, +, - and _.")],
    role: Annotated[
        str,
        option(
            "ROLE",
            "viewer reads; operator also submits, uploads, predicts and deletes; administrator also adds models and "
            "tokens.",
            **one_of(*_ROLES),
        ),
    ] = "viewer",
    days: Annotated[
        float | None, option("DAYS", "How long it is valid.", parser=number, show_default="until it is revoked")
    ] = None,
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a token for one person or program, and print it; it is not stored and cannot be shown again."""
    with _token_file(data, make=True) as known:
        made, text = known.add(name, role, days)
        _note(known, made, "Make a named token")
    if as_json:
        print_json({**_token_json(made), "token": text})
        return
    say(f"{made.name} may now send this token, as {made.role}; it is shown only here")
    show(text)


@tokens.command("list", epilog="Example: brim tokens list")
def list_tokens(data: DataDir = None, as_json: AsJson = False) -> None:
    """List who has a token, and who is signed in; the shared token is not listed."""
    with _token_file(data) as known:
        rows = [_token_json(each) for each in known.all()]
    if as_json:
        print_json({"tokens": rows})
        return
    if not rows:
        say('no named tokens; make one with "brim tokens add NAME --role operator"')
        return
    names = ("name", "role", "source", "created_at", "expires_at")
    cells = [[row[name] or "until revoked" for name in names] for row in rows]
    print_table(("NAME", "ROLE", "SOURCE", "CREATED", "EXPIRES"), cells)


@tokens.command("revoke", epilog="Example: brim tokens revoke ann")
def revoke_token(
    name: Annotated[str, argument("NAME", 'As shown by "brim tokens list".')],
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a token and all its browser sessions immediately."""
    with _token_file(data) as known:
        gone = known.revoke(name)
        _note(known, gone, "Revoke a named token")
    print_result({"name": gone.name, "revoked": True}, as_json, f"{gone.name}: revoked")


@tokens.command("log", epilog="Example: brim tokens log --limit 20")
def show_log(
    limit: Annotated[int, option("N", "Most lines.", parser=count)] = 50, data: DataDir = None, as_json: AsJson = False
) -> None:
    """Show who did what, the newest first."""
    from brim.service.access import Actions

    with _token_file(data) as known:
        entries = Actions(known.file.parent).last(limit)
    if as_json:
        print_json({"actions": entries})
        return
    if not entries:
        say("nothing has been done yet")
        return
    names = ("at", "by", "role", "action", "about", "status")
    print_table([name.upper() for name in names], [[str(entry.get(name) or "") for name in names] for entry in entries])


@contextmanager
def _token_file(data: Path | None, *, make: bool = False) -> Iterator["TokenFile"]:
    from brim.service.access import TokenFile
    from brim.service.settings import data_folder

    folder = data_folder(data)
    if make:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as failure:
            raise StorageError(f"{folder}: {failure.strerror}", hint="choose another {data}") from failure
    elif not folder.is_dir():
        raise ConfigError(f"{folder} does not exist", hint="give the same {data} as to brim serve")
    yield TokenFile(folder)


def _note(known: "TokenFile", token: "NamedToken", action: str) -> None:
    from brim.service.access import Actions

    Actions(known.file.parent).note(f"{getpass.getuser()} on this machine", "administrator", action, about=token.name)


def _token_json(token: "NamedToken") -> dict[str, Any]:
    """Without its digest."""
    values = {name: value for name, value in asdict(token).items() if name != "sha256"}
    times = {name: values[name] for name in ("created_at", "expires_at")}
    shown = {name: at and datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for name, at in times.items()}
    return {**values, **shown}
