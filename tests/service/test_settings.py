"""What a service is started with, and the token that opens it."""

import stat
from pathlib import Path

import pytest

from brim.errors import ConfigError, StorageError
from brim.service import token
from brim.service.settings import Settings, data_folder, from_options

PASSWORD = "hunter2"


def test_settings_travel_as_json():
    made = from_options(
        data=Path("/srv/brim"),
        host="0.0.0.0",
        port=0,
        database=f"postgresql://u:{PASSWORD}@h:5432/n",
        workers=3,
        allow_hosts=("brim.example", "10.0.0.1"),
        environ={"BRIM_HANG_S": "5", "BRIM_MIN_FREE_BYTES": "7", "BRIM_LOG_LEVEL": "debug"},
    )

    assert Settings.from_json(made.to_json()) == made
    assert (made.hang_s, made.min_free_bytes, made.log_level) == (5.0, 7, "DEBUG")
    assert made.jobs_url == made.catalogue_url == f"postgresql://u:{PASSWORD}@h:5432/n"


def test_secrets_are_not_shown():
    made = Settings(data=Path("/srv"), token="s3cret", database=f"postgresql://u:{PASSWORD}@h/n")

    assert PASSWORD not in repr(made)
    assert "s3cret" not in repr(made)


def test_without_a_database_two_files_of_the_data_directory_are_used():
    made = from_options(data=Path("/srv/brim"), environ={})

    assert made.jobs_url == "sqlite:////srv/brim/jobs.sqlite"
    assert made.catalogue_url == "sqlite:////srv/brim/catalogue.sqlite"


def test_predictors_listen_in_the_data_directory_unless_prediction_is_turned_off():
    environ = {"BRIM_PREDICT_DEADLINE_MS": "500", "BRIM_PREDICT_HANG_S": "2.5"}
    made = from_options(data=Path("/srv/brim"), predictors=2, environ=environ)

    assert made.predict_sockets == (Path("/srv/brim/predict-0.sock"), Path("/srv/brim/predict-1.sock"))
    assert (made.predict_deadline_ms, made.predict_hang_s) == (500, 2.5)
    assert from_options(data=Path("/srv"), predictors=2, predict_memory=0.0, environ={}).predict_sockets == ()


def test_the_data_directory_is_given_or_of_the_environment_or_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert data_folder(Path("x"), {"BRIM_DATA": "/y"}) == tmp_path / "x"
    assert data_folder(None, {"BRIM_DATA": "/y"}) == Path("/y")
    assert data_folder(None, {}) == tmp_path / "brim-data"


@pytest.mark.parametrize(
    "options",
    [
        {"port": 65536},
        {"port": -1},
        {"workers": 0},
        {"database": "mysql://h/n"},
        {"database": "postgresql://h"},
        {"database": "postgresql://h:port/n"},
        {"database": PASSWORD},
        {"database": "sqlite:///"},
        {"allow_hosts": ("http://x",)},
        {"allow_hosts": ("x:80",)},
        {"allow_hosts": ("",)},
        {"allow_hosts": ("*",)},
        {"environ": {"BRIM_HANG_S": "soon"}},
        {"environ": {"BRIM_MAX_UNFINISHED": "1.5"}},
        {"environ": {"BRIM_HANG_S": "0"}},
        {"environ": {"BRIM_HANG_S": "nan"}},
        {"api_processes": 0},
        {"predict_memory": -1.0},
        {"predict_memory": 91.0},
        {"predict_memory": float("nan")},
        {"environ": {"BRIM_PREDICT_DEADLINE_MS": "0"}},
        {"environ": {"BRIM_PREDICT_HANG_S": "soon"}},
    ],
)
def test_what_cannot_be_is_refused_without_the_password(options):
    with pytest.raises(ConfigError) as failure:
        from_options(data=Path("/srv"), **{"environ": {}, **options})

    assert PASSWORD not in str(failure.value)


@pytest.mark.parametrize(
    ("host", "is_loopback", "url"),
    [
        ("127.0.0.1", True, "http://127.0.0.1:8000"),
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


def test_folders_are_for_the_owner_alone(tmp_path):
    Settings(data=tmp_path / "d").make_folders()
    Settings(data=tmp_path / "d").make_folders()

    for folder in (tmp_path / "d", *(tmp_path / "d").iterdir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path):
    file = tmp_path / "token"
    assert not token.is_chosen(file, {})

    made = token.ensure(file, {})

    assert len(made) >= 40
    assert token.ensure(file, {}) == token.find(file, {}) == made
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token.is_chosen(file, {})
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_a_token_of_the_environment_is_not_written_down(tmp_path):
    assert token.ensure(tmp_path / "token", {"BRIM_TOKEN": "given"}) == "given"
    assert not (tmp_path / "token").exists()
    assert token.is_chosen(tmp_path / "token", {"BRIM_TOKEN": "given"})
    assert not token.is_chosen(tmp_path / "token", {"BRIM_TOKEN": ""})


@pytest.mark.parametrize("given", ["two words", "tab\t", "ümlaut", "x" * 513, "new\nline"])
def test_a_token_that_no_header_can_carry_is_refused(tmp_path, given):
    with pytest.raises(ConfigError) as failure:
        token.ensure(tmp_path / "token", {"BRIM_TOKEN": given})

    assert given not in str(failure.value)


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path):
    file = tmp_path / "token"
    file.write_text("known\n")
    file.chmod(0o644)

    assert token.ensure(file, {}) == "known"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_empty_file_of_a_first_start_that_was_cut_short_is_made_again(tmp_path):
    file = tmp_path / "token"
    file.write_text("")

    assert not token.is_chosen(file, {})
    assert token.ensure(file, {}) == file.read_text().strip() != ""


def test_a_token_that_cannot_be_kept_is_said_so(tmp_path):
    with pytest.raises(StorageError, match="cannot be"):
        token.ensure(tmp_path / "missing" / "token", {})
    (tmp_path / "token").mkdir()
    with pytest.raises(StorageError, match="cannot be"):
        token.ensure(tmp_path / "token", {})


def test_the_session_is_of_the_token_and_does_not_tell_it():
    assert token.session_value("a") == token.session_value("a") != token.session_value("b")
    assert token.equals("a", "a")
    assert not token.equals("a\udcff", "a")
