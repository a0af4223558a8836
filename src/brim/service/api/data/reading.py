"""A dataset's files as a request reads them: what is wrong with them is said in words, by the dataset's name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from brim.errors import BrimError, ConfigError, Conflict, DatasetError, ImageError, StorageError
from brim.jobs.kinds import job_phrase
from brim.jobs.store import DatasetRow


@contextmanager
def readable(row: DatasetRow, place: Path) -> Iterator[None]:
    """Errors of a dataset's reader as a Conflict that does not say where it is."""
    try:
        yield
    except (ConfigError, DatasetError, ImageError, StorageError) as failure:
        if row.state == "writing":
            raise Conflict(
                f'the dataset "{row.name}" is still being written and has nothing to show yet; try again soon'
            ) from failure
        raise refusal(row, place, failure) from failure


def refusal(row: DatasetRow, place: Path, failure: BrimError, done: str = "read") -> Conflict:
    """What cannot be done with a dataset, and why."""
    text = job_phrase(failure)[0].replace(str(place), f'dataset "{row.name}"')
    return Conflict(f"the dataset cannot be {done}: {text}")
