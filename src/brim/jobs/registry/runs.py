"""Training runs that no job made: one that the command line left in a directory, listed beside those of the jobs."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import CheckpointError
from brim.jobs.kinds.registry import KINDS
from brim.jobs.registry.outputs import made_run

if TYPE_CHECKING:
    from brim.jobs.store import Catalogue, RunRow


def add(catalogue: "Catalogue", *, name: str, path: Path, kind: str, config: Mapping[str, Any]) -> "RunRow":
    """List the run in a directory, which stays where it is; one that is listed already is returned as it is.

    kind    of the job that would have made it, such as rf.train
    config  of that job; what is left out is its default
    """
    path = path.resolve()
    found = made_run(path)
    if not found.items:
        raise CheckpointError(f"{path} holds no checkpoint; give the directory of a run that has been trained")
    resolved = KINDS[kind].resolve(dict(config))
    return catalogue.runs.add(name=name, kind=kind, path=str(path), config=resolved, summary=found.about)
