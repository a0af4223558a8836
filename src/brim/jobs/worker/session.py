"""A library function at work in the process's main thread, watched from a workflow's thread in slices.

The main thread, because libraries expect it (signals, CUDA graphs, OpenMP); slices, because a workflow's history must
stay short while cancels must be seen soon. Between two slices the function just goes on: a slice costs it nothing.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from brim.jobs.kinds.status import Progress
from brim.jobs.kinds.task import Stopped

SLICE_SHARE: Final = 0.05  # of the seconds recorded so far: steps grow with the logarithm of a job's length
SLICE_MIN_S: Final = 1.0
SLICE_MAX_S: Final = 600.0
POLL_S: Final = 0.3  # between two looks at a session
STOP_S: Final = 3.5  # what does not stop in so many seconds is given up: with a look and a restart, five in all
IDLE_S: Final = 0.25

Result = dict[str, Any]


def slice_s(spent_s: float) -> float:
    """Seconds of the next slice of a job that has run for spent_s: 191 slices in ten hours."""
    return min(SLICE_MAX_S, max(SLICE_MIN_S, SLICE_SHARE * spent_s))


class Session:
    """One attempt at one job: its body runs on the bench, slices wait for it."""

    def __init__(
        self,
        body: Callable[["Session"], Result],
        beat: Callable[[], None],
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the body, what tells the supervisor that it gets on, and what to do when it will not stop."""
        self.stop = threading.Event()
        self.progress = Progress(message="starting")
        self.result: Result | None = None
        self.failure: BaseException | None = None
        self._body, self._beat, self._give_up = body, beat, give_up
        self._done = threading.Event()
        self._is_left = False

    def tell(self, progress: Progress) -> None:
        """Take word from the body of how far it is."""
        self.progress = progress
        self._beat()

    def run(self) -> None:
        """Do the work, in the caller's thread; what comes of it is kept for the slices."""
        try:
            if not self.stop.is_set():
                self.result = self._body(self)
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = self.failure or failure
        finally:
            self._done.set()

    def fail(self, failure: Exception) -> None:
        """Stop the body for a reason of ours, such as a disk that is nearly full."""
        if self.failure is None:
            self.failure = failure
        self.stop.set()

    def leave(self) -> None:
        """Stop the body because the process ends; one that takes long is the supervisor's to kill."""
        self._is_left = True
        self.stop.set()

    def wait(self, seconds: float, cancelled: Callable[[], bool]) -> bool:
        """Wait for the end of the slice, of the body or for a cancel; whether the body has ended.

        `cancelled` is asked every POLL_S. A body's failure is raised here.
        """
        end_s = time.monotonic() + seconds
        while not self._done.wait(min(POLL_S, max(0.0, end_s - time.monotonic()))):
            if cancelled() or self.stop.is_set():
                self.close()
            elif time.monotonic() >= end_s:
                return False
        if self.failure is not None:
            raise self.failure
        return True

    def close(self) -> None:
        """Stop the body and wait until it has ended; one that will not end is given up."""
        self.stop.set()
        if not self._done.wait(STOP_S) and not self._is_left:
            self._give_up()
        self._done.wait()


class Bench:
    """The main thread's work: one session after another."""

    def __init__(self) -> None:
        self._inbox: queue.Queue[Session] = queue.Queue()

    def start(self, session: Session) -> Session:
        """Hand a session over to the main thread."""
        self._inbox.put(session)
        return session

    def serve(self, leaving: Callable[[], bool], idle: Callable[[], None]) -> None:
        """Run sessions until leaving; `idle` is called while there is none."""
        while not leaving():
            try:
                session = self._inbox.get(timeout=IDLE_S)
            except queue.Empty:
                idle()
                continue
            session.run()
            idle()
