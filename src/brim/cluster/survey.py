"""What `brim doctor --cluster` says of a cluster: its nodes, and whether strangers could use it."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brim.cluster import ports
from brim.cluster.ports import Answer, Listener
from brim.cluster.ray_connect import check_address, connect
from brim.errors import BrimError

ASKED = ("GCS", "client server", "dashboard")  # what starts code for whoever it takes requests from


def survey(address: str) -> dict[str, Any]:
    """Facts of the cluster as JSON-able values; problems are pairs of what is wrong and the next step.

    An address that is none is a ConfigError; a cluster that is away or cannot be used is a problem among the others.
    """
    check_address(address)
    found = ports.listeners()
    answers = {
        (host, port): (program, ports.ask_without_token(program, host, port))
        for (host, port), program in _doors(address, found).items()
    }
    problems = ports.problems(found, answers, ports.own_addresses())
    nodes: list[dict[str, Any]] = []
    if "refuses" in {answer for _, answer in answers.values()} and not _has_token():
        problems.append(
            (
                "the cluster asks for a token, and there is none here",
                "set RAY_AUTH_MODE=token and copy the head node's token to ~/.ray/auth_token, for you alone to read",
            )
        )
    else:
        try:
            with connect(address) as cluster:
                nodes = [asdict(node) for node in cluster.nodes]
        except BrimError as failure:
            text, _, step = str(failure).rpartition("; ")
            problems.append((text, step) if text else (step, f"see {ports.DOCS}"))
    return {
        "address": address,
        "nodes": nodes,
        "ports": [{**asdict(one), "reach": one.reach} for one in found],
        "without_token": [_answer(place, said) for place, said in sorted(answers.items())],
        "problems": [{"problem": problem, "fix": fix} for problem, fix in problems],
    }


def _doors(address: str, found: list[Listener]) -> dict[tuple[str, int], str]:
    """Where to ask: the ports found here, and those that a cluster elsewhere has unless told otherwise."""
    doors = {
        (_reachable(one), one.port): one.program
        for one in found
        if one.program in ASKED and (one.program != "client server" or one.reach != "loopback")
    }
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    is_client = named.startswith("ray://")
    host, colon, port = named.removeprefix("ray://").rstrip("/").rpartition(":")
    if colon and port.isdigit():
        usual = {(host, ports.GCS_PORT): "GCS", (host, ports.DASHBOARD_PORT): "dashboard"}
        own = {(host, int(port)): "client server" if is_client else "GCS"}
        doors |= {(place[0].strip("[]"), place[1]): program for place, program in {**usual, **own}.items()}
    return doors


def _reachable(one: Listener) -> str:
    """An address to connect to what listens on any."""
    return "127.0.0.1" if one.reach == "every interface" else one.address


def _answer(place: tuple[str, int], said: tuple[str, Answer]) -> dict[str, Any]:
    return {"host": place[0], "port": place[1], "program": said[0], "answer": said[1]}


def _has_token() -> bool:
    """Whether this process would send one; never what it is."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return False
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or file.is_file()
