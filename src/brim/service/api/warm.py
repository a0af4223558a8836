"""What is slow at first and needed soon: the kinds' configurations, which import torch. Made ready in a thread."""

import logging
import threading

log = logging.getLogger(__name__)


class Warm:
    """Imports what requests will need; /health answers meanwhile, /ready says when it is done."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def start(self) -> None:
        """Begin, in a thread that nobody waits for."""
        threading.Thread(target=self._run, name="warm", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether requests of all kinds are answered without delay."""
        return self._done.is_set()

    def _run(self) -> None:
        try:
            from brim.jobs.kinds import body_schema

            body_schema()
        except Exception:
            log.exception("the kinds of jobs cannot be imported; the service takes no jobs")
            return
        self._done.set()
