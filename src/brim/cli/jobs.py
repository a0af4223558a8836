"""`brim jobs submit | list | show | watch | cancel | pause | resume | logs | delete`: jobs of a running service."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from brim.cli.client import DEFAULT_URL, ServiceClient, find_token
from brim.cli.options import AsJson, DataDir, count, expand, one_of
from brim.cli.terminal import Display, print_facts, print_json, say, show
from brim.errors import ConfigError, StorageError
from brim.jobs.status import FINISHED, STATUSES

JOBS = "/api/training/jobs"
ENDED = FINISHED | {"paused"}  # nothing more to watch
FOLLOW_S = 1.0

jobs = typer.Typer(no_args_is_help=True, epilog="Example: brim jobs submit job.json")

JobId = Annotated[str, typer.Argument(metavar="ID", help="Id of a job.")]


def _connect(
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="The service.", show_default=f"BRIM_URL, {DEFAULT_URL}")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="File with the token.", show_default="BRIM_TOKEN, that of --data"
        ),
    ] = None,
    data: DataDir = None,
) -> ServiceClient:
    return ServiceClient(url or os.environ.get("BRIM_URL") or DEFAULT_URL, find_token(token_file, data))


with_client = expand("client", _connect)


@jobs.command(epilog='Example: brim jobs submit job.json --key nightly-2026-11-15   (or "-" for standard input)')
@with_client
def submit(
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE.json", help='The job, as the API takes it; "-" is standard input.')
    ],
    key: Annotated[
        str | None, typer.Option(metavar="K", help="Idempotency key: the same key gives the same job, not a second.")
    ] = None,
    client: ServiceClient,
    as_json: AsJson = False,
) -> None:
    """Queue a job."""
    body = _read_body(file)
    headers = {"Idempotency-Key": _checked_key(key)} if key is not None else {}
    job = client.post(JOBS, body, **headers)
    if as_json:
        print_json(job)
        return
    show(_line(job))
    say(f"next: brim jobs watch {job['id']}")


@jobs.command("list", epilog="Example: brim jobs list --status running")
@with_client
def list_(
    *,
    status: Annotated[
        str | None, typer.Option(metavar="STATUS", help=f"{', '.join(STATUSES)}.", **one_of(*STATUSES))
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Such as rf.generate.")] = None,
    page: Annotated[int, typer.Option(metavar="N", parser=count, help="Page of 50 jobs.")] = 1,
    client: ServiceClient,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    listed = client.get(JOBS, status=status, kind=kind, page=page)
    if as_json:
        print_json(listed)
        return
    for job in listed["jobs"]:
        show(_line(job))
    if listed["pages"] > 1:
        say(f"page {listed['page']} of {listed['pages']}, {listed['total']} jobs")
    elif not listed["jobs"]:
        say("no jobs")


@jobs.command("show", epilog="Example: brim jobs show ID --json")
@with_client
def show_(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Show one job: its status, its configuration and its result."""
    job = client.get(_path(job_id))
    if as_json:
        print_json(job)
        return
    show(_line(job))
    print_facts({name: job[name] for name in ("created_at", "started_at", "finished_at", "attempts") if job[name]})
    for title in ("config", "result"):
        if job[title]:
            show(f"\n{title}")
            print_facts({f"  {name}": _brief(value) for name, value in job[title].items()})


def _brief(value: Any) -> Any:
    """A value that fits on a line: a list of objects as their number, null as auto."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return f"{len(value)}, see --json"
    return "auto" if value is None else value


@jobs.command(epilog="Example: brim jobs watch ID")
@with_client
def watch(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Follow a job to its end; exits with 0 if it completed, else with 1. Ctrl-C stops watching, not the job."""
    try:
        job = _follow(client, job_id)
    except KeyboardInterrupt:
        say(f"the job continues; watch it again with: brim jobs watch {job_id}")
        raise typer.Exit(130) from None
    if as_json:
        print_json(job)
    else:
        show(_line(job))
        if job["result"]:
            print_facts(job["result"])
    if job["status"] == "paused":
        say(f"continue with: brim jobs resume {job_id}")
    if job["status"] != "completed":
        raise typer.Exit(1)


@jobs.command(epilog="Example: brim jobs cancel ID")
@with_client
def cancel(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Stop a job at its next batch; its results so far stay usable."""
    _act("cancel", job_id, client, as_json)


@jobs.command(epilog="Example: brim jobs pause ID")
@with_client
def pause(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Stop a job at its next batch, to be resumed."""
    _act("pause", job_id, client, as_json)


@jobs.command(epilog="Example: brim jobs resume ID")
@with_client
def resume(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Continue a paused, cancelled or failed job where it stopped."""
    _act("resume", job_id, client, as_json)


@jobs.command(epilog="Example: brim jobs logs ID --follow")
@with_client
def logs(
    *,
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the job ends.")] = False,
    client: ServiceClient,
    as_json: AsJson = False,
) -> None:
    """Print a job's log."""
    if follow and as_json:
        raise ConfigError("--follow and --json exclude each other; give one of them")
    if as_json:
        lines, after = _log_lines(client, job_id, 0)
        print_json({"lines": lines, "next": after})
        return
    try:
        _print_logs(client, job_id, follow)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@jobs.command(epilog="Example: brim jobs delete ID")
@with_client
def delete(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Delete the record of a finished job; its dataset or run stays."""
    client.delete(_path(job_id))
    if as_json:
        print_json({"id": job_id, "deleted": True})
    else:
        show(f"{job_id}  deleted")


# Requests


def _path(job_id: str, *more: str) -> str:
    if not (job_id.isascii() and job_id.isalnum()):  # would be another path
        raise ConfigError(f'"{job_id}" is not the id of a job', hint='see them with "{jobs list}"')
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
        raise ConfigError("must be 1 to 200 printable ASCII characters", field="key", value=key)
    return key


def _act(verb: str, job_id: str, client: ServiceClient, as_json: bool) -> None:
    job = client.post(_path(job_id, verb))
    if as_json:
        print_json(job)
    else:
        show(_line(job))


def _follow(client: ServiceClient, job_id: str) -> dict[str, Any]:
    """Show a job's progress until it ends, and return it."""
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
                time.sleep(FOLLOW_S)  # the stream ended before the job
                job = client.get_patiently(_path(job_id))
    return job


def _log_lines(client: ServiceClient, job_id: str, after: int) -> tuple[list[dict[str, Any]], int]:
    lines: list[dict[str, Any]] = []
    while True:
        answer = client.get(_path(job_id, "logs"), after=after)
        if not answer["lines"]:
            return lines, after
        lines, after = lines + answer["lines"], answer["next"]


def _print_logs(client: ServiceClient, job_id: str, follow: bool) -> None:
    after = 0
    while True:
        ended = not follow or client.get(_path(job_id))["status"] in ENDED  # before the last lines are read
        lines, after = _log_lines(client, job_id, after)
        for line in lines:
            show(f"{line['at']} {line['level']:7} {line['text']}")
        if ended:
            return
        time.sleep(FOLLOW_S)


# Texts


def _title(job: Mapping[str, Any]) -> str:
    return f"{job['name']} {job['status']}"


def _line(job: Mapping[str, Any]) -> str:
    percent = job["progress"]["percent"]
    done = "    " if percent is None else f"{percent:3.0f}%"
    tail = job["error"] or (job["progress"]["message"] if job["status"] not in ENDED else "")
    parts = [job["id"], f"{job['status']:9}", done, f"{job['kind']:17}", job["name"], tail]
    return "  ".join(part for part in parts if part)
