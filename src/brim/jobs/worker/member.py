"""One process of a job: `python -m brim.jobs.worker.member LIFELINE VOICE STOP`, its task on standard input.

LIFELINE ends with the worker, STOP when the job is to stop; on VOICE it says how far it is and what came of it.
"""

import json
import logging
import os
import select
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from brim.errors import BrimError
from brim.jobs.kinds import KINDS, Inputs, Spec, Stopped, Task
from brim.jobs.status import JobProgress
from brim.jobs.worker.joblog import LOGGER
from brim.jobs.worker.process import die_with_supervisor, read_settings

MAX_TRACE: Final = 4000  # characters of what nobody foresaw


class Speech:
    """Lines of JSON to the worker; only the first member reports progress."""

    def __init__(self, pipe: int, is_first: bool) -> None:
        self._pipe, self._is_first, self._lock = pipe, is_first, threading.Lock()

    def tell(self, progress: JobProgress) -> None:
        if self._is_first:
            self.say(progress=asdict(progress))

    def say(self, **word: Any) -> None:
        """Write one line, atomically among threads."""
        line = json.dumps(word).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._pipe, line) :]


class Loud(logging.Handler):
    """Sends log records to the job's own log."""

    def __init__(self, speech: Speech, level: int) -> None:
        super().__init__(level)
        self._speech = speech

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._speech.say(log=[record.levelno, record.getMessage()])
        except OSError:
            return


def main(argv: list[str]) -> int:
    """Run the task; ending without a message counts as a death."""
    lifeline, voice, stop = (int(number) for number in argv)
    die_with_supervisor(lifeline)
    is_first = os.environ.get("RANK", "0") == "0"
    speech = Speech(voice, is_first)
    logger = logging.getLogger(LOGGER)
    logger.addHandler(Loud(speech, logging.INFO if is_first else logging.WARNING))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        task = read_task(read_settings(), speech, stop)
        _keep_to_share(task)
        speech.say(result=KINDS[task.spec.kind].run(task))
    except Stopped:
        speech.say(stopped=True)
    except BrimError as failure:
        speech.say(error=failure.as_dict())
        return 1
    except Exception as failure:
        logger.error("%s", traceback.format_exc()[-MAX_TRACE:])
        speech.say(error={"message": f"{type(failure).__name__}: {failure}"})
        return 1
    return 0


def read_task(values: dict[str, Any], speech: Speech, stop: int) -> Task:
    """The task as the worker described it."""
    run = values["run"]
    return Task(
        spec=Spec(**values["spec"]),
        inputs=Inputs(datasets=tuple(map(Path, values["datasets"])), run=None if run is None else Path(run)),
        out=Path(values["out"]),
        device=values["device"],
        batch_sizes=Path(values["batch_sizes"]),
        tell=speech.tell,
        stop=lambda: bool(select.select([stop], [], [], 0)[0]),  # nothing is ever written to it: it ends
        gpus=tuple(values["gpus"]),
        cluster=values["cluster"],
        is_member=True,
    )


def _keep_to_share(task: Task) -> None:
    """Limit this process to the jobs' share of every GPU it sees."""
    if task.device != "cpu" and task.gpus:
        import torch

        from brim.engine.device import keep_to_share

        for number in range(torch.cuda.device_count()):
            keep_to_share(torch.device("cuda", number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
