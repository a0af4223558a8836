"""Survey of a cluster: its nodes, and whether strangers could use it.

Anyone who reaches Ray's ports runs code as the user who started Ray. So the survey looks at what a stranger would find:
the addresses Ray listens on, and whether a request without a token is accepted. That part needs no Ray.
"""

import ipaddress
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

from brim.cluster.ray_connect import check_address, connect
from brim.errors import BrimError

GCS_PORT: Final = 6379
DASHBOARD_PORT: Final = 8265  # jobs are submitted there too
PROBE_S: Final = 3.0  # for an answer
PROC: Final = Path("/proc")
DOCS: Final = "docs/cluster.md"

Reach = Literal["loopback", "private", "public", "every interface"]
TokenAnswer = Literal["refuses", "open", "no answer", "unknown"]

# Parts of a command line → what the process is; the first that fits
_PROGRAMS: Final = (
    ("gcs/gcs_server", "GCS"),
    ("raylet/raylet", "raylet"),
    ("ray.util.client.server", "client server"),
    ("dashboard/dashboard.py", "dashboard"),
    ("ray::DashboardAgent", "dashboard agent"),
    ("dashboard/agent.py", "dashboard agent"),
    ("ray::RuntimeEnvAgent", "runtime environment agent"),
    ("runtime_env/agent/main.py", "runtime environment agent"),
    ("autoscaler/_private/monitor.py", "autoscaler's metrics"),
)
_LISTENING: Final = "0A"  # of /proc/net/tcp
# A request of each that needs no argument, and that every version has
_QUESTIONS: Final = {
    "GCS": "/ray.rpc.NodeInfoGcsService/GetClusterId",
    "client server": "/ray.rpc.RayletDriver/ClusterInfo",
}


ASKED: Final = ("GCS", "client server", "dashboard")  # ports that start code for everyone they accept requests from


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A port of Ray on this machine."""

    program: str  # such as "GCS"
    address: str
    port: int

    @property
    def reach(self) -> Reach:
        return reach_of(self.address)


def survey(address: str) -> dict[str, Any]:
    """Facts about the cluster as JSON-able values; problems are pairs of what is wrong and the next step.

    An invalid address raises ConfigError; a cluster that cannot be reached or used is one of the problems.
    """
    check_address(address)
    ports = listeners()
    answers = {
        (host, port): (program, ask_without_token(program, host, port))
        for (host, port), program in _doors(address, ports).items()
    }
    problems = problems_of(ports, answers, own_addresses())
    nodes: list[dict[str, Any]] = []
    if "refuses" in {answer for _, answer in answers.values()} and not _has_token():
        problem = "the cluster asks for a token, and there is none here"
        fix = "set RAY_AUTH_MODE=token and copy the head node's token to ~/.ray/auth_token, for you alone to read"
        problems.append((problem, fix))
    else:
        try:
            with connect(address) as cluster:
                nodes = [asdict(node) for node in cluster.nodes]
        except BrimError as failure:
            whole, failure.hint = str(failure), ""
            problem = str(failure)
            problems.append((problem, whole.removeprefix(f"{problem}; ") if whole != problem else f"see {DOCS}"))
    return {
        "address": address,
        "nodes": nodes,
        "ports": [{**asdict(one), "reach": one.reach} for one in ports],
        "without_token": [
            {"host": host, "port": port, "program": program, "answer": answer}
            for (host, port), (program, answer) in sorted(answers.items())
        ],
        "problems": [{"problem": problem, "fix": fix} for problem, fix in problems],
    }


def _doors(address: str, ports: list[Listener]) -> dict[tuple[str, int], str]:
    """Ports to ask: those of this machine, and the default ones of a cluster elsewhere."""
    doors = {
        ("127.0.0.1" if one.reach == "every interface" else one.address, one.port): one.program
        for one in ports
        if one.program in ASKED and (one.program != "client server" or one.reach != "loopback")
    }
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, colon, port = named.removeprefix("ray://").rstrip("/").rpartition(":")
    host = host.strip("[]")
    if colon and port.isdigit():
        doors |= {(host, GCS_PORT): "GCS", (host, DASHBOARD_PORT): "dashboard"}
        doors[host, int(port)] = "client server" if named.startswith("ray://") else "GCS"
    return doors


def _has_token() -> bool:
    """Whether this process would send a token."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return False
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or file.is_file()


def reach_of(address: str) -> Reach:
    parsed = ipaddress.ip_address(address)
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    if parsed.is_unspecified:
        return "every interface"
    if parsed.is_loopback:
        return "loopback"
    return "private" if parsed.is_private or parsed.is_link_local else "public"


def listeners(proc: Path = PROC) -> list[Listener]:
    """The ports that Ray's processes listen on here; empty if the system does not say."""
    sockets = _listening(proc)
    ports = {
        Listener(program, *sockets[number])
        for folder in proc.glob("[0-9]*")
        if (program := _program(folder)) is not None
        for number in _sockets_of(folder)
        if number in sockets
    }
    return sorted(ports)


