"""The dashboard's process: `python -m brim.service.dashboard.main LIFELINE SOCKET`, settings on standard input.

Started by the supervisor, which holds the socket: while the dashboard restarts, pages wait instead of failing.
Only the API connects to it, after authentication.
"""

import json
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from nicegui import Client, ui
from nicegui import app as pages

from brim.jobs.worker.process import die_with_supervisor, read_settings
from brim.service.dashboard import dataset, job, job_form, layout, lists, locate, now, run, runs, segment, tuning, why
from brim.service.dashboard.client import Api
from brim.service.settings import Settings

GRACE_S = 1
RECONNECT_S = 30.0  # a page that was disconnected for less continues where it was
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#1976d2"/>'
    '<path d="M8 6v20h9a6 6 0 0 0 3-11 5 5 0 0 0-4-9z" fill="#fff"/></svg>'
)


def make_app(settings: Settings) -> FastAPI:
    """The pages as an application; one per process."""
    api = Api(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await api.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    # /jobs/new before /jobs/{id}, /runs/compare before /runs/{id}
    for page in (now, lists, job_form, job, dataset, runs, run, tuning, segment, locate, why):
        page.add(api)
    pages.exception_handler(404)(_not_found)
    ui.run_with(
        app,
        title="brim",
        language="en-US",
        favicon=FAVICON,
        dark=None,
        tailwind=False,  # compiles its classes in the browser: half a second of the first paint
        reconnect_timeout=RECONNECT_S,
        binding_refresh_interval=None,
        show_welcome_message=False,
        gzip_middleware_factory=None,  # on one machine, or behind a proxy that does it
    )
    return app


def _not_found(request: Request, _: Exception) -> Response:
    """An address that is no page, as one of ours."""
    if not request.headers.get("accept", "").startswith("text/html"):
        return Response(status_code=404)
    with Client(ui.page(""), request=request) as client, layout.frame("Nothing is here", ""):
        text = f"There is no page at {request.url.path[:200]}."
        layout.empty("Perhaps the link is old, or something was deleted", text, "Go to the first page", "/")
    return client.build_response(request, 404)


def main(argv: list[str]) -> int:
    """Serve until stopped."""
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
