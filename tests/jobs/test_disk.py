"""Room on the disk, before and while a job runs."""

import pytest

from brim.errors import StorageError
from brim.jobs.worker import disk


@pytest.fixture
def free(tmp_path, monkeypatch):
    """Sets how much is free."""
    file = tmp_path / "free"
    monkeypatch.setenv(disk.FREE_BYTES_FILE, str(file))
    monkeypatch.setenv("BRIM_MIN_FREE_BYTES", "1000")

    def say(num_bytes: int) -> None:
        file.write_text(str(num_bytes))

    return say


def test_a_job_that_would_touch_the_reserve_is_refused_in_words(tmp_path, free):
    free(6000)
    disk.check(tmp_path / "new", 5000)

    free(5999)
    with pytest.raises(StorageError, match=r"about 4\.9 KiB .* 1000 bytes must stay free, but only 5\.9 KiB"):
        disk.check(tmp_path / "new", 5000)


def test_what_an_earlier_attempt_wrote_is_not_needed_again(tmp_path, free):
    (tmp_path / "out" / "shards").mkdir(parents=True)
    (tmp_path / "out" / "shards" / "one").write_bytes(bytes(4000))
    free(2000)

    disk.check(tmp_path / "out", 5000)


def test_a_disk_that_fills_stops_the_job(tmp_path, free):
    free(1000)
    assert disk.watch(tmp_path) is None

    free(999)
    assert "free some space, then resume the job" in str(disk.watch(tmp_path))


def test_the_real_disk_is_asked_also_for_a_folder_to_be(tmp_path):
    assert disk.free_bytes(tmp_path / "not" / "yet") > 0
    assert disk.used_bytes(tmp_path / "not" / "yet") == 0


@pytest.mark.parametrize(
    ("num", "text"), [(7, "7 bytes"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 41, "2.0 TiB")]
)
def test_bytes_are_told_in_units(num, text):
    assert disk.words(num) == text
