"""A job's own log: appended by workers that may be killed, read by offset."""

import json
import logging

import pytest

from brim.errors import StorageError
from brim.jobs.worker import joblog
from brim.jobs.worker.joblog import log_file, logging_to, read_log


@pytest.fixture
def path(tmp_path):
    return log_file(tmp_path, "ab12")


def write(path, *texts, redact=str):
    with logging_to(path, redact) as log:
        log.setLevel(logging.INFO)
        for text in texts:
            log.info(text)


def texts(path, **place):
    return [line["text"] for line in read_log(path, **place)[0]]


def test_lines_come_back_in_order_with_their_level_and_time(path):
    with logging_to(path) as log:
        logging.getLogger("brim").warning("%d samples", 3)
        try:
            raise ValueError("odd")
        except ValueError:
            log.exception("it broke")
    logging.getLogger("brim").warning("after the job")

    (first, second), _ = read_log(path)
    assert (first["level"], first["text"], second["level"]) == ("warning", "3 samples", "error")
    assert second["text"].startswith("it broke\nTraceback")
    assert second["text"].endswith("ValueError: odd")
    assert first["at"] <= second["at"]


def test_reading_goes_on_where_it_ended_and_any_offset_is_safe(path):
    assert read_log(path, after=7) == ([], 7)  # no log yet
    write(path, "one", "two", "three")

    first, place = read_log(path, limit=2)
    rest, end = read_log(path, after=place)
    write(path, "four")

    assert [line["text"] for line in first + rest] == ["one", "two", "three"]
    assert texts(path, after=end) == ["four"]
    assert texts(path, after=3) == ["two", "three", "four"]
    size = path.stat().st_size
    assert read_log(path, after=10 * size) == ([], size)
    assert len(texts(path, after=-5)) == 4


def test_half_a_line_is_waited_for_and_passed_over_once_another_worker_writes(path):
    write(path, "whole")
    with path.open("a") as file:
        file.write('{"at": 1, "lev')

    lines, place = read_log(path)
    write(path, "next")

    assert [line["text"] for line in lines] == ["whole"]
    assert texts(path, after=place) == ["next"]


def test_lines_that_nobody_wrote_are_passed_over(path):
    write(path)
    for at in ("NaN", "1e300", "-1.0", '"x"', "[" * 2000):
        with path.open("a") as file:
            file.write(f'{{"at": {at}, "level": "info", "text": "x"}}\n')
    write(path, "ours")

    assert texts(path) == ["ours"]


def test_texts_are_redacted_and_cut_before_they_reach_the_disk(path):
    write(path, "a" * 9000, "cannot read /srv/secret", redact=lambda text: text.replace("/srv/secret", "(path)"))

    assert texts(path) == ["a" * 4000, "cannot read (path)"]
    assert "secret" not in path.read_text()


def test_a_log_that_is_full_takes_no_more(path, monkeypatch):
    monkeypatch.setattr(joblog, "MAX_BYTES", 300)

    write(path, *(f"line {index}" for index in range(100)))

    assert path.stat().st_size <= 300
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_log_that_cannot_be_opened_is_an_error_with_the_next_step(path):
    path.mkdir(parents=True)

    with pytest.raises(StorageError, match=r"cannot be opened: Is a directory; .*resume the job"):
        write(path)
