"""One connection from the API to one predictor: the hello with both sides' shared memory, then messages.

It lasts as long as that predictor: the next one is another connection, so that no answer of the old one can be taken
for the new one's.
"""

import asyncio
import math
import socket
from pathlib import Path
from typing import Final, Protocol

from brim.service.prediction.process.arena import Shared
from brim.service.prediction.process.protocol import Frames, Message, Page, frame, receive_hello, send_hello
from brim.service.run.unix_socket import short_name

HELLO_S: Final = 5.0


class Owner(Protocol):
    """Who is told what happens on a link."""

    def heard(self, link: "Link", message: Message, body: bytes) -> None:
        """A message arrived."""

    def lost(self, link: "Link") -> None:
        """The predictor is gone, or has closed the connection; nothing more will arrive."""


class Link(asyncio.Protocol):
    """A connection that stands."""

    def __init__(self, owner: Owner, shared: Shared) -> None:
        """Take whom to tell, and what the predictor shares."""
        self.page = Page(shared)
        self.is_up = False
        self.ended = asyncio.Event()
        self._owner, self._shared = owner, shared
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._counted = self._since = 0  # requests sent since the page had this number

    @classmethod
    async def open(cls, path: Path, arena: Shared, owner: Owner) -> "Link":
        """Connect, say hello and hear it; OSError when nobody is there."""
        loop = asyncio.get_running_loop()
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        try:
            with short_name(path) as name:
                await loop.sock_connect(made, name)
            async with asyncio.timeout(HELLO_S):
                shared = await _exchange(made, arena)
            _, link = await loop.create_unix_connection(lambda: cls(owner, shared), sock=made)
        except BaseException:
            made.close()
            raise
        return link

    def wait_s(self, model: str, within_s: float, cold_s: float = 0.0) -> float:
        """The predictor's estimate for a request with so much time; cold_s where it has not loaded that model."""
        found = self.page.estimate(model, within_s)
        return cold_s if found is None else found

    def rank(self, model: str, cold_s: float) -> float:
        """How late an answer from here would be, with those that were sent since the predictor last said so."""
        wait_s = self.wait_s(model, math.inf, cold_s)
        if self.page.number != self._counted:
            self._counted, self._since = self.page.number, 0
        return (1 + self._since) * max(wait_s, 1e-3)

    def send(self, message: Message) -> None:
        """Send; lost with the connection."""
        if self.is_up and self._transport is not None:
            self._since += message["type"] == "request"
            self._transport.write(frame(message))

    def read(self, at: list[int]) -> bytes:
        """An answer that lies in the predictor's memory; its place is free again."""
        body = bytes(self._shared.view(*at))
        self.send({"type": "taken", "at": at[0]})
        return body

    def close(self) -> None:
        """End it."""
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_up = transport, True

    def data_received(self, data: bytes) -> None:
        """Pass on what is whole."""
        for message, body in self._frames.feed(data):
            self._owner.heard(self, message, body)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell, then let the memory go: what was being worked on is read from it first."""
        self.is_up = False
        self._owner.lost(self)
        self.page.close()
        self._shared.close()
        self.ended.set()


async def _exchange(made: socket.socket, arena: Shared) -> Shared:
    """Hand over our memory, get the predictor's."""
    loop = asyncio.get_running_loop()
    send_hello(made, arena)
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(made, _settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(made)
    return receive_hello(made)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
