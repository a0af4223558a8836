"""`brim datasets add | list | remove`: what the jobs of a service may read, for whoever administers it.

Works on the catalogue itself, whether the service runs or not: what is added is there for it at once.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from brim.cli.catalogue import Data, Database, open_catalogue
from brim.cli.options import Json, check_choice, check_positive, one_of, whole
from brim.cli.terminal import Stop, print_json, say, show
from brim.errors import ConfigError, Conflict, NotFound
from brim.jobs.registry.datasets import KINDS

if TYPE_CHECKING:
    from brim.jobs.store import Catalogue, DatasetRow

datasets = typer.Typer(no_args_is_help=True, epilog="Example: brim datasets add cells folder --kind images")

_open = partial(open_catalogue, first="add a dataset first")


@datasets.command(epilog="Example: brim datasets add cells folder --kind images")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What people will call it.")],
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help='rf: made by "brim rf generate". images: a folder of images, or one with folders images and masks. '
            "sequences: a folder of .npy files, or a packed corpus.",
        ),
    ],
    kind: Annotated[str, typer.Option(metavar="KIND", help="rf, images or sequences.", autocompletion=one_of(*KINDS))],
    labels: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help='sequences: as of "brim sequence pack".')
    ] = None,
    data: Data = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Check, count and list a dataset.

    rf, images and packed corpora stay where they are and must stay readable by the service; a folder of .npy files
    is packed into the data directory.
    """
    check_choice("--kind", kind, KINDS)
    _check_name(name)
    if labels is not None and kind != "sequences":
        raise ConfigError(f"--labels {labels} is for --kind sequences; masks of images lie in a folder masks")
    with Stop() as stop, _open(data, database, make=True) as (catalogue, folder):
        from brim.cli.sequence import SequenceDisplay
        from brim.jobs.registry import datasets as sources

        with SequenceDisplay(stop) as display:
            row = sources.add(
                catalogue,
                folder,
                name=name,
                path=path,
                kind=cast(Literal["rf", "images", "sequences"], kind),
                labels=labels,
                progress=display.packing,
                stop=stop,
            )
    if row is None:
        say("stopped; nothing was added")
        raise typer.Exit(128 + stop.number)
    if as_json:
        print_json(_shown(row))
    else:
        show(f"{row.id}  {_line(row)}")


@datasets.command("list", epilog="Example: brim datasets list --kind images")
def list_(
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="rf, images or sequences.", autocompletion=one_of(*KINDS))
    ] = None,
    page: Annotated[int, typer.Option(metavar="N", parser=whole, help="50 a page, the newest first.")] = 1,
    data: Data = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """List datasets, the newest first."""
    check_choice("--kind", kind, KINDS)
    check_positive("--page", page)
    with _open(data, database) as (catalogue, _):
        found = catalogue.datasets.page(kind=kind, page=page)
    if as_json:
        rows = [_shown(row) for row in found.rows]
        print_json({"datasets": rows, "page": found.page, "pages": found.pages, "total": found.total})
        return
    for row in found.rows:
        show(f"{row.id}  {_line(row)}")
    if found.pages > 1:
        say(f"page {found.page} of {found.pages}, {found.total} datasets")
    elif not found.rows:
        say("no datasets")


@datasets.command(epilog="Example: brim datasets remove cells")
def remove(
    dataset: Annotated[str, typer.Argument(metavar="ID|NAME", help='As "brim datasets list" shows it.')],
    data: Data = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Delete a dataset that no job uses; of one that was added where it lies, only the entry goes."""
    with _open(data, database) as (catalogue, folder):
        from brim.jobs.registry import datasets as sources

        row = _find(catalogue, dataset)
        sources.remove(catalogue, folder, row.id)
    if as_json:
        print_json({"id": row.id, "name": row.name, "files_deleted": row.owned})
    else:
        show(f"{row.id}  {row.name}: removed" + ("" if row.owned else f"; its files stay in {row.path}"))


# Helpers


def _check_name(name: str) -> None:
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise ConfigError(f"NAME {name!r} must be 1 to 200 printable characters")


def _find(catalogue: "Catalogue", text: str) -> "DatasetRow":
    """The dataset with that id, else the one with that name."""
    if row := catalogue.datasets.get(text):
        return row
    named = catalogue.datasets.named(text)
    if not named:
        raise NotFound(
            f'{text} is neither the id nor the name of a dataset; "brim datasets list" shows those there are'
        )
    if len(named) > 1:
        ids = ", ".join(row.id for row in named)
        raise Conflict(f"{len(named)} datasets are named {text}; give the id of one: {ids}")
    return named[0]


def _shown(row: "DatasetRow") -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "number"}


def _line(row: "DatasetRow") -> str:
    state = "" if row.state == "ready" else f", {row.state}"
    return f"{row.name}  {row.kind}, {row.items} items, {row.bytes / 1e6:.1f} MB{state}"
