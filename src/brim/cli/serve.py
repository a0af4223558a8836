"""`brim serve`: the service in the foreground, until Ctrl-C or SIGTERM."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brim.cli.options import count, needing_service, percent, whole
from brim.cli.terminal import Stop, say, show
from brim.errors import ConfigError

if TYPE_CHECKING:
    from brim.service.settings import Settings


def serve(
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; one that others can reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", parser=whole, help="0 takes any free port.")] = 8000,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="postgresql://USER:PASSWORD@HOST/NAME, or BRIM_DATABASE.",
            show_default="SQLite files in --data",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Datasets, runs, results and the token.", show_default="BRIM_DATA, brim-data"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", parser=count, help="Worker processes.", show_default="one per GPU, or one"),
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
            help="Share of each device's memory reserved for prediction over HTTP; 0 turns prediction off.",
        ),
    ] = 20.0,
    api_processes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=count,
            help="API processes.",
            show_default="one, on more than 4 cores three for every 8, up to 6",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster for jobs that ask for one: auto or ray://HOST:PORT.",
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
