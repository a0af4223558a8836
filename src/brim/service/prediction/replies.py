"""What a request needs after its prediction, learned: what is promised must also be sent in time."""

from collections import deque


class Replies:
    """What an answer takes besides the predictor's part of it: the way there and back, its text."""

    # Predictors keep back the 75th percentile of what comes after a forward. With that of replies on top it would be
    # the 83rd of both, and one request in five was refused that would have been in time.
    _WINDOW, _QUANTILE, _MOST = 32, 0.6, 0.25

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=self._WINDOW)
        self._typical_s = 0.0

    def note(self, seconds: float) -> None:
        """An answer took so long besides."""
        self._seconds.append(max(0.0, seconds))
        self._typical_s = sorted(self._seconds)[int(self._QUANTILE * len(self._seconds))]

    def left_s(self, deadline_s: float, now_s: float) -> float:
        """The deadline that a predictor is given, so that its answer is out by the request's own."""
        return deadline_s - min(self._typical_s, self._MOST * max(0.0, deadline_s - now_s))
