"""The dashboard's process: `python -m brim.service.dashboard.main LIFELINE SOCKET`, settings on standard input.

Started by the supervisor, which holds the socket: while the dashboard is started again, pages wait instead of failing.
Only the API connects to it, after its gate.
"""

import json
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from nicegui import ui

from brim.jobs.worker.process import die_with_supervisor, read_settings
from brim.service.dashboard import dataset, datasets, job_form, jobs, now, run, runs, segment, tuning
from brim.service.dashboard.client import Api
from brim.service.settings import Settings

GRACE_S = 1
RECONNECT_S = 30.0  # a page that was away for less goes on where it was
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#1976d2"/>'
    '<path d="M8 6v20h9a6 6 0 0 0 3-11 5 5 0 0 0-4-9z" fill="#fff"/></svg>'
)


def make_app(settings: Settings) -> FastAPI:
    """The pages as an application; there is one in a process."""
    api = Api(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await api.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for page in (now, job_form, jobs, datasets, dataset, runs, run, tuning, segment):  # /jobs/new before /jobs/{id}
        page.add(api)
    ui.run_with(
        app,
        title="brim",
        favicon=FAVICON,
        dark=None,
        tailwind=False,  # compiles its classes in the browser: half a second of the first paint
        reconnect_timeout=RECONNECT_S,
        binding_refresh_interval=None,
        show_welcome_message=False,
        gzip_middleware_factory=None,  # on one machine, or behind a proxy that does it
    )
    return app


def main(argv: list[str]) -> int:
    """Serve until told to stop."""
    lifeline, listening = (int(number) for number in argv)
    die_with_supervisor(lifeline)
    settings = Settings.from_json(json.dumps(read_settings()))
    logging.basicConfig(level=settings.log_level, format="%(asctime)s dashboard %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "uvicorn.error", "engineio", "socketio"):
        logging.getLogger(name).setLevel("WARNING")
    config = uvicorn.Config(
        make_app(settings),
        http="h11",
        ws="websockets-sansio",
        loop="asyncio",
        ws_per_message_deflate=False,
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=listening)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
