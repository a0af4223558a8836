"""brim doctor --cluster against a real Ray head: what a stranger could do with it, and what its nodes are."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from brim.cli import main
from brim.cluster import exposure as ports
from brim.cluster.exposure import Listener
from ray_head import TOKEN, Head, environment, free_port, ray_head
from waiting import PATIENCE_S

pytest.importorskip("ray")


def of_head(head: Head, **env: str) -> dict[str, Any]:
    """By the GCS: two clusters on one machine, as tests may have, share the ports of their client servers."""
    return doctor("auto", RAY_ADDRESS=f"127.0.0.1:{head.gcs}", **env)


def doctor(address: str, **env: str) -> dict[str, Any]:
    """What it says in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "brim", "doctor", "--cluster", address, "--json"],
        env=environment(**env), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def of_port(facts: dict[str, Any], port: int) -> list[str]:
    """Problems that name a port, each with its fix."""
    return [f"{one['problem']}; {one['fix']}" for one in facts["problems"] if str(port) in one["problem"]]


def answers(facts: dict[str, Any]) -> dict[int, str]:
    return {one["port"]: one["answer"] for one in facts["cluster"]["without_token"]}


def test_a_head_with_a_token_refuses_strangers_and_shows_its_nodes_to_those_who_have_it():
    with ray_head(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as head:
        facts = of_head(head, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
        refused = of_head(head, RAY_AUTH_MODE="disabled")

    assert answers(facts)[head.gcs] == answers(facts)[head.client] == "refuses"
    assert len(facts["cluster"]["nodes"]) == 1
    assert not any("without a token" in text for text in of_port(facts, head.gcs))
    assert TOKEN not in json.dumps(facts)
    assert refused["cluster"]["nodes"] == []
    assert any("auth_token" in one["fix"] for one in refused["problems"])


def test_an_address_nobody_answers_is_a_problem_with_a_next_step():
    facts = doctor(f"ray://127.0.0.1:{free_port()}")

    assert any("nobody answers" in one["problem"] and "check the address" in one["fix"] for one in facts["problems"])


def test_what_is_no_address_is_refused(capsys):
    assert main(["doctor", "--cluster", "http://somewhere"]) == 2
    assert 'cluster="http://somewhere" is not an address' in capsys.readouterr().err


# Judging


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("0.0.0.0", "every interface"), ("::", "every interface"), ("127.0.0.1", "loopback"), ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"), ("10.1.2.3", "private"), ("192.168.0.9", "private"), ("fd00::2", "private"),
        ("8.8.8.8", "public"), ("2600::1", "public"),
    ],
)  # fmt: skip
def test_who_may_connect_to_an_address(address, reach):
    assert ports.reach_of(address) == reach


def test_a_dashboard_on_every_interface_is_a_danger_of_its_own():
    found = [Listener("dashboard", "0.0.0.0", 8265)]

    (first, fix), (second, _) = ports.problems_of(found, {}, ["10.0.0.1"])
    assert "dashboard" in first
    assert "--dashboard-host 127.0.0.1" in fix
    assert "here 10.0.0.1" in second


def test_a_public_address_behind_the_wildcard_is_named():
    ((problem, _),) = ports.problems_of([Listener("GCS", "::", 6379)], {}, ["10.0.0.1", "8.8.8.8"])

    assert "the public 8.8.8.8 among them" in problem


def test_private_ports_that_ask_for_a_token_are_no_problem():
    found = [Listener("GCS", "10.0.0.1", 6379), Listener("dashboard", "127.0.0.1", 8265)]
    told = {("10.0.0.1", 6379): ("GCS", "refuses"), ("10.0.0.1", 8265): ("dashboard", "no answer")}

    assert ports.problems_of(found, told, ["10.0.0.1"]) == []  # type: ignore[arg-type]


def test_a_dashboard_that_answers_without_a_token_is_found_out():
    import http.server
    import threading

    class Page(http.server.BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        assert ports.ask_without_token("dashboard", "127.0.0.1", port) == "open"
        Page.status = 401
        assert ports.ask_without_token("dashboard", "127.0.0.1", port) == "refuses"
        server.shutdown()
    assert ports.ask_without_token("dashboard", "127.0.0.1", port) == "no answer"


def test_the_sockets_of_a_process_are_found_by_what_it_is(tmp_path):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()", "gcs/gcs_server"],
            stdin=subprocess.PIPE, pass_fds=[listening.fileno()], env=os.environ | {"BRIM_TEST_EXEC": "1"},
        )  # fmt: skip
        try:
            assert Listener("GCS", "127.0.0.1", port) in ports.listeners()
        finally:
            process.communicate()
