"""Images are measured and decoded in processes of their own, with limits: a bad file affects only its own request.

    thread of the predictor ──▶ decoder: the file's memory, read-only ──▶ its size, or pixels in new shared memory

A decoder answers one file after another. It may use memory and CPU time in proportion to the image's size, has no
network and cannot write (`jobs/sandbox.py`). One that is killed by its file is replaced in milliseconds: a prepared
process, `python -m brim.service.prediction.process.decoders CONTROL`, has the libraries and forks. A decode that takes
long gives its place to others and goes on with low priority.
"""

import gc
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from brim.engine.batching import Payload
from brim.errors import BrimError, ImageError, Unavailable, from_dict
from brim.jobs import sandbox
from brim.service.prediction.channel import INLINE_BYTES, Body, Channel, Message, SharedBytes, view_of

if TYPE_CHECKING:
    import numpy as np

PATIENCE_S: Final = 0.2  # a decode that computes for longer no longer keeps others waiting
START_S: Final = 60.0  # for the prepared process to import its libraries
MEASURE_S, MEASURE_BYTES = 1.0, 256 * 1024**2  # CPU time and memory for a header
PIXELS_S, PIXEL_BYTES = 4e6, 48  # pixels a second, and bytes of working memory per pixel, beyond those of a header
WALL_FACTOR: Final = 8  # a busy machine takes longer than the CPU time that is allowed
SPARE: Final = 4  # decoders beyond those that may run at full priority
OUT_BYTES: Final = 16 * 1024**2  # larger images come in memory of their own: new pages take longer than a copy
_ENVIRONMENT: Final = {
    "OPENBLAS_NUM_THREADS": "1", "OPENCV_FOR_THREADS_NUM": "1", "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "67108864",  # keep pages from image to image
}  # fmt: skip
KILLED: Final = "reading it took more time or memory than an image of its size needs; it is damaged or no image"


class Decoders:
    """Decoder processes, used by any number of threads; `num` of them run at full priority."""

    def __init__(self, num: int, module: str = "brim.service.prediction.process.decoders") -> None:
        """The module is run as the prepared process."""
        self._module, self._places = module, threading.BoundedSemaphore(num)
        self._lock = threading.Lock()
        self._idle: list[_Decoder] = []
        self._max_idle = num + SPARE
        self._prepared: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._is_closed = False
        self._start()

    def size(self, payload: Payload) -> tuple[int, int]:
        """Width and height from the image's header."""
        message = {"do": "size", "name": payload.name}
        answer, _ = self._ask(message, payload, WALL_FACTOR * MEASURE_S, lambda: None)
        width, height = answer["size"]
        return width, height

    def read(self, payload: Payload, max_pixels: int) -> "np.ndarray":
        """(H, W, 3) uint8."""
        import numpy as np

        message = {"do": "read", "name": payload.name, "max_pixels": max_pixels}
        with ExitStack() as place:
            place.enter_context(self._places)
            answer, data = self._ask(message, payload, WALL_FACTOR * (MEASURE_S + max_pixels / PIXELS_S), place.close)
        height, width = answer["shape"]
        if len(data) != height * width * 3:
            raise ImageError(f"{payload.name}: {KILLED}")
        return np.frombuffer(data, np.uint8).reshape(height, width, 3)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for decoder in self._idle:
                decoder.close()
            self._idle = []
            if self._prepared is not None:
                self._prepared[1].close()  # it ends with this
                self._prepared[0].wait()
                self._prepared = None

    def _ask(
        self, message: Message, payload: Payload, wall_s: float, is_slow: Callable[[], None]
    ) -> tuple[Message, bytearray]:
        """The answer of a decoder, and the bytes that come with it."""
        decoder = self._take()
        try:
            decoder.channel.send(message, getattr(payload, "body", None) or bytes(payload.data))
            answer = decoder.wait_for_answer(wall_s, is_slow)
            if answer is None:
                raise ImageError(f"{payload.name}: {KILLED}")
            reply, body = answer
            data = bytearray(decoder.out[: reply["num_bytes"]] if "num_bytes" in reply else view_of(body))
        except BaseException:
            decoder.kill()
            raise
        with self._lock:
            is_kept = len(self._idle) < self._max_idle and not decoder.is_slow and not self._is_closed
            if is_kept:
                self._idle.append(decoder)
        if not is_kept:
            decoder.close()
        if "error" in reply:
            error = reply["error"]
            raise from_dict(error) if error is not None else ImageError(f"{payload.name}: it cannot be decoded")
        return reply, data

    def _take(self) -> "_Decoder":
        while True:
            with self._lock:
                if not self._idle:
                    break
                decoder = self._idle.pop()
            if decoder.is_alive():
                return decoder
            decoder.close()
        for _ in range(2):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with self._lock, theirs, suppress(OSError):
                assert self._prepared is not None
                socket.send_fds(self._prepared[1], [b"."], [theirs.fileno()])
            decoder = _Decoder(ours)
            if decoder.start():
                return decoder
            with self._lock:
                self._start()  # the prepared process has died
        raise Unavailable("the process that decodes images does not start; try again soon")

    def _start(self) -> None:
        if self._prepared is not None:
            if self._prepared[0].poll() is None:
                return  # another thread was first
            self._prepared[1].close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = {**os.environ, **_ENVIRONMENT}
            command = [sys.executable, "-m", self._module, str(theirs.fileno())]
            process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._prepared = process, ours


