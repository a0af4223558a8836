"""Forms in memory: however a body is cut into pieces, its files and fields are what was sent, and soon."""

import random
import sys
from typing import Any

import pytest

from brim.config import read as read_config
from brim.config import settings
from brim.errors import BrimError, TooLarge
from brim.service.api.body import Unreadable
from brim.service.api.routes.predict import BatchSegmentForm
from brim.service.prediction.channel import view_of
from brim.service.prediction.request import File, FormReader

BOUNDARY = b"a-boundary"


def part(field: str, content: bytes, name: str | None = None) -> bytes:
    file = "" if name is None else f'; filename="{name}"'
    return f'--a-boundary\r\nContent-Disposition: form-data; name="{field}"{file}\r\n\r\n'.encode() + content + b"\r\n"


def data_of(file: File) -> bytes:
    return bytes(view_of(file.data))


def read(body: bytes, pieces: list[int]) -> FormReader:
    form, at = FormReader(BOUNDARY, settings(BatchSegmentForm), ("files", "file"), 3, 3_000_000), 0
    for length in pieces:
        form.feed(body[at : at + length])
        at += length
    form.feed(body[at:])
    form.finish()
    read_config(BatchSegmentForm, form.values, "")
    return form


NEARLY = b"\r\n--a-boundar\r\r\n--a-boundary"[:-1] * 20 + b"\r\n-\r\n--a"  # bytes that look like an end, and are none


@pytest.mark.parametrize("seed", range(30))
def test_pieces_do_not_matter(seed):
    dice = random.Random(seed)
    first, second = dice.randbytes(dice.randrange(5000)), NEARLY + dice.randbytes(100)
    body = part("threshold", b"0.25") + part("files", first, "a.png") + part("model", b"cells")
    body += part("file", second, "b.png") + part("strict", b"TRUE") + b"--a-boundary--\r\n"

    form = read(body, [dice.choice((1, 2, 7, 100, 4096)) for _ in range(200)])

    assert [(file.name, data_of(file)) for file in form.files] == [("a.png", first), ("b.png", second)]
    assert form.values == {"threshold": 0.25, "model": "cells", "strict": True}


@pytest.mark.parametrize("cut", [1, 10, 60, 200])
def test_a_body_without_its_end_is_refused(cut):
    body = part("file", b"x" * 300, "a") + b"--a-boundary--\r\n"

    with pytest.raises(Unreadable):
        read(body[: len(body) - 3 - cut], [])


def test_a_file_may_be_as_large_as_the_limit_and_no_larger():
    end = b"--a-boundary--\r\n"
    assert len(data_of(read(part("file", bytes(3_000_000), "a") + end, []).files[0])) == 3_000_000
    with pytest.raises(TooLarge, match="3000000 bytes"):
        read(part("file", bytes(3_000_001), "a") + end, [])
    with pytest.raises(TooLarge, match="more than 3 files"):
        read(part("file", b"", "a") * 4 + end, [])


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("threshold", ""), ("threshold", "0"), ("threshold", "1"), ("threshold", "inf"), ("threshold", "0,5"),
        ("threshold", "0x1"), ("threshold", "٠.٥"), ("threshold", "1e-999"), ("strict", "1"), ("strict", ""),
        ("deadline_ms", "0"), ("deadline_ms", "600001"), ("deadline_ms", "9" * 5000), ("deadline_ms", "1e3"),
        ("format", "GeoJSON"), ("model", "-x"), ("model", "a b"), ("model", "a" * 101), ("model", "a\n"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_its_name(field, text):
    with pytest.raises(BrimError) as caught:
        read(part("file", b"x", "a") + part(field, text.encode()) + b"--a-boundary--\r\n", [])

    assert caught.value.field == field
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("content", [bytes(2_000_000), b"\r\n--a-boundar" * 150_000, b"\r" * 2_000_000])
def test_two_megabytes_are_read_in_a_few_steps_a_piece_whatever_they_are(content):
    body, num_lines = part("file", content, "a") + b"--a-boundary--\r\n", 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        form = read(body, [65536] * 40)
    finally:
        sys.settrace(before)

    assert data_of(form.files[0]) == content
    assert num_lines < 20_000
