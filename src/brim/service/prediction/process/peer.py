"""One API process as the predictor has it: its connection, both sides' shared memory, its requests.

Messages are read by one thread, answers are sent by any: at once where the socket takes them, else when it does, so
that an API process which does not read keeps no thread.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from brim.errors import BrimError
from brim.service.prediction.process.arena import Arena, Shared
from brim.service.prediction.process.protocol import (
    INLINE_BYTES,
    Frames,
    Message,
    Page,
    frame,
    receive_hello,
    send_hello,
)
from brim.service.prediction.process.work import Work

ANSWER_BYTES: Final = 256 * 1024**2  # of addresses, for long answers that the API has not read yet
READ_BYTES: Final = 256 * 1024


class Peer:
    """A connection that stands."""

    def __init__(self, connection: socket.socket, wake: Callable[[], None]) -> None:
        """Take a connection whose hello can be read, and answer it; wake is called when there is something to flush."""
        self.works: dict[int, Work] = {}
        self.registered: set[str] = set()  # models that this API process has said there are
        self.connection, self._wake = connection, wake
        self._theirs = receive_hello(connection)
        self._mine = Shared.make(Page.BYTES + ANSWER_BYTES)
        self.page = Page(self._mine)
        self._answers = Arena(self._mine, Page.BYTES)
        self._frames = Frames()
        self._lock = threading.Lock()  # of what follows, and the answers
        self._unsent = bytearray()
        self._is_gone = False
        send_hello(connection, self._mine)

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._unsent)

    def read(self) -> list[tuple[Message, bytes]] | None:
        """What has arrived; None when the API process is gone."""
        try:
            data = self.connection.recv(READ_BYTES)
            return list(self._frames.feed(data)) if data else None
        except BlockingIOError:
            return []
        except (OSError, BrimError, ValueError):
            return None

    def payload(self, at: list[int]) -> memoryview:
        """What a request brought, where it lies."""
        return self._theirs.view(*at)

    def send(self, message: Message, body: bytes = b"") -> None:
        """Send, from any thread; a long body by shared memory."""
        with self._lock:
            if self._is_gone:
                return
            if len(body) >= INLINE_BYTES:
                with suppress(BrimError):  # no room, or never room for it: the socket takes it too
                    message, body = {**message, "at": [self._answers.put(body), len(body)]}, b""
            self._send(frame(message, body))

    def taken(self, offset: int) -> None:
        """The API has read the answer there."""
        with self._lock:
            self._answers.free(offset)

    def end(self, work: Work, message: Message, body: bytes) -> None:
        """A request's end."""
        self.works.pop(work.id, None)
        self.send(message, body)

    def flush(self) -> None:
        """Send what the socket did not take at once."""
        with self._lock:
            if self._unsent and not self._is_gone:
                del self._unsent[: self._try(self._unsent)]

    def close(self) -> None:
        """Forget it; payloads that are being read keep their memory until that is over."""
        with self._lock:
            self._is_gone = True
            self.connection.close()
            self._theirs.close()
            self._mine.close()

    def _send(self, data: bytes) -> None:
        sent = 0 if self._unsent else self._try(data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._wake()

    def _try(self, data: bytes | bytearray) -> int:
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # it is gone, which the reading side sees
