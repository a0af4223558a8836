"""What pages compute by themselves: series over phases, charts, colours by value, and figures as people read them."""

import asyncio
from datetime import UTC, datetime

import pytest

pytest.importorskip("nicegui", reason="the dashboard is an extra")

from brim.service.dashboard import charts, lists, runs, words
from brim.service.dashboard.lists import page_number
from brim.service.dashboard.maps import Scale
from brim.service.dashboard.run import RunMetrics, best, epochs, series

THIN = "\u202f"


# Series


def test_steps_of_a_later_phase_go_on_from_the_one_before():
    lines = [
        {"phase": "encoder-1", "step": 50, "loss": 3.0},
        {"phase": "encoder-1", "step": 60, "val_loss": 2.5},
        {"phase": "classifier-1", "step": 50, "loss": 1.0},
        {"phase": "encoder-2", "step": 5, "loss": None},
        {"phase": "encoder-2", "step": 10, "loss": 0.5},
    ]

    assert series(lines, "loss") == [(50, 3.0), (110, 1.0), (120, 0.5)]
    assert series(lines, "val_loss") == [(60, 2.5)]


class Told:
    """Answers of the API, one after the other."""

    def __init__(self, *answers: dict) -> None:
        self.answers, self.asked = list(answers), []

    async def get(self, path: str, **query: int) -> dict:
        self.asked.append(query)
        return self.answers.pop(0)


def test_metrics_are_read_as_a_whole_once_and_then_only_what_is_new_until_the_run_goes_back():
    told = Told(
        {"lines": [{"step": 1, "loss": 2.0}], "next": 1},
        {"lines": [], "next": 1},
        {"lines": [{"step": 2, "loss": 1.0}], "next": 2},
        {"lines": [], "next": 1},  # to its checkpoint
        {"lines": [{"step": 1, "loss": 2.0}], "next": 1},
    )
    metrics = RunMetrics(told, "/metrics")
    found = [(asyncio.run(metrics.read()), metrics.series("loss")) for _ in range(4)]

    first, both = [(1, 2.0)], [(1, 2.0), (2, 1.0)]
    assert found == [(True, first), (False, first), (True, both), (True, first)]
    assert told.asked == [{"points": 500}, {"after": 1}, {"after": 1}, {"after": 2}, {"points": 500}]


def test_a_run_is_judged_by_what_it_is_about():
    assert best({"ap50": 0.8126, "dice": 0.98765}) == "AP 0.5 0.813"
    assert best({"dice": 0.98765, "best_val_loss": 1.0}) == "Dice 0.988"
    assert best({"scores": {"accuracy": 0.951}}) == "accuracy 95 %"
    assert best({"best_val_loss": 14.43}) == "loss 14.43"
    assert best(None) == "–"
    assert epochs({"summary": {"epoch": 3}, "config": {"epochs": 6}}) == "3 of 6"
    assert epochs({"summary": None, "config": None}) == "–"


def judged(name: str, value: float, id: str = "abcdef0123") -> dict:
    figure = {"name": name, "value": value, "smaller_is_better": name.endswith("_m")}
    about = {
        "state": "ready",
        "tags": ["night"],
        "notes": "first line\nsecond",
        "created_at": "2026-01-31T12:00:00.000Z",
    }
    return {"id": id, "name": "a run", "kind": "rf.train", "quality": figure, **about}


def test_the_best_runs_come_first_whether_small_or_large_is_better():
    rows = [runs._row(judged("median_error_m", value)) for value in (1500.0, 300.0)]
    cells = [runs._row(judged("ap50", value)) for value in (0.5, 0.75)]

    assert [row["quality"] for row in (*rows, *cells)] == [
        "median 1.5 km",
        "median 300 m",
        "AP 0.5 0.500",
        "AP 0.5 0.750",
    ]
    assert sorted(rows, key=lambda row: row["value"]) == rows[::-1]
    assert sorted(cells, key=lambda row: row["value"]) == cells[::-1]
    assert (rows[0]["notes"], runs._row({**judged("ap50", 1.0), "quality": None})["quality"]) == ("first line", "–")
    assert [runs._matches(judged("ap50", 1.0), text) for text in ("NIGHT", "A RUN", "day", "")] == [
        True,
        True,
        False,
        True,
    ]


def test_compared_runs_show_the_settings_that_differ_under_names_that_do():
    configs = [{"epochs": 5, "model": {"hidden": 8, "dim": 4}, "sizes": [1, 2]}, {"epochs": 5, "model": {"hidden": 16}}]

    assert runs.differing(configs) == {"model.hidden": ["8", "16"], "model.dim": ["4", "–"], "sizes": ["1, 2", "–"]}
    assert runs._labels([judged("ap50", 1.0), judged("ap50", 1.0, "fedcba9876")]) == [
        "a run · abcdef",
        "a run · fedcba",
    ]


