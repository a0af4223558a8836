"""A prediction process, `python -m brim.service.prediction.process.main INDEX BEAT LIFELINE`; settings on stdin.

Started by the supervisor, one per GPU or one on the CPU. No web framework and no database is imported here, and torch
only with the first model.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from brim.engine.batching import BatcherConfig
from brim.errors import BrimError
from brim.jobs import sandbox
from brim.jobs.worker.process import FileLock, Heartbeat, die_with_supervisor, read_settings
from brim.service.prediction.process.decoders import SPARE
from brim.service.prediction.process.models import LoadModel, Models, Registered
from brim.service.prediction.process.predictor import Predictor, Watched
from brim.service.settings import Settings

log = logging.getLogger("brim.prediction")

LOCK_S: Final = 60.0  # for the earlier process of this number to end
MAX_LOADS: Final = 3  # attempts: a process may also die of something else while a model is loaded
SWITCH_S: Final = 0.001  # a thread holds the interpreter no longer than this: an answer passes through a dozen


def serve(index: int, settings: Settings, beat: Heartbeat, make: LoadModel | None = None) -> None:
    """Be the predictor of that number until SIGTERM; make loads models, by default according to their kind."""
    lock = FileLock(settings.data / "workers" / f"predict-{index}.lock").wait(LOCK_S, idle=beat)
    # an image takes a core 10 ms as a JPEG and 30 as a PNG, its answer 2 to 3
    cores = (os.cpu_count() or 1) / settings.predictors
    decoders, finishers = max(2, int(0.75 * cores)), max(2, int(0.25 * cores))
    models = Models(
        "auto",
        share=settings.predict_memory / 100,
        batch_sizes=settings.batch_sizes,
        make=make,
        wrap=Watched,
        attempt=Attempts(settings.data / "workers" / f"predict-{index}.loading"),
        decoders=decoders,
    )
    sys.setswitchinterval(SWITCH_S)
    path = settings.predict_sockets[index]
    config = BatcherConfig(max_late_s=settings.max_predict_late_ms / 1e3, max_part_s=settings.max_predict_part_s)
    predictor = Predictor(
        path, models, beat, config=config, hang_s=settings.predict_hang_s, decoders=decoders + SPARE,
        finishers=finishers,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, predictor.leave)
    predictor.run()
    path.unlink(missing_ok=True)
    lock.release()


class Attempts:
    """Counts loads that neither succeeded nor failed, on disk, for the process that follows one that died of them.

    Registered models are loaded at every start. One whose loading kills the process would kill every following one,
    and with it the answers of all other models, so it is not tried again after a few times, until it is registered
    again or the service is restarted.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._begun: dict[str, int] = json.loads(file.read_text())
        except (OSError, ValueError):
            self._begun = {}

    @contextmanager
    def __call__(self, wanted: Registered) -> Iterator[None]:
        """Count a load within the block; BrimError if it has died too often."""
        key = f"{wanted.name} {wanted.version}"
        begun = self._begun.get(key, 0)
        if begun >= MAX_LOADS:
            raise BrimError(
                f"the prediction process died {begun} times while loading it",
                hint="register it again, or restart the service to try once more",
            )
        self._write({**self._begun, key: begun + 1})
        try:
            yield
        finally:
            self._write({other: count for other, count in self._begun.items() if other != key})

    def _write(self, begun: dict[str, int]) -> None:
        self._begun = begun
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(begun))
            temporary.replace(self._file)
        except OSError:
            return  # a full disk: then it is not counted


def main(argv: list[str]) -> int:
    index, beat, lifeline = int(argv[0]), Heartbeat(int(argv[1])), int(argv[2])
    die_with_supervisor(lifeline)
    settings = Settings.from_json(json.dumps(read_settings()))
    logging.basicConfig(level=settings.log_level, format=f"%(asctime)s predict{index} %(levelname)s %(message)s")
    sandbox.no_internet()  # code of users' networks runs here
    try:
        serve(index, settings, beat)
    except BrimError as failed:
        log.error("%s", failed)
        return 1
    os._exit(0)  # without waiting for threads that load or run: nobody needs their results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
