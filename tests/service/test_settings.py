"""What a service is started with, and the token that opens it."""

import re
import stat
from pathlib import Path
from typing import Any

import pytest

from brim.errors import ConfigError, StorageError
from brim.jobs import decoding
from brim.jobs.store import upgrade
from brim.jobs.worker import reconcile
from brim.service import token
from brim.service.prediction.process import decoders
from brim.service.reader import main as reader
from brim.service.reader.client import CALL_S
from brim.service.settings import MIB, Settings, data_folder, from_options, open_to_others, role_patterns

PASSWORD = "hunter2"
POSTGRES = f"postgresql://u:{PASSWORD}@h:5432/n"


def test_settings_travel_as_json_and_show_no_secret():
    options = {"host": "0.0.0.0", "port": 0, "database": POSTGRES, "workers": 3, "allow_hosts": ("brim.example",)}
    environ = {
        "BRIM_HANG_S": "5",
        "BRIM_MIN_FREE_BYTES": "7",
        "BRIM_LOG_LEVEL": "debug",
        "BRIM_OIDC_CLIENT_SECRET": "x",
    }
    made = from_options(data=Path("/srv/brim"), token="s3cret", environ=environ, **options)

    assert Settings.from_json(made.to_json()) == made
    assert (made.hang_s, made.min_free_bytes, made.log_level) == (5.0, 7, "DEBUG")
    assert made.jobs_url == made.catalogue_url == POSTGRES
    assert PASSWORD not in repr(made)
    assert "s3cret" not in repr(made)


def test_an_option_wins_over_the_environment_and_that_over_the_default():
    def chosen(**options: Any) -> tuple[str | None, str | None]:
        made = from_options(data=Path("/srv"), environ=environ, **options)
        return made.database, made.cluster

    environ = {"BRIM_DATABASE": POSTGRES, "BRIM_CLUSTER": "auto"}
    assert chosen() == (POSTGRES, "auto")
    assert chosen(database="sqlite:////x", cluster="ray://head") == ("sqlite:////x", "ray://head")
    environ = {"BRIM_DATABASE": "", "BRIM_CLUSTER": ""}
    assert chosen() == (None, None)


def test_without_a_database_two_files_of_the_data_directory_are_used():
    made = from_options(data=Path("/srv/brim"), environ={})

    assert made.jobs_url == "sqlite:////srv/brim/jobs.sqlite"
    assert made.catalogue_url == "sqlite:////srv/brim/catalogue.sqlite"


def test_predictors_listen_in_the_data_directory_unless_prediction_is_turned_off():
    made = from_options(data=Path("/srv/brim"), predictors=2, environ={"BRIM_PREDICT_DEADLINE_MS": "500"})

    assert made.predict_sockets == (Path("/srv/brim/predict-0.sock"), Path("/srv/brim/predict-1.sock"))
    assert made.predict_deadline_ms == 500
    assert from_options(data=Path("/srv"), predictors=2, predict_memory=0.0, environ={}).predict_sockets == ()


def test_the_data_directory_is_given_or_of_the_environment_or_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert data_folder(Path("x"), {"BRIM_DATA": "/y"}) == tmp_path / "x"
    assert data_folder(None, {"BRIM_DATA": "/y"}) == Path("/y")
    assert data_folder(None, {}) == tmp_path / "brim-data"


@pytest.mark.parametrize(
    "options",
    [
        {"database": "postgresql://h"},
        {"database": "postgresql://h:port/n"},
        {"database": PASSWORD},
        {"database": "sqlite:///"},
        {"allow_hosts": ("http://x",)},
        {"allow_hosts": ("x:80",)},
        {"allow_hosts": ("*",)},
        {"cluster": "10.0.0.1:6379"},
        {"cluster": "ray://user:secret@host:1"},
        {"environ": {"BRIM_HANG_S": "soon"}},
        {"environ": {"BRIM_MAX_UNFINISHED": "1.5"}},
    ],
)
def test_what_is_no_address_or_number_is_refused_without_the_password(options):
    with pytest.raises(ConfigError) as failure:
        from_options(data=Path("/srv"), **{"environ": {}, **options})

    assert PASSWORD not in str(failure.value)


@pytest.mark.parametrize(
    ("host", "is_loopback", "url"),
    [
        ("127.5.5.5", True, "http://127.5.5.5:8000"),
        ("localhost", True, "http://localhost:8000"),
        ("::1", True, "http://[::1]:8000"),
        ("0.0.0.0", False, "http://127.0.0.1:8000"),
        ("::", False, "http://127.0.0.1:8000"),
        ("10.1.2.3", False, "http://10.1.2.3:8000"),
        ("brim.example", False, "http://brim.example:8000"),
    ],
)
def test_hosts_and_addresses(host, is_loopback, url):
    made = Settings(data=Path("/srv"), host=host, token="a&b", allow_hosts=("Proxy.Example", "fe80::1"))

    assert made.is_loopback == is_loopback
    assert made.url == url
    assert made.entry_url == f"{url}/?token=a%26b"
    assert {"localhost", "127.0.0.1", "[::1]", "proxy.example", "[fe80::1]"} <= made.hosts
    assert not made.hosts & {"0.0.0.0", "::", "[::]", ""}


