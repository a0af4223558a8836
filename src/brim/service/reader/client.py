"""Calls to the reader process, from the API's event loop."""

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from brim.errors import TooMany, Unavailable, from_dict
from brim.service.run.unix_socket import short_name

CALL_S: Final = 120.0
LONG_S: Final = 3600.0  # for calls that write a dataset
MAX_CALLS: Final = 16  # running or waiting, of one API process
MAX_RUNNING: Final = 3
MAX_ANSWER_BYTES: Final = 256 * 1024**2


class Reader:
    """The functions of `brim.service.reader.functions`, each call in a process of its own."""

    def __init__(self, path: Path, *, limit: int = MAX_CALLS) -> None:
        """Take the path of the reader's socket; it need not exist yet."""
        self._path, self.limit = path, limit
        self._num_calls = 0
        self._running = asyncio.Semaphore(MAX_RUNNING)

    async def call(self, function: str, *, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """What a function returns. Cancelling the call, or its time-out, kills the process that runs it.

        Raises the function's own error, TooMany above the limit, and Unavailable if the process died or timed out.
        """
        if self._num_calls >= self.limit:
            raise TooMany(
                f"{self.limit} requests that read datasets are running or waiting",
                hint="try again in a few seconds",
            )
        self._num_calls += 1
        try:
            async with self._running:
                return await self._run(function, arguments, timeout_s)
        finally:
            self._num_calls -= 1

    async def _run(self, function: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        process: int | None = None
        try:
            async with asyncio.timeout(timeout_s):
                with short_name(self._path) as name:
                    stream, writer = await asyncio.open_unix_connection(name, limit=MAX_ANSWER_BYTES)
                try:
                    process = int(await stream.readline())
                    writer.write(json.dumps({"function": function, "arguments": arguments}).encode() + b"\n")
                    line = await stream.readline()
                    if not line.endswith(b"\n"):
                        raise EOFError
                    process = None  # it has ended
                finally:
                    writer.close()
        except TimeoutError:
            raise Unavailable(f"reading took longer than {timeout_s:.0f} s and was stopped") from None
        except (OSError, ValueError, EOFError):
            raise Unavailable("the process that reads files ended during this request", hint="try again soon") from None
        finally:
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
        answer = json.loads(line)
        if "value" in answer:
            return answer["value"]
        if answer["error"] is not None:
            raise from_dict(answer["error"])
        raise RuntimeError(f"{function} failed in the reader process; its log says more")
