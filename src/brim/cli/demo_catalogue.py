"""What `brim demo` made, in the catalogue of a service of its own: its dashboard has something to show."""

from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli.demo import CLASSIFYING, SEGMENTING, Demo
from brim.errors import Conflict

if TYPE_CHECKING:
    from brim.jobs.store import Catalogue, DatasetKind


def list_made(demo: Demo, catalogue: "Catalogue", data: Path) -> None:
    """List datasets, runs, models and batch sizes, each once; all stay where they are."""
    from brim.jobs.registry import models
    from brim.segmentation.tuning.batch_sizes import BatchSizes

    BatchSizes.read(demo.batch_sizes).write(data / "batch_sizes.json")
    radio = _dataset(catalogue, data, "demo radio", demo.out / "dataset", "rf")
    _dataset(catalogue, data, "demo radio, held out", demo.out / "held-out", "rf")
    cells = _dataset(catalogue, data, "demo cells", demo.out / "cells", "images")
    _dataset(catalogue, data, "demo cells, new", demo.out / "new-cells", "images")
    corpus = _dataset(catalogue, data, "demo sequences", demo.out / "corpus", "sequences")
    trained = (
        ("locator", demo.run, "rf.train", radio, demo.locator),
        ("cells", demo.out / "cells-run", "segment.train", cells, SEGMENTING),
        ("classes", demo.out / "sequences-run", "sequence.train", corpus, CLASSIFYING),
    )
    for name, path, kind, dataset, config in trained:
        models.add_run(
            catalogue, name=f"demo {name}", path=path, kind=kind, config={"dataset_ids": [dataset], **config}
        )
        known = catalogue.models.get(name)
        if known is None or known.path != str(path.resolve()):
            models.add(catalogue, name=name, path=path, stop=demo.stop)
        demo.go_on()


def _dataset(catalogue: "Catalogue", data: Path, name: str, path: Path, kind: "DatasetKind") -> str:
    """The id of a dataset where it lies; one that has grown since it was listed is listed anew."""
    from brim.jobs.registry import datasets as sources

    known = next((row for row in catalogue.datasets.named(name) if row.path == str(path.resolve())), None)
    if known is not None:
        try:
            if known.items == sources.look(path, kind).items:
                return known.id
            sources.remove(catalogue, data, known.id)
        except Conflict:  # a job reads it
            return known.id
    added = sources.add(catalogue, data, name=name, path=path, kind=kind)
    assert added is not None, "nothing was to be packed"
    return added.id
