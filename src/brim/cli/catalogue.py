"""`brim datasets | models  add | list | remove`, `brim runs list`: what jobs of a service may read and requests name.

The commands open the catalogue of a service directly, whether it runs or not; a running service sees a new dataset at
once and a new model within two seconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from brim.cli.options import AsJson, DataDir, argument, count, needing_service, one_of, option
from brim.cli.terminal import Display, Stop, print_json, print_page, print_result, print_table, say
from brim.errors import ConfigError, Conflict, NotFound, StorageError, Unavailable
from brim.jobs.registry.datasets import KINDS

if TYPE_CHECKING:
    from brim.jobs.store import Catalogue, DatasetKind, DatasetRow, ModelRow

datasets = typer.Typer(no_args_is_help=True, epilog="Example: brim datasets add cells folder --kind images")
models = typer.Typer(no_args_is_help=True, epilog="Example: brim models add cells run --data brim-data")

runs = typer.Typer(no_args_is_help=True, epilog="Example: brim runs list --data brim-data")
_RUNS: Final = ("rf.train", "segment.train", "sequence.train")

DatabaseUrl = Annotated[
    str | None, option("URL", "Database of the service, or BRIM_DATABASE.", show_default="files in --data")
]


@contextmanager
def open_catalogue(
    data: Path | None, database: str | None, *, make: bool = False
) -> Iterator[tuple["Catalogue", Path]]:
    """The catalogue of a data directory, and the directory; without make, one that does not exist is an error."""
    with needing_service("the catalogue"):
        from brim.jobs.store import Catalogue, upgrade
        from brim.service.settings import from_options
    settings = from_options(data=data, database=database)
    file = Path(settings.catalogue_url.removeprefix("sqlite:///"))
    if not make and settings.catalogue_url.startswith("sqlite") and not file.is_file():
        hint = "give the same {data} as to brim serve, or add something first"
        raise ConfigError(f"{settings.data} holds no catalogue", hint=hint)
    try:
        settings.make_folders()
    except OSError as failure:
        raise StorageError(f"{failure.filename}: {failure.strerror}", hint="choose another {data}") from failure
    try:
        upgrade(settings.catalogue_url)
        with Catalogue.open(settings.catalogue_url) as catalogue:
            yield catalogue, settings.data
    except Unavailable as failure:
        reason = str(getattr(failure.__cause__, "orig", "")).strip().partition("\n")[0]
        raise Unavailable(f"{failure} ({reason})" if reason else str(failure)) from failure


# Datasets


@datasets.command("add", epilog="Example: brim datasets add cells folder --kind images")
def add_dataset(
    name: Annotated[str, argument("NAME", "Name of the dataset.")],
    path: Annotated[
        Path,
        argument(
            "PATH",
            'rf: made by "brim rf generate". images: a folder of images, or one with folders images and masks. '
            "sequences: a folder of .npy files, or a packed corpus.",
        ),
    ],
    kind: Annotated[str, option("KIND", "rf, images, sequences or recordings.", **one_of(*KINDS))],
    labels: Annotated[Path | None, option("FILE.csv", 'sequences: labels, as for "brim sequence pack".')] = None,
    data: DataDir = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Check, count and list a dataset.

    rf, images and packed corpora stay where they are and must stay readable by the service; a folder of .npy files
    is packed into the data directory.
    """
    if not name.strip() or len(name) > 200 or not name.isprintable():
        raise ConfigError(f"NAME {name!r} must be 1 to 200 printable characters")
    if labels is not None and kind != "sequences":
        raise ConfigError(f"--labels {labels} is for --kind sequences; masks of images lie in a folder masks")
    with Stop() as stop, open_catalogue(data, database, make=True) as (catalogue, folder), Display(stop) as display:
        from brim.jobs.registry.datasets import add

        row = add(
            catalogue, folder, name=name, path=path, kind=cast("DatasetKind", kind), labels=labels,
            progress=display.packing, stop=stop,
        )  # fmt: skip
    if row is None:
        say("stopped; nothing was added")
        stop.exit()
    values = _dataset_json(row)
    print_result(values, as_json, _dataset_line(values))


