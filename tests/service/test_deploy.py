"""Deployment files as far as a machine without a container engine can check them: nothing is built or run."""

import configparser
import json
import shutil
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


def options_of_serve() -> str:
    done = subprocess.run([sys.executable, "-m", "brim", "serve", "--help"], capture_output=True, text=True, check=True)
    return done.stdout


# Container


def test_the_image_runs_the_service_as_a_user_without_privileges(dockerfile):
    after_last_from = dockerfile[max(index for index, (word, _) in enumerate(dockerfile) if word == "FROM") :]
    words = dict(after_last_from)

    assert words["USER"] not in ("root", "0")
    assert json.loads(words["ENTRYPOINT"]) == ["brim"]
    assert json.loads(words["CMD"])[0] == "serve"
    assert "/health" in words["HEALTHCHECK"]
    assert words["VOLUME"] == "/data"


def test_what_the_image_copies_is_there_and_not_ignored(dockerfile):
    kept = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    copied = [
        word for name, rest in dockerfile if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    ]

    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert name in kept


def test_the_build_takes_the_service_extra(dockerfile):
    runs = " ".join(rest for word, rest in dockerfile if word == "RUN")

    assert "[service]" in runs


# Compose


def test_compose_has_service_and_postgres_volumes_and_health_checks(compose):
    services = compose["services"]

    assert set(services) == {"brim", "postgres"}
    assert services["postgres"]["image"].startswith("postgres:")
    assert all("healthcheck" in service for service in services.values())
    named = {volume.partition(":")[0] for service in services.values() for volume in service["volumes"]}
    assert named == set(compose["volumes"])
    assert services["brim"]["depends_on"]["postgres"]["condition"] == "service_healthy"


def test_compose_reserves_one_gpu(compose):
    devices = compose["services"]["brim"]["deploy"]["resources"]["reservations"]["devices"]

    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_compose_shows_the_port_to_this_machine_only_and_drops_privileges(compose):
    brim = compose["services"]["brim"]

    assert brim["ports"] == ["127.0.0.1:8000:8000"]
    assert brim["cap_drop"] == ["ALL"]
    assert brim["user"].split(":")[0] != "0"
    assert "privileged" not in brim


def test_compose_holds_no_secret(compose):
    values = [value for service in compose["services"].values() for value in service["environment"].values()]

    assert [value for value in values if "PASSWORD" in value or "TOKEN" in value]
    assert all("${" in value for value in values if "PASSWORD" in value or "TOKEN" in value)


def test_the_commands_of_image_and_compose_have_options_that_exist(compose, dockerfile):
    known = options_of_serve()
    commands = [compose["services"]["brim"]["command"], json.loads(dict(dockerfile)["CMD"])]

    for command in commands:
        assert command[0] == "serve"
        assert all(word in known for word in command if word.startswith("--"))


def test_a_stop_is_given_longer_than_a_drain_takes(compose):
    from brim.service.run.supervisor import API_STOP_S, DRAIN_S

    assert int(compose["services"]["brim"]["stop_grace_period"].removesuffix("s")) > DRAIN_S + API_STOP_S


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
    assert all(word in options_of_serve() for word in service["ExecStart"].split() if word.startswith("--"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    text = (ROOT / "deploy" / "brim.service").read_text().replace("/opt/brim/bin/brim", "/bin/true")
    (tmp_path / "brim.service").write_text(text)

    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "brim.service"], capture_output=True, text=True)

    assert "Unknown" not in done.stderr
    assert done.returncode == 0, done.stderr
