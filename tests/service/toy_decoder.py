"""A prepared process whose decoders do what the file says: `python -m toy_decoder CONTROL`, as the real one is run."""

import ctypes
import os
import socket
import sys
from pathlib import Path

from brim.errors import ImageError
from brim.service.prediction.channel import Message
from brim.service.prediction.process.decoders import serve


def decode(message: Message, data: memoryview) -> tuple[Message, bytes]:
    words = bytes(data[:100]).decode().split()
    if message["do"] == "size":
        act(words)
        return {"size": [2, 1]}, b""
    act(words)
    return {"shape": [1, 2]}, b"abcdef"


def act(words: list[str]) -> None:
    if words[0] == "kill":
        ctypes.string_at(0)
    elif words[0] == "spin":  # for ever, or until a file is there
        while not (words[1:] and Path(words[1]).exists()):
            pass
    elif words[0] == "eat":
        bytearray(4 * 1024**3)
    elif words[0] == "refuse":
        raise ImageError("this is no image")
    elif words[0] == "fail":
        raise RuntimeError("/secret")
    elif words[0] == "call":
        socket.socket().connect(("127.0.0.1", int(words[1])))
    elif words[0] == "write":
        Path(words[1]).write_text("x")
    elif words[0] == "signal":
        os.kill(os.getppid(), 0)
    elif words[0] == "ring":  # io_uring_setup: it opens sockets too
        if ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120)) < 0:
            raise PermissionError
    elif words[0] == "start":
        os.execv("/bin/true", ["true"])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), decode)