@pytest.mark.parametrize(
    ("status", "percent", "error", "share", "text"),
    [
        ("running", 25.0, None, 0.25, "5 of 20 · 2 /s · 8.0 s left"),
        ("queued", None, None, None, "5 of 20"),
        ("completed", 25.0, None, 1.0, "20 done"),
        ("failed", 25.0, "no space left", 0.25, "no space left"),
    ],
)
def test_a_row_of_the_list_tells_how_far_a_job_has_come(status, percent, error, share, text):
    progress = {"current": 5, "total": 20, "percent": percent, "rate": 2.0, "eta_s": 8.0, "message": ""}
    job = {"status": status, "kind": "rf.train", "error": error, "created_at": "2026-01-31T12:00:00.000Z"}
    row = lists._job_row({**job, "progress": progress})

    assert (row["share"], row["progress"], row["kind"]) == (share, text, "Train a locator")


# Charts


def test_a_share_is_drawn_from_nothing_to_all_and_a_series_may_have_an_axis_of_its_own():
    options = charts.lines({"busy": [(1, 0.5)], "power": [(1, 400)]}, is_time=True, is_share=True, right=("power", "W"))

    left, right = options["yAxis"]
    assert (left["min"], left["max"]) == (0, 1)
    assert (right["name"], right["position"]) == ("W", "right")
    assert [one["yAxisIndex"] for one in options["series"]] == [0, 1]
    assert options["xAxis"]["type"] == "time"
    assert charts.lines({"loss": [(1, 0.5)]})["series"][0]["showSymbol"], "a single point is seen"


def test_a_band_lies_between_its_low_and_its_high():
    options = charts.band([1, 2], [5, 6], [4, 4], [7, 9], name="images/s", x_name="batch", marks={"chosen": 2})

    middle, low, spread = options["series"]
    assert middle["data"] == [[1, 5], [2, 6]]
    assert [a[1] + b[1] for a, b in zip(low["data"], spread["data"], strict=True)] == [7, 9]
    assert middle["markLine"]["data"] == [{"name": "chosen", "xAxis": 2, "label": {"align": "right"}}]


def test_a_histogram_has_a_step_for_each_count_and_its_axis_grows_as_its_edges_do():
    options = charts.histogram([0, 1, 2], [3, 4], x_name="SNR, dB")

    assert options["series"][0]["data"] == [[0, 3], [1, 4], [2, 0]]
    assert (options["xAxis"]["min"], options["xAxis"]["max"], options["xAxis"]["type"]) == (0, 2, "value")
    assert charts.histogram([1, 10, 100], [3, 4], x_name="m")["xAxis"]["type"] == "log"


def test_colours_go_with_the_logarithm_and_outliers_share_the_last():
    scale = Scale([10.0 ** (k / 50) for k in range(101)] + [1e9, None])

    drawn = [scale.colour(value) for value in (1.0, 10.0, 100.0, 1e9)]
    assert len(set(drawn)) == 3
    assert drawn[2] == drawn[3]
    assert scale.colour(None) == scale.colour(0.0) == "#888888"
    assert Scale([]).colour(5.0)
    assert Scale([3.0]).colour(3.0)


# Words


@pytest.mark.parametrize(
    ("write", "shown"),
    [
        (words.in_bytes, {0: "0 B", 999: "999 B", 1500: "1.5 kB", 999_600: "1.0 MB", 140e9: "140 GB", None: "–"}),
        (
            words.seconds,
            {0.25: "0.2 s", 59.4: "59 s", 125: "2 min 05 s", 7800: "2 h 10 min", 90000: "1 d 1 h", None: "–"},
        ),
        (words.number, {12345: f"12{THIN}345", 0.001234: "0.001234", 1234.56: f"1{THIN}234.6", 3.0: "3", None: "–"}),
        (words.metres, {0.5: "0.5 m", 12.34: "12.3 m", 999.9: "1.0 km", 9999.0: "10 km", None: "–"}),
        (words.share, {0.826: "83 %", 0.0: "0 %", None: "–"}),
        (words.rate, {99.5: "99.5 /s", 1234.4: f"1{THIN}234 /s", None: "–"}),
        (words.when, {"2026-01-31T12:00:05.678Z": "2026-01-31 12:00:05 UTC", None: "–"}),
    ],
)
def test_figures_are_read_easily(write, shown):
    assert {value: write(value) for value in shown} == shown
    assert words.number(True) == "yes"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("peak_bytes", 381157376, ("peak", "381 MB")),
        ("samples_per_s", 1500.0, ("samples", f"1{THIN}500 /s")),
        ("ceiling_share", 0.5, ("ceiling", "50 %")),
        ("acceptance_rate", 0.25, ("acceptance rate", "25 %")),
        ("p95_error_m", 1500.0, ("95 % are below", "1.5 km")),
        ("p50_latency_ms", 12.5, ("p50 latency", "12.5 ms")),
        ("num_samples", 5, ("samples", "5")),
    ],
)
def test_a_value_of_a_result_is_named_and_written_with_its_unit(name, value, shown):
    assert words.figure(name, value) == shown


def test_how_long_ago_and_how_long():
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)

    assert words.ago("2026-01-31T11:59:30.000Z", now) == "just now"
    assert words.ago("2026-01-31T10:30:00.000Z", now) == "1 h ago"
    assert words.elapsed("2026-01-31T10:30:00.000Z", "2026-01-31T10:32:05.000Z") == "2 min 05 s"


@pytest.mark.parametrize(("text", "number"), [("", 1), ("0", 1), ("3", 3), ("-2", 1), ("x", 1), ("9999999", 1)])
def test_a_page_number_of_an_address_is_one(text, number):
    assert page_number(text) == number
