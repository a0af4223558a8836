"""Images of a job's datasets are read in processes with limits, because they may come from uploads.

    thread of the worker ──path or bytes──▶ one fork per image, confined ──▶ its pixels, or why there are none

The forks come from a prepared process, `python -m brim.jobs.decoding CONTROL`, that has the libraries and no threads.
A fork has no network, cannot write or start programs where the kernel allows that (`jobs/sandbox.py`), and may use
memory and CPU time in proportion to the image's size. What it sends is checked and never unpickled.
"""

import gc
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from brim.errors import BrimError, ImageError, from_dict
from brim.jobs import sandbox

if TYPE_CHECKING:
    import numpy as np

    from brim.segmentation.config import ImagePlanes
    from brim.segmentation.images.stacks import LoadedImage

HEADER_S, HEADER_BYTES = 10.0, 512 * 1024**2  # CPU time and memory for a header, and for small images
PIXELS_S, PIXEL_BYTES = 1e6, 80  # pixels a second, and bytes of working memory per pixel, beyond those
UNKNOWN_PIXELS: Final = 2**24  # of an image whose header does not say
WALL_FACTOR: Final = 8  # a busy machine takes longer than the CPU time that is allowed
MAX_CHANNELS_BYTES: Final = 32  # of a pixel: three doubles, and more
_KINDS: Final = "uif"  # of NumPy's dtypes: whole numbers and floats
KILLED: Final = "reading it took more time or memory than an image of its size needs; it is damaged or no image"


@contextmanager
def confined_images() -> Iterator[None]:
    """Within the block, `read_image` and its like read files and bytes in confined processes."""
    from brim.segmentation.images.reading import loading_by

    reader = ConfinedReader()
    try:
        with loading_by(reader.load):
            yield
    finally:
        reader.close()


class ConfinedReader:
    """Reads images in forks of a prepared process; used by any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prepared: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def load(self, image: Path | bytes, max_pixels: int, name: str, planes: "ImagePlanes") -> "LoadedImage":
        """As `load_pixels` in `segmentation/images/reading.py`."""
        request = pickle.dumps((image, max_pixels, name, planes))
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._send(theirs.fileno())
            ours.settimeout(WALL_FACTOR * (HEADER_S + max_pixels / PIXELS_S))
            try:
                ours.sendall(len(request).to_bytes(8, "big") + request)
                with ours.makefile("rb") as stream:
                    reply = json.loads(stream.readline(65536))
                    if "error" in reply:
                        error = reply["error"]
                        raise from_dict(error) if error is not None else ImageError(f"{name}: it cannot be decoded")
                    return _received(stream, reply, max_pixels)
            except (OSError, ValueError, EOFError, KeyError) as failure:
                raise ImageError(f"{name}: {KILLED}") from failure

    def close(self) -> None:
        with self._lock:
            if self._prepared is not None:
                self._prepared[1].close()  # it ends with this
                self._prepared[0].wait()
                self._prepared = None

    def _send(self, descriptor: int) -> None:
        """Have a fork serve this connection; the prepared process is started again if it is gone."""
        with self._lock:
            for _ in range(2):
                if self._prepared is None:
                    self._prepared = _start()
                try:
                    socket.send_fds(self._prepared[1], [b"."], [descriptor])
                    return
                except OSError:
                    self._prepared[1].close()
                    self._prepared[0].wait()
                    self._prepared = None


def _start() -> tuple["subprocess.Popen[bytes]", socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OPENCV_FOR_THREADS_NUM": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "brim.jobs.decoding", str(theirs.fileno())]
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return process, ours


def _received(stream: Any, reply: dict[str, Any], max_pixels: int) -> "LoadedImage":
    """The planes that follow a reply, as far as its words can be believed."""
    import numpy as np

    from brim.segmentation.images.stacks import LoadedImage

    dtype, shape = np.dtype(str(reply["dtype"])), tuple(int(side) for side in reply["shape"])
    num_bytes = math.prod(shape) * dtype.itemsize
    names, shown = tuple(str(name) for name in reply["names"]), tuple(int(channel) for channel in reply["shown"])
    is_plausible = dtype.kind in _KINDS and len(shape) == 3 and min(shape) > 0
    is_plausible = is_plausible and len(names) == shape[2] and len(shown) > 0 and set(shown) <= set(range(shape[2]))
    if not is_plausible or shape[0] * shape[1] > max_pixels or num_bytes > MAX_CHANNELS_BYTES * max_pixels:
        raise ValueError("not an image")
    pixels = np.empty(shape, dtype)
    view = pixels.reshape(-1).view(np.uint8).data
    while len(view):
        got = stream.readinto(view)
        if not got:
            raise EOFError
        view = view[got:]
    pixel_um = reply["pixel_um"]
    return LoadedImage(pixels, names, shown, bool(reply["as_rgb"]), None if pixel_um is None else float(pixel_um))


# In the processes


def serve(control: socket.socket) -> None:
    """Fork for each connection that arrives, until the worker is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    gc.freeze()
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not packet:
            return
        if os.fork() == 0:
            control.close()
            _answer(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _answer(connection: socket.socket) -> NoReturn:
    """In the fork: read one image and end."""
    try:
        sandbox.confine()
        with connection.makefile("rwb") as stream:
            size = int.from_bytes(stream.read(8), "big")
            reply, pixels = _read(*pickle.loads(stream.read(size)))
            stream.write(json.dumps(reply).encode() + b"\n")
            if pixels is not None:
                stream.write(pixels.data.cast("B"))
    except OSError:
        pass  # nobody waits for it any more
    finally:
        os._exit(0)


def _read(
    image: Path | bytes, max_pixels: int, name: str, planes: "ImagePlanes"
) -> tuple[dict[str, Any], "np.ndarray | None"]:
    import numpy as np

    from brim.segmentation.images.files import header_size
    from brim.segmentation.images.reading import load_pixels

    try:
        num_bytes = len(image) if isinstance(image, bytes) else 0
        with suppress(OSError):
            num_bytes = num_bytes or Path(str(image)).stat().st_size
        sandbox.limit(HEADER_BYTES + 2 * num_bytes, HEADER_S)
        num_pixels = min(max_pixels, math.prod(header_size(image) or (UNKNOWN_PIXELS,)))
        sandbox.limit(HEADER_BYTES + 2 * num_bytes + PIXEL_BYTES * num_pixels, HEADER_S + num_pixels / PIXELS_S)
        loaded = load_pixels(image, max_pixels, name, planes)
        pixels = np.ascontiguousarray(loaded.planes)
        words = {"names": loaded.names, "shown": loaded.shown, "as_rgb": loaded.as_rgb, "pixel_um": loaded.pixel_um}
        return {"shape": pixels.shape, "dtype": pixels.dtype.str, **words}, pixels
    except BrimError as error:
        return {"error": error.as_dict()}, None
    except MemoryError:
        return {"error": ImageError(f"{name}: {KILLED}").as_dict()}, None
    except Exception:  # broad on purpose: decoders raise anything for a damaged file
        return {"error": None}, None


def main(argv: list[str]) -> int:
    import brim.segmentation.images.reading  # noqa: F401  # a fork that has the libraries reads at once
    from brim.segmentation.images.tiff import load_codecs

    with suppress(ImageError):  # without them a TIFF is answered with how to install them
        load_codecs()

    serve(socket.socket(fileno=int(argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
