"""Deployment files as far as a machine without a container engine can check them: nothing is built or run."""

import configparser
import json
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Instructions in order, continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for line in joined.splitlines() if line.strip() for word, _, rest in [line.partition(" ")]]


# Container


def test_the_image_runs_the_service_as_a_user_without_privileges(dockerfile):
    after_last_from = dockerfile[max(index for index, (word, _) in enumerate(dockerfile) if word == "FROM") :]
    words = dict(after_last_from)

    assert words["USER"] not in ("root", "0")
    assert json.loads(words["ENTRYPOINT"]) == ["brim"]
    assert json.loads(words["CMD"])[0] == "serve"
    assert "/health" in words["HEALTHCHECK"]
    assert words["VOLUME"] == "/data"


# Compose


def test_compose_shows_the_port_to_this_machine_only_and_drops_privileges(compose):
    brim = compose["services"]["brim"]

    assert brim["ports"] == ["127.0.0.1:8000:8000"]
    assert brim["cap_drop"] == ["ALL"]
    assert brim["user"].split(":")[0] != "0"
    assert "privileged" not in brim


def test_a_stop_is_given_longer_than_a_drain_takes(compose):
    from brim.service.run.supervisor import API_STOP_S, DRAIN_S

    assert int(compose["services"]["brim"]["stop_grace_period"].removesuffix("s")) > DRAIN_S + API_STOP_S


def test_the_commands_of_image_compose_and_systemd_have_options_that_exist(compose, dockerfile, unit):
    command = [sys.executable, "-m", "brim", "serve", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    commands = [compose["services"]["brim"]["command"], json.loads(dict(dockerfile)["CMD"])]
    commands.append(unit["Service"]["ExecStart"].split()[1:])

    for words in commands:
        assert words[0] == "serve"
        assert all(word in known for word in words if word.startswith("--"))


# systemd


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read(ROOT / "deploy" / "brim.service")
    return found


def test_the_unit_drains_restarts_and_has_no_privileges(unit):
    service = unit["Service"]

    assert service["User"] == "brim"
    assert service["KillMode"] == "mixed"  # SIGTERM to the supervisor alone
    assert service["Restart"] == "always"
    assert service["NoNewPrivileges"] == "yes"
    assert service["StandardOutput"] == "null"  # the address with the token is not for the journal
