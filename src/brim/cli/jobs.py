"""`brim jobs submit | list | show | watch | cancel | pause | resume | logs | delete`: jobs of a running service."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from brim.cli.client import DEFAULT_URL, ServiceClient, find_token
from brim.cli.options import AsJson, DataDir, argument, count, expand, one_of, option
from brim.cli.terminal import Display, print_facts, print_json, print_page, print_result, quote, say, show
from brim.errors import ConfigError, StorageError
from brim.jobs.status import FINISHED, STATUSES

JOBS = "/api/training/jobs"
ENDED = FINISHED | {"paused"}  # nothing more to watch
FOLLOW_S = 1.0
SHORT_ID = 8  # letters of an id that are enough for people

jobs = typer.Typer(no_args_is_help=True, epilog="Example: brim jobs submit job.json")

JobId = Annotated[str, argument("ID", "Id of a job.")]


def _connect(
    url: Annotated[str | None, option("URL", "The service.", "--url", show_default=f"BRIM_URL, {DEFAULT_URL}")] = None,
    token_file: Annotated[
        Path | None, option("FILE", "File with the token.", "--token-file", show_default="BRIM_TOKEN, that of --data")
    ] = None,
    data: DataDir = None,
) -> ServiceClient:
    given = {"--url": url, "--token-file": token_file, "--data": data}
    again = "".join(f" {flag} {quote(value)}" for flag, value in given.items() if value is not None)
    return ServiceClient(url or os.environ.get("BRIM_URL") or DEFAULT_URL, find_token(token_file, data), again)


with_client = expand("client", _connect)


@jobs.command(epilog='Example: brim jobs submit job.json --key nightly-2026-11-15   (or "-" for standard input)')
@with_client
def submit(
    *,
    file: Annotated[Path, argument("FILE.json", 'The job, as the API takes it; "-" is standard input.')],
    key: Annotated[str | None, option("K", "Idempotency key: the same key gives the same job, not a second.")] = None,
    client: ServiceClient,
    as_json: AsJson = False,
) -> None:
    """Queue a job."""
    body = _read_body(file)
    if key is not None and not (0 < len(key) <= 200 and key.isascii() and key.isprintable()):
        raise ConfigError("must be 1 to 200 printable ASCII characters", field="key", value=key)
    job = client.post(JOBS, body, **({"Idempotency-Key": key} if key is not None else {}))
    print_result(job, as_json, _line(job))
    if not as_json:
        say(f"next: brim jobs watch {job['id'][:SHORT_ID]}{client.again}")


@jobs.command("list", epilog="Example: brim jobs list --status running")
@with_client
def list_(
    *,
    status: Annotated[str | None, option("STATUS", f"{', '.join(STATUSES)}.", **one_of(*STATUSES))] = None,
    kind: Annotated[str | None, option("KIND", "Such as rf.generate.")] = None,
    page: Annotated[int, option("N", "Page of 50 jobs.", parser=count)] = 1,
    client: ServiceClient,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    print_page(client.get(JOBS, status=status, kind=kind, page=page), as_json, "jobs", _HEAD, _cells)


@jobs.command("show", epilog="Example: brim jobs show ID --json")
@with_client
def show_(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Show one job: its status, its configuration and its result."""

    def brief(value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return f"{len(value)}, see --json"
        return "auto" if value is None else value

    job = client.get(_path(job_id))
    if as_json:
        print_json(job)
        return
    show(_line(job))
    print_facts({name: job[name] for name in ("created_at", "started_at", "finished_at", "attempts") if job[name]})
    for title in ("config", "result"):
        if job[title]:
            show(f"\n{title}")
            print_facts({f"  {name}": brief(value) for name, value in job[title].items()})


@jobs.command(epilog="Example: brim jobs watch ID")
@with_client
def watch(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Follow a job to its end; exits with 0 if it completed, else with 1. Ctrl-C stops watching, not the job."""
    try:
        job = _follow(client, job_id)
    except KeyboardInterrupt:
        say(f"the job continues; watch it again with: brim jobs watch {job_id}{client.again}")
        raise typer.Exit(130) from None
    print_result(job, as_json, _line(job))
    if job["result"] and not as_json:
        print_facts(job["result"])
    if job["status"] == "paused":
        say(f"continue with: brim jobs resume {job_id}{client.again}")
    if job["status"] != "completed":
        raise typer.Exit(1)


def _add_action(verb: str, text: str) -> None:
    @jobs.command(verb, help=text, epilog=f"Example: brim jobs {verb} ID")
    @with_client
    def act(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
        job = client.post(_path(job_id, verb))
        print_result(job, as_json, _line(job))


_add_action("cancel", "Stop a job at its next batch; its results so far stay usable.")
_add_action("pause", "Stop a job at its next batch, to be resumed.")
_add_action("resume", "Continue a paused, cancelled or failed job where it stopped.")


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
        pages = list(_log_lines(client, job_id, follow=False))
        print_json({"lines": [line for lines, _ in pages for line in lines], "next": pages[-1][1] if pages else 0})
        return
    try:
        for lines, _ in _log_lines(client, job_id, follow):
            for line in lines:
                show(f"{line['at']} {line['level']:7} {line['text']}")
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@jobs.command(epilog="Example: brim jobs delete ID")
@with_client
def delete(job_id: JobId, client: ServiceClient, as_json: AsJson = False) -> None:
    """Delete the record of a finished job; its dataset or run stays."""
    client.delete(_path(job_id))
    print_result({"id": job_id, "deleted": True}, as_json, f"{job_id}  deleted")


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
    except (ValueError, RecursionError) as failure:
        raise ConfigError(f"{file} is not JSON: {failure}") from failure
    return body


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


def _log_lines(client: ServiceClient, job_id: str, follow: bool) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Pages of a job's log, each with the number of its last line; without follow, until there is no more for now."""
    after = 0
    while True:
        ended = not follow or client.get(_path(job_id))["status"] in ENDED  # before the last lines are read
        while (answer := client.get(_path(job_id, "logs"), after=after))["lines"]:
            after = answer["next"]
            yield answer["lines"], after
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


_HEAD = ("ID", "STATUS", "DONE", "KIND", "NAME", "MESSAGE")


def _cells(job: Mapping[str, Any]) -> tuple[str, ...]:
    percent = job["progress"]["percent"]
    tail = job["error"] or (job["progress"]["message"] if job["status"] not in ENDED else "")
    done = "" if percent is None else f"{percent:.0f}%"
    return job["id"], job["status"], done, job["kind"], job["name"], tail
