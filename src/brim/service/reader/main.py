"""The reader process, `python -m brim.service.reader.main LIFELINE BEAT SOCKET`: one forked child per call.

Started by the supervisor, which holds the socket: while this process is started again, calls wait. The parent imports
the libraries and runs nothing of them, so it has no threads and can fork; a child answers one connection and ends.
A call that takes too long or dies of its input takes nothing else with it. Each connection:

    reader → API   the child's process id, a line
    API → reader   {"function", "arguments"}, a line
    reader → API   {"value"} or {"error"}, a line
"""

import json
import logging
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from brim.errors import BrimError, ImageError
from brim.jobs import sandbox
from brim.jobs.worker.process import Heartbeat, die_with_parent, read_settings
from brim.service.reader.client import CALL_S, LONG_S
from brim.service.reader.functions import FUNCTIONS, WRITERS, import_libraries

log = logging.getLogger("brim.reader")

BEAT_S = 0.5
MEMORY_BYTES = 4 * 1024**3  # of one call, beyond the libraries


def serve(listening: socket.socket, lifeline: int, beat: Heartbeat) -> None:
    """Fork for every connection until the supervisor is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    while True:
        beat()
        ready, _, _ = select.select([listening.fileno(), lifeline], [], [], BEAT_S)
        if lifeline in ready:
            return
        if listening.fileno() in ready:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    """In the child: answer one call."""
    try:
        os.setsid()  # a group of its own: the API kills it with whatever it started
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with connection.makefile("rwb") as stream:
            stream.write(b"%d\n" % os.getpid())
            stream.flush()
            stream.write(_call(stream.readline()) + b"\n")
    except OSError:
        pass  # nobody waits for it any more
    finally:
        os._exit(0)


def _call(line: bytes) -> bytes:
    try:
        request = json.loads(line)
        may_write = request["function"] in WRITERS
        sandbox.confine(may_write=may_write)
        sandbox.limit(MEMORY_BYTES, LONG_S if may_write else CALL_S)
        reply: dict[str, Any] = {"value": FUNCTIONS[request["function"]](**request["arguments"])}
    except BrimError as error:
        reply = {"error": error.as_dict()}
    except MemoryError:
        text = "reading it takes more memory than is allowed; a file in it is damaged or too large"
        reply = {"error": ImageError(text).as_dict()}
    except Exception:
        log.exception("a call failed")
        reply = {"error": None}
    return json.dumps(reply).encode()


def main(argv: list[str]) -> int:
    lifeline, beat, listening = int(argv[0]), Heartbeat(int(argv[1])), socket.socket(fileno=int(argv[2]))
    die_with_parent()
    settings = read_settings()
    logging.basicConfig(level=settings["log_level"], format="%(asctime)s reader %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    import_libraries()
    serve(listening, lifeline, beat)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
