"""Who can reach Ray: the ports its processes listen on here, and whether they answer whoever has no token.

Whoever reaches these ports runs code as the user who started Ray: that is what they are for. So what is asked here is
what such a stranger would find out: which addresses they listen on, and whether a request without a token is taken.
No Ray is needed for any of it.
"""

import ipaddress
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

GCS_PORT: Final = 6379
CLIENT_PORT: Final = 10001
DASHBOARD_PORT: Final = 8265  # jobs are submitted there too
PROBE_S: Final = 3.0  # for an answer
PROC: Final = Path("/proc")
DOCS: Final = "docs/cluster.md"

Reach = Literal["loopback", "private", "public", "every interface"]
Answer = Literal["refuses", "open", "no answer", "unknown"]

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


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A port of Ray on this machine."""

    program: str  # such as "GCS"
    address: str
    port: int

    @property
    def reach(self) -> Reach:
        """Who may connect, as far as the address says."""
        return reach_of(self.address)


def reach_of(address: str) -> Reach:
    """Who may connect to an address that is listened on."""
    found = ipaddress.ip_address(address)
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_unspecified:
        return "every interface"
    if found.is_loopback:
        return "loopback"
    return "private" if found.is_private or found.is_link_local else "public"


def listeners(proc: Path = PROC) -> list[Listener]:
    """The ports that Ray's processes listen on here; none where the system does not tell."""
    sockets = _listening(proc)
    found = {
        Listener(program, *sockets[number])
        for folder in proc.glob("[0-9]*")
        if (program := _program(folder)) is not None
        for number in _sockets_of(folder)
        if number in sockets
    }
    return sorted(found)


def own_addresses(proc: Path = PROC) -> list[str]:
    """Addresses of this machine that others may reach, those of loopback left out."""
    found = {*_ipv4(proc / "net" / "fib_trie"), *_ipv6(proc / "net" / "if_inet6")}
    return sorted(address for address in found if reach_of(address) != "loopback")


def ask_without_token(program: str, host: str, port: int) -> Answer:
    """Whether a port of Ray takes a request that has no token."""
    if program == "dashboard":
        return _ask_http(host, port)
    return _ask_rpc(host, port, _QUESTIONS[program]) if program in _QUESTIONS else "unknown"


def problems(
    found: Iterable[Listener], answers: Mapping[tuple[str, int], tuple[str, Answer]], own: Iterable[str]
) -> list[tuple[str, str]]:
    """What is unsafe, each with the next step.

    found    ports of Ray here
    answers  (host, port) → program and its answer to a request without a token
    own      addresses of this machine
    """
    unsafe = []
    own = list(own)
    for (host, port), (program, answer) in sorted(answers.items()):
        if answer == "open":
            unsafe.append(
                (
                    f"Ray's {program} at {_joined(host, port)} takes requests without a token: whoever reaches it runs "
                    "code on every node",
                    f"stop Ray, set RAY_AUTH_MODE=token and the same token on every node, start it again: see {DOCS}",
                )
            )
    for reach, programs in _by_reach(found).items():
        named = ", ".join(f"{one.program} {one.port}" for one in programs)
        if reach == "public":
            where = ", ".join(sorted({one.address for one in programs}))
            unsafe.append((f"Ray listens on the public address {where}: {named}", f"{_PRIVATE}: see {DOCS}"))
        elif reach == "every interface" and any(one.program == "dashboard" for one in programs):
            unsafe.append(
                ("Ray's dashboard, which starts jobs for whoever asks, listens on every interface", _DASHBOARD)
            )
        if reach == "every interface":
            public = [address for address in own if reach_of(address) == "public"]
            names = ", ".join(public or own) or "unknown"
            which = f"the public {names} among them" if public else f"here {names}"
            unsafe.append((f"Ray listens on every interface, {which}: {named}", f"{_FIREWALL}: see {DOCS}"))
    return unsafe


_PRIVATE: Final = "start Ray with --node-ip-address of a private interface, behind a firewall"
_FIREWALL: Final = (
    "Ray has no setting that keeps all its ports to one interface: let a firewall admit the cluster's subnet alone"
)
_DASHBOARD: Final = 'start Ray with --dashboard-host 127.0.0.1 and reach it by "ssh -L 8265:127.0.0.1:8265 HEAD"'


def _by_reach(found: Iterable[Listener]) -> dict[Reach, list[Listener]]:
    groups: dict[Reach, list[Listener]] = {}
    for one in sorted(set(found)):
        groups.setdefault(one.reach, []).append(one)
    return groups


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Asking


def _ask_rpc(host: str, port: int, question: str) -> Answer:
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
            return "no answer" if code in away else "open"  # it looked at the question before it asked who we are
    return "open"


def _ask_http(host: str, port: int) -> Answer:
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
    """Numbers of the sockets that a process has; none of another user's."""
    found = set()
    try:
        for file in (folder / "fd").iterdir():
            try:
                target = str(file.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return set()
    return found


def _listening(proc: Path) -> dict[str, tuple[str, int]]:
    """Number of each socket that listens → its address and port."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in (line.split() for line in lines):
            if words[3] == _LISTENING:
                address, _, port = words[1].partition(":")
                found[words[9]] = (_address(address), int(port, 16))
    return found


def _address(text: str) -> str:
    """Of /proc/net/tcp: words of four bytes, each the wrong way round."""
    words = bytes.fromhex(text)
    ordered = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    found = ipaddress.ip_address(ordered)
    return str(getattr(found, "ipv4_mapped", None) or found)


def _ipv4(file: Path) -> set[str]:
    """Addresses that a routing table calls local: each stands in the line before that word."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}  # type: ignore[misc]
    return {before.split()[-1] for before, line in pairwise(lines) if "/32 host LOCAL" in line}


def _ipv6(file: Path) -> set[str]:
    try:
        lines = file.read_text().split("\n")
    except OSError:
        return set()
    found = (ipaddress.ip_address(bytes.fromhex(line.split()[0])) for line in lines if line.strip())
    return {str(address) for address in found if not address.is_link_local}
