"""`brim …` that logs the loss of every step and writes a checkpoint after every fifth, for tests that compare runs.

BRIM_TEST_DEATH=RANK:STEP: that rank is killed before that step, the first time the ranks are started.
"""

import os
import signal
import sys
from typing import Any

from brim.cli import main
from brim.engine import config as train_config
from brim.engine.training import step

_init = train_config.TrainConfig.__init__
_step = step.Stepper.step


def _logging_all(self: Any, **values: Any) -> None:
    _init(self, **{"log_every": 1, "checkpoint_every_steps": 5, "tensorboard": False, **values})


def _dying(self: Any, batch: Any, number: int, *args: Any) -> Any:
    if number == int(os.environ["BRIM_TEST_DEATH"].partition(":")[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return _step(self, batch, number, *args)


train_config.TrainConfig.__init__ = _logging_all  # type: ignore[method-assign]
_is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
if _is_first and os.environ.get("BRIM_TEST_DEATH", "").startswith(f"{os.environ.get('RANK')}:"):
    step.Stepper.step = _dying  # type: ignore[method-assign]

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
