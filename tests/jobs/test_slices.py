"""How a job's time is cut: few records for a long job, quick ones for a short one."""

import pytest

from brim.jobs.worker.run import slice_s


def num_slices(hours: float) -> int:
    spent, count = 0.0, 0
    while spent < hours * 3600:
        spent += slice_s(spent)
        count += 1
    return count


def test_a_job_of_ten_hours_leaves_no_more_than_200_records():
    assert num_slices(10) <= 200


def test_a_job_of_a_week_still_replays_in_seconds():
    assert num_slices(7 * 24) <= 1200  # 600 s each; 1 to 3 ms to replay one


@pytest.mark.parametrize("spent", [0.0, 3.0, 20.0])
def test_the_first_slices_last_a_second(spent):
    assert slice_s(spent) == 1.0


def test_no_slice_is_longer_than_ten_minutes():
    assert slice_s(1e9) == 600.0
