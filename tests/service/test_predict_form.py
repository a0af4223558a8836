"""Forms in memory: however a body is cut into pieces, its files and fields are what was sent; and what is kept back."""

import random
import sys
from typing import Any

import pytest
from live_api import BOUNDARY, Part, multipart

from brim.config import read as read_config
from brim.config import settings
from brim.errors import BrimError
from brim.service.api.body import Unreadable
from brim.service.api.routes.predict import BatchSegmentForm
from brim.service.prediction.channel import view_of
from brim.service.prediction.request import Admission, FormReader


def read(body: bytes, pieces: list[int]) -> tuple[list[tuple[str, bytes]], dict[str, Any]]:
    """Files and values."""
    form, at = FormReader(BOUNDARY.encode(), settings(BatchSegmentForm), ("files", "file"), 3, 3_000_000), 0
    for length in pieces:
        form.feed(body[at : at + length])
        at += length
    form.feed(body[at:])
    form.finish()
    read_config(BatchSegmentForm, form.values, "")
    return [(file.name, bytes(view_of(file.data))) for file in form.files], form.values


NEARLY = b"\r\n--a-boundar\r\r\n--a-boundary"[:-1] * 20 + b"\r\n-\r\n--a"  # bytes that look like an end, and are none


@pytest.mark.parametrize("seed", range(4))
def test_pieces_do_not_matter(seed):
    dice = random.Random(seed)
    first, second = dice.randbytes(dice.randrange(5000)), NEARLY + dice.randbytes(100)
    parts: list[Part] = [("threshold", None, b"0.25"), ("files", "a.png", first), ("model", None, b"cells")]
    parts += [("file", "b.png", second), ("strict", None, b"TRUE")]

    files, values = read(multipart(parts), [dice.choice((1, 2, 7, 100, 4096)) for _ in range(200)])

    assert files == [("a.png", first), ("b.png", second)]
    assert values == {"threshold": 0.25, "model": "cells", "strict": True}


@pytest.mark.parametrize("cut", [3, 13, 60, 200])
def test_a_body_without_its_end_is_refused(cut):
    with pytest.raises(Unreadable):
        read(multipart([("file", "a", b"x" * 300)])[:-cut], [])


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("threshold", ""), ("threshold", "0,5"), ("threshold", "0x1"), ("threshold", "٠.٥"), ("strict", "1"),
        ("deadline_ms", "1e3"), ("deadline_ms", "9" * 5000), ("model", "-x"), ("model", "a" * 101), ("model", "a\n"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_such_value_is_refused_by_its_name(field, text):
    with pytest.raises(BrimError) as caught:
        read(multipart([("file", "a", b"x"), (field, None, text.encode())]), [])

    assert caught.value.field == field
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("content", [bytes(2_000_000), b"\r\n--a-boundar" * 150_000, b"\r" * 2_000_000])
def test_two_megabytes_are_read_in_a_few_steps_a_piece_whatever_they_are(content):
    body, num_lines = multipart([("file", "a", content)]), 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        files, _ = read(body, [65536] * 40)
    finally:
        sys.settrace(before)

    assert files == [("a", content)]
    assert num_lines < 20_000


# What an answer takes besides its prediction


def test_what_most_answers_take_is_kept_back_from_the_predictors_time():
    admission = Admission(10, 1000)
    assert admission.predictor_deadline_s(10.0, 0.0) == 10.0

    for milliseconds in range(1, 33):
        admission.note_overhead(milliseconds / 1e3)

    assert admission.predictor_deadline_s(10.0, 0.0) == pytest.approx(10.0 - 0.020)
    for _ in range(32):
        admission.note_overhead(5.0)
    assert admission.predictor_deadline_s(1.2, 1.0) == pytest.approx(1.15), "a quarter at most"
    assert admission.predictor_deadline_s(1.0, 2.0) == 1.0
