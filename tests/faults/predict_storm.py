"""Clients of predictions, good and bad ones, many at once."""

import asyncio
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fault_service import Serve

from waiting import PATIENCE_S

EDGE = "edge-of-the-form"


@dataclass(frozen=True)
class Ask:
    """One request, and how its client behaves."""

    image: bytes
    tag: str  # what is expected of it
    leave_after_s: float | None = None  # hangs up without a word
    pieces: int = 1  # that the body is sent in, a while apart


@dataclass(frozen=True)
class Told:
    """What came back; status 0 where the client left."""

    tag: str
    status: int
    body: bytes

    @property
    def detail(self) -> str:
        return str(json.loads(self.body)["detail"])


def storm(serve: Serve, asks: Sequence[Ask], *, together: int = 1000) -> list[Told]:
    """All of them, on a connection each, so many at once; in their order."""

    async def run() -> list[Told]:
        gate = asyncio.Semaphore(together)

        async def one(ask: Ask) -> Told:
            async with gate:
                return await asyncio.wait_for(send(serve, ask), PATIENCE_S)

        return list(await asyncio.gather(*map(one, asks)))

    return asyncio.run(run())


async def send(serve: Serve, ask: Ask) -> Told:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", serve.port)
    try:
        await _write(writer, form(serve, ask.image), ask.pieces)
        if ask.leave_after_s is not None:
            await asyncio.sleep(ask.leave_after_s)
            return Told(ask.tag, 0, b"")
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        return Told(ask.tag, int(lines[0].split()[1]), await reader.readexactly(length))
    finally:
        writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, data: bytes, pieces: int) -> None:
    size = -(-len(data) // pieces)
    for start in range(0, len(data), size):
        writer.write(data[start : start + size])
        await writer.drain()
        if pieces > 1:
            await asyncio.sleep(0.05)


def form(serve: Serve, image: bytes) -> bytes:
    """POST /api/segment as it goes over the wire."""
    part = f'--{EDGE}\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    body = part.encode() + image + f"\r\n--{EDGE}--\r\n".encode()
    head = [
        "POST /api/segment HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {serve.token}",
        f"Content-Type: multipart/form-data; boundary={EDGE}",
        f"Content-Length: {len(body)}",
        f"Brim-Deadline-Ms: {1000 * PATIENCE_S:.0f}",  # on a busy machine too, nobody is refused
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes that says it has side × side pixels, and has them: all black."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    squeeze = zlib.compressobj(9)
    rows = b"".join([squeeze.compress(bytes(side + 1)) for _ in range(side)]) + squeeze.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def geometries(body: bytes) -> tuple[list[Any], np.ndarray]:
    """Outlines and confidences of an answer."""
    features = json.loads(body)["features"]
    confidences = [one["properties"]["measurements"]["confidence"] for one in features]
    return [one["geometry"] for one in features], np.array(confidences)
