"""A prediction process, `python -m brim.service.prediction.process.main INDEX BEAT LIFELINE`; settings on stdin.

Started by the supervisor, one per GPU or one on the CPU. No web framework and no database is imported here, and torch
only with the first model.
"""

import json
import logging
import os
import signal
import sys
from typing import Final

from brim.errors import BrimError
from brim.jobs.worker.process import FileLock, Heartbeat, die_with_supervisor, read_settings
from brim.service.prediction.process.attempts import Attempts
from brim.service.prediction.process.models import Make, Models
from brim.service.prediction.process.predictor import Predictor
from brim.service.prediction.process.work import Watched
from brim.service.settings import Settings

log = logging.getLogger("brim.prediction")

LOCK_S: Final = 60.0  # for the process that had this number to end


SWITCH_S = 0.001  # for which one thread may keep the others from the interpreter: an answer passes through a dozen


def serve(index: int, settings: Settings, beat: Heartbeat, make: Make | None = None) -> None:
    """Be the predictor of that number until SIGTERM; make loads a model, where not by its kind."""
    lock = FileLock(settings.data / "workers" / f"predict-{index}.lock").wait(LOCK_S, idle=beat)
    models = Models(
        "auto",
        share=settings.predict_memory / 100,
        batch_sizes=settings.batch_sizes,
        make=make,
        wrap=Watched,
        attempt=Attempts(settings.data / "workers" / f"predict-{index}.loading"),
    )
    sys.setswitchinterval(SWITCH_S)
    cores = (os.cpu_count() or 1) / settings.predictors
    path = settings.predict_sockets[index]
    # an image takes a core 10 ms as a JPEG and 30 as a PNG, its answer 2 to 3
    decoders, finishers = max(2, int(0.75 * cores)), max(2, int(0.25 * cores))
    predictor = Predictor(path, models, beat, hang_s=settings.predict_hang_s, decoders=decoders, finishers=finishers)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, predictor.leave)
    predictor.run()
    path.unlink(missing_ok=True)
    lock.release()


def main(argv: list[str]) -> int:
    """Predict until told to stop."""
    index, beat, lifeline = int(argv[0]), Heartbeat(int(argv[1])), int(argv[2])
    die_with_supervisor(lifeline)
    settings = Settings.from_json(json.dumps(read_settings()))
    logging.basicConfig(level=settings.log_level, format=f"%(asctime)s predict{index} %(levelname)s %(message)s")
    try:
        serve(index, settings, beat)
    except BrimError as failed:
        log.error("%s", failed)
        return 1
    os._exit(0)  # threads that load or run are not waited for: what they do is nobody's any more


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
