"""`brim …` that logs the loss of every step and writes a checkpoint after every fifth, for tests that compare runs.

BRIM_TEST_DEATH=RANK:STEP: that rank is killed before that step, the first time the ranks are started.
"""

import os
import signal
import sys
from typing import Any

from brim.cli import main
from brim.engine.config import TrainConfig
from brim.engine.training.step import Stepper

_init = TrainConfig.__init__
_step = Stepper.step


def logging_all(self: Any, **values: Any) -> None:
    """TrainConfig's constructor, with everything logged."""
    _init(self, **{"log_every": 1, "checkpoint_every_steps": 5, "tensorboard": False, **values})


def _dying(self: Any, batch: Any, number: int, *args: Any) -> Any:
    if number == int(os.environ["BRIM_TEST_DEATH"].partition(":")[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return _step(self, batch, number, *args)


if __name__ == "__main__":
    TrainConfig.__init__ = logging_all  # type: ignore[method-assign]
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if is_first and os.environ.get("BRIM_TEST_DEATH", "").startswith(f"{os.environ.get('RANK')}:"):
        Stepper.step = _dying  # type: ignore[method-assign]
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
