"""Time that only the tests move."""


class FakeTime:
    """Stands in for the module `time` in a module under test: sleeping moves the clock, and nothing else does."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    time = monotonic = perf_counter = __call__

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
