"""mosec for bench_serve.py: processes that decode, one that runs batches, processes that trace."""

import sys
from pathlib import Path
from typing import Any

import mosec
import mosec.runtime

from serve_others import Steps, from_shared, read_setting, to_shared


class Stage(mosec.Worker):  # type: ignore[misc]
    """Values between stages go through shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps(read_setting())

    def serialize_ipc(self, data: Any) -> bytes:
        """To the next stage."""
        return to_shared(data)

    def deserialize_ipc(self, data: bytes) -> Any:
        """From the stage before."""
        return from_shared(data)


class Decode(Stage):
    """Bytes of a file → pixels."""

    def deserialize(self, data: bytes) -> bytes:
        """The body as it is."""
        return data

    def forward(self, data: bytes) -> Any:
        """One image."""
        return self.steps.decode(data)


class Forward(Stage):
    """Pixels → masks and probabilities, a batch at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.steps.load()

    def forward(self, data: Any) -> Any:
        """A batch; with a largest size of one, mosec hands over the image itself."""
        return self.steps.forward(data) if isinstance(data, list) else self.steps.forward([data])[0]


class Finish(Stage):
    """Masks and probabilities → GeoJSON."""

    resp_mime_type = "application/geo+json"

    def forward(self, data: Any) -> bytes:
        """One image."""
        return self.steps.finish(data)

    def serialize(self, data: bytes) -> bytes:
        """The answer as it is."""
        return data


def main() -> None:
    """Serve until killed."""
    setting = read_setting()
    words = {
        "--address": "127.0.0.1",
        "--port": setting["port"],
        "--log-level": "error",
        "--timeout": round(1000 * setting["timeout_s"]),
        "--capacity": setting["capacity"],
        "--max-request-size": 2**26,
    }
    sys.argv[1:] = [str(word) for pair in words.items() for word in pair]
    mosec.runtime.get_mosec_path = find_program
    server = mosec.Server()
    server.append_worker(Decode, num=setting["threads"], timeout=60)
    wait_ms = max(1, round(setting["wait_ms"]))
    server.append_worker(Forward, max_batch_size=setting["batch_size"], max_wait_time=wait_ms, timeout=60)
    server.append_worker(Finish, num=setting["threads"], timeout=60)
    server.run()


def find_program() -> Path:
    """mosec's own program, also when its package is in a folder beside those of this Python."""
    package = Path(mosec.__file__).parent
    return next(folder / "bin" / "mosec" for folder in package.parents if (folder / "bin" / "mosec").is_file())


if __name__ == "__main__":
    main()