def own_addresses(proc: Path = PROC) -> list[str]:
    """Addresses of this machine without loopback and link-local ones, as the routing table and if_inet6 list them."""
    routes, interfaces = (_lines(proc / "net" / name) for name in ("fib_trie", "if_inet6"))
    addresses = {before.split()[-1] for before, line in pairwise(routes) if "/32 host LOCAL" in line}
    v6 = (ipaddress.ip_address(bytes.fromhex(line.split()[0])) for line in interfaces)
    addresses |= {str(address) for address in v6 if not address.is_link_local}
    return sorted(address for address in addresses if reach_of(address) != "loopback")


def ask_without_token(program: str, host: str, port: int) -> TokenAnswer:
    if program == "dashboard":
        return _ask_http(host, port)
    return _ask_rpc(host, port, _QUESTIONS[program]) if program in _QUESTIONS else "unknown"


def problems_of(
    ports: Iterable[Listener], answers: Mapping[tuple[str, int], tuple[str, TokenAnswer]], own: Sequence[str]
) -> list[tuple[str, str]]:
    """Security problems, each with the next step.

    ports    of Ray here
    answers  (host, port) → program and its answer to a request without a token
    own      addresses of this machine
    """
    unsafe = [
        (
            f"Ray's {program} at {_joined(host, port)} accepts requests without a token: anyone who reaches it "
            "can run code on every node",
            f"stop Ray, set RAY_AUTH_MODE=token and the same token on every node, start it again: see {DOCS}",
        )
        for (host, port), (program, answer) in sorted(answers.items())
        if answer == "open"
    ]
    groups: dict[Reach, list[Listener]] = {}
    for one in sorted(set(ports)):
        groups.setdefault(one.reach, []).append(one)
    for reach, group in groups.items():
        named = ", ".join(f"{one.program} {one.port}" for one in group)
        if reach == "public":
            where = ", ".join(sorted({one.address for one in group}))
            unsafe.append((f"Ray listens on the public address {where}: {named}", f"{_PRIVATE}: see {DOCS}"))
        elif reach == "every interface":
            if any(one.program == "dashboard" for one in group):
                unsafe.append(("Ray's dashboard, which starts jobs for anyone, listens on every interface", _DASHBOARD))
            public = [address for address in own if reach_of(address) == "public"]
            names = ", ".join(public or own) or "unknown"
            which = f"the public {names} among them" if public else f"here {names}"
            unsafe.append((f"Ray listens on every interface, {which}: {named}", f"{_FIREWALL}: see {DOCS}"))
    return unsafe


_PRIVATE: Final = "start Ray with --node-ip-address of a private interface, behind a firewall"
_FIREWALL: Final = (
    "Ray has no setting that keeps all its ports to one interface: let a firewall admit only the cluster's subnet"
)
_DASHBOARD: Final = 'start Ray with --dashboard-host 127.0.0.1 and reach it by "ssh -L 8265:127.0.0.1:8265 HEAD"'


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Asking


def _ask_rpc(host: str, port: int, question: str) -> TokenAnswer:
    try:
        import grpc  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return "unknown"
    with grpc.insecure_channel(_joined(host, port)) as channel:
        ask: Any = channel.unary_unary(question)
        try:
            ask(b"", timeout=PROBE_S)
        except grpc.RpcError as failure:
            code = failure.code()
            if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                return "refuses"
            away = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return "no answer" if code in away else "open"  # the request was handled before authentication
    return "open"


def _ask_http(host: str, port: int) -> TokenAnswer:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{_joined(host, port)}/api/version", timeout=PROBE_S):
            return "open"
    except urllib.error.HTTPError as failure:
        return "refuses" if failure.code in (401, 403) else "open"
    except (OSError, ValueError):
        return "no answer"


# Reading the system


def _program(folder: Path) -> str | None:
    try:
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return next((name for part, name in _PROGRAMS if part in command), None)


def _sockets_of(folder: Path) -> set[str]:
    """Inode numbers of a process's sockets; empty for another user's process."""
    numbers = set()
    with suppress(OSError):
        for file in (folder / "fd").iterdir():
            with suppress(OSError):
                target = str(file.readlink())
                if target.startswith("socket:["):
                    numbers.add(target[8:-1])
    return numbers


def _listening(proc: Path) -> dict[str, tuple[str, int]]:
    """Inode number of each listening socket → its address and port."""
    sockets = {}
    for words in (line.split() for name in ("tcp", "tcp6") for line in _lines(proc / "net" / name)[1:]):
        if words[3] == _LISTENING:
            address, _, port = words[1].partition(":")
            sockets[words[9]] = (_address(address), int(port, 16))
    return sockets


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _address(text: str) -> str:
    """An address of /proc/net/tcp: words of four bytes, each in reverse order."""
    words = bytes.fromhex(text)
    ordered = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    parsed = ipaddress.ip_address(ordered)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
