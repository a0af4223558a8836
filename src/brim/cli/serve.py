"""`brim serve`: the service in the foreground, until Ctrl-C or SIGTERM."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brim.cli.options import check_positive, needing_service, percent, whole
from brim.cli.terminal import Stop, say, show
from brim.errors import ConfigError

if TYPE_CHECKING:
    from brim.service.settings import Settings


def serve(
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on; others need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", parser=whole, help="0 takes any free one.")] = 8000,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="postgresql://USER:PASSWORD@HOST/NAME, or BRIM_DATABASE; without it, SQLite files in --data.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Datasets, runs, results and the token; without it, BRIM_DATA or brim-data here."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole, help="Worker processes; without it, one per GPU, or one."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another name the service is reached by: a proxy's, a container's. Repeatable."
        ),
    ] = None,
    predict_memory: Annotated[
        float,
        typer.Option(
            metavar="PERCENT",
            parser=percent,
            help="Share of each device's memory for prediction over HTTP, kept from jobs; 0 turns prediction off.",
        ),
    ] = 20.0,
    api_processes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole,
            help="API processes; without it, one, and on more than 4 cores three for every 8, up to 6.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster for jobs that ask for one: auto or ray://HOST:PORT; without it, BRIM_CLUSTER or none.",
        ),
    ] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Pages in the browser beside the API.")
    ] = True,
) -> None:
    """Serve durable jobs, predictions and a dashboard over HTTP; a worker and a predictor per GPU.

    Prints one address to open in a browser. Ctrl-C stops jobs at their next batch; they go on at the next start.
    """
    check_positive("--workers", workers)
    check_positive("--api-processes", api_processes)
    gpus = visible_gpus()
    if workers is not None and gpus and workers > len(gpus):
        raise ConfigError(
            f"--workers {workers} is more than the {len(gpus)} GPUs here, one worker each; "
            "give fewer, or CUDA_VISIBLE_DEVICES= for workers on the CPU"
        )
    with needing_service("the service"):
        from brim.service.run.start import serve as run
        from brim.service.settings import from_options
    settings = from_options(
        host=host,
        port=port,
        database=database,
        data=data,
        workers=workers or len(gpus) or 1,
        allow_hosts=tuple(allow_host or ()),
        api_processes=api_processes or default_api_processes(),
        predictors=len(gpus) or 1,
        predict_memory=predict_memory,
        dashboard=dashboard,
        gpus=tuple(gpus),
        cluster=cluster,
    )
    with Stop() as stop:
        run(settings, gpus, stop, _announce)
    raise typer.Exit(128 + stop.number)


def default_api_processes() -> int:
    """One, or on a large machine so many that bodies, texts and refusals keep no GPU waiting.

    Estimated, not measured: some 3 cores at three times what an H200 segments, from times on faster cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if cores <= 4 else min(6, 3 * cores // 8)


def visible_gpus() -> list[str]:
    """The GPUs that workers may have, as CUDA names them; found without torch, which this process never imports."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        from brim.doctor import num_gpus

        return [str(index) for index in range(num_gpus())]
    names = [name.strip() for name in chosen.split(",")]
    ends = [index for index, name in enumerate(names) if name in ("", "-1")]  # CUDA stops reading there too
    return names[: ends[0]] if ends else names


def _announce(settings: "Settings") -> None:
    """The address on standard output; with the token, unless it was given and so is known: logs are kept."""
    where = "the database given" if settings.database else "SQLite files there"
    say(f"data in {settings.data}, jobs in {where}, {settings.workers} worker{'s' * (settings.workers > 1)}")
    say("Ctrl-C stops: jobs go on at the next start")
    show(settings.url if os.environ.get("BRIM_TOKEN") else settings.entry_url)
