"""What leaves through the API says nothing of this machine."""

import getpass
import socket

import pytest

from brim.jobs.worker.redact import Redactor


@pytest.fixture
def redact(tmp_path):
    known = {tmp_path: "(data)", tmp_path / "datasets" / "ab": 'dataset "night run"', "/mnt/x": 'dataset "birds"'}
    return Redactor(known)


def test_known_directories_become_names(redact, tmp_path):
    text = f"{tmp_path}/datasets/ab is written; {tmp_path}/datasets/ab/shards/000001.safetensors: differs"

    assert redact(text) == 'dataset "night run" is written; dataset "night run" shards/000001.safetensors: differs'
    assert redact("/mnt/xylophone/a is gone") == "(path) is gone"  # another path, which only begins like a known one


@pytest.mark.parametrize(
    "place",
    [
        "/home/ada/x.bin:", '"/home/ada/my files/x.bin":', "'/home/ada/x.bin':", "~/x.bin:", "(/home/ada/x.bin),",
        "path=/home/ada/x.bin:", "file:///home/ada/x.bin", r"C:\Users\ada\x.bin:",
    ],
)  # fmt: skip
def test_other_paths_become_a_word(redact, place):
    got = redact(f"cannot open {place} permission denied")

    assert "(path)" in got
    assert "ada" not in got
    assert "x.bin" not in got
    assert got.endswith("permission denied")


@pytest.mark.parametrize(
    "text",
    [
        "12 samples/s and 3 and/or 4; 1/2 of 10 / 2",
        "use https://docs.python.org/3/library for more",
        'model="hrnet_w18" is not known; did you mean hrnet_w48?',
        "shards/000412.safetensors: checksum differs",
    ],
)
def test_what_is_no_path_stays(redact, text):
    assert redact(text) == text


def test_addresses_of_databases_lose_user_password_and_host(redact):
    got = redact("cannot reach postgresql://ada:secret@db.example.org:5432/brim today")

    assert got == "cannot reach postgresql://(host) today"


@pytest.mark.parametrize(
    ("host", "user", "text", "expected"),
    [
        ("gpu7.example.org", "adal", "gpu7: none for adal on gpu7.example.org", "(host): none for (user) on (host)"),
        ("localhost", "root", "the root of 4 on localhost", "the root of 4 on localhost"),  # plain words
    ],
)
def test_our_host_and_user_go_unless_they_are_plain_words(monkeypatch, host, user, text, expected):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(getpass, "getuser", lambda: user)

    assert Redactor({})(text) == expected


def test_every_text_of_a_value_is_redacted(redact, tmp_path):
    value = {"files": [f"{tmp_path}/a", {"run": "/home/ada"}], "num": 3, "none": None}

    assert redact.values(value) == {"files": ["(data) a", {"run": "(path)"}], "num": 3, "none": None}
