"""The API's process: `python -m brim.service.api.main LIFELINE SOCKET`, settings on standard input.

Started by the supervisor. LIFELINE is the number of a pipe that ends with it, SOCKET that of the socket to listen on,
which stays with it: while the API is started again, clients wait instead of being refused.
"""

import json
import logging
import socket
import sys
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from brim.jobs.worker.process import die_with_supervisor, read_settings
from brim.service.run.supervisor import BACKLOG
from brim.service.settings import Settings

MAX_MESSAGE_BYTES = 4 * 1024**2  # of a page to the dashboard
GRACE_S = 5  # for answers under way when the service goes down


class Server(uvicorn.Server):
    """A server that ends its event streams when it goes down: they would have it wait for ever."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin; how many may wait to be taken is another matter than how many are taken at a time."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Go down."""
        self._end_streams()
        await super().shutdown(sockets)


def make_server(app: ASGIApp, end_streams: Callable[[], None]) -> Server:
    """A server for the app; says nothing of itself, trusts no proxy, logs no query."""
    config = uvicorn.Config(
        app,
        http="h11",  # limits the bytes of a request's head
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
        backlog=1,  # connections taken at a time: whoever is first would take all that others are free to take
    )
    logging.getLogger("uvicorn.access").disabled = True  # whoever listens to all loggers would see queries in it
    return Server(config, end_streams)


def main(argv: list[str]) -> int:
    """Serve until told to stop."""
    from brim.jobs.durable import Queue
    from brim.jobs.store import Catalogue
    from brim.service.api.app import guard, make_api

    lifeline, listening = (int(number) for number in argv)
    die_with_supervisor(lifeline)
    settings = Settings.from_json(json.dumps(read_settings()))
    logging.basicConfig(level=settings.log_level, format="%(asctime)s api %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    logging.getLogger("uvicorn.error").setLevel("WARNING")  # when it starts and stops is the supervisor's to say
    api = make_api(settings, Catalogue.open(settings.catalogue_url), Queue(settings.jobs_url))
    server = make_server(guard(api), api.state.context.hub.close)
    server.run(sockets=[socket.socket(fileno=listening)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
