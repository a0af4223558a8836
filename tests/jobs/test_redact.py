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
    text = (
        f"{tmp_path}/datasets/ab is being written; {tmp_path}/datasets/ab/shards/000001.safetensors: checksum differs"
    )

    assert redact(text) == (
        'dataset "night run" is being written; dataset "night run" shards/000001.safetensors: checksum differs'
    )


def test_a_name_that_only_begins_like_a_known_one_is_another_path(redact):
    assert redact("/mnt/xylophone/a is gone") == "(path) is gone"


@pytest.mark.parametrize(
    "text",
    [
        "cannot open /home/ada/x.bin: permission denied",
        'cannot open "/home/ada/my files/x.bin": permission denied',
        "cannot open '/home/ada/x.bin': permission denied",
        "cannot open ~/x.bin: permission denied",
        "cannot open (/home/ada/x.bin), permission denied",
        "cannot open path=/home/ada/x.bin: permission denied",
        "cannot open file:///home/ada/x.bin permission denied",
        r"cannot open C:\Users\ada\x.bin: permission denied",
    ],
)
def test_other_paths_become_a_word(redact, text):
    got = redact(text)

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
        "min_snr_db=3.0 must be below 2; see 5 dB/km",
    ],
)
def test_what_is_no_path_stays(redact, text):
    assert redact(text) == text


def test_addresses_of_databases_lose_user_password_and_host(redact):
    got = redact("cannot reach postgresql://ada:secret@db.example.org:5432/brim today")

    assert got == "cannot reach postgresql://(host) today"


def test_our_host_and_user_go(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "adalovelace")

    assert Redactor({})("gpu7: no GPU for adalovelace on gpu7.example.org") == "(host): no GPU for (user) on (host)"


def test_names_that_are_plain_words_stay(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(getpass, "getuser", lambda: "root")

    assert Redactor({})("the root of 4 on localhost") == "the root of 4 on localhost"


def test_every_text_of_a_value_is_redacted(redact, tmp_path):
    value = {"files": [f"{tmp_path}/a", {"run": "/home/ada"}], "num": 3, "none": None, "share": 0.5}

    assert redact.values(value) == {"files": ["(data) a", {"run": "(path)"}], "num": 3, "none": None, "share": 0.5}
