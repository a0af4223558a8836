"""A prediction process with a toy for a model: `python toy_predictor.py INDEX BEAT LIFELINE`, as the real one is run.

What the toy does to a request, the request says in its options:

    seconds          how long its batch takes on the device
    at               a stage, "inspect", "decode", "forward" or "finish", at which…
    do               …it does this: "kill" the process, "hold", "fail", "refuse" in words
    gate             a file: "hold" notes that it has begun in one with the ending .begun, and waits until this is there
    once             a file: only where that is not there yet, and then it is
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from brim.engine.batching.servable import Answer, DecodedRequest, Payload, RequestShape
from brim.errors import ImageError
from brim.jobs.worker.process import Heartbeat, die_with_supervisor, read_settings
from brim.service.prediction.process import predictor
from brim.service.prediction.process.main import serve
from brim.service.prediction.process.models import Registered
from brim.service.settings import Settings


class Toy:
    """Answers with what it got."""

    sizes = (1, 2, 4)
    max_batch_size = 4
    tuned = True
    weight_bytes = 1000

    def __init__(self, version: str) -> None:
        self.version = version
        self.expected_s: dict[int, float] = {}
        self.num_forwards = 0

    def example(self, num: int) -> list[Any]:
        return [({"seconds": 0.001}, b"")] * num

    def inspect(self, payload: Payload) -> RequestShape:
        act("inspect", payload.options)
        return RequestShape(key="toy", sizes=self.sizes)

    def decode(self, payload: Payload) -> DecodedRequest:
        act("decode", payload.options)
        return DecodedRequest("toy", [(payload.options, bytes(payload.data))])

    def forward(self, parts: list[Any]) -> list[Any]:
        self.num_forwards += 1
        for options, _ in parts:
            act("forward", options)
        time.sleep(max(options.get("seconds", 0.0) for options, _ in parts))
        return parts

    def collect(self, running: list[Any]) -> list[Any]:
        return [(options, data, len(running)) for options, data in running]

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        options, data, num = outputs[0]
        act("finish", options)
        return Answer(data, "text/plain", {
            "batch": num, "pid": os.getpid(), "version": self.version, "forwards": self.num_forwards,
        })  # fmt: skip

    def close(self) -> None:
        pass


def act(stage: str, options: Any) -> None:
    if options.get("at") != stage:
        return
    if options.get("once") is not None:
        if Path(options["once"]).exists():
            return
        Path(options["once"]).touch()
    if options["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options["do"] == "fail":
        raise RuntimeError("the toy failed as it was told to")
    if options["do"] == "refuse":
        raise ImageError("the toy does not like this one; send another")
    gate = Path(options["gate"])
    gate.with_suffix(".begun").touch()
    while not gate.exists():
        time.sleep(0.005)


def make(wanted: Registered, device: Any, lock: Any) -> Toy:
    """A model called deadly ends whoever loads it."""
    if wanted.name == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    return Toy(wanted.version)


def main(argv: list[str]) -> None:
    beat = Heartbeat(int(argv[1]))
    die_with_supervisor(int(argv[2]))
    settings = Settings.from_json(json.dumps(read_settings()))
    predictor.DRAIN_S = 180.0
    serve(int(argv[0]), settings, beat, make=make)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
