"""Connecting to a Ray cluster: success or an error within seconds, and nodes with the same versions.

Everything that can be wrong is reported here, before anything is written: an address without an answer, a missing or
wrong token, nodes without brim or with other versions of the packages that decide the bytes.
"""

import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from brim.engine.device import worker_count
from brim.errors import ClusterError, ConfigError

ANSWER_S = 5.0  # for an address to accept a connection
PROBE_S = 60.0  # for a node to say what is installed: it may have to start its first process
GONE_S = 15.0  # for Ray to notice that a node which does not answer is gone
OBJECT_STORE_BYTES = 256 * 2**20  # of the cluster that "local" starts: tasks and rows in flight, not datasets
CLIENT_PORT = 10001  # Ray's own default
COMPARED = ("python", "brim", "torch", "ray")  # these decide the bytes, or whether nodes understand each other
_CLIENT = re.compile(r"ray://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+)(?::([0-9]{1,5}))?/?")
_log = logging.getLogger("brim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster as it describes itself."""

    id: str  # Ray's
    host: str
    cpus: float
    gpus: float
    free_bytes: int  # of the host's memory, when asked
    versions: dict[str, str | None]  # None: not installed


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """A connection to Ray: where, and which nodes are there now."""

    address: str
    nodes: tuple[Node, ...]


@contextmanager
def connect(address: str) -> Iterator[RayCluster]:
    """Ray at "auto" (the cluster of this machine or of RAY_ADDRESS), "local" (one of our own) or "ray://HOST:PORT".

    A connection that this process has already is used and left as it is.
    """
    check_address(address)
    ray = import_ray()
    if ray.is_initialized():
        yield RayCluster(address=address, nodes=look_at_nodes(address))
        return
    try:
        with _quiet():
            _open(ray, address)
        yield RayCluster(address=address, nodes=look_at_nodes(address))
    finally:
        with _quiet():
            ray.shutdown()


def check_address(address: str) -> None:
    if address in ("auto", "local"):
        return
    match = _CLIENT.fullmatch(address)
    if match is None or not 0 < int(match[2] or CLIENT_PORT) < 65_536:
        raise ConfigError(
            "is not an address",
            field="cluster",
            value=address,
            code="unknown_choice",
            hint="use auto, local or ray://HOST:PORT",
        )


def import_ray() -> ModuleType:
    """Ray, with its usage statistics off; an error with the next step if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S", "3")  # three tries, instead of half a minute
    os.environ.setdefault("RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S", "3")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a worker without GPUs keeps the variables it has
    try:
        import ray
    except ModuleNotFoundError as failure:
        raise ConfigError(
            "a cluster needs the package ray",
            field="cluster",
            code="missing_package",
            hint='pip install "brim[cluster]"',
        ) from failure
    return ray  # type: ignore[no-any-return]


# Opening


def _open(ray: ModuleType, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address == "local":
        own = {"num_cpus": worker_count(), "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        try:
            ray.init("local", **own, **quiet)
        except (RuntimeError, OSError, ray.exceptions.RayError) as failure:
            raise ClusterError(f"Ray does not start on this machine: {first_line(failure)}") from failure
        return
    where = _find(address)
    _check_answers(address, where)
    try:
        try:
            ray.init(where, **quiet)
        except ConnectionAbortedError as failure:  # the head did not get our process there ready in time: it is busy
            _log.warning("%s could not serve this connection: %s; trying once more", where, last_line(failure))
            ray.init(where, **quiet)
    except ray.exceptions.AuthenticationError as failure:
        raise ClusterError(
            f"{where} rejects the connection: its token is missing here or differs",
            code="unauthorized",
            hint="copy it from the head node to ~/.ray/auth_token, or set RAY_AUTH_TOKEN_PATH to its file, and set "
            "RAY_AUTH_MODE=token",
        ) from failure
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as failure:
        is_told_last = isinstance(failure, ConnectionAbortedError)  # behind a traceback of the head's
        reason = last_line(failure) if is_told_last else first_line(failure)
        raise ClusterError(f"{where} is not a usable Ray cluster: {reason}") from failure


def _find(address: str) -> str:
    """The address to connect to; "auto" finds the cluster of RAY_ADDRESS or the one that runs here."""
    if address != "auto":
        return address if address.count(":") > 1 else f"{address.rstrip('/')}:{CLIENT_PORT}"
    from ray._private.services import canonicalize_bootstrap_address

    named = os.environ.get("RAY_ADDRESS", "")
    if named.startswith("ray://"):
        check_address(named)
        return named
    try:
        bootstrap = canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError):
        bootstrap = None
    if bootstrap is None:
        raise ClusterError(
            f'no Ray cluster runs on this machine and RAY_ADDRESS="{named}" names none',
            field="cluster",
            code="not_found",
            hint="start one with ray start --head, or set {cluster} to local",
        )
    return str(bootstrap)


def _check_answers(address: str, where: str) -> None:
    host, _, port = where.removeprefix("ray://").rstrip("/").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S):
            pass
    except OSError as failure:
        named = f' (cluster="{address}")' if where != address else ""
        raise ClusterError(
            f"nobody answers at {where}{named}: {failure.strerror or failure}",
            code="unreachable",
            hint="check the address, and that the head node runs: ray status",
        ) from failure


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray starts or ends: without its log lines, since its errors are raised, and without its taking SIGTERM."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def first_line(failure: BaseException) -> str:
    """The first line of an exception's message; Ray's are long."""
    return str(failure).strip().split("\n")[0] or type(failure).__name__


def last_line(failure: BaseException) -> str:
    return str(failure).strip().split("\n")[-1] or type(failure).__name__


# Nodes


def look_at_nodes(address: str) -> tuple[Node, ...]:
    """Ask every node for its resources and versions; nodes that differ from this process are rejected."""
    ray = import_ray()
    alive = _alive(ray)
    if not alive:
        raise ClusterError(
            "has no nodes", field="cluster", value=address, code="empty", hint="start one with ray start --head"
        )
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(_make_probe())
    replies = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)).remote() for name in alive
    ]
    read = (_read_reply(ray, node, reply) for node, reply in zip(alive.values(), replies, strict=True))
    nodes = tuple(node for node in read if node is not None)
    check_versions(nodes)
    return nodes


def _alive(ray: ModuleType) -> dict[str, dict[str, Any]]:
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _read_reply(ray: ModuleType, node: dict[str, Any], reply: Any) -> Node | None:
    """A node's reply; None if the node is gone, which Ray notices after some seconds."""
    host, amounts = str(node["NodeManagerAddress"]), node["Resources"]
    try:
        answer = ray.get(reply, timeout=PROBE_S)
    except ray.exceptions.RayError as failure:
        deadline_s = time.monotonic() + GONE_S
        while time.monotonic() < deadline_s:
            if node["NodeID"] not in _alive(ray):
                return None
            time.sleep(0.2)
        raise ClusterError(
            f"node {host} does not answer: {first_line(failure)}", code="unreachable", hint="check it with ray status"
        ) from failure
    return Node(
        id=node["NodeID"],
        host=host,
        cpus=float(amounts.get("CPU", 0)),
        gpus=float(amounts.get("GPU", 0)),
        free_bytes=int(answer["free_bytes"]),
        versions=answer["versions"],
    )


def check_versions(nodes: Iterable[Node]) -> None:
    """Reject nodes whose python, brim, torch or ray differs from this process."""
    here = _make_probe()()["versions"]
    for node in nodes:
        for name in COMPARED:
            installed = node.versions.get(name)
            if installed != here[name]:
                has = f"{name} {installed}" if installed is not None else f"no {name}"
                raise ClusterError(
                    f"node {node.host} has {has}, this process has {here[name]}",
                    code="other_version",
                    hint="install the same version on every node",
                )


def _make_probe() -> Any:
    """A function that needs nothing of brim where it runs: inner functions travel by value."""

    def probe() -> dict[str, Any]:
        import platform
        from contextlib import suppress
        from importlib.metadata import PackageNotFoundError, version
        from pathlib import Path

        versions: dict[str, str | None] = {
            "python": platform.python_version(),
            "torch": None,
            "ray": None,
            "brim": None,
        }
        for package in ("torch", "ray"):
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        with suppress(ImportError):
            import brim

            versions["brim"] = brim.__version__
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        return {"versions": versions, "free_bytes": free}

    return probe