def test_folders_and_database_files_are_for_the_owner_alone(tmp_path):
    data = tmp_path / "d"
    data.mkdir()
    for name in ("jobs.sqlite", "jobs.sqlite-wal"):  # of a version that let everybody read them
        (data / name).touch(mode=0o644)
    data.chmod(0o755)
    assert "can be read by other users (mode 755)" in open_to_others(data)
    data.chmod(0o700)
    settings = Settings(data=data)

    settings.make_folders()
    upgrade(settings.catalogue_url)

    assert open_to_others(data) is None
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in data.iterdir()}
    assert {"jobs.sqlite", "jobs.sqlite-wal", "catalogue.sqlite", "uploads"} <= modes.keys()
    assert all(mode == (0o700 if (data / name).is_dir() else 0o600) for name, mode in modes.items())


# The token


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path):
    file = tmp_path / "token"
    assert token.find(file, {}) is None
    file.write_text("")  # of a first start that was cut short

    made = token.ensure(file, {})

    assert len(made) >= 40
    assert token.ensure(file, {}) == token.find(file, {}) == made
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    file.chmod(0o644)
    assert token.ensure(file, {}) == made
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_token_of_the_environment_wins_and_is_not_written_down(tmp_path):
    file = tmp_path / "token"
    assert token.ensure(file, {"BRIM_TOKEN": "given"}) == "given"
    assert not file.exists()

    file.write_text("kept\n")
    assert token.find(file, {"BRIM_TOKEN": "given"}) == "given"
    assert token.find(file, {"BRIM_TOKEN": ""}) == "kept"


@pytest.mark.parametrize("given", ["two words", "ümlaut", "x" * 513, "new\nline"])
def test_a_token_that_no_header_can_carry_is_refused(tmp_path, given):
    with pytest.raises(ConfigError) as failure:
        token.ensure(tmp_path / "token", {"BRIM_TOKEN": given})

    assert given not in str(failure.value)


def test_a_token_that_cannot_be_kept_is_said_so(tmp_path):
    (tmp_path / "token").mkdir()
    for file in (tmp_path / "missing" / "token", tmp_path / "token"):
        with pytest.raises(StorageError, match="cannot be"):
            token.ensure(file, {})


def test_secrets_are_compared_whole():
    assert token.session_value("a") == token.session_value("a") != token.session_value("b")
    assert token.equals("abc", "abc")
    assert not [given for given in ("ab", "abcd", "", "ABC", "abc\udcff") if token.equals(given, "abc")]


# What is documented


def test_the_limits_in_the_security_policy_are_those_of_the_code():
    lines = (Path(__file__).parents[2] / "SECURITY.md").read_text().split("## Limits")[1].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][2:]
    units = {"s": 1, "GiB": 1024 * MIB, "MiB": MIB, "KiB": 1024, "million": 1e6}
    for what, default, names in rows:
        found = re.findall(r"(\d+)(?: (\w+))?", default.replace(" 000", "000"))
        sizes = [float(number) * units.get(unit, 1) for number, unit in found]
        for name, size in zip(re.findall(r"BRIM_(\w+)", names), sizes, strict=False):
            known = getattr(Settings(data=Path("/x")), name.lower()) / (1000 if name.endswith("_MS") else 1)
            assert known == pytest.approx(size, rel=0.01), what
    texts = {what: default for what, default, _ in rows}
    for what, module in (("decoding an image", decoders), ("decoding an image of a job", decoding)):
        assert f"{module.PIXEL_BYTES} bytes per pixel" in texts[what]
        assert f"1 s per {module.PIXELS_S / 1e6:g} million".replace(" 1 ", " ") in texts[what]
    assert f"{reader.MEMORY_BYTES // 2**30} GiB, {CALL_S:.0f} s of CPU time" in texts["one call of the reader"]
    assert str(reconcile.MAX_DEATHS) in texts["attempts of a job that ends its worker without progress"]


def test_of_several_patterns_a_whole_name_decides_then_the_longest():
    patterns = role_patterns("*=operator, *@lab.org=viewer, ann@lab.org=administrator, *@guests.lab.org=operator")

    assert [pattern for pattern, _ in patterns] == ["ann@lab.org", "*@guests.lab.org", "*@lab.org", "*"]
