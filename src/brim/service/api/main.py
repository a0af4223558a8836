"""The API's process: `python -m brim.service.api.main LIFELINE SOCKET`, settings on standard input.

Started by the supervisor. LIFELINE is the descriptor of a pipe that ends with it, SOCKET that of the listening socket,
which the supervisor holds: while the API restarts, clients wait instead of being rejected.
"""

import json
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from brim.jobs.worker.process import die_with_supervisor, read_settings
from brim.service.api.connections import Connection, Waiting, raise_file_limit
from brim.service.run.supervisor import BACKLOG
from brim.service.settings import Settings

MAX_MESSAGE_BYTES = 4 * 1024**2  # of a page to the dashboard
GRACE_S = 5  # for requests in progress when the service stops


class ApiServer(uvicorn.Server):
    """Ends its event streams when it shuts down, which would otherwise wait for them for ever."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Sets the backlog, which is not the number of connections accepted at a time."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
        await super().shutdown(sockets)


def make_server(app: ASGIApp, end_streams: Callable[[], None], settings: Settings) -> ApiServer:
    """A server without a server header, access log or trust in proxies."""
    waiting = Waiting(head_s=settings.head_s, max_waiting=settings.max_waiting)
    config = uvicorn.Config(
        app,
        http=partial(Connection, waiting=waiting),  # type: ignore[arg-type]  # it is only called
        ws="websockets-sansio",  # the dashboard's; no other route takes one
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        loop="asyncio",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
        backlog=1,  # connections accepted at a time: one process would otherwise take all of them
    )
    logging.getLogger("uvicorn.access").disabled = True  # it would log queries
    return ApiServer(config, end_streams)


def main(argv: list[str]) -> int:
    from brim.jobs.durable import Queue
    from brim.jobs.store import Catalogue
    from brim.service.api.app import guard, make_api

    lifeline, listening = (int(number) for number in argv)
    die_with_supervisor(lifeline)
    settings = Settings.from_json(json.dumps(read_settings()))
    logging.basicConfig(level=settings.log_level, format="%(asctime)s api %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    logging.getLogger("uvicorn.error").setLevel("WARNING")  # the supervisor logs starts and stops
    api = make_api(settings, Catalogue.open(settings.catalogue_url), Queue(settings.jobs_url))
    raise_file_limit()
    server = make_server(guard(api), api.state.context.hub.close, settings)
    server.run(sockets=[socket.socket(fileno=listening)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