@datasets.command("list", epilog="Example: brim datasets list --kind images")
def list_datasets(
    kind: Annotated[str | None, option("KIND", "rf, images, sequences or recordings.", **one_of(*KINDS))] = None,
    page: Annotated[int, option("N", "Page of 50 datasets.", parser=count)] = 1,
    data: DataDir = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List datasets, the newest first."""
    with open_catalogue(data, database) as (catalogue, _):
        listed = catalogue.datasets.page(kind=kind, page=page)
    rows = [_dataset_json(row) for row in listed.rows]
    values = {"datasets": rows, "page": listed.page, "pages": listed.pages, "total": listed.total}
    print_page(values, as_json, "datasets", ("ID", "NAME", "KIND", "ITEMS", "SIZE", "STATE"), _dataset_cells)


@datasets.command("remove", epilog="Example: brim datasets remove cells")
def remove_dataset(
    dataset: Annotated[str, argument("ID|NAME", 'As shown by "brim datasets list".')],
    data: DataDir = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Delete a dataset that no job uses; files that were added in place stay."""
    with open_catalogue(data, database) as (catalogue, folder):
        from brim.jobs.registry.datasets import remove

        row = _find_dataset(catalogue, dataset)
        remove(catalogue, folder, row.id)
    text = f"{row.id}  {row.name}: removed" + ("" if row.owned else f"; its files stay in {row.path}")
    print_result({"id": row.id, "name": row.name, "files_deleted": row.owned}, as_json, text)


def _find_dataset(catalogue: "Catalogue", text: str) -> "DatasetRow":
    """The dataset with that id, otherwise the one with that name."""
    if row := catalogue.datasets.get(text):
        return row
    named = catalogue.datasets.named(text)
    if not named:
        raise NotFound(f"no dataset has the id or name {text}", hint='see them with "{datasets list}"')
    if len(named) > 1:
        ids = ", ".join(row.id for row in named)
        raise Conflict(f"{len(named)} datasets are named {text}; give the id of one: {ids}")
    return named[0]


def _dataset_json(row: "DatasetRow") -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "number"}


def _dataset_line(row: dict[str, Any]) -> str:
    state = "" if row["state"] == "ready" else f", {row['state']}"
    return f"{row['id']}  {row['name']}  {row['kind']}, {row['items']} items, {row['bytes'] / 1e6:.1f} MB{state}"


def _dataset_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return row["id"], row["name"], row["kind"], str(row["items"]), f"{row['bytes'] / 1e6:.1f} MB", row["state"]


# Models


