"""Watching a training in this process, such as a notebook's: `with brim.why() as w: …`, then `w.report()`."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brim.diagnosis.answer import Diagnosis, diagnose, measured
from brim.errors import ConfigError

_installed: list[Any] = []  # the one clock of this process: torch is wrapped once


class why:
    """Watches the training steps inside the block; nothing is run again, so the ceiling is that of the passes alone."""

    def __init__(self) -> None:
        self._clock: Any = None
        self._result: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        from brim.diagnosis.hook.brim_probe import PLAN, install
        from brim.diagnosis.hook.brim_probe.clock import StepClock

        plan = {**PLAN, "warm_s": 0.0, "watch_s": float("inf")}
        if not _installed:
            _installed.append(StepClock(plan))
            install(_installed[0], alone=True)
        self._clock = _installed[0]
        self._clock.reset()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from brim.diagnosis.hook.brim_probe.sampling import result

        self._result = result(self._clock)
        self._clock.thread = None  # from here on nothing is timed

    def answer(self) -> Diagnosis:
        """What the steps waited for."""
        if self._result is None or measured(self._result)["num_steps"] < 2:
            raise ConfigError(
                "fewer than two training steps were seen in the block",
                code="too_few",
                hint="put the training loop inside the block, and call this after it",
            )
        return diagnose([self._result])

    def report(self, file: Path | str | None = None) -> Diagnosis:
        """Print the answer, or write it as a page; also returns it."""
        from brim.diagnosis.words import lines

        answer = self.answer()
        if file is None:
            print("\n".join(lines(answer)))  # noqa: T201 - what a notebook shows
        else:
            from brim.diagnosis.page import page  # its report room needs NumPy
            from brim.report.page import write_page

            write_page(Path(file), page(answer))
        return answer
