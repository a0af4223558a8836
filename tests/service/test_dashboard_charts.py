"""Charts and figures from plain numbers."""

import json
from datetime import UTC, datetime

import pytest

pytest.importorskip("nicegui")

from brim.service.dashboard import charts, words


def test_a_share_is_drawn_from_nothing_to_all_and_a_series_may_have_an_axis_of_its_own():
    options = charts.lines({"busy": [(1, 0.5)], "power": [(1, 400)]}, is_time=True, is_share=True, right=("power", "W"))

    left, right = options["yAxis"]
    assert (left["min"], left["max"]) == (0, 1)
    assert (right["name"], right["position"]) == ("W", "right")
    assert [one["yAxisIndex"] for one in options["series"]] == [0, 1]
    assert options["xAxis"]["type"] == "time"


def test_a_single_point_of_a_line_is_seen():
    assert charts.lines({"loss": [(1, 0.5)]})["series"][0]["showSymbol"]
    assert not charts.lines({"loss": [(1, 0.5), (2, None)]})["series"][0]["showSymbol"]


def test_a_band_lies_between_its_low_and_its_high():
    options = charts.band([1, 2], [5, 6], [4, 4], [7, 9], name="images/s", x_name="batch", marks={"chosen": 2})

    middle, low, spread = options["series"]
    assert middle["data"] == [[1, 5], [2, 6]]
    assert [a[1] + b[1] for a, b in zip(low["data"], spread["data"], strict=True)] == [7, 9]
    assert middle["markLine"]["data"] == [{"name": "chosen", "xAxis": 2, "label": {"align": "right"}}]


def test_a_histogram_has_a_step_for_each_count_and_ends_at_nothing():
    options = charts.histogram([0, 1, 2], [3, 4], x_name="SNR, dB")

    assert options["series"][0]["data"] == [[0, 3], [1, 4], [2, 0]]
    assert (options["xAxis"]["min"], options["xAxis"]["max"]) == (0, 2)


def test_the_first_bar_is_on_top():
    options = charts.bars({"source": 0.5, "copy": 0.1}, is_share=True)

    assert options["yAxis"]["data"] == ["copy", "source"]  # from below
    assert options["series"][0]["data"] == [0.1, 0.5]


def test_a_scatter_has_a_legend_only_for_several_groups():
    assert charts.scatter({"a": [(1, 2)], "b": []}, x_name="x", y_name="y")["legend"]["show"]
    assert not charts.scatter({"a": [(1, 2)]}, x_name="x", y_name="y", diagonal=5)["legend"]["show"]


@pytest.mark.parametrize(
    "options",
    [
        charts.lines({"a": [(1, 2)]}, is_share=True),
        charts.band([1], [1], [1], [1], name="a", x_name="x", marks={}),
        charts.histogram([0, 1], [1], x_name="x"),
        charts.bars({}),
        charts.scatter({}, x_name="x", y_name="y"),
    ],
)
def test_what_a_browser_gets_is_json(options):
    assert json.loads(json.dumps(options))["series"] is not None


def test_text_and_axes_follow_light_and_dark():
    theme = charts.THEME

    assert theme["textStyle"]["color"] == theme["legend"]["textStyle"]["color"] == "currentColor"
    for axis in ("value", "log", "time", "category"):
        assert theme[f"{axis}Axis"]["axisLabel"]["color"] == "currentColor"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_600, "1.0 MB"), (140e9, "140 GB"), (None, "–")],
)
def test_bytes(value, shown):
    assert words.in_bytes(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.25, "0.2 s"), (59.4, "59 s"), (125, "2 min 05 s"), (7800, "2 h 10 min"), (90000, "1 d 1 h"), (None, "–")],
)
def test_seconds(value, shown):
    assert words.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(12345, "12\u202f345"), (0.001234, "0.001234"), (True, "yes"), (3.0, "3"), (None, "–")]
)
def test_numbers(value, shown):
    assert words.number(value) == shown


def test_how_long_ago():
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)

    assert words.ago("2026-01-31T11:59:30.000Z", now) == "just now"
    assert words.ago("2026-01-31T10:30:00.000Z", now) == "1 h ago"
    assert words.ago(None) == "–"
