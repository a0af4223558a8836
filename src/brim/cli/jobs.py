"""`brim jobs submit | list | show | watch | cancel | pause | resume | logs | delete`: jobs of a running service."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from brim.cli.http import DEFAULT_URL, Client, find_token
from brim.cli.options import Json, check_choice, check_positive, one_of, whole
from brim.cli.terminal import Display, print_facts, print_json, say, show
from brim.errors import ConfigError, StorageError
from brim.jobs.status import FINISHED, STATUSES

JOBS = "/api/training/jobs"
ENDED = FINISHED | {"paused"}  # where a watcher has nothing more to see
FOLLOW_S = 1.0

jobs = typer.Typer(no_args_is_help=True, epilog="Example: brim jobs submit job.json")

Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help=f"The service; without it, BRIM_URL or {DEFAULT_URL}.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="File with the token; without it, BRIM_TOKEN or that of --data."),
]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="The service's data directory, where its token lies.")
]
Id = Annotated[str, typer.Argument(metavar="ID", help="A job's id.")]


@jobs.command(epilog='Example: brim jobs submit job.json --key nightly-2026-11-15   (or "-" for standard input)')
def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.json", help='The job, as the API takes it; "-" is standard input.')
    ],
    key: Annotated[
        str | None, typer.Option(metavar="K", help="Idempotency key: the same key gives the same job, not a second.")
    ] = None,
    url: Url = None,
    token_file: TokenFile = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Queue a job."""
    body = _read_body(file)
    headers = {"Idempotency-Key": _checked_key(key)} if key is not None else {}
    job = _client(url, token_file, data).post(JOBS, body, **headers)
    if as_json:
        print_json(job)
        return
    show(f"{job['id']}  {_line(job)}")
    say(f"next: brim jobs watch {job['id']}")


