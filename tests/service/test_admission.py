"""What an answer takes besides its prediction is kept back from the predictor's time."""

import pytest

from brim.service.prediction.request import Admission


def test_what_most_answers_take_is_kept_back():
    admission = Admission(10, 1000)
    assert admission.predictor_deadline_s(10.0, 0.0) == 10.0

    for milliseconds in range(1, 33):
        admission.note_overhead(milliseconds / 1e3)

    assert admission.predictor_deadline_s(10.0, 0.0) == pytest.approx(10.0 - 0.020)


def test_no_more_than_a_quarter_of_the_time_is_kept_back():
    admission = Admission(10, 1000)
    admission.note_overhead(5.0)  # a stall, which only further answers can correct

    assert admission.predictor_deadline_s(1.2, 1.0) == pytest.approx(1.15)
    assert admission.predictor_deadline_s(1.0, 2.0) == 1.0
