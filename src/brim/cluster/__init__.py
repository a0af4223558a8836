"""Workers on several devices: processes of this machine, or actors of a Ray cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.cluster.exposure import survey as survey
    from brim.cluster.predict import predict_many as predict_many
    from brim.rf.generation import Pool as Pool

__getattr__, __all__ = lazy(__name__, __file__)


@contextmanager
def open_pool(*, devices: str | int | None = None, cluster: str | None = None) -> "Iterator[Pool]":
    """One worker for each of these devices of this machine, or for each GPU of the cluster at an address."""
    if cluster is None:
        from brim.cluster.processes import ProcessPool, device_names

        yield ProcessPool(device_names("all" if devices is None else devices))
        return
    from brim.cluster.ray_connect import connect
    from brim.cluster.ray_pool import RayPool

    with connect(cluster) as connected:
        yield RayPool(connected)