@jobs.command("list", epilog="Example: brim jobs list --status running")
def list_(
    status: Annotated[
        str | None, typer.Option(metavar="STATUS", help=f"{', '.join(STATUSES)}.", autocompletion=one_of(*STATUSES))
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Such as rf.generate.")] = None,
    page: Annotated[int, typer.Option(metavar="N", parser=whole, help="50 jobs a page, the newest first.")] = 1,
    url: Url = None,
    token_file: TokenFile = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """List jobs, the newest first."""
    check_choice("--status", status, STATUSES)
    check_positive("--page", page)
    found = _client(url, token_file, data).get(JOBS, status=status, kind=kind, page=page)
    if as_json:
        print_json(found)
        return
    for job in found["jobs"]:
        show(f"{job['id']}  {_line(job)}")
    if found["pages"] > 1:
        say(f"page {found['page']} of {found['pages']}, {found['total']} jobs")
    elif not found["jobs"]:
        say("no jobs")


@jobs.command("show", epilog="Example: brim jobs show ID --json")
def show_(job_id: Id, url: Url = None, token_file: TokenFile = None, data: Data = None, as_json: Json = False) -> None:
    """Show one job: where it is, what it was given, what came of it."""
    job = _client(url, token_file, data).get(_path(job_id))
    if as_json:
        print_json(job)
        return
    show(f"{job['id']}  {_line(job)}")
    print_facts({name: job[name] for name in ("created_at", "started_at", "finished_at", "attempts") if job[name]})
    for title in ("config", "result"):
        if job[title]:
            show(f"\n{title}")
            print_facts({f"  {name}": _brief(value) for name, value in job[title].items()})


def _brief(value: Any) -> Any:
    """A value that fits on a line: how many where it is a list of things, and auto where nothing was chosen."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return f"{len(value)}, see --json"
    return "auto" if value is None else value


@jobs.command(epilog="Example: brim jobs watch ID")
def watch(job_id: Id, url: Url = None, token_file: TokenFile = None, data: Data = None, as_json: Json = False) -> None:
    """Follow a job to its end; exits with 0 when it completed, else with 1. Ctrl-C ends the watching, not the job."""
    client = _client(url, token_file, data)
    try:
        job = _follow(client, job_id)
    except KeyboardInterrupt:
        say(f"the job goes on; watch it again with: brim jobs watch {job_id}")
        raise typer.Exit(130) from None
    if as_json:
        print_json(job)
    else:
        show(f"{job['id']}  {_line(job)}")
        if job["result"]:
            print_facts(job["result"])
    if job["status"] == "paused":
        say(f"continue with: brim jobs resume {job_id}")
    if job["status"] != "completed":
        raise typer.Exit(1)


@jobs.command(epilog="Example: brim jobs cancel ID")
def cancel(job_id: Id, url: Url = None, token_file: TokenFile = None, data: Data = None, as_json: Json = False) -> None:
    """Stop a job at its next batch; what it made so far stays usable."""
    _act("cancel", job_id, _client(url, token_file, data), as_json)


@jobs.command(epilog="Example: brim jobs pause ID")
def pause(job_id: Id, url: Url = None, token_file: TokenFile = None, data: Data = None, as_json: Json = False) -> None:
    """Stop a job at its next batch, to be resumed."""
    _act("pause", job_id, _client(url, token_file, data), as_json)


@jobs.command(epilog="Example: brim jobs resume ID")
def resume(job_id: Id, url: Url = None, token_file: TokenFile = None, data: Data = None, as_json: Json = False) -> None:
    """Continue a paused, cancelled or failed job where it was."""
    _act("resume", job_id, _client(url, token_file, data), as_json)


@jobs.command(epilog="Example: brim jobs logs ID --follow")
def logs(
    job_id: Id,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
    url: Url = None,
    token_file: TokenFile = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Print a job's log."""
    if follow and as_json:
        raise ConfigError("--follow and --json exclude each other; give one of them")
    client = _client(url, token_file, data)
    if as_json:
        lines, after = _log_lines(client, job_id, 0)
        print_json({"lines": lines, "next": after})
        return
    try:
        _print_logs(client, job_id, follow)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@jobs.command(epilog="Example: brim jobs delete ID")
def delete(job_id: Id, url: Url = None, token_file: TokenFile = None, data: Data = None, as_json: Json = False) -> None:
    """Forget a finished job; its dataset or run stays."""
    _client(url, token_file, data).delete(_path(job_id))
    if as_json:
        print_json({"id": job_id, "deleted": True})
    else:
        show(f"{job_id}  deleted")


# Requests


def _client(url: str | None, token_file: Path | None, data: Path | None) -> Client:
    return Client(url or os.environ.get("BRIM_URL") or DEFAULT_URL, find_token(token_file, data))


def _path(job_id: str, *more: str) -> str:
    if not (job_id.isascii() and job_id.isalnum()):  # a path's own words, and no id
        raise ConfigError(f'"{job_id}" is no job\'s id; see them with "brim jobs list"')
    return "/".join([JOBS, job_id, *more])


def _read_body(file: Path) -> bytes:
    try:
        body = typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
    except OSError as failure:
        raise StorageError(f"{file} cannot be read: {failure.strerror}") from failure
    try:
        json.loads(body)
    except ValueError as failure:
        raise ConfigError(f"{file} is not JSON: {failure}") from failure
    return body


def _checked_key(key: str) -> str:
    if not (0 < len(key) <= 200 and key.isascii() and key.isprintable()):
        raise ConfigError(f"--key {key!r} must be 1 to 200 printable ASCII characters")
    return key


def _act(verb: str, job_id: str, client: Client, as_json: bool) -> None:
    job = client.post(_path(job_id, verb))
    if as_json:
        print_json(job)
    else:
        show(f"{job['id']}  {_line(job)}")


def _follow(client: Client, job_id: str) -> dict[str, Any]:
    """The job as it ended, with its progress on the terminal meanwhile."""
    job = client.get(_path(job_id))
    with Display() as display:
        while job["status"] not in ENDED:
            display.job(_title(job), job["progress"])
            for event in client.events(_path(job_id, "events")):
                if event.kind == "progress":
                    display.job(_title(job), event.data)
                elif event.kind == "status":
                    job = client.get_patiently(_path(job_id))
                    display.job(_title(job), job["progress"])
                    if job["status"] in ENDED:
                        break
            else:
                time.sleep(FOLLOW_S)  # the stream ended first: look where the job is
                job = client.get_patiently(_path(job_id))
    return job


def _log_lines(client: Client, job_id: str, after: int) -> tuple[list[dict[str, Any]], int]:
    lines: list[dict[str, Any]] = []
    while True:
        found = client.get(_path(job_id, "logs"), after=after)
        if not found["lines"]:
            return lines, after
        lines, after = lines + found["lines"], found["next"]


def _print_logs(client: Client, job_id: str, follow: bool) -> None:
    after = 0
    while True:
        ended = not follow or client.get(_path(job_id))["status"] in ENDED  # asked first: the last lines come after
        lines, after = _log_lines(client, job_id, after)
        for line in lines:
            show(f"{line['at']} {line['level']:7} {line['text']}")
        if ended:
            return
        time.sleep(FOLLOW_S)


# Words


def _title(job: Mapping[str, Any]) -> str:
    return f"{job['name']} {job['status']}"


def _line(job: Mapping[str, Any]) -> str:
    """A job on one line."""
    percent = job["progress"]["percent"]
    parts = [f"{job['status']:9}", "    " if percent is None else f"{percent:3.0f}%", f"{job['kind']:17}", job["name"]]
    tail = job["error"] or (job["progress"]["message"] if job["status"] not in ENDED else "")
    return "  ".join([*parts, *([tail] if tail else [])])
