"""What pages compute by themselves: series over phases, colours by value, lengths in words, axes of charts."""

import asyncio

import pytest

pytest.importorskip("nicegui", reason="the dashboard is an extra")

from brim.service.dashboard import charts
from brim.service.dashboard.lists import page_number
from brim.service.dashboard.maps import Scale
from brim.service.dashboard.run import RunMetrics, best, epochs, series
from brim.service.dashboard.words import metres


def test_steps_of_a_later_phase_go_on_from_the_one_before():
    lines = [
        {"phase": "encoder-1", "step": 50, "loss": 3.0},
        {"phase": "encoder-1", "step": 60, "val_loss": 2.5},
        {"phase": "classifier-1", "step": 50, "loss": 1.0},
        {"phase": "encoder-2", "step": 10, "loss": 0.5},
    ]

    assert series(lines, "loss") == [(50, 3.0), (110, 1.0), (120, 0.5)]
    assert series(lines, "val_loss") == [(60, 2.5)]


def test_a_value_that_is_no_number_is_a_gap():
    assert series([{"step": 1, "loss": None}, {"step": 2, "loss": 4.0}], "loss") == [(2, 4.0)]


class Told:
    """Answers of the API, one after the other."""

    def __init__(self, *answers: dict) -> None:
        self.answers, self.asked = list(answers), []

    async def get(self, path: str, **query: int) -> dict:
        self.asked.append(query)
        return self.answers.pop(0)


def test_metrics_are_read_as_a_whole_once_and_then_only_what_is_new():
    told = Told(
        {"lines": [{"step": 1, "loss": 2.0}], "next": 1},
        {"lines": [], "next": 1},
        {"lines": [{"step": 2, "loss": 1.0}], "next": 2},
    )
    metrics = RunMetrics(told, "/metrics")

    news = [asyncio.run(metrics.read()) for _ in range(3)]

    assert news == [True, False, True]
    assert told.asked == [{"points": 500}, {"after": 1}, {"after": 1}]
    assert metrics.series("loss") == [(1, 2.0), (2, 1.0)]


def test_metrics_of_a_run_that_went_back_to_its_checkpoint_are_read_again():
    whole = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 9.0}]
    told = Told({"lines": whole, "next": 2}, {"lines": [], "next": 1}, {"lines": whole[:1], "next": 1})
    metrics = RunMetrics(told, "/metrics")

    asyncio.run(metrics.read())
    asyncio.run(metrics.read())

    assert metrics.lines == whole[:1]


def test_colours_go_with_the_logarithm_and_outliers_share_the_last():
    scale = Scale([10.0 ** (k / 50) for k in range(101)] + [1e9, None])

    drawn = [scale.colour(value) for value in (1.0, 10.0, 100.0, 1e9)]
    assert len(set(drawn)) == 3
    assert drawn[2] == drawn[3]
    assert scale.colour(None) == scale.colour(0.0) == "#888888"
    assert scale.high < 101


def test_a_scale_of_nothing_and_of_one_value_has_colours():
    assert Scale([]).colour(5.0)
    assert Scale([3.0]).colour(3.0)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.5, "0.5 m"), (12.34, "12.3 m"), (999.9, "1.0 km"), (9999.0, "10 km")]
)
def test_lengths_are_read_easily(value, text):
    assert metres(value) == text


def test_edges_that_grow_by_a_factor_have_a_logarithmic_axis():
    assert charts.histogram([1, 10, 100], [3, 4], x_name="m")["xAxis"]["type"] == "log"
    assert charts.histogram([-1, 0, 1], [3, 4], x_name="dB")["xAxis"]["type"] == "value"


@pytest.mark.parametrize(("text", "number"), [("", 1), ("0", 1), ("3", 3), ("-2", 1), ("x", 1), ("9999999", 1)])
def test_a_page_number_of_an_address_is_one(text, number):
    assert page_number(text) == number


def test_a_run_is_judged_by_what_it_is_about():
    assert best({"dice": 0.98765, "best_val_loss": 1.0}) == "Dice 0.988"
    assert best({"scores": {"accuracy": 0.951}}) == "accuracy 95 %"
    assert best({"best_val_loss": 14.43}) == "loss 14.43"
    assert best(None) == "–"
    assert epochs({"summary": {"epoch": 3}, "config": {"epochs": 6}}) == "3 of 6"
    assert epochs({"summary": None, "config": None}) == "–"
