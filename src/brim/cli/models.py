"""`brim models add | list | remove`: what requests for predictions may name, for whoever administers a service.

Works on the catalogue itself, whether the service runs or not: a running one sees a change within two seconds.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brim.cli.catalogue import Data, Database, open_catalogue
from brim.cli.options import Json
from brim.cli.terminal import Stop, print_json, say, show
from brim.errors import NotFound

if TYPE_CHECKING:
    from brim.jobs.store import ModelRow

models = typer.Typer(no_args_is_help=True, epilog="Example: brim models add cells run --data brim-data")

_open = partial(open_catalogue, first="add a model first")


@models.command(epilog="Example: brim models add cells weights.safetensors --network hrnet")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What requests will call it: letters, digits, . _ -")],
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|FILE",
            help='A run of "brim segment train", "brim rf train" or "brim sequence train", or a file of weights.',
        ),
    ],
    network: Annotated[
        str | None, typer.Option(metavar="NAME", help="What a file of weights is of; a run says it itself.")
    ] = None,
    data: Data = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Check that a model loads, and let requests name it.

    It stays where it is and must stay readable by the service. A name that is taken is given to the new model: requests
    under way end with the old one.
    """
    with Stop() as stop:
        from brim.jobs.registry.models import add as add_model
        from brim.jobs.registry.models import check_name

        check_name(name)
        with _open(data, database, make=True) as (catalogue, _):
            added = add_model(catalogue, name=name, path=path, network=network, stop=stop)
    if added is None:
        say("stopped; nothing was added")
        raise typer.Exit(128 + stop.number)
    row, replaced = added
    if as_json:
        print_json({**_shown(row), "replaced": replaced})
        return
    show(f"{_line(row)}: {'replaced' if replaced else 'added'}; requests may name it now")


@models.command("list", epilog="Example: brim models list --json")
def list_(data: Data = None, database: Database = None, as_json: Json = False) -> None:
    """List models by name; "GET /api/models" of a running service says which are loaded."""
    with _open(data, database) as (catalogue, _):
        rows = catalogue.models.all()
    if as_json:
        print_json({"models": [_shown(row) for row in rows]})
        return
    for row in rows:
        show(f"{_line(row)}  {row.path}")
    if not rows:
        say('no models; add one with "brim models add NAME RUN"')


@models.command(epilog="Example: brim models remove cells")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help='As "brim models list" shows it.')],
    data: Data = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Let no request name a model any more; its files stay."""
    with _open(data, database) as (catalogue, _):
        row = catalogue.models.get(name)
        if row is None or not catalogue.models.remove(name):
            raise NotFound(f'{name} is not the name of a model; "brim models list" shows those there are')
    if as_json:
        print_json({"name": row.name, "path": row.path})
    else:
        show(f"{row.name}: removed; its files stay in {row.path}")


# Helpers


def _shown(row: "ModelRow") -> dict[str, Any]:
    names = ("name", "kind", "network", "path", "version", "about", "added_at")
    return {name: getattr(row, name) for name in names}


def _line(row: "ModelRow") -> str:
    return f"{row.name}  {row.kind}, {row.network}, {row.about.get('parameters', 0) / 1e6:.1f} M parameters"
