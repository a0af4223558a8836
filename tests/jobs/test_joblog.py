"""A job's own log: appended by workers that may be killed, read by offset."""

import json
import logging

from brim.jobs.worker import joblog
from brim.jobs.worker.joblog import log_file, logging_to, read_log


def write(path, *texts, redact=str):
    with logging_to(path, redact) as log:
        log.setLevel(logging.INFO)
        for text in texts:
            log.info(text)


def test_lines_come_back_in_order_with_their_level_and_time(tmp_path):
    path = log_file(tmp_path, "ab12")

    with logging_to(path):
        logging.getLogger("brim").warning("%d samples", 3)
        logging.getLogger("brim.jobs").error("over")
    logging.getLogger("brim").warning("after the job")

    lines, _ = read_log(path)
    assert [(line["level"], line["text"]) for line in lines] == [("warning", "3 samples"), ("error", "over")]
    assert lines[0]["at"] <= lines[1]["at"]


def test_reading_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, "one", "two", "three")

    first, place = read_log(path, limit=2)
    rest, end = read_log(path, after=place)
    write(path, "four")
    more, _ = read_log(path, after=end)

    assert [line["text"] for line in first + rest + more] == ["one", "two", "three", "four"]


def test_a_job_without_a_log_has_no_lines(tmp_path):
    assert read_log(tmp_path / "none", after=7) == ([], 7)


def test_half_a_line_is_waited_for_and_passed_over_once_another_worker_writes(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, "whole")
    with path.open("a") as file:
        file.write('{"at": 1, "lev')

    lines, place = read_log(path)
    write(path, "next")
    more, _ = read_log(path, after=place)

    assert [line["text"] for line in lines] == ["whole"]
    assert [line["text"] for line in more] == ["next"]


def test_lines_that_nobody_wrote_are_passed_over(tmp_path):
    path = tmp_path / "log.jsonl"
    for at in ("NaN", "1e300", "-1.0", '"x"', "[" * 2000):
        with path.open("a") as file:
            file.write(f'{{"at": {at}, "level": "info", "text": "x"}}\n')
    write(path, "ours")

    assert [line["text"] for line in read_log(path)[0]] == ["ours"]


def test_any_offset_is_safe(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, "one", "two")
    size = path.stat().st_size

    assert [line["text"] for line in read_log(path, after=3)[0]] == ["two"]
    assert read_log(path, after=10 * size) == ([], size)
    assert len(read_log(path, after=-5)[0]) == 2


def test_texts_are_redacted_before_they_reach_the_disk(tmp_path):
    path = tmp_path / "log.jsonl"

    write(path, "cannot read /srv/secret", redact=lambda text: text.replace("/srv/secret", "(path)"))

    assert "secret" not in path.read_text()


def test_a_traceback_is_part_of_the_line(tmp_path):
    path = tmp_path / "log.jsonl"

    with logging_to(path) as log:
        try:
            raise ValueError("odd")
        except ValueError:
            log.exception("it broke")

    text = read_log(path)[0][0]["text"]
    assert text.startswith("it broke\nTraceback")
    assert text.endswith("ValueError: odd")


def test_a_log_that_is_full_takes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(joblog, "MAX_BYTES", 300)
    path = tmp_path / "log.jsonl"

    write(path, *(f"line {index}" for index in range(100)))

    assert path.stat().st_size <= 300
    assert all(json.loads(line) for line in path.read_text().splitlines())