class _Decoder:
    """One decoder process, as the predictor sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.channel = Channel(connection, lambda: None)
        self.is_slow = False
        self._pid = self._process = -1  # and descriptor of the process
        shared = SharedBytes.empty(OUT_BYTES)
        self.out = shared.view
        self.channel.send({"do": "map"}, shared)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def start(self) -> bool:
        """Wait for its hello; False if it does not come."""
        hello = self.wait_for_answer(START_S, lambda: None)
        if hello is None:
            self.close()
            return False
        self._pid = hello[0]["pid"]
        self._process = os.pidfd_open(self._pid)
        return True

    def is_alive(self) -> bool:
        """Whether it waits for a file: one that has ended, or says something unasked, can be read from."""
        return not self._poll.poll(0)

    def wait(self, seconds: float) -> tuple[Message, Body] | None:
        """Its next message; None if there is none in time, EOFError if it has ended."""
        return self.channel.receive() if self._poll.poll(1e3 * seconds) else None

    def wait_for_answer(self, wall_s: float, is_slow: Callable[[], None]) -> tuple[Message, Body] | None:
        """None if it has ended or takes too long; is_slow is called when it has computed for a while."""
        end_s, first_s = time.monotonic() + wall_s, math.inf
        try:
            while (answer := self.wait(PATIENCE_S)) is None and time.monotonic() < end_s:
                used_s = self._cpu_s()
                first_s = min(first_s, used_s)
                if not self.is_slow and used_s - first_s > 0.5 * PATIENCE_S:  # it is not the machine that is busy
                    self.is_slow = True
                    is_slow()
                    with suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, self._pid, 10)
            return answer
        except EOFError:
            return None

    def _cpu_s(self) -> float:
        """CPU time it has used."""
        try:
            ticks = Path(f"/proc/{self._pid}/stat").read_bytes().rpartition(b")")[2].split()[11:13]
        except OSError:
            return 0.0  # it has ended
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """It ends when it notices."""
        self.channel.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


# In the processes


Decode = Callable[[Message, memoryview], tuple[Message, bytes | memoryview]]


def serve(control: socket.socket, decode: Decode) -> None:
    """Fork a decoder for each connection that arrives, until the predictor is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    gc.freeze()
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not packet:
            return
        if os.fork() == 0:
            control.close()
            _answer_all(socket.socket(fileno=descriptors[0]), decode)
        os.close(descriptors[0])


def _answer_all(connection: socket.socket, decode: Decode) -> NoReturn:
    """In a decoder: answer one file after another."""
    try:
        sandbox.confine()
        channel = Channel(connection, lambda: None)
        channel.send({"type": "hello", "pid": os.getpid()})
        out: mmap.mmap | None = None
        while True:
            select.select([connection], [], [])
            message, body = channel.receive() or ({}, b"")
            if message.get("do") == "map" and isinstance(body, SharedBytes):
                out = mmap.mmap(body.descriptor, OUT_BYTES)
            elif message:
                reply, data = _answer(decode, message, body)
                if out is not None and INLINE_BYTES < len(data) <= OUT_BYTES:
                    out[: len(data)] = data
                    reply, data = {**reply, "num_bytes": len(data)}, b""
                channel.send(reply, data if isinstance(data, bytes) else SharedBytes.of(data))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _answer(decode: Decode, message: Message, body: Body) -> tuple[Message, bytes | memoryview]:
    try:
        data = view_of(body)
        sandbox.limit(MEASURE_BYTES + 2 * len(data), MEASURE_S)
        return decode(message, data)
    except BrimError as error:
        return {"error": error.as_dict()}, b""
    except MemoryError:
        return {"error": ImageError(f"{message['name']}: {KILLED}").as_dict()}, b""
    except Exception:  # broad on purpose: decoders raise anything for a damaged file
        return {"error": None}, b""


def decode(message: Message, data: memoryview) -> tuple[Message, bytes | memoryview]:
    """The size of an image, or its pixels."""
    from brim.segmentation.images import image_size
    from brim.segmentation.images.reading import read_image

    width, height = image_size(data, message["name"])
    if message["do"] == "size":
        return {"size": [width, height]}, b""
    num_pixels = min(width * height, message["max_pixels"])
    memory_bytes = MEASURE_BYTES + 2 * len(data) + PIXEL_BYTES * num_pixels
    sandbox.limit(memory_bytes, MEASURE_S + num_pixels / PIXELS_S)
    pixels = read_image(bytes(data), max_pixels=message["max_pixels"], name=message["name"])
    if pixels.shape[0] * pixels.shape[1] > width * height:
        text = f"its header says {width} x {height} pixels, but it holds {pixels.shape[1]} x {pixels.shape[0]}"
        raise ImageError(f"{message['name']}: {text}")
    return {"shape": list(pixels.shape[:2])}, pixels.reshape(-1).data


def main(argv: list[str]) -> int:
    import brim.segmentation.images.reading  # noqa: F401  # a fork that has the libraries decodes at once
    from brim.segmentation.images.tiff import load_codecs

    with suppress(ImageError):  # without them a TIFF is answered with how to install them
        load_codecs()
    serve(socket.socket(fileno=int(argv[0])), decode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
