"""The catalogue of a service for whoever administers it: opened where it lies, whether the service runs or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brim.cli.options import needing_service
from brim.errors import ConfigError, StorageError, Unavailable

if TYPE_CHECKING:
    from brim.jobs.store import Catalogue

Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The service's data directory. [default: BRIM_DATA, brim-data]"),
]
Database = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The service's database, also in BRIM_DATABASE. [default: files in --data]"),
]


@contextmanager
def open_catalogue(
    data: Path | None, database: str | None, *, make: bool = False, first: str
) -> Iterator[tuple["Catalogue", Path]]:
    """The catalogue of a data directory, and that directory; where there are none they are made, or an error.

    first  what makes one, as the error says: "add a dataset first"
    """
    with needing_service("the catalogue"):
        from brim.jobs.store import Catalogue, upgrade
        from brim.service.settings import from_options
    settings = from_options(data=data, database=database)
    file = Path(settings.catalogue_url.removeprefix("sqlite:///"))
    if not make and settings.catalogue_url.startswith("sqlite") and not file.is_file():
        raise ConfigError(f"{settings.data} holds no catalogue; give --data as to brim serve, or {first}")
    try:
        settings.make_folders()
    except OSError as failure:
        raise StorageError(f"{failure.filename}: {failure.strerror}; choose another --data") from failure
    try:
        upgrade(settings.catalogue_url)
        with Catalogue.open(settings.catalogue_url) as catalogue:
            yield catalogue, settings.data
    except Unavailable as failure:
        reason = str(getattr(failure.__cause__, "orig", "")).strip().partition("\n")[0]
        raise Unavailable(f"{failure} ({reason})" if reason else str(failure)) from failure