@models.command("add", epilog="Example: brim models add cells weights.safetensors --network hrnet")
def add_model(
    name: Annotated[str, argument("NAME", "Name for requests: letters, digits, . _ -")],
    path: Annotated[
        Path,
        argument(
            "RUN|FILE|RUN_ID",
            'A run of "brim segment train", "brim rf train" or "brim sequence train", a file of weights, a traced '
            "program (.pt2, .pt), or the id of a run of the service.",
        ),
    ],
    network: Annotated[
        str | None,
        option(
            "NAME|FILE.py:FACTORY",
            "Network of a file of weights: its name, or code that makes it; a run names its own.",
        ),
    ] = None,
    data: DataDir = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Check that a model loads, and let requests name it.

    It stays where it is and must stay readable by the service. If the name is taken, the new model replaces the old
    one; requests that are already running finish with the old one.
    """
    with Stop() as stop:
        from brim.jobs.registry.models import add, check_name

        check_name(name)
        with open_catalogue(data, database, make=True) as (catalogue, folder):
            added = _add_run_model(catalogue, folder, name, str(path), network) or add(
                catalogue, name=name, path=path, network=network, stop=stop
            )
    if added is None:
        say("stopped; nothing was added")
        stop.exit()
    row, replaced = added
    text = f"{_model_line(row)}: {'replaced' if replaced else 'added'}; requests may name it now"
    print_result({**_model_json(row), "replaced": replaced}, as_json, text)


def _add_run_model(
    catalogue: "Catalogue", folder: Path, name: str, text: str, network: str | None
) -> tuple["ModelRow", bool] | None:
    """List what a run of this service trained; None if the text is a path, or the id of no run."""
    from brim.jobs.registry.models import check_trained, look, put_run

    run = None if Path(text).exists() else catalogue.runs.find(text)
    if run is None:
        return None
    check_trained(run)
    path = (folder / run.path).resolve()
    return put_run(catalogue, run, name=name, path=path, summary=look(path, network, may_run_code=True))


@models.command("list", epilog="Example: brim models list --json")
def list_models(data: DataDir = None, database: DatabaseUrl = None, as_json: AsJson = False) -> None:
    """List models by name; "GET /api/models" of a running service tells which are loaded."""
    with open_catalogue(data, database) as (catalogue, _):
        rows = catalogue.models.all()
    if as_json:
        print_json({"models": [_model_json(row) for row in rows]})
        return
    if not rows:
        say('no models; add one with "brim models add NAME RUN"')
        return
    head = ("NAME", "KIND", "NETWORK", "PARAMETERS", "PATH")
    print_table(head, [(row.name, row.kind, _network(row), _parameters(row), row.path) for row in rows])


@models.command("remove", epilog="Example: brim models remove cells")
def remove_model(
    name: Annotated[str, argument("NAME", 'As shown by "brim models list".')],
    data: DataDir = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Remove a model from the list; its files stay."""
    with open_catalogue(data, database) as (catalogue, _):
        row = catalogue.models.get(name)
        if row is None or not catalogue.models.remove(name):
            raise NotFound(f"no model has the name {name}", hint='see them with "{models list}"')
    text = f"{row.name}: removed; its files stay in {row.path}"
    print_result({"name": row.name, "path": row.path}, as_json, text)


# Runs


@runs.command("list", epilog="Example: brim runs list --data brim-data")
def list_runs(
    kind: Annotated[str | None, option("KIND", "rf.train, segment.train or sequence.train.", **one_of(*_RUNS))] = None,
    page: Annotated[int, option("N", "Page of 50 runs.", parser=count)] = 1,
    data: DataDir = None,
    database: DatabaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first; their ids are for "brim models add NAME RUN_ID"."""
    with open_catalogue(data, database) as (catalogue, _):
        listed = catalogue.runs.page(kind=kind, page=page)
    rows = [{name: value for name, value in asdict(row).items() if name != "number"} for row in listed.rows]
    values = {"runs": rows, "page": listed.page, "pages": listed.pages, "total": listed.total}
    names = ("id", "name", "kind", "state")
    print_page(values, as_json, "runs", [name.upper() for name in names], lambda row: [row[name] for name in names])


def _model_json(row: "ModelRow") -> dict[str, Any]:
    names = ("name", "kind", "network", "path", "version", "about", "added_at")
    return {name: getattr(row, name) for name in names}


def _model_line(row: "ModelRow") -> str:
    return f"{row.name}  {row.kind}, {_network(row)}, {_parameters(row)} parameters"


def _network(row: "ModelRow") -> str:
    """Its name; for a network of the user's own, the file and its digest."""
    source = row.about.get("source") or {}
    if not source:
        return row.network
    file = f"{source['path']}:{source['factory']}" if "factory" in source else source["path"]
    return f"{file} (sha256 {source['sha256']})"


def _parameters(row: "ModelRow") -> str:
    return f"{row.about.get('parameters', 0) / 1e6:.1f} M"
