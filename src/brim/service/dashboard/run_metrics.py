"""A run's metrics as series for charts: phases one after the other, and lines added as they are written."""

from collections.abc import Sequence

from brim.service.dashboard.client import Api, Json

POINTS = 500  # of a series that is read as a whole
MOST = 4 * POINTS  # lines, after which it is thinned again
SHARES = {"dice": "Dice", "iou": "IoU", "val_accuracy": "accuracy"}  # by what they are called

Series = list[tuple[float, float]]


class Metrics:
    """The lines so far."""

    def __init__(self, api: Api, place: str) -> None:
        """Nothing is read yet; place is that of the run's metrics in the API."""
        self._api, self._place, self._next = api, place, -1
        self.lines: list[Json] = []

    async def read(self) -> bool:
        """Read on; whether there was anything new."""
        if self._next < 0 or len(self.lines) > MOST:
            return await self._read_all()
        found = await self._api.get(self._place, after=self._next)
        if found["next"] < self._next:  # a worker went back to its checkpoint
            return await self._read_all()
        self._next = found["next"]
        self.lines += found["lines"]
        return bool(found["lines"])

    async def _read_all(self) -> bool:
        found = await self._api.get(self._place, points=POINTS)
        self.lines, self._next = found["lines"], found["next"]
        return True

    def series(self, name: str) -> Series:
        """Steps and values of one name; steps of a later phase go on from the one before."""
        return series(self.lines, name)

    def names(self, *, among: Sequence[str]) -> list[str]:
        """Which of these there are."""
        return [name for name in among if any(name in line for line in self.lines)]


def series(lines: Sequence[Json], name: str) -> Series:
    """Steps and values of one name, over all phases."""
    found: Series = []
    phase, start, last = None, 0, 0
    for line in lines:
        if line.get("phase") != phase:
            phase, start = line.get("phase"), start + last
            last = 0
        last = max(last, int(line["step"]))
        if line.get(name) is not None:
            found.append((start + int(line["step"]), float(line[name])))
    return found
